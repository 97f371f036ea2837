"""Pictures on disk: lossless, with the record of how they were made inside, written whole or not at all."""

import hashlib
import json
import os
import struct
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from textwrap import wrap
from typing import Any
from weakref import WeakKeyDictionary

import torch
from PIL import Image, ImageDraw, ImageFont, PngImagePlugin
from torch import Tensor, nn

from debias_diffusion import __version__
from debias_diffusion.sdxl.slots import SLOTS

KEY = "debias-diffusion"
"""The PNG text chunk that holds a picture's record as JSON."""

SHEET = "contact-sheet.png"

_SAMPLES = 4096
_LABEL_HEIGHT, _GAP = 36, 4
_UNREAD = "offloaded layer by layer, not read"
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_HASHED: WeakKeyDictionary[nn.Module, tuple[Any, str]] = WeakKeyDictionary()
"""The last whole hash of a module, and what its weights were then."""


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
    digest.update("".join(_loras(module)).encode())
    return digest.hexdigest()


def known_hash(module: nn.Module) -> str:
    """`module_hash` of the whole module, computed again only where something of its weights has changed.

    Every value is still read each time, in one sum a tensor where it lies: a change through `.data`, as when a LoRA is
    fused, leaves no other trace. That is far cheaper than hashing, most of all on a GPU, which then sends no weights.
    """
    state = _state(module)
    known = _HASHED.get(module)
    if known is None or state is None or known[0] != state:
        known = _HASHED[module] = (state, module_hash(module))
    return known[1]


def _state(module: nn.Module) -> tuple[Any, ...] | None:
    """What tells a module's weights from what they were: place, version and sum of the bits of each; None unread."""
    tensors = module.state_dict()
    if any(tensor.is_meta for tensor in tensors.values()):
        return None
    told = ((name, _trace(tensor)) for name, tensor in tensors.items())
    return (*told, *_loras(module))


def _trace(tensor: Tensor) -> tuple[Any, ...]:
    bits = tensor.detach().reshape(-1).view(_INTEGERS[tensor.element_size()])
    version = None if tensor.is_inference() else tensor._version
    return tensor.data_ptr(), version, tensor.shape, tensor.dtype, tensor.device, int(bits.sum(dtype=torch.int64))


def _loras(module: nn.Module) -> list[str]:
    return [
        f"{name} {sorted(part.scaling.items())} {part.active_adapters} {part.merged}"
        for name, part in module.named_modules()
        if hasattr(part, "lora_A")
    ]


def pipeline_record(pipe: Any) -> dict[str, Any]:
    """What pictures depend on besides their settings: encoders, UNet, VAE and scheduler by hash, and versions.

    Encoders are hashed whole, which takes seconds at full size and is done once for each state of their weights; a UNet
    and a VAE by 4,096 values of each tensor.
    """
    encoders = {
        spec.name: {
            "class": type(getattr(pipe, spec.name)).__name__,
            "context_length": getattr(pipe, spec.name).config.max_position_embeddings,
            "vocabulary": len(getattr(pipe, spec.tokenizer)),
            "sha256": known_hash(getattr(pipe, spec.name)),
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
    """The record inside a picture; None where there is no file, or a broken one, or a broken record.

    Raises ValueError for a whole picture that holds none: it was not drawn here, and is not to be overwritten.
    """
    try:
        with Image.open(path) as image:
            image.load()
            text = getattr(image, "text", {}).get(KEY)
    except (OSError, SyntaxError, ValueError, struct.error, Image.DecompressionBombError):
        return None  # no such file, no picture, or one that ends early or whose header is broken
    if text is None:
        raise ValueError(f"{path} is a picture without a record of how it was made; choose another folder")
    try:
        record = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return record if isinstance(record, dict) else None


def write_contact_sheets(
    folder: Path, columns: Sequence[str], rows: Sequence[tuple[str, Sequence[Path]]], cell: int = 256, most: int = 40
) -> list[Path]:
    """The pictures side by side, one row a (label, pictures), as contact-sheet.png and, beyond `most` rows, -2, -3 ...

    Larger pictures are reduced to `cell` pixels, smaller ones enlarged to it or a little beyond, by a whole factor and
    unsmoothed, so that every pixel of theirs can be seen.
    """
    paths = []
    for number, start in enumerate(range(0, len(rows), most), 1):
        path = folder / (SHEET if number == 1 else SHEET.replace(".", f"-{number}."))
        shown = rows[start : start + most]
        read_record(path)  # refuses to overwrite somebody's own picture
        write_png(_sheet(columns, shown, cell), path, {"contact_sheet": [[p.name for p in row] for _, row in shown]})
        paths.append(path)
    return paths


def _sheet(columns: Sequence[str], rows: Sequence[tuple[str, Sequence[Path]]], least: int) -> Image.Image:
    sizes = [_shown_size(path, least) for _, pictures in rows for path in pictures]
    cell = max((side for size in sizes for side in size), default=least)
    step = cell + _GAP  # pictures of one scene have one background, so without a gap they would run into one
    width = max(cell, step * len(columns) - _GAP)
    sheet = Image.new("RGB", (width, _LABEL_HEIGHT + len(rows) * (cell + _LABEL_HEIGHT)), "white")
    pen, font = ImageDraw.Draw(sheet), ImageFont.load_default(12)
    for x, name in enumerate(columns):
        pen.text((x * step + 4, 4), name, "black", font)
    for y, (label, pictures) in enumerate(rows):
        top = _LABEL_HEIGHT + y * (cell + _LABEL_HEIGHT)
        lines = wrap(label, max(20, sheet.width // 6), max_lines=2, placeholder=" ...")
        pen.multiline_text((4, top + 2), "\n".join(lines), "black", font)
        for x, picture in enumerate(pictures):
            size = _shown_size(picture, least)
            with Image.open(picture) as image:
                how = Image.Resampling.NEAREST if size > image.size else Image.Resampling.LANCZOS
                sheet.paste(image.convert("RGB").resize(size, how), (x * step, top + _LABEL_HEIGHT))
    return sheet


def _shown_size(path: Path, least: int) -> tuple[int, int]:
    with Image.open(path) as image:
        longest = max(image.size)
        if longest >= least:
            return (max(1, round(image.width * least / longest)), max(1, round(image.height * least / longest)))
        factor = -(-least // longest)
        return (image.width * factor, image.height * factor)
