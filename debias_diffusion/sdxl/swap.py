"""Other text encoders for a pipeline: a new one that shares the UNet and VAE, with nothing lost on the way unsaid."""

import copy
import warnings
from pathlib import Path
from typing import Any

import torch
from diffusers import DiffusionPipeline
from torch import Tensor, nn

from debias_diffusion.encoders.checkpoint import load_encoder
from debias_diffusion.encoders.encoder import Encoder
from debias_diffusion.encoders.specs import KEEP
from debias_diffusion.sdxl.slot_folder import open_slot, slot_root
from debias_diffusion.sdxl.slots import SLOTS, Slot, SlotSpec, slot_from_encoder

Source = Encoder | str | Path
"""What fills a slot: a slot folder, or an encoder by object, folder, file or ROW:TAG."""


def swap_text_encoders(
    pipe: DiffusionPipeline, text_encoder: Source | None = None, text_encoder_2: Source | None = None
) -> DiffusionPipeline:
    """A pipeline of the same class with one or both text encoders replaced; `pipe` itself keeps its own.

    UNet, VAE, scheduler and all else are shared. Dtype, device, textual-inversion tokens and model offload are carried
    over. A LoRA on a replaced encoder, sequential or group offload, a device map, a wrong class or width are refused,
    by name. Warns in three cases: the two encoders then differ in length, a LoRA is fused, or the first 20 rows of
    the old position table, which training leaves alone, are not the new encoder's: the checkpoint's own tuned encoder
    is then discarded. (A checkpoint that tuned all but those rows cannot be told without the original weights;
    `debias-diffusion drift` compares with them.) Swap first, then load LoRAs, which then apply to the new encoders.
    """
    sources = {
        name: value for name, value in zip(SLOTS, (text_encoder, text_encoder_2), strict=True) if value is not None
    }
    if not sources:
        raise ValueError(f"nothing to swap: give {' or '.join(SLOTS)}")
    _refuse_pipeline(pipe)
    for name in sources:
        _refuse_losses(pipe, SLOTS[name])
    slots = {name: _open(source, SLOTS[name]) for name, source in sources.items()}
    for name, slot in slots.items():
        _refuse_width(pipe, slot)
        _warn_losses(pipe, slot)
        _carry(pipe, SLOTS[name], slot)
    new = _with_slots(pipe, slots)
    _warn_lengths(new)
    return new


def _open(source: Source, spec: SlotSpec) -> Slot:
    if isinstance(source, Encoder):
        return slot_from_encoder(source, spec.name)
    if slot_root(source, spec.name):
        return open_slot(source, spec.name)
    return slot_from_encoder(load_encoder(source), spec.name)


def _with_slots(pipe: Any, slots: dict[str, Slot]) -> Any:
    # Not from_pipe: it casts every shared module to one dtype (float32 unless told), under the old pipeline's feet.
    new = copy.copy(pipe)
    modules: dict[str, Any] = {}
    for name, slot in slots.items():
        modules |= {name: slot.model, SLOTS[name].tokenizer: slot.tokenizer}
    new.register_modules(**modules)
    if getattr(pipe, "_all_hooks", []):  # model offload: hooks belong to modules, so the new ones need theirs
        new._all_hooks = []
        new.enable_model_cpu_offload(device=pipe._offload_device)
    return new


def _refuse_pipeline(pipe: Any) -> None:
    missing = [name for spec in SLOTS.values() for name in (spec.name, spec.tokenizer) if not hasattr(pipe, name)]
    if missing:
        raise ValueError(f"{type(pipe).__name__} has no {', '.join(missing)}; expected a Stable Diffusion XL pipeline")
    if getattr(pipe, "hf_device_map", None):
        raise ValueError(
            "the pipeline has a device map, which new encoders are not in; call pipe.reset_device_map() first"
        )
    modules = {name: part for name, part in pipe.components.items() if isinstance(part, nn.Module)}
    hooked = [name for name, part in modules.items() if any(hasattr(m, "_hf_hook") for m in part.modules())]
    if hooked and not getattr(pipe, "_all_hooks", []):
        raise ValueError(
            f"sequential offload is on for {', '.join(hooked)}; call pipe.remove_all_hooks(), swap, then enable it on "
            "the new pipeline"
        )


def _refuse_losses(pipe: Any, spec: SlotSpec) -> None:
    old, other = (getattr(pipe, name) for name in (spec.name, next(n for n in SLOTS if n != spec.name)))
    if old is None and other is None:
        return
    if old is None:
        raise ValueError(
            f"this pipeline has no {spec.name}, so its UNet reads none (the refiner reads text_encoder_2 alone)"
        )
    adapters = ", ".join(map(repr, getattr(old, "peft_config", None) or {}))
    if adapters:
        raise ValueError(
            f"LoRA {adapters} is loaded on {spec.name} and would be lost; call pipe.unload_lora_weights(), swap, then "
            "load it on the new pipeline"
        )
    hooks = sorted({h for m in old.modules() for h in getattr(getattr(m, "_diffusers_hook", None), "hooks", {})})
    if hooks:
        raise ValueError(f"{spec.name} has hooks the new one would lack: {', '.join(hooks)}; swap before enabling them")


def _refuse_width(pipe: Any, slot: Slot) -> None:
    old = getattr(pipe, slot.name)
    fields = ("hidden_size", "projection_dim") if SLOTS[slot.name].projects else ("hidden_size",)
    for field in fields if old is not None else ():
        have, want = getattr(slot.model.config, field), getattr(old.config, field)
        if have != want:
            raise ValueError(
                f"the new {slot.name} has {field} {have}, this pipeline's {want}; is it for another slot or model?"
            )


def _carry(pipe: Any, spec: SlotSpec, slot: Slot) -> None:
    old, old_tokenizer = getattr(pipe, spec.name), getattr(pipe, spec.tokenizer)
    like = pipe.unet if old is None else old
    model: Any = slot.model
    model.to(device=like.device, dtype=like.dtype)
    if old is None or old_tokenizer is None:
        return
    known = slot.tokenizer.get_vocab()
    inversions = {token: i for token, i in old_tokenizer.get_added_vocab().items() if token not in known}
    if not inversions:
        return
    vectors = old.get_input_embeddings().weight.detach()
    tokens = sorted(inversions, key=lambda token: inversions[token])
    slot.tokenizer.add_tokens(tokens)
    model.resize_token_embeddings(len(slot.tokenizer), mean_resizing=False)
    with torch.no_grad():
        for token in tokens:
            new_id = slot.tokenizer.convert_tokens_to_ids(token)
            model.get_input_embeddings().weight[new_id] = vectors[inversions[token]]


def _warn_losses(pipe: Any, slot: Slot) -> None:
    fused = ", ".join(map(repr, sorted(getattr(pipe, "fused_loras", ()))))
    if fused:
        _warn(f"LoRA {fused} is fused into this pipeline; what it changed in {slot.name} is not in the new one")
    old = getattr(pipe, slot.name)
    if old is not None and not _same_start(_positions(old), _positions(slot.model)):
        _warn(
            f"this pipeline's {slot.name} is not the one the new encoder was made from: the first {KEEP} rows of their "
            "position tables differ. If the checkpoint tuned its own text encoder, that tuning is now discarded; "
            "debias-diffusion drift says how far it was from the original"
        )


def _warn_lengths(pipe: Any) -> None:
    lengths = {n: getattr(pipe, n).config.max_position_embeddings for n in SLOTS if getattr(pipe, n) is not None}
    if len(set(lengths.values())) > 1 and type(pipe).__module__.startswith("diffusers."):
        said = ", ".join(f"{name} {length}" for name, length in lengths.items())
        _warn(
            f"the encoders read different lengths ({said}), which {type(pipe).__name__} cannot join; swap both, or use "
            "pipelines/pipeline_debias_sdxl.py, or pass prompt_embeds"
        )


def _positions(model: Any) -> Tensor:
    table: Tensor = getattr(model, "text_model", model).embeddings.position_embedding.weight.detach()
    return table


def _same_start(old: Tensor, new: Tensor) -> bool:
    """Whether the first rows of two position tables are equal up to rounding to the coarser of their dtypes."""
    eps = max(torch.finfo(old.dtype).eps, torch.finfo(new.dtype).eps)
    a, b = old[:KEEP].float().cpu(), new[:KEEP].float().cpu()
    smallest = max(torch.finfo(t.dtype).smallest_normal for t in (old, new))
    return a.shape == b.shape and bool(((a - b).abs() <= eps * (b.abs() + smallest)).all())


def _warn(text: str) -> None:
    warnings.warn(text, UserWarning, stacklevel=4)  # the caller of swap_text_encoders
