"""Training rows from shards that lie elsewhere: reads of just the bytes that a batch needs, neighbours in one."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from PIL import Image

from debias_diffusion.data.pictures import BadPicture, decode_picture
from debias_diffusion.data.shards import OfShardRows, ShardRows, picture_digest
from debias_diffusion.data.streamed_reader import RemoteFolder, Span

_GAP = 1 << 15  # bytes between two pictures that are cheaper to read than a second request: a caption and tar headers
_SPAN = 1 << 23  # bytes of one request at most


@dataclass(frozen=True)
class StreamedPicture:
    """One picture of a shard, identified by its content wherever the shard lies."""

    shards: "StreamedShards"
    row: int

    @property
    def identity(self) -> str:
        return f"packed|{self.shards.rows.digests[self.row]}"

    def open(self, min_side: int | None = None) -> Image.Image:
        """Returns the picture as RGB; raises as `StreamedShards.open` does."""
        return self.shards.open(self.row, min_side)


class StreamedShards(OfShardRows):
    """Rows of shards at a url; what they say is held in memory, pictures are read when asked for.

    `fetch` reads a batch's pictures at once, neighbours in one request; `open` alone makes a request for each.
    """

    def __init__(self, folder: RemoteFolder, names: Sequence[str], rows: ShardRows, left_out: dict[str, int]) -> None:
        self.folder, self.names, self.rows, self.left_out = folder, names, rows, left_out
        self._held: dict[int, bytes] = {}

    def picture(self, index: int) -> StreamedPicture:
        """Returns row `index`'s picture, unread."""
        return StreamedPicture(self, index)

    def fetch(self, rows: Sequence[int]) -> None:
        """Reads these rows' pictures and holds them until they are opened, or until the next call."""
        self._held = dict(self._read(rows))

    def open(self, index: int, min_side: int | None = None) -> Image.Image:
        """Returns row `index`'s picture as RGB; raises `BadPicture` where its bytes are not those of the index, and
        `StreamError` where they cannot be had."""
        data = self._held.pop(index, None)
        if data is None:
            data = dict(self._read([index]))[index]
        shard, number, _, _ = self.rows.place(index)
        name = Path(self.names[shard]) / f"{number:08d}"
        if picture_digest(data) != self.rows.digests[index]:
            raise BadPicture(name, "its bytes are not those of the index; the shard is damaged, or another one now")
        return decode_picture(data, name, min_side)

    def _read(self, rows: Sequence[int]) -> Iterator[tuple[int, bytes]]:
        parts = self._parts(rows)
        received = self.folder.ranges([span for span, _ in parts])
        for (span, brought), data in zip(parts, received, strict=True):
            for row in brought:
                _, _, offset, size = self.rows.place(row)
                yield row, data[offset - span.start : offset - span.start + size]

    def _parts(self, rows: Sequence[int]) -> list[tuple[Span, list[int]]]:
        """The fewest reads for these rows, each with the rows that it brings."""
        groups: list[list[int]] = []
        for row in sorted(rows):  # rows are numbered as they lie in the shards
            shard, _, offset, size = self.rows.place(row)
            if groups:
                first, last = self.rows.place(groups[-1][0]), self.rows.place(groups[-1][-1])
                near = first[0] == shard and 0 <= offset - (last[2] + last[3]) <= _GAP
                if near and offset + size - first[2] <= _SPAN:
                    groups[-1].append(row)
                    continue
            groups.append([row])
        return [(self._span(group), group) for group in groups]

    def _span(self, group: list[int]) -> Span:
        shard, _, start, _ = self.rows.place(group[0])
        _, _, offset, size = self.rows.place(group[-1])
        what = f"rows {group[0]} to {group[-1]}" if len(group) > 1 else f"row {group[0]}"
        return Span(self.names[shard], start, offset + size, f"{what} ({self.rows.keys[group[0]]!r})")
