"""What a frozen image tower costs in retrieval and robustness, on the miniature world.

    python benchmarks/frozen_image_tower.py                       # three seeds, reckoned at 8 minutes each, 2 GB
    python benchmarks/frozen_image_tower.py --small --seeds 0     # seconds: shows that it works, says nothing of the cost

Fine-tunes DeBias from the miniature base with both towers and with the text tower alone (image features computed once, then
read), same data, order and steps, and measures both under the demo's perturbations. Seconds are those of the steps; image
features are computed before the first. Every seed starts anew; its rows are printed, and written with those before it to
results/frozen_image_tower.md and .json beside this file, as soon as they are known.
"""

import argparse
import dataclasses
import json
import tempfile
import time
from pathlib import Path

import torch
from demo_seeds import METRIC, cell
from recorded import RESULTS, keep, machine_line, record
from timing import peak_bytes

from debias_diffusion.config import PRESETS
from debias_diffusion.demo import COLUMNS, Table, measure
from debias_diffusion.training.loop import train

WAYS = {"both towers": "both", "image tower frozen": "text"}


def main() -> None:
    """Prints and writes Markdown: text-to-image recall@1 in percent, mean (lowest to highest) of the seeds, and seconds."""
    arguments = _arguments()
    torch.set_num_threads(arguments.threads)
    machine, begin = machine_line(arguments.threads), time.perf_counter()
    tables: list[Table] = []
    seconds: dict[str, list[float]] = {name: [] for name in WAYS}
    lines: list[str] = []
    with tempfile.TemporaryDirectory() as folder:
        output = arguments.output or (Path(folder) if arguments.small else RESULTS)
        for seed in arguments.seeds:
            encoders = {}
            for name, towers in WAYS.items():
                encoders[name], taken = _trained(Path(folder), seed, towers, arguments.steps)
                seconds[name].append(taken)
            tables.append(measure(encoders, arguments.pairs))
            own = _rows(tables[-1:], {name: taken[-1:] for name, taken in seconds.items()}, f", seed {seed}")
            print("\n".join(own if lines else [*_head(tables), *own]), flush=True)
            done = arguments.seeds[: len(tables)]
            said = (
                f"Seeds {', '.join(map(str, done))}, mean (lowest to highest); text-to-image recall@1 in percent, "
                f"{arguments.pairs:,} held-out pairs, {arguments.steps} steps. "
                f"{(time.perf_counter() - begin) / 60:.1f} minutes; peak memory {peak_bytes() / 1e9:.1f} GB."
            )
            lines = [*_head(tables), *_rows(tables, seconds), "", said, ""]
            found = record(machine, lines, {"seeds": done, "tables": tables, "seconds": seconds})
            keep(
                output, "frozen_image_tower", "What a frozen image tower costs on the miniature world", {"table": found}
            )
    print("\n".join(["", *lines]), flush=True)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300, help="fine-tuning steps (default: 300)")
    parser.add_argument("--pairs", type=int, default=1000, help="held-out pairs (default: 1000)")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="of data and order (default: 0 1 2)")
    parser.add_argument("--threads", type=int, default=2, help="torch threads (default: 2)")
    parser.add_argument("--small", action="store_true", help="4 steps, 20 pairs; kept only with --output")
    parser.add_argument("--output", type=Path, help="folder of the table (default: results beside this)")
    arguments = parser.parse_args()
    if arguments.small:
        arguments.steps, arguments.pairs = 4, 20
    return arguments


def _trained(folder: Path, seed: int, towers: str, steps: int) -> tuple[str, float]:
    """The folder of the encoder of a run of its own, and the seconds of its steps."""
    run = folder / f"{towers}-{seed}"
    config = dataclasses.replace(
        PRESETS["miniature-debias"], seed=seed, max_steps=steps, train_towers=towers,
        output=str(run), feature_cache=str(folder / "features"), log_every=1,
    )  # fmt: skip
    begin = time.perf_counter()
    encoder = str(train(config))
    return encoder, _seconds_of_steps(run, config.batch_size) or time.perf_counter() - begin


def _seconds_of_steps(run: Path, batch: int) -> float:
    """From the run's own record of pairs a second, step by step, the first left out: it warms up."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return sum(batch / line["samples_per_second"] for line in lines[1:])


def _shown(tables: list[Table]) -> list[str]:
    return [p for p in COLUMNS if p in tables[0][next(iter(WAYS))]]


def _head(tables: list[Table]) -> list[str]:
    shown = _shown(tables)
    return [
        "| | " + " | ".join(COLUMNS[p] for p in shown) + " | seconds of the steps |",
        "| --- |" + " --- |" * (len(shown) + 1),
    ]


def _rows(tables: list[Table], seconds: dict[str, list[float]], of: str = "") -> list[str]:
    rows = []
    for name in WAYS:
        cells = [cell([table[name][p][METRIC] for table in tables]) for p in _shown(tables)]
        rows.append(f"| {name}{of} | {' | '.join(cells)} | {cell(seconds[name])} |")
    return rows


if __name__ == "__main__":
    main()
