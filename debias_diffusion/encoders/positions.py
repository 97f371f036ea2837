"""Position tables: stretch 77 rows to 248, fuse the two tables of Long-CLIP, keep the first rows as they are."""

import torch
from open_clip.transformer import TextTransformer
from torch import Tensor, nn
from torch.nn.utils import parametrize

from debias_diffusion.encoders.specs import KEEP, StretchRule


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


def stretch_between_ends(table: Tensor, length: int, keep: int = KEEP) -> Tensor:
    """The longer table (length, dim) whose first `keep` rows and last row are those of `table`; our choice for SigLIP.

    The rows between are spread evenly over the new ones, linearly interpolated in float32, so any length is reached.
    Where the last position is the one that is pooled, it keeps the row it has learned; `stretch_positions` would give it
    a row beyond the table.
    """
    if not keep + 2 <= len(table) <= length:
        raise ValueError(
            f"a table of {len(table)} rows with the first {keep} and the last kept cannot become one of {length}; "
            f"expected {keep + 2} rows or more, and a length of {max(len(table), keep + 2)} or more"
        )
    later = table[keep:].float()
    place = torch.linspace(0, len(later) - 1, length - keep, dtype=torch.float64, device=table.device)
    before = place.floor().long().clamp_max(len(later) - 2)
    rows = torch.lerp(later[before], later[before + 1], (place - before).float()[:, None])
    rows[-1] = later[-1]
    return torch.cat([table[:keep], rows.to(table.dtype)])


def natural_rule(text: TextTransformer) -> StretchRule:
    """The rule that suits a tower: "ends" where the last position is pooled, Long-CLIP's "ratio" elsewhere."""
    return "ends" if getattr(text, "pool_type", None) == "last" else "ratio"


def fuse_tables(base: Tensor, trained: Tensor, keep: int = KEEP) -> Tensor:
    """One table (length, dim) from Long-CLIP's two: rows of `base` before `keep`, rows of `trained` from there on."""
    if base.shape != trained.shape:
        raise ValueError(f"the two position tables differ in shape: {tuple(base.shape)} and {tuple(trained.shape)}")
    return torch.cat([base[:keep], trained[keep:]])


def stretch_text_tower(
    text: TextTransformer, context_length: int, keep: int = KEEP, rule: StretchRule | None = None
) -> None:
    """Gives an open_clip text tower `context_length` positions, in place: its table, its length and its causal mask.

    `rule` None means the one that suits the tower (see `natural_rule`).
    """
    table = text.positional_embedding.detach()
    if len(table) == context_length:
        return
    if (rule or natural_rule(text)) == "ends":
        stretched = stretch_between_ends(table, context_length, keep)
    else:
        stretched = stretch_positions(table, stretch_ratio(len(table), context_length, keep), keep)
    text.positional_embedding = nn.Parameter(stretched)
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
