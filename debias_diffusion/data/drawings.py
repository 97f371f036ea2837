"""Scenes as drawing tasks: a caption, and the shapes it describes in the order in which it does."""

import itertools
import re
from collections.abc import Sequence
from typing import NamedTuple

from debias_diffusion.data.scenes import (
    Scene,
    Thing,
    detail_sentence,
    long_caption,
    make_scene,
    scene_rng,
    summary_sentence,
)

SHORT_ROWS = 77
FEW, MANY = (3, 5), (6, 9)
"""Least and greatest number of shapes of a scene that is described whole in 77 tokens, and of the world's own scenes."""


class Drawing(NamedTuple):
    """A drawing task: `described` are the shapes that `caption` names, in its order."""

    scene: Scene
    caption: str
    described: tuple[Thing, ...]


def few_drawing(scene: Scene, key: Sequence[int | str]) -> Drawing:
    """A scene of at most five shapes described whole: summary first, then one sentence a small shape, terse if need be.

    Nearly all fit 77 tokens.

    >>> drawing = few_drawing(make_scene(0, "doctest", 0, FEW), ("doctest", 0))
    >>> num_tokens(drawing.caption) <= 77, drawing.described == drawing.scene.things
    (True, True)
    """
    if len(scene.things) > FEW[1]:
        raise ValueError(f"the scene has {len(scene.things)} shapes; at most {FEW[1]} are described within 77 tokens")
    for terse in (False, True):
        rng = scene_rng("few", *key)
        details = [detail_sentence(t, rng, terse=terse) for t in scene.small]
        caption = " ".join([summary_sentence(scene, rng), *details])
        if num_tokens(caption) <= SHORT_ROWS:
            break
    return Drawing(scene, caption, scene.things)


def details_drawing(scene: Scene, key: Sequence[int | str]) -> Drawing:
    """Two to four small shapes described within 77 tokens, in any order and without a summary."""
    rng = scene_rng("details", *key)
    things = rng.sample(scene.small, min(len(scene.small), rng.randint(2, 4)))
    sentences = [detail_sentence(t, rng, terse=True) for t in things]
    return Drawing(scene, " ".join(sentences), tuple(things))


def long_drawing(scene: Scene, key: Sequence[int | str]) -> Drawing:
    """A scene described whole by its long caption."""
    return Drawing(scene, long_caption(scene, scene_rng("caption", *key)), scene.things)


def training_drawing(seed: int, index: int) -> Drawing:
    """Number `index` of what the miniature SDXL is trained to draw.

    Eleven in twenty are scenes of two to five shapes described whole; six are the world's long captions, which the
    77 tokens of the stock encoders cut, as SDXL's own training captions were cut; three tell of small shapes alone.
    """
    key = (seed, "draw", index)
    kind = scene_rng("kind", *key).random()
    if kind < 0.55:
        return few_drawing(make_scene(*key, things=(2, FEW[1])), key)
    if kind < 0.85:
        return long_drawing(make_scene(*key), key)
    return details_drawing(make_scene(*key, things=(4, 9)), key)


def drawing_set(count: int, seed: int = 0, split: str = "draw-test") -> list[Drawing]:
    """`count` held-out scenes of three to five shapes, described whole within 77 tokens."""
    keys = ((seed, split, i) for i in itertools.count())
    drawings = (few_drawing(make_scene(*key, things=FEW), key) for key in keys)
    return list(itertools.islice((d for d in drawings if num_tokens(d.caption) <= SHORT_ROWS), count))


def long_set(count: int, seed: int = 0, split: str = "draw-test-long") -> list[Drawing]:
    """`count` held-out scenes of six to nine shapes with captions of 100 to 200 tokens."""
    keys = ((seed, split, i) for i in itertools.count())
    drawings = (long_drawing(make_scene(*key), key) for key in keys)
    return list(itertools.islice((d for d in drawings if 100 <= num_tokens(d.caption) <= 200), count))


def num_tokens(caption: str) -> int:
    """Tokens of a caption of this world, BOS and EOS included.

    Each word and each mark is one in its vocabulary, but for "large", which is three.

    >>> num_tokens("A tiny red star in the top left.")
    11
    """
    return len(re.findall(r"[a-z]+|[^\sa-z]", caption.lower())) + 2 * caption.count("large") + 2
