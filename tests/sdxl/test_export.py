"""Slot folders equal the towers they came from, open in stock classes, and are whole or absent."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from open_clip.transformer import QuickGELU
from safetensors import safe_open
from safetensors.torch import load_file
from transformers import CLIPTextModel, CLIPTextModelWithProjection, CLIPTokenizer

from debias_diffusion.cli import main
from debias_diffusion.encoders.checkpoint import load_encoder, save_encoder
from debias_diffusion.encoders.encoder import MINIATURE_FOLDER, Encoder, build
from debias_diffusion.encoders.tokens import Tokenizer
from debias_diffusion.sdxl import export as export_module
from debias_diffusion.sdxl.card_numbers import read_numbers
from debias_diffusion.sdxl.export import export_slot, push_folder
from debias_diffusion.sdxl.single_file import export_single_file
from debias_diffusion.sdxl.slot_folder import open_slot
from debias_diffusion.sdxl.slots import SLOTS, build_slot, hidden_act, slot_from_encoder, slot_of_width, slot_tokenizer

SLOT_NAMES = tuple(SLOTS)
PROMPTS = ["a photo of a cat", "wow! two red cubes, one blue ball", "", "grey geese " * 60]
BOTH = pytest.mark.parametrize("slot", SLOT_NAMES)


def open_clip_states(encoder: Encoder, input_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """open_clip's own states before the last block, pooled vector, and pooled vector projected."""
    text = encoder.model.text
    kept: dict[str, torch.Tensor] = {}
    hooks = [
        text.transformer.resblocks[-2].register_forward_hook(lambda m, i, o: kept.update(penultimate=o)),
        text.ln_final.register_forward_hook(lambda m, i, o: kept.update(last=o)),
    ]
    with torch.inference_mode():
        projected = text(input_ids)
    for hook in hooks:
        hook.remove()
    ends = input_ids.argmax(dim=1)
    return kept["penultimate"], kept["last"][torch.arange(len(ends)), ends], projected


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a - b).norm() / b.norm())


def slot_outputs(slot: Any, input_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    with torch.inference_mode():
        output = slot.model(input_ids, output_hidden_states=True)
    return output.hidden_states[-2], getattr(output, "text_embeds", output.get("pooler_output"))


@BOTH
@pytest.mark.parametrize("context_length", [77, 248])
def test_slot_equals_the_open_clip_tower(
    slot: str,
    context_length: int,
    towers: dict[str, Encoder],
    long_towers: dict[str, Encoder],
    slots_77: Path,
    slots_248: Path,
) -> None:
    encoder, folder = (towers[slot], slots_77) if context_length == 77 else (long_towers[slot], slots_248)
    opened = open_slot(folder, slot)
    ids = opened.tokenizer(PROMPTS, padding="max_length", truncation=True, return_tensors="pt").input_ids
    assert ids.shape == (len(PROMPTS), context_length)
    penultimate, pooled, projected = open_clip_states(encoder, ids)
    ours, ours_pooled = slot_outputs(opened, ids)
    assert relative(ours, penultimate) < 1e-5
    assert relative(ours_pooled, projected if slot == "text_encoder_2" else pooled) < 1e-5


@BOTH
def test_parity_would_notice_the_other_activation(slot: str, towers: dict[str, Encoder]) -> None:
    encoder = towers[slot]
    opened = slot_from_encoder(encoder, slot)
    ids = opened.tokenizer(PROMPTS, padding="max_length", truncation=True, return_tensors="pt").input_ids
    other = {"quick_gelu": torch.nn.GELU(), "gelu": QuickGELU()}
    tower = getattr(opened.model, "text_model", opened.model)
    for layer in tower.encoder.layers:
        layer.mlp.activation_fn = other[opened.model.config.hidden_act]
    assert relative(slot_outputs(opened, ids)[0], open_clip_states(encoder, ids)[0]) > 1e-3


@BOTH
def test_the_first_77_rows_do_not_depend_on_the_length(slot: str, towers: dict[str, Encoder]) -> None:
    short = towers[slot]
    long = short.stretched(248)
    with torch.no_grad():
        long.model.text.positional_embedding[:77] = short.model.text.positional_embedding
    ids, states = [], []
    for encoder in (short, long):
        opened = slot_from_encoder(encoder, slot)
        ids.append(opened.tokenizer(PROMPTS[:3], padding="max_length", truncation=True, return_tensors="pt").input_ids)
        states.append(slot_outputs(opened, ids[-1]))
    assert torch.equal(ids[0], ids[1][:, :77])
    torch.testing.assert_close(states[1][0][:, :77], states[0][0], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(states[1][1], states[0][1], rtol=1e-5, atol=1e-5)


@BOTH
def test_stock_classes_open_the_folder_whole(slot: str, long_towers: dict[str, Encoder], slots_248: Path) -> None:
    classes = {"text_encoder": CLIPTextModel, "text_encoder_2": CLIPTextModelWithProjection}
    model, info = classes[slot].from_pretrained(slots_248 / slot, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert not info["mismatched_keys"]
    config = model.config
    assert (config.max_position_embeddings, config.bos_token_id, config.eos_token_id) == (248, 49406, 49407)
    assert config.pad_token_id == (0 if slot == "text_encoder_2" else 49407)
    assert config.hidden_act == ("gelu" if slot == "text_encoder_2" else "quick_gelu")
    tokenizer = CLIPTokenizer.from_pretrained(slots_248 / SLOTS[slot].tokenizer)
    assert tokenizer.model_max_length == 248
    assert tokenizer.pad_token == ("!" if slot == "text_encoder_2" else "<|endoftext|>")
    assert tokenizer("wow!").input_ids[-2] == (0 if slot == "text_encoder_2" else 256)


@BOTH
def test_keys_are_the_same_however_the_tower_came_to_be(slot: str, mini: Encoder, tmp_path: Path) -> None:
    built = export_slot(mini, slot, tmp_path / "built", dtype="fp32")
    loaded = load_encoder(save_encoder(mini, tmp_path / "encoder"))
    again = export_slot(loaded, slot, tmp_path / "loaded", dtype="fp32")
    first, second = (load_file(folder / slot / "model.safetensors") for folder in (built, again))
    assert first.keys() == second.keys()
    assert all(torch.equal(first[key], second[key]) for key in first)
    assert all(key.startswith("text_model.") for key in first if key != "text_projection.weight")
    assert ("text_projection.weight" in first) == (slot == "text_encoder_2")


@BOTH
def test_in_memory_slots_save_the_same_keys(slot: str, mini: Encoder, mini_slots: Path, tmp_path: Path) -> None:
    slot_from_encoder(mini, slot).model.save_pretrained(tmp_path / slot)
    with (
        safe_open(tmp_path / slot / "model.safetensors", "pt") as ours,
        safe_open(mini_slots / slot / "model.safetensors", "pt") as exported,
    ):
        assert set(ours.keys()) == set(exported.keys())


@pytest.mark.parametrize("dtype", ["fp16", "bf16", "fp32"])
def test_dtype_is_the_one_asked_for(dtype: str, mini: Encoder, tmp_path: Path) -> None:
    folder = export_slot(mini, "text_encoder", tmp_path, dtype=dtype)
    expected = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}[dtype]
    assert open_slot(folder, "text_encoder").model.dtype == expected
    assert CLIPTextModel.from_pretrained(folder, subfolder="text_encoder").dtype == expected


def test_classic_tokenizer_files_read_alone(slots_77: Path, tmp_path: Path) -> None:
    for name in ("vocab.json", "merges.txt", "tokenizer_config.json"):
        shutil.copy(slots_77 / "tokenizer_2" / name, tmp_path / name)
    classic, whole = CLIPTokenizer.from_pretrained(tmp_path), CLIPTokenizer.from_pretrained(slots_77 / "tokenizer_2")
    assert len(classic) == 49408
    assert classic(PROMPTS).input_ids == whole(PROMPTS).input_ids
    assert (tmp_path / "merges.txt").read_text(encoding="utf-8").splitlines()[1] == "i n"


TOKENIZER = Tokenizer(248)
SLOT_TOKENIZER = slot_tokenizer(TOKENIZER, "text_encoder")


@settings(max_examples=60, deadline=None)
@given(st.text(alphabet=st.sampled_from("abcdefgh XYZ ,.'-!?0123456789éñü"), max_size=80))
def test_slot_tokenizer_gives_the_ids_of_training(text: str) -> None:
    assert SLOT_TOKENIZER(text).input_ids == TOKENIZER.encode(text)


@BOTH
def test_an_encoder_with_its_own_vocabulary(slot: str, tiny_folder: Path, tmp_path: Path) -> None:
    encoder = load_encoder(tiny_folder).stretched(248)
    if slot == "text_encoder_2":
        assert hidden_act(encoder.model.text) == "quick_gelu"  # a miniature brings its own activation into either slot
    opened = open_slot(export_slot(encoder, slot, tmp_path, dtype="fp32"), slot)
    assert opened.model.config.eos_token_id == opened.tokenizer.eos_token_id == encoder.tokenizer.eot_id == 850
    assert opened.model.config.vocab_size == len(opened.tokenizer) == 851
    prompts = ["a red cube left of a blue ball", "a cone."]
    ids = opened.tokenizer(prompts, padding="max_length", truncation=True, return_tensors="pt").input_ids
    assert ids[0].tolist()[: len(encoder.tokenizer.encode(prompts[0]))] == encoder.tokenizer.encode(prompts[0])
    penultimate, pooled, projected = open_clip_states(encoder, ids)
    ours, ours_pooled = slot_outputs(opened, ids)
    assert relative(ours, penultimate) < 1e-5
    assert relative(ours_pooled, projected if slot == "text_encoder_2" else pooled) < 1e-5


def test_blend_goes_from_the_stretched_base_to_the_tuned_tower(
    mini: Encoder, trained: Callable[..., Encoder], tmp_path: Path
) -> None:
    slot, base, tuned = "text_encoder", mini, trained(mini)
    states = {}
    for share in (0.0, 0.25, 1.0):
        folder = export_slot(tuned, slot, tmp_path / str(share), dtype="fp32", blend=share, base=base)
        states[share] = load_file(folder / slot / "model.safetensors")
        assert json.loads((folder / slot / "config.json").read_text())["debias_diffusion"]["blend"] == share
    folder = export_slot(base.stretched(248), slot, tmp_path / "base", dtype="fp32")
    stretched = load_file(folder / slot / "model.safetensors")
    plain = load_file(export_slot(tuned, slot, tmp_path / "tuned", dtype="fp32") / slot / "model.safetensors")
    for key, value in stretched.items():
        assert torch.equal(states[0.0][key], value)
        assert torch.equal(states[1.0][key], plain[key])
        torch.testing.assert_close(states[0.25][key], 0.75 * value + 0.25 * plain[key])
    assert "0.25 of the tuned tower" in (tmp_path / "0.25" / "README.md").read_text()


def test_blend_refuses_what_cannot_be_mixed(
    towers: dict[str, Encoder], long_towers: dict[str, Encoder], tiny_folder: Path, tmp_path: Path
) -> None:
    tuned = long_towers["text_encoder"]
    for share, base, message in (
        (0.5, None, "no base encoder"),
        (1.5, towers["text_encoder"], "expected 0"),
        (0.5, towers["text_encoder_2"], "different activations"),
        (0.5, load_encoder(tiny_folder), "different shape"),
    ):
        with pytest.raises(ValueError, match=message):
            export_slot(tuned, "text_encoder", tmp_path / "out", blend=share, base=base)
    assert not (tmp_path / "out").exists()


def wide_encoder(width: int) -> Encoder:
    config = {
        "embed_dim": 16,
        "quick_gelu": False,
        "vision_cfg": {"image_size": 16, "patch_size": 8, "width": 32, "layers": 1, "head_width": 16},
        "text_cfg": {"context_length": 77, "vocab_size": 851, "width": width, "heads": 4, "layers": 1},
    }
    return build(f"wide-{width}", config, bpe_file=MINIATURE_FOLDER / "bpe.txt.gz")


@pytest.mark.parametrize(("width", "slot"), [(1280, "text_encoder"), (768, "text_encoder_2"), (512, "text_encoder")])
def test_a_tower_of_another_model_is_refused(width: int, slot: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=f"{width} wide; {slot} takes .*{SLOTS[slot].width}"):
        export_slot(wide_encoder(width), slot, tmp_path / "out")
    assert not list(tmp_path.iterdir())


def test_slots_are_told_from_full_size_widths() -> None:
    assert (slot_of_width(768), slot_of_width(1280)) == SLOT_NAMES
    with pytest.raises(ValueError, match="text_encoder, text_encoder_2"):
        slot_of_width(64)


def test_wrong_names_list_the_right_ones(mini: Encoder, tmp_path: Path) -> None:
    encoder = mini
    with pytest.raises(ValueError, match="text_encoder, text_encoder_2"):
        export_slot(encoder, "text_encoder_1", tmp_path / "out")
    with pytest.raises(ValueError, match="fp16, bf16, fp32"):
        export_slot(encoder, "text_encoder", tmp_path / "out", dtype="float16")


def test_a_77_row_tower_is_not_exported_as_248(mini: Encoder, tmp_path: Path) -> None:
    encoder = mini
    claimed = replace(encoder, tokenizer=encoder.tokenizer.with_context(248))
    with pytest.raises(ValueError, match=r"77 rows.*248.*stretch"):
        export_slot(claimed, "text_encoder", tmp_path / "out")
    assert not list(tmp_path.iterdir())


def test_an_encoder_that_contradicts_its_activation_is_refused(mini: Encoder, tmp_path: Path) -> None:
    encoder = mini
    flipped = replace(encoder, model_config={**encoder.model_config, "quick_gelu": False})
    with pytest.raises(ValueError, match="activation is gelu, its text tower has quick_gelu"):
        export_slot(flipped, "text_encoder", tmp_path / "out")


def test_what_overflows_in_fp16_is_refused_by_name(mini: Encoder, tmp_path: Path) -> None:
    encoder = mini.stretched(77)
    encoder.model.text.ln_final.weight.data[3] = 1e6
    with pytest.raises(ValueError, match="final_layer_norm.weight.*bf16"):
        export_slot(encoder, "text_encoder", tmp_path / "out", dtype="fp16")
    assert export_slot(encoder, "text_encoder", tmp_path / "out", dtype="bf16").is_dir()


def test_export_replaces_its_own_slot_and_no_other_folder(mini: Encoder, tmp_path: Path) -> None:
    export_slot(mini, "text_encoder", tmp_path / "out")
    export_slot(mini, "text_encoder_2", tmp_path / "out")
    export_slot(mini.stretched(248), "text_encoder", tmp_path / "out")
    lengths = [open_slot(tmp_path / "out", slot).context_length for slot in SLOT_NAMES]
    assert lengths == [248, 77]
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == [
        "README.md", "text_encoder", "text_encoder_2", "tokenizer", "tokenizer_2"]  # fmt: skip
    config = json.loads((tmp_path / "out" / "text_encoder" / "config.json").read_text())
    del config["debias_diffusion"]
    (tmp_path / "out" / "text_encoder" / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="was not written by this export"):
        export_slot(mini, "text_encoder", tmp_path / "out")


def test_a_write_that_fails_leaves_nothing(mini: Encoder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(export_module, "_write_tokenizer", full)
    with pytest.raises(OSError, match="no space"):
        export_slot(mini, "text_encoder", tmp_path / "out")
    assert not list(tmp_path.iterdir())


def test_a_failed_export_keeps_the_folder_of_before(mini: Encoder, tmp_path: Path) -> None:
    folder = export_slot(mini, "text_encoder", tmp_path / "out")
    before = (folder / "text_encoder" / "model.safetensors").read_bytes()
    broken = mini.stretched(77)
    broken.model.text.ln_final.bias.data[0] = float("nan")
    with pytest.raises(ValueError, match="not finite"):
        export_slot(broken, "text_encoder", folder)
    assert (folder / "text_encoder" / "model.safetensors").read_bytes() == before


def test_the_card_tells_recipe_data_and_licence(mini: Encoder, tmp_path: Path) -> None:
    training = {"recipe": "debias", "steps": 9, "pairs": 1200, "data": "/data/disk/sharegpt4v.json", "output": "runs/x"}
    history = {"base": "ViT-L-14:openai", "training": training, "unreadable_pictures": 3}
    encoder = replace(mini.stretched(248), name="debias", history=history)
    card = (export_slot(encoder, "text_encoder", tmp_path / "out") / "README.md").read_text()
    for words in ("start: ViT-L-14:openai", "recipe debias, steps 9", "sharegpt4v.json, 1200 pairs",
                  "unreadable pictures: 3", "`text_encoder_2` must read 248 tokens too", "| 248 | quick_gelu |"):  # fmt: skip
        assert words in card
    assert "/data/disk" not in card + (tmp_path / "out" / "text_encoder" / "config.json").read_text()


def test_the_card_names_what_the_licence_depends_on_and_states_none(mini: Encoder, tmp_path: Path) -> None:
    training = {"data": "/disk/sharegpt4v.json", "encoder": "/home/me/base"}
    history = {"base": "openai file /home/me/ViT-L-14.pt", "training": training, "t2i_recall@1": {"none": 31.6}}
    encoder = replace(mini, name="debias", history=history)
    folder = export_slot(encoder, "text_encoder", tmp_path / "out")
    card = (folder / "README.md").read_text()
    assert card.splitlines()[:2] == ["---", "license: unknown"]
    assert "(openai file ViT-L-14.pt), the pictures and captions it was trained on (sharegpt4v.json)" in card
    assert "checks the licences" in card
    assert "MIT" not in card
    assert "CC BY" not in card
    assert "the start's t2i recall@1: none 31.6" in card  # not a number of the tower this card is of
    assert "/home/me" not in card + (folder / "text_encoder" / "config.json").read_text()


def test_the_use_the_card_shows_works(towers: dict[str, Encoder], slots_77: Path, pipe: Any, tmp_path: Path) -> None:
    pipe.save_pretrained(tmp_path / "base")
    code = (slots_77 / "README.md").read_text().split("```python\n")[1].split("```")[0]
    code = code.replace("path/to/this/folder", str(slots_77))
    code = code.replace("stabilityai/stable-diffusion-xl-base-1.0", str(tmp_path / "base"))
    found: dict[str, Any] = {}
    exec(code, found)
    assert (
        found["pipe"].dtype == found["pipe"].text_encoder.dtype == found["pipe"].text_encoder_2.dtype == torch.float16
    )
    assert torch.equal(
        found["pipe"].text_encoder_2.text_projection.weight, pipe.text_encoder_2.text_projection.weight.half()
    )
    assert "torch_dtype" not in code


RESULTS = {
    "schema": 1,
    "encoders": {"base": {"source": "runs/base"}, "debias": {"source": "runs/debias"}},
    "benchmarks": {
        "urban1k": {
            "counts": {"images": 1000},
            "results": {
                name: {"none": {"t2i_recall@1": recall, "i2t_recall@1": 50.04}}
                for name, recall in (("base", 10.0), ("debias", 20.0))
            },
        }
    },
}


def test_the_card_holds_the_encoders_measured_numbers(mini: Encoder, tmp_path: Path) -> None:
    (tmp_path / "results.json").write_text(json.dumps(RESULTS))
    numbers = read_numbers(tmp_path, "runs/debias")
    assert numbers == read_numbers(tmp_path / "results.json", "./runs/debias") == read_numbers(tmp_path, "debias")
    folder = export_slot(mini, "text_encoder", tmp_path / "out", numbers=numbers)
    export_slot(mini, "text_encoder_2", folder)  # writes the card again
    card = (folder / "README.md").read_text()
    assert "| urban1k, 1000 pictures | t2i_recall@1 | i2t_recall@1 |" in card
    assert "| none | 20.0 | 50.0 |" in card
    assert card.count("## Numbers of") == 1
    with pytest.raises(ValueError, match="the numbers are the encoder's, not a blend's"):
        export_slot(mini, "text_encoder", folder, blend=0.5, base=mini, numbers=numbers)


def test_numbers_that_are_not_the_encoders_are_refused(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="no results at"):
        read_numbers(tmp_path, "debias")
    (tmp_path / "results.json").write_text(json.dumps(RESULTS))
    with pytest.raises(ValueError, match="which numbers are those of other; it measured .*'runs/base'"):
        read_numbers(tmp_path, "other")
    for content in ("[]", "{", json.dumps(RESULTS | {"benchmarks": {"urban1k": {}}})):
        (tmp_path / "results.json").write_text(content)
        with pytest.raises(ValueError, match="no results.json that `evaluate` wrote"):
            read_numbers(tmp_path, "debias")


WIDTHS = {  # of a tower 32 wide: where it started, and whether a warning is due
    "unknown": ({}, True),
    "full-size name": ({"base": "ViT-L-14:openai"}, True),
    "miniature": ({"base": "trained from scratch by train/miniature.py"}, False),
    "trained from the miniature": ({"base": "x", "training": {"encoder": "miniature:base"}}, False),
}


@pytest.mark.parametrize(("history", "is_due"), WIDTHS.values(), ids=WIDTHS)
def test_a_tower_stock_sdxl_cannot_take_is_warned_of_in_one_line(
    history: dict[str, Any], is_due: bool, mini: Encoder, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    encoder = replace(mini, name="tiny", history=history)
    export_slot(encoder, "text_encoder_2", tmp_path / "out")
    export_single_file(encoder, "text_encoder", tmp_path / "clip.safetensors")
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 2 * is_due
    for text, slot in zip(said, ("text_encoder_2 is ViT-bigG/14, 1280 wide", "text_encoder is ViT-L/14, 768 wide")):
        assert text.startswith("tiny has a text tower 32 wide")
        assert "not stock SDXL" in text
        assert text.endswith(slot)
        assert "\n" not in text


def test_a_readme_of_someone_else_stays(mini: Encoder, tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text("mine")
    export_slot(mini, "text_encoder", tmp_path)
    assert (tmp_path / "README.md").read_text() == "mine"


def test_a_card_whose_licence_was_stated_stays(mini: Encoder, tmp_path: Path) -> None:
    card = export_slot(mini, "text_encoder", tmp_path) / "README.md"
    export_slot(mini, "text_encoder_2", tmp_path)
    assert "# SDXL text encoders" in card.read_text()
    stated = card.read_text().replace("license: unknown", "license: apache-2.0")
    card.write_text(stated)
    export_slot(mini, "text_encoder_2", tmp_path)
    assert card.read_text() == stated


def test_nothing_is_uploaded_that_does_not_open(mini_slots: Path, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="export a slot there first"):
        push_folder(tmp_path, "someone/encoder")
    folder = Path(shutil.copytree(mini_slots, tmp_path / "slots"))
    weights = folder / "text_encoder_2" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])
    with pytest.raises(ValueError, match="not a whole safetensors file"):
        push_folder(folder, "someone/encoder")


def test_command_stretches_and_exports(mini: Encoder, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = save_encoder(mini, tmp_path / "encoder")
    out = tmp_path / "out"
    main(["export", str(source), str(out), "--slot", "text_encoder", "--stretch", "248", "--dtype", "fp32"])
    assert f"{out}: text_encoder and tokenizer for 248 tokens" in capsys.readouterr().out
    stretched = slot_from_encoder(mini.stretched(248), "text_encoder").model.state_dict()
    opened = open_slot(out, "text_encoder").model.state_dict()
    assert all(torch.equal(opened[key], value) for key, value in stretched.items())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "does not tell its slot"),
        (["--slot", "text_encoder", "--stretch", "200"], "lengths it reaches"),
        (["--slot", "text_encoder", "--to", "encoder"], "--base"),
        (["--slot", "text_encoder", "--to", "single-file", "--push", "a/b"], "--push"),
        (["--slot", "text_encoder", "--to", "single-file", "--numbers", "results.json"], "--numbers"),
        (["--slot", "text_encoder", "--numbers", "nowhere.json"], "no results at nowhere.json"),
    ],
)
def test_command_says_what_is_wrong(
    options: list[str], message: str, mini: Encoder, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = save_encoder(mini, tmp_path / "encoder")
    with pytest.raises(SystemExit):
        main(["export", str(source), str(tmp_path / "out"), *options])
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_tower_that_is_no_clip_text_model_is_refused(mini: Encoder, tmp_path: Path) -> None:
    encoder = mini
    config = json.loads(json.dumps(encoder.model_config))
    config["text_cfg"]["no_causal_mask"] = True
    bidirectional = build("bidirectional", config, bpe_file=mini.tokenizer.bpe_file)
    with pytest.raises(ValueError, match="bidirectional"):
        build_slot(bidirectional.model.text, bidirectional.tokenizer, "text_encoder")
    with pytest.raises(ValueError, match="bidirectional cannot fill text_encoder, .* its attention is bidirectional"):
        export_slot(bidirectional, "text_encoder", tmp_path / "out")
    assert not list(tmp_path.iterdir())
