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
_AGAIN = "delete it with the shards after it and index.json, and pack again (a copy: copy them all again)"


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


class ShardRows:
    """What the indexes of a set's shards say, row by row, in columns: strings in one buffer, places in plain numbers."""

    def __init__(self) -> None:
        self.keys, self.captions, self.digests = PackedStrings(), PackedStrings(), PackedStrings()
        self._places = array("I"), array("Q"), array("Q"), array("Q")

    def __len__(self) -> int:
        return len(self.keys)

    def extend(self, shard: int, rows: Sequence[Any], where: str, size: int) -> None:
        """Adds the rows of shard `shard`, which is `size` bytes long; raises ValueError, opening with `where`, for a row
        that is none or whose picture lies outside the shard."""
        for row in rows:
            try:
                number, key, caption, offset, length, digest = row
                if not caption.strip():
                    raise ValueError("its caption is blank")
                if not 0 <= offset <= offset + length <= size:
                    raise ValueError(f"bytes {offset} to {offset + length} of a shard of {size}")
                for column, text in zip((self.keys, self.captions, self.digests), (key, caption, digest), strict=True):
                    column.append(text)
                for place, value in zip(self._places, (shard, number, offset, length), strict=True):
                    place.append(value)
            except (TypeError, ValueError, AttributeError, OverflowError) as error:
                raise ValueError(
                    f"{where}: {str(row)[:80]} is no row of an index ({error}); expected [number, key, caption, offset, "
                    "size, digest] within the shard"
                ) from error

    def place(self, index: int) -> tuple[int, int, int, int]:
        """Row `index`'s shard, its number there, and its picture's offset and size in bytes."""
        shard, number, offset, size = (column[index] for column in self._places)
        return shard, number, offset, size


class OfShardRows:
    """The columns that every set of `ShardRows` shows, wherever its shards lie."""

    rows: ShardRows

    @property
    def keys(self) -> Sequence[str]:
        return self.rows.keys

    @property
    def captions(self) -> Sequence[str]:
        return self.rows.captions

    def __len__(self) -> int:
        return len(self.rows)


@dataclass(frozen=True)
class Shards(OfShardRows):
    """The rows of a packed folder, in their order; any row is read at once, by any number of processes."""

    folder: Path
    rows: ShardRows = field(repr=False)
    left_out: dict[str, int]

    def picture(self, index: int) -> PackedPicture:
        """Returns row `index`'s picture."""
        shard, number, offset, size = self.rows.place(index)
        return PackedPicture(self.folder / f"{shard_name(shard)}.tar", number, offset, size, self.rows.digests[index])

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
        check_format(index, where)
        rows = ShardRows()
        begin: int | None = 0
        for number in range(json_field(index, "shards", int, where)):
            beside, shard = f"{folder / shard_name(number)}.json", _whole_index(folder, number)
            rows.extend(number, json_field(shard, "rows", list, beside), beside, shard["bytes"])
            begin = chained_next(shard, begin, beside)
        if len(rows) != json_field(index, "rows", int, where):
            raise ValueError(f"{where}: it names {index['rows']:,} rows, the shards hold {len(rows):,}; pack again")
        if not len(rows):
            raise ValueError(f"{folder}: holds no picture with a caption; {folder / 'left_out.jsonl'} says why")
        return Shards(folder, rows, left_out_counts(index, where))


def check_format(index: Any, where: str) -> None:
    """Raises ValueError, opening with `where`, for an index that this version did not write."""
    if json_field(index, "format", str, where) != FORMAT:
        raise ValueError(f"{where}: the format is {index['format']!r}, expected {FORMAT!r}; pack the data again")


def read_shard_index(folder: Path, number: int) -> dict[str, Any] | None:
    """What was written beside shard `number`, or None where the shard is not whole."""
    stem = folder / shard_name(number)
    if not stem.with_suffix(".json").is_file() or not stem.with_suffix(".tar").is_file():
        return None
    index: dict[str, Any] = json_document(stem.with_suffix(".json"))
    if stem.with_suffix(".tar").stat().st_size != json_field(index, "bytes", int, f"{stem}.json"):
        return None
    return index


def shard_next(index: dict[str, Any], begin: int, where: str) -> int:
    """Returns the number of the row after a shard's last, where the shard begins with row `begin`.

    Raises ValueError, opening with `where`, for an index that begins elsewhere, or whose rows and rows left out are fewer
    or more than it says: each would lose rows or bring some twice.
    """
    first, after = json_field(index, "first", int, where), json_field(index, "next", int, where)
    rows, left_out = json_field(index, "rows", list, where), json_field(index, "left_out", list, where)
    if not all(isinstance(row, list) and list(map(type, row)) == [str, str] for row in left_out):
        raise ValueError(f"{where}: 'left_out' holds other things than [key, reason]; {_AGAIN}")
    if first != begin:
        raise ValueError(f"{where}: its first row is {first:,}, expected {begin:,}; shards were swapped, so {_AGAIN}")
    if len(rows) + len(left_out) != after - first:
        raise ValueError(
            f"{where}: {len(rows):,} rows and {len(left_out):,} left out, but it goes from row {first:,} to {after:,}; "
            f"it is damaged, so {_AGAIN}"
        )
    return after


def chained_next(index: dict[str, Any], begin: int | None, where: str) -> int | None:
    """As `shard_next`, on reading: returns None, and checks nothing more, for a set that another program wrote without
    numbering what its shards begin and end with."""
    if begin is None or (begin == 0 and not index.keys() & {"first", "next"}):
        return None
    return shard_next(index, begin, where)


def left_out_counts(index: dict[str, Any], where: str) -> dict[str, int]:
    """Returns how many rows an index leaves out for each reason; raises ValueError, opening with `where`, for what is no
    such count."""
    counts = json_field(index, "left_out", dict, where)
    for reason in counts:
        json_field(counts, reason, int, f"{where}, 'left_out'")
    return counts


def _whole_index(folder: Path, number: int) -> dict[str, Any]:
    index = read_shard_index(folder, number)
    if index is None:
        raise ValueError(
            f"{folder / shard_name(number)}: the .tar or .json is missing or cut short; delete both and {INDEX_FILE}, "
            "and run the same `debias-diffusion pack` command again"
        )
    return index
