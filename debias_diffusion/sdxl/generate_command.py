"""Command-line job: prompts and seeds -> pictures with their record, with a checkpoint's own encoders or others."""

import dataclasses
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from debias_diffusion.sdxl.checkpoint_pipeline import load_pipeline
from debias_diffusion.sdxl.devices import find_device, find_precision
from debias_diffusion.sdxl.generate import Settings, as_pipeline, compare, token_report
from debias_diffusion.sdxl.generate import generate as generate_pictures
from debias_diffusion.sdxl.prompts import PromptLine, read_prompts
from debias_diffusion.sdxl.shipped import checkpoint_source, slots_source
from debias_diffusion.sdxl.slots import SLOTS

Checkpoint = Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="CHECKPOINT")]
Output = Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="OUTPUT")]


def generate(
    base: Checkpoint,
    output: Output,
    prompt: tuple[str, ...] = (),
    prompts: Path | None = None,
    seed: tuple[int, ...] = (0,),
    negative: str | None = None,
    text_encoder: str | None = None,
    text_encoder_2: str | None = None,
    compare_with_base: bool = False,
    steps: int = 30,
    guidance_scale: float = 5.0,
    width: int | None = None,
    height: int | None = None,
    clip_skip: int | None = None,
    max_length: str = "auto",
    syntax: Literal["plain", "a1111"] = "plain",
    dtype: Literal["fp16", "bf16", "fp32"] | None = None,
    device: str | None = None,
    offload: bool = False,
    variant: str | None = None,
    config: Path | None = None,
    redraw: bool = False,
) -> str:
    """Draws every prompt with every seed; returns where the pictures are and which prompts were cut.

    Args:
        base: SDXL checkpoint: a diffusers folder or hub name, one .safetensors file, or "miniature", the small one that
            is shipped.
        output: Folder for the pictures and contact-sheet.png. Run again, it goes on where it stopped.
        prompt: Prompts, each in quotes.
        prompts: File of prompts: .txt, one a line, or .jsonl with prompt, prompt_2, negative, seed.
        seed: Seeds; a seed in the prompt file goes before them.
        negative: Negative prompt, where the file gives none.
        text_encoder: Slot folder or encoder for the first slot, in place of the checkpoint's own; for the miniature also
            miniature:stretched, miniature:long-clip or miniature:debias.
        text_encoder_2: The same for the second slot.
        compare_with_base: Draws the same with the checkpoint's own encoders too, cut at their length as diffusers does.
        steps: Denoising steps.
        guidance_scale: How much the prompt is exaggerated; 1 or less leaves out the negative.
        width: Pixels; the checkpoint's own size where left out.
        height: Pixels.
        clip_skip: Layers skipped from the one SDXL reads.
        max_length: "auto", or rows a prompt gets, at which it is cut.
        syntax: How brackets are read: as characters, or as A1111 weights.
        dtype: Of all models; fp16 on a GPU and fp32 on a CPU where left out.
        device: Where to draw; a GPU where there is one.
        offload: Keeps on the device only the model that is at work (needs a GPU).
        variant: Of the checkpoint's weight files, such as fp16.
        config: Folder with the configuration of a one-file checkpoint, where there is no network.
        redraw: Draws again what is there already.
    """
    lines = [PromptLine(text) for text in prompt] + (read_prompts(prompts) if prompts else [])
    lines = [dataclasses.replace(line, negative=negative) if line.negative is None else line for line in lines]
    if not lines:
        raise ValueError("no prompt: give --prompt or --prompts FILE")
    settings = Settings(steps, guidance_scale, width, height, clip_skip, _length(max_length), syntax)
    named = zip(SLOTS, (text_encoder, text_encoder_2), strict=True)
    encoders = {name: slots_source(source) for name, source in named if source is not None}
    if compare_with_base and not encoders:
        raise ValueError("--compare-with-base needs other encoders: give --text-encoder or --text-encoder-2")
    device = find_device(device)
    pipe = load_pipeline(checkpoint_source(base), find_precision(device, dtype), variant, config)
    if offload:
        pipe.enable_model_cpu_offload(device=device)
    else:
        pipe.to(device)
    own = as_pipeline(encoders or None, pipe)
    more: dict[str, Any] = {"settings": settings, "resume": not redraw}
    if compare_with_base:
        length = min(getattr(pipe, name).config.max_position_embeddings for name in SLOTS)
        drawn = compare({"base": pipe, "swapped": own}, lines, seed, output, max_lengths={"base": length}, **more)
        count = sum(map(len, drawn.values()))
    else:
        count = len(generate_pictures(own, lines, seed, output, **more))
    cut = [row for line in lines for row in token_report(own, line, settings) if row.cut]
    said = [f"{row.slot} did not read: {' '.join(row.words_cut)}" for row in cut]
    return "\n".join([f"{count} pictures in {output}, side by side in contact-sheet.png", *said])


def _length(text: str) -> int | str:
    return int(text) if text.isdecimal() else text
