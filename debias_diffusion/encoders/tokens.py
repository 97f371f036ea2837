"""Strings to ids: tokenizers, token padding, and what did not fit."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from open_clip.tokenizer import SimpleTokenizer
from torch import Tensor

from debias_diffusion.captions.clean import clean_caption

PAD_ID = 0
"""The id that fills rows in CLIP training, and that token padding puts in front: never EOT, which would be pooled."""


@dataclass(frozen=True)
class TokenBatch:
    """Token ids of a batch of captions.

    `input_ids` (batch, length) int64: SOT, pads in front, words, EOT, pads. `num_prefix` (batch,): pads in front.
    `num_tokens` (batch,): tokens each whole caption has, SOT and EOT counted, so that more than `length` means it was cut.
    """

    input_ids: Tensor
    num_prefix: Tensor
    num_tokens: Tensor

    @property
    def num_cut(self) -> int:
        """Captions that did not fit."""
        return int((self.num_tokens > self.input_ids.shape[1]).sum())


class Tokenizer:
    """CLIP's byte-pair tokenizer at a context length, with the vocabulary file it came from."""

    def __init__(self, context_length: int, bpe_file: Path | None = None) -> None:
        self.context_length = context_length
        self.bpe_file = bpe_file
        try:
            self._bpe = SimpleTokenizer(str(bpe_file)) if bpe_file else SimpleTokenizer()
        except (OSError, EOFError, UnicodeDecodeError) as error:
            raise ValueError(f"the vocabulary file {bpe_file} cannot be read: {error}") from error
        self.sot_id: int = self._bpe.sot_token_id
        self.eot_id: int = self._bpe.eot_token_id
        self.vocab_size: int = self._bpe.vocab_size

    def with_context(self, context_length: int) -> "Tokenizer":
        """The same vocabulary at another context length."""
        return Tokenizer(context_length, self.bpe_file)

    def encode(self, caption: str) -> list[int]:
        """All ids of a caption, SOT and EOT included, cut nowhere."""
        return [self.sot_id, *self._bpe.encode(clean_caption(caption)), self.eot_id]

    def encode_within(self, caption: str) -> tuple[list[int], int]:
        """The ids that fit the context, EOT last, and how many ids the whole caption has."""
        ids = self.encode(caption)
        return fit(ids, self.context_length), len(ids)

    def __call__(self, captions: Sequence[str]) -> TokenBatch:
        """Rows as short as the longest caption allows, without pads in front."""
        return collate_tokens([self.encode(c) for c in captions], [0] * len(captions), self.context_length)


def fit(ids: list[int], context_length: int) -> list[int]:
    """Cuts ids to the context and puts EOT back last.

    >>> fit([8, 1, 2, 3, 9], 4)
    [8, 1, 2, 9]
    """
    return ids if len(ids) <= context_length else [*ids[: context_length - 1], ids[-1]]


def shift_tokens(ids: list[int], num_prefix: int) -> list[int]:
    """Token padding: moves `num_prefix` pads to just after SOT (DeBias-CLIP; method, augmentation).

    >>> shift_tokens([8, 1, 2, 9], 3)
    [8, 0, 0, 0, 1, 2, 9]
    """
    return [ids[0], *[PAD_ID] * num_prefix, *ids[1:]]


def collate_tokens(rows: Sequence[list[int]], num_prefix: Sequence[int], context_length: int) -> TokenBatch:
    """One `TokenBatch` from ids cut nowhere and the pads wanted in front of each."""
    shifted = [shift_tokens(fit(ids, context_length), n) for ids, n in zip(rows, num_prefix, strict=True)]
    length = max(map(len, shifted), default=1)
    if length > context_length:
        raise ValueError(f"token padding made a row of {length} tokens, the context holds {context_length}")
    input_ids = torch.full((len(rows), length), PAD_ID, dtype=torch.long)
    for i, ids in enumerate(shifted):
        input_ids[i, : len(ids)] = torch.tensor(ids)
    return TokenBatch(input_ids, torch.tensor(num_prefix, dtype=torch.long), torch.tensor([len(ids) for ids in rows]))
