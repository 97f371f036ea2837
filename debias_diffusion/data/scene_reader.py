"""A reader of the miniature world's pictures: what stands at each place, and how much of a scene a picture shows."""

from dataclasses import dataclass
from functools import cache
from itertools import product

import numpy as np
from PIL import Image

from debias_diffusion.data.scenes import (
    BACKGROUNDS,
    COLOURS,
    LARGE_RADIUS,
    PLACES,
    SHAPES,
    SIZE,
    SMALL_RADIUS,
    Scene,
    Thing,
    shape_mask,
)

_REACH = 2
"""Pixels that a shape may stand beside its place: a drawing model is not exact to the pixel."""
_LEAST_CONTRAST = 60.0
"""Colours nearer to the background are not read: such a shape is not of this world, and noise would look like one."""
_KINDS = tuple(product(SHAPES, (True, False)))
_HALF = LARGE_RADIUS + 1
_CENTRES = tuple(round(SIZE * (2 * i + 1) / 6) for i in range(3))


@dataclass(frozen=True)
class Reading:
    """What a picture shows: the nearest background, and the things found, in the order of `PLACES`."""

    background: str
    things: tuple[Thing, ...]

    def at(self, place: tuple[int, int]) -> Thing | None:
        """The thing at a place; None where it is empty."""
        return next((thing for thing in self.things if thing.place == place), None)


@dataclass(frozen=True)
class ThingScore:
    """How much of one thing of a scene a picture shows.

    `present` says that something stands at its place; `colour`, `shape` and `size` that what stands there is right in
    this, all False where the place is empty. `elsewhere` says that its colour and shape stand together at some other
    place: drawn, and misplaced.
    """

    thing: Thing
    present: bool
    colour: bool
    shape: bool
    size: bool
    elsewhere: bool

    @property
    def all_right(self) -> bool:
        """Whether the thing is drawn as told: colour, shape and size, at its place."""
        return self.colour and self.shape and self.size


def read_scene(picture: Image.Image, background: str | None = None) -> Reading:
    """What stands at each of the nine places of a picture of the miniature world, in a few milliseconds.

    The background is the nearest of the palette to the median pixel between the places; with `background` it is that
    one. At each place every shape in every colour and both sizes, up to two pixels off, is taken away from the picture:
    the one that leaves the least squares behind is what stands there, and none where all of them leave more than the
    bare background does. Raises ValueError for a picture of another size, and an unknown background.
    """
    if picture.size != (SIZE, SIZE):
        raise ValueError(f"the picture has {picture.width} x {picture.height} pixels; expected {SIZE} x {SIZE}")
    if background is not None and background not in BACKGROUNDS:
        raise ValueError(f"no background is called {background!r}; backgrounds: {', '.join(BACKGROUNDS)}")
    pixels = np.asarray(picture.convert("RGB"), np.float32)
    ground = np.median(pixels[_between()], axis=0) if background is None else np.array(BACKGROUNDS[background])
    name = background or min(BACKGROUNDS, key=lambda b: float(np.linalg.norm(ground - BACKGROUNDS[b])))
    steps = np.array(list(COLOURS.values()), np.float32) - ground.astype(np.float32)
    gains = _gains(pixels - ground.astype(np.float32), steps)
    gains[..., np.linalg.norm(steps, axis=1) < _LEAST_CONTRAST] = -np.inf
    things = []
    for place, gain in zip(PLACES, gains, strict=True):
        _, kind, colour = best = np.unravel_index(gain.argmax(), gain.shape)
        if gain[best] > 0:
            shape, is_large = _KINDS[kind]
            things.append(Thing(shape, list(COLOURS)[colour], place, is_large))
    return Reading(name, tuple(things))


def score_scene(picture: Image.Image, scene: Scene) -> list[ThingScore]:
    """One score a thing of the scene, in its order: what of it the picture shows. See `read_scene` for errors."""
    reading = read_scene(picture)
    return [score_thing(reading, thing) for thing in scene.things]


def score_thing(reading: Reading, thing: Thing) -> ThingScore:
    """What a picture, once read, shows of a thing."""
    found = reading.at(thing.place)
    return ThingScore(
        thing,
        present=found is not None,
        colour=found is not None and found.colour == thing.colour,
        shape=found is not None and found.shape == thing.shape,
        size=found is not None and found.large == thing.large,
        elsewhere=any(
            (t.colour, t.shape) == (thing.colour, thing.shape) and t.place != thing.place for t in reading.things
        ),
    )


def _gains(rest: np.ndarray, steps: np.ndarray) -> np.ndarray:
    """Squares that each drawing takes off the bare background's rest: (places, shifts, kinds, colours).

    |r|^2 - |r - m d|^2 = 2 d.(m r) - |m|^2 |d|^2, with r the rest (SIZE, SIZE, 3), m a mask and d (colours, 3) the step
    from background to colour. Pixels outside the mask play no part, so places and shifts compare with each other.
    """
    padded = np.pad(rest, ((_REACH, _REACH), (_REACH, _REACH), (0, 0)))
    windows = np.lib.stride_tricks.sliding_window_view(padded, (2 * _HALF, 2 * _HALF), axis=(0, 1))
    shifts = [(dy, dx) for dy in range(2 * _REACH + 1) for dx in range(2 * _REACH + 1)]
    rows = [[_CENTRES[row] - _HALF + dy for dy, _ in shifts] for row, _ in PLACES]
    columns = [[_CENTRES[column] - _HALF + dx for _, dx in shifts] for _, column in PLACES]
    chosen = windows[rows, columns].reshape(len(PLACES), len(shifts), 3, -1)
    masks = _masks()
    overlap = np.einsum("pscx,kx->pskc", chosen, masks, optimize=True)
    gains: np.ndarray = 2 * overlap @ steps.T - np.outer((masks**2).sum(1), (steps**2).sum(1))
    return gains


@cache
def _masks() -> np.ndarray:
    """The coverage of each kind, large or small, in the same window: (kinds, pixels)."""
    masks = np.zeros((len(_KINDS), 2 * _HALF, 2 * _HALF), np.float32)
    for row, (shape, is_large) in enumerate(_KINDS):
        mask = shape_mask(shape, LARGE_RADIUS if is_large else SMALL_RADIUS)
        edge = _HALF - len(mask) // 2
        masks[row, edge : edge + len(mask), edge : edge + len(mask)] = mask
    return masks.reshape(len(_KINDS), -1)


@cache
def _between() -> np.ndarray:
    """Pixels that no shape covers at any place: (SIZE, SIZE) of booleans."""
    covered = np.zeros((SIZE, SIZE), bool)
    union = _masks().max(axis=0).reshape(2 * _HALF, 2 * _HALF) > 0
    for row, column in PLACES:
        y, x = _CENTRES[row] - _HALF, _CENTRES[column] - _HALF
        covered[y : y + 2 * _HALF, x : x + 2 * _HALF] |= union
    return ~covered
