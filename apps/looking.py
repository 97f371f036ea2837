"""Where a set of encoders looks in a prompt, and how much of each sentence is in its summary of the whole."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from apps.sentences import Sentence
from debias_diffusion.evaluation.pooled_attention import pooled_attention

SLOT, TOKENIZER = "text_encoder_2", "tokenizer_2"
"""The encoder whose pooled vector SDXL reads; the other one's never reaches the picture."""


@dataclass(frozen=True)
class Look:
    """What SDXL's second encoder makes of a prompt, of which it reads the first `num_tokens` tokens in one piece.

    `attention` is the share of the pooled (EOT) token's attention that each text token gets, mean over layers and heads,
    1 in all. `similarity` is, for each sentence, the cosine of the prompt's pooled vector with the sentence's own.
    `starts` are the text tokens, from 0, at which sentences start, as far as they are read.
    """

    attention: list[float]
    similarity: list[float]
    starts: list[int]

    @property
    def num_tokens(self) -> int:
        return len(self.attention)


@torch.inference_mode()
def look(pipe: Any, prompt: str, sentences: Sequence[Sentence], max_length: int | str = "auto") -> Look:
    """How `pipe` reads a cleaned `prompt`; runs its second text encoder, so whoever calls holds the device.

    `max_length` cuts earlier than the encoder does. Of a prompt drawn in several chunks, this is the first.
    """
    encoder, tokenizer = getattr(pipe, SLOT), getattr(pipe, TOKENIZER)
    context = int(encoder.config.max_position_embeddings)
    room = (context if max_length == "auto" else min(context, int(max_length))) - 2
    whole = tokenizer(prompt, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    ids = whole.input_ids[:room]
    if not ids:
        return Look([], [0.0] * len(sentences), [])
    row = _row(tokenizer, ids)
    mean = pooled_attention(encoder, row).mean((0, 1))[0, 1 : len(ids) + 1].double().cpu()
    starts = [sum(end <= sentence.start for _, end in whole.offset_mapping) for sentence in sentences]
    own = [tokenizer(s.text, add_special_tokens=False, verbose=False).input_ids[:room] for s in sentences]
    pooled = _pooled(encoder, row)
    similarity = [float(F.cosine_similarity(pooled, _pooled(encoder, _row(tokenizer, each)))) for each in own]
    return Look((mean / mean.sum()).tolist(), similarity, [start for start in starts if start < len(ids)])


def _row(tokenizer: Any, ids: Sequence[int]) -> Tensor:
    return torch.tensor([[tokenizer.bos_token_id, *ids, tokenizer.eos_token_id]])


def _pooled(encoder: Any, row: Tensor) -> Tensor:
    pooled: Tensor = encoder(row.to(encoder.device)).text_embeds.float()
    return pooled
