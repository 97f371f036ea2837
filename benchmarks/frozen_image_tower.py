"""What a frozen image tower costs in retrieval and robustness, on the miniature world.

    python benchmarks/frozen_image_tower.py --steps 300 --pairs 1000 --seeds 0 1 2      # minutes a seed
    python benchmarks/frozen_image_tower.py --steps 4 --pairs 20 --seeds 0              # shows that it works

Fine-tunes DeBias from the miniature base with both towers and with the text tower alone (image features computed once, then
read), same data, order and steps, and measures both under the demo's perturbations. Seconds are those of the steps; image
features are computed before the first.
"""

import argparse
import dataclasses
import json
import statistics
import tempfile
import time
from pathlib import Path

from debias_diffusion.config import PRESETS
from debias_diffusion.demo import COLUMNS, Table, measure
from debias_diffusion.training.loop import train

WAYS = {"both towers": "both", "image tower frozen": "text"}


def main() -> None:
    """Prints a markdown table: text-to-image recall@1 in percent, mean (lowest to highest) of the seeds, and seconds."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300, help="fine-tuning steps (default: 300)")
    parser.add_argument("--pairs", type=int, default=1000, help="held-out pairs (default: 1000)")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="of data and order (default: 0 1 2)")
    arguments = parser.parse_args()
    tables: list[Table] = []
    seconds: dict[str, list[float]] = {name: [] for name in WAYS}
    with tempfile.TemporaryDirectory() as folder:
        for seed in arguments.seeds:
            encoders = {}
            for name, towers in WAYS.items():
                run = Path(folder) / f"{towers}-{seed}"
                config = dataclasses.replace(
                    PRESETS["miniature-debias"], seed=seed, max_steps=arguments.steps, train_towers=towers,
                    output=str(run), feature_cache=str(Path(folder) / "features"), log_every=1,
                )  # fmt: skip
                begin = time.perf_counter()
                encoders[name] = str(train(config))
                seconds[name].append(_seconds_of_steps(run, config.batch_size) or time.perf_counter() - begin)
            tables.append(measure(encoders, arguments.pairs))
    shown = [p for p in COLUMNS if p in tables[0][next(iter(WAYS))]]
    print("| | " + " | ".join(COLUMNS[p] for p in shown) + " | seconds of the steps |")
    print("| --- |" + " --- |" * (len(shown) + 1))
    for name in WAYS:
        cells = [_cell([table[name][p]["t2i_recall@1"] for table in tables]) for p in shown]
        print(f"| {name} | {' | '.join(cells)} | {_cell(seconds[name])} |")


def _seconds_of_steps(run: Path, batch: int) -> float:
    """From the run's own record of pairs a second, step by step, the first left out: it warms up."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return sum(batch / line["samples_per_second"] for line in lines[1:])


def _cell(values: list[float]) -> str:
    spread = f" ({min(values):.1f} to {max(values):.1f})" if len(values) > 1 else ""
    return f"{statistics.mean(values):.1f}{spread}"


if __name__ == "__main__":
    main()
