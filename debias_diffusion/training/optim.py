"""Optimiser and learning rate, as functions of the step: nothing to save, nothing to get out of step."""

import math
from collections.abc import Iterable
from typing import Any

from open_clip.model import CustomTextCLIP
from torch import nn
from torch.optim import AdamW


def make_optimizer(
    parameters: Iterable[nn.Parameter] | Iterable[dict[str, Any]],
    learning_rate: float,
    weight_decay: float,
    betas: tuple[float, float],
) -> AdamW:
    """AdamW over all that trains, norms, biases and logit scale included (as published).

    `parameters` are in one group, or in those of `freedom.parameter_groups`, each with a learning rate of its own.
    """
    trained: Any = [p for p in parameters if isinstance(p, dict) or p.requires_grad]
    return AdamW(trained, lr=learning_rate, weight_decay=weight_decay, betas=betas, eps=1e-8)


def learning_rate_at(step: int, peak: float, warmup_steps: int, total_steps: int) -> float:
    """Linear warm-up, then half a cosine to zero; `step` counts from 0.

    >>> f"{learning_rate_at(14_597, 1e-6, 200, 14_598):.16e}"  # what the released B/16 checkpoint recorded
    '1.1902423935339357e-14'
    """
    if step < warmup_steps:
        return peak * (step + 1) / warmup_steps
    return peak * 0.5 * (1 + math.cos(math.pi * (step - warmup_steps) / max(1, total_steps - warmup_steps)))


def learning_rates(groups: Iterable[dict[str, Any]]) -> dict[str, float]:
    """The learning rates of an optimiser's groups, as a run records them: `learning_rate`, and those of towers apart.

    >>> learning_rates([{"lr": 0.1, "name": "all"}, {"lr": 0.2, "name": "text"}])
    {'learning_rate': 0.1, 'text_learning_rate': 0.2}
    """
    named = {group.get("name", "all"): group["lr"] for group in groups}
    return {"learning_rate" if name == "all" else f"{name}_learning_rate": rate for name, rate in named.items()}


def choose_towers(clip: CustomTextCLIP, train_towers: str) -> None:
    """Leaves gradients on for "both", "text" or "image" towers; the logit scale always learns."""
    clip.visual.requires_grad_(train_towers in ("both", "image"))
    clip.text.requires_grad_(train_towers in ("both", "text"))
