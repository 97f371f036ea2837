"""Puts the miniature SDXL together: a whole pipeline folder, and the slots of three longer encoder sets beside it."""

import json
import shutil
from pathlib import Path

import torch
from diffusers import AutoencoderKL, EulerDiscreteScheduler, StableDiffusionXLPipeline, UNet2DConditionModel
from miniature_unet import SCHEDULER

from debias_diffusion.encoders.checkpoint import load_encoder, replace_folder, save_encoder
from debias_diffusion.sdxl.export import export_slot
from debias_diffusion.sdxl.slots import slot_from_encoder

ROWS = {"miniature": "", "miniature-l": "-l"}
SLOTS = {"text_encoder": "-l", "text_encoder_2": ""}
BASES = (*(f"base{suffix}" for suffix in ROWS.values()), "base-siglip")
LONG = ("stretched", "long-clip", "debias")
LENGTH = 248


def assemble(work: Path, output: Path) -> None:
    """Writes the bases, sdxl/ and slots/ under `output` from what lies in `work`, each folder whole or not at all."""
    for name in BASES:
        if (work / name).is_dir() and (work / name).resolve() != (output / name).resolve():
            save_encoder(load_encoder(work / name), output / name)
            shutil.copyfile(work / name / "README.md", output / name / "README.md")
    bases = {slot: load_encoder(work / f"base{suffix}") for slot, suffix in SLOTS.items()}
    for name in LONG:
        for slot, suffix in SLOTS.items():
            tuned = bases[slot].stretched(LENGTH) if name == "stretched" else load_encoder(work / f"{name}{suffix}")
            export_slot(tuned, slot, output / "slots" / name, dtype="fp16")
    partial = output / ".sdxl.partial"
    shutil.rmtree(partial, ignore_errors=True)
    parts = {}
    for slot, encoder in bases.items():
        made = slot_from_encoder(encoder, slot)
        parts[slot], parts[slot.replace("text_encoder", "tokenizer")] = made.model, made.tokenizer
    pipe = StableDiffusionXLPipeline(
        vae=AutoencoderKL.from_pretrained(work / "vae"),
        unet=UNet2DConditionModel.from_pretrained(work / "unet"),
        scheduler=EulerDiscreteScheduler(**SCHEDULER),
        add_watermarker=False,
        **parts,
    )
    pipe.to(torch.float16).save_pretrained(partial)
    for file in partial.rglob("*.safetensors"):
        file.chmod(0o644)
    for file in partial.glob("*/config.json"):  # diffusers writes down which folder a model came from
        kept = {k: v for k, v in json.loads(file.read_text()).items() if k != "_name_or_path"}
        file.write_text(json.dumps(kept, indent=2) + "\n")
    (partial / "README.md").write_text(_card(json.loads((work / "card.json").read_text())))
    replace_folder(partial, output / "sdxl")


def _card(numbers: dict[str, str]) -> str:
    rows = "\n".join(f"| {name} | {value} |" for name, value in numbers.items())
    return f"""# The miniature SDXL

Stable Diffusion XL's own classes at small size: AutoencoderKL (64x64 pictures, 16x16x4 latents), UNet2DConditionModel with
SDXL's text_time conditioning, and two text slots at 77 tokens from the miniature's bases. Made by `python
train/miniature.py`, on a CPU; it draws the miniature world's coloured shapes and nothing else.

| what | how it was made, and what was measured |
| --- | --- |
{rows}

MIT licence, like the code.
"""
