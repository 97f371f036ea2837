"""A benchmark in memory: pictures, captions, which belongs to which, and what was odd about them."""

import hashlib
import os
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Protocol, runtime_checkable

from PIL import Image

from debias_diffusion.data.pictures import open_picture

_HEAD = 4096  # bytes that tell nearly all different pictures of one size apart


@runtime_checkable
class Picture(Protocol):
    """Anything that opens as an RGB picture; equal identities promise equal pixels, so features are cached by them."""

    @property
    def identity(self) -> str: ...

    def open(self) -> Image.Image: ...


@dataclass(frozen=True)
class PictureFile:
    """A picture on disk, identified by its path, size and time of change."""

    path: Path

    @property
    def identity(self) -> str:
        """The file's path, size in bytes and time of change in ns, or its path and "missing"."""
        path = os.path.abspath(self.path)
        if self.is_missing():
            return f"{path}|missing"
        stat = self.path.stat()
        return f"{path}|{stat.st_size}|{stat.st_mtime_ns}"

    def is_missing(self) -> bool:
        """Whether there is nothing at the path; what is there may still prove broken when opened."""
        return not self.path.exists()

    def open(self) -> Image.Image:
        """Returns the picture as RGB; raises `BadPicture` where it cannot be read."""
        return open_picture(self.path)


class Entry(NamedTuple):
    """One picture with its captions, as a benchmark's reader yields it; short captions go one to each caption."""

    picture: Picture
    captions: Sequence[str]
    short_captions: Sequence[str] | None = None


@dataclass(frozen=True)
class RetrievalSet:
    """Pictures and captions to be ranked against each other.

    `image_of_caption[j]` is the index of the picture that caption j belongs to; every picture has a caption at least.
    `protocol` is one line that names split, captions and variant. `counts` holds images, captions, empty_captions,
    missing_pictures, dropped_captions (those of missing pictures), pictures_without_captions, duplicate_captions and
    duplicate_pictures.
    """

    name: str
    protocol: str
    pictures: Sequence[Picture]
    captions: list[str]
    image_of_caption: list[int]
    short_captions: list[str] | None
    counts: dict[str, int]

    def __post_init__(self) -> None:
        if len(self.captions) != len(self.image_of_caption):
            raise ValueError(
                f"{self.name}: {len(self.captions)} captions but {len(self.image_of_caption)} entries of "
                "image_of_caption; expected one each"
            )
        if self.short_captions is not None and len(self.short_captions) != len(self.captions):
            raise ValueError(
                f"{self.name}: {len(self.short_captions)} short captions for {len(self.captions)} captions; "
                "expected one each, or None"
            )
        if set(self.image_of_caption) != set(range(len(self.pictures))):
            raise ValueError(
                f"{self.name}: image_of_caption must name each of the {len(self.pictures)} pictures, and no other"
            )

    def open(self, index: int) -> Image.Image:
        """Returns picture `index` as RGB; raises `BadPicture` where it cannot be read."""
        return self.pictures[index].open()

    def picture_id(self, index: int) -> str:
        """Returns a string that changes when the picture does, for caching what was computed from it."""
        return self.pictures[index].identity


def build_retrieval_set(name: str, protocol: str, entries: Iterable[Entry]) -> RetrievalSet:
    """Returns the set made of a reader's entries, with everything odd counted and nothing hidden.

    A picture that is missing goes, with its captions; so does one without captions, which no query could find. An
    empty caption stays as the query "": the published numbers count it, so leaving it out would flatter (Urban1k has
    one). Captions lose the white space at both ends, which tokenizers drop anyway. Duplicates are counted, not merged.
    Raises `ValueError` where no picture is left.
    """
    pictures: list[Picture] = []
    captions: list[str] = []
    short_captions: list[str] = []
    image_of_caption: list[int] = []
    dropped: Counter[str] = Counter()
    first_missing = ""
    for entry in entries:
        if not entry.captions:
            dropped["pictures_without_captions"] += 1
            continue
        if isinstance(entry.picture, PictureFile) and entry.picture.is_missing():
            dropped["missing_pictures"] += 1
            dropped["dropped_captions"] += len(entry.captions)
            first_missing = first_missing or str(entry.picture.path)
            continue
        image_of_caption += [len(pictures)] * len(entry.captions)
        pictures.append(entry.picture)
        captions += [caption.strip() for caption in entry.captions]
        short_captions += [caption.strip() for caption in entry.short_captions or ()]
    if not pictures:
        looked = f", the first of them {first_missing}" if first_missing else ""
        raise ValueError(
            f"{name}: no picture is left: {dropped['missing_pictures']} missing{looked}, "
            f"{dropped['pictures_without_captions']} without captions"
        )
    counts = {
        "images": len(pictures),
        "captions": len(captions),
        "empty_captions": captions.count(""),
        "missing_pictures": dropped["missing_pictures"],
        "dropped_captions": dropped["dropped_captions"],
        "pictures_without_captions": dropped["pictures_without_captions"],
        "duplicate_captions": _num_repeats(caption for caption in captions if caption),
        "duplicate_pictures": _num_duplicate_pictures(pictures),
    }
    return RetrievalSet(name, protocol, pictures, captions, image_of_caption, short_captions or None, counts)


def _num_repeats(values: Iterable[Hashable]) -> int:
    return sum(count - 1 for count in Counter(values).values())


def _num_duplicate_pictures(pictures: Sequence[Picture]) -> int:
    """How many pictures repeat an earlier one: for files the same bytes, else the same identity.

    Files are told apart by size, then by their first bytes, and only what is left is read whole.
    """
    files = [picture.path for picture in pictures if isinstance(picture, PictureFile)]
    others = [picture.identity for picture in pictures if not isinstance(picture, PictureFile)]
    groups = _split([files], lambda path: path.stat().st_size)
    groups = _split(groups, lambda path: _digest(path, _HEAD))
    groups = _split(groups, lambda path: _digest(path, -1))
    return _num_repeats(others) + sum(len(group) - 1 for group in groups)


def _split(groups: list[list[Path]], key: Callable[[Path], Hashable]) -> list[list[Path]]:
    """The groups cut finer by `key`, those of a single file left out."""
    finer: list[list[Path]] = []
    for group in groups:
        by_key: dict[Hashable, list[Path]] = {}
        for path in group:
            by_key.setdefault(key(path), []).append(path)
        finer += [same for same in by_key.values() if len(same) > 1]
    return finer


def _digest(path: Path, num_bytes: int) -> bytes:
    with path.open("rb") as file:
        return hashlib.blake2b(file.read(num_bytes)).digest()
