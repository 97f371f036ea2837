"""Figures of results, readable in colour, in greyscale print, by colour-blind eyes, on white and on black."""

import io
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from debias_diffusion.evaluation.attention import AttentionProfile
    from debias_diffusion.evaluation.depth import DepthCurve

_INK = "#010203"  # all lines and letters; in a page they take the colour of its text instead
_GRID = "#808080"
# Okabe and Ito's colours without black, which is the ink's, in an order whose neighbours differ in lightness too.
_COLOURS = ("#0072b2", "#e69f00", "#009e73", "#56b4e9", "#d55e00", "#cc79a7")
# As many as share no factor with the colours, so that a seventh series still looks like no other.
_MARKERS = ("o", "s", "^", "D", "v", "P", "X")
_DASHES = ("-", "--", "-.", ":", (0, (5, 1, 1, 1, 1, 1)))
_HATCHES = ("", "///", "..", "\\\\\\", "xx")
_MAX_SENTENCES = 8
_HEADROOM = 0.08  # of the axis above the highest value: at 100 % marks and whiskers are whole
_RECALL = "t2i_recall@1"
_STYLE: dict[str, Any] = {
    "font.family": "sans-serif",
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlesize": 11,
    "axes.titlelocation": "left",
    "axes.axisbelow": True,
    "hatch.linewidth": 0.6,
    "legend.frameon": False,
    "legend.fontsize": 9,
    "legend.handlelength": 3,
    "svg.fonttype": "none",
    **dict.fromkeys(
        ("text.color", "axes.edgecolor", "axes.labelcolor", "axes.titlecolor", "xtick.color", "ytick.color"), _INK
    ),
}


@dataclass(frozen=True)
class Series:
    """One encoder's numbers: `y` over `x`, or over named groups, with the interval of each where there is one."""

    name: str
    x: Sequence[float | int]
    y: Sequence[float | int]
    intervals: Sequence[Sequence[float]] | None = None
    look: int | None = None
    """Number of its colour and mark, where these are to be the same in every figure; else its place in this one."""


def curve_figure(title: str, x_label: str, y_label: str, series: Sequence[Series], *, every: int = 1) -> "Figure":
    """One curve a series, its interval as a band; every `every`-th point carries a mark."""
    from matplotlib.ticker import MaxNLocator

    with _style():
        figure, axes = _figure(title, width=4.6)
        for number, one in enumerate(series):
            look = number if one.look is None else one.look
            colour, marker, dashes = (row[look % len(row)] for row in (_COLOURS, _MARKERS, _DASHES))
            axes.plot(
                one.x,
                one.y,
                color=colour,
                marker=marker,
                linestyle=dashes,
                linewidth=1.8,
                markersize=5.5,
                markevery=every,
                label=one.name,
            )
            if one.intervals:
                low, high = zip(*one.intervals, strict=True)
                axes.fill_between(one.x, low, high, color=colour, alpha=0.15, linewidth=0)
        axes.set_xlabel(x_label)
        axes.set_ylabel(y_label)
        highest = axes.dataLim.y1
        axes.set_ylim(0, highest * (1 + _HEADROOM) if math.isfinite(highest) and highest > 0 else None)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        _finish(figure, axes, len(series))
    return figure


def bar_figure(title: str, y_label: str, groups: Sequence[str], series: Sequence[Series]) -> "Figure":
    """Bars grouped by `groups`, one a series, its interval as a whisker; NaN leaves a gap."""
    with _style():
        figure, axes = _figure(title, width=max(4.6, 0.22 * len(groups) * (len(series) + 1.2)))
        width = 0.8 / len(series)
        for number, one in enumerate(series):
            places = [group + (number - (len(series) - 1) / 2) * width for group in range(len(groups))]
            errors = None
            if one.intervals:
                errors = [[max(0.0, y - low) for y, (low, _) in zip(one.y, one.intervals, strict=True)],
                          [max(0.0, high - y) for y, (_, high) in zip(one.y, one.intervals, strict=True)]]  # fmt: skip
            colour, hatch = (row[number % len(row)] for row in (_COLOURS, _HATCHES))
            axes.bar(
                places, one.y, width, yerr=errors, color=colour, hatch=hatch, edgecolor=_INK, linewidth=0.6,
                error_kw={"elinewidth": 0.9, "ecolor": _INK, "capsize": 2}, label=one.name,
            )  # fmt: skip
        axes.axhline(0, color=_INK, linewidth=0.8)
        axes.margins(y=_HEADROOM)
        axes.set_ylabel(y_label)
        axes.set_xticks(range(len(groups)), groups)
        if max(map(len, groups)) > 3:
            axes.tick_params(axis="x", labelrotation=35)
            for label in axes.get_xticklabels():
                label.set(horizontalalignment="right", rotation_mode="anchor")
        _finish(figure, axes, len(series))
    return figure


def benchmark_figures(name: str, results: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> dict[str, "Figure"]:
    """The figures of one benchmark by name, from its `results` of a results file: {encoder: {perturbation: row}}.

    `recall`: text-to-image R@1 by perturbation; `drops`: its change from the unchanged caption; `filler`: R@1 against
    the number of filler sentences in front, for each form of it that was asked at two counts or more. A form asked at
    one count is a bar among the other perturbations.
    """
    asked = list(next(iter(results.values())))
    forms: dict[str, dict[int, str]] = {}
    for perturbation in asked:
        if found := _filler(perturbation):
            forms.setdefault(found[0], {})[found[1]] = perturbation
    curves = {form: counts for form, counts in forms.items() if len(counts) > 1}
    drawn = {perturbation for counts in curves.values() for perturbation in counts.values()}
    bars = [perturbation for perturbation in asked if perturbation not in drawn]
    figures = {"recall": bar_figure(f"{name}: text to image", "R@1 (%)", bars, _recalls(results, bars))}
    if changed := [perturbation for perturbation in bars if perturbation != "none"]:
        drops = [
            Series(encoder, range(len(changed)), [rows[c]["drops"][_RECALL]["points"] for c in changed])
            for encoder, rows in results.items()
        ]
        figures["drops"] = bar_figure(f"{name}: change from the unchanged caption", "R@1, points", changed, drops)
    for form, counts in curves.items():
        title = f"{name}: filler before {f'the {form} sentences'.replace('_', ' ') if form else 'the caption'}"
        series = _recalls(results, [counts[k] for k in sorted(counts)], sorted(counts))
        key = f"filler-{form}" if form else "filler"
        figures[key] = curve_figure(title, "filler sentences in front", "text to image R@1 (%)", series)
    return figures


def depth_figure(name: str, curves: Mapping[str, "DepthCurve"]) -> "Figure | None":
    """Text-to-image R@1 against the depth at which each caption's first sentence stands, one curve an encoder.

    None where no depth has queries enough to be drawn (`DepthCurve.min_queries`).
    """
    series = []
    for encoder, curve in curves.items():
        bins = [depth for depth in curve.bins if depth.num_queries >= curve.min_queries]
        middles = [(depth.start + depth.stop) / 2 for depth in bins]
        series.append(Series(encoder, middles, [depth.t2i_recall for depth in bins]))
    if not any(one.x for one in series):
        return None
    return curve_figure(
        f"{name}: depth of the first sentence", "token position of the first sentence", "text to image R@1 (%)", series
    )


def attention_figures(profiles: Mapping[str, "AttentionProfile"]) -> dict[str, "Figure"]:
    """Attention of the pooled token by depth in tokens, mean over layers and last layer; and by sentence, beside the
    share of tokens each sentence has."""

    def curves(values: Mapping[str, Any]) -> list[Series]:
        return [Series(name, p.positions.tolist(), (100 * values[name]).tolist()) for name, p in profiles.items()]

    titles = {"attention": ("mean over layers", "average"), "attention-last": ("last layer", "last_layer")}
    figures = {
        key: curve_figure(f"Attention at EOT, {title}", "token position", "share of attention on text (%)",
                          curves({name: getattr(p, field) for name, p in profiles.items()}), every=10)
        for key, (title, field) in titles.items()
    }  # fmt: skip
    longest = max(profiles.values(), key=lambda profile: len(profile.sentence_counts))
    tokens = longest.sentence_tokens[:_MAX_SENTENCES].tolist()
    shown = range(len(tokens))
    bars = []
    for name, profile in profiles.items():
        shares = profile.by_sentence.mean(0).tolist()  # a shorter context may hold fewer sentences
        bars.append(Series(name, shown, [100 * shares[n] if n < len(shares) else math.nan for n in shown]))
    bars.append(Series("share of tokens", shown, [100 * share for share in tokens]))
    sentences = [str(n + 1) for n in shown]
    figures["attention-sentences"] = bar_figure("Attention at EOT by sentence", "share (%)", sentences, bars)
    return figures


def save_png(figure: "Figure", path: Path) -> Path:
    """Writes the figure for print: black on white, 200 dots an inch."""
    with _style():
        figure.savefig(path, dpi=200, facecolor="white", bbox_inches="tight")
    return path


def to_svg(figure: "Figure", name: str) -> str:
    """The figure as an <svg> element for a page: letters and lines in the colour of the page's text, ids its own."""
    buffer = io.StringIO()
    with _style(**{"svg.hashsalt": name}):
        figure.savefig(
            buffer, format="svg", transparent=True, bbox_inches="tight", metadata={"Date": None, "Creator": None}
        )
    svg = buffer.getvalue()
    svg = svg[svg.index("<svg") :].replace(_INK, "currentColor")
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r'(\bid="|href="#|url\(#)', rf"\g<1>{name}-", svg)  # several figures share a page
    label = figure.axes[0].get_title(loc="left")
    return re.sub(r'^<svg[^>]*viewBox="([^"]*)"[^>]*>', rf'<svg role="img" aria-label="{_escape(label)}" viewBox="\1" '
                  'xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink">', svg)  # fmt: skip


def _recalls(
    results: Mapping[str, Mapping[str, Mapping[str, Any]]], perturbations: Sequence[str], x: Sequence[int] = ()
) -> list[Series]:
    return [
        Series(
            encoder,
            x or range(len(perturbations)),
            [rows[perturbation][_RECALL] for perturbation in perturbations],
            [rows[perturbation]["intervals"][_RECALL] for perturbation in perturbations],
        )
        for encoder, rows in results.items()
    ]


def _filler(perturbation: str) -> tuple[str, int] | None:
    """("first_2", 5) of "first_2_filler_5", ("", 5) of "filler_5", None of anything else."""
    found = re.fullmatch(r"(?:(first_\d+)_)?filler_(\d+)", perturbation)
    return (found[1] or "", int(found[2])) if found else None


def _style(**more: str) -> Any:
    import matplotlib

    settings: Any = {**_STYLE, **more}
    return matplotlib.rc_context(settings)


def _figure(title: str, width: float) -> "tuple[Figure, Axes]":
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, 3.3), layout="constrained")
    axes = figure.add_subplot()
    axes.set_title(title)
    return figure, axes


def _finish(figure: "Figure", axes: "Axes", num_series: int) -> None:
    axes.grid(axis="y", color=_GRID, alpha=0.35, linewidth=0.6)
    if num_series > 1:
        figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=min(3, num_series))


def _escape(text: str) -> str:
    return text.replace("&", "&amp;").replace('"', "&quot;").replace("<", "&lt;")
