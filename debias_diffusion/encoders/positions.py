"""Position tables: stretch 77 rows to 248, fuse the two tables of Long-CLIP, keep the first rows as they are."""

import torch
from open_clip.transformer import TextTransformer
from torch import Tensor, nn
from torch.nn.utils import parametrize

from debias_diffusion.encoders.specs import KEEP


def stretched_length(length: int, ratio: int, keep: int = KEEP) -> int:
    """Rows of the stretched table.

    >>> stretched_length(77, 4)
    248
    """
    return keep + (length - keep) * ratio


def stretch_ratio(length: int, target: int, keep: int = KEEP) -> int:
    """The whole-number ratio that takes `length` rows to `target`; a length it cannot reach lists those it can."""
    ratio, rest = divmod(target - keep, length - keep)
    if rest or ratio < 1:
        reachable = ", ".join(str(stretched_length(length, r, keep)) for r in range(1, 7))
        raise ValueError(
            f"a table of {length} rows with the first {keep} kept cannot be stretched to {target}; "
            f"lengths it reaches: {reachable}, ..."
        )
    return ratio


def stretch_positions(table: Tensor, ratio: int = 4, keep: int = KEEP) -> Tensor:
    """The longer table (length', dim) of knowledge-preserved stretching (Long-CLIP; DeBias-CLIP, method).

    The first `keep` rows of `table` (length, dim) stay; between each later row and the next, `ratio` rows are linearly
    interpolated; the last `ratio` rows go on in the direction of the last step. Done in float32 whatever the dtype.
    """
    later = table[keep:].float()
    if len(later) < 2:
        raise ValueError(
            f"the position table has {len(table)} rows; stretching with {keep} kept needs {keep + 2} or more"
        )
    step = torch.cat([later[1:] - later[:-1], later[-1:] - later[-2:-1]])  # (length - keep, dim)
    share = torch.arange(ratio, device=table.device)[:, None] / ratio
    rows = later[:, None] + share * step[:, None]  # (length - keep, ratio, dim)
    return torch.cat([table[:keep], rows.flatten(0, 1).to(table.dtype)])


def fuse_tables(base: Tensor, trained: Tensor, keep: int = KEEP) -> Tensor:
    """One table (length, dim) from Long-CLIP's two: rows of `base` before `keep`, rows of `trained` from there on."""
    if base.shape != trained.shape:
        raise ValueError(f"the two position tables differ in shape: {tuple(base.shape)} and {tuple(trained.shape)}")
    return torch.cat([base[:keep], trained[keep:]])


def stretch_text_tower(text: TextTransformer, context_length: int, keep: int = KEEP) -> None:
    """Gives an open_clip text tower `context_length` positions, in place: its table, its length and its causal mask."""
    table = text.positional_embedding
    if len(table) == context_length:
        return
    ratio = stretch_ratio(len(table), context_length, keep)
    text.positional_embedding = nn.Parameter(stretch_positions(table.detach(), ratio, keep))
    set_context_length(text, context_length)


def set_context_length(text: TextTransformer, context_length: int) -> None:
    """Makes the numbers that go with the position table agree with it: open_clip keeps three of them."""
    text.context_length = text.num_pos = context_length
    if text.attn_mask is not None:
        text.register_buffer(
            "attn_mask", text.build_causal_mask().to(text.positional_embedding.device), persistent=False
        )


class _FirstRowsFrozen(nn.Module):
    first: Tensor

    def __init__(self, first: Tensor) -> None:
        super().__init__()
        self.register_buffer("first", first.detach().clone())

    def forward(self, later: Tensor) -> Tensor:
        return torch.cat([self.first, later])

    def right_inverse(self, table: Tensor) -> Tensor:
        return table[len(self.first) :].clone()


def freeze_first_positions(text: TextTransformer, keep: int = KEEP) -> None:
    """Leaves only the rows from `keep` on to train, in place.

    The frozen rows become a buffer, so that neither gradients, momentum nor weight decay can reach them.
    """
    frozen = _FirstRowsFrozen(text.positional_embedding[:keep])
    parametrize.register_parametrization(text, "positional_embedding", frozen)


def thaw_positions(text: TextTransformer) -> None:
    """Turns the table back into one plain parameter with the values it has now; no trace of the freeze remains."""
    if parametrize.is_parametrized(text, "positional_embedding"):
        parametrize.remove_parametrizations(text, "positional_embedding", leave_parametrized=True)
