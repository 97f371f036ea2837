"""The miniature world as data sets: endless training pairs and a fixed retrieval set, both drawn on the fly."""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

from PIL import Image

from debias_diffusion.data.retrieval_set import Entry, RetrievalSet, build_retrieval_set
from debias_diffusion.data.scenes import Scene, long_caption, make_scene, render, scene_rng, short_caption


class _Drawn(Sequence[str]):
    """A sequence whose items are made when asked for."""

    def __init__(self, length: int, make: Callable[[int], str]) -> None:
        self._length, self._make = length, make

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index):  # type: ignore[no-untyped-def]
        if isinstance(index, slice):
            return [self._make(i) for i in range(*index.indices(self._length))]
        return self._make(range(self._length)[index])


@dataclass(frozen=True)
class ScenePairs:
    """`size` training pairs of the miniature world; `caption` writes one from (scene, rng)."""

    size: int
    seed: int = 0
    split: str = "train"
    caption: Callable[..., str] = long_caption

    def __len__(self) -> int:
        return self.size

    @cached_property
    def keys(self) -> Sequence[str]:
        return _Drawn(self.size, lambda i: f"{self.split}/{self.seed}/{i}")

    @cached_property
    def captions(self) -> Sequence[str]:
        return _Drawn(self.size, self._caption)

    def open(self, index: int, min_side: int | None = None) -> Image.Image:
        """The picture of row `index`; it has one size."""
        return render(self.scene(index))

    def picture(self, index: int) -> "ScenePicture":
        """The picture of row `index` with its identity."""
        return ScenePicture(self.scene(index))

    def scene(self, index: int) -> Scene:
        """The scene of row `index`."""
        return make_scene(self.seed, self.split, index)

    def _caption(self, index: int) -> str:
        return self.caption(self.scene(index), scene_rng("caption", self.seed, self.split, index))


def short_captions(pairs: ScenePairs) -> list[str]:
    """One short caption of each pair's scene, worded apart from its long one."""
    return [short_caption(pairs.scene(i), scene_rng("short", pairs.seed, pairs.split, i)) for i in range(len(pairs))]


@dataclass(frozen=True)
class ScenePicture:
    """A picture of the miniature world, drawn when opened."""

    scene: Scene

    @cached_property
    def identity(self) -> str:
        """A hash of the pixels, so that a change of how scenes are drawn changes it too."""
        return f"scene|{hashlib.blake2b(render(self.scene).tobytes(), digest_size=16).hexdigest()}"

    def open(self) -> Image.Image:
        """The picture as RGB."""
        return render(self.scene)


def scene_retrieval_set(size: int = 1000, seed: int = 0) -> RetrievalSet:
    """The miniature world's test set: `size` unseen scenes, each with a long and a short caption of its own.

    A smaller set is the beginning of a larger one. Raises ValueError where `size` is below 1.
    """
    if size < 1:
        raise ValueError(f"the miniature retrieval set was asked for {size} pairs, expected 1 or more")
    pairs = ScenePairs(size, seed, split="test")
    entries = (
        Entry(ScenePicture(pairs.scene(i)), [caption], [short])
        for i, (caption, short) in enumerate(zip(pairs.captions, short_captions(pairs), strict=True))
    )
    protocol = f"miniature world, split test, seed {seed}, {size:,} pairs: the long caption"
    return build_retrieval_set("miniature", protocol, entries)
