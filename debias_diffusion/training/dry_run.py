"""What a run would do, told before it is done: sizes, memory, one batch as the text tower reads it, the first loss."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
from open_clip.model import CustomTextCLIP
from torch import Tensor

from debias_diffusion.encoders.tokens import TokenBatch, Tokenizer
from debias_diffusion.training.sharding import local_part

_FLOAT = 4


@dataclass(frozen=True)
class Memory:
    """Bytes of a training process: what stays all the time, and what one forward pass keeps for its backward pass."""

    weights: int
    gradients: int
    optimizer: int
    average: int
    activations: int

    @property
    def total(self) -> int:
        return self.weights + self.gradients + self.optimizer + self.average + self.activations

    def __str__(self) -> str:
        parts = ", ".join(f"{name} {_size(getattr(self, name))}" for name in self.__dataclass_fields__)
        return f"{_size(self.total)} ({parts})"


class KeptForBackward:
    """Counts, inside a `with` block, the bytes that autograd keeps beside the model's own weights, each storage once.

    Views are kept as the storage they look at, which is what stays in memory.
    """

    def __init__(self, weights: Any) -> None:
        self._known = {local_part(p).untyped_storage()._cdata for p in weights.parameters()}
        self.bytes = 0
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._count, lambda tensor: tensor)

    def __enter__(self) -> "KeptForBackward":
        self._hooks.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._hooks.__exit__(*error)

    def _count(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in self._known:
            self._known.add(storage._cdata)
            self.bytes += storage.nbytes()
        return tensor.detach()  # the tensor itself, where it is the output of its own node, would never be freed


def dry_run_report(
    clip: CustomTextCLIP,
    tokenizer: Tokenizer,
    captions: Sequence[str],
    texts: tuple[TokenBatch, TokenBatch],
    first_loss: Callable[[], Tensor],
    *,
    steps: int,
    processes: int = 1,
    average: bool = False,
) -> str:
    """All that can be told of a run before its first step, as text; one forward pass is run, and nothing is changed.

    `captions` and `texts` (full branch, augmented branch) are this process's share of the first batch, `first_loss` its
    forward pass and loss with gradients on.
    """
    full, augmented = texts
    memory, loss = measure_memory(clip, first_loss, average=average)
    longest = max(full.input_ids.shape[1], augmented.input_ids.shape[1])
    lines = [
        describe_model(clip),
        f"batch        {len(captions) * processes} pairs in {processes} process{'es' if processes > 1 else ''}; here "
        f"{len(captions)} pictures and {2 * len(captions)} rows of up to {longest} of {tokenizer.context_length} tokens",
        f"steps        {steps:,}",
        f"memory       about {memory}",
        f"first loss   {loss:.4f}",
        "",
        render_batch(tokenizer, captions, full, augmented),
    ]
    return "\n".join(lines)


def measure_memory(
    clip: CustomTextCLIP, first_loss: Callable[[], Tensor], *, average: bool = False
) -> tuple[Memory, float]:
    """Memory of one training process and the first loss, by running one forward pass; nothing is changed.

    Weights and gradients are float32 and AdamW holds two moments of each trained weight. Activations are counted, not
    guessed; a device adds its own workspace, and the backward pass needs some room beyond them. With gradient checkpointing
    the inputs of blocks, which it keeps by itself, are not among them.
    """
    every = sum(local_part(p).numel() for p in clip.parameters()) * _FLOAT
    trained = sum(local_part(p).numel() for p in clip.parameters() if p.requires_grad) * _FLOAT
    with KeptForBackward(clip) as kept:
        loss = float(first_loss().detach())
    return Memory(every, trained, 2 * trained, trained if average else 0, kept.bytes), loss


def describe_model(clip: CustomTextCLIP) -> str:
    """Parameters of each tower, and how many of them train, in one line a tower."""
    towers = {"image tower": clip.visual, "text tower": clip.text, "whole model": clip}
    rows = []
    for name, module in towers.items():
        numbers = [p.numel() for p in module.parameters()]
        trained = sum(p.numel() for p in module.parameters() if p.requires_grad)
        rows.append(f"{name:<12} {sum(numbers):>13,} parameters, {trained:>13,} of them trained")
    return "\n".join(rows)


def render_batch(
    tokenizer: Tokenizer, captions: Sequence[str], full: TokenBatch, augmented: TokenBatch, *, limit: int = 3
) -> str:
    """The first `limit` rows as people read them: caption, augmented caption, and its tokens with padding marked."""
    context_length = tokenizer.context_length
    rows = []
    for i in range(min(limit, len(captions))):
        ids = augmented.input_ids[i].tolist()
        words = _words(ids, int(augmented.num_prefix[i]), tokenizer)
        cut = f" (cut at {context_length} tokens)" if full.num_tokens[i] > context_length else ""
        rows += [
            f"caption    {captions[i]}{cut}",
            f"augmented  {''.join(map(tokenizer.piece, words)).strip()}",
            f"tokens     {render_tokens(ids, int(augmented.num_prefix[i]), tokenizer)}",
            "",
        ]
    return "\n".join(rows).rstrip()


def render_tokens(ids: Sequence[int], num_prefix: int, tokenizer: Tokenizer) -> str:
    """One row of ids as pieces, filled up to the context length, runs of padding written as [pad x N]."""
    words = _words(ids, num_prefix, tokenizer)
    used = int(tokenizer.layout.has_sot) + num_prefix + len(words) + 1
    marks = ["[start]"] * int(tokenizer.layout.has_sot) + ["[pad]"] * num_prefix
    marks += (
        [tokenizer.piece(t).strip() or "_" for t in words] + ["[end]"] + ["[pad]"] * (tokenizer.context_length - used)
    )
    shown = []
    for mark, run in groupby(marks):
        count = len(list(run))
        shown.append(f"[pad x {count}]" if mark == "[pad]" else " ".join([mark] * count))
    return " ".join(shown)


def _words(ids: Sequence[int], num_prefix: int, tokenizer: Tokenizer) -> list[int]:
    """The ids between the padding in front and the end token."""
    start = int(tokenizer.layout.has_sot) + num_prefix
    return list(ids[start : list(ids).index(tokenizer.eot_id, start)])


def _size(number: int) -> str:
    return f"{number / 2**30:.2f} GiB" if number >= 2**30 else f"{number / 2**20:.1f} MiB"
