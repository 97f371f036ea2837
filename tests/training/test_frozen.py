"""A frozen image tower: its features once, the same training, and no picture opened on a warm cache."""

import dataclasses
import shutil

import pytest
import torch
from safetensors.torch import load_file

from debias_diffusion.config import TrainConfig
from debias_diffusion.data.collate import StepOrder
from debias_diffusion.encoders.checkpoint import WEIGHTS_FILE, load_encoder
from debias_diffusion.training import frozen
from debias_diffusion.training.checkpoints import find_checkpoints
from debias_diffusion.training.frozen import visited_rows
from debias_diffusion.training.loop import read_metrics, train


@pytest.fixture
def config(tiny_folder, pair_folder, tmp_path):
    return TrainConfig(
        output=str(tmp_path / "run"), data=str(pair_folder), encoder=str(tiny_folder), batch_size=8, pca_dim=3, pca_batch=8,
        max_steps=3, learning_rate=1e-3, warmup_steps=1, workers=0, log_every=1, save_every=2, train_towers="text",
        feature_cache=str(tmp_path / "features"),
    )  # fmt: skip


@pytest.mark.parametrize(("rows", "batch", "steps"), [(16, 8, 1), (16, 8, 2), (50, 8, 3), (50, 8, 6), (50, 8, 20)])
def test_the_visited_rows_are_those_that_the_steps_read(rows, batch, steps):
    read = {index for step in StepOrder(rows, batch, steps, seed=3) for _, index in step}
    visited = visited_rows(rows, batch, steps, seed=3)
    assert read <= set(visited)
    assert len(visited) == (rows if steps >= rows // batch else len(read))


def test_a_longer_run_reads_first_what_a_shorter_one_has_read():
    shorter, longer = (list(visited_rows(50, 8, steps, seed=3)) for steps in (2, 5))
    assert longer[: len(shorter)] == shorter


def test_equal_to_a_run_that_computes_the_frozen_features_in_every_step(config, tmp_path, tiny_folder, monkeypatch):
    """The reference: the same steps with the tower in them, its weights never given to the optimiser."""
    from debias_diffusion.training import towers

    trained = load_file(train(config) / WEIGHTS_FILE)
    losses = [m["loss"] for m in read_metrics(tmp_path / "run")]
    both = dataclasses.replace(config, train_towers="both", output=str(tmp_path / "both"))
    monkeypatch.setattr(towers, "choose_towers", lambda clip, _: clip.visual.requires_grad_(False))
    plain = load_file(train(both) / WEIGHTS_FILE)
    assert losses == pytest.approx([m["loss"] for m in read_metrics(tmp_path / "both")], abs=1e-5)
    base = load_file(tiny_folder / WEIGHTS_FILE)
    assert trained.keys() == plain.keys()
    for name in trained:
        if name.startswith("visual."):
            assert torch.equal(trained[name], base[name])
        elif not name.endswith("in_proj_bias"):  # a key's bias has no gradient but rounding, which Adam enlarges
            assert (trained[name] - plain[name]).norm() <= 1e-3 * plain[name].norm() + 1e-6, name


def test_a_warm_cache_opens_no_picture(config, pair_folder, tmp_path, monkeypatch):
    monkeypatch.setattr(frozen, "CHUNK", 5)
    data = shutil.copytree(pair_folder, tmp_path / "data")
    (data / "03.png").write_bytes(b"")
    config = dataclasses.replace(config, data=str(data))
    first = load_file(train(config) / WEIGHTS_FILE)
    assert len(list((tmp_path / "features").rglob("*.safetensors"))) == 4
    assert load_encoder(tmp_path / "run" / "encoder").history["unreadable_pictures"] == 1
    opened = []
    import debias_diffusion.data.pictures as pictures

    def watched(source, path, min_side, decoded=pictures._decoded):
        opened.append(path.name)
        return decoded(source, path, min_side)

    monkeypatch.setattr(pictures, "_decoded", watched)
    again = load_file(train(dataclasses.replace(config, output=str(tmp_path / "again"))) / WEIGHTS_FILE)
    assert set(opened) == {"03.png"}, "an unreadable picture is looked at again, the others are not"
    assert all(torch.equal(first[name], again[name]) for name in first)


def test_checkpoints_hold_the_text_side_and_resume_to_the_same_bits(config, tmp_path):
    whole = load_file(train(config) / WEIGHTS_FILE)
    half = tmp_path / "half"
    shutil.copytree(tmp_path / "run", half)
    shutil.rmtree(half / "encoder")
    shutil.rmtree(find_checkpoints(half / "checkpoints")[-1])
    kept = load_file(find_checkpoints(half / "checkpoints")[-1] / "model.safetensors")
    assert kept
    assert not any("visual" in name for name in kept)
    resumed = load_file(train(dataclasses.replace(config, output=str(half), resume=True)) / WEIGHTS_FILE)
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)


def test_a_chunk_without_a_readable_picture_ends_nothing_but_a_set_without_one_does(
    config, pair_folder, tmp_path, monkeypatch
):
    monkeypatch.setattr(frozen, "CHUNK", 4)
    data = shutil.copytree(pair_folder, tmp_path / "data")
    pictures = sorted(data.glob("*.png"))
    for picture in pictures[:4]:
        picture.write_bytes(b"")
    config = dataclasses.replace(config, data=str(data))
    assert load_encoder(train(config)).history["unreadable_pictures"] == 4
    for picture in pictures:
        picture.write_bytes(b"")
    with pytest.raises(ValueError, match=r"none of the 16 pictures can be read; the first: .*00\.png.*check --data"):
        train(dataclasses.replace(config, output=str(tmp_path / "none")))
