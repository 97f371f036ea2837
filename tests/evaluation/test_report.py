"""Reports say what the numbers are, mix no protocols, and need nothing but themselves."""

import json
import re
from collections import Counter
from html.parser import HTMLParser
from itertools import pairwise
from xml.etree import ElementTree

import pytest
from matplotlib.colors import to_rgb

from debias_diffusion.data.benchmarks import BENCHMARKS
from debias_diffusion.evaluation.depth import DepthBin, DepthCurve
from debias_diffusion.evaluation.figures import (
    Series,
    bar_figure,
    benchmark_figures,
    curve_figure,
    depth_figure,
    save_png,
    to_svg,
)
from debias_diffusion.evaluation.page import Section, Table, to_html, to_markdown, write_whole
from debias_diffusion.evaluation.published import COMPLETE, PROTOCOLS, PUBLISHED, published_rows
from debias_diffusion.evaluation.report import benchmark_section, published_tables
from debias_diffusion.evaluation.results import read_results
from debias_diffusion.evaluation.runner import RECALLS

VOID = {"meta", "br", "hr", "img", "link"}
NASTY = '<b onclick="x">&|'


def complete(benchmark: str) -> dict[str, int]:
    return dict(zip(("images", "captions"), COMPLETE[benchmark], strict=True))


def row(recall: float, points: float = 0.0) -> dict[str, object]:
    """A row as `Result.to_row` gives it."""
    metrics = {metric: recall for metric in RECALLS}
    ranks = {f"{way}_{kind}_rank": 2.5 for way in ("t2i", "i2t") for kind in ("mean", "median")}
    drops = {metric: {"points": points, "percent": None} for metric in RECALLS}
    intervals = {metric: [recall - 1.5, recall + 1.5] for metric in RECALLS}
    return {**metrics, **ranks, "intervals": intervals, "drops": drops, "truncated": 3}


def benchmark(**encoders: dict[str, object]) -> dict[str, object]:
    comparison = {"a": "one", "b": "two", "perturbation": "none", "metric": "t2i_recall@1", "difference": 1.25,
                  "low": -0.5, "high": 3.0, "p_value": 0.0321, "only_a": 2.0, "only_b": 5.0}  # fmt: skip
    return {"protocol": "a protocol", "counts": complete("docci"), "unreadable": ["x.jpg: broken"],
            "results": encoders, "comparisons": [comparison]}  # fmt: skip


# published numbers


def test_every_published_row_has_a_protocol_that_names_real_benchmarks():
    assert {published.protocol for published in PUBLISHED} == set(PROTOCOLS)
    for protocol in PROTOCOLS.values():
        assert set(protocol.comparable) | set(protocol.related) <= set(BENCHMARKS)
    assert set(COMPLETE) == set(BENCHMARKS)
    for published in PUBLISHED:
        assert all(score is None or 0 < score < 100 for score in (published.t2i, published.i2t))
    assert len(set(PUBLISHED)) == len(PUBLISHED)


@pytest.mark.parametrize(
    ("benchmark", "model", "source", "t2i", "i2t"),
    [
        ("urban1k", "DeBias-CLIP B/16", "table 3", 93.0, 93.1),
        ("urban1k", "HyFL-CLIP L/14", "HyFL", 94.30, 94.60),  # printed image to text first
        ("docci", "DeBias-CLIP L/14", "table 3", 85.6, 85.2),
        ("docci", "Long-CLIP B/16", "HyFL", 71.49, 63.10),
        ("dci", "Long-CLIP B/16", "table 3", 57.1, 51.6),
        ("dci-split", "LoTLIP B/16", "LoTLIP", 62.63, 64.11),
        ("long-dci", "DeBias-CLIP B/16", "SAID", 59.17, 59.43),
        ("coco", "DeBias-CLIP B/16", "table 4", 43.0, 61.3),
        ("coco-first5", "Long-CLIP L/14", "HANCLIP", 46.3, 62.9),
        ("flickr30k", "DeBias-CLIP B/16", "v2", 36.6, 56.6),
        ("flickr30k-1k", "DeBias-CLIP B/16", "SAID", 73.60, 89.80),
    ],
)
def test_published_rows_stand_beside_the_right_benchmark_in_the_right_order(benchmark, model, source, t2i, i2t):
    found = [r for r, why in published_rows(benchmark, complete(benchmark)) if not why]
    assert [(r.t2i, r.i2t) for r in found if r.model == model and source in r.source] == [(t2i, i2t)]


def test_protocols_of_one_name_are_never_mixed():
    same = {name: {r.protocol for r, why in published_rows(name, complete(name)) if not why} for name in BENCHMARKS}
    assert same["dci"] == {"dci"}
    assert same["dci-split"] == {"dci-lotlip"}
    assert same["long-dci"] == {"long-dci"}
    for name in ("flickr30k", "flickr30k-raw", "flickr30k-1k"):
        assert same[name] == {name}
    assert same["iiw"] == same["iiw-400"] == set()
    why = {(r.model, r.source): why for r, why in published_rows("dci", complete("dci")) if why}
    assert "HyFL-CLIP's DCI" in why["Long-CLIP B/16", "HyFL-CLIP (arXiv 2607.00428)"]


def test_nothing_is_comparable_with_a_part_of_a_benchmark():
    whole = published_rows("docci", {"images": 5000, "captions": 5000})
    part = published_rows("docci", {"images": 4990, "captions": 4990})
    assert any(not why for _, why in whole)
    assert all("all 5,000 pictures and 5,000 captions; this copy has 4,990 and 4,990" in why for _, why in part)
    ours = {"mine": row(50.0)}
    (table,) = published_tables("docci", {"images": 4990, "captions": 4990}, ours)
    assert "NOT comparable" in table.title
    assert not any("mine" in line for line in table.rows)


def test_our_rows_stand_beside_comparable_ones_only():
    same, *others = published_tables("dci", complete("dci"), {"mine": row(50.0)})
    assert same.rows[0] == ("mine", "50.0", "50.0", "this run")
    assert "HyFL-CLIP B/16" not in [line[0] for line in same.rows]
    reasons = [other.title.partition("NOT comparable with this run: ")[2] for other in others]
    assert reasons == [PROTOCOLS["dci-hyfl"].text, PROTOCOLS["dci-lotlip"].text]  # each once, not beside every row
    assert "HyFL-CLIP B/16" in [line[0] for line in others[0].rows]
    assert not any(PROTOCOLS["dci-hyfl"].text in cell for line in others[0].rows for cell in line)
    assert published_tables("miniature", {"images": 9, "captions": 9}, {"mine": row(50.0)}) == []


# text and page


class Checker(HTMLParser):
    """Notes what is left open, every id, and every address that leads out of the page."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: Counter[str] = Counter()
        self.ids: Counter[str] = Counter()
        self.addresses: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        self.tags[tag] += 1
        if tag not in VOID:
            self.open.append(tag)
        for name, value in attrs:
            if name == "id":
                self.ids[value] += 1
            if name in ("src", "href", "xlink:href", "data", "srcset"):
                self.addresses.append(value)

    def handle_startendtag(self, tag, attrs):
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.open.pop()

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


@pytest.fixture(scope="module")
def section(tmp_path_factory) -> Section:
    names = {"none": row(60.0), "swap_1_4": row(55.0, -5.0), "filler_0": row(60.0), "filler_4": row(50.0, -10.0)}
    content = benchmark(**{"one": names, NASTY: names})
    figures = benchmark_figures("docci", content["results"])
    return benchmark_section("docci", content, [(f"{key}.png", to_svg(f, key)) for key, f in figures.items()])


def test_the_page_is_whole_and_needs_nothing_from_outside(section):
    page = to_html(f"Title {NASTY}", [section, section])
    checker = Checker(page)
    assert checker.open == []
    assert checker.addresses
    assert all(address.startswith("#") for address in checker.addresses)
    assert not re.search(r"url\((?!#)|@import|<script|<b ", page)
    namespaces = {"http://www.w3.org/2000/svg", "http://www.w3.org/1999/xlink"}
    assert set(re.findall(r'https?://[^"\s<]+', page)) <= namespaces
    assert "prefers-color-scheme: dark" in page
    assert 'name="viewport" content="width=device-width' in page
    assert checker.tags["svg"] == 6


def test_figures_of_one_page_share_no_id(section):
    ids = Checker(to_html("t", [section])).ids
    assert len(ids) > 20
    assert max(ids.values()) == 1


def test_markdown_tables_have_as_many_cells_in_every_row(section):
    text = to_markdown("t", [section])
    for block in text.split("\n\n"):
        if block.startswith("|"):
            assert len({len(re.findall(r"(?<!\\)\|", line)) for line in block.splitlines()}) == 1
    assert "![filler](filler.png)" in text
    assert "55.0 (-5.0)" in text
    assert "+1.25" in text
    assert "0.032" in text
    assert "first and sentence 4 exchanged" in text
    assert "Left out: x.jpg: broken" in text
    short = to_markdown("", [section], details=False)
    assert "R@1 in percent" in short
    assert "Every metric" not in short
    assert "png" not in short


def test_what_can_rise_is_called_a_change():
    table = next(
        t for t in benchmark_section("docci", benchmark(one={"none": row(60.0)})).tables if t.title == "Every metric"
    )
    assert "change, %" in table.header
    assert not any("drop" in cell for cell in table.header)


def test_a_part_of_a_benchmark_is_said_to_be_one_in_singular_too():
    content = {**benchmark(one={"none": row(60.0)}), "counts": {"images": 1, "captions": 1, "empty_captions": 0}}
    protocol, warning, seen, *_ = benchmark_section("docci", content).lines
    assert protocol == "a protocol"
    assert "part of the benchmark" in warning
    assert "all 5,000 pictures" in warning
    assert seen == "1 image, 1 caption"
    assert "part of the benchmark" not in to_markdown(
        "", [benchmark_section("docci", benchmark(one={"none": row(60.0)}))]
    )


def test_a_terminal_gets_the_first_columns_of_a_table_that_asks_for_it():
    section = Section("S", [], [Table("T", ("a", "b", "c"), [("1", "2", "long")], num_brief=2)])
    assert "long" in to_markdown("", [section])
    short = to_markdown("", [section], details=False)
    assert "| 1 | 2 |" in short
    assert "long" not in short


def test_results_with_different_perturbations_stand_side_by_side():
    content = benchmark(one={"none": row(60.0), "shuffle": row(50.0, -10.0)}, two={"none": row(70.0)})
    text = to_markdown("", [benchmark_section("docci", content)])
    assert re.search(r"\| shuffle +\| 50.0 \(-10.0\) +\| 50.0 \(-10.0\) +\| - +\| - +\|", text)


def test_miniature_numbers_never_come_without_what_they_cannot_say():
    content = benchmark(one={"none": row(60.0)})
    assert "says nothing about photographs" in to_markdown("", [benchmark_section("miniature", content)])
    assert "photographs" not in to_markdown("", [benchmark_section("docci", content)])


def test_cells_are_escaped_in_both_forms():
    table = Table("T", ("a|b",), [("x\ny",)])
    assert "a\\|b" in to_markdown("", [Section("S", [], [table])])
    assert "x y" in to_markdown("", [Section("S", [], [table])])
    page = to_html(NASTY, [Section(NASTY, [NASTY], [Table(NASTY, (NASTY,), [(NASTY, NASTY)], NASTY)])])
    assert page.count("&lt;b onclick") == 9
    assert "<b " not in page


def test_files_are_written_whole_or_not_at_all(tmp_path):
    path = write_whole(tmp_path / "new" / "a.txt", "old")
    with pytest.raises(UnicodeEncodeError):
        write_whole(path, "new \ud800")
    assert path.read_text() == "old"


def test_wrong_results_files_say_what_they_are(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no results at .*results.json; expected a results.json"):
        read_results(tmp_path)
    path = tmp_path / "results.json"
    path.write_text("{")
    with pytest.raises(ValueError, match="is not JSON"):
        read_results(path)
    for content in ({"schema": 2}, []):
        path.write_text(json.dumps(content))
        with pytest.raises(ValueError, match="expected 1; evaluate again with this version"):
            read_results(tmp_path)


# figures


def test_the_figures_show_the_numbers_they_were_given(tmp_path):
    results = {
        "one": {"none": row(60.0), "swap_1_4": row(55.0, -5.0), "first_2_filler_10": row(20.0),
                "first_2_filler_0": row(40.0), "filler_3": row(10.0)},
        "two": {"none": row(70.0), "swap_1_4": row(69.0, -1.0), "first_2_filler_10": row(30.0),
                "first_2_filler_0": row(50.0), "filler_3": row(10.0)},
    }  # fmt: skip
    figures = benchmark_figures("docci", results)
    assert list(figures) == ["recall", "drops", "filler-first_2"]  # one filler alone makes no curve, but a bar
    heights = [bar.get_height() for bar in figures["recall"].axes[0].patches]
    assert heights == [60.0, 55.0, 10.0, 70.0, 69.0, 10.0]
    assert [label.get_text() for label in figures["recall"].axes[0].get_xticklabels()] == [
        "none",
        "swap_1_4",
        "filler_3",
    ]
    lines = figures["filler-first_2"].axes[0].get_lines()
    assert [(line.get_label(), *line.get_xdata(), *line.get_ydata()) for line in lines] == [
        ("one", 0, 10, 40.0, 20.0),
        ("two", 0, 10, 50.0, 30.0),
    ]
    heights = [bar.get_height() for bar in figures["drops"].axes[0].patches]
    assert heights == [-5.0, 0.0, -1.0, 0.0]
    png = save_png(figures["drops"], tmp_path / "drops.png")
    assert png.read_bytes().startswith(b"\x89PNG")


def test_marks_and_whiskers_at_a_hundred_percent_are_whole():
    full = Series("one", [0, 1], [100.0, 100.0], [(99.0, 100.0)] * 2)
    for figure in (curve_figure("t", "x", "y", [full]), bar_figure("t", "y", ["a", "b"], [full])):
        low, high = figure.axes[0].get_ylim()
        assert low == 0
        assert high > 105


def test_depth_is_drawn_where_depths_have_queries_enough_and_nothing_is_where_none_has():
    def curve(*num_queries: int) -> DepthCurve:
        bins = [DepthBin(25 * n + 1, 25 * n + 25, queries, 50.0, 60.0) for n, queries in enumerate(num_queries)]
        return DepthCurve((), tuple(bins), min_queries=100, num_cut=0)

    assert depth_figure("own", {"one": curve(99, 3)}) is None
    figure = depth_figure("own", {"one": curve(99, 100, 5), "two": curve(1)})
    assert figure is not None
    assert [list(line.get_xdata()) for line in figure.axes[0].get_lines()] == [[38.0], []]


def luminance(colour: str) -> float:
    return sum(w * c**2.2 for w, c in zip((0.2126, 0.7152, 0.0722), to_rgb(colour), strict=True))


def test_series_differ_without_colour_too():
    names = [f"encoder {n}" for n in range(8)]
    curves = curve_figure("t", "x", "y", [Series(name, [0, 1], [1, 2]) for name in names]).axes[0].get_lines()
    looks = {(line.get_marker(), line.get_linestyle()) for line in curves}
    assert len(looks) == 8
    assert len({line.get_color() for line in curves[:6]}) == 6
    shades = [luminance(line.get_color()) for line in curves[:6]]
    assert all(abs(a - b) > 0.05 for a, b in pairwise(shades))
    bars = bar_figure("t", "y", ["a"], [Series(name, [0], [1]) for name in names]).axes[0].patches
    assert len({(bar.get_hatch(), bar.get_facecolor()) for bar in bars}) == 8
    assert len({bar.get_hatch() for bar in bars[:5]}) == 5


def test_an_svg_follows_the_page_and_is_the_same_every_time():
    def draw() -> str:
        return to_svg(
            curve_figure("a < b", "x", "y", [Series("one", [0, 1], [1, 2], [(0.5, 1.5), (1.5, 2.5)])]), "curve"
        )

    svg = draw()
    assert svg == draw()
    assert "#010203" not in svg
    assert "#000000" not in svg
    root = ElementTree.fromstring(svg)
    assert root.get("aria-label") == "a < b"
    assert root.get("role") == "img"
    assert root.get("width") is None
    assert root.get("viewBox")
    assert ElementTree.tostring(root).count(b"currentColor") > 10


def test_nothing_global_is_changed_by_drawing():
    import matplotlib

    before = dict(matplotlib.rcParams)
    to_svg(bar_figure("t", "y", ["a", "b"], [Series("one", [0, 1], [1, float("nan")])]), "bars")
    assert dict(matplotlib.rcParams) == before
