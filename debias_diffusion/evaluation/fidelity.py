"""Fidelity: how much of what a prompt tells a picture shows, by the depth in tokens at which it is told.

Scenes of the miniature world are known and their pictures can be read exactly, so every described thing of every picture
is one observation: right or wrong, told so many tokens deep. Two encoders are compared on the same scenes and the same
noise. What a picture shows of a prompt by luck is measured too: by the captions of other scenes.
"""

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import numpy as np

from debias_diffusion.captions.sentences import join_sentences, split_sentences
from debias_diffusion.data import wording
from debias_diffusion.data.drawings import Drawing
from debias_diffusion.data.scene_reader import Reading, ThingScore, score_thing
from debias_diffusion.evaluation.statistics import bootstrap_interval, paired_test

BINS = ((1, 25), (26, 50), (51, 77), (78, 110), (111, 150), (151, 248))
"""Depths of a bin, first and last token: the third ends where a stock encoder stops. Deeper things are in no bin."""
WHOLE = ((1, 77), (78, 248), (1, 248))
"""What a stock encoder reads, what it never sees, and all of it."""


@dataclass(frozen=True)
class Measure:
    """A question about a thing that a prompt tells, and how the answer is read off its score."""

    label: str
    holds: Callable[[ThingScore], bool]


MEASURES: dict[str, Measure] = {
    "colour_and_place": Measure("right colour at its place", lambda score: score.colour),
    "all": Measure("right in colour, shape and size at its place", lambda score: score.all_right),
    "present": Measure("anything at its place", lambda score: score.present),
    "shape_and_place": Measure("right shape at its place", lambda score: score.shape),
    "size_and_place": Measure("right size at its place", lambda score: score.size),
    "anywhere": Measure(
        "its colour and shape together, at any place", lambda score: score.elsewhere or (score.colour and score.shape)
    ),
}
MAIN = ("colour_and_place", "all")
_CHANCE_ROUNDS = 4


@dataclass(frozen=True)
class Observation:
    """One thing told at `depth` in the prompt of scene number `scene`, as one picture shows it."""

    scene: int
    depth: int
    score: ThingScore


def told_depths(drawing: Drawing, num_tokens: Callable[[str], int]) -> list[int]:
    """The depth of each described thing: tokens of the prompt up to the end of the sentence that tells it.

    SOT and EOT are counted, as `num_tokens` does: a prompt that ended there would have so many tokens, so a depth of 77
    is the last that an encoder of 77 tokens reads. A thing's sentence is the first that names its colour, its shape and
    its place. Raises ValueError where there is none.

    >>> from debias_diffusion.data.scenes import Scene, Thing
    >>> scene = Scene((Thing("star", "red", (0, 0), False), Thing("ring", "blue", (2, 1), False)), "grey")
    >>> drawing = Drawing(scene, "A red star in the top left. In the bottom centre a tiny blue ring.", scene.things)
    >>> told_depths(drawing, lambda text: len(text.replace(".", " .").split()) + 2)
    [10, 19]
    """
    sentences = split_sentences(drawing.caption)
    ends = [num_tokens(join_sentences(sentences[: i + 1])) for i in range(len(sentences))]
    depths = []
    for thing in drawing.described:
        phrases = wording.PLACES[thing.place]
        found = (
            end
            for end, sentence in zip(ends, sentences, strict=True)
            if thing.colour in sentence and thing.shape in sentence and any(phrase in sentence for phrase in phrases)
        )
        depth = next(found, None)
        if depth is None:
            raise ValueError(
                f"no sentence tells the {thing.colour} {thing.shape} at {thing.place}: {drawing.caption!r}"
            )
        depths.append(depth)
    return depths


def observe(
    readings: Sequence[Sequence[Reading]], drawings: Sequence[Drawing], depths: Sequence[Sequence[int]]
) -> list[Observation]:
    """Every described thing of every picture; `readings` are [scene][seed], `depths` [scene][described thing]."""
    return [
        Observation(number, depth, score_thing(reading, thing))
        for number, (own, drawing, at) in enumerate(zip(readings, drawings, depths, strict=True))
        for reading in own
        for thing, depth in zip(drawing.described, at, strict=True)
    ]


def observe_chance(
    readings: Sequence[Sequence[Reading]],
    drawings: Sequence[Drawing],
    depths: Sequence[Sequence[int]],
    *,
    seed: int = 0,
) -> list[Observation]:
    """The same pictures against the captions of other scenes: what would be right if prompts were not read at all.

    The scenes stand in a random ring, and each picture is scored against the captions of the next few on it (as many
    as four), so every caption is used as often as every other, and never by its own pictures.
    """
    if len(drawings) < 2:
        raise ValueError(
            f"there are {len(drawings)} scenes; chance is measured on the captions of others: give 2 or more"
        )
    ring = random.Random(f"chance/{seed}").sample(range(len(drawings)), len(drawings))
    found = []
    for step in range(1, min(_CHANCE_ROUNDS, len(ring) - 1) + 1):
        other = {scene: ring[(i + step) % len(ring)] for i, scene in enumerate(ring)}
        order = [other[scene] for scene in range(len(ring))]
        found += observe(readings, [drawings[i] for i in order], [depths[i] for i in order])
    return found


def fidelity_rows(observations: Sequence[Observation]) -> list[dict[str, Any]]:
    """Each depth bin that holds anything, then what 77 tokens hold, what they do not, and all, as rows.

    Keys: `first`, `last` (tokens), `depth` (the mean), `observations`, `scenes`, and `measures`, by name {value, low,
    high} in percent: intervals are bootstraps of whole scenes, since the pictures of one scene are alike.
    """
    return [
        _row(first, last, inside) for first, last in (*BINS, *WHOLE) if (inside := _within(observations, first, last))
    ]


def compare_fidelity(observations: Mapping[str, Sequence[Observation]]) -> list[dict[str, Any]]:
    """Every two sets on the same things, scenes and noise: by bin and main measure, what `b` has over `a` in points.

    Rows hold `a`, `b`, `first`, `last`, `measure`, and what `statistics.paired_test` gives with scenes as groups.
    Raises ValueError where sets were not observed on the same.
    """
    rows = []
    for (a, first_set), (b, second_set) in combinations(observations.items(), 2):
        if [(o.scene, o.depth, o.score.thing) for o in first_set] != [
            (o.scene, o.depth, o.score.thing) for o in second_set
        ]:
            raise ValueError(
                f"{a} and {b} were not observed on the same things; draw the same scenes and seeds with both"
            )
        for first, last in (*BINS, *WHOLE):
            inside = _within(first_set, first, last), _within(second_set, first, last)
            for measure in MAIN if inside[0] else ():
                hits = [_hits(one, measure) for one in inside]
                scenes = np.array([o.scene for o in inside[0]])
                rows.append({"a": a, "b": b, "first": first, "last": last, "measure": measure}
                            | paired_test(hits[0], hits[1], scenes))  # fmt: skip
    return rows


def _within(observations: Sequence[Observation], first: int, last: int) -> list[Observation]:
    return [o for o in observations if first <= o.depth <= last]


def _hits(observations: Sequence[Observation], measure: str) -> np.ndarray:
    return np.array([MEASURES[measure].holds(o.score) for o in observations], np.int64)


def _row(first: int, last: int, inside: Sequence[Observation]) -> dict[str, Any]:
    scenes = np.array([o.scene for o in inside])
    measures = {}
    for name in MEASURES:
        hits = _hits(inside, name)
        low, high = bootstrap_interval(hits, groups=scenes)
        measures[name] = {"value": 100 * float(hits.mean()), "low": low, "high": high}
    depth = float(np.mean([o.depth for o in inside]))
    counts = {"observations": len(inside), "scenes": len(set(scenes.tolist()))}
    return {"first": first, "last": last, "depth": depth, **counts, "measures": measures}
