"""Packed training data: pictures resized once, in tar files that are read row by row through an index."""

import hashlib
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from PIL import Image

from debias_diffusion.data.packed import PackedStrings
from debias_diffusion.data.pictures import BadPicture, decode_picture
from debias_diffusion.data.text_files import json_document, json_field

INDEX_FILE = "index.json"
SETTINGS_FILE = "pack.json"
FORMAT = "debias-diffusion shards 1"


def is_packed(folder: Path) -> bool:
    """Whether `debias-diffusion pack` has written, or begun to write, this folder."""
    return (folder / SETTINGS_FILE).is_file()


def shard_name(number: int) -> str:
    """The stem of a shard's .tar and .json.

    >>> shard_name(7)
    'shard-00007'
    """
    return f"shard-{number:05d}"


def picture_digest(data: bytes) -> str:
    """A hash of a packed picture's bytes: its identity, and what its reading is checked against."""
    return hashlib.blake2b(data, digest_size=12).hexdigest()


@dataclass(frozen=True)
class PackedPicture:
    """One picture of a shard, identified by its content wherever the shard lies."""

    shard: Path
    row: int
    offset: int
    size: int
    digest: str

    @property
    def identity(self) -> str:
        return f"packed|{self.digest}"

    def open(self, min_side: int | None = None) -> Image.Image:
        """Returns the picture as RGB; raises `BadPicture` where its bytes are not those that were packed."""
        name = self.shard / f"{self.row:08d}.jpg"
        try:
            with self.shard.open("rb") as file:
                file.seek(self.offset)
                data = file.read(self.size)
        except FileNotFoundError as error:
            raise BadPicture(name, "its shard is missing") from error
        if picture_digest(data) != self.digest:
            raise BadPicture(name, "its bytes are not those that were packed; the shard is damaged")
        return decode_picture(data, name, min_side)


@dataclass(frozen=True)
class Shards:
    """The rows of a packed folder, in their order; any row is read at once, by any number of processes."""

    folder: Path
    keys: Sequence[str]
    captions: Sequence[str]
    left_out: dict[str, int]
    _digests: Sequence[str] = field(repr=False)
    _places: tuple[Sequence[int], ...] = field(repr=False)

    def __len__(self) -> int:
        return len(self.captions)

    def picture(self, index: int) -> PackedPicture:
        """Returns row `index`'s picture."""
        shard, row, offset, size = (column[index] for column in self._places)
        return PackedPicture(self.folder / f"{shard_name(shard)}.tar", row, offset, size, self._digests[index])

    def open(self, index: int, min_side: int | None = None) -> Image.Image:
        """Returns row `index`'s picture as RGB; raises `BadPicture` where it cannot be read."""
        return self.picture(index).open(min_side)

    @staticmethod
    def read(folder: Path) -> "Shards":
        """Returns the rows of a folder that `debias-diffusion pack` has finished; raises ValueError for any other."""
        if not (folder / INDEX_FILE).is_file():
            raise ValueError(f"{folder} is not packed to the end; run the same `debias-diffusion pack` command again")
        index = json_document(folder / INDEX_FILE)
        where = str(folder / INDEX_FILE)
        if json_field(index, "format", str, where) != FORMAT:
            raise ValueError(f"{where}: the format is {index['format']!r}, expected {FORMAT!r}; pack the data again")
        keys, captions, digests = PackedStrings(), PackedStrings(), PackedStrings()
        places = array("I"), array("Q"), array("Q"), array("Q")
        for number in range(json_field(index, "shards", int, where)):
            for row, key, caption, offset, size, digest in _rows(folder, number):
                keys.append(key)
                captions.append(caption)
                digests.append(digest)
                for column, value in zip(places, (number, row, offset, size), strict=True):
                    column.append(value)
        if len(keys) != json_field(index, "rows", int, where):
            raise ValueError(f"{where}: it names {index['rows']:,} rows, the shards hold {len(keys):,}; pack again")
        if not len(keys):
            raise ValueError(f"{folder}: holds no picture with a caption; {folder / 'left_out.jsonl'} says why")
        return Shards(folder, keys, captions, dict(index["left_out"]), digests, places)


def read_shard_index(folder: Path, number: int) -> dict[str, Any] | None:
    """What was written beside shard `number`, or None where the shard is not whole."""
    stem = folder / shard_name(number)
    if not stem.with_suffix(".json").is_file() or not stem.with_suffix(".tar").is_file():
        return None
    index: dict[str, Any] = json_document(stem.with_suffix(".json"))
    if stem.with_suffix(".tar").stat().st_size != json_field(index, "bytes", int, f"{stem}.json"):
        return None
    return index


def _rows(folder: Path, number: int) -> Sequence[list[Any]]:
    index = read_shard_index(folder, number)
    if index is None:
        raise ValueError(
            f"{folder / shard_name(number)}: the .tar or .json is missing or cut short; delete both and {INDEX_FILE}, "
            "and run the same `debias-diffusion pack` command again"
        )
    return json_field(index, "rows", list, f"{folder / shard_name(number)}.json")
