"""The known encoders as rows of data; a new one is one more row."""

from dataclasses import dataclass
from typing import Any, Literal

KEEP = 20
"""Position rows that stay the base model's: captions of up to 20 tokens, most of what CLIP was trained on (Long-CLIP)."""

RANDOM = "random"
"""The pretrained tag that means freshly initialised weights: for tests, dry runs and timing."""

StretchRule = Literal["ratio", "ends"]
"""How a position table grows (see `encoders.positions`): "ratio" is Long-CLIP's rule; "ends" keeps the last row too."""


@dataclass(frozen=True)
class Family:
    """What encoders of one family have in common and what changes the method.

    `causal`: a token sees only those before it, so nothing after EOT matters. `has_sot`: rows start with a start token,
    which token padding leaves in its place. `pad_id` fills rows and is what token padding moves to the front. `pooling`:
    the feature is read at the EOT token, wherever it is, or at the last position, mostly a pad. `loss`: InfoNCE, or the
    sigmoid loss with a learned bias. `stretch`: how its table of `context_length` rows becomes `stretched_length`.
    """

    name: str
    causal: bool
    has_sot: bool
    pad_id: int
    pooling: Literal["eot", "last"]
    loss: Literal["softmax", "sigmoid"]
    context_length: int
    stretched_length: int
    stretch: StretchRule
    tokenizer: str


CLIP = Family("CLIP", True, True, 0, "eot", "softmax", 77, 248, "ratio", "CLIP's byte pairs, part of open_clip")
SIGLIP = Family("SigLIP", False, False, 1, "last", "sigmoid", 64, 248, "ends", "SentencePiece of C4, 32,000 pieces")
SIGLIP2 = Family("SigLIP2", False, False, 0, "last", "sigmoid", 64, 248, "ends", "Gemma's, 256,000 pieces")
_MINIATURE_SIGLIP = Family(
    "SigLIP", False, False, 849, "last", "sigmoid", 64, 248, "ends", "the miniature's byte pairs"
)


@dataclass(frozen=True)
class EncoderSpec:
    """One row: what must be known of an encoder before any weight is read.

    `architecture` is open_clip's name; `quick_gelu` the activation its weights were trained with, which open_clip itself
    forgets when weights are named by path; `slot` the SDXL component it can fill; `config` replaces open_clip's own
    config where the architecture is ours; `tokenizer` is the hub name of a tokenizer that open_clip does not carry.
    """

    name: str
    architecture: str
    quick_gelu: bool
    tags: tuple[str, ...]
    family: Family = CLIP
    slot: str | None = None
    config: dict[str, Any] | None = None
    tokenizer: str = ""

    @property
    def context_length(self) -> int:
        """Positions before stretching."""
        return self.family.context_length


_MINIATURE = {
    "embed_dim": 128,
    "vision_cfg": {"image_size": 64, "patch_size": 8, "width": 96, "layers": 3, "head_width": 32},
    "text_cfg": {"context_length": 77, "vocab_size": 851, "width": 128, "heads": 4, "layers": 4},
}
_MINIATURE_L = {
    "embed_dim": 96,
    "vision_cfg": {"image_size": 64, "patch_size": 8, "width": 96, "layers": 3, "head_width": 32},
    "text_cfg": {"context_length": 77, "vocab_size": 851, "width": 96, "heads": 3, "layers": 4},
}
_MINIATURE_SIGLIP_CONFIG = {
    "embed_dim": 128,
    "init_logit_scale": 2.302585092994046,  # ln 10, and the bias: where SigLIP's own training starts
    "init_logit_bias": -10,
    "vision_cfg": {
        **{"image_size": 64, "patch_size": 8, "width": 96, "layers": 3, "head_width": 32, "no_ln_pre": True},
        **{"attentional_pool": True, "attn_pooler_queries": 1, "attn_pooler_heads": 4},
    },
    "text_cfg": {
        **{"context_length": 64, "vocab_size": 851, "width": 128, "heads": 4, "layers": 4, "pad_id": 849},
        **{"no_causal_mask": True, "proj_bias": True, "pool_type": "last", "norm_kwargs": {"eps": 1e-6}},
        **{"hf_tokenizer_name": "miniature-siglip", "tokenizer_kwargs": {"clean": "canonicalize"}},
    },
}

_C4 = "timm/ViT-B-16-SigLIP"  # SigLIP's towers of every size read with this one tokenizer
_GEMMA_B16, _GEMMA_SO = "timm/ViT-B-16-SigLIP2", "timm/ViT-SO400M-14-SigLIP2"

SPECS: dict[str, EncoderSpec] = {
    spec.name: spec
    for spec in (
        EncoderSpec("ViT-B-16", "ViT-B-16-quickgelu", True, ("openai",)),
        EncoderSpec("ViT-L-14", "ViT-L-14-quickgelu", True, ("openai",), slot="text_encoder"),
        EncoderSpec("ViT-L-14-336", "ViT-L-14-336-quickgelu", True, ("openai",)),
        EncoderSpec("ViT-B-32-laion", "ViT-B-32", False, ("laion2b_s34b_b79k", "datacomp_xl_s13b_b90k")),
        EncoderSpec("ViT-B-16-laion", "ViT-B-16", False, ("laion2b_s34b_b88k", "datacomp_xl_s13b_b90k")),
        EncoderSpec("ViT-L-14-laion", "ViT-L-14", False, ("laion2b_s32b_b82k", "datacomp_xl_s13b_b90k")),
        EncoderSpec("ViT-H-14", "ViT-H-14", False, ("laion2b_s32b_b79k",)),
        EncoderSpec("ViT-bigG-14", "ViT-bigG-14", False, ("laion2b_s39b_b160k",), slot="text_encoder_2"),
        EncoderSpec("SigLIP-B-16", "ViT-B-16-SigLIP", False, ("webli",), SIGLIP, tokenizer=_C4),
        EncoderSpec("SigLIP-So400m-14-384", "ViT-SO400M-14-SigLIP-384", False, ("webli",), SIGLIP, tokenizer=_C4),
        EncoderSpec("SigLIP2-B-16", "ViT-B-16-SigLIP2", False, ("webli",), SIGLIP2, tokenizer=_GEMMA_B16),
        EncoderSpec("SigLIP2-So400m-14", "ViT-SO400M-14-SigLIP2", False, ("webli",), SIGLIP2, tokenizer=_GEMMA_SO),
        EncoderSpec("miniature", "miniature", False, ("base",), config=_MINIATURE),
        EncoderSpec("miniature-l", "miniature-l", True, ("base",), config=_MINIATURE_L),
        EncoderSpec("miniature-siglip", "miniature-siglip", False, ("base",), _MINIATURE_SIGLIP, config=_MINIATURE_SIGLIP_CONFIG),
    )
}  # fmt: skip
"""Any other open_clip model may be named as well, by open_clip's name (see `encoders.rows`)."""


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
