"""The miniature world: scenes of coloured shapes, their pictures and their captions, all drawn from a seed.

A scene has six to nine shapes on a 3x3 grid, two of them large, before a background of one of many colours. Its long
caption opens with a summary sentence that names the large shapes and the background; one sentence for each small shape
follows. The summary alone nearly identifies the picture within a training batch: the shortcut that long-caption
fine-tuning falls for. Everything depends on (seed, split, index) alone, so no picture needs to be stored.
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

import numpy as np
from PIL import Image, ImageDraw

from debias_diffusion.data import wording

SIZE = 64
"""Side of a rendered picture in pixels."""

COLOURS: dict[str, tuple[int, int, int]] = {
    "red": (224, 32, 32),
    "orange": (245, 140, 20),
    "yellow": (250, 225, 40),
    "green": (40, 160, 60),
    "cyan": (60, 210, 225),
    "blue": (40, 80, 220),
    "purple": (140, 50, 180),
    "pink": (250, 130, 190),
    "white": (250, 250, 250),
    "black": (16, 16, 16),
}
BACKGROUNDS: dict[str, tuple[int, int, int]] = {
    "grey": (128, 128, 128),
    "charcoal": (64, 66, 70),
    "silver": (190, 192, 196),
    "beige": (222, 206, 170),
    "tan": (186, 148, 104),
    "chocolate": (92, 56, 32),
    "maroon": (104, 20, 44),
    "olive": (112, 112, 32),
    "mint": (170, 226, 190),
    "teal": (16, 110, 112),
    "navy": (20, 28, 84),
    "lavender": (190, 176, 232),
    "peach": (250, 196, 160),
    "salmon": (232, 124, 110),
    "indigo": (72, 48, 140),
    "sky": (150, 196, 240),
}
SHAPES = ("circle", "square", "triangle", "diamond", "star", "cross", "ring")
PLACES = tuple((row, column) for row in range(3) for column in range(3))
LARGE_RADIUS, SMALL_RADIUS = 10, 6
_MIN_CONTRAST = 90.0
"""Least RGB distance between a shape and its background, so that every shape can be seen."""


@dataclass(frozen=True)
class Thing:
    """One shape of a scene; `place` is (row, column) on the 3x3 grid, from the top left."""

    shape: str
    colour: str
    place: tuple[int, int]
    large: bool


@dataclass(frozen=True)
class Scene:
    """The large shapes first, then the small ones in the order in which the long caption tells them."""

    things: tuple[Thing, ...]
    background: str

    @property
    def large(self) -> tuple[Thing, ...]:
        return tuple(t for t in self.things if t.large)

    @property
    def small(self) -> tuple[Thing, ...]:
        return tuple(t for t in self.things if not t.large)


def scene_rng(*key: int | str) -> random.Random:
    """A random stream that depends on the key alone, the same in every process and Python version."""
    return random.Random("/".join(map(str, key)))


def make_scene(seed: int, split: str, index: int, things: tuple[int, int] = (6, 9)) -> Scene:
    """Scene number `index` of a split; splits ("train", "test", ...) and seeds share no random stream.

    `things` is the least and the greatest number of shapes.
    """
    rng = scene_rng("scene", seed, split, index)
    background = rng.choice(list(BACKGROUNDS))
    colours = [c for c in COLOURS if _distance(COLOURS[c], BACKGROUNDS[background]) >= _MIN_CONTRAST]
    places = rng.sample(PLACES, rng.randint(*things))
    drawn = tuple(Thing(rng.choice(SHAPES), rng.choice(colours), place, i < 2) for i, place in enumerate(places))
    return Scene(drawn, background)


def render(scene: Scene) -> Image.Image:
    """The scene's picture, RGB, SIZE x SIZE pixels, with smooth edges."""
    canvas = np.empty((SIZE, SIZE, 3), np.float32)
    canvas[:] = BACKGROUNDS[scene.background]
    for thing in scene.things:
        mask = shape_mask(thing.shape, LARGE_RADIUS if thing.large else SMALL_RADIUS)
        half = mask.shape[0] // 2
        y, x = (round(SIZE * (2 * i + 1) / 6) for i in thing.place)
        window = canvas[y - half : y + half, x - half : x + half]
        window += mask[:, :, None] * (np.asarray(COLOURS[thing.colour], np.float32) - window)
    return Image.fromarray(canvas.round().astype(np.uint8))


def long_caption(scene: Scene, rng: random.Random) -> str:
    """Summary sentence, then one sentence a small shape: 100 to 200 tokens."""
    return " ".join([summary_sentence(scene, rng), *(detail_sentence(t, rng) for t in scene.small)])


def summary_sentence(scene: Scene, rng: random.Random) -> str:
    """One sentence that names the large shapes, their places and the background."""
    first, second = scene.large
    return rng.choice(wording.SUMMARIES).format(
        a=_name(first), pa=wording.place(first.place, rng), b=_name(second), pb=wording.place(second.place, rng),
        background=scene.background,
    )  # fmt: skip


def detail_sentence(thing: Thing, rng: random.Random, *, terse: bool = False) -> str:
    """One sentence that names a small shape and its place; terse ones leave out all ornament."""
    templates = wording.TERSE if terse else wording.DETAILS
    sentence = rng.choice(templates).format(
        shape=thing.shape, colour=thing.colour, place=wording.place(thing.place, rng), small=rng.choice(wording.SMALL)
    )
    if not terse and rng.random() < 0.5:
        sentence = sentence.removesuffix(".") + rng.choice(wording.TAILS) + "."
    return sentence


def short_caption(scene: Scene, rng: random.Random) -> str:
    """A caption of one short sentence, as people write them: the large shapes and the background."""
    first, second = scene.large
    return rng.choice(wording.SHORT).format(a=_name(first), b=_name(second), background=scene.background)


def pretraining_caption(scene: Scene, rng: random.Random) -> str:
    """A caption of the kind the miniature's base model learns from: it always fits 77 tokens.

    Three in ten are summaries or short captions; the rest describe two to four small shapes in any order.
    """
    kind = rng.random()
    if kind < 0.2:
        return summary_sentence(scene, rng)
    if kind < 0.3:
        return short_caption(scene, rng)
    things = rng.sample(scene.small, rng.randint(2, 4))
    terse = len(things) == 4 or rng.random() < 0.3
    sentences = [detail_sentence(t, rng, terse=terse) for t in things]
    return " ".join(
        sentences if len(things) < 3 or terse else [s.partition(",")[0].removesuffix(".") + "." for s in sentences]
    )


def all_phrases() -> Iterator[str]:
    """Text in which every word of the world occurs: what the miniature's vocabulary is made from."""
    yield from (*wording.SUMMARIES, *wording.DETAILS, *wording.TERSE, *wording.TAILS, *wording.SHORT, *wording.SMALL)
    yield from (*COLOURS, *BACKGROUNDS, *SHAPES)
    yield from (phrase for phrases in wording.PLACES.values() for phrase in phrases)


def _name(thing: Thing) -> str:
    return f"large {thing.colour} {thing.shape}"


def _distance(a: tuple[int, int, int], b: tuple[int, int, int]) -> float:
    return float(np.linalg.norm(np.subtract(a, b)))


@cache
def shape_mask(shape: str, radius: int) -> np.ndarray:
    """Coverage of each pixel by the shape, in [0, 1]; drawn eight times larger and averaged down."""
    scale, half = 8, radius + 1
    picture = Image.new("L", (2 * half * scale,) * 2, 0)
    draw = ImageDraw.Draw(picture)
    c, r = half * scale, radius * scale
    box = (c - r, c - r, c + r, c + r)
    if shape == "circle":
        draw.ellipse(box, fill=255)
    elif shape == "ring":
        draw.ellipse(box, fill=255)
        draw.ellipse((c - r * 0.55, c - r * 0.55, c + r * 0.55, c + r * 0.55), fill=0)
    elif shape == "square":
        side = r * 0.85
        draw.rectangle((c - side, c - side, c + side, c + side), fill=255)
    elif shape == "cross":
        arm = r * 0.34
        draw.rectangle((c - arm, c - r, c + arm, c + r), fill=255)
        draw.rectangle((c - r, c - arm, c + r, c + arm), fill=255)
    else:
        draw.polygon([(c + r * x, c + r * y) for x, y in _POLYGONS[shape]], fill=255)
    small = picture.resize((2 * half,) * 2, Image.Resampling.BOX)
    return np.asarray(small, np.float32) / 255


def _star() -> list[tuple[float, float]]:
    angles = [(i * 36 - 90, 1.0 if i % 2 == 0 else 0.42) for i in range(10)]
    return [(k * float(np.cos(np.radians(a))), k * float(np.sin(np.radians(a)))) for a, k in angles]


_POLYGONS: dict[str, list[tuple[float, float]]] = {
    "triangle": [(0.0, -0.95), (0.95, 0.8), (-0.95, 0.8)],
    "diamond": [(0.0, -1.0), (0.8, 0.0), (0.0, 1.0), (-0.8, 0.0)],
    "star": _star(),
}
