"""One optimisation step's mathematics: features of both branches, gathered, compared, mixed."""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from open_clip.model import CustomTextCLIP
from torch import Tensor, nn

from debias_diffusion.encoders.text_forward import encode_text
from debias_diffusion.training.gather import exchange_counts, gather_features
from debias_diffusion.training.losses import contrastive_loss, grouped_principal_part, mix_branches


class TwoBranchModel(nn.Module):
    """Both branches through one forward, so that a wrapper for many processes sees a single call."""

    def __init__(self, clip: CustomTextCLIP) -> None:
        super().__init__()
        self.clip: Any = clip

    def forward(self, pixel_values: Tensor, input_ids: Tensor, num_prefix: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Unit-norm image features (batch, dim), text features (2 * batch, dim; full branch first), logit scale ().

        An empty batch goes through as well: the other processes wait for this one's gradients.
        """
        if not len(pixel_values):
            size = self.clip.visual.image_size
            height, width = size if isinstance(size, tuple) else (size, size)
            pixel_values = self.clip.logit_scale.new_zeros(1, 3, height, width)
            image, text, scale = self(pixel_values, torch.tensor([[0, 1]] * 2), torch.zeros(2, dtype=torch.long))
            return image[:0], text[:0], scale
        image = self.clip.visual(pixel_values)
        text = encode_text(self.clip.text, input_ids, num_prefix)
        return _unit(image), _unit(text), self.clip.logit_scale.exp()


def _unit(features: Tensor) -> Tensor:
    return F.normalize(features.to(torch.promote_types(features.dtype, torch.float32)), dim=-1)


@dataclass(frozen=True)
class LossRule:
    """How the two branches become one number; fields as in `TrainConfig`."""

    short_weight: float
    pca_dim: int
    pca_batch: int
    pca_renormalise: bool
    label_smoothing: float


@dataclass(frozen=True)
class StepLoss:
    """`total` is what to differentiate: averaged over processes it is the global mean. The rest is for people: the
    branches' losses over this process's rows and the share of captions whose picture ranks first in the whole batch."""

    total: Tensor
    full: Tensor
    short: Tensor
    recall: Tensor
    num_pairs: int


def two_branch_loss(image: Tensor, text: Tensor, logit_scale: Tensor, rule: LossRule) -> StepLoss:
    """Full text against whole image features, augmented text against their principal part (paper: loss)."""
    shares = exchange_counts(len(image), image.device)
    full, augmented = text.chunk(2)
    all_image, all_full, all_augmented = (gather_features(t, shares) for t in (image, full, augmented))
    if not len(image):  # nothing to compare here, but the other processes wait for this one's backward pass
        nothing = (
            (image.sum() + text.sum()) * 0
            + logit_scale * 0
            + (all_image.sum() + all_full.sum() + all_augmented.sum()) * 0
        )
        return StepLoss(nothing, nothing.detach(), nothing.detach(), nothing.detach(), sum(shares.counts))
    all_coarse = grouped_principal_part(all_image, rule.pca_dim, rule.pca_batch, renormalise=rule.pca_renormalise)
    mine = slice(shares.first, shares.first + len(image))
    smoothing = rule.label_smoothing
    loss_full = contrastive_loss(
        image, full, all_image, all_full, logit_scale, first=shares.first, label_smoothing=smoothing
    )
    loss_short = contrastive_loss(
        all_coarse[mine],
        augmented,
        all_coarse,
        all_augmented,
        logit_scale,
        first=shares.first,
        label_smoothing=smoothing,
    )
    total = mix_branches(loss_full, loss_short, rule.short_weight) * shares.weight
    with torch.no_grad():
        target = torch.arange(shares.first, shares.first + len(full), device=full.device)
        recall = ((full @ all_image.T).argmax(1) == target).float().mean()
    return StepLoss(total, loss_full.detach(), loss_short.detach(), recall, sum(shares.counts))
