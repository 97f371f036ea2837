"""Swapped pipelines are what stock pipelines with those encoders are, and lose nothing without a word."""

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import (
    ControlNetModel,
    StableDiffusionXLControlNetPipeline,
    StableDiffusionXLImg2ImgPipeline,
    StableDiffusionXLInpaintPipeline,
    StableDiffusionXLPipeline,
)
from transformers import CLIPTextModel, CLIPTextModelWithProjection

from debias_diffusion.encoders.checkpoint import save_encoder
from debias_diffusion.encoders.encoder import Encoder
from debias_diffusion.sdxl.export import export_slot
from debias_diffusion.sdxl.slots import SLOTS
from debias_diffusion.sdxl.swap import swap_text_encoders

SLOT_NAMES = tuple(SLOTS)
Draw = Callable[..., torch.Tensor]


def encode(pipe: Any, prompt: str) -> tuple[torch.Tensor, ...]:
    """Embeddings of a prompt and of a negative, and both pooled vectors."""
    with torch.no_grad():
        found = pipe.encode_prompt(prompt, device="cpu", negative_prompt="blurry")
    return tuple(found)


def both(folder: Any) -> dict[str, Any]:
    return dict.fromkeys(SLOT_NAMES, folder)


def assert_equal(a: tuple[torch.Tensor, ...], b: tuple[torch.Tensor, ...]) -> None:
    for x, y in zip(a, b, strict=True):
        assert torch.equal(x, y)


def quiet_swap(pipe: Any, **sources: Any) -> Any:
    """A swap that may not warn."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        return swap_text_encoders(pipe, **sources)


def test_both_slots_swapped_equal_the_stock_pipeline_and_leave_the_old_one_alone(
    pipe: Any, long_pipe: Any, slots_248: Path, long_prompt: str, draw: Draw
) -> None:
    before, parts = encode(pipe, long_prompt), dict(pipe.components)
    config = dict(pipe.config)
    new = quiet_swap(pipe, **both(slots_248))
    assert type(new) is StableDiffusionXLPipeline
    assert new is not pipe
    assert all(getattr(new, name) is parts[name] for name in ("unet", "vae", "scheduler"))
    assert_equal(encode(new, long_prompt), encode(long_pipe, long_prompt))
    assert encode(new, long_prompt)[0].shape == (1, 248, 128)
    assert torch.equal(draw(new), draw(long_pipe))
    assert all(pipe.components[name] is part for name, part in parts.items())
    assert dict(pipe.config) == config
    assert_equal(encode(pipe, long_prompt), before)


def test_encoders_and_their_folders_fill_slots_like_exported_ones(
    pipe: Any, slots_248: Path, long_towers: dict[str, Encoder], long_prompt: str, tmp_path: Path
) -> None:
    expected = encode(quiet_swap(pipe, **both(slots_248)), long_prompt)
    folder = save_encoder(long_towers["text_encoder_2"], tmp_path / "encoder")
    new = quiet_swap(pipe, text_encoder=long_towers["text_encoder"], text_encoder_2=folder)
    assert_equal(encode(new, long_prompt), expected)
    assert isinstance(new.text_encoder, CLIPTextModel)
    assert isinstance(new.text_encoder_2, CLIPTextModelWithProjection)
    single = quiet_swap(pipe, text_encoder=slots_248 / "text_encoder", text_encoder_2=str(slots_248 / "text_encoder_2"))
    assert_equal(encode(single, long_prompt), expected)


def test_the_pooled_vector_is_the_second_slots(pipe: Any, slots_248: Path, long_prompt: str) -> None:
    new = quiet_swap(pipe, **both(slots_248))
    ids = new.tokenizer_2(long_prompt, padding="max_length", truncation=True, return_tensors="pt").input_ids
    with torch.no_grad():
        assert torch.equal(encode(new, long_prompt)[2], new.text_encoder_2(ids).text_embeds)


def test_words_after_the_77th_token_change_the_swapped_picture_only(
    pipe: Any, slots_248: Path, long_prompt: str, draw: Draw
) -> None:
    new = quiet_swap(pipe, **both(slots_248))
    other = long_prompt.replace("white geese", "black crows")
    assert torch.equal(draw(pipe), draw(pipe, prompt=other))
    assert not torch.equal(draw(new), draw(new, prompt=other))


PICTURE = torch.rand(1, 3, 32, 32, generator=torch.Generator().manual_seed(3))
MASK = torch.zeros(1, 1, 32, 32).index_fill_(3, torch.arange(16), 1.0)


def with_controlnet(pipe: Any) -> Any:
    torch.manual_seed(4)
    controlnet = ControlNetModel.from_unet(pipe.unet, conditioning_embedding_out_channels=(8, 8))
    for parameter in controlnet.parameters():  # a fresh one ends in zeros and would change nothing
        parameter.data += 0.05 * torch.randn_like(parameter)
    return StableDiffusionXLControlNetPipeline(**pipe.components, controlnet=controlnet, add_watermarker=False)


TASKS: dict[str, tuple[Callable[[Any], Any], dict[str, Any]]] = {
    "img2img": (StableDiffusionXLImg2ImgPipeline.from_pipe, {"image": PICTURE, "strength": 0.9}),
    "inpaint": (StableDiffusionXLInpaintPipeline.from_pipe, {"image": PICTURE, "mask_image": MASK, "strength": 0.9}),
    "controlnet": (with_controlnet, {"image": PICTURE}),
}


@pytest.mark.parametrize("task", TASKS)
def test_other_tasks_read_all_248_tokens(task: str, pipe: Any, slots_248: Path, long_prompt: str, draw: Draw) -> None:
    turn, inputs = TASKS[task]
    other = turn(quiet_swap(pipe, **both(slots_248)))
    picture = draw(other, **inputs)
    assert picture.shape == (3, 32, 32)
    assert torch.isfinite(picture).all()
    changed = draw(other, prompt=long_prompt.replace("white geese", "black crows"), **inputs)
    assert not torch.equal(picture, changed)
    assert_equal(encode(other, long_prompt), encode(quiet_swap(pipe, **both(slots_248)), long_prompt))


def test_save_and_reload_keep_length_and_every_bit(
    pipe: Any, slots_248: Path, long_prompt: str, draw: Draw, tmp_path: Path
) -> None:
    new = quiet_swap(pipe, **both(slots_248))
    new.save_pretrained(tmp_path / "sdxl")
    again = StableDiffusionXLPipeline.from_pretrained(tmp_path / "sdxl")
    again.set_progress_bar_config(disable=True)
    assert again.tokenizer.model_max_length == again.text_encoder.config.max_position_embeddings == 248
    assert_equal(encode(again, long_prompt), encode(new, long_prompt))
    assert torch.equal(draw(again), draw(new))
    assert_equal(encode(quiet_swap(pipe, **both(tmp_path / "sdxl")), long_prompt), encode(new, long_prompt))


def lora_weights() -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Down and up matrices of rank 2 for two modules of each layer, as trainers write them for a text encoder."""
    generator = torch.Generator().manual_seed(9)
    modules = [f"layers.{i}.self_attn.{name}" for i in range(2) for name in ("q_proj", "out_proj")]
    return {
        module: (torch.randn(2, 64, generator=generator), torch.randn(64, 2, generator=generator)) for module in modules
    }


def kohya_lora(slot: str) -> dict[str, torch.Tensor]:
    state = {}
    for module, (down, up) in lora_weights().items():
        name = f"lora_te{SLOT_NAMES.index(slot) + 1}_text_model_encoder_{module.replace('.', '_')}"
        state |= {f"{name}.lora_down.weight": down, f"{name}.lora_up.weight": up, f"{name}.alpha": torch.tensor(2.0)}
    return state


def diffusers_lora(slot: str) -> dict[str, torch.Tensor]:
    state = {}
    for module, (down, up) in lora_weights().items():
        name = f"{slot}.text_model.encoder.{module}"
        state |= {f"{name}.lora_A.weight": down, f"{name}.lora_B.weight": up}
    return state


@pytest.mark.parametrize("lora", [kohya_lora, diffusers_lora])
def test_a_lora_loaded_after_the_swap_reaches_both_slots(
    lora: Callable[..., Any], pipe: Any, slots_248: Path, long_prompt: str
) -> None:
    new = quiet_swap(pipe, **both(slots_248))
    old, plain = encode(pipe, long_prompt), encode(new, long_prompt)
    new.load_lora_weights(lora("text_encoder") | lora("text_encoder_2"), adapter_name="style")
    changed = encode(new, long_prompt)
    for columns in (slice(0, 64), slice(64, 128)):
        assert not torch.allclose(changed[0][..., columns], plain[0][..., columns], atol=1e-4)
    assert not torch.allclose(changed[2], plain[2], atol=1e-4)
    assert_equal(encode(pipe, long_prompt), old)
    new.unload_lora_weights()
    assert_equal(encode(new, long_prompt), plain)


@pytest.mark.parametrize("slot", SLOT_NAMES)
def test_a_lora_on_a_replaced_encoder_is_refused_by_name(slot: str, pipe: Any, slots_77: Path) -> None:
    pipe.load_lora_weights(kohya_lora(slot), adapter_name="style")
    with pytest.raises(ValueError, match=f"LoRA 'style' is loaded on {slot} and would be lost"):
        swap_text_encoders(pipe, **both(slots_77))
    kept = next(name for name in SLOT_NAMES if name != slot)
    assert getattr(quiet_swap(pipe, **{kept: slots_77}), slot) is getattr(pipe, slot)
    pipe.unload_lora_weights()
    quiet_swap(pipe, **both(slots_77))


def test_a_fused_lora_is_warned_of(pipe: Any, slots_77: Path) -> None:
    pipe.load_lora_weights(kohya_lora("text_encoder"), adapter_name="style")
    pipe.fuse_lora(components=["text_encoder"])
    pipe.unload_lora_weights()
    with pytest.warns(UserWarning, match="LoRA 'style' is fused into this pipeline"):
        swap_text_encoders(pipe, text_encoder=slots_77)


def load_inversion(pipe: Any, slot: str, vectors: torch.Tensor) -> None:
    tokenizer = getattr(pipe, SLOTS[slot].tokenizer)
    pipe.load_textual_inversion(vectors, token="<geese>", text_encoder=getattr(pipe, slot), tokenizer=tokenizer)


def test_textual_inversion_tokens_are_carried_over(pipe: Any, slots_248: Path) -> None:
    torch.manual_seed(0)
    vectors = torch.randn(2, 64)
    for slot in SLOT_NAMES:
        load_inversion(pipe, slot, vectors)
    new = quiet_swap(pipe, **both(slots_248))
    fresh = quiet_swap(pipe, **both(slots_248))
    for slot in SLOT_NAMES:
        tokenizer, model = getattr(new, SLOTS[slot].tokenizer), getattr(new, slot)
        ids = tokenizer.convert_tokens_to_ids(["<geese>", "<geese>_1"])
        assert ids == [49408, 49409]
        assert torch.equal(model.get_input_embeddings().weight[ids], vectors)
        assert tokenizer.model_max_length == 248
    prompt = "a flock of <geese> over a lake"
    assert new.maybe_convert_prompt(prompt, new.tokenizer) == "a flock of <geese> <geese>_1 over a lake"
    assert_equal(encode(new, prompt), encode(fresh, prompt))
    plain = quiet_swap(pipe, **both(slots_248))
    plain.unload_textual_inversion(text_encoder=plain.text_encoder_2, tokenizer=plain.tokenizer_2)
    assert not torch.equal(encode(new, prompt)[2], encode(plain, prompt)[2])


def test_textual_inversion_loaded_after_the_swap_pools_at_the_end(pipe: Any, slots_248: Path) -> None:
    new = quiet_swap(pipe, **both(slots_248))
    load_inversion(new, "text_encoder_2", torch.randn(1, 64, generator=torch.Generator().manual_seed(0)))
    ends = ["a flock of <geese> over a lake", "a flock of <geese> over a hill"]
    pooled = [encode(new, prompt)[2] for prompt in ends]
    assert not torch.allclose(pooled[0], pooled[1])  # pooled at the new token, both would be the same
    assert len(pipe.tokenizer_2) == 49408


def test_a_pipeline_saved_with_inversions_opens_as_a_slot_source(pipe: Any, slots_248: Path, tmp_path: Path) -> None:
    load_inversion(pipe, "text_encoder_2", torch.ones(1, 64))
    new = quiet_swap(pipe, **both(slots_248))
    new.save_pretrained(tmp_path / "sdxl")
    again = quiet_swap(pipe, **both(tmp_path / "sdxl"))
    assert_equal(encode(again, "three <geese>"), encode(new, "three <geese>"))


def test_model_offload_is_carried_over_and_both_pipelines_go_on(
    pipe: Any, slots_248: Path, draw: Draw, make_pipe: Callable[..., Any], slots_77: Path
) -> None:
    expected_old, expected_new = draw(make_pipe(slots_77)), draw(make_pipe(slots_248))
    pipe.enable_model_cpu_offload(device="cpu")
    new = quiet_swap(pipe, **both(slots_248))
    assert all(hasattr(getattr(new, slot), "_hf_hook") for slot in SLOT_NAMES)
    for _ in range(2):
        assert torch.equal(draw(new), expected_new)
        assert torch.equal(draw(pipe), expected_old)
    assert new._all_hooks is not pipe._all_hooks


def test_sequential_and_group_offload_are_refused_by_name(
    pipe: Any, slots_77: Path, make_pipe: Callable[..., Any]
) -> None:
    pipe.enable_sequential_cpu_offload(device="cpu")
    with pytest.raises(ValueError, match=r"sequential offload is on for .*text_encoder.*remove_all_hooks"):
        swap_text_encoders(pipe, text_encoder=slots_77)
    grouped = make_pipe(slots_77)
    grouped.enable_group_offload(
        onload_device=torch.device("cpu"), offload_device=torch.device("cpu"), offload_type="leaf_level"
    )
    with pytest.raises(ValueError, match=r"text_encoder has hooks the new one would lack: .*group_offloading"):
        swap_text_encoders(grouped, text_encoder=slots_77)


def test_dtype_is_carried_and_shared_parts_keep_theirs(
    make_pipe: Callable[..., Any], slots_77: Path, slots_248: Path, draw: Draw
) -> None:
    pipe = make_pipe(slots_77, torch.bfloat16)
    pipe.vae.to(torch.float32)  # a mixed pipeline, as people build them against black pictures
    new = quiet_swap(pipe, **both(slots_248))
    assert {getattr(new, slot).dtype for slot in SLOT_NAMES} == {torch.bfloat16}
    assert (pipe.unet.dtype, pipe.vae.dtype) == (torch.bfloat16, torch.float32)
    assert torch.isfinite(draw(new, output_type="latent")).all()


def test_one_slot_alone_warns_of_the_length_and_works_with_embeddings(
    pipe: Any, slots_248: Path, slots_77: Path, draw: Draw
) -> None:
    with pytest.warns(UserWarning, match="text_encoder 248, text_encoder_2 77.*cannot join") as caught:
        new = swap_text_encoders(pipe, text_encoder=slots_248)
    assert len(caught) == 1
    assert new.text_encoder_2 is pipe.text_encoder_2
    with pytest.raises(RuntimeError, match="248"):
        draw(new)
    names = ("prompt_embeds", "negative_prompt_embeds", "pooled_prompt_embeds", "negative_pooled_prompt_embeds")
    embeds = dict(zip(names, encode(pipe, "a cat"), strict=True))
    assert torch.isfinite(draw(new, **embeds)).all()
    quiet_swap(pipe, text_encoder=slots_77)


class OwnPipeline(StableDiffusionXLPipeline):
    """A class of one's own, which may join encoders of different length."""


def test_a_pipeline_class_of_its_own_is_kept_and_not_warned(pipe: Any, slots_248: Path) -> None:
    own = OwnPipeline(**pipe.components, add_watermarker=False)
    assert type(quiet_swap(own, text_encoder=slots_248)) is OwnPipeline


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_a_checkpoints_own_tuned_encoder_is_warned_of_and_a_stock_one_is_not(
    dtype: torch.dtype, make_pipe: Callable[..., Any], towers: dict[str, Encoder], slots_77: Path, tmp_path: Path
) -> None:
    name = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}[dtype]
    folder = export_slot(towers["text_encoder"], "text_encoder", tmp_path, dtype=name)
    pipe = make_pipe(slots_77, dtype)
    quiet_swap(pipe, text_encoder=folder)
    quiet_swap(make_pipe(slots_77), text_encoder=folder)
    with torch.no_grad():
        pipe.text_encoder.embeddings.position_embedding.weight[3] += 0.01
    with pytest.warns(UserWarning, match="this pipeline's text_encoder is not the one the new encoder was made from"):
        swap_text_encoders(pipe, text_encoder=folder)


def test_wrong_classes_widths_and_pipelines_are_refused(
    pipe: Any, slots_77: Path, tiny_folder: Path, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match="nothing to swap: give text_encoder or text_encoder_2"):
        swap_text_encoders(pipe)
    with pytest.raises(ValueError, match="new text_encoder has hidden_size 32, this pipeline's 64"):
        swap_text_encoders(pipe, text_encoder=tiny_folder)
    (tmp_path / "text_encoder").symlink_to(slots_77 / "text_encoder_2")
    (tmp_path / "tokenizer").symlink_to(slots_77 / "tokenizer_2")
    with pytest.raises(ValueError, match="is a CLIPTextModelWithProjection, expected CLIPTextModel"):
        swap_text_encoders(pipe, text_encoder=tmp_path)
    with pytest.raises(FileNotFoundError, match="no encoder at"):
        swap_text_encoders(pipe, text_encoder=tmp_path / "nowhere")
    pipe.text_encoder = pipe.tokenizer = None
    with pytest.raises(ValueError, match="has no text_encoder, so its UNet reads none"):
        swap_text_encoders(pipe, text_encoder=slots_77)


def test_a_pipeline_without_encoders_gets_them_back(pipe: Any, slots_248: Path, draw: Draw) -> None:
    expected = draw(quiet_swap(pipe, **both(slots_248)))
    bare = StableDiffusionXLPipeline(
        **pipe.components | dict.fromkeys((*SLOT_NAMES, "tokenizer", "tokenizer_2")), add_watermarker=False
    )
    bare.set_progress_bar_config(disable=True)
    assert torch.equal(draw(quiet_swap(bare, **both(slots_248))), expected)


def test_the_old_pipeline_and_the_new_keep_settings_apart(pipe: Any, slots_248: Path) -> None:
    new = quiet_swap(pipe, **both(slots_248))
    new.set_progress_bar_config(disable=False)
    new.vae, new.scheduler = None, None
    assert pipe.vae is not None
    assert pipe.scheduler is not None
    assert pipe._progress_bar_config == {"disable": True}


@pytest.mark.parametrize("slot", SLOT_NAMES)
def test_swapping_changes_the_half_of_its_slot(
    slot: str, pipe: Any, towers: dict[str, Encoder], trained: Callable[..., Encoder], tmp_path: Path
) -> None:
    moved = trained(towers[slot])
    with torch.no_grad():
        short = towers[slot].stretched(77)
        for name, parameter in short.model.text.named_parameters():
            if name != "positional_embedding":
                parameter.copy_(dict(moved.model.text.named_parameters())[name])
    old, new = encode(pipe, "a cat"), encode(quiet_swap(pipe, **{slot: short}), "a cat")
    halves = {"text_encoder": slice(0, 64), "text_encoder_2": slice(64, 128)}
    for name, columns in halves.items():
        assert torch.equal(old[0][..., columns], new[0][..., columns]) == (name != slot)
    assert torch.equal(old[2], new[2]) == (slot == "text_encoder")
