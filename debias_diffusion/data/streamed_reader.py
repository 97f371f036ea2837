"""Files of a folder anywhere that fsspec reaches: ranges read many at a time, tried again where a connection drops."""

import logging
import os
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple, TypeVar

import fsspec
from huggingface_hub.errors import OfflineModeIsEnabled

DELAYS = (1.0, 4.0, 15.0)
"""Seconds before each further try."""
_THREADS = 16
_FINAL = (
    FileNotFoundError,
    IsADirectoryError,
    NotADirectoryError,
    PermissionError,
    NotImplementedError,
    OfflineModeIsEnabled,
)
"""Answers, not accidents: asking again would bring the same."""

Item = TypeVar("Item")
Result = TypeVar("Result")

_log = logging.getLogger(__name__)


class StreamError(OSError):
    """What could not be read from a stream, however often it was tried; the message names the file and the rows."""

    def __str__(self) -> str:
        # A DataLoader hands a worker's error on as the text of its traceback, which ends with the message.
        return super().__str__().rsplit(f"{type(self).__name__}: ", 1)[-1].strip()


class Span(NamedTuple):
    """Bytes `start` to `stop` of the file `name`; `what` says in messages what lies there."""

    name: str
    start: int
    stop: int
    what: str


class _Connection(NamedTuple):
    process: int
    files: Any
    root: str
    threads: ThreadPoolExecutor


class RemoteFolder:
    """The files directly in the folder at `url`.

    Nothing is asked of it before the first read. Worker processes may share it: each makes connections of its own,
    since an open one does not survive a fork. Every method raises `StreamError` naming the file for what stays unread
    after all tries, and ValueError for a url that fsspec has no file system for.
    """

    def __init__(self, url: str) -> None:
        self.url = url.removesuffix("/")
        self._opened: _Connection | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {"url": self.url, "_opened": None}

    def names(self) -> list[str]:
        """The names of the files, sorted."""
        files, root = self._connection()[1:3]
        entries = self._tried(lambda: files.ls(root, detail=True), self.url)
        return sorted(entry["name"].rsplit("/", 1)[-1] for entry in entries if entry["type"] == "file")

    def size(self, name: str) -> int:
        """The file's bytes."""
        files, path = self._file(name)
        size = self._tried(lambda: files.info(path)["size"], f"{self.url}/{name}")
        if not isinstance(size, int):
            raise StreamError(f"{self.url}/{name}: the server does not say how large it is; name another way to it")
        return size

    def mark(self, name: str) -> str:
        """What changes once the file does, as far as its file system tells: for keeping what was read from it."""
        files, path = self._file(name)
        return f"{self.size(name)}|{self._tried(lambda: files.ukey(path), f'{self.url}/{name}')}"

    def read(self, name: str) -> bytes:
        """The file's whole content."""
        return self.passed(name, lambda file: file.read())

    def passed(self, name: str, reading: Callable[[Any], Result]) -> Result:
        """What `reading` returns for the opened file, read from front to back; begun anew where the connection drops."""
        files, path = self._file(name)

        def attempt() -> Result:
            with files.open(path, "rb") as file:
                return reading(file)

        return self._tried(attempt, f"{self.url}/{name}")

    def ranges(self, spans: Sequence[Span]) -> Iterator[bytes]:
        """Yields the bytes of each span in order, several asked for at a time."""
        return self.together(self._range, spans)

    def together(self, do: Callable[[Item], Result], items: Sequence[Item]) -> Iterator[Result]:
        """Yields `do(item)` in order, so many at a time that no more than these are held."""
        threads = self._connection().threads
        for start in range(0, len(items), _THREADS):
            yield from threads.map(do, items[start : start + _THREADS])

    def _range(self, span: Span) -> bytes:
        files, path = self._file(span.name)

        def attempt() -> bytes:
            if files.async_impl:
                data: bytes = files.cat_file(path, start=span.start, end=span.stop)
            else:  # their cat_file reads ahead by megabytes
                with files.open(path, "rb", cache_type="none") as file:
                    file.seek(span.start)
                    data = file.read(span.stop - span.start)
            if len(data) != span.stop - span.start:
                raise EOFError(f"{len(data):,} bytes came, {span.stop - span.start:,} were expected")
            return data

        return self._tried(attempt, f"{self.url}/{span.name}, {span.what}")

    def _tried(self, attempt: Callable[[], Result], what: str) -> Result:
        for tries, delay in enumerate((*DELAYS, None), start=1):
            try:
                return attempt()
            except ValueError:  # the content is wrong, and was read
                raise
            except _FINAL as error:
                said = "there is no such file" if isinstance(error, FileNotFoundError) else _said(error)
                raise StreamError(f"{what}: {said}") from error
            except Exception as error:  # each file system has errors of its own for a connection that dropped
                if delay is None:
                    raise StreamError(
                        f"{what}: not read in {tries} tries, the last ended with {_said(error)}; once the source answers "
                        "again, a run goes on with --resume"
                    ) from error
                _log.warning("%s: %s; trying again", what, _said(error))
                time.sleep(delay)
        raise AssertionError("the last try returns or raises")

    def _file(self, name: str) -> tuple[Any, str]:
        connection = self._connection()
        return connection.files, f"{connection.root}/{name}"

    def _connection(self) -> _Connection:
        if self._opened is None or self._opened.process != os.getpid():
            try:
                files, root = fsspec.url_to_fs(self.url)
            except (ImportError, ValueError) as error:
                raise ValueError(
                    f"{self.url}: {error}; expected a url that fsspec reaches, such as hf://datasets/OWNER/NAME/FOLDER"
                ) from error
            self._opened = _Connection(os.getpid(), files, root.rstrip("/"), ThreadPoolExecutor(_THREADS))
        return self._opened


def _said(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
