"""Command-line jobs around SDXL: export (and the way back) and drift."""

import json
from pathlib import Path
from typing import Annotated, Literal

import tyro

from debias_diffusion.encoders.checkpoint import load_encoder, save_encoder
from debias_diffusion.encoders.encoder import Encoder
from debias_diffusion.sdxl.card_numbers import read_numbers
from debias_diffusion.sdxl.drift import PROMPTS, drift_table, slot_drift
from debias_diffusion.sdxl.export import export_slot, push_folder
from debias_diffusion.sdxl.shipped import checkpoint_source, slots_source
from debias_diffusion.sdxl.single_file import export_single_file, import_tower
from debias_diffusion.sdxl.slots import find_slot, slot_of_width, text_tower

Source = Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="SOURCE")]
Output = Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="OUTPUT")]
Reference = Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="REFERENCE")]
SlotName = Literal["text_encoder", "text_encoder_2"]


def export(
    source: Source,
    output: Output,
    slot: SlotName | None = None,
    to: Literal["slot", "single-file", "encoder"] = "slot",
    dtype: Literal["fp16", "bf16", "fp32"] = "fp16",
    stretch: int | None = None,
    blend: float = 1.0,
    base: str | None = None,
    numbers: Path | None = None,
    push: str | None = None,
    public: bool = False,
) -> str:
    """Writes an encoder's text tower for SDXL, or takes one out of an SDXL checkpoint; returns what to do with it.

    Args:
        source: Encoder folder, file or ROW:TAG; with --to encoder, an SDXL checkpoint, folder or text-encoder file.
        output: Folder to write, or a .safetensors file with --to single-file. Both slots can share one folder.
        slot: Which of SDXL's encoders; told from the tower's width where it can be.
        to: A folder for diffusers, one file for ComfyUI and the like, or (the way back) an encoder to train from.
        dtype: Of the written weights.
        stretch: Positions to stretch the tower to first, untrained: for the slot beside a trained one.
        blend: Share of the encoder's weights, the rest from --base: 1 is the encoder, 0 the stretched base.
        base: The encoder it was tuned from: for --blend; with --to encoder, where image tower and tokenizer come from.
        numbers: The results.json of `evaluate`, or its folder, for the README.md's table of the encoder's recalls.
        push: Hub repository to upload the written folder to; private, and only when named.
        public: Makes a new hub repository public.
    """
    if (push or numbers) and to != "slot":
        raise ValueError("--push and --numbers are for slot folders; leave out --to")
    if to == "encoder":
        return _import(source, output, slot, base)
    encoder = load_encoder(source)
    if stretch and stretch != encoder.context_length:
        encoder = encoder.stretched(stretch)
    name = slot or slot_of_width(text_tower(encoder).token_embedding.embedding_dim)
    other = load_encoder(base) if base and blend != 1 else None
    if to == "single-file":
        path = export_single_file(encoder, name, output, dtype=dtype, blend=blend, base=other)
        return f"{path}: {name} for {encoder.context_length} tokens, {dtype}"
    measured = read_numbers(numbers, source) if numbers else None
    folder = export_slot(encoder, name, output, dtype=dtype, blend=blend, base=other, numbers=measured)
    lines = [_written(encoder, name, folder)]
    if push:
        address = push_folder(folder, push, private=not public)
        lines.append(f"uploaded to {address}; its README.md waits for you to state the licence")
    return "\n".join(lines)


def drift(
    encoder: Source,
    reference: Reference,
    slot: SlotName = "text_encoder",
    prompts: Path | None = None,
    output: Path | None = None,
) -> str:
    """Measures how far a text encoder is from the one SDXL was trained with; returns a table.

    Args:
        encoder: Slot folder, SDXL folder, encoder folder or ROW:TAG to measure; miniature:debias and the like are shipped.
        reference: The original, in any of the same forms: stock SDXL's folder, ViT-L-14:openai, or miniature, the small
            SDXL that is shipped.
        slot: Which of SDXL's encoders.
        prompts: Text file with one prompt a line; a few short ones where none is given.
        output: JSON file for all numbers, by position too.
    """
    lines: tuple[str, ...] = PROMPTS
    if prompts is not None:
        if not prompts.is_file():
            raise FileNotFoundError(f"no file of prompts at {prompts}")
        lines = tuple(line for line in prompts.read_text(encoding="utf-8").splitlines() if line.strip())
    tested, original = (slots_source(checkpoint_source(source)) for source in (encoder, reference))
    result = slot_drift(tested, original, lines, slot=slot)
    if output is not None:
        output.parent.mkdir(parents=True, exist_ok=True)
        output.write_text(json.dumps(result, indent=2) + "\n")
    return drift_table(result)


def _import(source: str, output: str, slot: str | None, base: str | None) -> str:
    if slot is None or base is None:
        raise ValueError("--to encoder needs --slot, and --base: the encoder whose image tower and tokenizer it gets")
    encoder = import_tower(source, slot, load_encoder(base))
    return (
        f"{save_encoder(encoder, output)}: encoder of {encoder.context_length} tokens; train it with --encoder {output}"
    )


def _written(encoder: Encoder, slot: str, folder: Path) -> str:
    spec = find_slot(slot)
    return (
        f"{folder}: {slot} and {spec.tokenizer} for {encoder.context_length} tokens, and README.md. "
        f"Use swap_text_encoders(pipe, {slot}={str(folder)!r}), or from_pretrained as README.md shows"
    )
