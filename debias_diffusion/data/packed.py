"""Long columns kept small: strings in one buffer, and the paths made from them."""

from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import overload


class PackedStrings(Sequence[str]):
    """A growing list of strings kept in one byte buffer.

    A million captions cost their UTF-8 bytes plus 8 each instead of a Python object each, and forked worker processes
    go on sharing the memory: a list of `str` would be copied into every worker by reference counting alone. Half of a
    surrogate pair, which no tokenizer can encode, becomes "?".
    """

    def __init__(self) -> None:
        self._bytes = bytearray()
        self._ends = array("Q", [0])

    def append(self, text: str) -> None:
        """Adds one string at the end."""
        self._bytes += text.encode("utf-8", "replace")
        self._ends.append(len(self._bytes))

    def __len__(self) -> int:
        return len(self._ends) - 1

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> list[str]: ...
    def __getitem__(self, index: int | slice) -> str | list[str]:
        rows = range(len(self))[index]  # the range does negative indices, slices and the IndexError
        if isinstance(rows, range):
            return [self[row] for row in rows]
        return self._bytes[self._ends[rows] : self._ends[rows + 1]].decode("utf-8")


class PicturePaths(Sequence[Path]):
    """The paths of pictures below one folder, made when asked for."""

    def __init__(self, root: Path, names: Sequence[str]) -> None:
        self.root = root
        self.names = names

    def __len__(self) -> int:
        return len(self.names)

    @overload
    def __getitem__(self, index: int) -> Path: ...
    @overload
    def __getitem__(self, index: slice) -> list[Path]: ...
    def __getitem__(self, index: int | slice) -> Path | list[Path]:
        if isinstance(index, slice):
            return [self.root / name for name in self.names[index]]
        return self.root / self.names[index]
