"""One comparison from request to files: the library's `compare`, watched while it draws."""

import dataclasses
import json
import queue
import threading
import time
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from PIL import Image

from apps.request import Request
from apps.studio import STOCK, Studio
from apps.watching import Step, Stopped, watched
from debias_diffusion.sdxl.generate import compare
from debias_diffusion.sdxl.prompts import TokenReport
from debias_diffusion.sdxl.record import SHEET, read_record, write_png

ARCHIVE = "comparison.zip"


@dataclass(frozen=True)
class Comparison:
    """What came of a request: the pictures of each set, a PNG a seed with its record, and all of it as one zip.

    `sheet` shows them side by side, with what was asked for inside, `tokens` is what each set's encoders read, `seconds`
    the time the drawing took.
    """

    request: Request
    folder: Path
    pictures: dict[str, list[Path]]
    tokens: dict[str, list[TokenReport]]
    seconds: float

    @property
    def sheet(self) -> Path:
        return self.folder / SHEET

    @property
    def archive(self) -> Path:
        return self.folder / ARCHIVE


def run_comparison(
    studio: Studio,
    request: Request,
    folder: Path,
    tell: Callable[[Step], None] = lambda step: None,
    stop: threading.Event | None = None,
) -> Comparison:
    """Draws a request into `folder`, and waits for its turn on the device first.

    Pixels are those of `compare` with the same sets, prompt, seeds and settings. Raises `Stopped` soon after `stop` is
    set: at the next denoising step.
    """
    stop = stop or threading.Event()
    with studio.device:
        started = time.perf_counter()
        pipes = {name: studio.find(name, request.blend) for name in request.sets}
        settings = request.settings
        pictures = compare(
            {name: watched(pipe, name, tell, stop) for name, pipe in pipes.items()},
            [request.line],
            request.seeds,
            folder,
            settings=settings,
            max_lengths={name: studio.max_length(name, settings) for name in request.sets if name == STOCK},
            progress=False,
        )
        seconds = time.perf_counter() - started
    pictures = {name: [_sign(path, name, request.blend) for path in paths] for name, paths in pictures.items()}
    tokens = {name: studio.read(name, request.line, settings) for name in request.sets}
    done = Comparison(request, folder, pictures, tokens, seconds)
    about = _about(done, studio)
    with Image.open(done.sheet) as sheet:
        sheet.load()
        rows = [[path.name for path in row] for row in zip(*pictures.values(), strict=True)]
        write_png(sheet, done.sheet, {"contact_sheet": rows} | about)
    _write_archive(done, about)
    return done


def stream_comparison(studio: Studio, request: Request, folder: Path) -> Iterator[Step | Comparison]:
    """The steps of `run_comparison` as they happen, then its result; closing the iterator stops the drawing.

    Errors of the drawing are raised here.
    """
    events: queue.Queue[Step | Comparison | BaseException] = queue.Queue()
    stop = threading.Event()

    def work() -> None:
        try:
            events.put(run_comparison(studio, request, folder, events.put, stop))
        except BaseException as error:  # all of them: whoever waits on the queue must hear of it
            events.put(error)

    threading.Thread(target=work, name="comparison", daemon=True).start()
    try:
        while True:
            event = events.get()
            if isinstance(event, Stopped):
                return
            if isinstance(event, BaseException):
                raise event
            yield event
            if isinstance(event, Comparison):
                return
    finally:
        stop.set()


def _sign(path: Path, name: str, blend: float) -> Path:
    """The picture under a name that tells its set, once it is saved away from its folder; the record tells it too."""
    signed = path.with_name(f"{name}-{path.name}")
    more: dict[str, Any] = {"set": name} | ({"blend": blend} if blend != 1 and name != STOCK else {})
    with Image.open(path) as image:
        image.load()
        write_png(image, signed, (read_record(path) or {}) | more)
    path.unlink()
    return signed


def _about(done: Comparison, studio: Studio) -> dict[str, Any]:
    """What was asked for and what came of it, in plain values, without paths of this machine."""
    return {
        "request": dataclasses.asdict(done.request),
        "sets": {name: Path(studio.sources[name]).name for name in done.pictures},
        "seconds": round(done.seconds, 3),
        "pictures": {name: [path.name for path in paths] for name, paths in done.pictures.items()},
    }


def _write_archive(done: Comparison, about: dict[str, Any]) -> None:
    partial = done.archive.with_suffix(".partial")
    with zipfile.ZipFile(partial, "w", zipfile.ZIP_STORED) as archive:  # PNGs are compressed already
        archive.writestr("comparison.json", json.dumps(about, indent=2, ensure_ascii=False) + "\n")
        archive.write(done.sheet, SHEET)
        for name, paths in done.pictures.items():
            for path in paths:
                archive.write(path, f"{name}/{path.name}")
    partial.replace(done.archive)
