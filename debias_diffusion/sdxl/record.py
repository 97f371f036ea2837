"""Pictures on disk: lossless, with the record of how they were made inside, written whole or not at all."""

import hashlib
import json
import os
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from textwrap import wrap
from typing import Any

import torch
from PIL import Image, ImageDraw, ImageFont, PngImagePlugin
from torch import nn

from debias_diffusion import __version__
from debias_diffusion.sdxl.slots import SLOTS

KEY = "debias-diffusion"
"""The PNG text chunk that holds a picture's record as JSON."""

SHEET = "contact-sheet.png"

_SAMPLES = 4096
_LABEL_HEIGHT = 36
_UNREAD = "offloaded layer by layer, not read"


def module_hash(module: nn.Module, samples: int = 0) -> str:
    """SHA-256 of a module's weights, names, shapes and dtypes, and of the scales of its LoRAs, in hex.

    With `samples` only about so many values of each tensor are read, evenly spaced: enough to tell two UNets apart.
    Weights under sequential offload cannot be read; the text returned then says so.
    """
    digest = hashlib.sha256()
    for name, tensor in sorted(module.state_dict().items()):
        if tensor.is_meta:
            return _UNREAD
        values = tensor.detach().reshape(-1)
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
        values = values[:: max(1, len(values) // samples)] if samples else values
        digest.update(values.cpu().contiguous().view(torch.uint8).numpy())
    for name, part in module.named_modules():
        if hasattr(part, "lora_A"):
            digest.update(f"{name} {sorted(part.scaling.items())} {part.active_adapters} {part.merged}".encode())
    return digest.hexdigest()


def pipeline_record(pipe: Any) -> dict[str, Any]:
    """What pictures depend on besides their settings: encoders, UNet, VAE and scheduler by hash, and versions.

    Encoders are hashed whole; a UNet and a VAE by 4,096 values of each tensor. Takes seconds at full size.
    """
    encoders = {
        spec.name: {
            "class": type(getattr(pipe, spec.name)).__name__,
            "context_length": getattr(pipe, spec.name).config.max_position_embeddings,
            "vocabulary": len(getattr(pipe, spec.tokenizer)),
            "sha256": module_hash(getattr(pipe, spec.name)),
        }
        for spec in SLOTS.values()
        if getattr(pipe, spec.name) is not None
    }
    scheduler = {k: v for k, v in sorted(pipe.scheduler.config.items()) if not k.startswith("_")}
    record = {
        "encoders": encoders,
        "unet_sampled_sha256": module_hash(pipe.unet, _SAMPLES),
        "vae_sampled_sha256": module_hash(pipe.vae, _SAMPLES),
        "scheduler": {"class": type(pipe.scheduler).__name__, **scheduler},
        "force_zeros_for_empty_prompt": pipe.config.force_zeros_for_empty_prompt,
        "versions": {"debias-diffusion": __version__} | {n: version(n) for n in ("torch", "diffusers", "transformers")},
    }
    plain: dict[str, Any] = json.loads(json.dumps(record, default=str))
    return plain


def write_png(image: Image.Image, path: Path, record: dict[str, Any]) -> None:
    """Writes the picture with its record; under its name there is never a part of a file."""
    text = PngImagePlugin.PngInfo()
    text.add_itxt(KEY, json.dumps(record))
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        image.save(partial, format="PNG", pnginfo=text)
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def read_record(path: str | Path) -> dict[str, Any] | None:
    """The record inside a picture; None where there is no file, or a broken one.

    Raises ValueError for a whole picture that holds none: it was not drawn here, and is not to be overwritten.
    """
    try:
        with Image.open(path) as image:
            image.load()
            text = getattr(image, "text", {}).get(KEY)
    except (OSError, SyntaxError):  # no such file, no picture, or one that ends early
        return None
    if text is None:
        raise ValueError(f"{path} is a picture without a record of how it was made; choose another folder")
    record: dict[str, Any] = json.loads(text)
    return record


def write_contact_sheets(
    folder: Path, columns: Sequence[str], rows: Sequence[tuple[str, Sequence[Path]]], cell: int = 256, most: int = 40
) -> list[Path]:
    """The pictures side by side, one row a (label, pictures), as contact-sheet.png and, beyond `most` rows, -2, -3 ..."""
    paths = []
    for number, start in enumerate(range(0, len(rows), most), 1):
        path = folder / (SHEET if number == 1 else SHEET.replace(".", f"-{number}."))
        shown = rows[start : start + most]
        read_record(path)  # refuses to overwrite somebody's own picture
        write_png(_sheet(columns, shown, cell), path, {"contact_sheet": [[p.name for p in row] for _, row in shown]})
        paths.append(path)
    return paths


def _sheet(columns: Sequence[str], rows: Sequence[tuple[str, Sequence[Path]]], cell: int) -> Image.Image:
    sheet = Image.new("RGB", (cell * len(columns), _LABEL_HEIGHT + len(rows) * (cell + _LABEL_HEIGHT)), "white")
    pen, font = ImageDraw.Draw(sheet), ImageFont.load_default(12)
    for x, name in enumerate(columns):
        pen.text((x * cell + 4, 4), name, "black", font)
    for y, (label, pictures) in enumerate(rows):
        top = _LABEL_HEIGHT + y * (cell + _LABEL_HEIGHT)
        lines = wrap(label, max(20, sheet.width // 6), max_lines=2, placeholder=" ...")
        pen.multiline_text((4, top + 2), "\n".join(lines), "black", font)
        for x, picture in enumerate(pictures):
            with Image.open(picture) as image:
                small = image.convert("RGB")
                small.thumbnail((cell, cell))
            sheet.paste(small, (x * cell, top + _LABEL_HEIGHT))
    return sheet
