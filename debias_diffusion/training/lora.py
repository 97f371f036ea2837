"""Low-rank adapters on the text tower, through peft; merged into plain weights before an encoder is saved."""

from typing import Any

from open_clip.model import CustomTextCLIP
from torch import nn

from debias_diffusion.encoders.split_attention import join_attention, split_attention

TARGETS = r"transformer\.resblocks\.\d+\.(attn\.(q|k|v|out)_proj|mlp\.c_(fc|proj))"
"""Every linear layer of every block; query, key and value each have an adapter of their own."""


def add_lora(clip: CustomTextCLIP, rank: int, alpha: int | None = None) -> None:
    """Puts adapters of `rank` on the text tower, in place, and leaves only them and its position table to train there.

    They start at zero, so the tower computes what it did. `alpha` (default `rank`) divided by `rank` scales them. The
    position table stays trainable because it is the one thing that stretching adds. Call it after
    `freeze_first_positions` and before the optimiser is made. Raises ValueError without peft, or for a tower whose
    attention is of another kind.
    """
    if rank < 1:
        raise ValueError(f"lora-rank is {rank}; expected 1 or more")
    try:
        from peft import LoraConfig, inject_adapter_in_model
    except ImportError as error:
        raise ValueError("LoRA needs peft, which is not installed: pip install 'debias-diffusion[lora]'") from error
    split_attention(clip.text)
    config = LoraConfig(r=rank, lora_alpha=alpha or rank, target_modules=TARGETS, bias="none")
    inject_adapter_in_model(config, clip.text)
    for name, parameter in clip.text.named_parameters():
        parameter.requires_grad_("lora_" in name or "positional_embedding" in name)


def has_lora(clip: CustomTextCLIP) -> bool:
    """Whether the text tower carries adapters."""
    return any("lora_" in name for name, _ in clip.text.named_parameters())


def merge_lora(clip: CustomTextCLIP) -> None:
    """Adds the adapters to the weights they sit on, in place; the tower is open_clip's plain one again."""
    if not has_lora(clip):
        return
    from peft.tuners.tuners_utils import BaseTunerLayer

    adapted = [(name, layer) for name, layer in clip.text.named_modules() if isinstance(layer, BaseTunerLayer)]
    for name, layer in adapted:
        adapter: Any = layer
        adapter.merge(safe_merge=True)
        parent, _, child = name.rpartition(".")
        base: nn.Module = adapter.get_base_layer()
        setattr(clip.text.get_submodule(parent), child, base)
    join_attention(clip.text)
    clip.text.requires_grad_(True)
