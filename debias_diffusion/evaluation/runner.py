"""One encoder on one benchmark: pictures once, captions once per perturbation, then ranks and what they say."""

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import combinations
from typing import Any

import torch
from torch import Tensor

from debias_diffusion.captions.perturb import Perturbation, parse_perturbation, perturb_captions
from debias_diffusion.captions.sentences import SPLITTERS
from debias_diffusion.data.feature_cache import FeatureCache, TextFeatures
from debias_diffusion.data.retrieval_set import RetrievalSet
from debias_diffusion.encoders.encoder import Encoder
from debias_diffusion.evaluation.retrieval import Ranks, hits_at, retrieval_metrics, retrieval_ranks
from debias_diffusion.evaluation.statistics import bootstrap_interval, drop, paired_test

REFERENCE = "none"
"""The perturbation that drops are measured against: always evaluated."""

RECALLS = tuple(f"{direction}_recall@{k}" for direction in ("t2i", "i2t") for k in (1, 5, 10))
COMPARED = ("t2i_recall@1", "i2t_recall@1")


@dataclass(frozen=True)
class Result:
    """An encoder under one perturbation of a benchmark's captions.

    `metrics` are those of `retrieval_metrics`; `intervals` the 95% bootstrap interval of each recall, whole pictures
    resampled where several captions share one; `drops` the change of each recall from `none` (see `statistics.drop`).
    `truncated` captions did not fit the context, or the length the perturbation cuts to. `unreadable` pictures, by
    index in the set with the reason, were left out with their `dropped` captions. `ranks` are of the pictures and
    captions kept, `image_of_caption` tells which belong together.
    """

    metrics: dict[str, float]
    intervals: dict[str, tuple[float, float]]
    drops: dict[str, dict[str, float]]
    truncated: int
    unreadable: dict[int, str]
    dropped: int
    ranks: Ranks
    image_of_caption: Tensor

    def to_row(self) -> dict[str, Any]:
        """The JSON form: metrics by name, `intervals`, `drops` (percent null where the reference is 0), `truncated`."""
        drops = {
            metric: {unit: None if math.isnan(value) else value for unit, value in change.items()}
            for metric, change in self.drops.items()
        }
        return {**self.metrics, "intervals": self.intervals, "drops": drops, "truncated": self.truncated}


def check_perturbations(names: Sequence[str], sets: Sequence[RetrievalSet], splitter: str) -> list[Perturbation]:
    """The perturbations by name, `none` first and each once.

    Raises ValueError for an unknown name or splitter, and for `short` on a set that has no short captions.
    """
    if splitter not in SPLITTERS:
        raise ValueError(f"unknown splitter {splitter!r}; splitters: {', '.join(SPLITTERS)}")
    perturbations = [parse_perturbation(name) for name in dict.fromkeys((REFERENCE, *names))]
    for perturbation in perturbations:
        lacking = [s.name for s in sets if s.short_captions is None and perturbation.uses_short_caption]
        if lacking:
            raise ValueError(
                f"{perturbation.name!r} needs short captions, which {', '.join(lacking)} has not; leave it out"
            )
    return perturbations


def evaluate_encoder(
    encoder: Encoder,
    retrieval_set: RetrievalSet,
    perturbations: Sequence[str],
    *,
    seed: int = 0,
    splitter: str = "nupunkt",
    cache: FeatureCache | None = None,
    progress: bool = False,
) -> dict[str, Result]:
    """A `Result` for each perturbation by name, `none` first whether it was asked for or not.

    Pictures are encoded once for all of them. `seed` fixes what perturbations draw and how bootstraps resample;
    captions are perturbed before those of unreadable pictures are left out, so these change no other caption. Raises
    ValueError for an unknown perturbation or splitter, for `short` without short captions, and where no picture can be
    read.
    """
    rows = check_perturbations(perturbations, [retrieval_set], splitter)
    cache = cache or FeatureCache()
    images = cache.image_features(encoder, retrieval_set.pictures, progress=progress)
    image_of_caption = torch.tensor(readable_part(retrieval_set, images.unreadable).image_of_caption)
    kept = _kept_captions(retrieval_set, images.unreadable)
    results: dict[str, Result] = {}
    for row in rows:
        captions = _perturbed(retrieval_set, row, seed, splitter)
        texts = cache.text_features(encoder, [captions[j] for j in kept], max_tokens=row.max_tokens, progress=progress)
        ranks = retrieval_ranks(images.features.to(encoder.device), texts.features.to(encoder.device), image_of_caption)
        metrics = retrieval_metrics(ranks)
        reference = results[REFERENCE].metrics if results else metrics
        results[row.name] = Result(
            metrics=metrics,
            intervals=_intervals(ranks, image_of_caption, seed),
            drops={name: drop(reference[name], metrics[name]) for name in RECALLS},
            truncated=_num_truncated(texts, min(row.max_tokens or encoder.context_length, encoder.context_length)),
            unreadable=images.unreadable,
            dropped=len(captions) - len(kept),
            ranks=ranks,
            image_of_caption=image_of_caption,
        )
    return results


def readable_part(retrieval_set: RetrievalSet, unreadable: Collection[int]) -> RetrievalSet:
    """The set without those pictures and their captions; its `counts` stay those of the files."""
    pictures = [index for index in range(len(retrieval_set.pictures)) if index not in unreadable]
    place = {index: row for row, index in enumerate(pictures)}
    kept = _kept_captions(retrieval_set, unreadable)
    short = retrieval_set.short_captions
    return replace(
        retrieval_set,
        pictures=[retrieval_set.pictures[index] for index in pictures],
        captions=[retrieval_set.captions[j] for j in kept],
        image_of_caption=[place[retrieval_set.image_of_caption[j]] for j in kept],
        short_captions=[short[j] for j in kept] if short is not None else None,
    )


def compare_encoders(results: dict[str, dict[str, Result]], *, seed: int = 0) -> list[dict[str, Any]]:
    """The paired test of every two encoders under every perturbation both have, recall@1 in both directions.

    `results` holds each encoder's results on one and the same set. Keys of a row: a, b, perturbation, metric, and those
    of `statistics.paired_test`. P-values are of each test alone, not corrected for their number. Raises ValueError
    where two encoders were not given the same pictures.
    """
    rows = []
    for a, b in combinations(results, 2):
        for name, first in results[a].items():
            if name not in results[b]:
                continue
            second = results[b][name]
            if first.unreadable.keys() != second.unreadable.keys():
                raise ValueError(f"{a} and {b} did not see the same pictures; evaluate both again, on one set")
            for metric in COMPARED:
                hits_a, groups = _hits(first.ranks, first.image_of_caption, metric)
                hits_b, _ = _hits(second.ranks, second.image_of_caption, metric)
                test = paired_test(hits_a, hits_b, groups, seed=seed)
                rows.append({"a": a, "b": b, "perturbation": name, "metric": metric, **test})
    return rows


def _kept_captions(retrieval_set: RetrievalSet, unreadable: Collection[int]) -> list[int]:
    return [j for j, image in enumerate(retrieval_set.image_of_caption) if image not in unreadable]


@lru_cache(maxsize=64)
def _rewritten(captions: tuple[str, ...], name: str, seed: int, splitter: str) -> tuple[str, ...]:
    """Perturbed once for all encoders: splitting into sentences costs as much as reading cached features."""
    return tuple(perturb_captions(captions, name, seed=seed, splitter=splitter))


def _perturbed(retrieval_set: RetrievalSet, row: Perturbation, seed: int, splitter: str) -> tuple[str, ...]:
    captions = retrieval_set.captions
    if row.uses_short_caption and retrieval_set.short_captions is not None:
        captions = retrieval_set.short_captions
    return _rewritten(tuple(captions), row.name, seed, splitter)


def _intervals(ranks: Ranks, image_of_caption: Tensor, seed: int) -> dict[str, tuple[float, float]]:
    intervals = {}
    for metric in RECALLS:
        hits, groups = _hits(ranks, image_of_caption, metric)
        intervals[metric] = bootstrap_interval(hits, groups=groups, seed=seed)
    return intervals


def _hits(ranks: Ranks, image_of_caption: Tensor, metric: str) -> tuple[Tensor, Tensor | None]:
    """Whether each query of a recall hits, and which queries belong together: captions that share a picture."""
    direction, k = metric.split("_recall@")
    if direction == "i2t":
        return hits_at(ranks.i2t, int(k)), None
    shared = len(ranks.i2t) < len(ranks.t2i)
    return hits_at(ranks.t2i, int(k)), image_of_caption if shared else None


def _num_truncated(texts: TextFeatures, limit: int) -> int:
    return int((texts.num_tokens > limit).sum())
