"""SDXL checkpoints in the shapes people have them, opened as the stock pipeline: folders, hub names, single files."""

import re
from pathlib import Path
from typing import Any

import torch
from diffusers import StableDiffusionXLPipeline
from huggingface_hub.errors import LocalEntryNotFoundError

from debias_diffusion.sdxl.checkpoint_weights import (
    MODELS,
    TOWERS,
    UNET,
    Shapes,
    check_file,
    check_folder,
    check_unet_and_vae,
    read_shapes,
)
from debias_diffusion.sdxl.config_files import check_config, load_small, missing_files, reading

_PARTS: dict[str, str | tuple[str, ...]] = {
    "UNet": UNET,
    "VAE": ("first_stage_model.", "vae."),
    "first text encoder": TOWERS["text_encoder"],
    "second text encoder": TOWERS["text_encoder_2"],
}
_HOW = (
    "name a folder with it in --config: a diffusers folder of the same model, or only the .json and .txt files of one, "
    "such as those of stabilityai/stable-diffusion-xl-base-1.0, each in its own folder there"
)
_FIT = "configuration and weights must be of one model; copy or download them again"
_TOLD_BY = (
    f"{TOWERS['text_encoder']}text_model.embeddings.position_embedding.weight",
    f"{TOWERS['text_encoder_2']}positional_embedding",
)
"""Keys by which diffusers finds the text encoders in a file: without them it says only that there are none."""


def load_pipeline(base: str, dtype: torch.dtype, variant: str | None = None, config: Path | None = None) -> Any:
    """The stock pipeline of an SDXL checkpoint: a diffusers folder, a hub name, or one .safetensors file.

    `variant` is that of the weight files, such as "fp16"; a folder whose files are all of one needs none. `config` is a
    folder with the configuration of a single file (`config_files.CONFIG_FILES`); without it diffusers takes that of the model it
    recognises from the hub or its cache. Errors name the file, what it lacks, and what to do.
    """
    if base.endswith(".safetensors"):
        return _open_file(Path(base), dtype, variant, config)
    if config is not None:
        raise ValueError("--config belongs to a one-file checkpoint; a folder has its own")
    if Path(base).is_dir():
        return _open_folder(Path(base), dtype, variant or _only_variant(Path(base)))
    folder = StableDiffusionXLPipeline.download(base, variant=variant, use_safetensors=True)
    return _open_folder(Path(folder), dtype, variant)


def _open_folder(folder: Path, dtype: torch.dtype, variant: str | None) -> Any:
    check_config(folder)
    small = load_small(folder)
    with reading(folder, _FIT):
        pipe = StableDiffusionXLPipeline.from_pretrained(
            str(folder), dtype=dtype, variant=variant, use_safetensors=True, **small
        )
    check_folder(pipe, folder, variant)
    return pipe


def _open_file(path: Path, dtype: torch.dtype, variant: str | None, config: Path | None) -> Any:
    if variant is not None:
        raise ValueError(f"--variant {variant} belongs to a folder with weights in several; {path} is one file")
    shapes = _shapes_of_sdxl(path)
    pipe = _from_hub_config(path, dtype) if config is None else _from_config(path, shapes, dtype, config)
    check_file(pipe, path, shapes)
    return pipe


def _from_hub_config(path: Path, dtype: torch.dtype) -> Any:
    try:
        with reading(path, _FIT):
            return StableDiffusionXLPipeline.from_single_file(str(path), dtype=dtype)
    except LocalEntryNotFoundError as error:
        raise FileNotFoundError(
            f"{path} holds weights alone, and the configuration they need is not on this machine nor to be had from "
            f"the hub; {_HOW}"
        ) from error


def _from_config(path: Path, shapes: Shapes, dtype: torch.dtype, config: Path) -> Any:
    missing = missing_files(config)
    if missing:
        raise FileNotFoundError(f"{config} is no configuration for {path.name}: it has no {', '.join(missing)}; {_HOW}")
    check_config(config)
    check_unet_and_vae(path, shapes, config)
    small = load_small(config)
    with reading(f"{path} with the configuration in {config}", _FIT):
        return StableDiffusionXLPipeline.from_single_file(
            str(path), dtype=dtype, config=str(config), local_files_only=True, **small
        )


def _shapes_of_sdxl(path: Path) -> Shapes:
    """Names and shapes of the tensors in a single file; ValueError for one that is no SDXL checkpoint."""
    if not path.is_file():
        raise FileNotFoundError(f"there is no file {path}; expected an SDXL checkpoint in one .safetensors file")
    shapes = read_shapes([path])
    keys = list(shapes)
    missing = [name for name, prefix in _PARTS.items() if not any(key.startswith(prefix) for key in keys)]
    if missing:
        raise ValueError(
            f"{path} is no SDXL checkpoint: it has no {', '.join(missing)}. Its first keys are {', '.join(keys[:3])}; "
            "expected UNet, VAE and both text encoders in one file, as SDXL's own has them"
        )
    unnamed = [key for key in _TOLD_BY if key not in keys]
    if unnamed:
        raise ValueError(f"{path} lacks {', '.join(unnamed)}; fetch or copy the checkpoint again")
    return shapes


def _only_variant(folder: Path) -> str | None:
    """The variant of a folder where some model's weights lie in that one alone; None where plain files will do."""
    needed: set[str] = set()
    for model, stem in MODELS.items():
        names = [path.name for path in (folder / model).glob(f"{stem}.*")]
        if any(name in names for name in (f"{stem}.safetensors", f"{stem}.safetensors.index.json")):
            continue
        found = (re.fullmatch(rf"{stem}\.(\w+?)(-\d+-of-\d+)?\.safetensors", name) for name in names)
        needed |= {match[1] for match in found if match}
    if len(needed) > 1:
        raise ValueError(f"the weights in {folder} come as {', '.join(sorted(needed))}; choose one with --variant")
    return needed.pop() if needed else None
