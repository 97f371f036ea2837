"""The demo's table over several seeds: mean and range of text-to-image recall@1, and what each encoder loses.

for s in 0 1 2; do debias-diffusion demo --seed $s --output runs/seed$s; done
python benchmarks/demo_seeds.py runs/seed0 runs/seed1 runs/seed2
"""

import json
import sys
from collections.abc import Sequence
from pathlib import Path

from debias_diffusion.demo import COLUMNS, Table

LOST = ("move_first_to_4", "remove_first")
METRIC = "t2i_recall@1"


def main(folders: list[str]) -> None:
    """Prints Markdown tables and the ratio of losses."""
    if not folders:
        sys.exit(__doc__)
    runs = [json.loads((Path(folder) / "results.json").read_text()) for folder in folders]
    print("\n".join([f"Text-to-image recall@1 in percent, {over(len(runs))}", "", *recall_table(runs), ""]))
    print("\n".join(["What is lost of it, in points", "", *lost_table(runs), "", *ratio_lines(runs)]))


def over(seeds: int) -> str:
    """What the cells of a table over so many seeds hold."""
    return f"mean (lowest to highest) of {seeds} seeds" if seeds > 1 else "one seed"


def recall_table(runs: Sequence[Table]) -> list[str]:
    """Markdown lines: each encoder's recall under each perturbation, one `Table` of the demo a seed."""
    rows = {
        encoder: [cell([run[encoder][name][METRIC] for run in runs]) for name in COLUMNS if name in runs[0][encoder]]
        for encoder in runs[0]
    }
    return markdown(list(COLUMNS.values()), rows)


def lost_table(runs: Sequence[Table]) -> list[str]:
    """Markdown lines: the points that each encoder's recall loses under each perturbation, against the full caption."""
    names = [name for name in COLUMNS if name != "none"]
    rows = {
        encoder: [cell([lost(run[encoder], name) for run in runs]) for name in names if name in runs[0][encoder]]
        for encoder in runs[0]
    }
    return markdown([COLUMNS[name] for name in names], rows)


def ratio_lines(runs: Sequence[Table]) -> list[str]:
    """A line for each perturbation that moves or removes the summary: DeBias's loss as a share of Long-CLIP's."""
    lines = []
    for name in LOST:
        losses = [(lost(run["debias"], name), lost(run["long-clip"], name)) for run in runs]
        if all(theirs > 0 for _, theirs in losses):
            times = cell([ours / theirs for ours, theirs in losses], 2)
            lines.append(f"{COLUMNS[name]}: DeBias loses {times} times what Long-CLIP loses")
        else:
            lines.append(f"{COLUMNS[name]}: Long-CLIP loses nothing with some seed, so there is no ratio")
    return lines


def lost(row: dict[str, dict[str, float]], perturbation: str) -> float:
    """The points that an encoder's recall loses under a perturbation."""
    return row["none"][METRIC] - row[perturbation][METRIC]


def markdown(columns: Sequence[str], rows: dict[str, list[str]]) -> list[str]:
    """Markdown lines of a table whose first column names its rows."""
    head = ["| | " + " | ".join(columns) + " |", "| --- |" + " --- |" * len(columns)]
    return [*head, *(f"| {name} | {' | '.join(cells)} |" for name, cells in rows.items())]


def cell(values: Sequence[float], digits: int = 1) -> str:
    """The mean, and where they differ the lowest and highest.

    >>> cell([1, 2, 6])
    '3.0 (1.0 to 6.0)'
    """
    mean = sum(values) / len(values)
    if max(values) == min(values):
        return f"{mean:.{digits}f}"
    return f"{mean:.{digits}f} ({min(values):.{digits}f} to {max(values):.{digits}f})"


if __name__ == "__main__":
    main(sys.argv[1:])
