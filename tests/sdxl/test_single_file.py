"""Single files for other tools, and towers taken back out of every shape SDXL checkpoints come in."""

import pickle
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import CLIPTextModelWithProjection

from debias_diffusion.cli import main
from debias_diffusion.encoders.checkpoint import load_encoder, save_encoder
from debias_diffusion.encoders.encoder import Encoder
from debias_diffusion.encoders.features import text_features
from debias_diffusion.sdxl.export import export_slot
from debias_diffusion.sdxl.prompts import pipeline_class
from debias_diffusion.sdxl.single_file import export_single_file, import_tower
from debias_diffusion.sdxl.slots import SLOTS, build_slot, slot_from_encoder, text_tower

SLOT_NAMES = tuple(SLOTS)
BOTH = pytest.mark.parametrize("slot", SLOT_NAMES)
PROMPTS = ["a photo of a cat", "two red cubes, one blue ball"]


def text_state(encoder: Encoder) -> dict[str, torch.Tensor]:
    return {k: v.detach().clone() for k, v in encoder.model.text.state_dict().items()}


def sdxl_checkpoint(encoders: dict[str, Encoder]) -> dict[str, torch.Tensor]:
    """The tensors of an SDXL single-file checkpoint: both towers under their names there, and a little UNet and VAE."""
    first = build_slot(text_tower(encoders["text_encoder"]), encoders["text_encoder"].tokenizer, "text_encoder_2").model
    state = {f"conditioner.embedders.0.transformer.{k}": v.clone() for k, v in first.state_dict().items()}
    del state["conditioner.embedders.0.transformer.text_projection.weight"]
    length = encoders["text_encoder"].context_length
    state["conditioner.embedders.0.transformer.text_model.embeddings.position_ids"] = torch.arange(length)[None]
    state |= {f"conditioner.embedders.1.model.{k}": v for k, v in text_state(encoders["text_encoder_2"]).items()}
    state["conditioner.embedders.1.model.logit_scale"] = torch.tensor(4.6)
    state["model.diffusion_model.out.0.weight"] = torch.ones(4)
    state["first_stage_model.encoder.conv_in.weight"] = torch.ones(4)
    return state


def assert_same_tower(found: Encoder, expected: Encoder, *, projection_of: Encoder | None = None) -> None:
    got, want = text_state(found), text_state(expected)
    if projection_of is not None:
        want["text_projection"] = text_state(projection_of)["text_projection"]
    assert got.keys() == want.keys()
    assert [key for key in want if not torch.equal(got[key], want[key])] == []


@BOTH
def test_single_file_has_the_keys_other_tools_look_for(
    slot: str, long_towers: dict[str, Encoder], tmp_path: Path
) -> None:
    path = export_single_file(long_towers[slot], slot, tmp_path / "deep" / "clip.safetensors", dtype="bf16")
    state = load_file(path)
    assert all(key.startswith("text_model.") for key in state if key != "text_projection.weight")
    assert state["text_model.embeddings.position_embedding.weight"].shape == (248, 64)
    assert {value.dtype for value in state.values()} == {torch.bfloat16}
    expected = long_towers[slot].model.text.text_projection.T.to(torch.bfloat16)
    assert torch.equal(state["text_projection.weight"], expected)
    with safe_open(path, "pt") as file:
        metadata = file.metadata()
    assert metadata["format"] == "pt"
    assert metadata["context_length"] == "248"
    assert [p.name for p in path.parent.iterdir()] == ["clip.safetensors"]


@BOTH
def test_single_file_opens_in_transformers_with_the_slot_config(
    slot: str, long_towers: dict[str, Encoder], tmp_path: Path
) -> None:
    encoder = long_towers[slot]
    state = load_file(export_single_file(encoder, slot, tmp_path / "clip.safetensors", dtype="fp32"))
    expected = build_slot(text_tower(encoder), encoder.tokenizer, "text_encoder_2").model
    model, info = CLIPTextModelWithProjection.from_pretrained(
        None, config=expected.config, state_dict=state, output_loading_info=True
    )
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert all(torch.equal(value, model.state_dict()[key]) for key, value in expected.state_dict().items())


@BOTH
def test_single_file_comes_back_as_it_was(slot: str, long_towers: dict[str, Encoder], tmp_path: Path) -> None:
    path = export_single_file(long_towers[slot], slot, tmp_path / "clip.safetensors", dtype="fp32")
    back = import_tower(path, slot, long_towers[slot])
    assert_same_tower(back, long_towers[slot])
    assert torch.equal(text_features(back, PROMPTS), text_features(long_towers[slot], PROMPTS))


@BOTH
def test_a_tower_comes_out_of_an_sdxl_checkpoint(
    slot: str, towers: dict[str, Encoder], make_tower: Callable[..., Encoder], tmp_path: Path
) -> None:
    save_file(sdxl_checkpoint(towers), tmp_path / "model.safetensors", metadata={"format": "pt"})
    source = make_tower(slot, seed=7)
    back = import_tower(tmp_path / "model.safetensors", slot, source)
    without_projection = source if slot == "text_encoder" else None
    assert_same_tower(back, towers[slot], projection_of=without_projection)
    assert back.history.get("text_projection") == (source.name if slot == "text_encoder" else None)
    assert torch.equal(back.model.visual.conv1.weight, source.model.visual.conv1.weight)
    assert torch.equal(back.model.logit_scale, source.model.logit_scale)
    shared = {p.data_ptr() for p in back.model.parameters()} & {p.data_ptr() for p in source.model.parameters()}
    assert not shared  # training the one does not move the other
    assert back.context_length == 77
    assert back.stretched(248).context_length == 248


@BOTH
def test_a_checkpoint_saved_with_long_towers_opens_too(
    slot: str, long_towers: dict[str, Encoder], towers: dict[str, Encoder], tmp_path: Path
) -> None:
    save_file(sdxl_checkpoint(long_towers), tmp_path / "model.safetensors", metadata={"format": "pt"})
    back = import_tower(tmp_path / "model.safetensors", slot, towers[slot])
    assert_same_tower(back, long_towers[slot], projection_of=towers[slot] if slot == "text_encoder" else None)
    assert back.context_length == back.tokenizer.context_length == 248


def test_our_pipeline_opens_an_sdxl_file_with_a_configuration_of_the_files_length(
    pipe: Any, mini: Encoder, make_tower: Callable[..., Encoder], long_towers: dict[str, Encoder], tmp_path: Path
) -> None:
    # diffusers tells the towers of a file apart by their width; UNet and VAE are given, so only they are read.
    encoders = {"text_encoder": make_tower("text_encoder", seed=7), "text_encoder_2": mini}
    slots = {slot: slot_from_encoder(encoder, slot) for slot, encoder in encoders.items()}
    pipe.register_modules(text_encoder_2=slots["text_encoder_2"].model, tokenizer_2=slots["text_encoder_2"].tokenizer)
    pipe.save_pretrained(tmp_path / "config")
    options = {"config": str(tmp_path / "config"), "unet": pipe.unet, "vae": pipe.vae}
    save_file(sdxl_checkpoint(encoders), tmp_path / "model.safetensors")
    opened = pipeline_class().from_single_file(str(tmp_path / "model.safetensors"), **options)
    assert type(opened) is pipeline_class()
    pipe.register_modules(text_encoder=slots["text_encoder"].model)
    with torch.no_grad():
        expected, found = (p.encode_prompt("a cat", negative_prompt="x") for p in (pipe, opened))
    assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))
    save_file(sdxl_checkpoint(encoders | {"text_encoder": long_towers["text_encoder"]}), tmp_path / "long.safetensors")
    with pytest.raises((ValueError, RuntimeError), match="248"):
        pipeline_class().from_single_file(str(tmp_path / "long.safetensors"), **options)


def test_other_names_of_the_second_tower(
    towers: dict[str, Encoder], make_tower: Callable[..., Encoder], tmp_path: Path
) -> None:
    source = make_tower("text_encoder_2", seed=7)
    refiner = {
        k.replace("embedders.1.", "embedders.0."): v
        for k, v in sdxl_checkpoint(towers).items()
        if "embedders.0." not in k
    }
    prefix = "conditioner.embedders.0.model.text_projection"
    refiner[f"{prefix}.weight"] = refiner.pop(prefix).T.contiguous()
    save_file(refiner, tmp_path / "refiner.safetensors")
    assert_same_tower(
        import_tower(tmp_path / "refiner.safetensors", "text_encoder_2", source), towers["text_encoder_2"]
    )


@BOTH
def test_a_tower_comes_out_of_a_diffusers_folder(
    slot: str, pipe: Any, towers: dict[str, Encoder], make_tower: Callable[..., Encoder], tmp_path: Path
) -> None:
    pipe.save_pretrained(tmp_path / "sdxl")
    source = make_tower(slot, seed=7)
    without_projection = source if slot == "text_encoder" else None
    for path in (tmp_path / "sdxl", tmp_path / "sdxl" / slot):
        back = import_tower(path, slot, source)
        assert_same_tower(back, towers[slot], projection_of=without_projection)


def test_a_lone_text_encoder_folder_with_flat_keys(
    towers: dict[str, Encoder], make_tower: Callable[..., Encoder], tmp_path: Path
) -> None:
    model = slot_from_encoder(towers["text_encoder"], "text_encoder").model
    assert "embeddings.token_embedding.weight" in model.state_dict()
    model.config.save_pretrained(tmp_path / "te")
    save_file(dict(model.state_dict()), tmp_path / "te" / "model.safetensors")
    source = make_tower("text_encoder", seed=7)
    back = import_tower(tmp_path / "te", "text_encoder", source)
    assert_same_tower(back, towers["text_encoder"], projection_of=source)


def test_a_whole_clip_model_file_gives_its_text_half(
    towers: dict[str, Encoder], make_tower: Callable[..., Encoder], tmp_path: Path
) -> None:
    path = export_single_file(towers["text_encoder"], "text_encoder", tmp_path / "clip.safetensors", dtype="fp32")
    state = load_file(path) | {"vision_model.post_layernorm.bias": torch.zeros(2), "logit_scale": torch.tensor(4.6)}
    save_file(state, tmp_path / "whole.safetensors")
    back = import_tower(tmp_path / "whole.safetensors", "text_encoder", make_tower("text_encoder", seed=7))
    assert_same_tower(back, towers["text_encoder"])


def test_an_old_checkpoint_file_is_read_as_tensors_only(
    towers: dict[str, Encoder], make_tower: Callable[..., Encoder], tmp_path: Path
) -> None:
    torch.save({"state_dict": sdxl_checkpoint(towers), "global_step": 3}, tmp_path / "model.ckpt")
    source = make_tower("text_encoder_2", seed=7)
    assert_same_tower(import_tower(tmp_path / "model.ckpt", "text_encoder_2", source), towers["text_encoder_2"])


def test_a_pickled_model_is_refused(mini: Encoder, tmp_path: Path) -> None:
    torch.save(mini.model.text, tmp_path / "model.pt")
    with pytest.raises(ValueError, match="pickled model or holds code"):
        import_tower(tmp_path / "model.pt", "text_encoder", mini)
    (tmp_path / "list.pt").write_bytes(pickle.dumps([1, 2]))
    with pytest.raises(ValueError, match=r"list.pt"):
        import_tower(tmp_path / "list.pt", "text_encoder", mini)


def test_what_cannot_be_a_tower_is_refused_in_words(mini: Encoder, tmp_path: Path) -> None:
    encoder, slot = mini, "text_encoder"
    whole = export_single_file(encoder, slot, tmp_path / "clip.safetensors", dtype="fp32")
    cut = tmp_path / "cut.safetensors"
    cut.write_bytes(whole.read_bytes()[:-100])
    with pytest.raises(ValueError, match="not a whole safetensors file"):
        import_tower(cut, slot, encoder)
    state = load_file(whole)
    save_file({"unet.weight": torch.zeros(2)}, tmp_path / "unet.safetensors")
    with pytest.raises(ValueError, match=r"no text tower for text_encoder: its keys start \['unet.weight'\]"):
        import_tower(tmp_path / "unet.safetensors", slot, encoder)
    save_file(state | {"text_model.lora.weight": torch.zeros(2)}, tmp_path / "extra.safetensors")
    with pytest.raises(ValueError, match=r"no weight 'lora.weight'"):
        import_tower(tmp_path / "extra.safetensors", slot, encoder)
    del state["text_model.final_layer_norm.bias"]
    save_file(state, tmp_path / "less.safetensors")
    with pytest.raises(ValueError, match=r"missing \['text.ln_final.bias'\]"):
        import_tower(tmp_path / "less.safetensors", slot, encoder)
    with pytest.raises(FileNotFoundError, match="nowhere"):
        import_tower(tmp_path / "nowhere.safetensors", slot, encoder)
    with pytest.raises(FileNotFoundError, match="no SDXL folder"):
        import_tower(tmp_path, slot, encoder)


def test_the_wrong_source_or_slot_is_refused(
    towers: dict[str, Encoder], tiny_folder: Path, slots_77: Path, tmp_path: Path
) -> None:
    path = export_single_file(towers["text_encoder_2"], "text_encoder_2", tmp_path / "g.safetensors")
    with pytest.raises(ValueError, match="exported for text_encoder_2, not for text_encoder"):
        import_tower(path, "text_encoder", towers["text_encoder"])
    with pytest.raises(ValueError, match="tower with gelu, .* has quick_gelu"):
        import_tower(path, "text_encoder_2", towers["text_encoder"])
    with pytest.raises(ValueError, match="tower with gelu, .* has quick_gelu"):
        import_tower(slots_77, "text_encoder_2", towers["text_encoder"])
    with pytest.raises(ValueError, match=r"64 wide, .* 32 wide; name the encoder"):
        import_tower(slots_77, "text_encoder", load_encoder(tiny_folder))


def test_a_file_that_names_a_full_size_tower_says_whose_it_is(mini: Encoder, tmp_path: Path) -> None:
    path = export_single_file(mini, "text_encoder", tmp_path / "clip.safetensors")
    state = load_file(path) | {"text_model.embeddings.token_embedding.weight": torch.zeros(8, 1280)}
    save_file(state, tmp_path / "g.safetensors")
    with pytest.raises(ValueError, match="1280 wide, .* that is text_encoder_2's tower"):
        import_tower(tmp_path / "g.safetensors", "text_encoder", mini)


def test_single_file_refuses_other_names_and_towers_without_projection(mini: Encoder, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="something.safetensors, got 'clip.bin'"):
        export_single_file(mini, "text_encoder", tmp_path / "clip.bin")
    bare = mini.stretched(77)
    bare.model.text.text_projection = None
    with pytest.raises(ValueError, match="no text projection"):
        export_single_file(bare, "text_encoder", tmp_path / "clip.safetensors")
    assert not list(tmp_path.iterdir())


def test_a_broken_tower_leaves_the_file_of_before(mini: Encoder, tmp_path: Path) -> None:
    path = export_single_file(mini, "text_encoder", tmp_path / "clip.safetensors")
    before = path.read_bytes()
    claimed = replace(mini, tokenizer=mini.tokenizer.with_context(248))
    with pytest.raises(ValueError, match="77 rows"):
        export_single_file(claimed, "text_encoder", path)
    assert path.read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["clip.safetensors"]


def test_there_and_back_by_command(mini: Encoder, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = str(save_encoder(mini, tmp_path / "encoder"))
    path, back = str(tmp_path / "clip_l.safetensors"), str(tmp_path / "back")
    main(["export", source, path, "--slot", "text_encoder", "--to", "single-file", "--dtype", "fp32"])
    assert "text_encoder for 77 tokens, fp32" in capsys.readouterr().out
    main(["export", path, back, "--slot", "text_encoder", "--to", "encoder", "--base", source])
    assert f"train it with --encoder {back}" in capsys.readouterr().out
    assert_same_tower(load_encoder(back), mini)


def test_an_imported_tower_exports_again_unchanged(mini: Encoder, mini_slots: Path, tmp_path: Path) -> None:
    back = import_tower(mini_slots, "text_encoder_2", mini)
    again = export_slot(back, "text_encoder_2", tmp_path, dtype="fp32")
    first, second = (load_file(f / "text_encoder_2" / "model.safetensors") for f in (mini_slots, again))
    assert first.keys() == second.keys()
    assert all(torch.equal(first[key], second[key]) for key in first)
