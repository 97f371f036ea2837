"""The attention that the pooled (EOT) token pays, from open_clip's and transformers' text towers alike."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from debias_diffusion.encoders.text_forward import why_not_packed


@torch.inference_mode()
def pooled_attention(tower: nn.Module, input_ids: Tensor) -> Tensor:
    """(layers, heads, batch, positions) Attention of each row's pooled position to every position, after the softmax.

    `input_ids` (batch, length) are what the tower reads. Each row sums to one over 0 ... EOT and is zero behind;
    positions end with the batch's last EOT. At least float32, on the tower's device. `tower` is an open_clip text tower
    with causal attention and EOT pooling, or a transformers CLIPTextModel or CLIPTextModelWithProjection, which is put
    to "eager" attention meanwhile, because the other implementations give no attention away. Raises ValueError for
    another tower or a row without EOT, RuntimeError where a layer gave no attention.
    """
    of_kind = _attention_of_transformers if _is_transformers(tower) else _attention_of_open_clip
    rows = of_kind(tower, attention_blocks(tower), input_ids)
    return torch.stack(rows).transpose(1, 2)  # (layers, batch, heads, positions) -> (layers, heads, batch, positions)


def attention_blocks(tower: nn.Module) -> Any:
    """The residual blocks, an `nn.ModuleList`, of a tower that `pooled_attention` takes; ValueError for another."""
    if _is_transformers(tower):
        # CLIPTextModel is flat since transformers 5.6, CLIPTextModelWithProjection is not.
        text: Any = getattr(tower, "text_model", tower)
        return text.encoder.layers
    if reason := why_not_packed(tower):
        raise ValueError(f"no attention at EOT in this {type(tower).__name__}: {reason}; expected a CLIP text tower")
    open_clip_text: Any = tower
    return open_clip_text.transformer.resblocks


def _is_transformers(tower: nn.Module) -> bool:
    return hasattr(tower, "set_attn_implementation")


def _attention_of_open_clip(tower: Any, blocks: Any, input_ids: Tensor) -> list[Tensor]:
    device = tower.token_embedding.weight.device
    ids, ends = _trim(input_ids.to(device), input_ids.argmax(1).to(device))
    x = (tower.token_embedding(ids) + tower.positional_embedding[: ids.shape[1]]).to(tower.transformer.get_cast_dtype())
    mask = tower.attn_mask[: ids.shape[1], : ids.shape[1]]
    hidden = torch.arange(ids.shape[1], device=device) > ends[:, None]  # (batch, position)
    rows = []
    for block in blocks:
        rows.append(_attention_from(block.attn, block.ln_1(x), ends, hidden))
        x = block(x, attn_mask=mask)
    return rows


def _attention_from(attn: nn.MultiheadAttention, x: Tensor, ends: Tensor, hidden: Tensor) -> Tensor:
    """(batch, head, position) Softmax of one query a caption; the map of all would be 248 times as large at full length."""
    query_weight, key_weight, _ = attn.in_proj_weight.chunk(3)
    query_bias, key_bias, _ = attn.in_proj_bias.chunk(3)
    pooled = x[torch.arange(len(x), device=x.device), ends]  # (batch, width)
    query = F.linear(pooled, query_weight, query_bias).unflatten(-1, (attn.num_heads, -1))
    key = F.linear(x, key_weight, key_bias).unflatten(-1, (attn.num_heads, -1))
    scores = torch.einsum("bhd,bphd->bhp", query, key) * query.shape[-1] ** -0.5
    scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
    return scores.masked_fill(hidden[:, None], -torch.inf).softmax(-1)


def _attention_of_transformers(tower: Any, blocks: Any, input_ids: Tensor) -> list[Tensor]:
    input_ids = input_ids.to(tower.device)
    eot = tower.config.eos_token_id
    # transformers' own rule: configs that still say 2 pool at the largest id, others at the first EOT.
    ids, ends = _trim(input_ids, input_ids.argmax(1) if eot == 2 else _first(input_ids == eot, eot))
    rows: list[Tensor] = []

    def keep_pooled_row(module: nn.Module, args: Any, output: tuple[Tensor, Tensor | None]) -> None:
        weights = output[1]
        if weights is None:
            raise RuntimeError(f"{type(module).__name__} gave no attention, although set to eager attention")
        row = weights[torch.arange(len(ids), device=ids.device), :, ends]  # (batch, head, position)
        rows.append(row.to(torch.promote_types(row.dtype, torch.float32)))

    handles = [layer.self_attn.register_forward_hook(keep_pooled_row) for layer in blocks]
    before = tower.config._attn_implementation
    try:
        tower.set_attn_implementation("eager")
        tower(input_ids=ids)
    finally:
        tower.set_attn_implementation(before)
        for handle in handles:
            handle.remove()
    if len(rows) != len(blocks):
        raise RuntimeError(f"attention came back from {len(rows)} layers of {len(blocks)}; this tower skips some")
    return rows


def _first(found: Tensor, eot: int) -> Tensor:
    if not bool(found.any(1).all()):
        row = int(found.any(1).int().argmin())
        raise ValueError(
            f"row {row} of input_ids has no EOT ({eot}, from the tower's config); cut text must keep it last"
        )
    return found.int().argmax(1)


def _trim(ids: Tensor, ends: Tensor) -> tuple[Tensor, Tensor]:
    """Without the columns behind the last EOT, which causal attention cannot reach."""
    return ids[:, : int(ends.max()) + 1], ends
