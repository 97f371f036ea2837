"""Whether an opened pipeline holds what its checkpoint's files hold: libraries fill gaps in silence, or drop layers."""

import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from diffusers import AutoencoderKL, UNet2DConditionModel
from diffusers.loaders.single_file_utils import convert_ldm_unet_checkpoint, convert_ldm_vae_checkpoint
from safetensors import SafetensorError, safe_open

from debias_diffusion.encoders.convert import text_from_transformers
from debias_diffusion.sdxl.config_files import read_object, reading
from debias_diffusion.sdxl.slot_folder import with_prefix
from debias_diffusion.sdxl.slots import SLOTS

Shapes = dict[str, tuple[int, ...]]

MODELS = {"unet": "diffusion_pytorch_model", "vae": "diffusion_pytorch_model"} | dict.fromkeys(SLOTS, "model")
"""Stem of each model's weight files in a diffusers folder."""

UNET = "model.diffusion_model."
"""Beginning of the UNet's keys in a single file."""

TOWERS = {
    "text_encoder": "conditioner.embedders.0.transformer.",
    "text_encoder_2": "conditioner.embedders.1.model.",
}
"""Beginnings of the text encoders' keys in a single file: transformers' names in the first, open_clip's in the second."""

_HARMLESS = ("position_ids", "logit_scale", "attn_mask", "text_projection", "text_projection.weight")
"""Ends of text-encoder keys that SDXL does not read, at least not in both; where the second lacks its own it is named."""


def read_shapes(paths: Iterable[Path]) -> Shapes:
    """Names and shapes of the tensors in .safetensors files, from their headers alone."""
    shapes: Shapes = {}
    for path in paths:
        try:
            with safe_open(path, "pt") as file:
                shapes |= {key: tuple(file.get_slice(key).get_shape()) for key in file.keys()}  # noqa: SIM118
        except SafetensorError as error:
            raise ValueError(f"{path} is no whole .safetensors file ({error}); fetch or copy it again") from error
    return shapes


def check_unet_and_vae(path: Path, shapes: Shapes, config: Path) -> None:
    """Raises ValueError naming weights of a single file's UNet and VAE that its configuration calls for and it lacks.

    To be called before diffusers opens the file, which then fails without a name.
    """
    state = {key: torch.empty(shape, device="meta") for key, shape in shapes.items()}
    kinds: dict[str, tuple[Any, Any]] = {
        "unet": (UNet2DConditionModel, convert_ldm_unet_checkpoint),
        "vae": (AutoencoderKL, convert_ldm_vae_checkpoint),
    }
    for name, (kind, convert) in kinds.items():
        file = config / name / "config.json"
        settings = read_object(file)
        with reading(file), torch.device("meta"):
            model = kind.from_config(settings)
        with reading(f"{path} with {file}", "configuration and weights must be of one model"):
            found = convert(dict(state), config=dict(model.config))
        _refuse_missing(model.state_dict().keys() - found.keys(), name, path)


def check_file(pipe: Any, path: Path, shapes: Shapes) -> None:
    """Raises ValueError naming weights that the pipeline has and its single file lacks, or the other way round."""
    _refuse_unfilled(pipe, path)
    for name, prefix in TOWERS.items():
        found = {key.removeprefix(prefix) for key in shapes if key.startswith(prefix)}
        state = getattr(pipe, name).state_dict()
        wanted = with_prefix(state).keys() if name == "text_encoder" else text_from_transformers(state).keys()
        _refuse_unread(found - wanted, name, path)
    _refuse_larger_unet(pipe, {key: value for key, value in shapes.items() if key.startswith(UNET)}, path)


def check_folder(pipe: Any, folder: Path, variant: str | None) -> None:
    """Raises ValueError naming weights that the pipeline has and its folder lacks, or the other way round."""
    _refuse_unfilled(pipe, folder)
    for name in SLOTS:
        found = with_prefix(read_shapes(_weight_files(folder, name, variant)))
        wanted = with_prefix(getattr(pipe, name).state_dict())
        _refuse_missing(wanted.keys() - found.keys(), name, folder / name)
        _refuse_unread(found.keys() - wanted.keys(), name, folder / name)
    _refuse_larger_unet(pipe, read_shapes(_weight_files(folder, "unet", variant)), folder / "unet")


def _weight_files(folder: Path, name: str, variant: str | None) -> list[Path]:
    stem = MODELS[name]
    for start in ([f"{stem}.{variant}"] if variant else []) + [stem]:
        whole = folder / name / f"{start}.safetensors"
        files = [whole] if whole.is_file() else sorted((folder / name).glob(f"{start}-*-of-*.safetensors"))
        if files:
            return files
    raise FileNotFoundError(f"{folder / name} holds no {stem}.safetensors; pickled weights are not read here")


def _refuse_unfilled(pipe: Any, where: Path) -> None:
    for name in MODELS:
        empty = {key for key, value in getattr(pipe, name).state_dict().items() if value.is_meta}
        _refuse_missing(empty, name, where)


def _refuse_missing(keys: Iterable[str], name: str, where: Path) -> None:
    if keys := sorted(keys):
        raise ValueError(
            f"{where} lacks weights of the {name} that its configuration calls for: {_some(keys)}; "
            "fetch or copy the checkpoint again, or give the configuration that belongs to it"
        )


def _refuse_unread(keys: Iterable[str], name: str, where: Path) -> None:
    if keys := sorted(key for key in keys if not key.endswith(_HARMLESS)):
        raise ValueError(
            f"{where} holds weights of the {name} that its configuration has no place for: {_some(keys)}; "
            "give the configuration that belongs to the checkpoint"
        )


def _refuse_larger_unet(pipe: Any, shapes: Shapes, where: Path) -> None:
    # Names differ between the layouts, but no conversion changes how many values there are.
    held, used = sum(map(math.prod, shapes.values())), sum(value.numel() for value in pipe.unet.state_dict().values())
    if held > used:
        raise ValueError(
            f"{where} holds a UNet of {held:,} values, of which its configuration has a place for {used:,}; "
            "give the configuration that belongs to the checkpoint"
        )


def _some(keys: list[str]) -> str:
    return ", ".join(keys[:5]) + (f" and {len(keys) - 5} more" if len(keys) > 5 else "")
