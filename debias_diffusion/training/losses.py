"""The two-branch contrastive loss, as functions of features: testable without models or processes."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function
from torch.utils.checkpoint import checkpoint


class _PrincipalPart(Function):
    """Projects centred rows X (n, dim) onto their top principal directions: Q X, with Q the top eigenvectors' projector
    of X X'. The gradient of Q holds pairs of one kept and one dropped direction only, so that equal or vanishing
    singular values among the kept, or among the dropped, cannot blow it up, as they do when an SVD is differentiated."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int) -> Tensor:
        values, vectors = torch.linalg.eigh((x @ x.T).double())  # ascending
        projector = (vectors[:, -dim:] @ vectors[:, -dim:].T).to(x.dtype)
        ctx.save_for_backward(x, values, vectors, projector)
        ctx.dim = dim
        return projector @ x

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        x, values, vectors, projector = ctx.saved_tensors
        (grad,) = grads
        dropped, kept = vectors[:, : -ctx.dim], vectors[:, -ctx.dim :]
        outer = (grad @ x.T).double()
        gaps = values[-ctx.dim :, None] - values[None, : -ctx.dim]  # (kept, dropped), not negative
        tiny = torch.finfo(torch.float64).eps * values[-1].clamp_min(torch.finfo(torch.float64).tiny)
        pull = kept.T @ (outer + outer.T) @ dropped / gaps.clamp_min(tiny)
        through_projector = kept @ torch.where(gaps > tiny, pull, 0.0) @ dropped.T
        return projector @ grad + (through_projector + through_projector.T).to(x.dtype) @ x, None


def principal_part(features: Tensor, dim: int, *, renormalise: bool = False) -> Tensor:
    """Features (batch, width) rebuilt from the batch's top `dim` principal components (Long-CLIP's coarse image feature).

    Mean over the batch, centre, project, add the mean; in float32. A batch of `dim` + 1 rows or fewer comes back
    unchanged, since centred rows have no more directions than that. Gradients flow through the components.
    """
    features = features.float()
    mean = features.mean(0, keepdim=True)
    if len(features) <= dim + 1 or dim >= features.shape[1] or not torch.isfinite(features).all():
        rebuilt = features  # what is not finite has no components; the loss will say so
    else:
        rebuilt = mean + _PrincipalPart.apply(features - mean, dim)
    return F.normalize(rebuilt, dim=-1) if renormalise else rebuilt


def grouped_principal_part(features: Tensor, dim: int, group: int, *, renormalise: bool = False) -> Tensor:
    """`principal_part` within consecutive groups of about `group` rows; 0 means one group; `dim` 0 changes nothing."""
    if not dim:
        return features
    count = max(1, round(len(features) / group)) if group else 1
    parts = [principal_part(part, dim, renormalise=renormalise) for part in features.tensor_split(count)]
    return torch.cat(parts)


def contrastive_loss(
    image_features: Tensor,
    text_features: Tensor,
    all_image_features: Tensor,
    all_text_features: Tensor,
    logit_scale: Tensor,
    *,
    first: int = 0,
    label_smoothing: float = 0.0,
    block: int = 0,
) -> Tensor:
    """Symmetric InfoNCE of this process's rows against the columns of all processes, the mean over its rows.

    Features (rows, dim) and (columns, dim) are compared as they are; row i's pair is column `first` + i. `logit_scale`
    is already exponentiated. With `block`, only so many rows of the score matrix exist at once, in the backward pass too,
    where they are computed again.
    """
    halves = [
        sum_by_rows(_scores_loss, rows, columns, logit_scale, label_smoothing, first=first, block=block) / len(rows)
        for rows, columns in ((image_features, all_text_features), (text_features, all_image_features))
    ]
    return (halves[0] + halves[1]) / 2


def sum_by_rows(
    loss: Callable[..., Tensor], rows: Tensor, *others: Tensor | float, first: int = 0, block: int = 0
) -> Tensor:
    """`loss(some rows, their targets, *others)` summed over all rows (rows, dim); row i's target is `first` + i.

    With `block`, only so many rows are scored at once, and scored again in the backward pass; 0 takes all together.
    """
    target = torch.arange(first, first + len(rows), device=rows.device)
    size = block or max(1, len(rows))
    parts = [
        loss(part, own, *others)
        if len(part) == len(rows)
        else checkpoint(loss, part, own, *others, use_reentrant=False)
        for part, own in zip(rows.split(size), target.split(size), strict=True)
    ]
    return torch.stack(parts).sum()


def _scores_loss(rows: Tensor, target: Tensor, columns: Tensor, logit_scale: Tensor, label_smoothing: float) -> Tensor:
    scores = logit_scale * rows @ columns.T  # (rows, columns)
    return F.cross_entropy(scores, target, label_smoothing=label_smoothing, reduction="sum")


def mix_branches(full: Tensor, short: Tensor, short_weight: float) -> Tensor:
    """The convex mix of both branches' losses (paper: weight 0.1 on the short branch)."""
    return short_weight * short + (1 - short_weight) * full
