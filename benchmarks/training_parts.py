"""What `training_speed.py` measures of text and data, one function a part; each returns Markdown and its figures."""

import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from plain_recipe import CONTEXT_LENGTH, exact_batch, make_large_pictures, plain_branches, read_captions, text_rows
from timing import alternate, ratio_in_processor_time, table
from torch import Tensor

from debias_diffusion.data.collate import Batch, PixelValues
from debias_diffusion.data.pack import pack
from debias_diffusion.data.pairs import open_pairs
from debias_diffusion.encoders.checkpoint import load_encoder
from debias_diffusion.encoders.encoder import Encoder
from debias_diffusion.encoders.text_forward import encode_text
from debias_diffusion.training.optim import choose_towers
from debias_diffusion.training.step import LossRule

RULE = LossRule(short_weight=0.1, pca_dim=8, pca_batch=0, pca_renormalise=False, label_smoothing=0.0)
ALLOWED = 1e-5
NOTHING = 1e-6
"""Gradients whose whole norm is below this are rounding alone: no relative difference is taken of them."""


@dataclass(frozen=True)
class Sizes:
    """How large each part is; `SMALL` is for tests of the benchmark itself and says nothing of speed."""

    text_encoder: str = "ViT-L-14:random"
    step_encoder: str = "ViT-B-16:random"
    growth_encoder: str = "ViT-B-32-laion:random"
    batch: int = 32
    full_batch: int = 8
    cached_batches: tuple[int, int] = (256, 2048)
    chunk: int = 64
    step_picture_size: tuple[int, int] = (640, 480)
    pictures: int = 200
    picture_size: tuple[int, int] = (1500, 2250)
    repeats: int = 5


SMALL = Sizes(*["miniature:random"] * 3, 12, 4, (16, 32), 8, (120, 90), 6, (300, 450), 1)


@dataclass(frozen=True)
class Result:
    """Markdown lines and the figures that a claim can be checked against."""

    lines: list[str]
    figures: dict[str, Any]


def build(source: str) -> Encoder:
    """The encoder at 248 tokens, in training mode."""
    torch.manual_seed(0)
    encoder = load_encoder(source).stretched(CONTEXT_LENGTH, in_place=True)
    choose_towers(encoder.model, "both")
    encoder.model.train()
    return encoder


def worst_difference(reference: Sequence[Tensor], found: Sequence[Tensor]) -> float:
    """The largest relative difference of a tensor from its reference, by their norms."""
    pairs = [(a, b) for a, b in zip(reference, found, strict=True) if float(a.norm()) > NOTHING]
    return max(float((a - b).norm() / a.norm()) for a, b in pairs)


def packed_branches(clip: Any, batch: Batch) -> Iterator[Tensor]:
    """Our way: unit-norm text features (2 * batch, dim) of both branches, in one piece."""
    yield torch.nn.functional.normalize(encode_text(clip.text, *batch.texts()), dim=-1)


def _text_ways(
    encoder: Encoder, rows: int, plain: Callable[[], Iterable[Tensor]], ours: Callable[[], Iterable[Tensor]]
) -> tuple[dict[str, Callable[[], object]], float]:
    """Both ways forward and backward, and the largest relative difference of features and gradients.

    A way gives its features piece by piece, and each goes backward before the next is computed, so no more than one
    piece's graph is held.
    """
    text = encoder.model.text
    pull = torch.randn(rows, text.output_dim, generator=torch.Generator().manual_seed(1))

    def run(pieces: Callable[[], Iterable[Tensor]]) -> Tensor:
        text.zero_grad()
        found: list[Tensor] = []
        for piece in pieces():
            start = sum(map(len, found))
            (piece * pull[start : start + len(piece)]).sum().backward()
            found.append(piece.detach())
        return torch.cat(found)

    def with_gradients(pieces: Callable[[], Iterable[Tensor]]) -> list[Tensor]:
        return [run(pieces), *(p.grad for p in text.parameters() if p.grad is not None)]

    worst = worst_difference(with_gradients(plain), with_gradients(ours))
    return {"plain": partial(run, plain), "ours": partial(run, ours)}, worst


def text_part(sizes: Sizes) -> Result:
    """Forward and backward of both text branches."""
    encoder, captions = build(sizes.text_encoder), read_captions(sizes.batch)
    clip, batch = encoder.model, text_rows(captions.texts, encoder.tokenizer)
    ways, worst = _text_ways(
        encoder, 2 * sizes.batch, partial(plain_branches, clip, batch), partial(packed_branches, clip, batch)
    )
    timed = alternate(ways, sizes.repeats, warmup=0)
    full, short = (float(b.num_tokens.float().mean()) for b in (batch.full, batch.augmented))
    lines = table(f"Text of both branches, forward and backward: {sizes.text_encoder}", timed, "captions", sizes.batch)
    said = f"{sizes.batch} captions of {captions.source}, {full:.0f} tokens on average, {short:.0f} in the augmented branch."
    lines += [f"{said} Largest relative difference of features and gradients: {worst:.1e}.", ""]
    return Result(lines, {"ratio": timed["plain"].median / timed["ours"].median, "difference": worst})


def full_part(sizes: Sizes) -> Result:
    """The same where no caption has any padding: what the shortcuts cost when there is nothing to save.

    A few per cent are to be told apart, so there are twice as many repeats and one.
    """
    encoder = build(sizes.step_encoder)
    text, rows = encoder.model.text, 2 * sizes.full_batch
    ids, prefix = exact_batch(sizes.full_batch, CONTEXT_LENGTH, text.vocab_size)
    ways, worst = _text_ways(
        encoder, rows, lambda: (text(half) for half in ids.chunk(2)), lambda: [encode_text(text, ids, prefix)]
    )
    timed = alternate(ways, 2 * sizes.repeats + 1, warmup=0)
    ratio, processor = timed["plain"].median / timed["ours"].median, ratio_in_processor_time(timed, "ours")
    lines = table(f"Captions of 248 tokens, nothing to save: {sizes.step_encoder}", timed, "captions", sizes.full_batch)
    lines += [
        f"Against the plain way ours takes {1 / ratio - 1:+.1%} of its time, {1 / processor - 1:+.1%} in processor time "
        f"({2 * sizes.repeats + 1} runs). Largest relative difference of features and gradients: {worst:.1e}.",
        "",
    ]
    return Result(lines, {"ratio": ratio, "processor_ratio": processor, "difference": worst})


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
