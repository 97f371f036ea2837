"""Remakes the weights that ship in debias_diffusion/miniature, on a CPU: about three hours on two idle cores.

  python train/miniature.py                          everything that `--work` does not hold yet, then the shipped folders
  python train/miniature.py --parts vae unet         these parts anew, the others as they lie in `--work`
  python train/miniature.py --parts none             only puts together what `--work` holds

Parts, each resting on those before it:
  base, base-l   the two base encoders, 77 tokens, trained from scratch
  base-siglip    the base SigLIP, 64 tokens, and its tokenizer; nothing of the SDXL rests on it
  encoders       Long-CLIP and DeBias fine-tunings of both text towers, 150 gentle steps
  vae            the autoencoder
  unet           the UNet, on the frozen bases' states and the VAE's latents
"""

import dataclasses
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import tyro
from diffusers import AutoencoderKL, UNet2DConditionModel
from miniature_clip import SIGLIP_TOKENIZER, BaseConfig, make_base
from miniature_sdxl import ROWS, SLOTS, assemble
from miniature_unet import UNetConfig, prepare, train_unet
from miniature_vae import VaeConfig, reconstruction_error, refine_decoder, train_vae
from miniature_vocabulary import write_siglip_tokenizer

from debias_diffusion.config import PRESETS
from debias_diffusion.demo import RECIPES, fine_tune
from debias_diffusion.encoders.checkpoint import load_encoder, replace_folder
from debias_diffusion.encoders.encoder import MINIATURE_FOLDER
from debias_diffusion.encoders.tokens import BPE_FILE
from debias_diffusion.sdxl.slots import slot_from_encoder

GENTLE = {"max_steps": 150, "learning_rate": 1e-4, "train_towers": "text"}
"""For the encoders that go into SDXL's slots: the demo's 5e-4 moves their states so far that the UNet, which knows the
bases' alone, no longer understands them."""


@dataclasses.dataclass(frozen=True)
class MiniatureConfig:
    """What is remade, and where."""

    parts: tuple[str, ...] = ()
    """Parts to make even if `work` holds them: base, base-l, base-siglip, encoders, vae, unet; none makes nothing."""
    work: Path = Path("runs/miniature")
    output: Path = MINIATURE_FOLDER
    unet: UNetConfig = dataclasses.field(default_factory=UNetConfig)
    vae: VaeConfig = dataclasses.field(default_factory=VaeConfig)


def make_siglip(config: MiniatureConfig) -> None:
    """Remakes the SigLIP's tokenizer from the vocabulary, then trains its base with it."""
    write_siglip_tokenizer(MINIATURE_FOLDER / BPE_FILE, SIGLIP_TOKENIZER)
    make_base(BaseConfig(config.work / "base-siglip", "miniature-siglip", steps=1200))


def make_encoders(config: MiniatureConfig) -> None:
    """Fine-tunes the text towers of both bases as Long-CLIP and as DeBias, gently."""
    for row, suffix in ROWS.items():
        for recipe in RECIPES:
            tuned = dataclasses.replace(
                PRESETS[f"miniature-{recipe}"],
                encoder=str(config.work / f"base{suffix}"),
                output=str(config.work / f"training-{recipe}{suffix}"),
                feature_cache=str(config.work / "features"),
                **GENTLE,
            )
            fine_tune(tuned, config.work / f"{recipe}{suffix}", fresh="encoders" in config.parts)
            print(f"{row}: {recipe} is trained")


def keep(model: AutoencoderKL | UNet2DConditionModel, folder: Path) -> None:
    """Saves a model in place of an earlier one, whole or not at all."""
    partial = folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    model.save_pretrained(partial)
    replace_folder(partial, folder)


def make_vae(config: MiniatureConfig) -> None:
    """Trains the autoencoder and says how well it keeps held-out pictures."""
    started = time.perf_counter()
    vae = refine_decoder(train_vae(config.vae), config.vae)
    keep(vae, config.work / "vae")
    error, minutes = reconstruction_error(vae), (time.perf_counter() - started) / 60
    print(f"vae: root mean square error {error:.1f} of 255 on held-out pictures, {minutes:.0f} minutes")


def make_unet(config: MiniatureConfig) -> None:
    """Trains the UNet on the base encoders' states."""
    started = time.perf_counter()
    slots = [slot_from_encoder(load_encoder(config.work / f"base{suffix}"), slot) for slot, suffix in SLOTS.items()]
    vae = AutoencoderKL.from_pretrained(config.work / "vae")
    prepared = prepare(vae, slots, config.unet.drawings, config.unet.seed)
    unet: UNet2DConditionModel = train_unet(config.unet, prepared)
    keep(unet, config.work / "unet")
    print(f"unet: {(time.perf_counter() - started) / 60:.0f} minutes")


def _base_l(work: Path) -> BaseConfig:
    return BaseConfig(work / "base-l", "miniature-l", steps=1600, binding_steps=500)


PARTS: dict[str, tuple[str, Callable[[MiniatureConfig], None]]] = {
    "base": ("base", lambda c: make_base(BaseConfig(c.work / "base", "miniature"))),
    "base-l": ("base-l", lambda c: make_base(_base_l(c.work))),
    "base-siglip": ("base-siglip", make_siglip),
    "encoders": ("debias", make_encoders),
    "vae": ("vae", make_vae),
    "unet": ("unet", make_unet),
}


def main(config: MiniatureConfig) -> None:
    """Makes what is asked for or missing, then the shipped folders."""
    wrong = set(config.parts) - PARTS.keys() - {"none"}
    if wrong:
        raise SystemExit(f"no part is called {', '.join(sorted(wrong))}; parts: {', '.join(PARTS)}, none")
    config.work.mkdir(parents=True, exist_ok=True)
    for part, (result, make) in PARTS.items():
        if part in config.parts or (not config.parts and not (config.work / result).exists()):
            make(config)
    assemble(config.work, config.output)
    print(f"{config.output} is made")


if __name__ == "__main__":
    main(tyro.cli(MiniatureConfig, description=__doc__))
