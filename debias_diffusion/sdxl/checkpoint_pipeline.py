"""SDXL checkpoints in the shapes people have them, opened as the stock pipeline: folders, hub names, single files."""

import re
from pathlib import Path
from typing import Any

import torch
from diffusers import StableDiffusionXLPipeline
from huggingface_hub.errors import LocalEntryNotFoundError
from safetensors import SafetensorError, safe_open

CONFIG_FILES = (
    "model_index.json",
    "scheduler/scheduler_config.json",
    "text_encoder/config.json",
    "text_encoder_2/config.json",
    "tokenizer/tokenizer_config.json",
    "tokenizer_2/tokenizer_config.json",
    "unet/config.json",
    "vae/config.json",
)
"""What a single file does not hold, by their paths in a diffusers folder (beside the tokenizers' vocabularies)."""

_MODELS = {"unet": "diffusion_pytorch_model", "vae": "diffusion_pytorch_model"} | dict.fromkeys(
    ("text_encoder", "text_encoder_2"), "model"
)
"""Stem of each model's weight files in a diffusers folder."""
_PARTS: dict[str, str | tuple[str, ...]] = {
    "UNet": "model.diffusion_model.",
    "VAE": ("first_stage_model.", "vae."),
    "first text encoder": "conditioner.embedders.0.transformer.",
    "second text encoder": "conditioner.embedders.1.model.",
}
_HOW = (
    "name a folder with it in --config: a diffusers folder of the same model, or only the .json and .txt files of one, "
    "such as those of stabilityai/stable-diffusion-xl-base-1.0, each in its own folder there"
)


def load_pipeline(base: str, dtype: torch.dtype, variant: str | None = None, config: Path | None = None) -> Any:
    """The stock pipeline of an SDXL checkpoint: a diffusers folder, a hub name, or one .safetensors file.

    `variant` is that of the weight files, such as "fp16"; a folder whose files are all of one needs none. `config` is a
    folder with the configuration of a single file (`CONFIG_FILES`); without it diffusers takes that of the model it
    recognises from the hub or its cache. Errors name the file, what it lacks, and what to do.
    """
    if base.endswith(".safetensors"):
        return _open_file(Path(base), dtype, variant, config)
    if config is not None:
        raise ValueError("--config belongs to a one-file checkpoint; a folder has its own")
    if Path(base).is_dir():
        variant = variant or _only_variant(Path(base))
    return StableDiffusionXLPipeline.from_pretrained(base, dtype=dtype, variant=variant, use_safetensors=True)


def _open_file(path: Path, dtype: torch.dtype, variant: str | None, config: Path | None) -> Any:
    if variant is not None:
        raise ValueError(f"--variant {variant} belongs to a folder with weights in several; {path} is one file")
    _refuse_other_files(path)
    if config is None:
        try:
            return StableDiffusionXLPipeline.from_single_file(str(path), dtype=dtype)
        except LocalEntryNotFoundError as error:
            raise FileNotFoundError(
                f"{path} holds weights alone, and the configuration they need is not on this machine nor to be had from "
                f"the hub; {_HOW}"
            ) from error
    missing = [name for name in CONFIG_FILES if not (config / name).is_file()]
    if missing:
        raise FileNotFoundError(f"{config} is no configuration for {path.name}: it has no {', '.join(missing)}; {_HOW}")
    return StableDiffusionXLPipeline.from_single_file(str(path), dtype=dtype, config=str(config), local_files_only=True)


def _refuse_other_files(path: Path) -> None:
    if not path.is_file():
        raise FileNotFoundError(f"there is no file {path}; expected an SDXL checkpoint in one .safetensors file")
    try:
        with safe_open(path, "pt") as file:
            keys = list(file.keys())
    except SafetensorError as error:
        raise ValueError(f"{path} is no whole .safetensors file ({error}); fetch or copy it again") from error
    missing = [name for name, prefix in _PARTS.items() if not any(key.startswith(prefix) for key in keys)]
    if missing:
        raise ValueError(
            f"{path} is no SDXL checkpoint: it has no {', '.join(missing)}. Its first keys are {', '.join(keys[:3])}; "
            "expected UNet, VAE and both text encoders in one file, as SDXL's own has them"
        )


def _only_variant(folder: Path) -> str | None:
    """The variant of a folder where some model's weights lie in that one alone; None where plain files will do."""
    needed: set[str] = set()
    for model, stem in _MODELS.items():
        names = [path.name for path in (folder / model).glob(f"{stem}.*")]
        if any(name in names for name in (f"{stem}.safetensors", f"{stem}.safetensors.index.json")):
            continue
        found = (re.fullmatch(rf"{stem}\.(\w+?)(-\d+-of-\d+)?\.safetensors", name) for name in names)
        needed |= {match[1] for match in found if match}
    if len(needed) > 1:
        raise ValueError(f"the weights in {folder} come as {', '.join(sorted(needed))}; choose one with --variant")
    return needed.pop() if needed else None
