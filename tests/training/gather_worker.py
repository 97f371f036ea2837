"""One rank: gradients of a wrapped tiny model on its share of a batch; rank 0 also computes them alone."""

import sys
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from open_clip.model import CustomTextCLIP
from torch.nn.parallel import DistributedDataParallel

from debias_diffusion.training.step import LossRule, TwoBranchModel, two_branch_loss

CONFIG = {
    "embed_dim": 16,
    "vision_cfg": {"image_size": 32, "patch_size": 16, "width": 32, "layers": 1, "head_width": 16},
    "text_cfg": {"context_length": 48, "vocab_size": 100, "width": 32, "heads": 2, "layers": 2},
}
RULE = LossRule(short_weight=0.1, pca_dim=3, pca_batch=0, pca_renormalise=False, label_smoothing=0.1)


def model() -> TwoBranchModel:
    torch.manual_seed(0)
    return TwoBranchModel(CustomTextCLIP(**CONFIG))


def batch(count: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    pixels = torch.randn(count, 3, 32, 32, generator=generator)
    ids = torch.randint(1, 98, (2, count, 48), generator=generator)
    ids[:, :, 0], ids[:, :, 30], ids[:, :, 31:] = 98, 99, 0
    prefix = torch.zeros(2, count, dtype=torch.long)
    prefix[1] = torch.randint(0, 20, (count,), generator=generator)
    for i, n in enumerate(prefix[1]):
        ids[1, i, 1 : 1 + n] = 0
    return pixels, ids, prefix


def gradients(wrapped: torch.nn.Module, rows: slice, bare: torch.nn.Module) -> dict[str, torch.Tensor]:
    pixels, ids, prefix = batch(12)
    image, text, scale = wrapped(pixels[rows], ids[:, rows].flatten(0, 1), prefix[:, rows].flatten())
    two_branch_loss(image, text, scale, RULE).total.backward()
    return {name: p.grad.clone() for name, p in bare.named_parameters()}


def compare(share: Callable[[slice], dict[str, torch.Tensor]]) -> None:
    """Writes the gradients of the whole batch computed alone, and those of `share(rows)` on every process together."""
    folder, sizes = Path(sys.argv[1]), [int(s) for s in sys.argv[2].split(",")]
    alone = model()
    whole = gradients(alone, slice(0, 12), alone)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    together = share(slice(sum(sizes[:rank]), sum(sizes[: rank + 1])))
    if rank == 0:
        torch.save(whole, folder / "alone.pt")
        torch.save(together, folder / "together.pt")
    dist.barrier()
    dist.destroy_process_group()


def wrapped_gradients(rows: slice) -> dict[str, torch.Tensor]:
    shared = model()
    return gradients(DistributedDataParallel(shared), rows, shared)


if __name__ == "__main__":
    compare(wrapped_gradients)
