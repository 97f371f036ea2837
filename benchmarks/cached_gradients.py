"""Gradient caching at a large batch: how far the plain step and the one in chunks are from the gradients in float64.

In float32 the two cannot agree better than the worse of them is right. A layer norm's gradient is a sum over every token
of the batch; the plain step takes it in one chain of additions, and at 2,048 pairs that chain is 250,000 long. In chunks
the same sum is taken in parts, so it is the closer one.
"""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import torch
import torch.nn.functional as F
from cached_memory import GROUP, tiny_inputs, tiny_model
from torch import Tensor
from training_parts import NOTHING, RULE, Result, Sizes

from debias_diffusion.training.cached import cached_features, split_pairs
from debias_diffusion.training.step import two_branch_loss

Gradients = dict[str, Tensor]


def cached_part(sizes: Sizes) -> Result:
    """Distances from float64 of the plain step and the one in chunks; and the memory of a batch and a larger one."""
    small, large = sizes.cached_batches
    truth, small_truth = (gradients(n, sizes.chunk, torch.float64) for n in (large, small))
    exact = distances(small_truth, gradients(small, 0, torch.float64))
    plain, chunks = gradients(large, 0, torch.float32), gradients(large, sizes.chunk, torch.float32)
    rows = {
        f"in chunks from plain, float64, batch {small:,}": exact,
        f"plain from float64, batch {large:,}": distances(truth, plain),
        f"in chunks from float64, batch {large:,}": distances(truth, chunks),
        f"in chunks from plain, float32, batch {large:,}": distances(plain, chunks),
    }
    peaks = {n: _peak_of(n, sizes.chunk) for n in (small, large)}
    growth = peaks[large] / peaks[small] - 1
    lines = [f"### Gradient caching in chunks of {sizes.chunk}", ""]
    lines += [
        "| relative distance of gradients | of all as one | of the worst parameter | which |",
        "|---|---|---|---|",
    ]
    lines += [f"| {name} | {whole:.1e} | {worst:.1e} | {which} |" for name, (whole, worst, which) in rows.items()]
    lines += ["", "| batch | peak memory, MB |", "|---|---|"]
    lines += [f"| {n:,} | {peak / 1e6:,.0f} |" for n, peak in peaks.items()]
    lines += ["", f"From {small:,} to {large:,}: {growth:+.1%}.", ""]
    _, from_plain, from_truth, between = rows.values()
    figures = {
        "difference": max(from_truth[1], between[0]),
        "in_float64": exact[1],
        "plain_from_float64": from_plain[:2],
        "chunks_from_float64": from_truth[:2],
        "chunks_from_plain": between[:2],
        "growth": growth,
    }
    return Result(lines, figures)


def gradients(batch: int, chunk: int, dtype: torch.dtype) -> Gradients:
    """The gradients of one step of the tiny model, in chunks or (`chunk` 0) plainly, as float64."""
    model = tiny_model().to(dtype)
    pixels, ids, prefix = tiny_inputs(batch)
    pixels = pixels.to(dtype)
    cached = cached_features(model, split_pairs(pixels, ids, prefix, chunk)) if chunk else None
    outputs = (cached.image, cached.text, cached.logit_scale) if cached else model(pixels, ids, prefix)
    loss = (
        two_branch_loss(*outputs, replace(RULE, pca_batch=GROUP)).total
        if dtype == torch.float32
        else naive_loss(*outputs)
    )
    loss.backward()
    if cached:
        cached.backward(model)
    return {name: p.grad.double() for name, p in model.named_parameters() if p.grad is not None}


def naive_loss(image: Tensor, text: Tensor, scale: Tensor) -> Tensor:
    """The two-branch loss in the features' own precision, written from its formula and differentiated by torch alone."""
    full, augmented = text.chunk(2)
    groups = image.tensor_split(max(1, round(len(image) / GROUP)))
    coarse = torch.cat([_principal(group, RULE.pca_dim) for group in groups])
    target = torch.arange(len(image))

    def both_ways(images: Tensor, texts: Tensor) -> Tensor:
        scores = scale * images @ texts.T
        return (F.cross_entropy(scores, target) + F.cross_entropy(scores.T, target)) / 2

    return RULE.short_weight * both_ways(coarse, augmented) + (1 - RULE.short_weight) * both_ways(image, full)


def _principal(rows: Tensor, dim: int) -> Tensor:
    mean = rows.mean(0, keepdim=True)
    centred = rows - mean
    _, vectors = torch.linalg.eigh(centred @ centred.T)
    top = vectors[:, -dim:]
    return mean + top @ (top.T @ centred)


def distances(reference: Gradients, found: Gradients) -> tuple[float, float, str]:
    """The relative distance of all gradients as one vector, of the worst parameter, and that parameter's name."""
    gaps = {name: float((reference[name] - found[name]).norm()) for name in reference}
    norms = {name: float(value.norm()) for name, value in reference.items()}
    whole = sum(gap**2 for gap in gaps.values()) ** 0.5 / sum(norm**2 for norm in norms.values()) ** 0.5
    worst, which = max((gaps[name] / norms[name], name) for name in norms if norms[name] > NOTHING)
    return whole, worst, which


def _peak_of(batch: int, chunk: int) -> float:
    script = Path(__file__).with_name("cached_memory.py")
    command = [sys.executable, str(script), str(batch), str(chunk)]
    return float(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
