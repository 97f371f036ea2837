"""Pictures made small once: each as the bytes that go into a shard, many at a time and in order."""

import io
import multiprocessing
import signal
import sys
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from PIL import Image

from debias_diffusion.data.pictures import BadPicture, decode_picture, open_picture

_JPEG = b"\xff\xd8\xff"


@dataclass(frozen=True)
class Rule:
    """How a picture is packed."""

    short_side: int
    quality: int


@dataclass(frozen=True)
class Packed:
    """A picture's new bytes and how many it had; or why it was left out."""

    data: bytes
    before: int
    fault: str = ""


def pack_picture(path: Path, rule: Rule) -> Packed:
    """Returns the picture as it goes into a shard; what cannot be read comes back with the reason."""
    try:
        data = _read(path)
        picture = decode_picture(data, path, min_side=2 * rule.short_side)
    except BadPicture as fault:
        return Packed(b"", 0, fault.reason)
    short = min(picture.size)
    if short <= rule.short_side and data.startswith(_JPEG):
        return Packed(data, len(data))
    if short > rule.short_side:
        width, height = (max(1, round(side * rule.short_side / short)) for side in picture.size)
        picture = picture.resize((width, height), Image.Resampling.LANCZOS)
    file = io.BytesIO()
    # Colour is kept as sharp as light: at this size half of it would show after the towers' own resize.
    picture.save(file, "JPEG", quality=rule.quality, subsampling="4:4:4")
    return Packed(file.getvalue(), len(data))


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        open_picture(path)  # raises what is to be said of it
        raise


def _ignore_interrupt() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the packing process decides; a worker must not die with a traceback


def packed_rows(paths: Sequence[Path], first: int, rule: Rule, workers: int) -> Iterator[tuple[int, Packed]]:
    """Yields (row, picture) in order, whatever the number of workers."""
    rows = range(first, len(paths))
    if workers == 1 or len(rows) < 2:
        yield from ((index, pack_picture(paths[index], rule)) for index in rows)
        return
    context = multiprocessing.get_context("forkserver" if sys.platform == "linux" else "spawn")
    with ProcessPoolExecutor(workers, mp_context=context, initializer=_ignore_interrupt) as pool:
        waiting: deque[tuple[int, Future[Packed]]] = deque()
        try:
            for index in rows:
                waiting.append((index, pool.submit(pack_picture, paths[index], rule)))
                if len(waiting) > 8 * workers:
                    done, future = waiting.popleft()
                    yield done, future.result()
            while waiting:
                done, future = waiting.popleft()
                yield done, future.result()
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
