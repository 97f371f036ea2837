"""How cost grows: a training step with caption length and with batch size, recall evaluation with images x texts."""

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from plain_recipe import CONTEXT_LENGTH, exact_batch
from timing import alternate
from torch import Tensor
from training_parts import RULE, Result, Sizes, build

from debias_diffusion.evaluation.retrieval import retrieval_ranks
from debias_diffusion.training.optim import make_optimizer
from debias_diffusion.training.step import TwoBranchModel, two_branch_loss

LENGTHS, LENGTHS_BATCH = (20, 60, 100, 140, 180, 220), 8
BATCHES, BATCHES_LENGTH = (4, 8, 16, 32), 100
SETS = ((1000, 5000), (2000, 10000), (4000, 20000), (8000, 40000))
SMALL_SETS = ((50, 100), (100, 200))


def growth_part(sizes: Sizes, plot: Path | None) -> Result:
    """Seconds against caption length, batch size and images x texts, each with the line through them.

    The image tower has patches of 32 pixels, a quarter of the step part's work, so that all fits into minutes.
    """
    small = sizes.batch < 32
    encoder = build(sizes.growth_encoder)
    model = TwoBranchModel(encoder.model)
    optimizer = make_optimizer(model.parameters(), 1e-6, 0.01, (0.9, 0.999))
    lengths, batches, sets = (LENGTHS[:2], BATCHES[:2], SMALL_SETS) if small else (LENGTHS, BATCHES, SETS)
    step = partial(_step, model, optimizer)
    series = {
        "tokens of both captions": _seconds(
            {2.0 * n: partial(step, *_inputs(model, LENGTHS_BATCH, n)) for n in lengths}, sizes.repeats
        ),
        "pairs in a batch": _seconds(
            {float(n): partial(step, *_inputs(model, n, BATCHES_LENGTH)) for n in batches}, sizes.repeats
        ),
        "images x texts, millions": _seconds(
            {n * m / 1e6: partial(retrieval_ranks, *_features(n, m)) for n, m in sets}, sizes.repeats
        ),
    }
    lines = [
        "### How cost grows",
        "",
        "| against | seconds | largest distance from the line | exponent |",
        "|---|---|---|---|",
    ]
    figures: dict[str, Any] = {}
    for name, points in series.items():
        gap, exponent = _line_gap(points), _exponent(points)
        told = ", ".join(f"{x:g}: {y:.3g}" for x, y in points.items())
        lines.append(f"| {name} | {told} | {gap:.1%} | {exponent:.2f} |")
        figures[name] = {"points": points, "gap": gap, "exponent": exponent}
    lines += [
        "",
        f"Both towers of {sizes.growth_encoder}: {LENGTHS_BATCH} pairs of captions of each length; {BATCHES_LENGTH} tokens a "
        f"caption in each batch. Recall: 256 dimensions, five texts an image. Medians of {sizes.repeats}; the exponent is "
        "that of the larger half.",
    ]
    if plot:
        _plot(series, plot)
        lines += ["", f"![How cost grows]({plot.name})"]
    return Result([*lines, ""], figures)


def _inputs(model: TwoBranchModel, batch: int, length: int) -> tuple[Tensor, Tensor, Tensor]:
    """Noise for pictures, and captions of exactly so many tokens."""
    side = model.clip.visual.image_size[0]
    pixels = torch.randn(batch, 3, side, side, generator=torch.Generator().manual_seed(0))
    return pixels, *exact_batch(batch, min(length, CONTEXT_LENGTH), model.clip.text.vocab_size)


def _step(
    model: TwoBranchModel, optimizer: torch.optim.Optimizer, pixels: Tensor, input_ids: Tensor, num_prefix: Tensor
) -> None:
    optimizer.zero_grad()
    two_branch_loss(*model(pixels, input_ids, num_prefix), RULE).total.backward()
    optimizer.step()


def _features(images: int, texts: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    unit = [torch.nn.functional.normalize(torch.randn(n, 256, generator=generator), dim=1) for n in (images, texts)]
    return unit[0], unit[1], torch.arange(texts) * images // texts


def _seconds(ways: Mapping[float, Callable[[], object]], repeats: int) -> dict[float, float]:
    """Medians; only the first point is run once before, for what no later run pays again."""
    next(iter(ways.values()))()
    timed = alternate({f"{x:g}": run for x, run in ways.items()}, repeats, warmup=0)
    return {x: timed[f"{x:g}"].median for x in ways}


def _line_gap(points: dict[float, float]) -> float:
    """The largest distance of a point from the straight line through all, as a share of the point."""
    x, y = np.array(list(points)), np.array(list(points.values()))
    return float(np.abs(np.polyval(np.polyfit(x, y, 1), x) / y - 1).max())


def _exponent(points: dict[float, float]) -> float:
    """The power that seconds grow with between the last half of the points; 1 is linear."""
    x, y = np.log(list(points)), np.log(list(points.values()))
    half = len(x) // 2
    return float(np.polyfit(x[half - 1 :], y[half - 1 :], 1)[0]) if len(x) > 1 else 1.0


def _plot(series: dict[str, dict[float, float]], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, len(series), figsize=(12, 3.2), layout="constrained")
    for axis, (name, points) in zip(axes, series.items(), strict=True):
        x, y = np.array(list(points)), np.array(list(points.values()))
        axis.plot(x, np.polyval(np.polyfit(x, y, 1), x), color="0.7", label="straight line")
        axis.plot(x, y, "o", color="tab:blue", label="median")
        axis.set(xlabel=name, ylabel="seconds", xlim=(0, None), ylim=(0, None))
        axis.legend(frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
    plt.close(figure)
