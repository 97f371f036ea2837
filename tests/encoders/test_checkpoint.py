import json

import open_clip
import pytest
import torch
import torch.nn.functional as F
from PIL import Image

from debias_diffusion import image_features, load_encoder, save_encoder, text_features
from debias_diffusion.encoders.encoder import build, spec_config
from debias_diffusion.encoders.positions import freeze_first_positions, thaw_positions
from debias_diffusion.encoders.specs import SPECS, find_spec

CAPTIONS = ["A small red star in the top left.", "word " * 300, ""]


def pictures():
    return [Image.new("RGB", (40, 30), c) for c in ("red", "navy")]


def test_saved_and_loaded_gives_the_same_bits(tiny, tmp_path):
    long = tiny.stretched(248)
    again = load_encoder(save_encoder(long, tmp_path / "long"))
    assert again.context_length == 248
    assert torch.equal(text_features(again, CAPTIONS), text_features(long, CAPTIONS))
    assert torch.equal(image_features(again, pictures()), image_features(long, pictures()))


def test_plain_open_clip_opens_the_folder_with_equal_features(tiny, tmp_path):
    long = tiny.stretched(248)
    folder = save_encoder(long, tmp_path / "long")
    model, _, preprocess = open_clip.create_model_and_transforms(f"local-dir:{folder}")
    model.eval()
    ids = long.tokenizer(CAPTIONS).input_ids
    ids = F.pad(ids, (0, 248 - ids.shape[1]))
    with torch.no_grad():
        theirs = F.normalize(model.encode_text(ids), dim=-1)
        images = F.normalize(model.encode_image(torch.stack([preprocess(p) for p in pictures()])), dim=-1)
    torch.testing.assert_close(text_features(long, CAPTIONS), theirs, atol=1e-6, rtol=0)
    torch.testing.assert_close(image_features(long, pictures()), images, atol=1e-6, rtol=0)


def test_a_frozen_and_thawed_tower_leaves_no_trace_in_its_folder(tiny, tmp_path):
    long = tiny.stretched(248)
    plain = load_encoder(save_encoder(long, tmp_path / "a")).model.state_dict()
    freeze_first_positions(long.model.text)
    thaw_positions(long.model.text)
    thawed = load_encoder(save_encoder(long, tmp_path / "b")).model.state_dict()
    assert plain.keys() == thawed.keys()
    assert all(torch.equal(plain[k], thawed[k]) for k in plain)


def test_features_are_unit_norm_and_in_order(tiny):
    features = text_features(tiny, CAPTIONS)
    assert features.shape == (3, 32)
    torch.testing.assert_close(features.norm(dim=-1), torch.ones(3))
    for i, caption in enumerate(CAPTIONS):
        torch.testing.assert_close(text_features(tiny, [caption])[0], features[i], atol=1e-6, rtol=0)
    assert text_features(tiny, []).shape == (0, 32)


def test_an_interrupted_save_leaves_the_old_folder(tiny, tmp_path, monkeypatch):
    folder = save_encoder(tiny, tmp_path / "kept")
    before = (folder / "open_clip_config.json").read_text()

    def fail(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr("debias_diffusion.encoders.checkpoint.save_file", fail)
    with pytest.raises(KeyboardInterrupt):
        save_encoder(tiny.stretched(248), folder)
    assert (folder / "open_clip_config.json").read_text() == before
    load_encoder(folder)


@pytest.mark.parametrize("name", list(SPECS))
def test_every_row_builds_with_its_activation_and_stretches(name):
    spec = find_spec(name)
    config = spec_config(spec)
    assert config["quick_gelu"] == spec.quick_gelu
    with torch.device("meta"):
        text = open_clip.model._build_text_tower(
            config["embed_dim"], config["text_cfg"], quick_gelu=config["quick_gelu"]
        )
    activation = type(text.transformer.resblocks[0].mlp.gelu).__name__
    assert activation == ("QuickGELU" if spec.quick_gelu else "GELU")
    assert len(text.positional_embedding) == spec.context_length


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("no/such/folder", "expected a folder, a checkpoint file, or ROW:PRETRAINED with ROW one of ViT-B-16"),
        ("ViT-B-16:nonsense", "no pretrained weights 'nonsense'; tags: "),
    ],
)
def test_wrong_sources_say_what_would_be_right(source, message):
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        load_encoder(source)


def test_a_folder_of_another_size_is_refused(tiny_folder, tmp_path):
    import shutil

    folder = shutil.copytree(tiny_folder, tmp_path / "wrong")
    config = json.loads((folder / "open_clip_config.json").read_text())
    config["model_cfg"]["text_cfg"]["context_length"] = 248
    (folder / "open_clip_config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=r"text.positional_embedding has shape \(77, 32\) in the file, \(248, 32\)"):
        load_encoder(folder)


def test_a_missing_vocabulary_is_named(tiny):
    config = {k: v for k, v in tiny.model_config.items() if k != "custom_text"}
    with pytest.raises(ValueError, match="vocabulary file is missing"):
        build("tiny", config)


def test_a_wrong_word_for_tables_is_refused_and_a_run_folder_names_its_encoder(tmp_path):
    with pytest.raises((ValueError, TypeError), match="first"):  # TypeError: beartype's, which only tests switch on
        load_encoder("miniature:base", tables="last")  # type: ignore[arg-type]
    save_encoder(load_encoder("miniature:base"), tmp_path / "encoder")
    with pytest.raises(ValueError, match=r"no encoder: it holds .*encoder; name one of them"):
        load_encoder(tmp_path)
