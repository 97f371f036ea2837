"""One visitor's comparisons: where their pictures lie, how each was shown, and when both are thrown away."""

import shutil
import tempfile
import threading
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path

from apps.charts import attention_html, fidelity_text, sentences_html
from apps.comparing import Comparison
from apps.looking import Look, look
from apps.reading_html import column_html, status_html
from apps.request import Request
from apps.sentences import drawn_things, judged, read_sentences, read_shares
from apps.studio import Studio
from apps.thumbnail import write_thumbnail
from debias_diffusion.sdxl.prompts import read_prompt

KEPT = 12
"""Comparisons a visitor can come back to."""
_KEPT_OF_API = 24  # folders of requests without a visit; their files are copied before so many more are done


@dataclass(frozen=True)
class Shown:
    """A comparison with the texts around its pictures: a head for each set, and the two charts; and a small picture."""

    comparison: Comparison
    thumbnail: Path
    heads: tuple[str, ...]
    sentences: str
    attention: str


@dataclass
class Visit:
    """What one visitor made, latest first, in a folder `root` of its own. Nobody else's page holds it; `close` deletes
    the files."""

    root: Path
    shown: list[Shown] = field(default_factory=list)
    _count: int = 0

    def new_folder(self) -> Path:
        """A folder for the next comparison, which `compare` makes."""
        self._count += 1
        return self.root / f"{self._count:04}"

    def keep(self, shown: Shown) -> None:
        """Puts a comparison in front; the oldest beyond `KEPT` go, files too."""
        self.shown.insert(0, shown)
        for old in self.shown[KEPT:]:
            shutil.rmtree(old.comparison.folder, ignore_errors=True)
        del self.shown[KEPT:]

    def close(self) -> None:
        """Deletes all files of the visit."""
        shutil.rmtree(self.root, ignore_errors=True)


@dataclass
class WorkFolders:
    """Where an app keeps its visitors' files until it ends, and those of the last few requests without a page."""

    _root: tempfile.TemporaryDirectory = field(
        default_factory=lambda: tempfile.TemporaryDirectory(prefix="debias-compare-", ignore_cleanup_errors=True)
    )
    _passing: deque[Path] = field(default_factory=deque)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def new_visit(self) -> Visit:
        """A visit with an empty folder."""
        return Visit(self._new("visit-"))

    def new_passing(self) -> Path:
        """A folder for one request that comes without a page; the oldest kept one goes."""
        with self._lock:
            self._passing.append(self._new("request-"))
            while len(self._passing) > _KEPT_OF_API:
                shutil.rmtree(self._passing.popleft(), ignore_errors=True)
            return self._passing[-1]

    def _new(self, prefix: str) -> Path:
        return Path(tempfile.mkdtemp(prefix=prefix, dir=self._root.name))


def close_visit(visit: Visit | None) -> None:
    """Deletes a visit's files, where the visitor made any."""
    if visit is not None:
        visit.close()


def show(studio: Studio, done: Comparison) -> Shown:
    """The texts around a comparison; runs the text encoders once, in turn on the device."""
    sentences = read_sentences(done.request.prompt)
    drawn = {name: drawn_things(sentences, paths) for name, paths in done.pictures.items()}
    shares = {name: read_shares(sentences, done.tokens[name]) for name in done.pictures}
    looks = look_at(studio, done.request)
    scores = {}
    if studio.judge is not None:
        with studio.device:
            scores = {name: judged(studio.judge, done.request.prompt, paths) for name, paths in done.pictures.items()}
    heads = []
    for number, (name, reports) in enumerate(done.tokens.items()):
        text = fidelity_text(drawn[name])
        heads.append(column_html(name, number, reports) + (status_html(text) if text else ""))
    thumbnail = write_thumbnail(done.pictures, done.folder / "thumbnail.png")
    return Shown(
        done, thumbnail, tuple(heads), sentences_html(sentences, shares, looks, drawn, scores), attention_html(looks)
    )


def analyse(studio: Studio, request: Request) -> tuple[str, str]:
    """The two charts of a prompt that is not drawn."""
    sentences = read_sentences(request.prompt)
    tokens = {name: studio.read(name, request.line, request.settings) for name in request.sets}
    looks = look_at(studio, request)
    shares = {name: read_shares(sentences, reports) for name, reports in tokens.items()}
    return sentences_html(sentences, shares, looks), attention_html(looks)


def look_at(studio: Studio, request: Request) -> dict[str, Look]:
    """How each set of a request looks at its prompt."""
    prompt, settings = str(read_prompt(request.prompt, request.syntax)), request.settings
    sentences = read_sentences(request.prompt)
    with studio.device:
        return {
            name: look(studio.find(name, request.blend), prompt, sentences, studio.max_length(name, settings))
            for name in request.sets
        }
