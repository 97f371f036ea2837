"""Files of a folder anywhere that fsspec reaches: ranges read many at a time, tried again where a connection drops."""

import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
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


class RemoteFolder:
    """The files directly in the folder at `url`.

    Nothing is asked of it before the first read. Worker processes may share it: each makes connections of its own,
    since an open one does not survive a fork. Every method raises `StreamError` naming the file for what stays unread
    after all tries, and ValueError for a url that fsspec has no file system for.
    """

    def __init__(self, url: str) -> None:
        if "\0" in url:
            raise ValueError(f"{url!r} holds a NUL character, which no address has; write the url without it")
        root, path = _after_scheme(url)
        self.url = root + (path.rstrip("/") or path[:1])
        self._opened: _Connection | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {"url": self.url, "_opened": None}

    def url_of(self, name: str) -> str:
        """The url of one of its files."""
        return self.url + ("" if self.url.endswith("/") else "/") + name

    def names(self) -> list[str]:
        """The names of the files, sorted."""
        _, files, root = self._connection()
        entries = self._tried(lambda: files.ls(root, detail=True), self.url)
        return sorted(entry["name"].rsplit("/", 1)[-1] for entry in entries if entry["type"] == "file")

    def size(self, name: str) -> int:
        """The file's bytes."""
        files, path = self._file(name)
        size = self._tried(lambda: files.info(path)["size"], self.url_of(name))
        if not isinstance(size, int):
            raise StreamError(f"{self.url_of(name)}: the server does not say how large it is; name another way to it")
        return size

    def mark(self, name: str) -> str:
        """What changes once the file does, as far as its file system tells: for keeping what was read from it."""
        files, path = self._file(name)
        return f"{self.size(name)}|{self._tried(lambda: files.ukey(path), self.url_of(name))}"

    def read(self, name: str) -> bytes:
        """The file's whole content."""
        return self.passed(name, lambda file: file.read())

    def passed(self, name: str, reading: Callable[[Any], Result]) -> Result:
        """What `reading` returns for the opened file, read from front to back; begun anew where the connection drops."""
        files, path = self._file(name)

        def attempt() -> Result:
            with files.open(path, "rb") as file:
                return reading(file)

        return self._tried(attempt, self.url_of(name))

    def ranges(self, spans: Sequence[Span]) -> Iterator[bytes]:
        """Yields the bytes of each span in order, several asked for at a time."""
        return self.together(self._range, spans)

    def together(self, do: Callable[[Item], Result], items: Sequence[Item]) -> Iterator[Result]:
        """Yields `do(item)` in order, so many at a time that no more than these are held; Ctrl-C waits for none."""
        self._connection()
        for start in range(0, len(items), _THREADS):
            begun = [_begun(do, item) for item in items[start : start + _THREADS]]
            for future in begun:
                yield future.result()

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

        return self._tried(attempt, f"{self.url_of(span.name)}, {span.what}")

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
        return connection.files, f"{connection.root.rstrip('/')}/{name}"

    def _connection(self) -> _Connection:
        if self._opened is None or self._opened.process != os.getpid():
            try:
                files, root = fsspec.url_to_fs(self.url)
            except (ImportError, ValueError) as error:
                raise ValueError(
                    f"{self.url}: {error}; expected a url that fsspec reaches, such as hf://datasets/OWNER/NAME/FOLDER"
                ) from error
            self._opened = _Connection(os.getpid(), files, root.rstrip("/") or root)
        return self._opened


def parent_and_name(url: str) -> tuple[str, str]:
    """Returns the url of a file's folder, and the file's name; either keeps the "://".

    >>> parent_and_name("file:///a/x.tar"), parent_and_name("memory://x.tar"), parent_and_name("file:///")
    (('file:///a/', 'x.tar'), ('memory://', 'x.tar'), ('file:///', ''))
    """
    root, path = _after_scheme(url)
    path = path.rstrip("/") or path[:1]
    at = path.rfind("/") + 1
    return root + path[:at], path[at:]


def _after_scheme(url: str) -> tuple[str, str]:
    scheme, mark, path = url.partition("://")
    return (scheme + mark, path) if mark else ("", url)


def _begun(do: Callable[[Item], Result], item: Item) -> "Future[Result]":
    """`do(item)` on a thread that ends with the process: an executor's are waited for, however long a read takes."""
    future: Future[Result] = Future()

    def work() -> None:
        try:
            future.set_result(do(item))
        except BaseException as error:  # handed on to whoever asks for the result
            future.set_exception(error)

    threading.Thread(target=work, daemon=True).start()
    return future


def _said(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
