"""The demo's table for each family of encoders: Long-CLIP and DeBias from a small CLIP and from a small SigLIP.

    python benchmarks/families_seeds.py                                                # both families, three seeds: hours
    python benchmarks/families_seeds.py --families miniature-siglip --seeds 0
    python benchmarks/families_seeds.py --steps 2 --pairs 20 --seeds 0 --results /tmp    # shows that it works

Same pictures, captions, order, steps and optimiser for all; each family has its own loss and stretch. Every finished
encoder's numbers are kept in --output: the same command goes on where it was. Writes families_seeds.md and .json.
"""

import argparse
import json
import sys
from pathlib import Path

from demo_seeds import lost_table, over, ratio_lines, recall_table
from kept_runs import LENGTH, Job, KeptRuns

from debias_diffusion.demo import RECIPES, Table
from debias_diffusion.encoders.positions import natural_rule
from debias_diffusion.evaluation.page import write_whole

RESULTS = Path(__file__).resolve().parent / "results"


def main() -> None:
    """Prints and writes the tables."""
    parser = arguments_of(__doc__ or "", "families_seeds")
    parser.add_argument(
        "--families", nargs="+", default=["miniature", "miniature-siglip"], help="rows, or encoders to start from"
    )
    arguments = parser.parse_args()
    families = {name: opened(name, arguments) for name in arguments.families}
    jobs = {name: jobs_of(runs, arguments.steps, arguments.seeds) for name, runs in families.items()}
    seconds = {name: runs.expected_seconds(list(jobs[name].values())) for name, runs in families.items()}
    print(f"about {sum(seconds.values()) / 60:.0f} minutes on one core", flush=True)
    tables: dict[str, list[Table]] = {}
    for name, runs in families.items():
        row = {key: runs.numbers(job) for key, job in jobs[name].items()}
        tables[name] = [
            {"base": row["base"], "stretched": row["stretched"], **{r: row[f"{r} {seed}"] for r in RECIPES}}
            for seed in arguments.seeds
        ]
        write(tables, families, arguments)
    print((arguments.results / "families_seeds.md").read_text())


def arguments_of(description: str, name: str) -> argparse.ArgumentParser:
    """The flags that the benchmarks of kept runs share."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="of data and order (default: 0 1 2)")
    parser.add_argument("--steps", type=int, default=300, help="fine-tuning steps (default: 300)")
    parser.add_argument("--pairs", type=int, default=1000, help="held-out pairs (default: 1000)")
    parser.add_argument("--output", type=Path, default=Path("runs/families"), help="what is kept between calls")
    parser.add_argument("--results", type=Path, default=RESULTS, help=f"folder of {name}.md and .json")
    return parser


def opened(source: str, arguments: argparse.Namespace) -> KeptRuns:
    """The kept runs that start from `source`; a base that is not there, or is none, ends the benchmark with one line."""
    try:
        return KeptRuns(source, arguments.output, arguments.pairs)
    except (OSError, ValueError) as error:
        sys.exit(f"{Path(sys.argv[0]).name}: {error}")


def jobs_of(runs: KeptRuns, steps: int, seeds: list[int]) -> dict[str, Job]:
    """The base, the base stretched, and each recipe with each seed, by their names in the tables."""
    rule = natural_rule(runs.encoder.model.text)
    tuned = {f"{r} {seed}": Job(LENGTH, rule, r, seed, steps) for seed in seeds for r in RECIPES}
    return {"base": Job(), "stretched": Job(LENGTH, rule), **tuned}


def write(tables: dict[str, list[Table]], families: dict[str, KeptRuns], arguments: argparse.Namespace) -> None:
    """Writes what is known so far as Markdown and JSON."""
    lines = [
        "# The cure in each family, on the miniature world",
        "",
        f"`{' '.join(['python', 'benchmarks/families_seeds.py', *sys.argv[1:]])}`: {arguments.steps} steps of 64 pairs, "
        f"{arguments.pairs:,} held-out pairs, {over(len(arguments.seeds))} from one base each. Coloured shapes, 64 pixels "
        "wide: no number here says anything about photographs.",
    ]
    for name, runs in tables.items():
        start = families[name].encoder
        lines += [
            "",
            f"## {name}: {start.context_length} tokens, {start.loss} loss",
            "",
            *["Text-to-image recall@1 in percent:", "", *recall_table(runs), ""],
            *["What is lost of it against the full caption, in points:", "", *lost_table(runs), ""],
            *[f"- {line}" for line in ratio_lines(runs)],
        ]
    write_whole(arguments.results / "families_seeds.md", "\n".join(lines) + "\n")
    figures = {"steps": arguments.steps, "pairs": arguments.pairs, "seeds": arguments.seeds, "tables": tables}
    write_whole(arguments.results / "families_seeds.json", json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
