"""The demo's table over several seeds: mean and range of text-to-image recall@1, and what each encoder loses.

for s in 0 1 2; do debias-diffusion demo --seed $s --output runs/seed$s; done
python benchmarks/demo_seeds.py runs/seed0 runs/seed1 runs/seed2
"""

import json
import sys
from pathlib import Path

from debias_diffusion.demo import COLUMNS

LOST = ("move_first_to_4", "remove_first")


def main(folders: list[str]) -> None:
    """Prints a Markdown table and the ratio of losses."""
    if not folders:
        sys.exit(__doc__)
    runs = [json.loads((Path(folder) / "results.json").read_text()) for folder in folders]
    print(f"Text-to-image recall@1 in percent, mean (lowest to highest) of {len(runs)} seeds\n")
    print("| | " + " | ".join(COLUMNS.values()) + " |\n| --- |" + " --- |" * len(COLUMNS))
    for encoder in runs[0]:
        cells = [_cell([run[encoder][name]["t2i_recall@1"] for run in runs]) for name in COLUMNS]
        print(f"| {encoder} | " + " | ".join(cells) + " |")
    print()
    for name in LOST:
        ratios = [_lost(run, "debias", name) / _lost(run, "long-clip", name) for run in runs]
        print(f"{COLUMNS[name]}: DeBias loses {_cell(ratios, 2)} times what Long-CLIP loses")


def _lost(run: dict[str, dict[str, dict[str, float]]], encoder: str, perturbation: str) -> float:
    return run[encoder]["none"]["t2i_recall@1"] - run[encoder][perturbation]["t2i_recall@1"]


def _cell(values: list[float], digits: int = 1) -> str:
    mean = sum(values) / len(values)
    if max(values) == min(values):
        return f"{mean:.{digits}f}"
    return f"{mean:.{digits}f} ({min(values):.{digits}f} to {max(values):.{digits}f})"


if __name__ == "__main__":
    main(sys.argv[1:])
