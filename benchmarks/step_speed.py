"""A whole training step of every way, on one model, so that the memory of one way is all that is held.

Three things keep it small. The learning rate is 0: AdamW does all its work and the weights stay what they are, so the ways
run on one model with one optimiser. The features that the loss compares can then be computed before the clock starts, and
each tower (in the plain way each branch) goes forward and at once backward; the operations and their shapes are those of a
step that holds all graphs until the loss is known, which `graphs_at_once` measures where there is memory for it. And
gradients are compared before the optimiser has its moments.
"""

import math
import tempfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from plain_recipe import make_large_pictures, plain_branches, read_captions, text_rows
from timing import Clock, alternate, ratio_in_processor_time, share_table, table
from torch import Tensor
from training_parts import RULE, Result, Sizes, build, packed_branches, worst_difference

from debias_diffusion.data.collate import Batch
from debias_diffusion.data.pictures import open_picture
from debias_diffusion.encoders.features import image_features
from debias_diffusion.training.optim import make_optimizer
from debias_diffusion.training.step import two_branch_loss

PARTS = ("decode", "image", "text", "loss", "optimiser")
FROZEN = "ours, image tower frozen"


@dataclass
class Way:
    """How one way reads pictures and computes features; and what its steps have given."""

    pictures: Callable[[], Tensor]
    """Pixel values of the batch, or its ready features where the image tower is frozen."""
    image: Callable[[Tensor], Tensor]
    text: Callable[[], Iterable[Tensor]]
    """Piece by piece, each computed when it is asked for."""
    clock: Clock = field(default_factory=Clock)
    known: list[Tensor] = field(default_factory=list)
    """Image and text features that the loss compares."""
    found: list[Tensor] = field(default_factory=list)
    """The same, as the last step computed them."""
    losses: list[float] = field(default_factory=list)


def step_part(sizes: Sizes, *, graphs_at_once: bool = False) -> Result:
    """A step from picture files and captions to moved weights, plain and ours; and ours with the image tower frozen."""
    clip: Any
    with tempfile.TemporaryDirectory() as folder:
        files = make_large_pictures(Path(folder), sizes.batch, sizes.step_picture_size)
        clip, ways = _ways(sizes, files)
        _learn_features(ways)
        optimizer = make_optimizer(clip.parameters(), 0.0, 0.01, (0.9, 0.999))
        whole, worst = _compare(clip, ways)
        optimizer.step()  # makes its moments, which no step should pay for
        runs = {n: partial(_step, clip, way, optimizer, graphs_at_once) for n, way in ways.items()}
        for way in ways.values():
            way.clock.parts.clear()
        timed = alternate(runs, sizes.repeats, warmup=0)
    lines = table(f"A whole training step: {sizes.step_encoder}", timed, "pairs", sizes.batch)
    lines += share_table("Share of each part", {n: way.clock for n, way in ways.items()})
    first = [way.losses[0] for way in ways.values()]
    moved = max(worst_difference(way.known, way.found) for way in ways.values())
    lines += [
        f"Batch {sizes.batch}, pictures from JPEGs of {' x '.join(map(str, sizes.step_picture_size))}, decoded in the step. "
        + (
            "The graphs of all towers are held until the loss is known."
            if graphs_at_once
            else "Each tower goes forward and backward before the next, as the loss's features are known from before."
        ),
        f"Losses of the first step: {', '.join(f'{v:.6f}' for v in first)}. Gradients from the plain way's: {whole:.1e} "
        f"relative in all, {worst:.1e} in the worst parameter. Features from those the loss compared: {moved:.1e}.",
        "",
    ]
    ratios = {name: timed["plain"].median / way.median for name, way in timed.items()}
    processor = {name: ratio_in_processor_time(timed, name) for name in timed}
    figures = {"ratios": ratios, "processor_ratios": processor, "losses": first, "difference": whole, "worst": worst}
    return Result(lines, figures | {"moved": moved})


def _ways(sizes: Sizes, files: list[Path]) -> tuple[Any, dict[str, Way]]:
    encoder = build(sizes.step_encoder)
    clip: Any = encoder.model
    captions = read_captions(sizes.batch).texts
    preprocess, side = encoder.preprocess, clip.visual.image_size[0]

    def rows() -> Batch:
        return text_rows(captions, encoder.tokenizer)

    def read(min_side: int | None) -> Tensor:
        return torch.stack([preprocess(open_picture(file, min_side)) for file in files])

    def image(pixels: Tensor) -> Tensor:
        return F.normalize(clip.visual(pixels), dim=-1)

    def packed() -> Iterator[Tensor]:
        return packed_branches(clip, rows())

    clip.eval()  # what the cache on disk holds: the features of pictures decoded whole
    ready = image_features(encoder, [open_picture(file) for file in files]).clone()  # no inference tensor
    clip.train()
    return clip, {
        "plain": Way(partial(read, None), image, lambda: plain_branches(clip, rows())),
        "ours": Way(partial(read, 2 * side), image, packed),
        FROZEN: Way(lambda: ready, lambda features: features, packed),
    }


@torch.no_grad()
def _learn_features(ways: dict[str, Way]) -> None:
    for way in ways.values():
        way.known = [way.image(way.pictures()), torch.cat(list(way.text()))]


def _compare(clip: Any, ways: dict[str, Way]) -> tuple[float, float]:
    """The largest relative difference of gradients from the plain way's: of all as one, and of the worst parameter.

    The frozen image tower has none, so there the text side's alone are compared.
    """
    plain, *others = ways.values()
    _backward(clip, plain, graphs_at_once=False)
    reference = {name: p.grad for name, p in clip.named_parameters() if p.grad is not None}
    whole, worst = [], []
    for way in reversed(others):  # the last one's gradients stay, of both towers
        clip.zero_grad()
        _backward(clip, way, graphs_at_once=False)
        found = {name: p.grad for name, p in clip.named_parameters() if p.grad is not None}
        expected = [reference[name] for name in found]
        gap = _norm(a - b for a, b in zip(expected, found.values(), strict=True))
        whole.append(gap / _norm(expected))
        worst.append(worst_difference(expected, list(found.values())))
    return max(whole), max(worst)


def _norm(tensors: Iterable[Tensor]) -> float:
    return math.hypot(*(float(t.norm()) for t in tensors))


def _step(clip: Any, way: Way, optimizer: torch.optim.Optimizer, graphs_at_once: bool) -> None:
    optimizer.zero_grad()
    _backward(clip, way, graphs_at_once)
    with way.clock.part("optimiser"):
        optimizer.step()


def _backward(clip: Any, way: Way, graphs_at_once: bool) -> None:
    """All of a step but the optimiser, cut where features meet the loss, so that each part's time is its own."""
    clock = way.clock
    clock.start(PARTS)
    with clock.part("decode"):
        pixels = way.pictures()
    pieces: dict[str, Iterable[Tensor]] = {"image": map(way.image, [pixels]), "text": way.text()}
    compared = way.known
    if graphs_at_once:
        for name, features in pieces.items():
            with clock.part(name):
                pieces[name] = list(features)
        compared = [torch.cat(list(features)) for features in pieces.values()]
    with clock.part("loss"):
        leaves = [features.detach().requires_grad_() for features in compared]
        loss = two_branch_loss(*leaves, clip.logit_scale.exp(), RULE).total
        loss.backward()
    way.found = []
    for (name, features), leaf in zip(pieces.items(), leaves, strict=True):
        found: list[Tensor] = []
        with clock.part(name):
            for piece in features:
                start = sum(map(len, found))
                if piece.requires_grad:
                    piece.backward(leaf.grad[start : start + len(piece)])
                found.append(piece.detach())
        way.found.append(torch.cat(found))
    way.losses.append(float(loss.detach()))
