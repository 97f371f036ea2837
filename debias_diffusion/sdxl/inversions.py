"""SDXL textual inversions: one file, both encoders, or neither."""

from pathlib import Path
from typing import Any

from diffusers import DiffusionPipeline
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from debias_diffusion.sdxl.slots import SLOTS

KEYS = {"text_encoder": "clip_l", "text_encoder_2": "clip_g"}
"""Each slot's tensor in such a file: (vectors, dim)."""


def load_inversion(pipe: DiffusionPipeline, path: str | Path, token: str | None = None) -> str:
    """The token that stands for the inversion in prompts from now on, in both encoders; the file's name where none is given.

    `path` is a .safetensors file with "clip_l" and "clip_g". Everything is checked before either encoder is changed, so
    swap encoders first. Vectors beyond the first get the tokens `token`_1, `token`_2 ..., which prompts need not name.
    """
    path = Path(path)
    name = token or path.stem
    state = _read(path)
    for slot, key in KEYS.items():
        _check(pipe, slot, state[key], name)
    loader: Any = pipe
    for slot, key in KEYS.items():
        parts = {"text_encoder": getattr(pipe, slot), "tokenizer": getattr(pipe, SLOTS[slot].tokenizer)}
        loader.load_textual_inversion(state[key], token=name, **parts)
    return name


def _read(path: Path) -> dict[str, Tensor]:
    if not path.is_file():
        raise FileNotFoundError(f"no textual inversion at {path}")
    try:
        state: dict[str, Tensor] = load_file(path)
    except SafetensorError as error:
        raise ValueError(f"{path} is not a whole safetensors file ({error}); copy or download it again") from error
    missing = [key for key in KEYS.values() if key not in state]
    if missing:
        raise ValueError(
            f"{path} holds {', '.join(sorted(state)) or 'nothing'} and no {' and no '.join(missing)}; an inversion for "
            "SDXL has both, one for an older Stable Diffusion cannot be used"
        )
    return {key: value[None] if value.ndim == 1 else value for key, value in state.items()}


def _check(pipe: Any, slot: str, vectors: Tensor, token: str) -> None:
    encoder, tokenizer = getattr(pipe, slot), getattr(pipe, SLOTS[slot].tokenizer)
    if encoder is None or tokenizer is None:
        raise ValueError(f"the pipeline has no {slot} with {SLOTS[slot].tokenizer} to load {token!r} into")
    dim = encoder.get_input_embeddings().weight.shape[1]
    if vectors.ndim != 2 or vectors.shape[1] != dim:
        raise ValueError(
            f"{KEYS[slot]} of {token!r} has shape {tuple(vectors.shape)}; {slot} takes (vectors, {dim}): it was made for "
            "another model"
        )
    if not vectors.isfinite().all():
        raise ValueError(f"{KEYS[slot]} of {token!r} is not finite; download it again")
    if {token, f"{token}_1"} & tokenizer.get_vocab().keys():
        raise ValueError(f"{SLOTS[slot].tokenizer} knows {token!r} already; give another token=")
