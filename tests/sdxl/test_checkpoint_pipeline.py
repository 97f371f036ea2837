"""SDXL opens from every shape of checkpoint, with the very same weights, and what is missing is named."""

import importlib.util
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from debias_diffusion.sdxl.checkpoint_pipeline import load_pipeline
from debias_diffusion.sdxl.config_files import CONFIG_FILES, VOCABULARY
from debias_diffusion.sdxl.generate import Settings, draw
from debias_diffusion.sdxl.prompts import PromptLine

_LAYOUTS = Path(__file__).with_name("layouts.py")
MODELS = ("unet", "vae", "text_encoder", "text_encoder_2")


@pytest.fixture(scope="module")
def layouts() -> Any:
    spec = importlib.util.spec_from_file_location("sdxl_layouts", _LAYOUTS)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def parts(layouts) -> Any:
    return layouts.make_parts()


@pytest.fixture(scope="module")
def root(layouts, parts, tmp_path_factory) -> Path:
    """A folder with weights in fp16 alone, a single file, and a folder with its configuration; not to be changed."""
    root = tmp_path_factory.mktemp("sdxl")
    layouts.write_folder(parts, root / "folder", ("fp16",))
    layouts.write_file(parts, root / "model.safetensors")
    layouts.write_config(parts, root / "config")
    return root


def opened(root: Path, kind: str, dtype: torch.dtype = torch.float32) -> Any:
    arguments = {"folder": (None, None), "folder of fp16": ("fp16", None), "file": (None, root / "config")}[kind]
    pipe = load_pipeline(str(root / ("model.safetensors" if kind == "file" else "folder")), dtype, *arguments)
    pipe.set_progress_bar_config(disable=True)
    return pipe


@pytest.mark.parametrize("kind", ["folder", "folder of fp16", "file"])
def test_every_weight_and_token_of_sdxl_comes_out_as_it_was(kind, parts, root):
    pipe, expected = opened(root, kind), parts.pipeline()
    assert type(pipe).__name__ == "StableDiffusionXLPipeline"
    for name in MODELS:
        got, want = getattr(pipe, name).state_dict(), getattr(expected, name).state_dict()
        assert got.keys() == want.keys()
        assert [key for key in want if not torch.equal(got[key], want[key])] == []
    assert (pipe.tokenizer.pad_token, pipe.tokenizer_2.pad_token) == ("<|endoftext|>", "!")
    for slot, tokenizer in (("tokenizer", pipe.tokenizer), ("tokenizer_2", pipe.tokenizer_2)):
        more = {"padding": "max_length", "truncation": True}
        assert (
            tokenizer("Two red cubes!", **more).input_ids == getattr(expected, slot)("Two red cubes!", **more).input_ids
        )
    line, settings = PromptLine("two red cubes!", negative="bad"), Settings(2, 3.0, 64, 64)
    assert draw(pipe, line, 0, settings).tobytes() == draw(expected, line, 0, settings).tobytes()


def test_half_precision_is_kept_where_it_is_asked_for(root):
    for kind in ("folder", "file"):
        pipe = opened(root, kind, torch.float16)
        assert {getattr(pipe, name).dtype for name in MODELS} == {torch.float16}


def test_plain_weights_come_before_those_of_a_variant_and_two_variants_are_a_choice(layouts, parts, tmp_path):
    folder = layouts.write_folder(parts, tmp_path / "both", (None, "fp16"))
    with torch.no_grad():
        half = {k: v.half() + 1 for k, v in parts.vae.state_dict().items()}
    save_file(half, folder / layouts.weights_file("vae", "fp16"), metadata={"format": "pt"})
    own = parts.vae.state_dict()["decoder.conv_in.bias"]
    plain, other = (load_pipeline(str(folder), torch.float32, v).vae.decoder.conv_in.bias for v in (None, "fp16"))
    assert torch.equal(plain, own)
    assert torch.equal(other, (own.half() + 1).float())
    (folder / layouts.weights_file("vae", None)).rename(folder / layouts.weights_file("vae", "ema"))
    with pytest.raises(ValueError, match=r"come as ema, fp16; choose one with --variant"):
        load_pipeline(str(folder), torch.float32)


def test_a_file_of_another_kind_is_refused_by_what_it_lacks(root, tmp_path):
    save_file({"text_model.embeddings.token_embedding.weight": torch.ones(2)}, tmp_path / "clip.safetensors")
    (tmp_path / "broken.safetensors").write_bytes((root / "model.safetensors").read_bytes()[:1000])
    config = root / "config"
    for path, more, message in (
        (tmp_path / "clip.safetensors", (None, config), "it has no UNet, VAE, first text encoder, second text encoder"),
        (tmp_path / "broken.safetensors", (None, config), "is no whole .safetensors file"),
        (root / "model.safetensors", ("fp16", config), "--variant fp16 belongs to a folder"),
    ):
        with pytest.raises(ValueError, match=message):
            load_pipeline(str(path), torch.float32, *more)
    with pytest.raises(FileNotFoundError, match=r"there is no file .*absent"):
        load_pipeline(str(tmp_path / "absent.safetensors"), torch.float32)
    with pytest.raises(ValueError, match="a folder has its own"):
        load_pipeline(str(root / "folder"), torch.float32, None, config)


@pytest.mark.parametrize("name", [*CONFIG_FILES, *(f"tokenizer_2/{name}" for name in VOCABULARY)])
def test_a_configuration_that_lacks_a_file_is_refused_by_its_name(name, root, tmp_path):
    shutil.copytree(root / "config", tmp_path / "config")
    (tmp_path / "config" / name).unlink()
    with pytest.raises(FileNotFoundError, match=rf"it has no {name}; name a folder with it in --config"):
        load_pipeline(str(root / "model.safetensors"), torch.float32, None, tmp_path / "config")


def test_a_configuration_of_another_size_is_refused(root, tmp_path):
    shutil.copytree(root / "config", tmp_path / "config")
    path = tmp_path / "config" / "unet" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"block_out_channels": [32, 64, 96]}))
    with pytest.raises(ValueError, match="lacks weights of the unet that its configuration calls for"):
        load_pipeline(str(root / "model.safetensors"), torch.float32, None, tmp_path / "config")


# What would run, or be filled in silence


def changed(root: Path, name: str, **changes: Any) -> Path:
    path = root / name
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    return root


@pytest.mark.parametrize(
    ("component", "message"),
    [
        (
            {"scheduler": ["evil_module", "X"]},
            r"'evil_module', 'X'.* as scheduler; expected diffusers and one of its sch",
        ),
        ({"scheduler": ["diffusers", "AutoencoderKL"]}, "as scheduler; expected diffusers and one of its schedulers"),
        ({"scheduler": "evil_module"}, "names 'evil_module' as scheduler"),
        ({"unet": [None, None]}, "as unet; expected diffusers and UNet2DConditionModel"),
        ({"unet": None}, "names None as unet"),
        ({"vae": ["evil_module", "AutoencoderKL"]}, "as vae; expected diffusers and AutoencoderKL"),
        (
            {"text_encoder_2": ["transformers", "CLIPTextModel"]},
            "expected transformers and CLIPTextModelWithProjection",
        ),
        ({"tokenizer": ["transformers", "AutoTokenizer"]}, "expected transformers and CLIPTokenizer"),
        ({"feature_extractor": ["evil_module", "X"]}, "as feature_extractor; expected transformers"),
        ({"safety_checker": ["evil_module", "X"]}, "as safety_checker; expected none"),
    ],
)
@pytest.mark.parametrize("kind", ["file", "folder"])
def test_a_class_that_is_not_sdxls_is_refused_and_its_module_never_imported(
    kind, component, message, root, tmp_path, monkeypatch
):
    ran = tmp_path / "ran"
    (tmp_path / "evil_module.py").write_text(f"open({str(ran)!r}, 'w').close()\nclass X: pass\n")
    monkeypatch.syspath_prepend(tmp_path)
    own = changed(Path(shutil.copytree(root / "config", tmp_path / "own")), "model_index.json", **component)
    arguments = (str(root / "model.safetensors"), own) if kind == "file" else (str(own), None)
    with pytest.raises(ValueError, match=message):
        load_pipeline(arguments[0], torch.float32, None, arguments[1])
    assert not ran.exists()


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        *((name, "[]", rf"{name} holds a list, expected a JSON object") for name in CONFIG_FILES),
        ("unet/config.json", "{", r"unet/config.json is no JSON"),
        ("vae/config.json", "[" * 100_000, r"vae/config.json is no JSON"),
        ("tokenizer/vocab.json", "{", r"own/tokenizer cannot be used"),
        ("tokenizer_2/vocab.json", "[]", r"own/tokenizer_2 cannot be used"),
        ("scheduler/scheduler_config.json", '{"beta_schedule": []}', "scheduler_config.json cannot be used"),
        ("unet/config.json", '{"block_out_channels": null}', "unet/config.json cannot be used"),
    ],
)
def test_odd_configuration_is_one_error_that_names_its_place(name, content, message, root, tmp_path):
    own = Path(shutil.copytree(root / "config", tmp_path / "own"))
    (own / name).write_text(content)
    with pytest.raises(ValueError, match=message):
        load_pipeline(str(root / "model.safetensors"), torch.float32, None, own)


UNET, FIRST = "model.diffusion_model.", "conditioner.embedders.0.transformer.text_model."
SECOND, VAE = "conditioner.embedders.1.model.", "first_stage_model."


@pytest.mark.parametrize(
    ("key", "message"),
    [
        (f"{UNET}input_blocks.0.0.weight", "lacks weights of the unet .*: conv_in.weight"),
        (f"{VAE}quant_conv.weight", "lacks weights of the vae .*: quant_conv.weight"),
        (f"{FIRST}encoder.layers.0.mlp.fc1.weight", "lacks weights of the text_encoder .*layers.0.mlp.fc1.weight"),
        (f"{FIRST}embeddings.position_embedding.weight", "lacks conditioner.*position_embedding.weight"),
        (f"{SECOND}positional_embedding", "lacks conditioner.*positional_embedding"),
        (f"{SECOND}text_projection", "lacks weights of the text_encoder_2 .*text_projection"),
        (f"{SECOND}transformer.resblocks.3.attn.in_proj_weight", "of the text_encoder_2 .*layers.3.self_attn"),
    ],
)
def test_a_file_that_lacks_a_weight_is_refused_by_its_name(key, message, root, tmp_path):
    state = load_file(root / "model.safetensors")
    del state[key]
    save_file(state, tmp_path / "less.safetensors")
    with pytest.raises(ValueError, match=message):
        load_pipeline(str(tmp_path / "less.safetensors"), torch.float32, None, root / "config")


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("text_encoder", {"num_hidden_layers": 1}, r"of the text_encoder .* no place for: text_model.encoder.layers.1"),
        ("text_encoder_2", {"num_hidden_layers": 10}, r"of the text_encoder_2 .* no place for: .*\.10\."),
        ("text_encoder", {"num_hidden_layers": 3}, r"lacks weights of the text_encoder .*layers.2"),
        ("unet", {"transformer_layers_per_block": [1, 2, 9]}, r"a UNet of [\d,]+ values, of which its configuration"),
    ],
)
@pytest.mark.parametrize("kind", ["file", "folder"])
def test_a_configuration_of_another_depth_is_refused(kind, name, change, message, root, tmp_path):
    own = Path(shutil.copytree(root / ("config" if kind == "file" else "folder"), tmp_path / "own"))
    changed(own, f"{name}/config.json", **change)
    arguments = (str(root / "model.safetensors"), None, own) if kind == "file" else (str(own), None, None)
    with pytest.raises(ValueError, match=message):
        load_pipeline(arguments[0], torch.float32, *arguments[1:])


@pytest.mark.parametrize(("name", "key"), [("text_encoder", "fc1.weight"), ("unet", "conv_in.weight")])
def test_a_folder_that_lacks_a_weight_is_not_filled_with_random_ones(name, key, layouts, root, tmp_path):
    own = Path(shutil.copytree(root / "folder", tmp_path / "own"))
    path = own / layouts.weights_file(name, "fp16")
    state = {k: v for k, v in load_file(path).items() if not k.endswith(key)}
    save_file(state, path, metadata={"format": "pt"})
    with pytest.raises(ValueError, match=rf"lacks weights of the {name} .*{key}"):
        load_pipeline(str(own), torch.float32)
