"""Named sets of encoders, many pictures at a time, and who may judge them."""

import json
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from debias_diffusion.encoders.encoder import Encoder
from debias_diffusion.sdxl.batches import Job, draw_batches
from debias_diffusion.sdxl.generate import Settings, draw
from debias_diffusion.sdxl.judge import refuse_tested
from debias_diffusion.sdxl.prompts import PromptLine, debias_pipeline
from debias_diffusion.sdxl.record import read_record
from debias_diffusion.sdxl.sets import open_sets, set_names

TWO_STEPS = Settings(steps=2, width=32, height=32)


def jobs(folder: Path, prompts: list[str]) -> list[Job]:
    return [Job(prompt, 10 + i, folder / f"{i}.png") for i, prompt in enumerate(prompts)]


def pixels(path: Path) -> np.ndarray:
    with Image.open(path) as image:
        return np.asarray(image, np.int16)


@pytest.fixture(scope="module")
def long_pipe(make_pipe, slots_248) -> Any:
    """A pipeline that reads 248 tokens; not to be changed."""
    return make_pipe(slots_248)


def test_sets_are_named_for_the_last_part_of_their_source():
    assert set_names(["stock", "/runs/my-slots", "x=miniature:debias"]) == {
        "stock": "stock",
        "my-slots": "/runs/my-slots",
        "x": "miniature:debias",
    }
    with pytest.raises(ValueError, match="two sets are called 'debias': miniature:debias and runs/debias; write NAME="):
        set_names(["miniature:debias", "runs/debias"])
    for bad in ("../up=stock", "a b=stock", "=stock", "a=", ""):
        with pytest.raises(ValueError, match="names no set; write SOURCE or NAME=SOURCE"):
            set_names([bad])
    with pytest.raises(ValueError, match="no set of encoders"):
        set_names([])


def test_sets_share_the_unet_and_only_stock_is_cut(pipe, slots_248):
    sets = open_sets(pipe, {"stock": "stock", "chunks": "chunks", "long": str(slots_248)})
    assert {name: one.max_length for name, one in sets.items()} == {"stock": 77, "chunks": "auto", "long": "auto"}
    assert {id(one.pipe.unet) for one in sets.values()} == {id(pipe.unet)}
    lengths = {name: one.pipe.text_encoder.config.max_position_embeddings for name, one in sets.items()}
    assert lengths == {"stock": 77, "chunks": 77, "long": 248}
    with pytest.raises(ValueError, match="nothing shipped is called 'miniature:nothing'"):
        open_sets(pipe, {"nothing": "miniature:nothing"})


def test_pictures_drawn_together_are_those_drawn_alone(long_pipe, tmp_path, long_prompt):
    asked = jobs(tmp_path, ["a red cat", long_prompt, "a dog", long_prompt + " and a hen", "two birds"])
    assert draw_batches(long_pipe, asked, TWO_STEPS, batch_size=3, progress=False) == 5
    for job in asked:
        alone = np.asarray(draw(long_pipe, PromptLine(job.prompt), job.seed, TWO_STEPS), np.int16)
        assert np.abs(alone - pixels(job.path)).max() <= 1  # a batch sums in another order


def test_what_is_there_with_the_same_record_is_kept(long_pipe, tmp_path):
    asked = jobs(tmp_path, ["a red cat", "a dog"])
    draw_batches(long_pipe, asked, TWO_STEPS, progress=False)
    record = read_record(asked[0].path)
    assert (record["prompt"], record["seed"]) == ("a red cat", 10)
    assert record["settings"]["steps"] == 2
    assert record["encoders"]["text_encoder"]["context_length"] == 248
    times = [job.path.stat().st_mtime_ns for job in asked]
    assert draw_batches(long_pipe, [*asked, Job("a hen", 3, tmp_path / "new.png")], TWO_STEPS, progress=False) == 1
    assert [job.path.stat().st_mtime_ns for job in asked] == times
    three = Settings(steps=3, width=32, height=32)
    assert draw_batches(long_pipe, asked[:1], three, progress=False) == 1
    assert read_record(asked[0].path)["settings"] == json.loads(json.dumps(three.__dict__))
    Image.new("RGB", (8, 8)).save(asked[1].path)
    with pytest.raises(ValueError, match="without a record"):
        draw_batches(long_pipe, asked, TWO_STEPS, progress=False)
    with pytest.raises(ValueError, match="batch_size is 0"):
        draw_batches(long_pipe, asked, TWO_STEPS, batch_size=0)


def test_cut_prompts_are_not_warned_of_and_the_bar_comes_back(long_pipe, tmp_path, long_prompt, caplog):
    before = dict(long_pipe._progress_bar_config)
    cut = Settings(steps=1, width=32, height=32, max_length=20)
    own = debias_pipeline(long_pipe)
    logger = logging.getLogger(type(own).__module__)
    logger.addHandler(caplog.handler)
    try:
        draw_batches(own, jobs(tmp_path, [long_prompt]), cut, progress=False)
        assert "tokens and not" not in caplog.text
        draw(own, PromptLine(long_prompt), 0, cut)
        assert "reads 20 of" in caplog.text
    finally:
        logger.removeHandler(caplog.handler)
    assert own._progress_bar_config == before


def test_a_tower_under_test_may_not_judge(pipe, towers: dict[str, Encoder], make_tower, trained, slots_248, make_pipe):
    stock = {"stock": pipe}
    for slot, encoder in towers.items():
        with pytest.raises(ValueError, match=rf"tiny-{slot} is what 'stock' draws with \({slot}\)"):
            refuse_tested(encoder, stock)
        with pytest.raises(ValueError, match="would judge itself"):
            refuse_tested(encoder.stretched(248), stock)
        refuse_tested(make_tower(slot, seed=5), stock)
        refuse_tested(trained(encoder), stock)
        with pytest.raises(ValueError, match="draws with"):
            refuse_tested(trained(encoder), {"stock": pipe, "long": make_pipe(slots_248)})


def test_half_precision_hides_no_tower(towers, slots_77, make_pipe):
    import torch

    half = make_pipe(slots_77, torch.float16)
    with pytest.raises(ValueError, match="would judge itself"):
        refuse_tested(towers["text_encoder"], {"stock": half})
