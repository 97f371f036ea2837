"""A comparison is the library's own, pixel for pixel, however it is watched."""

import json
import threading
import zipfile

import pytest
import torch
from PIL import Image

from apps.blend import blended_pipeline
from apps.comparing import Comparison, run_comparison, stream_comparison
from apps.request import Request
from apps.watching import Step, Stopped
from debias_diffusion.encoders.positions import stretch_positions
from debias_diffusion.sdxl.generate import compare
from debias_diffusion.sdxl.record import read_record


def ask(prompt: str, **more) -> Request:
    return Request(**({"prompt": prompt, "sets": ("stock", "debias"), "steps": 3, "width": 32, "height": 32} | more))


def pixels(path) -> bytes:
    with Image.open(path) as image:
        return image.tobytes()


def test_pictures_are_those_of_compare_with_previews_or_without(studio, long_prompt, tmp_path):
    request = ask(long_prompt, seed=5, num_seeds=2, negative="bad")
    steps: list[Step] = []
    done = run_comparison(studio, request, tmp_path / "app", steps.append)
    alone = compare(
        {name: studio.pipes[name] for name in request.sets},
        [long_prompt],
        [5, 6],
        tmp_path / "library",
        settings=request.settings,
        negative="bad",
        max_lengths={"stock": 77},
        progress=False,
    )
    for name, paths in alone.items():
        assert [pixels(path) for path in done.pictures[name]] == [pixels(path) for path in paths]
        assert [read_record(path) for path in done.pictures[name]] == [
            read_record(path) | {"set": name} for path in paths
        ]
        assert [path.name for path in done.pictures[name]] == [f"{name}-{path.name}" for path in paths]
    assert [(s.set_name, s.picture, s.done) for s in steps] == [
        (name, picture, step) for name in request.sets for picture in (0, 1) for step in (1, 2, 3)
    ]
    assert [s.preview is not None for s in steps[:3]] == [True, True, False]
    assert steps[0].preview.size == (32, 32)
    assert pixels(done.pictures["stock"][0]) != pixels(done.pictures["debias"][0])


def test_all_of_a_comparison_is_in_one_zip(studio, tmp_path):
    done = run_comparison(studio, ask("a <b>cat</b>", num_seeds=2), tmp_path / "one")
    with zipfile.ZipFile(done.archive) as archive:
        names = archive.namelist()
        about = json.loads(archive.read("comparison.json"))
        archive.extractall(tmp_path / "unpacked")
    assert about["request"]["prompt"] == "a <b>cat</b>"
    assert str(tmp_path.parent) not in json.dumps(about)  # no paths of the machine that drew
    assert [name for name in names if name.startswith("debias/")] == [
        f"debias/{p.name}" for p in done.pictures["debias"]
    ]
    assert read_record(tmp_path / "unpacked" / names[-1])["seed"] == 1
    sheet = read_record(tmp_path / "unpacked" / "contact-sheet.png")
    assert {key: sheet[key] for key in about} == about  # one picture of all says by itself how it was made
    assert sheet["contact_sheet"] == [list(row) for row in zip(*about["pictures"].values(), strict=True)]
    assert not {path.name for path in done.folder.glob("*/*.png")} - {name.split("/")[-1] for name in names}


def test_a_drawing_stops_at_the_next_step_and_leaves_the_device_free(studio, tmp_path):
    stop, steps = threading.Event(), []

    def tell(step: Step) -> None:
        steps.append(step)
        stop.set()

    with pytest.raises(Stopped):
        run_comparison(studio, ask("a cat", steps=50), tmp_path / "stopped", tell, stop)
    assert len(steps) == 1
    assert not studio.device.locked()


def test_closing_the_stream_stops_the_drawing(studio, tmp_path):
    stream = stream_comparison(studio, ask("a cat", steps=100), tmp_path / "closed")
    assert isinstance(next(stream), Step)
    stream.close()
    assert studio.device.acquire(timeout=20)
    studio.device.release()
    assert not (tmp_path / "closed" / "comparison.zip").exists()


def test_the_stream_ends_with_the_result_and_carries_errors(studio, tmp_path):
    events = list(stream_comparison(studio, ask("a cat"), tmp_path / "whole"))
    assert [type(event) for event in events] == [Step] * 6 + [Comparison]
    with pytest.raises(ValueError, match="is weighting, not words"):
        list(stream_comparison(studio, ask("a (cat:1.3)"), tmp_path / "weighted"))


def test_a_blend_runs_from_the_stretched_encoder_to_the_tuned_one(studio, tmp_path, long_prompt):
    key = "embeddings.position_embedding.weight"
    stock, tuned = studio.pipes["stock"].text_encoder, studio.pipes["debias"].text_encoder
    start, half, end = (
        blended_pipeline(studio.pipes["stock"], studio.pipes["debias"], share).text_encoder.state_dict()
        for share in (0.0, 0.5, 1.0)
    )
    assert torch.equal(start[key], stretch_positions(stock.state_dict()[key]))
    for name, value in tuned.state_dict().items():
        assert torch.allclose(end[name], value, atol=1e-6)
        assert torch.allclose(half[name], (start[name] + value) / 2, atol=1e-6)
    done = run_comparison(studio, ask(long_prompt, blend=0.5), tmp_path / "half")
    plain = run_comparison(studio, ask(long_prompt), tmp_path / "plain")
    assert pixels(done.pictures["debias"][0]) != pixels(plain.pictures["debias"][0])
    assert pixels(done.pictures["stock"][0]) == pixels(plain.pictures["stock"][0])
    assert read_record(done.pictures["debias"][0])["blend"] == 0.5
    assert "blend" not in read_record(done.pictures["stock"][0])


def test_a_set_that_cannot_be_had_says_why(studio, tmp_path, folders):
    with pytest.raises(ValueError, match="sets: stock, long-clip, debias"):
        studio.find("nothing")
    with pytest.raises(FileNotFoundError, match="holds none of text_encoder, text_encoder_2"):
        studio.add("new", str(tmp_path))
    with pytest.raises(FileNotFoundError, match="holds none of"):
        studio.add("new", str(tmp_path / "absent"))
    with pytest.raises(ValueError, match="is there already"):
        studio.add("debias", str(folders["debias"]))
    with pytest.raises(ValueError, match="letters, digits"):
        studio.add("../new", str(folders["debias"]))
    with pytest.raises(ValueError, match="no folder is given"):
        studio.add("new", "  ")
    assert list(studio.pipes) == ["stock", "long-clip", "debias"]


def test_sets_are_chosen_by_a_name_or_by_several(studio):
    assert studio.choose("debias") == ["debias"]
    assert studio.choose(["debias", "stock"]) == ["debias", "stock"]
    for wrong, message in (
        ("d", r"called 'd'; sets: stock, long-clip, debias"),
        ([["stock"]], "is called"),
        ([], "expected one or more of: stock"),
        (None, "None chooses no set"),
        ({"debias": 1}, "expected one or more of"),
    ):
        with pytest.raises(ValueError, match=message):
            studio.choose(wrong)
