import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from debias_diffusion.data.drawings import Drawing, drawing_set, long_set
from debias_diffusion.data.scene_reader import Reading, read_scene
from debias_diffusion.data.scenes import Scene, Thing, render
from debias_diffusion.encoders.encoder import MINIATURE_FOLDER
from debias_diffusion.encoders.tokens import Tokenizer
from debias_diffusion.evaluation.fidelity import (
    BINS,
    MEASURES,
    WHOLE,
    compare_fidelity,
    fidelity_rows,
    observe,
    observe_chance,
    told_depths,
)
from debias_diffusion.evaluation.fidelity_report import depth_figures, depth_tables, write_report

TOKENIZER = Tokenizer(248, MINIATURE_FOLDER / "bpe.txt.gz")


def num_tokens(text: str) -> int:
    return len(TOKENIZER.encode(text))


LONG = long_set(40)
DEPTHS = [told_depths(drawing, num_tokens) for drawing in LONG]


def seen(depth: int, seeds: int = 1) -> list[list[Reading]]:
    """What pictures show whose encoder read `depth` tokens: all that was told by then, and nothing else."""
    readings = []
    for drawing, depths in zip(LONG, DEPTHS, strict=True):
        told = tuple(thing for thing, at in zip(drawing.described, depths, strict=True) if at <= depth)
        readings.append([Reading(drawing.scene.background, told)] * seeds)
    return readings


def row(rows, first, last):
    return next(r for r in rows if (r["first"], r["last"]) == (first, last))


@pytest.fixture(scope="module")
def observed():
    """Pictures of encoders that read 77 tokens, and all of them: two of each scene."""
    return {name: observe(seen(depth, 2), LONG, DEPTHS) for name, depth in (("stock", 77), ("whole", 248))}


def test_a_thing_is_as_deep_as_the_prompt_that_ends_with_its_sentence():
    for drawing, depths in zip(LONG, DEPTHS, strict=True):
        ids = TOKENIZER.encode(drawing.caption)
        assert depths == sorted(depths)
        assert depths[-1] == len(ids)
        assert depths[0] == depths[1]  # both large shapes stand in the summary
        for thing, depth in zip(drawing.described, depths, strict=True):
            text = TOKENIZER._bpe.decode(ids[1 : depth - 1]).rstrip()
            assert text.endswith(".")
            last = text.removesuffix(".").rpartition(".")[2]
            assert f" {thing.colour} " in f"{last} "
            assert thing.shape in last


def test_a_thing_that_no_sentence_tells_is_an_error():
    thing = Thing("star", "red", (0, 0), False)
    drawing = Drawing(Scene((thing,), "grey"), "A red star in the bottom right.", (thing,))
    with pytest.raises(ValueError, match=r"no sentence tells the red star at \(0, 0\)"):
        told_depths(drawing, num_tokens)


def test_the_curve_falls_where_the_encoder_stops_reading(observed):
    stock, whole = (fidelity_rows(own) for own in observed.values())
    assert [(r["first"], r["last"]) for r in stock] == [*BINS[1:], *WHOLE]  # a summary has more than 25 tokens
    for first, last in BINS[1:]:
        for rows, right in ((stock, last <= 77), (whole, True)):
            for measure in ("colour_and_place", "all", "present", "shape_and_place", "size_and_place"):
                assert row(rows, first, last)["measures"][measure]["value"] == 100 * right
    assert row(stock, 1, 248)["observations"] == 2 * sum(len(drawing.described) for drawing in LONG)
    assert row(stock, 1, 77)["observations"] + row(stock, 78, 248)["observations"] == row(stock, 1, 248)["observations"]
    assert row(stock, 1, 248)["scenes"] == 40


def test_bins_hold_every_depth_once():
    assert [depth for first, last in BINS for depth in range(first, last + 1)] == list(range(1, 249))


def test_intervals_hold_the_value_and_are_those_of_whole_scenes(observed):
    rows = fidelity_rows(observed["stock"])
    value = row(rows, 1, 248)["measures"]["all"]
    assert value["low"] < value["value"] < value["high"]
    # ten pictures of each scene, all alike, tell no more than one
    many = observe(seen(77, 10), LONG, DEPTHS)
    again = row(fidelity_rows(many), 1, 248)["measures"]["all"]
    assert again["value"] == pytest.approx(value["value"])
    assert again["high"] - again["low"] == pytest.approx(value["high"] - value["low"], rel=0.15)


def test_chance_is_what_other_scenes_captions_find():
    readings = seen(248)
    found = observe_chance(readings, LONG, DEPTHS)
    assert len(found) == 4 * sum(len(drawing.described) for drawing in LONG)
    share = {m: np.mean([MEASURES[m].holds(o.score) for o in found]) for m in MEASURES}
    assert 0.05 < share["colour_and_place"] < 0.2  # one colour in ten or fewer, where four places in five are taken
    assert share["all"] < 0.04
    assert 0.7 < share["present"] < 1
    assert found == observe_chance(readings, LONG, DEPTHS)
    with pytest.raises(ValueError, match="there are 1 scenes; chance"):
        observe_chance(readings[:1], LONG[:1], DEPTHS[:1])


@settings(max_examples=20, deadline=None)
@given(count=st.integers(2, 12), seed=st.integers(0, 100))
def test_chance_uses_each_caption_alike_and_never_its_own(count, seed):
    # one picture a scene that holds nothing: what is left is who was scored against whom
    numbers = [Drawing(Scene((), "grey"), "", (Thing("star", "red", (0, 0), False),)) for _ in range(count)]
    depths = [[number + 1] for number in range(count)]  # the depth names the caption
    found = observe_chance([[Reading("grey", ())]] * count, numbers, depths, seed=seed)
    assert all(o.scene != o.depth - 1 for o in found)
    assert {n: sum(o.depth == n + 1 for o in found) for n in range(count)} == dict.fromkeys(
        range(count), min(4, count - 1)
    )


def test_a_misplaced_thing_is_found_anywhere_and_nowhere_else():
    thing, other = Thing("star", "red", (0, 0), False), Thing("star", "red", (2, 2), False)
    drawing = Drawing(Scene((thing,), "grey"), "", (thing,))
    rows = fidelity_rows(observe([[Reading("grey", (other,))]], [drawing], [[10]]))
    values = {name: value["value"] for name, value in row(rows, 1, 25)["measures"].items()}
    assert values.pop("anywhere") == 100
    assert set(values.values()) == {0}


def test_differences_are_paired_and_have_a_sign(observed):
    rows = compare_fidelity(observed)
    assert {(r["a"], r["b"]) for r in rows} == {("stock", "whole")}
    deep = next(r for r in rows if (r["first"], r["measure"]) == (78, "all") and r["last"] == 248)
    assert deep["difference"] == 100
    assert deep["p_value"] < 1e-6
    shallow = next(r for r in rows if (r["first"], r["last"], r["measure"]) == (1, 77, "all"))
    assert (shallow["difference"], shallow["low"], shallow["high"], shallow["p_value"]) == (0, 0, 0, 1)
    with pytest.raises(ValueError, match="stock and whole were not observed on the same things"):
        compare_fidelity({**observed, "whole": observed["whole"][:-1]})


def test_whole_pictures_are_scored_as_they_are_read():
    drawings = drawing_set(10)
    depths = [told_depths(drawing, num_tokens) for drawing in drawings]
    rows = fidelity_rows(observe([[read_scene(render(d.scene))] for d in drawings], drawings, depths))
    assert row(rows, 1, 77)["measures"]["all"]["value"] == 100
    assert all(r["last"] <= 77 or r["first"] == 1 for r in rows)  # bins without anything are left out


def test_the_report_holds_every_set_its_chance_and_the_differences(observed, tmp_path):
    readings = {"stock": seen(77, 2), "whole": seen(248, 2)}
    sets = {
        name: {"rows": fidelity_rows(own), "chance": fidelity_rows(observe_chance(readings[name], LONG, DEPTHS))}
        for name, own in observed.items()
    }
    content = {"kind": "scenes", "sets": sets, "comparisons": compare_fidelity(observed)}
    text = write_report("40 scenes", ["a line"], content, tmp_path)
    assert "| stock: chance" in text
    assert "100.0 [100.0, 100.0]" in text
    assert "whole - stock" in text
    assert {p.name for p in tmp_path.iterdir()} == {
        "results.json", "table.md", "report.html", "colour-and-place.png", "all.png"
    }  # fmt: skip
    main = depth_tables(content)[0]
    assert main.header == ("tokens", "26-50", "51-77", "78-110", "111-150", "151-248", "1-77", "78-248", "1-248")
    assert [cells[0] for cells in main.rows] == ["stock", "stock: chance", "whole", "whole: chance", "number of things"]
    assert main.rows[-1][-1] == str(2 * sum(len(drawing.described) for drawing in LONG))
    axes = depth_figures("scenes", sets)["all"].axes[0]
    labels = [line.get_label() for line in axes.get_lines()]
    assert labels == ["stock", "whole", "chance"]
    assert list(axes.get_lines()[0].get_ydata()) == [100, 100, 0, 0, 0]


def test_bins_of_few_things_are_marked_and_not_drawn():
    few = [3, 4, 5]  # 26-50, 51-77, 78-110
    told = [depth for depth, count in zip((30, 60, 90), few, strict=True) for _ in range(count)]
    drawing = Drawing(Scene((), "grey"), "", (Thing("star", "red", (0, 0), False),) * len(told))
    rows = fidelity_rows(observe([[Reading("grey", drawing.described[:1])]], [drawing], [told]))
    content = {"kind": "scenes", "sets": {"one": {"rows": rows}}, "comparisons": []}
    main = depth_tables(content)[0]
    assert main.rows[0] == ("one", "fewer than 5", "fewer than 5", *["100.0 [100.0, 100.0]"] * 4)[: len(main.header)]
    assert main.rows[1] == ("number of things", "3", "4", "5", "7", "5", "12")
    assert depth_figures("scenes", content["sets"]) == {}  # one bin makes no curve


def test_a_set_looks_the_same_whatever_stands_beside_it(observed):
    rows = {"rows": fidelity_rows(observed["stock"])}

    def colours(*names: str) -> dict[str, str]:
        axes = depth_figures("scenes", dict.fromkeys(names, rows))["all"].axes[0]
        return {line.get_label(): line.get_color() for line in axes.get_lines()}

    every = colours("stock", "stretched", "long-clip", "debias", "mine")
    assert len(set(every.values())) == 5
    assert colours("mine", "debias", "stock") == {name: every[name] for name in ("mine", "debias", "stock")}
    assert colours("debias") == {"debias": every["debias"]}
