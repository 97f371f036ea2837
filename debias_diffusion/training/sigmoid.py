"""The sigmoid loss of SigLIP, as a function of features: every picture-caption pair is a yes-or-no question of its own."""

import torch
import torch.nn.functional as F
from torch import Tensor

from debias_diffusion.training.losses import sum_by_rows


def sigmoid_loss(
    image_features: Tensor,
    all_text_features: Tensor,
    logit_scale: Tensor,
    logit_bias: Tensor,
    *,
    first: int = 0,
    block: int = 0,
) -> Tensor:
    """Sum of -log sigmoid(y (scale v.t + bias)) over all pairs, divided by the pictures (Zhai et al. 2023, algorithm 1).

    `image_features` (rows, dim) are this process's, `all_text_features` (columns, dim) those of all processes; y is 1 for
    row i's own caption, column `first` + i, and -1 for every other. Each pair of the whole batch is thus asked about by
    one process, the one that holds its picture, and the mean over processes is the loss of the whole batch. Features are
    compared as they are; `logit_scale` is already exponentiated. With `block`, only so many rows of the score matrix exist
    at once, in the backward pass too, where they are computed again.
    """
    total = sum_by_rows(
        _rows_loss, image_features, all_text_features, logit_scale, logit_bias, first=first, block=block
    )
    return total / max(1, len(image_features))


def _rows_loss(rows: Tensor, own: Tensor, columns: Tensor, logit_scale: Tensor, logit_bias: Tensor) -> Tensor:
    scores = logit_scale * rows @ columns.T + logit_bias  # (rows, columns)
    sign = torch.ones_like(scores).scatter_(1, own[:, None], -1.0)
    return F.softplus(sign * scores).sum()
