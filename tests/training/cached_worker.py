"""One rank: gradients of a wrapped tiny model, in chunks, on its share of a batch; rank 0 also computes them whole."""

import torch
from gather_worker import RULE, batch, compare, model
from torch.nn.parallel import DistributedDataParallel

from debias_diffusion.training.cached import cached_features, split_pairs
from debias_diffusion.training.step import two_branch_loss


def chunked_gradients(rows: slice) -> dict[str, torch.Tensor]:
    bare = model()
    bare.clip.set_grad_checkpointing(True)
    bare.train()
    wrapped = DistributedDataParallel(bare)
    pixels, ids, prefix = batch(12)
    chunks = split_pairs(pixels[rows], ids[:, rows].flatten(0, 1), prefix[:, rows].flatten(), 3)
    for _ in range(2):  # a second step: what the first left behind in the wrapper must not disturb it
        wrapped.zero_grad()
        cached = cached_features(bare, chunks)
        two_branch_loss(cached.image, cached.text, cached.logit_scale, RULE).total.backward()
        cached.backward(wrapped, no_sync=wrapped.no_sync)
    return {name: p.grad.clone() for name, p in bare.named_parameters()}


if __name__ == "__main__":
    compare(chunked_gradients)
