"""What must never be lost, and what must never load: folders that are not ours, and damaged files."""

import gzip
import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from debias_diffusion import load_encoder, save_encoder, text_features
from debias_diffusion.encoders.checkpoint import BPE_FILE, CONFIG_FILE, WEIGHTS_FILE


@pytest.fixture
def copy(tiny_folder, tmp_path):
    return shutil.copytree(tiny_folder, tmp_path / "copy")


def test_saving_replaces_an_encoder_and_nothing_else(tiny, copy, tmp_path):
    save_encoder(tiny, copy)
    (copy / "notes.txt").write_text("mine")
    for wrong in (copy, tmp_path, tmp_path / "runs" / ".."):
        with pytest.raises(ValueError, match="holds more than an encoder"):
            save_encoder(tiny, wrong)
    assert (copy / "notes.txt").read_text() == "mine"
    with pytest.raises(ValueError, match="is a file"):
        save_encoder(tiny, copy / "notes.txt")
    assert not list(tmp_path.glob(".*"))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{}", "has no model_cfg"),
        ("null", "has no model_cfg"),
        ('{"model_cfg": {}}', "has no text_cfg"),
        ("{", "not whole JSON"),
    ],
)
def test_a_damaged_config_is_one_clear_line(copy, content, message):
    (copy / CONFIG_FILE).write_text(content)
    with pytest.raises(ValueError, match=message):
        load_encoder(copy)


def test_an_unknown_field_is_named(copy):
    config = json.loads((copy / CONFIG_FILE).read_text())
    config["model_cfg"]["text_cfg"]["nonsense"] = 1
    (copy / CONFIG_FILE).write_text(json.dumps(config))
    with pytest.raises(ValueError, match="nonsense"):
        load_encoder(copy)


def test_a_vocabulary_that_is_not_the_encoder_s_is_refused(copy):
    lines = gzip.decompress((copy / BPE_FILE).read_bytes()).split(b"\n")
    (copy / BPE_FILE).write_bytes(gzip.compress(b"\n".join(lines[:-60])))
    with pytest.raises(ValueError, match="vocabulary file is missing or damaged"):
        load_encoder(copy)
    (copy / BPE_FILE).write_bytes(b"not gzip")
    with pytest.raises(ValueError, match="cannot be read"):
        load_encoder(copy)


@pytest.mark.parametrize("change", ["transpose", "integers", "nan"])
def test_weights_of_another_shape_kind_or_value_are_refused(copy, change):
    state = load_file(copy / WEIGHTS_FILE)
    key = "text.transformer.resblocks.0.mlp.c_fc.weight"
    if change == "transpose":
        state[key] = state[key].T.contiguous()
    elif change == "integers":
        state[key] = (state[key] * 100).to(torch.int8)
    else:
        state[key][0, 0] = float("nan")
    save_file(state, copy / WEIGHTS_FILE)
    with pytest.raises(ValueError, match="in the file|not finite floats"):
        load_encoder(copy)


def test_one_caption_is_not_taken_for_a_list(tiny):
    with pytest.raises(ValueError, match="list of captions"):
        text_features(tiny, "A red bus.")


def test_an_unknown_device_is_one_line(tiny_folder):
    with pytest.raises(ValueError, match="no device 'banana' here"):
        load_encoder(tiny_folder, device="banana")
