"""Names of what this package ships for SDXL: a miniature pipeline and the text encoders that fit it."""

from pathlib import Path

from debias_diffusion.encoders.encoder import MINIATURE_FOLDER
from debias_diffusion.encoders.specs import RANDOM, find_spec

CHECKPOINT = "miniature"
"""The name of the miniature SDXL pipeline, where a checkpoint is asked for."""

SLOT_SETS = ("stretched", "long-clip", "debias")
"""Encoders for both slots of it at 248 tokens: stretched without training, and trained in two ways."""


def checkpoint_source(name: str) -> str:
    """The folder of the shipped SDXL pipeline where `name` is "miniature", and any other name as it is.

    >>> checkpoint_source("stabilityai/stable-diffusion-xl-base-1.0"), checkpoint_source("./miniature")
    ('stabilityai/stable-diffusion-xl-base-1.0', './miniature')
    """
    return str(MINIATURE_FOLDER / "sdxl") if name == CHECKPOINT else name


def slots_source(name: str) -> str:
    """The folder of the shipped encoders where `name` is "miniature:stretched", "miniature:long-clip" or
    "miniature:debias", and any other name as it is, such as the encoder "miniature:base".

    >>> slots_source("runs/slots"), slots_source("ViT-L-14:openai"), slots_source("miniature:base")
    ('runs/slots', 'ViT-L-14:openai', 'miniature:base')
    """
    row, colon, kind = name.partition(":")
    encoders = (*find_spec(CHECKPOINT).tags, RANDOM)
    if row != CHECKPOINT or not colon or kind in encoders:
        return name
    if kind in SLOT_SETS:
        return str(MINIATURE_FOLDER / "slots" / kind)
    if Path(kind).is_file():  # weights for the encoder row of that name
        return name
    raise ValueError(
        f"nothing shipped is called {name!r}; for SDXL's slots: {_listed(SLOT_SETS)}; encoders: {_listed(encoders)}"
    )


def _listed(kinds: tuple[str, ...]) -> str:
    return ", ".join(f"{CHECKPOINT}:{kind}" for kind in kinds)
