"""What happens on a click, and the named endpoints for `gradio_client`. One request at a time is on the device."""

import json
import math
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

import gradio as gr

from apps.comparing import Comparison, stream_comparison
from apps.page import Page
from apps.reading_html import is_progress, preview_html, progress_html, reading_html, status_html, waiting_html
from apps.request import MAX_COLUMNS, Request, finite, read_length, read_size, refuse_empty, refuse_long, whole
from apps.studio import Studio
from apps.visit import Shown, Visit, WorkFolders, analyse, show
from apps.watching import Step
from debias_diffusion.sdxl.generate import Settings
from debias_diffusion.sdxl.prompts import PromptLine, TokenReport

Updates = dict[Any, Any]
DEVICE: dict[str, Any] = {"concurrency_id": "device", "concurrency_limit": 1}
_LEAST_SECONDS = 0.2  # between two updates of the progress bar


class Handlers:
    """The page's behaviour: `studio` draws, `page` is written to."""

    def __init__(self, studio: Studio, page: Page) -> None:
        self.studio, self.page, self.folders = studio, page, WorkFolders()

    def request(self, *values: Any) -> Request:
        """What the page's fields ask for; ValueError says what is wrong with one."""
        prompt, sets, negative, seed, num_seeds, steps, guidance, size, length, syntax, blend = values
        chosen = self.studio.choose(sets)
        width, height = read_size(size, self.studio.own_size, self.studio.stock.vae_scale_factor)
        return Request(
            prompt or "",
            tuple(name for name in self.studio.pipes if name in chosen),
            negative or "",
            whole(seed, "seed"),
            whole(num_seeds, "number of seeds"),
            whole(steps, "number of steps"),
            finite(guidance, "guidance"),
            width,
            height,
            length,
            syntax,
            finite(blend, "blend"),
        )

    def draw(self, visit: Visit | None, *values: Any) -> Iterator[Updates]:
        """Draws what the fields ask for, telling the page how far it is."""
        try:
            request = self.request(*values)
            visit = visit or self.folders.new_visit()
            yield self._start(request) | {self.page.visit: visit}
            for event in stream_comparison(self.studio, request, visit.new_folder()):
                if isinstance(event, Comparison):
                    shown = show(self.studio, event)
                    visit.keep(shown)
                    yield self._result(shown) | self._history(visit) | {self.page.visit: visit}
                elif update := self._progress(event, request):
                    yield update
        except (ValueError, OSError, RuntimeError) as error:  # torch's own, such as no memory left, is a RuntimeError
            yield self._fail(error)

    def stop(self, status: str | None) -> Updates:
        """Says so, and clears what a drawing had begun; the drawing itself is stopped by its iterator being closed."""
        cleared = self.page.cleared() if is_progress(status) else {}
        return cleared | {self.page.status: status_html("Cancelled.")}

    def settle(self, status: str | None) -> Updates:
        """A drawing that has ended with its bar still there was stopped: says so, after its last word."""
        return self.stop(status) if is_progress(status) else {self.page.status: gr.skip()}

    def select(self, visit: Visit | None, event: gr.SelectData) -> Updates:
        """An earlier comparison again."""
        index = event.index if isinstance(event.index, int) else event.index[0]
        if visit is None or not 0 <= index < len(visit.shown):
            return {self.page.status: status_html("That comparison is no longer kept.", is_error=True)}
        return self._result(visit.shown[index])

    def analyse(self, *values: Any) -> Updates:
        """The charts of a prompt without drawing it."""
        try:
            sentences, attention = analyse(self.studio, self.request(*values))
        except ValueError as error:
            return self._fail(error)
        return {
            self.page.sentences: sentences,
            self.page.attention: attention,
            self.page.charts: gr.update(visible=True),
            self.page.status: status_html("Analysed; nothing was drawn."),
        }

    def read(self, prompt: str, sets: list[str], length: str, syntax: str) -> str:
        """The prompt coloured by who reads it, while it is typed."""
        names = [name for name in self.studio.pipes if name in (sets or ())][:MAX_COLUMNS]
        if not (prompt or "").strip() or not names:
            return reading_html("", {})
        try:
            return reading_html(prompt, self._tokens(prompt, names, length, syntax))
        except ValueError as error:
            return status_html(_sentence(error), is_error=True)

    def add(self, name: str, folder: str, sets: list[str]) -> Updates:
        """Another set of encoders from a folder of this machine."""
        try:
            with self.studio.device:
                notes = self.studio.add((name or "").strip(), (folder or "").strip())
        except (ValueError, OSError) as error:
            return {self.page.added: status_html(_sentence(error), is_error=True)}
        chosen = [*(sets or []), name.strip()][-MAX_COLUMNS:]
        return {
            self.page.added: status_html(" ".join([f"{name.strip()} is added.", *notes])),
            self.page.sets: gr.update(choices=list(self.studio.pipes), value=chosen),
        }

    # Endpoints

    def api_compare(self, prompt: str, sets: list[str] | str, negative: str, seed: float, num_seeds: float, steps: float,
                    guidance: float, size: str, length: str, syntax: str, blend: float) -> Iterator[Any]:  # fmt: skip
        """Pictures as PNG files with their records, set by set and seed by seed; what was read; and all as a zip."""
        values = (prompt, sets, negative, seed, num_seeds, steps, guidance, size, length, syntax, blend)
        try:
            told = time.monotonic()
            for event in stream_comparison(self.studio, self.request(*values), self.folders.new_passing()):
                if isinstance(event, Comparison):
                    yield _answer(event)
                elif time.monotonic() - told > _LEAST_SECONDS:  # a chance to be cancelled, and nothing else
                    told = time.monotonic()
                    yield gr.skip(), gr.skip(), gr.skip()
        except (ValueError, OSError, TypeError, RuntimeError) as error:
            raise gr.Error(_sentence(error), print_exception=False) from error

    def api_tokens(self, prompt: str, sets: list[str] | str, length: str, syntax: str) -> Any:
        """What each encoder of each set reads of a prompt."""
        try:
            refuse_empty(prompt)
            tokens = self._tokens(prompt, self.studio.choose(sets), length, syntax)
            return {name: [_report(row) for row in rows] for name, rows in tokens.items()}
        except (ValueError, TypeError) as error:
            raise gr.Error(_sentence(error), print_exception=False) from error

    def api_sets(self) -> list[str]:
        """Names of the sets of encoders."""
        return list(self.studio.pipes)

    def _tokens(self, prompt: str, sets: Sequence[str], length: str, syntax: str) -> dict[str, list[TokenReport]]:
        refuse_long(prompt)
        settings = Settings(max_length=read_length(length), syntax=syntax)
        return {name: self.studio.read(name, PromptLine(prompt), settings) for name in dict.fromkeys(sets)}

    # Updates

    def _start(self, request: Request) -> Updates:
        page, size = self.page, (request.width or 1, request.height or 1)
        updates: Updates = page.cleared() | {page.status: progress_html("Starting", 0, 1)}
        for number, name in enumerate(request.sets):
            updates[page.columns[number]] = gr.update(visible=True)
            updates[page.heads[number]] = status_html(name)
            updates[page.previews[number]] = gr.update(value=waiting_html(size, "waiting"), visible=True)
        return updates

    def _fail(self, error: Exception) -> Updates:
        return self.page.cleared() | {self.page.status: status_html(_sentence(error), is_error=True)}

    def _progress(self, step: Step, request: Request) -> Updates:
        count, column = len(request.seeds), request.sets.index(step.set_name)
        done = (column * count + step.picture) * step.total + step.done
        total = len(request.sets) * count * step.total
        if step.preview is None and step.done < step.total and time.monotonic() - self._told < _LEAST_SECONDS:
            return {}
        self._told = time.monotonic()
        text = f"{step.set_name}, seed {request.seeds[step.picture]}: step {step.done} of {step.total}"
        updates: Updates = {self.page.status: progress_html(text, done, total)}
        if step.preview is not None:
            size = (request.width or 1, request.height or 1)
            updates[self.page.previews[column]] = gr.update(value=preview_html(step, size), visible=True)
        return updates

    _told = 0.0

    def _result(self, shown: Shown) -> Updates:
        page, done = self.page, shown.comparison
        grid = math.ceil(math.sqrt(done.request.num_seeds))
        text = f"Seed {done.request.seed}" + (f" to {done.request.seeds[-1]}" if done.request.num_seeds > 1 else "")
        text += f", {done.request.steps} steps: drawn in {done.seconds:.1f} s."
        updates: Updates = page.cleared() | {page.status: status_html(text)}
        for number, paths in enumerate(done.pictures.values()):
            captioned = [(str(p), f"seed {s}") for p, s in zip(paths, done.request.seeds, strict=True)]
            updates[page.columns[number]] = gr.update(visible=True)
            updates[page.heads[number]] = shown.heads[number]
            updates[page.pictures[number]] = gr.update(value=captioned, columns=grid, visible=True)
        return updates | {
            page.sheet: gr.update(value=str(done.sheet), visible=True),
            page.archive: gr.update(value=str(done.archive), visible=True),
            page.charts: gr.update(visible=True),
            page.sentences: shown.sentences,
            page.attention: shown.attention,
        }

    def _history(self, visit: Visit) -> Updates:
        items = [
            (str(each.thumbnail), f"seed {each.comparison.request.seed}: {each.comparison.request.prompt[:60]}")
            for each in visit.shown
        ]
        return {self.page.history: items, self.page.earlier: gr.update(visible=True)}


def new_seed() -> int:
    """A seed of a few digits, as people write them down."""
    return random.randrange(2**31)


def _answer(done: Comparison) -> tuple[list[str], Any, str]:
    about = {
        "sets": list(done.pictures),
        "seeds": done.request.seeds,
        "tokens": {name: [_report(row) for row in rows] for name, rows in done.tokens.items()},
        "seconds": done.seconds,
    }
    return [str(path) for paths in done.pictures.values() for path in paths], about, str(done.archive)


def _report(row: Any) -> Any:
    return json.loads(json.dumps(asdict(row)))


def _sentence(error: Exception) -> str:
    text = str(error)
    return text[:1].upper() + text[1:]
