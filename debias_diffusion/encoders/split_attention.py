"""Attention whose query, key and value projections are layers of their own, so that adapters can sit on them.

PyTorch's `nn.MultiheadAttention` holds them as one bare parameter that no layer's forward reads; peft can adapt it only
by adding to the weight before each forward and subtracting after, which rounds the frozen weights anew every step and
does not reach a forward that reads the weight itself. Split and joined again, the tower computes the same.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class SplitAttention(nn.Module):
    """`nn.MultiheadAttention` of self-attention with equal widths, batch first and without dropout, as four layers."""

    def __init__(self, attn: nn.MultiheadAttention) -> None:
        super().__init__()
        self.embed_dim, self.num_heads = attn.embed_dim, attn.num_heads
        weights, biases = attn.in_proj_weight.chunk(3), attn.in_proj_bias.chunk(3)
        self.q_proj, self.k_proj, self.v_proj = (
            _linear(w, b, attn.in_proj_weight.requires_grad) for w, b in zip(weights, biases, strict=True)
        )
        self.out_proj = _linear(attn.out_proj.weight, attn.out_proj.bias, attn.out_proj.weight.requires_grad)

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, *, need_weights: bool = False, attn_mask: Tensor | None = None
    ) -> tuple[Tensor, None]:
        """(batch, length, width) three times -> the same shape, and None where attention weights would stand."""
        if need_weights:
            raise ValueError("attention weights are not kept here; join the tower's attention first")
        parts = (self.q_proj(query), self.k_proj(key), self.v_proj(value))
        q, k, v = (part.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for part in parts)
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=attn_mask)
        return self.out_proj(out.transpose(1, 2).flatten(2)), None

    def joined(self) -> nn.MultiheadAttention:
        """The `nn.MultiheadAttention` with these weights."""
        attn = nn.MultiheadAttention(self.embed_dim, self.num_heads, batch_first=True, device="meta")
        layers = (self.q_proj, self.k_proj, self.v_proj)
        attn.in_proj_weight = _parameter(torch.cat([x.weight for x in layers]), self.q_proj.weight.requires_grad)
        attn.in_proj_bias = _parameter(torch.cat([x.bias for x in layers]), self.q_proj.weight.requires_grad)
        attn.out_proj.weight = _parameter(self.out_proj.weight, self.out_proj.weight.requires_grad)
        attn.out_proj.bias = _parameter(self.out_proj.bias, self.out_proj.weight.requires_grad)
        return attn


def split_attention(text: Any) -> None:
    """Splits the attention of every block of an open_clip text tower, in place; ValueError where it is of another kind."""
    for block in text.transformer.resblocks:
        if not isinstance(block.attn, nn.MultiheadAttention):
            raise ValueError(f"this tower's attention is {type(block.attn).__name__}; expected nn.MultiheadAttention")
        block.attn = SplitAttention(block.attn)


def join_attention(text: Any) -> None:
    """Undoes `split_attention`, with the weights of now; parameters get open_clip's names back."""
    for block in text.transformer.resblocks:
        if isinstance(block.attn, SplitAttention):
            block.attn = block.attn.joined()


def _linear(weight: Tensor, bias: Tensor, requires_grad: bool) -> nn.Linear:
    layer = nn.Linear(weight.shape[1], weight.shape[0], device="meta")
    layer.weight, layer.bias = _parameter(weight, requires_grad), _parameter(bias, requires_grad)
    return layer


def _parameter(tensor: Tensor, requires_grad: bool) -> nn.Parameter:
    return nn.Parameter(tensor.detach().clone(), requires_grad=requires_grad)
