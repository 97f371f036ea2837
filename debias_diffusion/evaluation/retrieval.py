"""Ranks, recall and rank statistics of image-text retrieval, without ever holding the texts x images matrix.

A naive evaluation sorts every row of the score matrix. A rank needs no sorting: it is the number of candidates ahead of
the positive, so each tile of scores is computed once, counted along both of its sides, and overwritten by the next.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

MAX_CHUNK = 65536


@dataclass(frozen=True)
class Ranks:
    """Where each query's positive stands, counted from 0, as int64 tensors on the CPU.

    `t2i` (N_text,) is the rank of each text's own image among all images. `i2t` (N_image,) is the rank of each image's
    best-ranked text among all texts, and -1 for an image that has no text.
    """

    t2i: Tensor
    i2t: Tensor


def retrieval_ranks(
    image_features: Tensor, text_features: Tensor, image_of_text: Tensor, *, chunk: int = 1024
) -> Ranks:
    """Returns the rank of every text's image and of every image's best text, as a stable descending sort gives them.

    Shapes: `image_features` (N_image, dim), `text_features` (N_text, dim), both L2-normalised for cosine ranks;
    `image_of_text` (N_text,) holds the row of each text's image, in any order, any number of texts for an image. Scores
    are float32 products of features converted to float32, on the features' device and with the float32 matmul precision
    set there; autocast is switched off. Of two candidates with equal scores the lower index is ahead. Memory beyond the
    inputs: one float32 copy of the images and about three tiles of `chunk` x `chunk` float32 scores. Texts grouped by
    image are the fastest order.

    Raises ValueError for shapes, indices or a chunk that do not fit, and for features that hold NaN or infinity.
    Metric conventions of the paper's protocol: rank by cosine, image queries take their best-ranked caption.
    """
    _check_inputs(image_features, text_features, image_of_text, chunk)
    device = text_features.device
    num_images, num_texts = len(image_features), len(text_features)
    with torch.no_grad(), torch.autocast(device.type, enabled=False):
        tiles = _ScoreTiles(image_features, text_features, image_of_text.to(device), chunk)
        order, owner = tiles.order, tiles.owner
        positive = tiles.positive_scores()
        # Per image: the best score among its texts, and the first text that reaches it. Infinity is never exceeded.
        best = torch.full((num_images,), torch.inf, device=device)
        best = best.scatter_reduce(0, owner, positive, "amax", include_self=False)
        candidates = torch.where(positive == best[owner], order, num_texts)
        best_text = torch.full((num_images,), num_texts, device=device).scatter_reduce(0, owner, candidates, "amin")

        text_ranks = torch.zeros(num_texts, dtype=torch.int64, device=device)
        image_ranks = torch.zeros(num_images, dtype=torch.int64, device=device)
        image_index = torch.arange(num_images, device=device)
        marks = torch.empty_like(tiles.product)
        for texts, images, scores in tiles.walk(only_positives=False):
            rows, columns = tiles.pairs(texts, images)
            # A positive keeps the score it was first given, so it is never counted ahead of itself.
            scores[rows, columns] = positive[texts][rows]
            buffer = marks[: scores.shape[0], : scores.shape[1]]
            text_ranks[texts] += _count_ahead(scores, positive[texts], owner[texts], image_index[images], buffer)
            image_ranks[images] += _count_ahead(scores.T, best[images], best_text[images], order[texts], buffer.T)
        t2i = torch.empty_like(text_ranks)
        t2i[order] = text_ranks
        i2t = image_ranks.masked_fill(best_text == num_texts, -1)
    return Ranks(t2i.cpu(), i2t.cpu())


def hits_at(ranks: Tensor, k: int) -> Tensor:
    """Returns (N_counted,) booleans: whether each query's positive is among the first `k`; queries at -1 are left out.

    >>> hits_at(torch.tensor([0, 3, -1, 1]), 2).tolist()
    [True, False, True]
    """
    if k < 1:
        raise ValueError(f"k is {k}, expected at least 1: recall@1 asks for the first place")
    return _counted(ranks) < k


def recall_at(ranks: Tensor, k: int) -> float:
    """Returns the percentage (0-100) of queries whose positive is among the first `k`; queries at -1 are left out.

    `ranks` (N,) is one direction of `Ranks`, counted from 0.

    >>> recall_at(torch.tensor([0, 3, -1, 1, 9]), 2)
    50.0
    """
    return 100 * hits_at(ranks, k).double().mean().item()


def retrieval_metrics(ranks: Ranks) -> dict[str, float]:
    """Returns recall@1, @5 and @10 in percent (0-100), and mean and median rank counted from 1, for both directions.

    Keys: `t2i_recall@1` ... `t2i_mean_rank`, `t2i_median_rank`, then the same for `i2t`.
    """
    metrics: dict[str, float] = {}
    for direction, found in (("t2i", ranks.t2i), ("i2t", ranks.i2t)):
        places = _counted(found).double() + 1
        metrics |= {f"{direction}_recall@{k}": recall_at(found, k) for k in (1, 5, 10)}
        metrics[f"{direction}_mean_rank"] = places.mean().item()
        ordered = places.sort().values
        metrics[f"{direction}_median_rank"] = (ordered[(len(places) - 1) // 2] + ordered[len(places) // 2]).item() / 2
    return metrics


class _ScoreTiles:
    """The score matrix as a walk over tiles, texts grouped by image so that positives lie in a narrow band.

    Every tile is a product of one and the same shape (zero rows fill the last ones): equal features then score equally
    wherever they stand, and a true tie stays a tie.
    """

    def __init__(self, image_features: Tensor, text_features: Tensor, image_of_text: Tensor, chunk: int) -> None:
        self.order = image_of_text.long().argsort(stable=True)  # text index at each grouped position
        self.owner = image_of_text.long()[self.order]  # image index at each grouped position, ascending
        self.num_images, self.num_texts = len(image_features), len(text_features)
        self.image_side, self.text_side = min(chunk, self.num_images), min(chunk, self.num_texts)
        self.images = pad(image_features.float(), (0, 0, 0, -self.num_images % self.image_side))
        self.text_features = text_features
        self.product = self.images.new_empty(self.text_side, self.image_side)

    def walk(self, *, only_positives: bool) -> Iterator[tuple[slice, slice, Tensor]]:
        """Yields (grouped texts, images, scores) tile by tile; the scores are overwritten by the next tile."""
        for first_text in range(0, self.num_texts, self.text_side):
            texts = slice(first_text, min(first_text + self.text_side, self.num_texts))
            rows = self.text_features[self.order[texts]].float()
            rows = pad(rows, (0, 0, 0, self.text_side - len(rows)))
            first_owner, last_owner = int(self.owner[texts][0]), int(self.owner[texts][-1])
            for first_image in range(0, self.num_images, self.image_side):
                images = slice(first_image, min(first_image + self.image_side, self.num_images))
                if only_positives and (images.stop <= first_owner or images.start > last_owner):
                    continue
                torch.mm(rows, self.images[first_image : first_image + self.image_side].T, out=self.product)
                yield texts, images, self.product[: texts.stop - texts.start, : images.stop - images.start]

    def pairs(self, texts: slice, images: slice) -> tuple[Tensor, Tensor]:
        """Returns the (row, column) places of the positives inside a tile."""
        owner = self.owner[texts]
        rows = ((owner >= images.start) & (owner < images.stop)).nonzero().squeeze(1)
        return rows, owner[rows] - images.start

    def positive_scores(self) -> Tensor:
        """Returns (N_text,) scores of the grouped texts with their own images, from the tiles that hold them."""
        positive = self.images.new_empty(self.num_texts)
        for texts, images, scores in self.walk(only_positives=True):
            rows, columns = self.pairs(texts, images)
            positive[texts][rows] = scores[rows, columns]
        return positive


def _count_ahead(scores: Tensor, threshold: Tensor, own: Tensor, candidates: Tensor, marks: Tensor) -> Tensor:
    """Returns (query,) counts of the candidates ahead of each query's positive in `scores` (query, candidate).

    `threshold` (query,) is the positive's score and `own` (query,) its index, `candidates` (candidate,) the indices of
    the columns, `marks` a buffer shaped like `scores`. A tied candidate is ahead where its index is lower.
    """
    threshold = threshold[:, None]
    first_own, last_own = own.aminmax()
    first_candidate, last_candidate = candidates.aminmax()
    # Marks are float because a product with ones sums them far faster than a sum of booleans, and just as exactly.
    ones = marks.new_ones(marks.shape[1])
    if last_candidate < first_own:  # every tie is ahead
        return (torch.ge(scores, threshold, out=marks) @ ones).long()
    ahead = (torch.gt(scores, threshold, out=marks) @ ones).long()
    if first_candidate > last_own:  # every tie is behind
        return ahead
    tied = scores == threshold
    if tied.any():
        ahead += (tied & (candidates < own[:, None])).sum(1)
    return ahead


def _counted(ranks: Tensor) -> Tensor:
    counted = ranks[ranks >= 0]
    if len(counted) == 0:
        raise ValueError(f"no query left to score among {len(ranks)} ranks: none has a positive; check image_of_text")
    return counted


def _check_inputs(image_features: Tensor, text_features: Tensor, image_of_text: Tensor, chunk: int) -> None:
    if not 1 <= chunk <= MAX_CHUNK:
        raise ValueError(f"chunk is {chunk}, expected 1 to {MAX_CHUNK}: the side of a square tile of scores")
    image_shape, text_shape = tuple(image_features.shape), tuple(text_features.shape)
    if len(image_shape) != 2 or len(text_shape) != 2 or image_shape[1] != text_shape[1]:
        raise ValueError(
            f"image_features are {image_shape} and text_features {text_shape}, expected (N_image, dim) and "
            "(N_text, dim) of one width; pass features of the same encoder, one row a picture or caption"
        )
    if 0 in image_shape + text_shape:
        raise ValueError(f"nothing to rank: image_features are {image_shape}, text_features {text_shape}")
    if image_features.device != text_features.device:
        raise ValueError(
            f"image_features are on {image_features.device}, text_features on {text_features.device}; "
            "move both to one device"
        )
    whole = not (image_of_text.is_floating_point() or image_of_text.is_complex() or image_of_text.dtype == torch.bool)
    if tuple(image_of_text.shape) != text_shape[:1] or not whole:
        raise ValueError(
            f"image_of_text is {tuple(image_of_text.shape)} of {image_of_text.dtype}, expected one integer for each of "
            f"the {text_shape[0]} texts: the row of its image"
        )
    low, high = (int(value) for value in image_of_text.aminmax())
    if low < 0 or high >= image_shape[0]:
        raise ValueError(
            f"image_of_text runs from {low} to {high}, expected 0 to {image_shape[0] - 1}, the rows of image_features"
        )
    for name, features in (("image_features", image_features), ("text_features", text_features)):
        # A finite norm rules out NaN, infinity, and values so large that products would overflow float32.
        norms = torch.linalg.vector_norm(features.detach(), dim=1, dtype=torch.float32)
        broken = (~norms.isfinite()).nonzero().flatten()
        if len(broken):
            raise ValueError(
                f"{name} hold NaN, infinity or values too large for float32 in {len(broken)} of {len(features)} rows, "
                f"the first in row {int(broken[0])}; compute those features again, in float32 if they were in half"
            )
