"""A results file in words and tables: recalls, their certainty, encoders against each other and published rows."""

from collections.abc import Mapping, Sequence
from typing import Any

from debias_diffusion.captions.perturb import parse_perturbation
from debias_diffusion.data.text_files import counted
from debias_diffusion.evaluation.page import Section, Table
from debias_diffusion.evaluation.published import published_rows, why_incomplete

_MINIATURE = (
    "The miniature world is drawn: coloured shapes and templated captions. It shows how encoders differ where "
    "everything is known, and says nothing about photographs."
)


def benchmark_section(name: str, benchmark: Mapping[str, Any], figures: Sequence[tuple[str, str]] = ()) -> Section:
    """One benchmark of a results file: recalls, what they mean beside each other, and published rows."""
    counts, results = benchmark["counts"], benchmark["results"]
    seen = ", ".join(counted(value, key.replace("_", " ")) for key, value in counts.items() if value)
    lines = [benchmark["protocol"], *_part_warning(name, counts), seen]
    lines += [f"Left out: {reason}" for reason in benchmark["unreadable"][:3]]
    lines += [_MINIATURE] if name == "miniature" else []
    ours = {encoder: rows["none"] for encoder, rows in results.items()}
    tables = [
        _recall_table(results),
        *published_tables(name, counts, ours),
        _full_table(results),
        *_comparison_tables(benchmark["comparisons"]),
        _rule_table(results),
    ]
    return Section(name, lines, tables, figures)


def encoder_section(content: Mapping[str, Any]) -> Section:
    """Which encoders were measured, with what, and how to do it again."""
    versions = ", ".join(f"{name} {number}" for name, number in content["versions"].items())
    rows = [
        (
            name,
            str(encoder["source"]),
            str(encoder["context_length"]),
            " / ".join(digest[:8] for digest in encoder["weights_hash"].values()),
            "; ".join(f"{key}: {value}" for key, value in encoder["history"].items()),
        )
        for name, encoder in content["encoders"].items()
    ]
    return Section(
        "Encoders",
        [f"Made by `{content['command']}` on {content['date']}, seed {content['seed']}.", versions],
        [Table("", ("encoder", "source", "context", "weights (image / text)", "history"), rows, num_brief=4)],
    )


def attention_section(content: Mapping[str, Any], figures: Sequence[tuple[str, str]] = ()) -> Section:
    """Where encoders look: one row each."""
    rows = [
        (
            name,
            f"{100 * row['first_sentence_share']:.1f}",
            f"{100 * row['first_sentence_tokens']:.1f}",
            f"{row['first_sentence_share'] / row['first_sentence_tokens']:.2f}",
            _score(row["worst_recall"]),
            _score(row["spread"]),
            f"{row['captions_cut']} of {row['captions']}",
        )
        for name, row in content["encoders"].items()
    ]
    header = (
        "encoder",
        "attention on sentence 1, %",
        "its tokens, %",
        "ratio",
        "T2I R@1 at worst depth",
        "spread",
        "cut",
    )
    note = (
        "Attention of the EOT token to text, mean over layers and heads; a ratio of 1 is an encoder without bias. "
        "Depth: where the first sentence stands; spread: points of R@1 between best and worst."
    )
    lines = [content["protocol"], *_part_warning(content["benchmark"], content["counts"])]
    lines.append(f"Made by `{content['command']}` on {content['date']}.")
    unknown = [name for name, row in content["encoders"].items() if row["worst_recall"] is None]
    if unknown:
        lines.append(
            f"Too few captions for a worst depth of {', '.join(unknown)}: a depth counts, and is drawn, where "
            f"{content['encoders'][unknown[0]]['min_queries']} queries or more have it. Measure a larger set; "
            "attention.json has every depth."
        )
    return Section("Attention and depth", lines, [Table("", header, rows, note)], figures)


def zero_shot_section(dataset: str, results: Mapping[str, Mapping[str, Any]]) -> Section:
    """Zero-shot accuracy: one row an encoder."""
    rows = [
        (name, f"{row['top1']:.2f}", f"{row['top5']:.2f}", f"{row['pictures']:,}", str(row["bad_pictures"]))
        for name, row in results.items()
    ]
    first = next(iter(results.values()))
    lines = [f"{counted(first['classes'], 'classes')}, each name in {counted(first['prompts'], 'prompts')}."]
    return Section(f"Zero-shot: {dataset}", lines, [Table("", ("encoder", "top-1", "top-5", "pictures", "bad"), rows)])


def published_tables(name: str, counts: Mapping[str, int], ours: Mapping[str, Mapping[str, Any]]) -> list[Table]:
    """Published rows beside `ours` ({encoder: its unperturbed row}), and apart from them, a table for each reason why
    not, those of other protocols."""
    by_reason: dict[str, list[tuple[str, ...]]] = {}
    for row, why in published_rows(name, counts):
        by_reason.setdefault(why, []).append((row.model, _score(row.t2i), _score(row.i2t), row.source))
    header = ("model", "T2I R@1", "I2T R@1", "source")
    tables = []
    if same := by_reason.pop("", []):
        measured = [
            (encoder, _score(row["t2i_recall@1"]), _score(row["i2t_recall@1"]), "this run")
            for encoder, row in ours.items()
        ]
        tables.append(Table("Published on the same protocol", header, [*measured, *same]))
    for why, rows in by_reason.items():
        title = f"Published under this name, NOT comparable with this run: {why}"
        tables.append(Table(title, header, rows, is_detail=True))
    return tables


def _part_warning(name: str, counts: Mapping[str, int]) -> list[str]:
    """The line that goes below a protocol which promises more than was measured."""
    part = why_incomplete(name, counts)
    return [f"WARNING: this is a part of the benchmark, and a part is easier. The protocol is {part}."] if part else []


def _recall_table(results: Mapping[str, Any]) -> Table:
    header = ["perturbation"]
    for encoder in results:
        header += [f"{encoder} T2I", f"{encoder} I2T"] if len(results) > 1 else ["T2I", "I2T"]
    rows = []
    for name in _perturbations(results):
        row = [name]
        for of_encoder in results.values():
            for metric in ("t2i_recall@1", "i2t_recall@1"):
                row.append(_recall(of_encoder[name], metric, name) if name in of_encoder else "-")
        rows.append(row)
    return Table("R@1 in percent (points from the unchanged caption)", header, rows)


def _recall(row: Mapping[str, Any], metric: str, perturbation: str) -> str:
    change = "" if perturbation == "none" else f" ({row['drops'][metric]['points']:+.1f})"
    return f"{row[metric]:.1f}{change}"


def _perturbations(results: Mapping[str, Any]) -> list[str]:
    return list(dict.fromkeys(name for of_encoder in results.values() for name in of_encoder))


def _full_table(results: Mapping[str, Any]) -> Table:
    header = ["encoder", "perturbation"]
    for way in ("T2I", "I2T"):
        header += [f"{way} R@1", "95% interval", "change, %", "R@5", "R@10", "mean rank", "median"]
    rows = []
    for encoder, of_encoder in results.items():
        for name, row in of_encoder.items():
            cells = [encoder, name]
            for way in ("t2i", "i2t"):
                low, high = row["intervals"][f"{way}_recall@1"]
                percent = row["drops"][f"{way}_recall@1"]["percent"]
                cells += [f"{row[f'{way}_recall@1']:.2f}", f"{low:.1f} to {high:.1f}"]
                cells += ["-" if name == "none" or percent is None else f"{percent:+.1f}"]
                cells += [f"{row[f'{way}_recall@{k}']:.2f}" for k in (5, 10)]
                cells += [f"{row[f'{way}_mean_rank']:.1f}", f"{row[f'{way}_median_rank']:g}"]
            rows.append([*cells, str(row["truncated"])])
    note = "Intervals are bootstrapped over pictures. Cut: captions that did not fit the encoder's context."
    return Table("Every metric", [*header, "cut"], rows, note, is_detail=True)


def _comparison_tables(comparisons: Sequence[Mapping[str, Any]]) -> list[Table]:
    if not comparisons:
        return []
    rows = [
        (
            f"{row['b']} over {row['a']}",
            row["perturbation"],
            row["metric"],
            f"{row['difference']:+.2f}",
            f"{row['low']:+.1f} to {row['high']:+.1f}",
            f"{row['p_value']:.2g}",
            f"{row['only_b']:.0f} / {row['only_a']:.0f}",
        )
        for row in comparisons
    ]
    header = ("encoders", "perturbation", "metric", "points", "95% interval", "p", "only one hits")
    note = "Paired on the same queries. P-values are of each test alone, not corrected for their number."
    return [Table("Encoder against encoder", header, rows, note, is_detail=True)]


def _rule_table(results: Mapping[str, Any]) -> Table:
    rows = [(name, parse_perturbation(name).rule) for name in _perturbations(results)]
    return Table("What the perturbations do", ("perturbation", "rule"), rows, is_detail=True)


def _score(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}"
