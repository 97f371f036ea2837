"""Fidelity and coverage in tables and figures, from their results."""

import base64
import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from PIL import Image

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
_COUNTED = {"scenes": ("observations", "number of things"), "coverage": ("sentences", "number of sentences")}
_LEAST = 5
"""Things a bin must hold to be shown: what fewer say is mostly luck. results.json holds all."""
_TOO_FEW = f"fewer than {_LEAST}"
_LOOKS = {"stock": 0, "stretched": 1, "long-clip": 2, "debias": 3, "chance": 4}
"""Colours by name, so that a set looks the same in every report; others take what follows, in their order."""
SHEET = "contact-sheet.png"


def write_report(title: str, lines: Sequence[str], content: Mapping[str, Any], output: Path) -> str:
    """Writes results.json, table.md, report.html and a figure a main measure; returns the tables for a terminal.

    The page holds a small copy of the contact sheet where `output` has one.
    `content` holds `kind` ("scenes" or "coverage"), `sets`, {name: {"rows", and "chance" for scenes}}, `comparisons`, and
    whatever else results.json is to say.
    """
    write_whole(output / "results.json", json.dumps(content, indent=1, allow_nan=False) + "\n")
    pictures = []
    for name, figure in depth_figures(content["kind"], content["sets"]).items():
        png = save_png(figure, output / f"{name.replace('_', '-')}.png")
        pictures.append((png.name, to_svg(figure, png.stem)))
    sheets = [(SHEET, _embedded(output / SHEET))] if (output / SHEET).is_file() else []
    section = Section(title, lines, depth_tables(content), pictures, sheets)
    write_whole(output / "table.md", to_markdown("Fidelity by depth in the prompt", [section]))
    write_whole(output / "report.html", to_html("Fidelity by depth in the prompt", [section]))
    return to_markdown("", [section], details=False)


def depth_tables(content: Mapping[str, Any]) -> list[Table]:
    """Main measures by depth, differences of the sets over what 77 tokens hold and what not, then the details."""
    kind, sets, comparisons = content["kind"], content["sets"], content["comparisons"]
    measures = [name for name in _LABELS[kind] if any(name in row["measures"] for _, row in _rows(sets))]
    main = [name for name in _MAIN[kind] if name in measures] or measures
    counts = _counts(kind, sets)
    tables = [_depth_table(kind, sets, name, counts) for name in main]
    enough = [span for span, count in counts.items() if count >= _LEAST]
    shown = [row for row in comparisons if _span(row) in enough]
    if shown:
        tables.append(_difference_table(kind, shown, WHOLE, is_detail=False))
    tables.append(_measure_table(kind, sets, measures, counts))
    if shown:
        tables.append(_difference_table(kind, shown, BINS, is_detail=True))
    return [table for table in tables if table.rows]


def depth_figures(kind: str, sets: Mapping[str, Any]) -> dict[str, "Figure"]:
    """Each main measure against depth, one curve a set, and one for chance (the mean over the sets) where it was measured.

    A curve stands at the mean depth of what a bin holds; with fewer than two bins there is nothing to draw. Bins of fewer
    than five things are left out.
    """
    figures = {}
    bins = [span for span, count in _counts(kind, sets).items() if count >= _LEAST]
    others = {label: len(_LOOKS) + i for i, label in enumerate(label for label in sets if label not in _LOOKS)}
    for name in _MAIN[kind]:
        curves = [
            _series(label, about["rows"], name, bins, {**others, **_LOOKS}[label]) for label, about in sets.items()
        ]
        if any(len(curve.x) < 2 for curve in curves):
            continue
        chances = [
            _series("chance", about["chance"], name, bins, _LOOKS["chance"])
            for about in sets.values()
            if "chance" in about
        ]
        if chances:
            mean = np.mean([chance.y for chance in chances], axis=0).tolist()
            curves.append(replace(chances[0], y=mean, intervals=None))
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


def _counts(kind: str, sets: Mapping[str, Any]) -> dict[str, int]:
    """How many things or sentences each span holds, the same for all sets; the whole is left out where it is the first 77."""
    key, rows = _COUNTED[kind][0], next(iter(sets.values()))["rows"]
    counts = {_span(row): int(row[key]) for row in rows}
    first, deep, whole = (_span({"first": first, "last": last}) for first, last in WHOLE)
    if first in counts and deep not in counts:
        counts.pop(whole, None)
    return counts


def _series(label: str, rows: Sequence[Mapping[str, Any]], measure: str, spans: Sequence[str], look: int) -> Series:
    chosen = [
        row
        for row in rows
        if (row["first"], row["last"]) in BINS and _span(row) in spans and measure in row["measures"]
    ]
    values = [row["measures"][measure] for row in chosen]
    intervals = [(value["low"], value["high"]) for value in values]
    return Series(label, [row["depth"] for row in chosen], [value["value"] for value in values], intervals, look)


def _depth_table(kind: str, sets: Mapping[str, Any], measure: str, counts: Mapping[str, int]) -> Table:
    lines: dict[str, dict[str, str]] = {}
    for name, row in _rows(sets):
        if (span := _span(row)) in counts:
            lines.setdefault(name, {})[span] = (
                _cell(row["measures"].get(measure)) if counts[span] >= _LEAST else _TOO_FEW
            )
    spans = [span for span in map(_span, _SPANS) if span in counts]
    body = [(name, *(cells.get(span, "") for span in spans)) for name, cells in lines.items()]
    body.append((_COUNTED[kind][1], *(f"{counts[span]:,}" for span in spans)))
    return Table(_title(kind, measure), ("tokens", *spans), body, _NOTES[kind])


def _measure_table(kind: str, sets: Mapping[str, Any], measures: Sequence[str], counts: Mapping[str, int]) -> Table:
    rows = [
        (f"{name}, {_span(row)}", *(_cell(row["measures"].get(measure)) for measure in measures))
        for name, row in _rows(sets)
        if (row["first"], row["last"]) in WHOLE and counts.get(_span(row), 0) >= _LEAST
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


def _embedded(sheet: Path) -> str:
    """The contact sheet as an <img> element that needs no file: as a JPEG, no wider than a page shows."""
    with Image.open(sheet) as picture:
        small = picture.convert("RGB")
    small.thumbnail((1400, 1 << 16))
    file = io.BytesIO()
    small.save(file, "JPEG", quality=88)
    data = base64.b64encode(file.getvalue()).decode("ascii")
    return f'<img alt="Contact sheet: the pictures of each set side by side" src="data:image/jpeg;base64,{data}">'
