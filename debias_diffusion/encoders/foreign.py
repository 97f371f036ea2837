"""Others' weight files, told apart by their content and brought to one naming: `visual.*`, `text.*`, `logit_scale`."""

import math
import pickle
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from open_clip.model import convert_to_custom_text_state_dict
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from debias_diffusion.encoders.convert import StateDict, clip_from_transformers
from debias_diffusion.encoders.positions import fuse_tables

Tables = Literal["fused", "first"]
"""How two position tables become one: "fused" as they were trained; "first" drops the trained rows from 20 on, as the
official loader and common converters do, to reproduce numbers published that way."""


@dataclass(frozen=True)
class Weights:
    """A state dict under our naming, the kind of file it came from, and the activation that kind implies, if any."""

    state: StateDict
    kind: str
    quick_gelu: bool | None


def read_weights(path: Path, tables: Tables = "fused") -> Weights:
    """The weights of a .safetensors, .pt, .pth or .bin file; nothing in it is executed.

    Raises ValueError for a truncated file, a pickled model, or keys that are no CLIP model's.
    """
    content = read_tensors(path)
    name = str(content.get("name", ""))
    state = _unwrap(content, path)
    for kind in _KINDS:
        if kind.matches(state):
            quick_gelu = kind.quick_gelu
            if quick_gelu is None and "_openai" in name:
                quick_gelu = True  # the official DeBias release names its base in its run name
            return Weights(_fuse(kind.convert(state), tables), kind.name, quick_gelu)
    raise ValueError(
        f"{path} holds no CLIP model this package knows: its keys start {sorted(state)[:4]}; expected the names of "
        "open_clip, OpenAI, Long-CLIP, DeBias-CLIP or a transformers CLIPModel"
    )


def read_tensors(path: Path) -> dict[str, Any]:
    """What a weight file holds, by safetensors or `weights_only` loading."""
    if not path.is_file():
        raise FileNotFoundError(f"no weight file at {path}")
    try:
        if path.suffix == ".safetensors":
            return dict(load_file(path))
        _check_is_pytorch(path)
        content = torch.load(path, map_location="cpu", weights_only=True)
    except SafetensorError as error:
        raise ValueError(f"{path} is not a whole safetensors file ({error}); copy or download it again") from error
    except pickle.UnpicklingError as error:
        raise ValueError(
            f"{path} is a pickled model or holds code, which is never executed; save its state_dict() as safetensors"
        ) from error
    except (RuntimeError, EOFError, KeyError, OSError) as error:
        if "TorchScript" in str(error):  # PyTorch's own advice is to execute the file
            raise ValueError(
                f"{path} is a TorchScript program, which is never executed; save its state_dict() as safetensors"
            ) from error
        reason = next(iter(str(error).splitlines()), "it ends too early")
        raise ValueError(f"{path} is not a whole PyTorch weight file ({reason}); copy or download it again") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} holds a {type(content).__name__}, expected a dictionary of tensors")
    return content


def _check_is_pytorch(path: Path) -> None:
    """A web page or a Git LFS pointer under a weight file's name would pass for a pickle that holds code."""
    with path.open("rb") as file:
        head = file.read(16)
    if not head.startswith((b"PK", b"\x80")):  # a zip, or the bare pickle of PyTorch before 1.6
        raise ValueError(
            f"{path} is no PyTorch weight file: it starts with {head!r}; copy or download it again, and whole "
            "(with Git LFS: git lfs pull)"
        )


def _unwrap(content: dict[str, Any], path: Path) -> StateDict:
    state = content.get("state_dict", content.get("model", content))
    if not isinstance(state, dict):
        raise ValueError(f"{path} holds a whole {type(state).__name__} where its state dict was expected")
    for prefix in ("module.", "_orig_mod."):
        if state and all(k.startswith(prefix) for k in state):
            state = {k.removeprefix(prefix): v for k, v in state.items()}
    tensors = {k: v for k, v in state.items() if isinstance(v, Tensor)}
    if not tensors:
        raise ValueError(f"{path} holds no tensors; its keys are {sorted(map(str, state))[:6]}")
    return tensors


@dataclass(frozen=True)
class _Kind:
    name: str
    matches: Callable[[StateDict], bool]
    convert: Callable[[StateDict], StateDict]
    quick_gelu: bool | None = None


def _openai_names(state: StateDict) -> StateDict:
    extras = ("input_resolution", "context_length", "vocab_size")
    state = {k: v for k, v in state.items() if k not in extras}
    return convert_to_custom_text_state_dict(state)


def _as_is(state: StateDict) -> StateDict:
    return state


_KINDS = (
    _Kind(
        "Long-CLIP",
        lambda s: "positional_embedding_res" in s and "visual.proj" in s,
        _openai_names,
        quick_gelu=True,  # Long-CLIP exists on OpenAI's weights only
    ),
    _Kind("DeBias-CLIP", lambda s: "text.positional_embedding_res" in s, _as_is),
    _Kind("open_clip", lambda s: "text.positional_embedding" in s and "logit_scale" in s, _as_is),
    _Kind("open_clip", lambda s: "positional_embedding" in s and "text_projection" in s, _openai_names),
    _Kind("transformers", lambda s: "vision_model.embeddings.class_embedding" in s, clip_from_transformers),
)


def _fuse(state: StateDict, tables: Tables) -> StateDict:
    trained = state.pop("text.positional_embedding_res", None)
    if trained is not None and tables == "fused":
        state["text.positional_embedding"] = fuse_tables(state["text.positional_embedding"], trained)
    return state


def infer_config(state: StateDict, *, vision_heads: int | None = None, text_heads: int | None = None) -> dict[str, Any]:
    """The open_clip model config that a ViT CLIP state dict implies, without its activation.

    Head counts are not in the weights: where they are not given, heads are 64 wide, as in every CLIP text tower and in
    the image towers up to L/14; other towers must be named by their row.
    """
    if "visual.conv1.weight" not in state or "visual.class_embedding" not in state:
        raise ValueError("the image tower is not a ViT; name the encoder's row, as in ROW:PATH")
    if "logit_bias" in state or "text.text_projection.bias" in state:
        raise ValueError("these are SigLIP's weights, which do not tell their tokenizer; name its row, as in ROW:PATH")
    width, _, patch, _ = state["visual.conv1.weight"].shape
    context_length, text_width = state["text.positional_embedding"].shape
    if vision_heads is None and (width > 1024 or width % 64):
        raise ValueError(
            f"the image tower is {width} wide: its number of heads is unknown; name its row, as in ROW:PATH"
        )
    if text_heads is None and text_width % 64:
        raise ValueError(
            f"the text tower is {text_width} wide: its number of heads is unknown; name its row, as in ROW:PATH"
        )
    grid = round((len(state["visual.positional_embedding"]) - 1) ** 0.5)
    return {
        "embed_dim": state["visual.proj"].shape[1],
        "vision_cfg": {
            "image_size": grid * patch,
            "patch_size": patch,
            "width": width,
            "layers": _num_layers(state, "visual."),
            "head_width": width // (vision_heads or width // 64),
            "mlp_ratio": _mlp_ratio(state, "visual.", width),
        },
        "text_cfg": {
            "context_length": context_length,
            "vocab_size": len(state["text.token_embedding.weight"]),
            "width": text_width,
            "heads": text_heads or text_width // 64,
            "layers": _num_layers(state, "text."),
            "mlp_ratio": _mlp_ratio(state, "text.", text_width),
        },
    }


def _mlp_ratio(state: StateDict, prefix: str, width: int) -> float:
    hidden = len(state.get(f"{prefix}transformer.resblocks.0.mlp.c_fc.bias", torch.empty(4 * width)))
    # open_clip rounds width * ratio down, and must arrive at the hidden width again.
    return hidden / width if int(width * (hidden / width)) == hidden else math.nextafter(hidden / width, math.inf)


def _num_layers(state: StateDict, prefix: str) -> int:
    return sum(k.startswith(f"{prefix}transformer.resblocks.") and k.endswith(".ln_1.weight") for k in state)
