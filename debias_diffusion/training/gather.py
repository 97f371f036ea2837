"""Features of all processes, with gradients: local rows can be scored against global columns."""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function


@dataclass(frozen=True)
class Shares:
    """How many rows each process holds; `first` is the global index of this one's first row."""

    counts: tuple[int, ...]
    rank: int

    @property
    def first(self) -> int:
        return sum(self.counts[: self.rank])

    @property
    def weight(self) -> float:
        """Factor that turns a mean over local rows into this process's part of the global mean under averaging."""
        return self.counts[self.rank] * len(self.counts) / max(1, sum(self.counts))


def exchange_counts(count: int, device: torch.device) -> Shares:
    """The row counts of all processes; without a process group there is one."""
    if not (dist.is_available() and dist.is_initialized()):
        return Shares((count,), 0)
    counts = [torch.zeros(1, dtype=torch.long, device=device) for _ in range(dist.get_world_size())]
    dist.all_gather(counts, torch.tensor([count], device=device))
    return Shares(tuple(int(c) for c in counts), dist.get_rank())


class _Gather(Function):
    @staticmethod
    def forward(ctx: Any, features: Tensor, shares: Shares) -> Tensor:
        ctx.shares = shares
        most = max(shares.counts)
        padded = features.new_zeros((most, *features.shape[1:]))
        padded[: len(features)] = features
        parts = [torch.empty_like(padded) for _ in shares.counts]
        dist.all_gather(parts, padded)
        return torch.cat([part[:count] for part, count in zip(parts, shares.counts, strict=True)])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        # Every process's loss pulls on these rows, so their gradient is the sum of what all of them ask for.
        total = grads[0].contiguous().clone()
        dist.all_reduce(total)
        shares: Shares = ctx.shares
        return total[shares.first : shares.first + shares.counts[shares.rank]], None


def gather_features(features: Tensor, shares: Shares) -> Tensor:
    """(local rows, dim) -> (rows of all processes, dim) in rank order, differentiable; counts may differ."""
    return features if len(shares.counts) == 1 else _Gather.apply(features, shares)


def any_process(flag: bool, device: torch.device) -> bool:
    """Whether `flag` holds on any process; all must call it."""
    if not (dist.is_available() and dist.is_initialized()):
        return flag
    votes = torch.tensor(float(flag), device=device)
    dist.all_reduce(votes)
    return float(votes) > 0
