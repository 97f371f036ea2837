"""HTML of what each encoder reads: the prompt with coloured spans, token counts, progress. All text is escaped."""

from collections.abc import Mapping, Sequence
from html import escape

from apps.watching import Step, data_uri
from debias_diffusion.sdxl.prompts import TokenReport

Tokens = Mapping[str, Sequence[TokenReport]]
"""What each set's encoders read, by set name."""


def chip(name: str, number: int) -> str:
    """A set's name in its colour; `number` is its column."""
    return f'<span class="dd-chip set{number}">{escape(name)}</span>'


def reading_html(prompt: str, tokens: Tokens) -> str:
    """The prompt in pieces: read by all sets, by some, by none, with a mark where each stops, and the counts in words."""
    if not prompt.strip():
        return '<p class="dd-hint">Write a prompt, and its words are coloured here by which encoders read them.</p>'
    stops = {name: _stop(prompt, reports) for name, reports in tokens.items()}
    places = sorted({0, *stops.values(), len(prompt)})
    pieces = []
    for start, end in zip(places, [*places[1:], len(prompt)], strict=True):
        pieces += [
            f'<span class="dd-stop set{number}">{escape(name)} stops here</span>'
            for number, (name, stop) in enumerate(stops.items())
            if stop == start and stop < len(prompt)
        ]
        if start == end:
            continue
        readers = [name for name, stop in stops.items() if stop >= end]
        kind = "all" if len(readers) == len(stops) else "some" if readers else "none"
        title = "read by " + (", ".join(readers) or "no encoder")
        pieces.append(f'<span class="dd-read-{kind}" title="{escape(title)}">{escape(prompt[start:end])}</span>')
    counts = "".join(
        f"<li>{chip(name, number)} {escape(count_text(reports))}</li>"
        for number, (name, reports) in enumerate(tokens.items())
    )
    return (
        f'<ul class="dd-counts">{counts}</ul>'
        f'<div class="dd-prompt-text" tabindex="0" role="region" aria-label="the prompt by reader">{"".join(pieces)}</div>'
        '<p class="dd-legend"><span class="dd-read-all">read by all</span> <span class="dd-read-some">read by some</span> '
        '<span class="dd-read-none">read by none</span></p>'
    )


def count_text(reports: Sequence[TokenReport]) -> str:
    """How much of the prompt a set reads, in words; both encoders where they differ.

    >>> report = TokenReport(0, "text_encoder", False, "a b c", 5, 4, 1, ((4, 5),))
    >>> count_text([report])
    'reads 4 of 5 tokens; 1 word cut'
    """
    texts = {}
    for report in reports:
        if report.negative:
            continue
        read = min(report.num_tokens, report.limit)
        text = f"reads {read} of {report.num_tokens} tokens"
        text += f" in {report.chunks} pieces" if report.chunks > 1 else ""
        count = len(report.cut)
        text += f"; {count:,} word{'s' * (count != 1)} cut" if count else ""
        texts[report.slot] = text
    if len(set(texts.values())) == 1:
        return next(iter(texts.values()))
    return ", ".join(f"{slot} {text}" for slot, text in texts.items())


def column_html(name: str, number: int, reports: Sequence[TokenReport]) -> str:
    """Head of a set's column: its name, what it reads, and the words it never sees."""
    cut = max((report for report in reports if not report.negative), key=lambda report: len(report.cut))
    text = f"<p>{chip(name, number)} {escape(count_text(reports))}</p>"
    if cut.cut:
        lost = cut.text[cut.cut[0][0] :]
        text += f'<details class="dd-cut"><summary>What was cut</summary><div>{escape(lost)}</div></details>'
    else:
        text += '<p class="dd-hint">Nothing was cut.</p>'
    negatives = [report for report in reports if report.negative and report.cut]
    if negatives:
        text += f'<p class="dd-hint">Of the negative prompt {len(negatives[0].cut)} words were cut.</p>'
    return text


def preview_html(step: Step, size: tuple[int, int]) -> str:
    """The unfinished picture of a step, in the page itself; a step without one is an error."""
    if step.preview is None:
        raise ValueError(f"step {step.done} has no preview")
    width, height = size
    label = f"unfinished picture after step {step.done} of {step.total}"
    return (
        f'<img class="dd-preview" style="aspect-ratio:{width}/{height}" src="{data_uri(step.preview)}" '
        f'alt="{escape(label)}"><p class="dd-hint">{escape(label)}</p>'
    )


def waiting_html(size: tuple[int, int], text: str) -> str:
    """A place for a picture that is not begun yet."""
    return f'<div class="dd-waiting" style="aspect-ratio:{size[0]}/{size[1]}">{escape(text)}</div>'


def progress_html(text: str, done: int, total: int) -> str:
    """A bar and what is being done."""
    percent = round(100 * done / max(1, total))
    return (
        f'<div class="dd-progress" role="progressbar" aria-valuemin="0" aria-valuemax="100" aria-valuenow="{percent}" '
        f'aria-label="{escape(text)}"><div style="width:{percent}%"></div></div><p role="status">{escape(text)}</p>'
    )


def is_progress(html: str | None) -> bool:
    """Whether a status is a bar, so that what it speaks of has not come to its end."""
    return 'class="dd-progress"' in (html or "")


def status_html(text: str, *, is_error: bool = False) -> str:
    """One line that a screen reader reads out."""
    return f'<p class="dd-{"error" if is_error else "status"}" role="{"alert" if is_error else "status"}">{escape(text)}</p>'


def _stop(prompt: str, reports: Sequence[TokenReport]) -> int:
    return min((report.cut[0][0] for report in reports if not report.negative and report.cut), default=len(prompt))
