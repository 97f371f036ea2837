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
from debias_diffusion.training.sigmoid import sigmoid_loss


class TwoBranchModel(nn.Module):
    """Both branches through one forward, so that a wrapper for many processes sees a single call.

    With `frozen_images` the image tower is no part of it: it takes ready image features, and only the text side is moved
    to the device, wrapped and saved.
    """

    def __init__(self, clip: CustomTextCLIP, *, frozen_images: bool = False) -> None:
        super().__init__()
        self.clip: Any = _TextSide(clip) if frozen_images else clip

    def forward(self, images: Tensor, input_ids: Tensor, num_prefix: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Unit-norm image features (batch, dim), text features (2 * batch, dim; full branch first), and the logit scale
        (), or scale and bias (2,) where the model has a bias.

        `images` are pixel values (batch, 3, height, width) or, with frozen images, unit-norm features (batch, dim). An
        empty batch goes through as well: the other processes wait for this one's gradients.
        """
        count = len(images)
        if not count:
            images = self._blank()
            input_ids, num_prefix = torch.tensor([[0, 1]] * 2), torch.zeros(2, dtype=torch.long)
        image = images if isinstance(self.clip, _TextSide) else _unit(self.clip.visual(images))
        text = _unit(encode_text(self.clip.text, input_ids, num_prefix))
        scale = self.clip.logit_scale.exp().reshape(())  # sharded, it is (1,)
        bias = self.clip.logit_bias
        logit = scale if bias is None else torch.stack([scale, bias.reshape(())])
        return image[:count], text[: 2 * count], logit

    def _blank(self) -> Tensor:
        if isinstance(self.clip, _TextSide):
            return self.clip.logit_scale.new_zeros(1, self.clip.text.output_dim)
        size = self.clip.visual.image_size
        height, width = size if isinstance(size, tuple) else (size, size)
        return self.clip.logit_scale.new_zeros(1, 3, height, width)


class _TextSide(nn.Module):
    """A CLIP model's text tower, logit scale and bias, under the names they have there."""

    def __init__(self, clip: CustomTextCLIP) -> None:
        super().__init__()
        self.text, self.logit_scale, self.logit_bias = clip.text, clip.logit_scale, clip.logit_bias


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
    block: int = 0
    """Rows of the score matrix that are held at once; 0 means all."""


@dataclass(frozen=True)
class StepLoss:
    """`total` is what to differentiate: averaged over processes it is the global mean. The rest is for people: the
    branches' losses over this process's rows and the share of captions whose picture ranks first in the whole batch."""

    total: Tensor
    full: Tensor
    short: Tensor
    recall: Tensor
    num_pairs: int


def two_branch_loss(image: Tensor, text: Tensor, logit: Tensor, rule: LossRule) -> StepLoss:
    """Full text against whole image features, augmented text against their principal part (paper: loss).

    The three tensors are what `TwoBranchModel` gives; with a bias among them the loss is the sigmoid one, else InfoNCE.
    """
    shares = exchange_counts(len(image), image.device)
    full, augmented = text.chunk(2)
    all_image, all_full, all_augmented = (gather_features(t, shares) for t in (image, full, augmented))
    if not len(image):  # nothing to compare here, but the other processes wait for this one's backward pass
        nothing = (
            (image.sum() + text.sum()) * 0
            + logit.sum() * 0
            + (all_image.sum() + all_full.sum() + all_augmented.sum()) * 0
        )
        return StepLoss(nothing, nothing.detach(), nothing.detach(), nothing.detach(), sum(shares.counts))
    all_coarse = grouped_principal_part(all_image, rule.pca_dim, rule.pca_batch, renormalise=rule.pca_renormalise)
    coarse = all_coarse[shares.first : shares.first + len(image)]
    how: dict[str, Any] = {"first": shares.first, "block": rule.block}
    if logit.ndim:
        scale, bias = logit.unbind()
        loss_full = sigmoid_loss(image, all_full, scale, bias, **how)
        loss_short = sigmoid_loss(coarse, all_augmented, scale, bias, **how)
    else:
        how["label_smoothing"] = rule.label_smoothing
        loss_full = contrastive_loss(image, full, all_image, all_full, logit, **how)
        loss_short = contrastive_loss(coarse, augmented, all_coarse, all_augmented, logit, **how)
    total = mix_branches(loss_full, loss_short, rule.short_weight) * shares.weight
    recall = _recall(full.detach(), all_image.detach(), shares.first, rule.block)
    return StepLoss(total, loss_full.detach(), loss_short.detach(), recall, sum(shares.counts))


def _recall(text: Tensor, all_image: Tensor, first: int, block: int) -> Tensor:
    best = torch.cat([(rows @ all_image.T).argmax(1) for rows in text.split(block or len(text))])
    return (best == torch.arange(first, first + len(text), device=text.device)).float().mean()
