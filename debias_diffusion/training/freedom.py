"""What of a model is trained, and how fast: frozen text layers, learning rates of their own for towers."""

from typing import Any

from open_clip.model import CustomTextCLIP
from torch import nn


def freeze_text_layers(clip: CustomTextCLIP, layers: int) -> None:
    """Freezes the token embedding and the first `layers` blocks of the text tower; 0 freezes nothing.

    The position table stays as it is: its rows are what stretching adds, and their gradient passes through frozen blocks.
    """
    blocks = clip.text.transformer.resblocks
    if not 0 <= layers <= len(blocks):
        raise ValueError(f"frozen-text-layers is {layers}; this text tower has {len(blocks)} layers")
    if layers:
        clip.text.token_embedding.requires_grad_(False)
    for block in blocks[:layers]:
        block.requires_grad_(False)


def parameter_groups(model: nn.Module, learning_rate: float, **tower_rates: float) -> list[dict[str, Any]]:
    """AdamW's groups: {"params", "lr", "peak", "name"}; `peak` is what the schedule's share is taken of.

    `tower_rates` are text=... and image=..., 0 meaning `learning_rate`. Where no tower has a rate of its own, there is
    one group, in the model's order, as published. Names may carry a wrapper's prefix; what lies in neither tower (logit
    scale and bias) has `learning_rate`.
    """
    if unknown := tower_rates.keys() - {"text", "image"}:
        raise ValueError(f"no tower is called {sorted(unknown)[0]!r}; towers: text, image")
    rates = {tower: rate for tower, rate in tower_rates.items() if rate and rate != learning_rate}
    groups: dict[str, list[nn.Parameter]] = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            tower = _tower_of(name)
            groups.setdefault(tower if tower in rates else "all", []).append(parameter)
    peaks = {name: rates.get(name, learning_rate) for name in groups}
    return [{"params": p, "lr": peaks[name], "peak": peaks[name], "name": name} for name, p in groups.items()]


def _tower_of(name: str) -> str:
    parts = name.split(".")
    return "image" if "visual" in parts else "text" if "text" in parts else ""
