"""Each kind of weight file is told apart by what it holds, and gives the features its own library gives."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import open_clip
import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from safetensors.torch import save_file
from torch import Tensor
from transformers import CLIPConfig, CLIPModel

from debias_diffusion import image_features, load_encoder, save_encoder, text_features
from debias_diffusion.encoders.checkpoint import WEIGHTS_FILE
from debias_diffusion.encoders.convert import clip_from_transformers
from debias_diffusion.encoders.foreign import infer_config, read_weights

State = dict[str, Tensor]

CONFIG = {
    "embed_dim": 24,
    "vision_cfg": {"image_size": 32, "patch_size": 16, "width": 64, "layers": 1, "head_width": 64},
    "text_cfg": {"context_length": 77, "vocab_size": 49408, "width": 128, "heads": 2, "layers": 2},
}
CAPTIONS = ["A small red star in the top left.", "A barn. " * 60, ""]
PICTURES = [Image.new("RGB", (40, 30), colour) for colour in ("red", "navy")]


def stir(model: torch.nn.Module) -> None:
    """Fresh norms are ones, biases zeros and position tables small: a swapped or dropped one would not show."""
    generator = torch.Generator().manual_seed(1)
    for parameter in model.parameters():
        parameter.data += 0.05 * torch.randn(parameter.shape, generator=generator)


@pytest.fixture(scope="module")
def clip() -> open_clip.CLIP:
    """open_clip's own model class, whose text keys carry no prefix."""
    torch.manual_seed(0)
    model = open_clip.CLIP(**CONFIG, quick_gelu=False).eval()
    stir(model)
    return model


@pytest.fixture(scope="module")
def plain(clip: open_clip.CLIP) -> State:
    return {name: tensor.clone() for name, tensor in clip.state_dict().items()}


@pytest.fixture(scope="module")
def expected(clip: open_clip.CLIP) -> Tensor:
    """(3, 24) open_clip's own text features, through open_clip's own tokenizer."""
    with torch.no_grad():
        return F.normalize(clip.encode_text(open_clip.tokenize(CAPTIONS)), dim=-1)


def custom(state: State) -> State:
    """The names of open_clip's CustomTextCLIP."""
    return {name if name.startswith(("visual.", "logit_scale")) else f"text.{name}": t for name, t in state.items()}


def wrapped(state: State) -> State:
    return {f"module.{name}": tensor for name, tensor in state.items()}


def write_pt(content: object, path: Path) -> Path:
    torch.save(content, path)
    return path


def write_safetensors(state: State, path: Path) -> Path:
    save_file({name: tensor.contiguous() for name, tensor in state.items()}, path)
    return path


FILES: dict[str, Callable[[State, Path], Path]] = {
    "open_clip .pt": lambda s, d: write_pt(s, d / "a.pt"),
    "open_clip .safetensors": lambda s, d: write_safetensors(s, d / "a.safetensors"),
    "open_clip training checkpoint": lambda s, d: write_pt({"epoch": 1, "state_dict": wrapped(s)}, d / "a.pt"),
    "open_clip compiled": lambda s, d: write_pt({"model": {f"_orig_mod.{k}": v for k, v in s.items()}}, d / "a.bin"),
    "module. .safetensors": lambda s, d: write_safetensors(wrapped(s), d / "a.safetensors"),
    "text. .pt": lambda s, d: write_pt(custom(s), d / "a.pth"),
    "text. .safetensors": lambda s, d: write_safetensors(custom(s), d / "a.safetensors"),
    "module.text. .pt": lambda s, d: write_pt({"state_dict": wrapped(custom(s))}, d / "a.pt"),
    "OpenAI's extra numbers": lambda s, d: write_pt(
        {**s, "input_resolution": torch.tensor(32), "context_length": torch.tensor(77), "vocab_size": torch.tensor(9)},
        d / "a.pt",
    ),
}


@pytest.mark.parametrize("kind", FILES)
def test_open_clip_files_give_open_clips_own_features(kind, plain, clip, expected, tmp_path):
    path = FILES[kind](plain, tmp_path)
    assert read_weights(path).kind == "open_clip"
    encoder = load_encoder(path, quick_gelu=False)
    torch.testing.assert_close(text_features(encoder, CAPTIONS), expected, atol=1e-5, rtol=0)
    with torch.no_grad():
        images = clip.encode_image(torch.stack([encoder.preprocess(p) for p in PICTURES]), normalize=True)
    torch.testing.assert_close(image_features(encoder, PICTURES), images, atol=1e-5, rtol=0)


def test_the_weights_of_our_own_folder_open_as_a_file(plain, expected, tmp_path):
    encoder = load_encoder(write_pt(plain, tmp_path / "a.pt"), quick_gelu=False)
    folder = save_encoder(encoder, tmp_path / "saved")
    torch.testing.assert_close(text_features(load_encoder(folder), CAPTIONS), expected, atol=1e-5, rtol=0)
    alone = load_encoder(folder / WEIGHTS_FILE, quick_gelu=False)
    torch.testing.assert_close(text_features(alone, CAPTIONS), expected, atol=1e-5, rtol=0)


def test_half_precision_weights_are_read_as_float32(plain, expected, tmp_path):
    encoder = load_encoder(write_pt({k: v.half() for k, v in plain.items()}, tmp_path / "a.pt"), quick_gelu=False)
    assert {parameter.dtype for parameter in encoder.model.parameters()} == {torch.float32}
    torch.testing.assert_close(text_features(encoder, CAPTIONS), expected, atol=5e-3, rtol=0)


def two_tables(plain: State) -> State:
    table = plain["positional_embedding"]
    return {**plain, "positional_embedding_res": table + torch.randn(table.shape, generator=torch.Generator())}


def test_long_clip_and_debias_files_fuse_their_tables_and_first_drops_the_trained_one(plain, tmp_path):
    state = two_tables(plain)
    base, trained = state["positional_embedding"], state["positional_embedding_res"]
    official = {"epoch": 3, "name": "x_vitb16_openai", "state_dict": custom(state), "optimizer": {}, "scaler": {}}
    files = {
        "Long-CLIP": write_pt(state, tmp_path / "longclip.pt"),
        "DeBias-CLIP": write_pt(official, tmp_path / "debias.pt"),
    }
    for kind, path in files.items():
        assert read_weights(path).kind == kind
        fused = load_encoder(path)
        assert fused.model_config["quick_gelu"] is True
        assert torch.equal(fused.model.text.positional_embedding, torch.cat([base[:20], trained[20:]]))
        first = load_encoder(path, tables="first")
        assert torch.equal(first.model.text.positional_embedding, base)
    assert torch.equal(
        text_features(load_encoder(files["Long-CLIP"]), CAPTIONS),
        text_features(load_encoder(files["DeBias-CLIP"]), CAPTIONS),
    )


def test_golden_long_clip_features_come_out_of_both_published_forms(shared, tmp_path):
    golden = np.load(shared / "vectors" / "longclip_tiny.npz")
    state = {k.removeprefix("sd/"): torch.from_numpy(golden[k]) for k in golden.files if k.startswith("sd/")}
    official = {"epoch": 3, "name": "x_vitb16_openai", "state_dict": custom(state), "optimizer": {}, "scaler": {}}
    for path in (write_pt(state, tmp_path / "longclip.pt"), write_pt(official, tmp_path / "debias.pt")):
        encoder = load_encoder(path)
        assert encoder.context_length == 248
        theirs = F.normalize(torch.from_numpy(golden["long_features"]), dim=-1)
        torch.testing.assert_close(text_features(encoder, golden["captions"].tolist()), theirs, atol=1e-5, rtol=0)
        with torch.no_grad():
            images = F.normalize(encoder.model.visual(torch.from_numpy(golden["images"]).float()), dim=-1)
        theirs = F.normalize(torch.from_numpy(golden["image_features"]), dim=-1)
        torch.testing.assert_close(images, theirs, atol=1e-5, rtol=0)


def transformers_model(**text: object) -> CLIPModel:
    """A real CLIPModel whose sizes are no powers of two and whose heads are not 64 wide."""
    torch.manual_seed(0)
    config = CLIPConfig(
        text_config={
            "hidden_size": 32, "intermediate_size": 37, "num_hidden_layers": 2, "num_attention_heads": 4,
            "vocab_size": 49408, "max_position_embeddings": 77, **text,
        },
        vision_config={
            "hidden_size": 48, "intermediate_size": 100, "num_hidden_layers": 2, "num_attention_heads": 3,
            "image_size": 32, "patch_size": 16, "hidden_act": text.get("hidden_act", "quick_gelu"),
        },
        projection_dim=24,
    )  # fmt: skip
    model = CLIPModel(config).eval()
    stir(model)
    return model


@pytest.mark.parametrize("activation", ["quick_gelu", "gelu"])
def test_a_transformers_folder_gives_transformers_own_features(activation, tmp_path):
    model = transformers_model(hidden_act=activation)
    model.save_pretrained(tmp_path / "clip")
    encoder = load_encoder(tmp_path / "clip")
    assert encoder.name == "clip"
    ids = open_clip.tokenize(CAPTIONS)
    pixel_values = torch.stack([encoder.preprocess(p) for p in PICTURES])
    with torch.no_grad():
        out = model(input_ids=ids, pixel_values=pixel_values)
    torch.testing.assert_close(text_features(encoder, CAPTIONS), out.text_embeds, atol=1e-5, rtol=0)
    torch.testing.assert_close(image_features(encoder, PICTURES), out.image_embeds, atol=1e-5, rtol=0)


def test_a_transformers_config_may_leave_out_its_defaults(tmp_path):
    model = transformers_model(num_attention_heads=8)
    model.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    for name in ("num_attention_heads", "hidden_act"):
        del config["text_config"][name]
    (tmp_path / "config.json").write_text(json.dumps(config))
    with torch.no_grad():
        theirs = model.get_text_features(open_clip.tokenize(CAPTIONS))
    theirs = F.normalize(getattr(theirs, "pooler_output", theirs), dim=-1)
    torch.testing.assert_close(text_features(load_encoder(tmp_path), CAPTIONS), theirs, atol=1e-5, rtol=0)


def test_other_transformers_models_are_refused_by_name(tmp_path):
    transformers_model().text_model.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="holds a transformers 'clip_text_model' model; expected a CLIPModel"):
        load_encoder(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "clip"}))
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match=r"has a config.json but no model.safetensors"):
        load_encoder(tmp_path)


def test_towers_of_unlike_activation_are_refused(tmp_path):
    model = transformers_model()
    model.config.vision_config.hidden_act = "gelu"
    model.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"hidden_act is \['gelu', 'quick_gelu'\]; expected .* in both towers"):
        load_encoder(tmp_path)


def test_a_transformers_state_without_projection_is_refused_by_name():
    state = transformers_model().state_dict()
    del state["visual_projection.weight"]
    with pytest.raises(ValueError, match="visual_projection.weight"):
        clip_from_transformers(state)
    state = {**transformers_model().state_dict(), "text_model.extra": torch.zeros(1)}
    with pytest.raises(ValueError, match="no weight 'extra'"):
        clip_from_transformers(state)


def test_an_activation_that_no_file_records_is_asked_for(plain, tmp_path):
    path = write_pt(plain, tmp_path / "a.pt")
    with pytest.raises(ValueError, match=r"does not record its activation.*quick_gelu=True.*or name its row"):
        load_encoder(path)
    unlike = text_features(load_encoder(path, quick_gelu=True), CAPTIONS)
    assert not torch.allclose(unlike, text_features(load_encoder(path, quick_gelu=False), CAPTIONS), atol=1e-3)
    nameless = write_pt({"name": "x_vitb16_laion2b", "state_dict": custom(two_tables(plain))}, tmp_path / "b.pt")
    with pytest.raises(ValueError, match="does not record its activation"):
        load_encoder(nameless)


def test_unknown_and_missing_weights_are_named(plain, tmp_path):
    more = {**custom(plain), "text.adapter.weight": torch.zeros(3)}
    with pytest.raises(ValueError, match=r"unknown \['text.adapter.weight'\]"):
        load_encoder(write_pt(more, tmp_path / "more.pt"), quick_gelu=False)
    less = {name: tensor for name, tensor in plain.items() if name != "ln_final.bias"}
    with pytest.raises(ValueError, match=r"missing \['text.ln_final.bias'\]"):
        load_encoder(write_pt(less, tmp_path / "less.pt"), quick_gelu=False)


@pytest.mark.parametrize(("name", "width"), [("image", 96), ("text", 96)])
def test_head_counts_are_not_guessed(name, width, plain):
    state = custom(plain)
    if name == "image":
        state["visual.conv1.weight"] = torch.zeros(width, 3, 16, 16)
    else:
        state["text.positional_embedding"] = torch.zeros(77, width)
    with pytest.raises(ValueError, match=f"the {name} tower is {width} wide: its number of heads is unknown"):
        infer_config(state)


@pytest.mark.filterwarnings("ignore:`torch.jit:FutureWarning", "ignore:'torch.load' received a zip:UserWarning")
def test_what_is_not_executed_or_not_whole_says_so(plain, tmp_path):
    whole = write_pt(torch.nn.Linear(2, 2), tmp_path / "whole.pt")
    inside = write_pt({"model": torch.nn.Linear(2, 2)}, tmp_path / "inside.pt")
    script = tmp_path / "script.pt"
    torch.jit.save(torch.jit.trace(torch.nn.Linear(2, 2), torch.zeros(1, 2)), str(script))
    cut = write_safetensors(plain, tmp_path / "cut.safetensors")
    cut.write_bytes(cut.read_bytes()[:5000])
    cut_pt = write_pt(plain, tmp_path / "cut.pt")
    cut_pt.write_bytes(cut_pt.read_bytes()[:5000])
    pointer = tmp_path / "pointer.pt"
    pointer.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 3\n")
    empty = tmp_path / "empty.pt"
    empty.touch()
    for path, message in {
        whole: "is a pickled model or holds code, which is never executed; save its state_dict",
        inside: "is a pickled model or holds code",
        script: "is a TorchScript program, which is never executed; save its state_dict",
        cut: "is not a whole safetensors file .* copy or download it again",
        cut_pt: "is not a whole PyTorch weight file .* copy or download it again",
        pointer: "is no PyTorch weight file: it starts with b'version https://'; copy or download it again",
        empty: "is no PyTorch weight file: it starts with b''",
        write_pt({"epoch": 3}, tmp_path / "none.pt"): r"holds no tensors; its keys are \['epoch'\]",
        write_pt([torch.zeros(1)], tmp_path / "list.pt"): "holds a list, expected a dictionary of tensors",
        write_pt({"weight": torch.zeros(1)}, tmp_path / "other.pt"): r"holds no CLIP model .* keys start \['weight'\]",
    }.items():
        with pytest.raises(ValueError, match=f"{path.name} {message}"):
            load_encoder(path, quick_gelu=False)


def test_an_image_tower_of_another_kind_is_sent_to_its_row(plain, tmp_path):
    resnet = {**{k: v for k, v in plain.items() if k != "visual.class_embedding"}, "visual.layer1": torch.zeros(1)}
    with pytest.raises(ValueError, match="the image tower is not a ViT; name the encoder's row"):
        load_encoder(write_pt(resnet, tmp_path / "a.pt"), quick_gelu=False)
