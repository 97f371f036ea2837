"""Command-line job: the same prompts and noise through several sets of text encoders, scored by depth in the prompt."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from PIL import Image
from tqdm import tqdm
from tyro.conf import Positional, arg

from debias_diffusion.data.drawings import Drawing, drawing_set, long_set
from debias_diffusion.data.scene_reader import Reading, read_scene
from debias_diffusion.data.scene_sheet import scene_sheet
from debias_diffusion.data.scenes import SIZE
from debias_diffusion.data.text_files import counted
from debias_diffusion.encoders.checkpoint import load_encoder
from debias_diffusion.encoders.encoder import Encoder
from debias_diffusion.encoders.features import image_features
from debias_diffusion.evaluation.coverage import (
    SentenceCoverage,
    compare_coverage,
    coverage_of_features,
    coverage_rows,
)
from debias_diffusion.evaluation.fidelity import (
    Observation,
    compare_fidelity,
    fidelity_rows,
    observe,
    observe_chance,
    told_depths,
)
from debias_diffusion.evaluation.fidelity_report import write_report
from debias_diffusion.evaluation.kept_run import keep_flags, refuse_other_run
from debias_diffusion.evaluation.results import header
from debias_diffusion.sdxl.batches import Job, draw_batches
from debias_diffusion.sdxl.checkpoint_pipeline import load_pipeline
from debias_diffusion.sdxl.devices import find_device, find_precision
from debias_diffusion.sdxl.generate import Settings, compare
from debias_diffusion.sdxl.judge import refuse_tested
from debias_diffusion.sdxl.prompts import PromptLine, read_prompts
from debias_diffusion.sdxl.record import SHEET, read_record, write_png
from debias_diffusion.sdxl.sets import OpenedSet, open_sets, set_names
from debias_diffusion.sdxl.shipped import checkpoint_source

_SHEET_PICTURES = 24
_MOST_SEEDS, _MOST_SCENES = 1_000, 1_000_000
"""Noise set aside for a scene and for a run, so that one with more seeds or scenes goes on from one with fewer."""


def fidelity(
    output: Annotated[Positional[Path], arg(metavar="OUTPUT")],
    checkpoint: str = "miniature",
    sets: tuple[str, ...] = ("stock", "miniature:stretched", "miniature:long-clip", "miniature:debias"),
    scenes: int = 100,
    seeds: int = 4,
    short: bool = False,
    prompts: Path | None = None,
    judge: str | None = None,
    config: Path | None = None,
    steps: int = 25,
    guidance: float = 5.0,
    seed: int = 0,
    batch_size: int = 16,
    device: str | None = None,
    fresh: bool = False,
) -> str:
    """Draws the same prompts and noise with each set of encoders; returns how much of them arrives, by depth in tokens.

    With the miniature, scenes are known, and every described shape is looked for in the picture. With --prompts and
    --judge, for real pictures, an independent encoder judges each sentence. Run again, it goes on where it stopped, and
    from fewer scenes, seeds, prompts or sets to more.

    Args:
        output: Folder for pictures, results.json, table.md, report.html, figures and contact-sheet.png.
        checkpoint: SDXL checkpoint: miniature, a diffusers folder or hub name, or one .safetensors file.
        sets: The checkpoint's own encoders as "stock" (cut at their length) or "chunks" (read in pieces of it), shipped
            ones (miniature:debias), or a folder with slots; NAME=SOURCE gives another name.
        scenes: Held-out scenes of the miniature world.
        seeds: Pictures of each prompt and set.
        short: Scenes whose captions fit 77 tokens, instead of captions of 100 to 200.
        prompts: File of prompts (.txt or .jsonl), in place of scenes.
        judge: Encoder that judges pictures of --prompts; never one that a set draws with.
        config: Folder with the configuration of a one-file checkpoint, where there is no network.
        steps: Denoising steps.
        guidance: How much the prompt is exaggerated.
        seed: Of the scenes and the noise.
        batch_size: Small pictures drawn at a time.
        device: Where to draw; a GPU where there is one.
        fresh: Replaces what other flags have left in OUTPUT.
    """
    if not (2 <= scenes <= _MOST_SCENES and 1 <= seeds <= _MOST_SEEDS and seed >= 0):
        raise ValueError(
            f"scenes is {scenes}, seeds {seeds}, seed {seed}; expected 2 to {_MOST_SCENES:,} scenes, 1 to {_MOST_SEEDS:,} "
            "seeds, and a seed of 0 or more"
        )
    if (prompts is None) != (judge is None):
        raise ValueError(
            "--prompts and --judge belong together: real pictures need both, the miniature's scenes neither"
        )
    lines = read_prompts(prompts) if prompts else []
    sources = set_names(sets)
    place = find_device(device)
    flags: dict[str, Any] = {
        "checkpoint": checkpoint,
        "steps": steps,
        "guidance": guidance,
        "seed": seed,
        "judge": judge,
    }
    kept = flags | {"short": short and not prompts, "device": place.partition(":")[0]}
    growing: dict[str, Any] = {
        "sets": sources,
        "seeds": seeds,
        "scenes": None if prompts else scenes,
        "prompts": _by_number(lines),
    }
    if not fresh:
        refuse_other_run(output, kept, growing)
    base = load_pipeline(checkpoint_source(checkpoint), find_precision(place), None, config)
    opened = open_sets(base.to(place), sources)
    flags |= {"sets": sets, "seeds": seeds, "scenes": growing["scenes"], "prompts": prompts, "config": config}
    about = header("fidelity", [str(output), *(["--short"] if kept["short"] else [])], flags)
    settings = Settings(steps, guidance)
    if judge is not None:
        judging = load_encoder(judge, place)
        refuse_tested(judging, {name: one.pipe for name, one in opened.items()})
        keep_flags(output, kept, growing)
        measured = measure_coverage(opened, judging, lines, range(seed, seed + seeds), output, settings)
        title, said = counted(len(lines), "prompts"), f"judged by {judge}, sentence by sentence."
    else:
        drawings = drawing_set(scenes, seed) if short else long_set(scenes, seed)
        settings = replace(settings, width=SIZE, height=SIZE)
        keep_flags(output, kept, growing)
        measured = measure_scenes(opened, drawings, seeds, output, settings, seed=seed, batch_size=batch_size)
        title = f"{scenes} held-out scenes " + ("within 77 tokens" if short else "of 100 to 200 tokens")
        said = "coloured shapes, 64 pixels wide: what is true of them need not be true of photographs."
    text = f"{counted(seeds, 'pictures')} of each by each set, {counted(steps, 'steps')}, guidance {guidance:g}; {said}"
    shown = write_report(title, [text, *measured.pop("lines", [])], about | measured, output)
    return f"{shown}\n{output}: report.html, table.md, results.json, figures, contact-sheet.png, and the pictures"


def measure_scenes(
    sets: Mapping[str, OpenedSet],
    drawings: Sequence[Drawing],
    seeds: int,
    output: Path,
    settings: Settings,
    *,
    seed: int = 0,
    batch_size: int = 16,
) -> dict[str, Any]:
    """What every set shows of the drawings (see `evaluation.fidelity`), with the pictures and a contact sheet in `output`.

    The noise of a picture depends on the scene's number, the picture's, and `seed`, and is the same for every set.
    """
    depths = [told_depths(drawing, _counter(sets)) for drawing in drawings]
    observed: dict[str, list[Observation]] = {}
    about: dict[str, dict[str, Any]] = {}
    shown: dict[str, list[Path]] = {}
    for name, one in sets.items():
        jobs = [
            Job(drawing.caption, (seed * _MOST_SCENES + i) * _MOST_SEEDS + k, output / name / f"{i:04}-{k}.png")
            for i, drawing in enumerate(drawings)
            for k in range(seeds)
        ]
        draw_batches(one.pipe, jobs, replace(settings, max_length=one.max_length), batch_size=batch_size)
        flat = [read_scene(_open(job.path)) for job in tqdm(jobs, desc=f"reading {name}", unit="picture", disable=None)]
        readings = [flat[start : start + seeds] for start in range(0, len(flat), seeds)]
        observed[name] = observe(readings, drawings, depths)
        chance = fidelity_rows(observe_chance(readings, drawings, depths, seed=seed))
        about[name] = {"rows": fidelity_rows(observed[name]), "chance": chance, **_whole(readings, drawings)}
        shown[name] = [job.path for job in jobs[::seeds]]
    _write_sheet(drawings, shown, output)
    lines = [
        f"{name}: background right in {row['background']:.1f} % of pictures, "
        f"{row['extra']:.2f} shapes a picture where none was told."
        for name, row in about.items()
    ]
    return {"kind": "scenes", "lines": lines, "sets": about, "comparisons": compare_fidelity(observed)}


def measure_coverage(
    sets: Mapping[str, OpenedSet],
    judge: Encoder,
    lines: Sequence[PromptLine],
    seeds: Sequence[int],
    output: Path,
    settings: Settings,
) -> dict[str, Any]:
    """What every set's pictures show of each sentence, by an independent encoder (see `evaluation.coverage`).

    A picture stands beside those of the other prompts by the same set from the same place in the list of seeds, or the
    last that the prompt has. The judge must be none that draws (`refuse_tested`).
    """
    lengths = {name: one.max_length for name, one in sets.items()}
    pipes = {name: one.pipe for name, one in sets.items()}
    drawn = compare(pipes, lines, seeds, output, settings=settings, max_lengths=lengths)
    counts = [1 if line.seed is not None else len(seeds) for line in lines]
    order = {place: row for row, place in enumerate((n, k) for n, count in enumerate(counts) for k in range(count))}
    judged: dict[str, list[tuple[int, SentenceCoverage]]] = {}
    for name, paths in drawn.items():
        features = image_features(judge, map(_open, paths), progress=True).numpy()
        judged[name] = []
        for (number, k), row in order.items():
            prompt = lines[number].prompt
            others = [order[n, min(k, counts[n] - 1)] for n, line in enumerate(lines) if line.prompt != prompt]
            found = coverage_of_features(judge, features[[row, *others]], prompt, num_tokens=_counter(sets))
            judged[name] += [(number, sentence) for sentence in found]
    about = {name: {"rows": coverage_rows(own)} for name, own in judged.items()}
    return {"kind": "coverage", "sets": about, "comparisons": compare_coverage(judged)}


def _counter(sets: Mapping[str, OpenedSet]) -> Callable[[str], int]:
    """Tokens of a text as SDXL's second encoder reads it, SOT and EOT included."""
    tokenizer = next(iter(sets.values())).pipe.tokenizer_2
    return lambda text: len(tokenizer(text, verbose=False).input_ids)


def _by_number(lines: Sequence[PromptLine]) -> dict[str, dict[str, Any]]:
    """What each line says, without what it leaves open."""
    return {str(i): {k: v for k, v in vars(line).items() if v is not None} for i, line in enumerate(lines)}


def _open(path: Path) -> Image.Image:
    with Image.open(path) as picture:
        return picture.convert("RGB")


def _whole(readings: Sequence[Sequence[Reading]], drawings: Sequence[Drawing]) -> dict[str, float]:
    """The share of pictures with the right background, and shapes a picture where the scene has none."""
    pairs = [(reading, drawing.scene) for own, drawing in zip(readings, drawings, strict=True) for reading in own]
    places = {scene: {thing.place for thing in scene.things} for _, scene in pairs}
    extra = [sum(thing.place not in places[scene] for thing in reading.things) for reading, scene in pairs]
    right = [reading.background == scene.background for reading, scene in pairs]
    return {"background": 100 * float(np.mean(right)), "extra": float(np.mean(extra))}


def _write_sheet(drawings: Sequence[Drawing], first: Mapping[str, Sequence[Path]], output: Path) -> None:
    """contact-sheet.png: the first scenes beside their first picture of each set."""
    scenes = [drawing.scene for drawing in drawings[:_SHEET_PICTURES]]
    pictures = {name: [_open(path) for path in paths[: len(scenes)]] for name, paths in first.items()}
    read_record(output / SHEET)  # refuses somebody's own picture
    record = {"contact_sheet": [[path.name for path in paths[: len(scenes)]] for paths in first.values()]}
    write_png(scene_sheet(scenes, pictures), output / SHEET, record)
