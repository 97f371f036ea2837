"""SDXL's two text-encoder slots: what each must be, and how a CLIP text tower becomes one."""

from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import torch
from open_clip.tokenizer import SimpleTokenizer
from open_clip.transformer import QuickGELU, TextTransformer
from torch import nn
from transformers import CLIPTextConfig, CLIPTextModel, CLIPTextModelWithProjection, CLIPTokenizer, PreTrainedModel

from debias_diffusion.encoders.convert import StateDict, text_to_transformers
from debias_diffusion.encoders.encoder import Encoder
from debias_diffusion.encoders.text_forward import why_not_packed
from debias_diffusion.encoders.tokens import Tokenizer

BOS, EOS = "<|startoftext|>", "<|endoftext|>"
DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}
RECORD = "debias_diffusion"
"""The key of our record in a slot's config.json; transformers keeps it through load and save."""

_MINIATURE_WIDTH = 512
"""Towers narrower than this belong to miniature pipelines, which set their own widths."""


@dataclass(frozen=True)
class SlotSpec:
    """One row: the SDXL component `name`, its tokenizer's component, and what it must be to work there.

    SDXL reads `hidden_states[-2]` of both and the projected pooled vector of the second alone; a model with projection
    in the first slot would be taken for the pooled one, so the class belongs to the slot. `pad_token` fills the row
    after EOS: not what CLIP was trained with in the first slot, but what the UNet was. `width` is full-size SDXL's.
    """

    name: str
    tokenizer: str
    model_class: type[PreTrainedModel]
    projects: bool
    pad_token: str
    width: int
    tower: str


SLOTS: dict[str, SlotSpec] = {
    spec.name: spec
    for spec in (
        SlotSpec("text_encoder", "tokenizer", CLIPTextModel, False, EOS, 768, "ViT-L/14"),
        SlotSpec("text_encoder_2", "tokenizer_2", CLIPTextModelWithProjection, True, "!", 1280, "ViT-bigG/14"),
    )
}


def find_slot(name: str) -> SlotSpec:
    """The row called `name`; a wrong name lists the right ones."""
    if name not in SLOTS:
        raise ValueError(f"SDXL has no slot {name!r}; slots: {', '.join(SLOTS)}")
    return SLOTS[name]


def find_dtype(name: str) -> torch.dtype:
    """The torch dtype called `name`; a wrong name lists the right ones."""
    if name not in DTYPES:
        raise ValueError(f"no dtype is called {name!r} here; dtypes: {', '.join(DTYPES)}")
    return DTYPES[name]


def slot_of_width(width: int) -> str:
    """The slot a full-size text tower of this width fills; a width that tells no slot is an error."""
    for spec in SLOTS.values():
        if spec.width == width:
            return spec.name
    raise ValueError(f"a text tower {width} wide does not tell its slot; say which: {', '.join(SLOTS)}")


@dataclass(frozen=True)
class Slot:
    """A transformers text encoder and its tokenizer, as a pipeline takes them for the slot `name`."""

    name: str
    model: PreTrainedModel
    tokenizer: CLIPTokenizer

    @property
    def context_length(self) -> int:
        return int(self.model.config.max_position_embeddings)


def slot_from_encoder(encoder: Encoder, slot: str, dtype: str = "fp32") -> Slot:
    """The slot made of an encoder's text tower, in memory; refuses a tower that belongs to the other slot."""
    refuse_encoder(encoder, slot)
    return build_slot(text_tower(encoder), encoder.tokenizer, slot, dtype)


def build_slot(text: TextTransformer, tokenizer: Tokenizer, slot: str, dtype: str = "fp32") -> Slot:
    """The slot made of an open_clip text tower and its tokenizer, on the CPU."""
    spec = find_slot(slot)
    model = spec.model_class.from_pretrained(
        None,
        config=slot_config(text, tokenizer, slot),
        state_dict=cast_state(tower_state(text), dtype, projection=spec.projects),
        dtype=find_dtype(dtype),
    )
    return Slot(slot, model, slot_tokenizer(tokenizer, slot))


def refuse_encoder(encoder: Encoder, slot: str) -> None:
    """Raises ValueError where an encoder's tower cannot work in the slot, or its own settings contradict each other."""
    text, spec = text_tower(encoder), find_slot(slot)
    reason = why_not_packed(text)
    if reason:
        raise ValueError(f"{encoder.name} cannot fill {slot}, which takes a CLIP text tower: {reason}")
    width = text.token_embedding.embedding_dim
    if width >= _MINIATURE_WIDTH and width != spec.width:
        raise ValueError(
            f"{encoder.name} has a text tower {width} wide; {slot} takes {spec.tower}, {spec.width} wide. "
            f"Widths: {', '.join(f'{s.name} {s.width}' for s in SLOTS.values())}"
        )
    recorded = "quick_gelu" if encoder.model_config.get("quick_gelu", False) else "gelu"
    if hidden_act(text) != recorded:
        raise ValueError(f"{encoder.name} says its activation is {recorded}, its text tower has {hidden_act(text)}")


def text_tower(encoder: Encoder) -> TextTransformer:
    """The encoder's text tower, open_clip's own class."""
    return encoder.model.text


def hidden_act(text: TextTransformer) -> str:
    """transformers' name of the tower's activation: "quick_gelu" or "gelu"."""
    activation = text.transformer.resblocks[0].mlp.gelu
    if type(activation) is QuickGELU:
        return "quick_gelu"
    if type(activation) is nn.GELU and activation.approximate == "none":
        return "gelu"
    raise ValueError(f"the text tower's activation is {activation!r}; SDXL's slots take QuickGELU or GELU")


def slot_config(text: TextTransformer, tokenizer: Tokenizer, slot: str) -> CLIPTextConfig:
    """The transformers config of a tower in a slot, read off its modules.

    The pooled position is that of EOS by its id: the older rule, the largest id of the row, goes wrong once textual
    inversion adds larger ones.
    """
    spec = find_slot(slot)
    reason = why_not_packed(text)
    if reason:
        raise ValueError(f"this text tower cannot be a CLIP text model: {reason}")
    rows = len(text.positional_embedding)
    if not rows == text.context_length == tokenizer.context_length:
        raise ValueError(
            f"the tower's position table has {rows} rows, its context length is {text.context_length}, its tokenizer's "
            f"{tokenizer.context_length}; they must agree: stretch the encoder with Encoder.stretched"
        )
    if spec.projects and text.text_projection is None:
        raise ValueError(f"this text tower has no projection, and {slot} needs one for the pooled vector")
    block = text.transformer.resblocks[0]
    vocab, _ = vocabulary(tokenizer.bpe_file)
    return CLIPTextConfig(
        architectures=[spec.model_class.__name__],
        vocab_size=text.token_embedding.num_embeddings,
        hidden_size=text.token_embedding.embedding_dim,
        intermediate_size=block.mlp.c_fc.out_features,
        projection_dim=text.output_dim,
        num_hidden_layers=len(text.transformer.resblocks),
        num_attention_heads=block.attn.num_heads,
        max_position_embeddings=rows,
        hidden_act=hidden_act(text),
        layer_norm_eps=text.ln_final.eps,
        bos_token_id=tokenizer.sot_id,
        eos_token_id=tokenizer.eot_id,
        pad_token_id=vocab[spec.pad_token],
    )


def tower_state(text: TextTransformer) -> StateDict:
    """The tower's weights under transformers' keys with `text_model.`, as they are, on the CPU.

    transformers below 5.6 and ComfyUI need the prefix, which newer ones leave out for a model built in memory.
    """
    return text_to_transformers({k: v.detach().cpu() for k, v in text.state_dict().items()})


def cast_state(state: StateDict, dtype: str, *, projection: bool) -> StateDict:
    """The weights in `dtype`, with or without `text_projection.weight`; what overflows in it is an error."""
    chosen = {k: v.to(find_dtype(dtype)) for k, v in state.items() if projection or k != "text_projection.weight"}
    broken = sorted(key for key, value in chosen.items() if not value.isfinite().all())
    if broken:
        raise ValueError(
            f"weights are not finite in {dtype}: {', '.join(broken[:5])}; try bf16 or fp32, or another checkpoint"
        )
    return chosen


def slot_tokenizer(tokenizer: Tokenizer, slot: str) -> CLIPTokenizer:
    """transformers' tokenizer of the same vocabulary and length, with the slot's pad token."""
    vocab, merges = vocabulary(tokenizer.bpe_file)
    return CLIPTokenizer(
        vocab=dict(vocab),
        merges=list(merges),  # type: ignore[arg-type]
        pad_token=find_slot(slot).pad_token,
        model_max_length=tokenizer.context_length,
    )


@lru_cache(maxsize=4)
def vocabulary(bpe_file: Path | None) -> tuple[dict[str, int], tuple[tuple[str, str], ...]]:
    """Token -> id and the merges in order, of CLIP's byte-pair file or another, with transformers' special tokens."""
    bpe = SimpleTokenizer(str(bpe_file)) if bpe_file else SimpleTokenizer()
    vocab = dict(bpe.encoder)
    vocab[BOS], vocab[EOS] = vocab.pop("<start_of_text>"), vocab.pop("<end_of_text>")
    return vocab, tuple(bpe.bpe_ranks)
