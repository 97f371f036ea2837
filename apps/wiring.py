"""The app whole: the page, its behaviour, and which click leads where."""

from typing import Any

import gradio as gr

from apps.handlers import DEVICE, Handlers, new_seed
from apps.page import Page, lay_out
from apps.studio import Studio

_MAX_WAITING = 64


def build_app(studio: Studio, *, may_add: bool = False) -> gr.Blocks:
    """The app around a studio, ready to launch; `may_add` lets visitors name further folders of this machine."""
    page = lay_out(studio, may_add=may_add)
    handlers = Handlers(studio, page)
    with page.blocks:
        _wire_drawing(page, handlers)
        _wire_reading(page, handlers)
        _wire_endpoints(page, handlers)
        if may_add:
            page.add.click(
                handlers.add,
                [page.new_name, page.new_folder, page.sets],
                [page.added, page.sets],
                api_visibility="private",
                **DEVICE,
            )
    page.blocks.queue(max_size=_MAX_WAITING)
    return page.blocks


def _wire_drawing(page: Page, handlers: Handlers) -> None:
    progress = {"show_progress": "full", "show_progress_on": page.status}
    drawing = gr.on(
        [page.run.click, page.prompt.submit],
        handlers.draw,
        [page.visit, *page.inputs],
        [*page.results, page.visit, page.history, page.earlier],
        api_visibility="private",
        trigger_mode="once",
        **progress,
        **DEVICE,
    )
    analysing = page.analyse.click(
        handlers.analyse,
        page.inputs,
        page.results,
        api_visibility="private",
        **progress,
        **DEVICE,
    )
    quick = {"queue": False, "show_progress": "hidden", "api_visibility": "private"}
    page.cancel.click(handlers.stop, page.status, page.results, cancels=[drawing, analysing], **quick)
    # A drawing ends with the step it is at, and what that reports comes after the answer to the click.
    drawing.then(handlers.settle, page.status, page.results, trigger_mode="multiple", **quick)
    page.history.select(
        handlers.select, page.visit, page.results, queue=False, show_progress="hidden", api_visibility="private"
    )


def _wire_reading(page: Page, handlers: Handlers) -> None:
    read = {"inputs": [page.prompt, page.sets, page.length, page.syntax], "outputs": page.reading}
    quiet = {"show_progress": "hidden", "api_visibility": "private", "concurrency_limit": 4}
    changes = [part.change for part in (page.prompt, page.sets, page.length, page.syntax)]
    gr.on(changes, handlers.read, **read, trigger_mode="always_last", **quiet)
    page.reading.value = handlers.read(*(part.value for part in read["inputs"]))
    page.dice.click(new_seed, None, page.seed, queue=False, show_progress="hidden", api_visibility="private")
    # A set added in one tab shows in the next.
    page.blocks.load(
        lambda: gr.update(choices=list(handlers.studio.pipes)), None, page.sets, queue=False, api_visibility="private"
    )


def _wire_endpoints(page: Page, handlers: Handlers) -> None:
    files = gr.File(file_count="multiple", visible=False, label="pictures")
    about, archive = gr.JSON(visible=False, label="about"), gr.File(visible=False, label="archive")
    tokens, names = gr.JSON(visible=False, label="tokens"), gr.JSON(visible=False, label="sets")
    # The page's own fields refuse what is out of range with a traceback in the terminal, and that of the sets knows the
    # choices of its start alone. The handlers say what is wrong.
    sets = gr.JSON(page.sets.value, visible=False, label="sets")
    fields = {part: sets if part is page.sets else _plain(part) for part in page.inputs}
    inputs = list(fields.values())
    reads = [fields[part] for part in (page.prompt, page.sets, page.length, page.syntax)]
    hidden = [gr.Button(visible=False) for _ in range(3)]
    hidden[0].click(handlers.api_compare, inputs, [files, about, archive], api_name="compare", **DEVICE)
    hidden[1].click(handlers.api_tokens, reads, tokens, api_name="tokens", concurrency_limit=4)
    hidden[2].click(handlers.api_sets, None, names, api_name="sets", queue=False)


def _plain(part: Any) -> Any:
    """A field that takes any number or text: a text field itself, for any other a hidden one like it."""
    if isinstance(part, gr.Textbox):
        return part
    kind = gr.Number if isinstance(part, gr.Slider | gr.Number) else gr.Textbox
    return kind(part.value, visible=False, label=part.label)
