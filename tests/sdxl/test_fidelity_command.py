"""The fidelity command, whole, on a tiny SDXL with random weights: what it leaves, and what it refuses."""

import json
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from debias_diffusion.data.drawings import long_set
from debias_diffusion.data.scene_reader import Reading
from debias_diffusion.encoders.checkpoint import save_encoder
from debias_diffusion.fidelity import _whole, fidelity
from debias_diffusion.sdxl.record import read_record

QUICK: dict[str, Any] = {"seeds": 2, "steps": 1, "device": "cpu"}


@pytest.fixture(scope="module")
def checkpoint(make_pipe, slots_77, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder with a tiny SDXL at 77 tokens."""
    folder = tmp_path_factory.mktemp("checkpoint") / "tiny"
    make_pipe(slots_77).save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def run(checkpoint, slots_248, tmp_path_factory) -> tuple[Path, str]:
    """The folder of a run on scenes, and what it said."""
    output = tmp_path_factory.mktemp("run") / "out"
    return output, fidelity(output, checkpoint, ("stock", f"long={slots_248}"), scenes=3, **QUICK)


def results(output: Path) -> dict[str, Any]:
    return json.loads((output / "results.json").read_text())


def test_the_command_leaves_pictures_numbers_table_figure_and_sheet(run):
    output, said = run
    assert {path.name for path in output.iterdir()} == {
        "stock", "long", "contact-sheet.png", "results.json", "table.md", "report.html", "all.png", "colour-and-place.png",
        "settings.json",
    }  # fmt: skip
    assert '<img alt="Contact sheet' in (output / "report.html").read_text()
    assert "![contact-sheet](contact-sheet.png)" in (output / "table.md").read_text()
    for name in ("stock", "long"):
        assert len(list((output / name).iterdir())) == 6
    assert "3 held-out scenes of 100 to 200 tokens" in said
    assert "2 pictures of each by each set, 1 step, " in said
    assert "shapes a picture where none was told" in said
    assert "need not be true of photographs" in said
    content = results(output)
    assert content["kind"] == "scenes"
    assert list(content["sets"]) == ["stock", "long"]
    assert content["command"].startswith(f"debias-diffusion fidelity {output} --checkpoint ")
    things = sum(len(drawing.described) for drawing in long_set(3))
    for about in content["sets"].values():
        assert about["rows"][-1]["observations"] == 2 * things
        assert about["chance"][-1]["observations"] == 2 * 2 * things  # the captions of the two other scenes
    with Image.open(output / "contact-sheet.png") as sheet:
        assert sheet.width > 3 * 96 * 3


def test_every_set_starts_from_the_same_noise_and_only_stock_is_cut(run):
    output, _ = run
    records = {name: read_record(output / name / "0001-1.png") for name in ("stock", "long")}
    assert records["stock"]["seed"] == records["long"]["seed"] == 1001
    assert records["stock"]["prompt"] == records["long"]["prompt"] == long_set(3)[1].caption
    assert [records[name]["settings"]["max_length"] for name in records] == [77, "auto"]
    assert [records[name]["settings"]["width"] for name in records] == [64, 64]


def test_a_second_run_draws_nothing_again_and_a_larger_one_goes_on(run, checkpoint, slots_248):
    output, said = run
    pictures = {path: path.stat().st_mtime_ns for name in ("stock", "long") for path in (output / name).iterdir()}
    before = results(output)
    assert fidelity(output, checkpoint, ("stock", f"long={slots_248}"), scenes=3, **QUICK) == said
    assert {path: path.stat().st_mtime_ns for path in pictures} == pictures
    assert {k: v for k, v in results(output).items() if k != "date"} == {k: v for k, v in before.items() if k != "date"}


def test_other_flags_touch_nothing_unless_asked_to(run, checkpoint, slots_248):
    output, _ = run
    before = {path: path.stat().st_mtime_ns for path in output.rglob("*")}
    with pytest.raises(
        ValueError, match=r"run with other flags \(--steps 1 -> 2\); name another OUTPUT, or add --fresh"
    ):
        fidelity(output, checkpoint, ("stock", f"long={slots_248}"), scenes=3, **QUICK | {"steps": 2})
    assert {path: path.stat().st_mtime_ns for path in output.rglob("*")} == before


def test_a_run_grows_and_is_replaced_when_asked(checkpoint, tmp_path):
    asked: dict[str, Any] = {"scenes": 2, "short": True, **QUICK}
    fidelity(tmp_path / "out", checkpoint, ("stock",), **asked | {"seeds": 1})
    first = {path: path.stat().st_mtime_ns for path in (tmp_path / "out" / "stock").iterdir()}
    fidelity(tmp_path / "out", checkpoint, ("stock",), **asked)
    assert {path: path.stat().st_mtime_ns for path in first} == first
    assert len(list((tmp_path / "out" / "stock").iterdir())) == 4
    fidelity(tmp_path / "out", checkpoint, ("stock",), **asked | {"steps": 2}, fresh=True)
    assert read_record(tmp_path / "out" / "stock" / "0000-0.png")["settings"]["steps"] == 2


def test_short_scenes_fit_and_one_set_has_no_differences(checkpoint, tmp_path):
    said = fidelity(tmp_path / "out", checkpoint, ("stock",), scenes=2, short=True, **QUICK)
    assert "2 held-out scenes within 77 tokens" in said
    assert "1-77" in said
    assert "1-248" not in said  # it would say the same again
    content = results(tmp_path / "out")
    assert content["comparisons"] == []
    assert " --short " in content["command"]


def test_real_prompts_are_judged_sentence_by_sentence(checkpoint, slots_248, tiny_folder, tmp_path, long_prompt):
    prompts = tmp_path / "prompts.jsonl"
    rows = [
        {"prompt": f"A red house. A{long_prompt[1:]}. The end."},
        {"prompt": "A cat sleeps. Two birds sing.", "seed": 7},
    ]
    prompts.write_text("\n".join(map(json.dumps, rows)))
    asked: dict[str, Any] = {"prompts": prompts, "judge": str(tiny_folder)} | QUICK
    said = fidelity(tmp_path / "out", checkpoint, ("stock", f"long={slots_248}"), **asked)
    content = results(tmp_path / "out")
    assert content["kind"] == "coverage"
    assert f"judged by {tiny_folder}" in said
    whole = content["sets"]["long"]["rows"][-1]
    # two pictures of the first prompt, three sentences each, and one of the second, two sentences
    assert (whole["sentences"], whole["prompts"]) == (8, 2)
    assert whole["measures"].keys() == {"cosine", "margin", "won"}
    assert {r["measure"] for r in content["comparisons"]} == {"cosine", "margin"}
    assert (tmp_path / "out" / "contact-sheet.png").is_file()


def test_a_judge_that_draws_is_refused_before_any_picture(checkpoint, towers, tmp_path):
    judge = save_encoder(towers["text_encoder_2"], tmp_path / "judge")
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("A cat.\nA dog.\n")
    with pytest.raises(ValueError, match="is what 'stock' draws with .* would judge itself"):
        fidelity(tmp_path / "out", checkpoint, ("stock",), prompts=prompts, judge=str(judge), **QUICK)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"scenes": 1}, "expected 2 to"),
        ({"seeds": 0}, "expected 2 to"),
        ({"seed": -1}, "a seed of 0 or more"),
        ({"judge": "x"}, "--prompts and --judge belong together"),
        ({"sets": ("stock", "a=stock", "a=chunks")}, "two sets are called 'a'"),
    ],
)
def test_bad_options_are_refused_before_anything_is_loaded(options, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        fidelity(tmp_path / "out", "no/such/checkpoint", **options)


def test_backgrounds_and_shapes_that_nobody_told_are_counted():
    drawings = long_set(2)
    whole = [Reading(drawing.scene.background, drawing.scene.things) for drawing in drawings]
    assert _whole([[reading] for reading in whole], drawings) == {"background": 100.0, "extra": 0.0}
    swapped = _whole([[whole[1]], [whole[1]]], drawings)
    places = [{thing.place for thing in drawing.scene.things} for drawing in drawings]
    assert swapped["extra"] == len(places[1] - places[0]) / 2
    assert swapped["background"] == (100.0 if drawings[0].scene.background == drawings[1].scene.background else 50.0)
