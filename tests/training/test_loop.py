import dataclasses
import json

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

from debias_diffusion.config import TrainConfig
from debias_diffusion.encoders.checkpoint import WEIGHTS_FILE, load_encoder
from debias_diffusion.training.checkpoints import find_checkpoints
from debias_diffusion.training.lock import FolderLock
from debias_diffusion.training.loop import NonFiniteLoss, read_metrics, train


def weights(folder):
    return load_file(folder / WEIGHTS_FILE)


def test_a_run_leaves_encoder_metrics_config_and_the_newest_checkpoints(config, tmp_path):
    folder = train(dataclasses.replace(config, max_steps=6))
    encoder = load_encoder(folder)
    assert encoder.context_length == 248
    assert encoder.history["training"]["steps"] == 6
    metrics = read_metrics(tmp_path / "run")
    assert [m["step"] for m in metrics] == [1, 2, 3, 4, 5, 6]
    assert {"loss", "recall", "samples_per_second", "logit_scale", "learning_rate"} <= metrics[0].keys()
    assert [c.name for c in find_checkpoints(tmp_path / "run" / "checkpoints")] == ["step-00000004", "step-00000006"]
    assert TrainConfig.from_json((tmp_path / "run" / "config.json").read_text()).max_steps == 6
    assert list((tmp_path / "run" / "tensorboard").iterdir())


def test_first_position_rows_stay_the_base_model_s(config, tiny_folder):
    trained = weights(train(config))["text.positional_embedding"]
    base = weights(tiny_folder)["text.positional_embedding"]
    assert torch.equal(trained[:20], base[:20])
    assert not torch.equal(trained[20:77], base[20:77])


def test_resumed_in_mid_epoch_equals_uninterrupted(config, tmp_path):
    whole = weights(train(config))
    half = dataclasses.replace(config, output=str(tmp_path / "half"))
    import shutil

    shutil.copytree(tmp_path / "run", tmp_path / "half")
    shutil.rmtree(tmp_path / "half" / "checkpoints" / "step-00000004")
    shutil.rmtree(tmp_path / "half" / "encoder")
    resumed = weights(train(dataclasses.replace(half, resume=True)))
    assert all(torch.equal(whole[k], resumed[k]) for k in whole)
    assert [m["step"] for m in read_metrics(tmp_path / "half")] == [1, 2, 3, 4]


def test_training_learns(config):
    """Thirty steps on sixteen pairs teach a random tiny encoder to tell them apart better than it could."""
    train(dataclasses.replace(config, max_steps=40, learning_rate=3e-3, save_every=100))
    metrics = read_metrics(__import__("pathlib").Path(config.output))
    first, last = metrics[0], metrics[-1]
    assert last["loss"] < 0.7 * first["loss"]


def test_broken_pictures_never_end_a_run_and_are_replaced_by_nothing(config, pair_folder, tmp_path):
    import shutil

    data = shutil.copytree(pair_folder, tmp_path / "data")
    (data / "03.png").write_bytes((data / "03.png").read_bytes()[:60])
    (data / "05.png").write_bytes(b"")
    (data / "07.png").write_text("not a picture")
    Image.open(data / "09.png").convert("CMYK").save(data / "09.jpg")
    (data / "09.png").unlink()
    Image.open(data / "11.png").convert("P").save(data / "11.png")
    Image.open(data / "12.png").convert("RGBA").save(data / "12.png")
    folder = train(dataclasses.replace(config, data=str(data), max_steps=4))
    assert load_encoder(folder).history["unreadable_pictures"] == 3
    run = json.loads((find_checkpoints(tmp_path / "run" / "checkpoints")[-1] / "run.json").read_text())
    assert len(run["faults"]) == 3
    assert all(any(name in fault for fault in run["faults"]) for name in ("03.png", "05.png", "07.png"))


def test_a_run_in_which_no_picture_can_be_read_is_an_error_and_writes_no_encoder(config, pair_folder, tmp_path):
    import shutil

    data = shutil.copytree(pair_folder, tmp_path / "data")
    for picture in data.glob("*.png"):
        picture.write_bytes(b"")
    with pytest.raises(ValueError, match=r"no picture could be read in any step.*\.png.*check --data and --image-root"):
        train(dataclasses.replace(config, data=str(data), max_steps=2))
    assert not (tmp_path / "run" / "encoder").exists()
    assert not find_checkpoints(tmp_path / "run" / "checkpoints")


def test_a_loss_that_is_not_finite_names_step_and_samples_and_keeps_the_checkpoint(config, tmp_path):
    first = dataclasses.replace(config, max_steps=4)
    train(first)
    newest = find_checkpoints(tmp_path / "run" / "checkpoints")[-1]
    import shutil

    shutil.rmtree(newest)
    checkpoint = find_checkpoints(tmp_path / "run" / "checkpoints")[-1]
    state = load_file(checkpoint / "model.safetensors")
    state["clip.visual.proj"][:] = float("nan")
    from safetensors.torch import save_file

    save_file(state, checkpoint / "model.safetensors")
    with pytest.raises(NonFiniteLoss, match=r"loss is nan at step 2; samples here: .*\.png"):
        train(dataclasses.replace(first, resume=True))
    assert [c.name for c in find_checkpoints(tmp_path / "run" / "checkpoints")] == [checkpoint.name]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"pca_dim": 8}, "pca-dim is 8 but its batch holds 8 pictures"),
        ({"context_length": 60}, "context-length 60 is shorter than the base's 77"),
        ({"recipe": "debiased"}, "recipes: long-clip, .remove, .sample, debias"),
        ({"data": "nowhere.json"}, "no data at 'nowhere.json'"),
        ({"batch_size": 20}, "the data holds 16 pairs, fewer than one batch of 20"),
        ({"context_length": 250}, "lengths it reaches: 77, 134, 191, 248"),
        ({"precision": "fp16"}, "fp16 needs a GPU"),
        ({"short_weight": 1.5}, "expected 0 to 1"),
    ],
)
def test_impossible_settings_are_one_clear_line(config, change, message):
    with pytest.raises(ValueError, match=message):
        train(dataclasses.replace(config, **change))


def test_a_folder_with_a_run_is_not_overwritten_and_a_resumed_run_keeps_its_settings(config):
    train(config)
    with pytest.raises(ValueError, match="already holds a run"):
        train(config)
    with pytest.raises(ValueError, match=r"these changed: --learning-rate 0.001 -> 0.5"):
        train(dataclasses.replace(config, resume=True, learning_rate=0.5))


@pytest.mark.parametrize(
    "change", [{"precision": "bf16"}, {"gradient_checkpointing": True}, {"train_towers": "text"}, {"chunk_size": 3}]
)
def test_variants_run_and_move_the_text_tower(config, change, tiny_folder, tmp_path):
    change = {**change, "feature_cache": str(tmp_path / "features")}
    trained, base = weights(train(dataclasses.replace(config, max_steps=2, **change))), weights(tiny_folder)
    assert not torch.equal(trained["text.text_projection"], base["text.text_projection"])
    frozen = change.get("train_towers") == "text"
    assert torch.equal(trained["visual.proj"], base["visual.proj"]) == frozen


def test_chunks_train_like_the_whole_batch(config, tmp_path):
    whole = train(config)
    chunked = train(dataclasses.replace(config, output=str(tmp_path / "chunked"), chunk_size=3))
    losses = [[m["loss"] for m in read_metrics(tmp_path / name)] for name in ("run", "chunked")]
    assert losses[0] == pytest.approx(losses[1], abs=1e-4)
    a, b = weights(whole), weights(chunked)
    for name in a:
        if not name.endswith("in_proj_bias"):  # a key's bias has no gradient but rounding, which Adam enlarges
            assert (a[name] - b[name]).norm() <= 2e-3 * a[name].norm() + 1e-6, name


def test_nothing_to_resume_is_said_and_starts_nothing(config, tmp_path):
    with pytest.raises(ValueError, match=r"--resume: .*run holds no run to go on with; leave --resume out"):
        train(dataclasses.replace(config, resume=True))
    assert not (tmp_path / "run").exists()


def test_a_run_stopped_before_its_first_checkpoint_starts_again(config, tmp_path, caplog):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.json").write_text(config.to_json())
    train(dataclasses.replace(config, resume=True, max_steps=4))
    assert "holds no checkpoint yet; starting from the beginning" in caplog.text


def resumable(config, tmp_path):
    """A run of four steps that stopped after two."""
    import shutil

    train(config)
    checkpoints = find_checkpoints(tmp_path / "run" / "checkpoints")
    shutil.rmtree(checkpoints[-1])
    shutil.rmtree(tmp_path / "run" / "encoder")
    return dataclasses.replace(config, resume=True), checkpoints[0] / "run.json"


def test_a_checkpoint_that_says_less_than_today_s_is_still_taken(config, tmp_path):
    again, state = resumable(config, tmp_path)
    run = json.loads(state.read_text())
    state.write_text(json.dumps({"step": run["step"]}))
    assert train(again).is_dir()


def test_other_pairs_in_the_same_number_are_not_resumed_on(config, tmp_path, pair_folder):
    import shutil

    again, _ = resumable(config, tmp_path)
    data = shutil.copytree(pair_folder, tmp_path / "data")
    for suffix in (".png", ".txt"):
        (data / f"00{suffix}").rename(data / f"99{suffix}")
    with pytest.raises(ValueError, match="since step-00000002 this changed: which pairs they are; give --data"):
        train(dataclasses.replace(again, data=str(data)))
    for suffix in (".png", ".txt"):
        (data / f"98{suffix}").write_bytes((data / f"99{suffix}").read_bytes())
    with pytest.raises(ValueError, match=r"the number of pairs \(16 -> 17\), which pairs"):
        train(dataclasses.replace(again, data=str(data)))


def test_leftovers_of_writes_cut_short_are_removed_at_the_start(config, tmp_path):
    leftover = tmp_path / "run" / "checkpoints" / ".step-00000002.partial"
    leftover.mkdir(parents=True)
    (leftover / "model.safetensors").write_bytes(b"half")
    train(dataclasses.replace(config, max_steps=1))
    assert not leftover.exists()


def test_a_second_run_into_the_same_folder_is_refused(config, tmp_path):
    with FolderLock(tmp_path / "run"), pytest.raises(ValueError, match="another run writes to"):
        train(config)


def test_the_start_says_what_is_trained_and_no_bar_is_drawn_into_a_log(config, caplog, capsys):
    with caplog.at_level("INFO"):
        train(dataclasses.replace(config, chunk_size=4))
    line = next(m for m in caplog.messages if "weights train" in m)
    for part in ("debias from", "248 tokens", "16 pairs, 8 a step", "steps 0 to 4", "fp32 on cpu", "chunks of 4"):
        assert part in line
    assert [m for m in caplog.messages if m.startswith(("step 1 of 4: loss", "step 4 of 4: loss"))]
    assert "step/s" not in capsys.readouterr().err
