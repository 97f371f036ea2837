"""Position sensitivity: how recall depends on how deep in the caption, in tokens, its first sentence stands.

The first sentence of a long caption usually sums the picture up. Moved to place 2, 3, ... it says the same, so an
encoder that reads the whole caption should find the same picture; one that skims loses it with depth (paper: robustness
experiments, of which moving it to place 4 is the one case published).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

import torch
from torch import Tensor

from debias_diffusion.captions.perturb import parse_perturbation
from debias_diffusion.captions.sentences import join_sentences, split_sentences
from debias_diffusion.data.retrieval_set import RetrievalSet
from debias_diffusion.encoders import features
from debias_diffusion.encoders.encoder import Encoder
from debias_diffusion.encoders.tokens import Tokenizer
from debias_diffusion.evaluation.retrieval import recall_at, retrieval_ranks

BIN_TOKENS = 25
"""Width of a depth bin: about the length of one sentence."""

MIN_QUERIES = 100
"""Queries a bin needs to count as best or worst: at a recall of 50 % their standard error is 5 points."""


@dataclass(frozen=True)
class PlaceRecall:
    """t2i_recall@1 (percent) of all captions with the first sentence at `place`; `num_shorter` have fewer sentences
    than that and keep it last."""

    place: int
    t2i_recall: float
    num_shorter: int


@dataclass(frozen=True)
class DepthBin:
    """t2i_recall@1 (percent) where the first sentence starts at token position `start` ... `stop` - 1, SOT being 0.

    Each caption counts once for each place it has. Deep bins hold long captions only, so `unmoved_recall` gives the
    same captions with the first sentence in front, weighted alike: the difference is the price of depth.
    """

    start: int
    stop: int
    num_queries: int
    t2i_recall: float
    unmoved_recall: float


@dataclass(frozen=True)
class DepthCurve:
    """What `position_sensitivity` measured: by place in the caption, and by depth in tokens.

    `num_cut` queries had their first sentence start behind the context; they count by place, and in no bin. Only bins
    of `min_queries` or more are named worst or best; None where there is no such bin.
    """

    places: tuple[PlaceRecall, ...]
    bins: tuple[DepthBin, ...]
    min_queries: int
    num_cut: int

    @property
    def worst(self) -> DepthBin | None:
        """The bin of lowest recall, the shallowest of equals."""
        return min(self._counted(), key=lambda depth: depth.t2i_recall, default=None)

    @property
    def best(self) -> DepthBin | None:
        """The bin of highest recall, the shallowest of equals."""
        return max(self._counted(), key=lambda depth: depth.t2i_recall, default=None)

    @property
    def worst_recall(self) -> float | None:
        """The encoder's one number: t2i_recall@1 (percent) at its worst depth."""
        return self.worst.t2i_recall if self.worst else None

    @property
    def spread(self) -> float | None:
        """Points of recall between the best and the worst depth; 0 is an encoder that depth does not touch."""
        return self.best.t2i_recall - self.worst.t2i_recall if self.best and self.worst else None

    def _counted(self) -> list[DepthBin]:
        return [depth for depth in self.bins if depth.num_queries >= self.min_queries]


def position_sensitivity(
    encoder: Encoder,
    retrieval_set: RetrievalSet,
    *,
    max_places: int = 8,
    image_features: Tensor | None = None,
    splitter: str = "nupunkt",
    min_queries: int = MIN_QUERIES,
    progress: bool = False,
) -> DepthCurve:
    """Recall of every caption with its first sentence moved to place 1 ... `max_places` (`move_first_to_K`).

    A caption of fewer sentences keeps it last: it then counts as such for the place, but not again for the depth.
    `image_features` (images, dim) are the set's pictures in order, encoded here where None. Raises ValueError for
    numbers below 1, an unknown splitter, and image features of another number, and `BadPicture` for a picture that
    cannot be read.
    """
    if max_places < 1 or min_queries < 1:
        raise ValueError(f"max_places is {max_places}, min_queries {min_queries}; expected at least 1 each")
    if image_features is None:
        pictures = (picture.open() for picture in retrieval_set.pictures)
        image_features = features.image_features(encoder, pictures, progress=progress)
    if len(image_features) != len(retrieval_set.pictures):
        raise ValueError(
            f"image_features have {len(image_features)} rows, {retrieval_set.name} has {len(retrieval_set.pictures)} "
            "pictures; pass one row a picture, in order"
        )
    queries = _queries(encoder.tokenizer, retrieval_set.captions, max_places, splitter)
    text_features = features.text_features(encoder, [query.caption for query in queries], progress=progress)
    owners = torch.tensor([retrieval_set.image_of_caption[query.index] for query in queries])
    ranks = retrieval_ranks(image_features.cpu(), text_features, owners).t2i
    depths = torch.tensor([query.depth for query in queries])
    return DepthCurve(
        places=_by_place(queries, ranks, max_places),
        bins=_by_depth(queries, ranks, depths, encoder.context_length),
        min_queries=min_queries,
        num_cut=int((depths >= encoder.context_length - 1).sum()),
    )


@dataclass(frozen=True)
class _Query:
    index: int  # of the caption in the set
    place: int
    caption: str  # rewritten
    depth: int  # token position at which the moved sentence starts
    is_last: bool  # there is no place behind


def _queries(tokenizer: Tokenizer, captions: Sequence[str], max_places: int, splitter: str) -> list[_Query]:
    """Each caption's different rewrites, by place and ascending."""
    moves = [parse_perturbation(f"move_first_to_{place}").apply for place in range(1, max_places + 1)]
    unused = Random(0)  # moving draws nothing
    queries = []
    for index, caption in enumerate(captions):
        sentences = split_sentences(caption, splitter)
        num_places = max(1, min(len(sentences), max_places))
        depth = 1
        for place, move in enumerate(moves[:num_places], 1):
            if place > 1:
                depth += _num_tokens_before(tokenizer, sentences[place - 1], sentences[0], splitter)
            rewritten = join_sentences(move(sentences, unused), splitter)
            queries.append(_Query(index, place, rewritten, depth, place == num_places))
    return queries


def _num_tokens_before(tokenizer: Tokenizer, sentence: str, following: str, splitter: str) -> int:
    """Tokens that `sentence` puts in front of `following`, what joins them included."""
    both = tokenizer.encode(join_sentences([sentence, following], splitter))
    return len(both) - len(tokenizer.encode(following))


def _by_place(queries: Sequence[_Query], ranks: Tensor, max_places: int) -> tuple[PlaceRecall, ...]:
    rows = []
    for place in range(1, max_places + 1):
        shorter = [q.is_last and q.place < place for q in queries]
        chosen = torch.tensor([q.place == place or last for q, last in zip(queries, shorter, strict=True)])
        rows.append(PlaceRecall(place, recall_at(ranks[chosen], 1), sum(shorter)))
    return tuple(rows)


def _by_depth(queries: Sequence[_Query], ranks: Tensor, depths: Tensor, context_length: int) -> tuple[DepthBin, ...]:
    unmoved_row = {query.index: row for row, query in enumerate(queries) if query.place == 1}
    unmoved = ranks[[unmoved_row[query.index] for query in queries]]
    last = context_length - 1  # EOT stands there at the latest
    rows = []
    for start in range(0, last, BIN_TOKENS):
        stop = min(start + BIN_TOKENS, last)
        chosen = (depths >= start) & (depths < stop)
        if num_queries := int(chosen.sum()):
            recalls = recall_at(ranks[chosen], 1), recall_at(unmoved[chosen], 1)
            rows.append(DepthBin(max(start, 1), stop, num_queries, *recalls))
    return tuple(rows)
