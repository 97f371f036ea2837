"""What `training_speed.py` measures, one function a part; each returns Markdown and the figures behind it."""

import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from cached_memory import tiny_inputs, tiny_model
from plain_recipe import (
    CONTEXT_LENGTH,
    exact_batch,
    make_large_pictures,
    plain_text,
    read_captions,
    text_rows,
)
from timing import Clock, alternate, share_table, table
from torch import Tensor

from debias_diffusion.data.collate import Batch, PixelValues
from debias_diffusion.data.pack import pack
from debias_diffusion.data.pairs import open_pairs
from debias_diffusion.data.pictures import open_picture
from debias_diffusion.encoders.checkpoint import load_encoder
from debias_diffusion.encoders.encoder import Encoder
from debias_diffusion.encoders.features import image_features
from debias_diffusion.encoders.text_forward import encode_text
from debias_diffusion.training.cached import cached_features, split_pairs
from debias_diffusion.training.optim import choose_towers, make_optimizer
from debias_diffusion.training.step import LossRule, two_branch_loss

RULE = LossRule(short_weight=0.1, pca_dim=8, pca_batch=0, pca_renormalise=False, label_smoothing=0.0)
PARTS = ("decode", "image", "text", "loss", "optimiser")
ALLOWED = 1e-5


@dataclass(frozen=True)
class Sizes:
    """How large each part is; `SMALL` is for tests of the benchmark itself and says nothing of speed."""

    text_encoder: str = "ViT-L-14:random"
    step_encoder: str = "ViT-B-16:random"
    batch: int = 32
    full_batch: int = 8
    cached_batches: tuple[int, int] = (256, 2048)
    chunk: int = 64
    pictures: int = 200
    picture_size: tuple[int, int] = (1500, 2250)
    repeats: int = 5


SMALL = Sizes("miniature:random", "miniature:random", 12, 4, (16, 32), 8, 6, (300, 450), 1)


@dataclass(frozen=True)
class Result:
    """Markdown lines and the figures that a claim can be checked against."""

    lines: list[str]
    figures: dict[str, Any]


def build(source: str, train_towers: str = "both") -> Encoder:
    """The encoder at 248 tokens, in training mode."""
    torch.manual_seed(0)
    encoder = load_encoder(source).stretched(CONTEXT_LENGTH, in_place=True)
    choose_towers(encoder.model, train_towers)
    encoder.model.train()
    return encoder


def _difference(a: Tensor, b: Tensor) -> float:
    return float((a - b).norm() / a.norm())


def _text_ways(
    encoder: Encoder, plain: Callable[[], Tensor], ours: Callable[[], Tensor]
) -> tuple[dict[str, Any], float]:
    """Both ways forward and backward, and the largest relative difference of features and gradients."""
    text = encoder.model.text
    pull = torch.randn(plain().shape, generator=torch.Generator().manual_seed(1))

    def run(features: Callable[[], Tensor]) -> list[Tensor]:
        text.zero_grad()
        found = features()
        (found * pull).sum().backward()
        return [found.detach(), *(p.grad.clone() for p in text.parameters() if p.grad is not None)]

    reference, fast = run(plain), run(ours)
    worst = max(_difference(a, b) for a, b in zip(reference, fast, strict=True) if float(a.norm()) > 1e-6)
    return {"plain": partial(run, plain), "ours": partial(run, ours)}, worst


def text_part(sizes: Sizes) -> Result:
    """Forward and backward of both text branches."""
    encoder, captions = build(sizes.text_encoder), read_captions(sizes.batch)
    batch = text_rows(captions.texts, encoder.tokenizer)
    input_ids, num_prefix = batch.texts()

    def ours() -> Tensor:
        return torch.nn.functional.normalize(encode_text(encoder.model.text, input_ids, num_prefix), dim=-1)

    ways, worst = _text_ways(encoder, lambda: plain_text(encoder.model, batch), ours)
    timed = alternate(ways, sizes.repeats, warmup=0)
    full, short = (float(b.num_tokens.float().mean()) for b in (batch.full, batch.augmented))
    lines = table(f"Text of both branches, forward and backward: {sizes.text_encoder}", timed, "captions", sizes.batch)
    said = f"{sizes.batch} captions of {captions.source}, {full:.0f} tokens on average, {short:.0f} in the augmented branch."
    lines += [f"{said} Largest relative difference of features and gradients: {worst:.1e}.", ""]
    return Result(lines, {"ratio": timed["plain"].median / timed["ours"].median, "difference": worst})


def full_part(sizes: Sizes) -> Result:
    """The same where no caption has any padding: what the shortcuts cost when there is nothing to save."""
    encoder = build(sizes.step_encoder)
    ids, prefix = exact_batch(sizes.full_batch, CONTEXT_LENGTH, encoder.model.text.vocab_size)
    text = encoder.model.text
    ways, worst = _text_ways(
        encoder, lambda: torch.cat([text(half) for half in ids.chunk(2)]), lambda: encode_text(text, ids, prefix)
    )
    timed = alternate(ways, sizes.repeats)
    lines = table(f"Captions of 248 tokens, nothing to save: {sizes.step_encoder}", timed, "captions", sizes.full_batch)
    lines += [f"Largest relative difference of features and gradients: {worst:.1e}.", ""]
    return Result(lines, {"ratio": timed["plain"].median / timed["ours"].median, "difference": worst})


def step_part(sizes: Sizes) -> Result:
    """A whole training step from picture files and captions to moved weights; and with the image tower frozen."""
    captions = read_captions(sizes.batch)
    with tempfile.TemporaryDirectory() as folder:
        files = make_large_pictures(Path(folder), sizes.batch, (640, 480))
        ways, clocks, losses = {}, {}, {}
        for name in ("plain", "ours", "ours, image tower frozen"):
            clocks[name], losses[name] = Clock(), []
            ways[name] = partial(
                _step, _Stepper.make(sizes.step_encoder, name, files, captions.texts), clocks[name], losses[name]
            )
        timed = alternate(ways, sizes.repeats)
    lines = table(f"A whole training step: {sizes.step_encoder}", timed, "pairs", sizes.batch)
    lines += share_table("Share of each part", clocks)
    first = [values[0] for values in losses.values()]
    lines += [
        f"Losses of the first step: {', '.join(f'{v:.6f}' for v in first)}. Pictures: JPEGs of 640 x 480, decoded here.",
        "",
    ]
    ratios = {name: timed["plain"].median / way.median for name, way in timed.items()}
    return Result(lines, {"ratios": ratios, "losses": first})


@dataclass
class _Stepper:
    encoder: Encoder
    plain: bool
    optimizer: torch.optim.Optimizer
    pixels: Callable[[int], Tensor]
    captions: list[str]
    ready: Tensor | None

    @staticmethod
    def make(source: str, name: str, files: list[Path], captions: list[str]) -> "_Stepper":
        frozen, plain = name.endswith("frozen"), name == "plain"
        encoder = build(source, "text" if frozen else "both")
        preprocess, side = encoder.preprocess, encoder.model.visual.image_size[0]
        optimizer = make_optimizer(encoder.model.parameters(), 1e-6, 0.01, (0.9, 0.999))

        def pixels(i: int) -> Tensor:
            return preprocess(open_picture(files[i], None if plain else 2 * side))

        ready = None
        if frozen:  # what the cache on disk holds: the features of pictures decoded whole
            encoder.model.eval()
            ready = image_features(encoder, [open_picture(file) for file in files]).clone()  # no inference tensor
            encoder.model.train()
        return _Stepper(encoder, plain, optimizer, pixels, captions, ready)


def _step(stepper: _Stepper, clock: Clock, losses: list[float]) -> None:
    """One step, its backward pass cut where features meet the loss, so that each part's time is its own."""
    clock.start(PARTS)
    clip = stepper.encoder.model
    stepper.optimizer.zero_grad()
    with clock.part("decode"):
        pixels = (
            None
            if stepper.ready is not None
            else torch.stack([stepper.pixels(i) for i in range(len(stepper.captions))])
        )
    with clock.part("text"):
        batch: Batch = text_rows(stepper.captions, stepper.encoder.tokenizer)
        text = plain_text(clip, batch) if stepper.plain else _packed_text(clip, batch)
    with clock.part("image"):
        image = stepper.ready if pixels is None else torch.nn.functional.normalize(clip.visual(pixels), dim=-1)
    with clock.part("loss"):
        leaves = [features.detach().requires_grad_() for features in (image, text)]
        loss = two_branch_loss(*leaves, clip.logit_scale.exp(), RULE).total
        loss.backward()
    with clock.part("text"):
        text.backward(leaves[1].grad)
    with clock.part("image") if image.requires_grad else nullcontext():
        if image.requires_grad:
            image.backward(leaves[0].grad)
    with clock.part("optimiser"):
        stepper.optimizer.step()
    losses.append(float(loss.detach()))


def _packed_text(clip: Any, batch: Batch) -> Tensor:
    return torch.nn.functional.normalize(encode_text(clip.text, *batch.texts()), dim=-1)


def cached_part(sizes: Sizes) -> Result:
    """Gradient caching: equal to the plain step, and the memory of a batch and of one eight times as large."""
    small, large = sizes.cached_batches
    pixels, ids, prefix = tiny_inputs(large)
    gradients = []
    for chunk in (0, sizes.chunk):
        model = tiny_model()
        if chunk:
            cached = cached_features(model, split_pairs(pixels, ids, prefix, chunk))
            image, text, scale = cached.image, cached.text, cached.logit_scale
        else:
            cached, (image, text, scale) = None, model(pixels, ids, prefix)
        two_branch_loss(image, text, scale, replace(RULE, pca_batch=64)).total.backward()
        if cached:
            cached.backward(model)
        gradients.append([p.grad for p in model.parameters()])
    worst = max(_difference(a, b) for a, b in zip(*gradients, strict=True) if float(a.norm()) > 1e-6)
    peaks = {n: _peak_of(n, sizes.chunk) for n in (small, large)}
    growth = peaks[large] / peaks[small] - 1
    lines = [f"### Gradient caching in chunks of {sizes.chunk}", "", "| batch | peak memory, MB |", "|---|---|"]
    lines += [f"| {n:,} | {peak / 1e6:,.0f} |" for n, peak in peaks.items()]
    lines += [
        "",
        f"From {small:,} to {large:,}: {growth:+.1%}. At {large:,} the gradients equal the plain step's to {worst:.1e}.",
        "",
    ]
    return Result(lines, {"difference": worst, "growth": growth})


def _peak_of(batch: int, chunk: int) -> float:
    script = Path(__file__).with_name("cached_memory.py")
    command = [sys.executable, str(script), str(batch), str(chunk)]
    return float(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def data_part(sizes: Sizes) -> Result:
    """Reading packed shards against the original large JPEGs, and what it does to the features."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_large_pictures(folder / "large", sizes.pictures, sizes.picture_size)
        said = pack(folder / "large", folder / "packed", workers=1)
        originals, packed = open_pairs(folder / "large"), open_pairs(folder / "packed")
        encoder = build(sizes.step_encoder)
        encoder.model.eval()
        preprocess, side = encoder.preprocess, encoder.model.visual.image_size[0]
        reads = {
            "originals, decoded whole": lambda i: preprocess(originals.open(i)),
            "originals, decoded at reduced scale": PixelValues(originals, preprocess, side),
            "packed shards": PixelValues(packed, preprocess, side),
        }
        rows = range(sizes.pictures)
        timed = alternate({n: partial(_read_all, read, rows) for n, read in reads.items()}, sizes.repeats, warmup=0)
        compared = range(min(32, sizes.pictures))
        features = {n: _features(encoder, read, compared) for n, read in reads.items()}
        pixels = {n: torch.stack([read(i) for i in compared]) for n, read in reads.items()}
    lines = table(
        f"Reading {sizes.pictures} JPEGs of {sizes.picture_size[0]} x {sizes.picture_size[1]}, one core",
        timed,
        "pictures",
        sizes.pictures,
    )
    whole, *others = features
    different = features[whole] @ features[whole].T
    different = different[~torch.eye(len(different), dtype=torch.bool)]
    for other in others:
        cosine = (features[whole] * features[other]).sum(1)
        gap = (pixels[whole] - pixels[other]).abs().mean() / pixels[whole].std()
        lines.append(
            f"- {other}: cosine of features with the whole decode {float(cosine.mean()):.5f} in the mean, "
            f"{float(cosine.min()):.5f} at least; mean difference of a pixel {float(gap):.3f} of their deviation."
        )
    lines += [
        f"- For scale: two different pictures have {float(different.mean()):.5f} on average ({sizes.step_encoder}).",
        f"- {said.split(': ', 1)[1]}",
        "",
    ]
    ratio = timed[whole].median / timed[others[-1]].median
    cosines = {n: float((features[whole] * features[n]).sum(1).min()) for n in others}
    return Result(lines, {"ratio": ratio, "cosines": cosines, "different": float(different.mean())})


def _read_all(read: Callable[[int], Tensor], rows: range) -> None:
    for i in rows:
        read(i)


@torch.inference_mode()
def _features(encoder: Encoder, read: Callable[[int], Tensor], rows: range) -> Tensor:
    parts = [encoder.model.visual(read(i)[None]) for i in rows]
    return torch.nn.functional.normalize(torch.cat(parts).float(), dim=-1)
