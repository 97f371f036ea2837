"""Fidelity and coverage in tables and figures, from their results."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from debias_diffusion.evaluation import coverage, fidelity
from debias_diffusion.evaluation.fidelity import BINS, WHOLE
from debias_diffusion.evaluation.figures import Series, curve_figure, save_png, to_svg
from debias_diffusion.evaluation.page import Section, Table, to_html, to_markdown, write_whole

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_LABELS = {
    "scenes": {name: measure.label for name, measure in fidelity.MEASURES.items()},
    "coverage": coverage.MEASURES,
}
_MAIN = {"scenes": fidelity.MAIN, "coverage": ("margin", "won")}
_NOTES = {
    "scenes": "Percent of described things, by the tokens up to the end of the sentence that tells them, SOT and EOT "
    "counted; 95 % intervals over scenes. Chance: the same pictures against the captions of other scenes.",
    "coverage": "Means over sentences, by the tokens up to the end of the sentence, SOT and EOT counted; 95 % intervals "
    "over prompts. A picture that was drawn without the sentence has a margin of 0 and beats 50 %.",
}
_UNITS = {"scenes": "described things (%)", "coverage": "mean over sentences"}


def write_report(title: str, lines: Sequence[str], content: Mapping[str, Any], output: Path) -> str:
    """Writes results.json, table.md, report.html and a figure a main measure; returns the tables for a terminal.

    `content` holds `kind` ("scenes" or "coverage"), `sets`, {name: {"rows", and "chance" for scenes}}, `comparisons`, and
    whatever else results.json is to say.
    """
    write_whole(output / "results.json", json.dumps(content, indent=1, allow_nan=False) + "\n")
    pictures = []
    for name, figure in depth_figures(content["kind"], content["sets"]).items():
        png = save_png(figure, output / f"{name.replace('_', '-')}.png")
        pictures.append((png.name, to_svg(figure, png.stem)))
    section = Section(title, lines, depth_tables(content), pictures)
    write_whole(output / "table.md", to_markdown("Fidelity by depth in the prompt", [section]))
    write_whole(output / "report.html", to_html("Fidelity by depth in the prompt", [section]))
    return to_markdown("", [section], details=False)


def depth_tables(content: Mapping[str, Any]) -> list[Table]:
    """Main measures by depth, differences of the sets over what 77 tokens hold and what not, then the details."""
    kind, sets, comparisons = content["kind"], content["sets"], content["comparisons"]
    measures = [name for name in _LABELS[kind] if any(name in row["measures"] for _, row in _rows(sets))]
    main = [name for name in _MAIN[kind] if name in measures] or measures
    tables = [_depth_table(kind, sets, name) for name in main]
    if comparisons:
        tables.append(_difference_table(kind, comparisons, WHOLE, is_detail=False))
    tables.append(_measure_table(kind, sets, measures))
    if comparisons:
        tables.append(_difference_table(kind, comparisons, BINS, is_detail=True))
    return tables


def depth_figures(kind: str, sets: Mapping[str, Any]) -> dict[str, "Figure"]:
    """Each main measure against depth, one curve a set, and one for chance (the mean over the sets) where it was measured.

    A curve stands at the mean depth of what a bin holds; with fewer than two bins there is nothing to draw.
    """
    figures = {}
    for name in _MAIN[kind]:
        curves = [_series(label, about["rows"], name) for label, about in sets.items()]
        if any(len(curve.x) < 2 for curve in curves):
            continue
        chances = [_series("chance", about["chance"], name) for about in sets.values() if "chance" in about]
        if chances:
            curves.append(Series("chance", chances[0].x, np.mean([chance.y for chance in chances], axis=0).tolist()))
        figure = curve_figure(_title(kind, name), "depth in the prompt (tokens)", _UNITS[kind], curves)
        lowest = min(low for curve in curves for low, _ in curve.intervals or [(0, 0)])
        if lowest < 0:  # a margin can be
            figure.axes[0].set_ylim(bottom=1.1 * lowest)
        figures[name] = figure
    return figures


def _rows(sets: Mapping[str, Any]) -> list[tuple[str, Mapping[str, Any]]]:
    """A name and a row for each row of each set and, after it, of its chance level."""
    return [
        (f"{name}{suffix}", row)
        for name, about in sets.items()
        for suffix, key in (("", "rows"), (": chance", "chance"))
        for row in about.get(key, ())
    ]


def _series(label: str, rows: Sequence[Mapping[str, Any]], measure: str) -> Series:
    chosen = [row for row in rows if (row["first"], row["last"]) in BINS and measure in row["measures"]]
    values = [row["measures"][measure] for row in chosen]
    intervals = [(value["low"], value["high"]) for value in values]
    return Series(label, [row["depth"] for row in chosen], [value["value"] for value in values], intervals)


def _depth_table(kind: str, sets: Mapping[str, Any], measure: str) -> Table:
    lines: dict[str, dict[str, str]] = {}
    for name, row in _rows(sets):
        lines.setdefault(name, {})[_span(row)] = _cell(row["measures"].get(measure))
    spans = [span for span in map(_span, _SPANS) if any(span in cells for cells in lines.values())]
    body = [(name, *(cells.get(span, "") for span in spans)) for name, cells in lines.items()]
    return Table(_title(kind, measure), ("tokens", *spans), body, _NOTES[kind])


def _measure_table(kind: str, sets: Mapping[str, Any], measures: Sequence[str]) -> Table:
    rows = [
        (f"{name}, {_span(row)}", *(_cell(row["measures"].get(measure)) for measure in measures))
        for name, row in _rows(sets)
        if (row["first"], row["last"]) in WHOLE
    ]
    header = ("set, tokens", *(_LABELS[kind][measure] for measure in measures))
    return Table("All measures", header, rows, is_detail=True)


def _difference_table(
    kind: str, comparisons: Sequence[Mapping[str, Any]], bins: Sequence[tuple[int, int]], *, is_detail: bool
) -> Table:
    rows = [
        (
            f"{row['b']} - {row['a']}",
            _span(row),
            _LABELS[kind][row["measure"]],
            f"{row['difference']:+.1f} [{row['low']:+.1f}, {row['high']:+.1f}]",
            f"{row['p_value']:.2g}" if "p_value" in row else "",
        )
        for row in comparisons
        if (row["first"], row["last"]) in bins
    ]
    note = (
        "On the same prompts and noise; an interval that holds 0 shows no difference. One p-value in twenty is below "
    )
    note += "0.05 by luck alone."
    header = ("sets", "tokens", "measure", "difference", "p")
    return Table("Differences by depth" if is_detail else "Differences", header, rows, note, is_detail)


def _title(kind: str, measure: str) -> str:
    label = _LABELS[kind][measure]
    return label[0].upper() + label[1:]


_SPANS = [{"first": first, "last": last} for first, last in (*BINS, *WHOLE)]


def _span(row: Mapping[str, Any]) -> str:
    return f"{row['first']}-{row['last']}"


def _cell(value: Mapping[str, float] | None) -> str:
    return f"{value['value']:.1f} [{value['low']:.1f}, {value['high']:.1f}]" if value else ""
