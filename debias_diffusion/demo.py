"""The main job, whole, on the miniature world: train Long-CLIP and DeBias from one base, measure both, draw the figure."""

import dataclasses
import importlib.util
import json
import logging
import shutil
import time
from collections.abc import Sequence
from pathlib import Path

from debias_diffusion.config import PRESETS, TrainConfig
from debias_diffusion.encoders.checkpoint import CONFIG_FILE, load_encoder, refuse_foreign_folder, save_encoder
from debias_diffusion.evaluation.runner import evaluate_encoder

PERTURBATIONS = (
    "none",
    "move_first_to_4",
    "swap_1_4",
    "remove_first",
    "filler_1",
    "filler_4",
    "filler_8",
    "last_3",
    "short",
)
COLUMNS = {
    "none": "full caption",
    "move_first_to_4": "s1 moved to 4th",
    "swap_1_4": "s1, s4 swapped",
    "remove_first": "s1 removed",
    "filler_1": "1 filler in front",
    "filler_4": "4 fillers",
    "filler_8": "8 fillers",
    "last_3": "last 3 sentences",
    "short": "short caption",
}
RECIPES = ("long-clip", "debias")
PRESET = {"softmax": "miniature-{}", "sigmoid": "miniature-siglip-{}"}
"""The preset of a recipe, by the loss that the base was trained with."""

APP = "debias-diffusion demo --app"
"""The command that shows the same encoders in pictures."""

Table = dict[str, dict[str, dict[str, float]]]
"""encoder -> perturbation -> metric -> percent"""


def demo(
    output: Path = Path("runs/demo"),
    base: str = "miniature:base",
    seed: int = 0,
    pairs: int = 1000,
    steps: int = 0,
    fresh: bool = False,
    app: bool = False,
) -> str:
    """Trains, measures and compares on the miniature world, on this machine, in minutes.

    From one small base CLIP that reads 77 tokens, two 248-token encoders are fine-tuned on the same pictures and
    captions, as Long-CLIP and as DeBias-CLIP; then all four read held-out captions whose summary sentence was moved,
    removed or pushed back.

    Args:
        output: Folder of the run: results.json, table.md, figure.png, and one encoder folder each.
        base: Encoder to start from, such as miniature-siglip:base for the other family.
        seed: Seed of the training data, their order and augmentation; the test set stays the same.
        pairs: Held-out pairs that are measured on.
        steps: Fine-tuning steps instead of the preset's; 0 keeps it.
        fresh: Trains again even where a finished encoder lies in the folder.
        app: Trains nothing and opens the app instead: one prompt drawn with different text encoders, in a browser.
    """
    if app:
        return open_app()
    started = time.perf_counter()
    if pairs < 2:
        raise ValueError(f"pairs is {pairs}; ranking needs 2 or more")
    if steps < 0:
        raise ValueError(f"steps is {steps}; expected 1 or more, or 0 for the preset's")
    for name in ("base", "stretched", *RECIPES):
        refuse_foreign_folder(output / name)
        if Path(base).resolve() == (output / name).resolve():
            raise ValueError(f"the base {base} lies where this run writes its own encoders; name another --output")
    folders = {"base": base, "stretched": str(output / "stretched")}
    encoder = load_encoder(base)
    save_encoder(encoder, output / "base")
    save_encoder(encoder.stretched(PRESETS["miniature-debias"].context_length), output / "stretched")
    for name in RECIPES:
        preset = PRESETS[PRESET[encoder.loss].format(name)]
        config = dataclasses.replace(preset, encoder=base, seed=seed, max_steps=steps or preset.max_steps)
        config = dataclasses.replace(config, output=str(output / "training" / name))
        folders[name] = str(fine_tune(config, output / name, fresh))
    table = measure(folders, pairs)
    seconds = time.perf_counter() - started
    text = write_results(table, output)
    return (
        f"\nt2i / i2t recall@1 in percent, {pairs:,} held-out pairs of the miniature world, seed {seed}\n\n{text}\n"
        f"\nWhat the table cannot show is real-world quality: these are coloured shapes, 64 pixels wide.\n"
        f"{output}/results.json, table.md, figure.png and the encoder folders; {seconds / 60:.1f} minutes\n"
        f"\nIn pictures, side by side in a browser: {APP}  (or: python -m apps.compare)"
    )


def open_app() -> str:
    """Serves the comparison app of the shipped miniature until it is interrupted; nothing is left to say then.

    Raises ModuleNotFoundError that names what to install.
    """
    for name in ("gradio", "diffusers"):
        if importlib.util.find_spec(name) is None:
            raise ModuleNotFoundError(f"the app needs {name}: pip install 'debias-diffusion[app]'")
    from apps.compare import compare

    compare()
    return ""


def fine_tune(config: TrainConfig, folder: Path, fresh: bool = False) -> Path:
    """The folder of the encoder that `config` trains, `folder`: trained, resumed, or as an earlier call has left it.

    What was left is taken only where its settings were these; `fresh` takes nothing.
    """
    from debias_diffusion.training.loop import train

    run = Path(config.output)
    known = not fresh and _is_of_same_settings(run, config)
    if known and (folder / CONFIG_FILE).is_file():
        logging.getLogger(__name__).warning("%s is already trained; --fresh trains it again", folder)
        return folder
    if not known or not any((run / "checkpoints").glob("step-*")):
        shutil.rmtree(run, ignore_errors=True)
    trained = train(dataclasses.replace(config, resume=run.is_dir()))
    shutil.rmtree(folder, ignore_errors=True)
    trained.rename(folder)
    return folder


def _is_of_same_settings(run: Path, config: TrainConfig) -> bool:
    if not (run / "config.json").is_file():
        return False
    before = TrainConfig.from_json((run / "config.json").read_text())
    return dataclasses.replace(before, resume=False) == config


def measure(sources: dict[str, str], pairs: int, perturbations: Sequence[str] = PERTURBATIONS) -> Table:
    """Recall@1 both ways of each named source under each perturbation, on the miniature world's test set."""
    from debias_diffusion.data.scene_sets import scene_retrieval_set

    retrieval_set = scene_retrieval_set(pairs)
    table: Table = {}
    for name, source in sources.items():
        results = evaluate_encoder(load_encoder(source), retrieval_set, list(perturbations), progress=True)
        table[name] = {
            perturbation: {metric: result.metrics[metric] for metric in ("t2i_recall@1", "i2t_recall@1")}
            for perturbation, result in results.items()
        }
    return table


def write_results(table: Table, output: Path) -> str:
    """Writes results.json, table.md and figure.png; returns the table as Markdown."""
    from debias_diffusion.evaluation.figures import Series, bar_figure, save_png
    from debias_diffusion.evaluation.page import write_whole

    write_whole(output / "results.json", json.dumps(table, indent=2) + "\n")
    shown = [p for p in COLUMNS if p in next(iter(table.values()))]
    lines = ["| | " + " | ".join(COLUMNS[p] for p in shown) + " |", "| --- |" + " --- |" * len(shown)]
    for name, row in table.items():
        cells = [f"{row[p]['t2i_recall@1']:.1f} / {row[p]['i2t_recall@1']:.1f}" for p in shown]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    text = "\n".join(lines)
    write_whole(output / "table.md", text + "\n")
    places = range(len(shown))
    series = [Series(name, places, [row[p]["t2i_recall@1"] for p in shown]) for name, row in table.items()]
    title = "Miniature world: what is left when the summary sentence moves or goes"
    figure = bar_figure(title, "text-to-image recall@1, %", [COLUMNS[p] for p in shown], series)
    save_png(figure, output / "figure.png")
    return text
