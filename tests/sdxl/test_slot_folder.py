"""A slot folder opens only where every number in it agrees; what does not is named."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from debias_diffusion.sdxl.drift import slot_states
from debias_diffusion.sdxl.slot_folder import open_slot


def edit(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def rewrite(folder: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    state = load_file(folder / "text_encoder_2" / "model.safetensors")
    change(state)
    save_file(state, folder / "text_encoder_2" / "model.safetensors", metadata={"format": "pt"})


def truncate(folder: Path) -> None:
    path = folder / "text_encoder_2" / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1000])


def model_config(**changes: Any) -> Callable[[Path], None]:
    return lambda folder: edit(folder / "text_encoder_2" / "config.json", **changes)


def tokenizer_config(**changes: Any) -> Callable[[Path], None]:
    return lambda folder: edit(folder / "tokenizer_2" / "tokenizer_config.json", **changes)


DAMAGE: dict[str, tuple[Callable[[Path], Any], str]] = {
    "longer config": (model_config(max_position_embeddings=248), "tokenizer cuts at 77 tokens.*248"),
    "longer tokenizer": (tokenizer_config(model_max_length=248), "tokenizer cuts at 248 tokens.*77"),
    "other activation": (model_config(hidden_act="gelu"), "written with hidden_act quick_gelu, config.json says gelu"),
    "unknown activation": (model_config(hidden_act="relu"), "'relu', expected quick_gelu or gelu"),
    "legacy eos": (model_config(eos_token_id=2), "eos_token_id 2, the tokenizer 850"),
    "other pad": (tokenizer_config(pad_token="<|endoftext|>"), "pads with '<.endoftext.>'.*'!'"),
    "other class": (model_config(architectures=["CLIPTextModel"]), "is a CLIPTextModel, expected CLIPTextModelWithProj"),
    "other model": (model_config(model_type="t5"), "'t5' model, expected 'clip_text_model'"),
    "fewer ids": (model_config(vocab_size=100), "tokenizer has 851 ids, the token embedding 100"),
    "no activation": (model_config(hidden_act=None), "text_encoder_2 .*config.json has no hidden_act"),
    "no length": (model_config(max_position_embeddings=None), "config.json has no max_position_embeddings"),
    "length in text": (model_config(max_position_embeddings="77"), "max_position_embeddings '77', expected a whole"),
    "odd layers": (model_config(num_hidden_layers=[2]), r"num_hidden_layers \[2\], expected a whole number"),
    "odd record": (model_config(debias_diffusion=[1]), r"debias_diffusion \[1\], expected an object"),
    "odd field": (model_config(attention_dropout="x"), "text_encoder_2/config.json cannot be used.*attention_dropout"),
    "a list": (lambda f: (f / "text_encoder_2" / "config.json").write_text("[]"), "2/config.json holds a list"),
    "broken": (lambda f: (f / "text_encoder_2" / "config.json").write_text("{"), "text_encoder_2/config.json is no JSON"),
    "broken tokenizer": (
        lambda f: [p.write_text("{") for p in (f / "tokenizer_2").glob("[tv]*o*.json") if "config" not in p.name],
        "tokenizer_2 cannot be used",
    ),
    "truncated": (truncate, "not a whole safetensors file"),
    "missing": (lambda f: rewrite(f, lambda s: s.pop("text_projection.weight")), "missing: text_projection.weight"),
    "unknown": (lambda f: rewrite(f, lambda s: s.update(extra=torch.zeros(1))), "unknown: text_model.extra"),
    "other shape": (
        lambda f: rewrite(f, lambda s: s.update({"text_model.final_layer_norm.bias": torch.zeros(3)})),
        r"final_layer_norm.bias has shape \(3,\), expected \(32,\)",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", DAMAGE)
def test_a_damaged_folder_is_refused_in_words(name: str, mini_slots: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(mini_slots, tmp_path / "slots"))
    damage, message = DAMAGE[name]
    damage(folder)
    with pytest.raises(ValueError, match=message):
        open_slot(folder, "text_encoder_2")


def test_a_77_row_folder_is_not_opened_as_248(mini_slots: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(mini_slots, tmp_path / "slots"))
    rewrite(folder, lambda s: None)  # drops the note of the length written beside the weights
    edit(folder / "text_encoder_2" / "config.json", max_position_embeddings=248)
    edit(folder / "tokenizer_2" / "tokenizer_config.json", model_max_length=248)
    with pytest.raises(ValueError, match="position table has 77 rows, config.json says max_position_embeddings 248"):
        open_slot(folder, "text_encoder_2")


def test_missing_parts_are_named(mini_slots: Path, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="text_encoder/config.json"):
        open_slot(tmp_path, "text_encoder")
    folder = Path(shutil.copytree(mini_slots, tmp_path / "slots"))
    (folder / "text_encoder" / "model.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match="model.safetensors"):
        open_slot(folder, "text_encoder")
    shutil.rmtree(folder / "tokenizer_2")
    with pytest.raises(FileNotFoundError, match="tokenizer_config.json"):
        open_slot(folder, "text_encoder_2")


def test_pickled_weights_are_not_read(mini_slots: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(mini_slots, tmp_path / "slots"))
    weights = folder / "text_encoder" / "model.safetensors"
    torch.save(load_file(weights), folder / "text_encoder" / "pytorch_model.bin")
    weights.unlink()
    with pytest.raises(FileNotFoundError, match="holds none of model.safetensors.*pickled weights are not read here"):
        open_slot(folder, "text_encoder")


def test_slots_are_not_mistaken_for_one_another(mini_slots: Path, tmp_path: Path) -> None:
    shutil.copytree(mini_slots / "text_encoder_2", tmp_path / "text_encoder")
    shutil.copytree(mini_slots / "tokenizer_2", tmp_path / "tokenizer")
    with pytest.raises(ValueError, match="exported for text_encoder_2.*expected CLIPTextModel"):
        open_slot(tmp_path, "text_encoder")


def test_the_text_encoder_folder_itself_opens_too(mini_slots: Path) -> None:
    assert open_slot(mini_slots / "text_encoder_2", "text_encoder_2").context_length == 77


def test_a_stock_folder_with_the_legacy_eos_and_a_variant_opens(mini_slots: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(mini_slots, tmp_path / "slots"))
    rewrite(folder, lambda s: None)
    config = json.loads((folder / "text_encoder_2" / "config.json").read_text())
    del config["debias_diffusion"]
    (folder / "text_encoder_2" / "config.json").write_text(json.dumps(config | {"eos_token_id": 2}))
    (folder / "text_encoder_2" / "model.safetensors").rename(folder / "text_encoder_2" / "model.fp16.safetensors")
    legacy, ours = open_slot(folder, "text_encoder_2"), open_slot(mini_slots, "text_encoder_2")
    prompts = ["a red cube left of a blue ball", "", "grey geese " * 60]
    for a, b in zip(slot_states(legacy, prompts, 77), slot_states(ours, prompts, 77), strict=True):
        assert torch.equal(a, b)
