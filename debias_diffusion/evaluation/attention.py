"""Where a text tower looks: the attention its pooled token pays to each position and each sentence of a caption."""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from tqdm import tqdm

from debias_diffusion.data.text_files import counted
from debias_diffusion.encoders.encoder import Encoder
from debias_diffusion.encoders.tokens import Tokenizer, collate_tokens, fit
from debias_diffusion.evaluation.pooled_attention import attention_blocks, pooled_attention
from debias_diffusion.evaluation.sentence_tokens import sentence_starts

_BATCH = 16  # captions of similar length whose attention is held at once, one layer's full map at most


@dataclass(frozen=True, eq=False)
class AttentionProfile:
    """Mean attention of the pooled (EOT) token to the text of captions, by token position and by sentence.

    Per caption and layer: the EOT row, mean over heads, kept at the text positions 1 ... L-2 of its L tokens, and
    renormalised there, so that SOT and EOT take no part and the shares of a caption sum to one. `by_layer`
    (layers, positions) is the mean over the `counts` (positions,) captions long enough to reach the position; column p
    is token position p + 1. `by_sentence` (layers, sentences) is the mean share of each caption's first, second, ...
    sentence over the `sentence_counts` (sentences,) captions that have it within the context, and `sentence_tokens`
    (sentences,) the mean share of the text tokens it has in the same captions. `on_text` (layers,) is the share of the
    attention that was on text before renormalising. `num_captions` were read, `num_empty` more had no text, `num_cut`
    of those read did not fit the context. All tensors are float64 on the CPU, counts int64.

    The paper shows this curve without its formula; this definition is ours (attention by depth).
    """

    by_layer: Tensor
    counts: Tensor
    by_sentence: Tensor
    sentence_tokens: Tensor
    sentence_counts: Tensor
    on_text: Tensor
    num_captions: int
    num_empty: int
    num_cut: int

    @property
    def positions(self) -> Tensor:
        """(positions,) The token position of each column, SOT being 0."""
        return torch.arange(1, len(self.counts) + 1)

    @property
    def average(self) -> Tensor:
        """(positions,) Mean over layers."""
        return self.by_layer.mean(0)

    @property
    def last_layer(self) -> Tensor:
        """(positions,) The layer whose output is pooled."""
        return self.by_layer[-1]

    @property
    def first_sentence_share(self) -> float:
        """Share (0-1) of the attention on text that the first sentence gets, mean over layers and captions."""
        return float(self.by_sentence[:, 0].mean())

    @property
    def first_sentence_tokens(self) -> float:
        """Share (0-1) of the text tokens that the first sentence has, mean over captions."""
        return float(self.sentence_tokens[0])

    @property
    def first_sentence_ratio(self) -> float:
        """How many times its share of tokens the first sentence gets of the attention; 1 is a tower without bias."""
        return self.first_sentence_share / self.first_sentence_tokens


def attention_profile(
    encoder: Encoder,
    captions: Sequence[str],
    *,
    max_captions: int | None = None,
    splitter: str = "nupunkt",
    progress: bool = False,
) -> AttentionProfile:
    """Where in `captions` the encoder's text tower looks (see `AttentionProfile` for the definition).

    The first `max_captions` are read, all by default. Raises ValueError where no caption has text, for an unknown
    splitter, and for a text tower that is not causal or does not pool at EOT.
    """
    tower, tokenizer = encoder.model.text, encoder.tokenizer
    return tower_attention_profile(
        tower, tokenizer, captions, max_captions=max_captions, splitter=splitter, progress=progress
    )


def tower_attention_profile(
    tower: nn.Module,
    tokenizer: Tokenizer,
    captions: Sequence[str],
    *,
    max_captions: int | None = None,
    splitter: str = "nupunkt",
    progress: bool = False,
) -> AttentionProfile:
    """`attention_profile` of a tower that comes without an encoder, such as an exported SDXL slot."""
    if max_captions is not None and max_captions < 1:
        raise ValueError(f"max_captions is {max_captions}, expected at least 1, or None for all")
    read = captions[:max_captions]
    hidden = None if progress else True  # None draws on a terminal only
    bar = tqdm(read, desc="sentences", unit="caption", disable=hidden, leave=False)
    rows = sorted((_read(tokenizer, caption, splitter) for caption in bar), key=lambda row: len(row.ids))
    rows = [row for row in rows if row.num_text > 0]
    if not rows:
        raise ValueError(f"{counted(len(read), 'captions')}, none with any text to look at; pass captions with words")
    sums = _Sums(
        len(attention_blocks(tower)), max(row.num_text for row in rows), max(row.owner[-1] for row in rows) + 1
    )
    bar = tqdm(total=len(rows), desc="attention", unit="caption", disable=hidden, leave=False)
    for first in range(0, len(rows), _BATCH):
        batch = rows[first : first + _BATCH]
        input_ids = collate_tokens([row.ids for row in batch], [0] * len(batch), tokenizer.context_length).input_ids
        attention = pooled_attention(tower, input_ids).mean(1).double().cpu()  # (layers, batch, positions)
        for index, row in enumerate(batch):
            sums.add(attention[:, index, 1 : row.num_text + 1], row)
        bar.update(len(batch))
    bar.close()
    return sums.profile(num_empty=len(read) - len(rows), num_cut=sum(row.is_cut for row in rows))


@dataclass(frozen=True)
class _Row:
    ids: list[int]  # as many as fit, SOT and EOT included
    owner: list[int]  # number of the sentence of each text token, from 0
    is_cut: bool

    @property
    def num_text(self) -> int:
        return len(self.owner)


def _read(tokenizer: Tokenizer, caption: str, splitter: str) -> _Row:
    whole = tokenizer.encode(caption)
    ids = fit(whole, tokenizer.context_length)
    starts = sentence_starts(tokenizer, caption, splitter)
    owner = [bisect_right(starts, position) - 1 for position in range(1, len(ids) - 1)]
    return _Row(ids, owner, len(whole) > len(ids))


class _Sums:
    """Running sums over captions."""

    def __init__(self, num_layers: int, num_positions: int, num_sentences: int) -> None:
        self.by_layer = torch.zeros(num_layers, num_positions, dtype=torch.float64)
        self.counts = torch.zeros(num_positions, dtype=torch.int64)
        self.by_sentence = torch.zeros(num_layers, num_sentences, dtype=torch.float64)
        self.sentence_tokens = torch.zeros(num_sentences, dtype=torch.float64)
        self.sentence_counts = torch.zeros(num_sentences, dtype=torch.int64)
        self.on_text = torch.zeros(num_layers, dtype=torch.float64)
        self.num_captions = 0

    def add(self, text: Tensor, row: _Row) -> None:
        """Adds one caption's `text` (layers, text positions), the attention on its text positions."""
        mass = text.sum(1)
        if not bool((mass > 0).all()):  # also where it is NaN
            raise ValueError(
                f"the text of a caption of {len(row.ids)} tokens gets {mass.min():g} of the attention in some layer, "
                "expected more than 0; are the weights finite?"
            )
        shares = text / mass[:, None]
        owner = torch.tensor(row.owner)
        tokens = torch.bincount(owner, minlength=len(self.sentence_tokens))
        self.by_layer[:, : row.num_text] += shares
        self.counts[: row.num_text] += 1
        self.by_sentence.index_add_(1, owner, shares)
        self.sentence_tokens += tokens / row.num_text
        self.sentence_counts += tokens > 0
        self.on_text += mass
        self.num_captions += 1

    def profile(self, num_empty: int, num_cut: int) -> AttentionProfile:
        """The means over the captions that count for each."""
        return AttentionProfile(
            by_layer=self.by_layer / self.counts,
            counts=self.counts,
            by_sentence=self.by_sentence / self.sentence_counts,
            sentence_tokens=self.sentence_tokens / self.sentence_counts,
            sentence_counts=self.sentence_counts,
            on_text=self.on_text / self.num_captions,
            num_captions=self.num_captions,
            num_empty=num_empty,
            num_cut=num_cut,
        )
