"""The known encoders as rows of data; a new one is one more row."""

from dataclasses import dataclass
from typing import Any

KEEP = 20
"""Position rows that stay the base model's: captions of up to 20 tokens, most of what CLIP was trained on (Long-CLIP)."""

RANDOM = "random"
"""The pretrained tag that means freshly initialised weights: for tests, dry runs and timing."""


@dataclass(frozen=True)
class EncoderSpec:
    """One row: what must be known of an encoder before any weight is read.

    `architecture` is open_clip's name; `quick_gelu` the activation its weights were trained with, which open_clip itself
    forgets when weights are named by path; `slot` the SDXL component it can fill; `config` replaces open_clip's own
    config where the architecture is ours.
    """

    name: str
    architecture: str
    quick_gelu: bool
    tags: tuple[str, ...]
    context_length: int = 77
    slot: str | None = None
    config: dict[str, Any] | None = None


_MINIATURE = {
    "embed_dim": 128,
    "vision_cfg": {"image_size": 64, "patch_size": 8, "width": 96, "layers": 3, "head_width": 32},
    "text_cfg": {"context_length": 77, "vocab_size": 851, "width": 128, "heads": 4, "layers": 4},
}

SPECS: dict[str, EncoderSpec] = {
    spec.name: spec
    for spec in (
        EncoderSpec("ViT-B-16", "ViT-B-16-quickgelu", True, ("openai",)),
        EncoderSpec("ViT-L-14", "ViT-L-14-quickgelu", True, ("openai",), slot="text_encoder"),
        EncoderSpec("ViT-bigG-14", "ViT-bigG-14", False, ("laion2b_s39b_b160k",), slot="text_encoder_2"),
        EncoderSpec("miniature", "miniature", False, ("base",), config=_MINIATURE),
    )
}


def find_spec(name: str) -> EncoderSpec:
    """The row called `name`; a wrong name lists the right ones."""
    if name not in SPECS:
        raise ValueError(f"no encoder row is called {name!r}; rows: {', '.join(SPECS)}")
    return SPECS[name]


def split_source(source: str) -> tuple[str, str] | None:
    """("ROW", "PRETRAINED") of a source such as "ViT-L-14:openai", or None where it names no row.

    >>> split_source("ViT-L-14:openai")
    ('ViT-L-14', 'openai')
    >>> split_source("runs/demo/debias") is None
    True
    """
    row, colon, pretrained = source.partition(":")
    return (row, pretrained) if colon and row in SPECS else None
