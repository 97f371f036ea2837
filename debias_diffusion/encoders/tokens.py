"""Strings to ids: tokenizers, token padding, and what did not fit."""

import hashlib
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from open_clip.tokenizer import SimpleTokenizer
from torch import Tensor

from debias_diffusion.captions.clean import clean_caption

BPE_FILE = "bpe.txt.gz"

PAD_ID = 0
"""The id that fills rows in CLIP training, and that token padding puts in front: never EOT, which would be pooled."""


@dataclass(frozen=True)
class TokenLayout:
    """How a tokenizer lays out a row: whether a start token comes first, and the id that fills what is left."""

    has_sot: bool = True
    pad_id: int = PAD_ID


CLIP_LAYOUT = TokenLayout()


@dataclass(frozen=True)
class TokenBatch:
    """Token ids of a batch of captions.

    `input_ids` (batch, length) int64: SOT where the tokenizer has one, pads in front, words, EOT, pads of `pad_id`.
    `num_prefix` (batch,): pads in front. `num_tokens` (batch,): tokens each whole caption has, SOT and EOT counted, so
    that more than `length` means it was cut.
    """

    input_ids: Tensor
    num_prefix: Tensor
    num_tokens: Tensor
    pad_id: int = PAD_ID

    @property
    def num_cut(self) -> int:
        """Captions that did not fit."""
        return int((self.num_tokens > self.input_ids.shape[1]).sum())


class Tokenizer:
    """CLIP's byte-pair tokenizer at a context length, with the vocabulary file it came from."""

    layout = CLIP_LAYOUT

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

    def encode_words(self, caption: str) -> list[int]:
        """The ids of a caption's words alone, cut nowhere."""
        return self._bpe.encode(clean_caption(caption))

    def encode(self, caption: str) -> list[int]:
        """All ids of a caption, EOT and, where the layout has one, SOT included, cut nowhere."""
        words = [*self.encode_words(caption), self.eot_id]
        return [self.sot_id, *words] if self.layout.has_sot else words

    def piece(self, token: int) -> str:
        """What one id stands for, as people read it."""
        return self._bpe.decode([token])

    def encode_within(self, caption: str) -> tuple[list[int], int]:
        """The ids that fit the context, EOT last, and how many ids the whole caption has."""
        ids = self.encode(caption)
        return fit(ids, self.context_length), len(ids)

    def __call__(self, captions: Sequence[str]) -> TokenBatch:
        """Rows as short as the longest caption allows, without pads in front."""
        rows = [self.encode(c) for c in captions]
        return collate_tokens(rows, [0] * len(rows), self.context_length, self.layout)

    @property
    def identity(self) -> str:
        """What tells this vocabulary from another: a hash of its file, or the name of open_clip's own."""
        return vocabulary_digest(self.bpe_file.read_bytes()) if self.bpe_file else "open_clip's"

    def save(self, folder: Path) -> dict[str, Any]:
        """Copies the vocabulary into `folder`; returns the `tokenizer_kwargs` by which open_clip finds it there."""
        if self.bpe_file is None:
            return {}
        shutil.copyfile(self.bpe_file, folder / BPE_FILE)
        return {"bpe_path": BPE_FILE}


def fit(ids: list[int], context_length: int) -> list[int]:
    """Cuts ids to the context and puts EOT back last.

    >>> fit([8, 1, 2, 3, 9], 4)
    [8, 1, 2, 9]
    """
    return ids if len(ids) <= context_length else [*ids[: context_length - 1], ids[-1]]


def shift_tokens(ids: list[int], num_prefix: int, layout: TokenLayout = CLIP_LAYOUT) -> list[int]:
    """Token padding: moves `num_prefix` pads to the front of the text (DeBias-CLIP; method, augmentation).

    A start token keeps its place before them.

    >>> shift_tokens([8, 1, 2, 9], 3)
    [8, 0, 0, 0, 1, 2, 9]
    >>> shift_tokens([1, 2, 9], 3, TokenLayout(has_sot=False, pad_id=7))
    [7, 7, 7, 1, 2, 9]
    """
    start = int(layout.has_sot)
    return [*ids[:start], *[layout.pad_id] * num_prefix, *ids[start:]]


def collate_tokens(
    rows: Sequence[list[int]], num_prefix: Sequence[int], context_length: int, layout: TokenLayout = CLIP_LAYOUT
) -> TokenBatch:
    """One `TokenBatch` from ids cut nowhere and the pads wanted in front of each."""
    shifted = [shift_tokens(fit(ids, context_length), n, layout) for ids, n in zip(rows, num_prefix, strict=True)]
    length = max(map(len, shifted), default=1)
    if length > context_length:
        raise ValueError(f"token padding made a row of {length} tokens, the context holds {context_length}")
    input_ids = torch.full((len(rows), length), layout.pad_id, dtype=torch.long)
    for i, ids in enumerate(shifted):
        input_ids[i, : len(ids)] = torch.tensor(ids)
    num_tokens = torch.tensor([len(ids) for ids in rows])
    return TokenBatch(input_ids, torch.tensor(num_prefix, dtype=torch.long), num_tokens, layout.pad_id)


def vocabulary_digest(content: bytes) -> str:
    """A short hash of what a vocabulary consists of."""
    return hashlib.blake2b(content, digest_size=16).hexdigest()
