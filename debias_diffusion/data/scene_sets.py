"""The miniature world as data sets: endless training pairs and a fixed retrieval set, both drawn on the fly."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

from PIL import Image

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

    def open(self, index: int) -> Image.Image:
        """The picture of row `index`."""
        return render(self.scene(index))

    def scene(self, index: int) -> Scene:
        """The scene of row `index`."""
        return make_scene(self.seed, self.split, index)

    def _caption(self, index: int) -> str:
        return self.caption(self.scene(index), scene_rng("caption", self.seed, self.split, index))


def short_captions(pairs: ScenePairs) -> list[str]:
    """One short caption of each pair's scene, worded apart from its long one."""
    return [short_caption(pairs.scene(i), scene_rng("short", pairs.seed, pairs.split, i)) for i in range(len(pairs))]
