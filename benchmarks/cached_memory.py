"""Peak memory of one step in chunks, in a process of its own: prints bytes.

python benchmarks/cached_memory.py BATCH CHUNK
"""

import sys

import torch
from open_clip.model import CustomTextCLIP
from timing import peak_bytes
from torch import Tensor

from debias_diffusion.training.cached import cached_features, split_pairs
from debias_diffusion.training.step import LossRule, TwoBranchModel, two_branch_loss

CONFIG = {
    "embed_dim": 64,
    "vision_cfg": {"image_size": 32, "patch_size": 8, "width": 64, "layers": 2, "head_width": 16},
    "text_cfg": {"context_length": 248, "vocab_size": 500, "width": 64, "heads": 4, "layers": 2},
}
GROUP = 64
"""Pictures whose principal components are taken together."""


def tiny_model() -> TwoBranchModel:
    """Small towers at 248 tokens, always the same."""
    torch.manual_seed(0)
    return TwoBranchModel(CustomTextCLIP(**CONFIG))


def tiny_inputs(batch: int) -> tuple[Tensor, Tensor, Tensor]:
    """Pictures and captions of 60 tokens, the augmented ones behind up to 100 pads."""
    generator = torch.Generator().manual_seed(3)
    pixels = torch.randn(batch, 3, 32, 32, generator=generator)
    ids = torch.zeros(2 * batch, 248, dtype=torch.long)
    prefix = torch.zeros(2 * batch, dtype=torch.long)
    prefix[batch:] = torch.randint(0, 100, (batch,), generator=generator)
    ids[:, 0] = 498
    words = torch.randint(1, 498, (2 * batch, 60), generator=generator)
    words[:, -1] = 499
    for row in range(2 * batch):
        start = 1 + int(prefix[row])
        ids[row, start : start + 60] = words[row]
    return pixels, ids, prefix


def main(batch: int, chunk: int) -> None:
    """One step, then the most memory the process has held."""
    rule = LossRule(0.1, pca_dim=8, pca_batch=GROUP, pca_renormalise=False, label_smoothing=0.0, block=chunk)
    model, inputs = tiny_model(), tiny_inputs(batch)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    cached = cached_features(model, split_pairs(*inputs, chunk))
    two_branch_loss(cached.image, cached.text, cached.logit_scale, rule).total.backward()
    cached.backward(model)
    optimizer.step()
    print(peak_bytes())


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
