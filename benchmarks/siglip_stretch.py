"""How a SigLIP's position table should grow: each stretch before any training and after DeBias fine-tuning.

    python benchmarks/siglip_stretch.py                              # one seed: about an hour
    python benchmarks/siglip_stretch.py --steps 0                    # before training alone: minutes
    python benchmarks/siglip_stretch.py --steps 2 --pairs 20 --results /tmp

Before training: what short captions, which the base read well, lose by the longer row alone: the cosine with the base's own
feature, and recall. After it: the demo's numbers. Runs are kept in --output, those of families_seeds.py among them. Writes
siglip_stretch.md and .json.
"""

import json
import sys

from demo_seeds import METRIC, cell, markdown, over
from families_seeds import arguments_of, opened
from kept_runs import Job, KeptRuns, Row

from debias_diffusion import text_features
from debias_diffusion.data.scene_sets import scene_retrieval_set
from debias_diffusion.demo import COLUMNS
from debias_diffusion.evaluation.page import write_whole

STRETCHES = (Job(196, "ratio"), Job(196, "ends"), Job(248, "ends"))
SHOWN = ("none", "move_first_to_4", "remove_first", "filler_8", "short")


def main() -> None:
    """Prints and writes the tables."""
    parser = arguments_of(__doc__ or "", "siglip_stretch")
    parser.add_argument("--base", default="miniature-siglip", help="a row, or an encoder to start from")
    parser.set_defaults(seeds=[0])
    arguments = parser.parse_args()
    runs = opened(arguments.base, arguments)
    seeds = arguments.seeds if arguments.steps else []
    tuned = {job: [Job(job.length, job.rule, "debias", seed, arguments.steps) for seed in seeds] for job in STRETCHES}
    seconds = runs.expected_seconds([Job(), *STRETCHES, *(job for jobs in tuned.values() for job in jobs)])
    print(f"about {seconds / 60:.0f} minutes on one core", flush=True)
    untuned = {job: runs.numbers(job) for job in (Job(), *STRETCHES)}
    cosines = {job: short_cosines(runs, job) for job in STRETCHES}
    after: dict[Job, list[Row]] = {job: [runs.numbers(one) for one in jobs] for job, jobs in tuned.items()}
    lines = [
        "# How SigLIP's position table grows, on the miniature world",
        "",
        f"`{' '.join(['python', 'benchmarks/siglip_stretch.py', *sys.argv[1:]])}`: {arguments.pairs:,} held-out pairs, recall@1 "
        "text to image in percent; the cosine is that of a short caption's feature with the base's own.",
        "",
        "## Before training",
        "",
        *before_table(runs, untuned, cosines),
    ]
    if seeds:
        columns = [COLUMNS[name] for name in SHOWN]
        rows = {title(job): [cell([r[name][METRIC] for r in after[job]]) for name in SHOWN] for job in STRETCHES}
        lines += ["", f"## After {arguments.steps} steps of DeBias, {over(len(seeds))}", "", *markdown(columns, rows)]
    write_whole(arguments.results / "siglip_stretch.md", "\n".join(lines) + "\n")
    figures = {
        "before": {title(job): row for job, row in untuned.items()},
        "cosine": {title(job): dict(zip(("mean", "lowest"), both, strict=True)) for job, both in cosines.items()},
        "after": {title(job): rows_ for job, rows_ in after.items()},
        **{name: getattr(arguments, name) for name in ("steps", "pairs", "seeds")},
    }
    write_whole(arguments.results / "siglip_stretch.json", json.dumps(figures, indent=1) + "\n")
    print("\n".join(lines))


def title(job: Job) -> str:
    """A stretch as people read it."""
    return f"{job.length} by {job.rule}" if job.length else "base"


def short_cosines(runs: KeptRuns, job: Job) -> tuple[float, float]:
    """Mean and lowest cosine between the stretched and the base's features of the test set's short captions."""
    short = scene_retrieval_set(runs.pairs).short_captions
    grown = runs.encoder.stretched(job.length, rule=job.rule)
    cosines = (text_features(grown, short) * text_features(runs.encoder, short)).sum(-1)
    return cosines.mean().item(), cosines.min().item()


def before_table(runs: KeptRuns, untuned: dict[Job, Row], cosines: dict[Job, tuple[float, float]]) -> list[str]:
    """Markdown lines: what the base and each stretch cut of the long captions, the cosines, and recall."""
    lengths = [len(runs.encoder.tokenizer.encode(caption)) for caption in scene_retrieval_set(runs.pairs).captions]
    rows = {}
    for job, row in untuned.items():
        cut = sum(length > (job.length or runs.encoder.context_length) for length in lengths) / len(lengths)
        mean, lowest = cosines.get(job, (1.0, 1.0))
        recalls = (f"{row[name][METRIC]:.1f}" for name in SHOWN)
        rows[title(job)] = [f"{100 * cut:.0f}", f"{mean:.3f}", f"{lowest:.3f}", *recalls]
    return markdown(["captions cut, %", "cosine, mean", "cosine, lowest", *(COLUMNS[name] for name in SHOWN)], rows)


if __name__ == "__main__":
    main()
