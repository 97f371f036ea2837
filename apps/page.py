"""The page: what stands where. What happens on a click is in handlers."""

from dataclasses import dataclass, field
from typing import Any

import gradio as gr

from apps.prompt_examples import example_prompts
from apps.request import LENGTHS, MAX_COLUMNS, MAX_SEEDS, MAX_STEPS, size_names
from apps.studio import STOCK, Studio
from apps.visit import close_visit
from debias_diffusion.sdxl.prompts import SYNTAXES

_TITLE = "One prompt, one seed, different text encoders"
_ABOUT = (
    "Every column gets the same noise, steps and size; only the text encoders differ. **stock** is the checkpoint's own "
    "pair, cut at its length as diffusers does. Shift + Enter in the prompt compares too."
)
_GALLERY: dict[str, Any] = {
    "show_label": False, "format": "png", "object_fit": "contain", "height": "auto", "interactive": False,
}  # fmt: skip
_STATE_SECONDS = 24 * 3600


@dataclass
class Page:
    """The components that handlers read and write; `columns` are heads, previews and pictures, `MAX_COLUMNS` of each."""

    blocks: gr.Blocks
    inputs: list[Any] = field(default_factory=list)
    columns: list[Any] = field(default_factory=list)
    heads: list[Any] = field(default_factory=list)
    previews: list[Any] = field(default_factory=list)
    pictures: list[Any] = field(default_factory=list)
    named: dict[str, Any] = field(default_factory=dict)

    @property
    def results(self) -> list[Any]:
        """All that a comparison shows, its status included."""
        single = [self.status, self.sheet, self.archive, self.charts, self.sentences, self.attention]
        return [*single, *self.columns, *self.heads, *self.previews, *self.pictures]

    def cleared(self) -> dict[Any, Any]:
        """Updates after which nothing of an earlier comparison is in sight; the status is for the caller to write."""
        hidden: dict[Any, Any] = {
            part: gr.update(visible=False) for part in (self.sheet, self.archive, self.charts, *self.columns)
        }
        hidden |= {part: gr.update(value="", visible=False) for part in self.previews}
        hidden |= {part: gr.update(value=[], visible=False) for part in self.pictures}
        return hidden | dict.fromkeys((self.sentences, self.attention, *self.heads), "")

    def __getattr__(self, name: str) -> Any:
        try:
            return self.__dict__["named"][name]
        except KeyError:
            raise AttributeError(f"the page has no {name!r}; it has {', '.join(self.__dict__['named'])}") from None


def lay_out(studio: Studio, *, may_add: bool) -> Page:
    """All components of the page; `may_add` offers a field for another folder of encoders."""
    with gr.Blocks(title=_TITLE, analytics_enabled=False, delete_cache=(3600, _STATE_SECONDS)) as blocks:
        page = Page(blocks)
        page.named["visit"] = gr.State(None, time_to_live=_STATE_SECONDS, delete_callback=close_visit)
        gr.Markdown(f"# {_TITLE}\n{_ABOUT}")
        _ask(page, studio)
        _answer(page, studio)
        _explain(page)
        if may_add:
            _add(page)
    return page


def _ask(page: Page, studio: Studio) -> None:
    names, examples = list(studio.pipes), example_prompts(studio.is_miniature)
    with gr.Row(equal_height=False):
        with gr.Column(scale=3, min_width=320):
            prompt = gr.Textbox(next(iter(examples.values())), label="Prompt", lines=6, max_lines=12, elem_id="prompt")
            gr.Examples(
                [[text] for text in examples.values()],
                [prompt],
                label="Examples, 100 to 240 tokens",
                example_labels=list(examples),
                api_visibility="private",
            )
        with gr.Column(scale=2, min_width=320):
            last = [name for name in names if name != STOCK][-(MAX_COLUMNS - 1) :]
            sets = gr.CheckboxGroup(
                names, value=[STOCK, *last], label=f"Encoders, a column each (up to {MAX_COLUMNS})", elem_id="sets"
            )
            with gr.Row():
                seed = gr.Number(0, label="Seed", precision=0, minimum=0, elem_id="seed", min_width=120)
                page.named["dice"] = gr.Button("⚄ New seed", elem_id="dice", min_width=120)
            num_seeds = gr.Slider(1, MAX_SEEDS, 1, step=1, label="Number of seeds, counted up from there")
            with gr.Row():
                page.named["run"] = gr.Button("Compare", variant="primary", elem_id="run", min_width=120)
                page.named["cancel"] = gr.Button("Cancel", variant="stop", elem_id="cancel", min_width=120)
            page.named["analyse"] = gr.Button("Analyse the prompt without drawing", size="sm", elem_id="analyse")
            # Here, and the pictures next: on a small screen whoever clicks must see at once that something happens.
            page.named["status"] = gr.HTML("", elem_id="status", min_height=40)
    with gr.Accordion("More settings", open=False):
        negative = gr.Textbox("", label="Negative prompt (empty: none, as SDXL does)", lines=1, elem_id="negative")
        with gr.Row():
            steps = gr.Slider(1, MAX_STEPS, 25 if studio.is_miniature else 30, step=1, label="Steps", min_width=200)
            guidance = gr.Slider(0, 20, 5.0, step=0.5, label="Guidance", min_width=200)
        with gr.Row():
            sizes = size_names(studio.own_size)
            size = gr.Dropdown(sizes, value=sizes[0], label="Size", allow_custom_value=True, min_width=200)
            length = gr.Dropdown(list(LENGTHS), value="auto", label="Length: auto is 77 where it fits", min_width=200)
            syntax = gr.Dropdown(list(SYNTAXES), value="plain", label="Brackets", min_width=200)
        blend = gr.Slider(
            0, 1, 1.0, step=0.05, label="Blend: 1 the encoders as they are, 0 the checkpoint's own, stretched"
        )
    page.inputs = [prompt, sets, negative, seed, num_seeds, steps, guidance, size, length, syntax, blend]
    page.named |= {"prompt": prompt, "sets": sets, "seed": seed, "length": length, "syntax": syntax}


def _answer(page: Page, studio: Studio) -> None:
    kind = ["small-pictures"] if studio.own_size <= 128 else []
    with gr.Row(equal_height=False):
        for number in range(MAX_COLUMNS):
            with gr.Column(min_width=300, visible=False, elem_id=f"column{number}") as column:
                page.heads.append(gr.HTML("", elem_id=f"head{number}"))
                page.previews.append(gr.HTML("", visible=False, elem_id=f"preview{number}", elem_classes=kind))
                page.pictures.append(
                    gr.Gallery(
                        label="Pictures",
                        columns=1,
                        visible=False,
                        buttons=["download", "fullscreen"],
                        elem_id=f"pictures{number}",
                        elem_classes=kind,
                        **_GALLERY,
                    )
                )
            page.columns.append(column)
    with gr.Row():
        for name, text in (("sheet", "Download side by side as PNG"), ("archive", "Download all as zip, with records")):
            page.named[name] = gr.DownloadButton(text, visible=False, elem_id=name, min_width=200)


def _explain(page: Page) -> None:
    with gr.Accordion("What each encoder reads", open=True):
        page.named["reading"] = gr.HTML("", elem_id="reading")
    with gr.Accordion("Sentences and attention", open=True, visible=False) as charts:
        page.named["sentences"] = gr.HTML("", elem_id="sentences")
        page.named["attention"] = gr.HTML("", elem_id="attention")
    with gr.Accordion("Your earlier comparisons", open=True, visible=False) as earlier:
        page.named["history"] = gr.Gallery(
            label="Earlier comparisons",
            columns=4,
            fit_columns=False,
            allow_preview=False,
            buttons=[],
            elem_id="history",
            **_GALLERY,
        )
    page.named |= {"charts": charts, "earlier": earlier}


def _add(page: Page) -> None:
    with gr.Accordion("Another pair of encoders", open=False):
        gr.Markdown(
            "A folder on this machine with `text_encoder` and `text_encoder_2`, as `debias-diffusion export` writes."
        )
        with gr.Row():
            page.named["new_name"] = gr.Textbox(label="Name", elem_id="new-name", scale=1, min_width=160)
            page.named["new_folder"] = gr.Textbox(label="Folder", elem_id="new-folder", scale=3, min_width=200)
        page.named["add"] = gr.Button("Add", elem_id="add")
        page.named["added"] = gr.HTML("", elem_id="added")
