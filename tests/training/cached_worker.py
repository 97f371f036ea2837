"""One rank: gradients of a wrapped tiny model, in chunks, on its share of a batch; rank 0 also computes them whole."""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from gather_worker import RULE, batch, gradients, model
from torch.nn.parallel import DistributedDataParallel

from debias_diffusion.training.cached import cached_features, split_pairs
from debias_diffusion.training.step import two_branch_loss

if __name__ == "__main__":
    folder, sizes = Path(sys.argv[1]), [int(s) for s in sys.argv[2].split(",")]
    alone = model()
    whole = gradients(alone, slice(0, 12), alone)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    bare = model()
    bare.clip.set_grad_checkpointing(True)
    bare.train()
    wrapped = DistributedDataParallel(bare)
    pixels, ids, prefix = batch(12)
    rows = slice(sum(sizes[:rank]), sum(sizes[: rank + 1]))
    chunks = split_pairs(pixels[rows], ids[:, rows].flatten(0, 1), prefix[:, rows].flatten(), 3)
    for _ in range(2):  # a second step: what the first left behind in the wrapper must not disturb it
        wrapped.zero_grad()
        cached = cached_features(bare, chunks)
        two_branch_loss(cached.image, cached.text, cached.logit_scale, RULE).total.backward()
        cached.backward(wrapped, no_sync=wrapped.no_sync)
    if rank == 0:
        torch.save(whole, folder / "alone.pt")
        torch.save({name: p.grad.clone() for name, p in bare.named_parameters()}, folder / "together.pt")
    dist.barrier()
    dist.destroy_process_group()
