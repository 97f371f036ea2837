"""The exact fast text forward: pay for the words, not for the padding.

Under causal attention nothing after the EOT token reaches the pooled feature, and the prefix that token padding puts
in front (SOT and pads) is the same for every caption. So the tokens of a batch are packed into one long row without
padding, the prefix is computed once, and each caption attends to as much of it as it has: equal to the plain forward up
to rounding, in features and gradients.
"""

import logging
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from open_clip.transformer import QuickGELU, ResidualAttentionBlock, TextTransformer
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from debias_diffusion.encoders.split_attention import SplitAttention

logger = logging.getLogger(__name__)

_BUCKET = 16
"""Captions whose attention is computed together; they are sorted by length, so few positions are wasted."""


def why_not_packed(text: TextTransformer) -> str | None:
    """The reason why this text tower needs the plain forward, or None if packing is exact for it."""
    if getattr(text, "attn_mask", None) is None:
        return "its attention is bidirectional: every position sees the padding"
    if getattr(text, "pool_type", None) != "argmax":
        return f"it pools by {getattr(text, 'pool_type', None)!r}, not at the EOT token"
    if getattr(text, "cls_emb", None) is not None:
        return "it appends a class token"
    attentions = [getattr(block, "attn", None) for block in text.transformer.resblocks]
    if not all(isinstance(attn, nn.MultiheadAttention | SplitAttention) for attn in attentions):
        return "its attention blocks are of a custom kind"
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        from torch.distributed.tensor import DTensor

        if any(isinstance(p, DTensor) for p in text.parameters()):
            return "its weights are sharded, and are whole only while a block runs its own forward"
    return None


@torch.compiler.disable(reason="packing gives every batch other shapes, and each would be compiled anew")
def encode_text(text: TextTransformer, input_ids: Tensor, num_prefix: Tensor | None = None) -> Tensor:
    """Projected text features (batch, dim), not normalised, equal to `text(input_ids)` of the plain tower.

    `input_ids` (batch, length) hold SOT, `num_prefix` pads (batch,), the words, EOT (the largest id), then padding;
    `num_prefix` None means no pads in front. Lengths up to the context are taken. Towers that cannot be packed (see
    `why_not_packed`) take the plain path.
    """
    if reason := why_not_packed(text):
        _say_once(reason)
        return plain_encode_text(text, input_ids)
    layout = _layout(input_ids, num_prefix, text.token_embedding.weight.device)
    # An embedding look-up, whose gradient is summed in a fixed order; indexing would sum it in any.
    x = text.token_embedding(layout.ids) + F.embedding(layout.positions, text.positional_embedding)  # (tokens, width)
    x = x.to(text.transformer.get_cast_dtype())
    *blocks, last = text.transformer.resblocks
    for step, block in [*((_block, b) for b in blocks), (_last_block, last)]:
        if text.transformer.grad_checkpointing and torch.is_grad_enabled():
            x = checkpoint(step, block, x, layout, use_reentrant=False)
        else:
            x = step(block, x, layout)
    pooled = text.ln_final(x)  # (batch, width)
    if isinstance(text.text_projection, nn.Linear):
        return text.text_projection(pooled)
    return pooled if text.text_projection is None else pooled @ text.text_projection


@cache
def _say_once(reason: str) -> None:
    logger.warning("this text tower reads every row at its full length, padding included: %s", reason)


def plain_encode_text(text: TextTransformer, input_ids: Tensor) -> Tensor:
    """The tower's own forward on rows of full context length; shorter rows are filled with its pad id."""
    missing = text.context_length - input_ids.shape[1]
    if missing < 0:
        raise ValueError(f"input_ids have {input_ids.shape[1]} positions, the text tower {text.context_length}")
    input_ids = input_ids.to(text.token_embedding.weight.device)
    return text(F.pad(input_ids, (0, missing), value=getattr(text, "pad_id", 0)))


@dataclass(frozen=True)
class _Bucket:
    """Captions of like length whose attention is computed together. Those without pads in front carry their SOT along
    and are plainly causal (`mask` None); the others attend to the shared prefix, each to its own part of it."""

    captions: int
    length: int
    prefix: int
    mask: Tensor | None  # (captions, 1, length, prefix + length) True where attention is allowed
    from_end: Tensor  # (captions, 1, 1, prefix + length) the same for each caption's EOT alone
    members: Tensor  # (captions,) which captions of the batch these are


@dataclass(frozen=True)
class _Layout:
    ids: Tensor  # (tokens,) prefix first, then each caption's own tokens
    positions: Tensor  # (tokens,)
    ends: Tensor  # (batch,) row of each caption's EOT
    prefix: int  # tokens of the shared prefix, SOT included
    buckets: tuple[_Bucket, ...]
    pack: Tensor  # (padded tokens,) packed row of each bucket position; padding points at token 0
    unpack: Tensor  # (tokens - prefix,) bucket position of each own token

    @property
    def sizes(self) -> list[int]:
        return [b.captions * b.length for b in self.buckets]


def _layout(input_ids: Tensor, num_prefix: Tensor | None, device: torch.device) -> _Layout:
    ids = input_ids.cpu()
    ends = ids.argmax(dim=1)
    starts = torch.ones_like(ends) if num_prefix is None else num_prefix.cpu() + 1
    lengths = ends - starts + 1  # own tokens: words and EOT
    if bool((lengths < 1).any()):
        raise ValueError("a row has no EOT after its prefix; EOT must be the largest id of each row")
    prefix = int(starts.max())
    deepest = int(starts.argmax())
    first = prefix + torch.cumsum(lengths, 0) - lengths  # packed row of each caption's first own token
    owner = torch.repeat_interleave(torch.arange(len(ids)), lengths)
    inside = torch.arange(int(lengths.sum())) - (first - prefix)[owner]
    own_positions = starts[owner] + inside
    buckets, pack, base = _bucketise(starts, lengths, first)
    return _Layout(
        ids=torch.cat([ids[deepest, :prefix], ids[owner, own_positions]]).to(device),
        positions=torch.cat([torch.arange(prefix), own_positions]).to(device),
        ends=(first + lengths - 1).to(device),
        prefix=prefix,
        buckets=tuple(_on(b, device) for b in buckets),
        pack=pack.to(device),
        unpack=(base[owner] + inside).to(device),
    )


def _on(bucket: _Bucket, device: torch.device) -> _Bucket:
    mask = None if bucket.mask is None else bucket.mask.to(device)
    return replace(bucket, mask=mask, from_end=bucket.from_end.to(device), members=bucket.members.to(device))


def _bucketise(starts: Tensor, lengths: Tensor, first: Tensor) -> tuple[list[_Bucket], Tensor, Tensor]:
    """Buckets, the packed row of each bucket position, and the bucket position of each caption's first own token."""
    buckets: list[_Bucket] = []
    rows: list[Tensor] = []
    base = torch.empty_like(starts)
    offset = 0
    order = torch.argsort(lengths, stable=True)
    for group in (order[starts[order] == 1], order[starts[order] > 1]):
        for chunk in group.split(_BUCKET) if len(group) else ():
            bare = int(starts[chunk[0]] == 1)
            length, prefix = int(lengths[chunk].max()), int(starts[chunk].max())
            column = torch.arange(length)
            valid = column < lengths[chunk, None]
            own = torch.where(valid, first[chunk, None] + column, 0)  # padding points at SOT: it is never read
            rows.append(torch.cat([own.new_zeros(len(chunk), bare), own], 1).flatten())
            shared = torch.ones(len(chunk), 1) > 0 if bare else torch.arange(prefix) < starts[chunk, None]
            mask = None if bare else _prefix_mask(shared, valid)
            from_end = torch.cat([shared, valid], 1)[:, None, None]
            buckets.append(_Bucket(len(chunk), length + bare, 0 if bare else prefix, mask, from_end, chunk))
            base[chunk] = offset + bare + torch.arange(len(chunk)) * (length + bare)
            offset += len(chunk) * (length + bare)
    return buckets, torch.cat(rows), base


def _prefix_mask(shared: Tensor, valid: Tensor) -> Tensor:
    length = valid.shape[1]
    own = torch.ones(length, length, dtype=torch.bool).tril() & valid[:, None, :]  # (captions, query, key)
    return torch.cat([shared[:, None, :].expand(-1, length, -1), own], 2)[:, None]


def _block(block: ResidualAttentionBlock, x: Tensor, layout: _Layout) -> Tensor:
    x = x + block.ls_1(_attention(block.attn, block.ln_1(x), layout))
    return x + block.ls_2(_mlp(block.mlp, block.ln_2(x)))


def _last_block(block: ResidualAttentionBlock, x: Tensor, layout: _Layout) -> Tensor:
    """What the last block gives at each EOT (batch, width): nothing reads its other rows, so they are not computed."""
    attn, normed, ends = block.attn, block.ln_1(x), x.index_select(0, layout.ends)
    q, kv = _project_q(attn, normed.index_select(0, layout.ends)), _project_kv(attn, normed)
    shared_k, shared_v = _split_heads(kv[None, : layout.prefix], 2, attn.num_heads)
    found = []
    for bucket, rows in zip(layout.buckets, kv.index_select(0, layout.pack).split(layout.sizes), strict=True):
        k, v = _split_heads(rows.view(bucket.captions, bucket.length, -1), 2, attn.num_heads)
        k, v = _with_prefix(shared_k, k, bucket), _with_prefix(shared_v, v, bucket)
        (own_q,) = _split_heads(q.index_select(0, bucket.members)[:, None], 1, attn.num_heads)
        found.append(F.scaled_dot_product_attention(own_q, k, v, attn_mask=bucket.from_end).flatten(1))
    order = torch.cat([bucket.members for bucket in layout.buckets]).argsort()
    x = ends + block.ls_1(attn.out_proj(torch.cat(found).index_select(0, order)))
    return x + block.ls_2(_mlp(block.mlp, block.ln_2(x)))


def _mlp(mlp: Any, x: Tensor) -> Tensor:
    """The block's MLP; QuickGELU, x * sigmoid(1.702 x), in the fused form silu(1.702 x) / 1.702."""
    if not isinstance(mlp.gelu, QuickGELU):
        return mlp(x)
    hidden = mlp.c_fc(x)
    if torch.is_grad_enabled():
        return mlp.c_proj(F.silu(hidden * 1.702) / 1.702)
    return mlp.c_proj(F.silu(hidden.mul_(1.702), inplace=True).div_(1.702))


def _project_qkv(attn: nn.MultiheadAttention | SplitAttention, x: Tensor) -> Tensor:
    """(tokens, 3 * width); adapters on split projections are read by calling the layers."""
    if isinstance(attn, SplitAttention):
        return torch.cat([attn.q_proj(x), attn.k_proj(x), attn.v_proj(x)], -1)
    return F.linear(x, attn.in_proj_weight, attn.in_proj_bias)


def _project_q(attn: nn.MultiheadAttention | SplitAttention, x: Tensor) -> Tensor:
    if isinstance(attn, SplitAttention):
        return attn.q_proj(x)
    width = attn.embed_dim
    return F.linear(x, attn.in_proj_weight[:width], attn.in_proj_bias[:width])


def _project_kv(attn: nn.MultiheadAttention | SplitAttention, x: Tensor) -> Tensor:
    if isinstance(attn, SplitAttention):
        return torch.cat([attn.k_proj(x), attn.v_proj(x)], -1)
    width = attn.embed_dim
    return F.linear(x, attn.in_proj_weight[width:], attn.in_proj_bias[width:])


def _attention(attn: nn.MultiheadAttention | SplitAttention, x: Tensor, layout: _Layout) -> Tensor:
    qkv = _project_qkv(attn, x)
    shared_q, shared_k, shared_v = _split_heads(qkv[None, : layout.prefix], 3, attn.num_heads)
    outputs = [
        F.scaled_dot_product_attention(shared_q, shared_k, shared_v, is_causal=True).transpose(1, 2).flatten(0, 1)
    ]
    own = []
    for bucket, rows in zip(layout.buckets, qkv.index_select(0, layout.pack).split(layout.sizes), strict=True):
        q, k, v = _split_heads(rows.view(bucket.captions, bucket.length, -1), 3, attn.num_heads)
        k, v = _with_prefix(shared_k, k, bucket), _with_prefix(shared_v, v, bucket)
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=bucket.mask, is_causal=bucket.mask is None)
        own.append(out.transpose(1, 2).flatten(0, 1))  # (captions * length, head, dim)
    outputs.append(torch.cat(own).index_select(0, layout.unpack))
    return attn.out_proj(torch.cat(outputs).flatten(1))


def _with_prefix(shared: Tensor, own: Tensor, bucket: _Bucket) -> Tensor:
    """(captions, head, prefix + length, dim): the shared keys or values, then each caption's own."""
    if not bucket.prefix:
        return own
    return torch.cat([shared[:, :, : bucket.prefix].expand(bucket.captions, -1, -1, -1), own], 2)


def _split_heads(packed: Tensor, parts: int, heads: int) -> tuple[Tensor, ...]:
    """(batch, length, parts * width) -> `parts` times (batch, head, length, dim)."""
    return packed.unflatten(-1, (parts, heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)
