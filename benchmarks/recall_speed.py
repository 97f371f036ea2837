"""Times the ranks of a full image-text benchmark against the per-query sort of earlier evaluation scripts.

    python benchmarks/recall_speed.py                                      # Flickr30k's size: minutes on two cores
    python benchmarks/recall_speed.py --images 4000 --texts 20000          # seconds

Random unit features; ours ranks both directions in full. The sorting loop (one argsort a query, then a search for the
positive in the order) is timed on `--slice` queries a direction, each against all candidates, and extrapolated linearly
in queries. It is given its scores as matrix products of whole slices and sorts each query once, where earlier scripts
sort once for each k. Two sorts are timed: torch's, which those scripts call, and numpy's vectorised quicksort, which is
faster on AVX-512 and does not keep ties in order. Wall time is what a user waits on an idle machine; processor
time (summed over threads) is the one to read when other jobs run beside this.
"""

import argparse
import resource
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from debias_diffusion.evaluation.retrieval import retrieval_ranks

Sort = Callable[[Tensor], np.ndarray]


@dataclass(frozen=True)
class Loop:
    """Seconds of a sorting loop over both directions, extrapolated from a slice, and the ranks it found there."""

    seconds: float
    processor_seconds: float
    t2i: Tensor
    i2t: Tensor


def unit_features(rows: int, dim: int, seed: int) -> Tensor:
    """Returns (rows, dim) random float32 features of length 1."""
    features = torch.randn(rows, dim, generator=torch.Generator().manual_seed(seed))
    return features.div_(features.norm(dim=1, keepdim=True))


def torch_sort(row: Tensor) -> np.ndarray:
    """Returns candidates from best to worst by torch, the sort earlier scripts call."""
    return row.argsort(descending=True).numpy()


def numpy_sort(row: Tensor) -> np.ndarray:
    """Returns candidates from best to worst by numpy's unstable, vectorised sort."""
    return np.argsort(row.numpy())[::-1]


def sorting_loop(images: Tensor, texts: Tensor, image_of_text: Tensor, slice_size: int, sort: Sort) -> Loop:
    """Returns what sorting every query's scores would take, from the first `slice_size` queries of each direction."""
    owner = image_of_text.numpy()
    num_texts, num_images = min(slice_size, len(texts)), min(slice_size, len(images))
    t2i, i2t = [], []

    start = np.array([time.perf_counter(), time.process_time()])
    scores = texts[:num_texts] @ images.T
    for text in range(num_texts):
        order = sort(scores[text])
        t2i.append(int(np.where(order == owner[text])[0][0]))
    middle = np.array([time.perf_counter(), time.process_time()])
    scores = images[:num_images] @ texts.T
    for image in range(num_images):
        order = sort(scores[image])
        i2t.append(min(int(np.where(order == text)[0][0]) for text in np.where(owner == image)[0]))
    end = np.array([time.perf_counter(), time.process_time()])

    spent = (middle - start) / num_texts * len(texts) + (end - middle) / num_images * len(images)
    return Loop(float(spent[0]), float(spent[1]), torch.tensor(t2i), torch.tensor(i2t))


def peak_gib() -> float:
    """Returns the most resident memory this process has held so far, in GiB."""
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**30


def main() -> None:
    """Prints a markdown table of seconds, ratios and memory."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, default=31014, help="number of images (default: Flickr30k's 31014)")
    parser.add_argument("--texts", type=int, default=155070, help="number of texts, at least as many (default: 155070)")
    parser.add_argument("--dim", type=int, default=512, help="feature width (default: 512)")
    parser.add_argument("--slice", type=int, default=512, help="queries a direction given to the loop (default: 512)")
    parser.add_argument("--chunk", type=int, default=1024, help="side of a tile of scores (default: 1024)")
    parser.add_argument("--threads", type=int, default=2, help="torch threads, for both sides (default: 2)")
    arguments = parser.parse_args()
    if not 1 <= arguments.images <= arguments.texts:
        parser.error(f"--images is {arguments.images}, --texts {arguments.texts}: expected 1 <= images <= texts")
    if arguments.slice < 1:
        parser.error(f"--slice is {arguments.slice}, expected at least 1")
    torch.set_num_threads(arguments.threads)

    images = unit_features(arguments.images, arguments.dim, seed=0)
    texts = unit_features(arguments.texts, arguments.dim, seed=1)
    image_of_text = torch.arange(arguments.texts) * arguments.images // arguments.texts
    retrieval_ranks(images[:100], texts[:100], torch.arange(100).clamp(max=len(images[:100]) - 1))  # warm-up

    before = peak_gib()
    start, start_processor = time.perf_counter(), time.process_time()
    ranks = retrieval_ranks(images, texts, image_of_text, chunk=arguments.chunk)
    seconds, processor_seconds = time.perf_counter() - start, time.process_time() - start_processor
    after = peak_gib()

    print(f"{arguments.images:,} images x {arguments.texts:,} texts, width {arguments.dim}, float32, ", end="")
    print(f"{arguments.threads} threads; loops timed on {arguments.slice:,} queries a direction and extrapolated\n")
    print("| method, both directions | wall, s | ours is faster by | processor, s | ours is faster by |")
    print("|---|---|---|---|---|")
    print(f"| retrieval_ranks | {seconds:.1f} | 1x | {processor_seconds:.1f} | 1x |")
    agreement = []
    for name, sort in (("argsort loop, torch", torch_sort), ("argsort loop, numpy quicksort", numpy_sort)):
        loop = sorting_loop(images, texts, image_of_text, arguments.slice, sort)
        wall = f"{loop.seconds:.1f} | {loop.seconds / seconds:.1f}x"
        processor = f"{loop.processor_seconds:.1f} | {loop.processor_seconds / processor_seconds:.1f}x"
        print(f"| {name} | {wall} | {processor} |")
        same = [loop.t2i == ranks.t2i[: len(loop.t2i)], loop.i2t == ranks.i2t[: len(loop.i2t)]]
        agreement.append(f"{name}: {100 * torch.cat(same).double().mean().item():.2f} %")
    print(f"\nPeak resident memory {after:.2f} GiB ({before:.2f} GiB before ranking: the features and torch itself).")
    print(f"Equal ranks on the slice: {', '.join(agreement)}.")


if __name__ == "__main__":
    main()
