"""Charts as HTML and SVG that take the page's colours, light or dark, and its width; text stays text. All is escaped."""

from collections.abc import Mapping, Sequence
from html import escape
from itertools import pairwise

from apps.looking import Look
from apps.reading_html import chip
from apps.sentences import Drawn, Sentence

_WIDTH, _HEIGHT = 600, 200  # of the drawing's own coordinates, stretched to the page
_POINTS = 32  # of a curve: single tokens jump about


def attention_html(looks: Mapping[str, Look]) -> str:
    """Attention of the pooled token by position, a curve a set: 1 is what an even reader gives every token."""
    curves = {name: _curve(each.attention) for name, each in looks.items() if each.attention}
    if not curves:
        return ""
    length = max(looks[name].num_tokens for name in curves)
    top = max(1.5, *(y for points in curves.values() for _, y in points))
    longest = max(looks.values(), key=lambda each: each.num_tokens)
    lines = [_rule(x / length) for x in longest.starts[1:]] + [_even(1 / top)]
    for number, name in enumerate(looks):
        if name in curves:
            points = " ".join(f"{_x(x / length)},{_y(y / top)}" for x, y in curves[name])
            lines.append(f'<polyline class="dd-curve set{number}" points="{points}"/>')
    said = "; ".join(f"{name} over {each.num_tokens} tokens" for name, each in looks.items())
    names = " ".join(chip(name, number) for number, name in enumerate(looks))
    return (
        '<h3>Attention by position</h3><p class="dd-hint">How much of its attention the summary (EOT) token of SDXL\'s second '
        "encoder pays to each part of the prompt, as a multiple of an even share (dashed line). Thin lines: sentences. "
        f'A curve ends where its encoder stops reading.</p><p class="dd-legend">{names}</p>'
        f'<div class="dd-chart"><span class="dd-top">{top:.1f}×</span><span class="dd-bottom">0</span>'
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" preserveAspectRatio="none" role="img" '
        f'aria-label="{escape("attention by position: " + said)}">{"".join(lines)}</svg>'
        f'<div class="dd-ends"><span>token 1</span><span>token {length}</span></div></div>'
    )


def sentences_html(
    sentences: Sequence[Sentence],
    shares: Mapping[str, Sequence[float]],
    looks: Mapping[str, Look],
    drawn: Mapping[str, Sequence[Drawn | None]] | None = None,
    judged: Mapping[str, Sequence[float]] | None = None,
) -> str:
    """Each sentence with, for each set: whether it is read, how much of it is in the summary vector, what was drawn.

    The mappings have a row of values a set, one a sentence; `judged` are an independent encoder's cosines.
    """
    items = []
    for i, sentence in enumerate(sentences):
        cells = []
        for number, (name, read) in enumerate(shares.items()):
            similarity = looks[name].similarity[i] if name in looks else None
            found = drawn[name][i] if drawn and name in drawn else None
            score = judged[name][i] if judged and name in judged else None
            cells.append(_cell(name, number, read[i], similarity, found, score))
        items.append(f'<li><p>{escape(sentence.text)}</p><div class="dd-cells">{"".join(cells)}</div></li>')
    about = (
        "Bars: cosine of the prompt's pooled vector, which the UNet reads beside the words, with the sentence's own. It "
        "tells how much of the sentence is in the summary, not whether it is drawn."
    )
    if drawn and any(found for row in drawn.values() for found in row):
        about += " Drawn: described things that a reader of such pictures found right in colour, shape, size and place."
    if judged:
        about += (
            " Judged: the independent encoder's cosine of sentence and picture, times 100; compare it between the "
            "columns of one sentence only."
        )
    if drawn is not None and not judged and not any(found for row in drawn.values() for found in row):
        about += (
            " What arrived of each sentence in the pictures is not scored: it takes an encoder that had no part in them, "
            "named by --judge where the app is started."
        )
    return f'<h3>Sentence by sentence</h3><p class="dd-hint">{escape(about)}</p><ol class="dd-sentences">{"".join(items)}</ol>'


def fidelity_text(drawn: Sequence[Drawn | None]) -> str:
    """All that a set drew right, in words; empty where nothing could be checked.

    >>> fidelity_text([Drawn(1, 2), None, Drawn(1, 1)])
    'drew 2 of 3 described things right'
    """
    found = [each for each in drawn if each is not None]
    told = sum(each.told for each in found)
    return f"drew {sum(each.right for each in found)} of {told} described things right" if told else ""


def _cell(
    name: str, number: int, read: float, similarity: float | None, drawn: Drawn | None, judged: float | None
) -> str:
    word = "read" if read >= 1 else "not read" if read <= 0 else f"{read:.0%} read"
    kind = "yes" if read >= 1 else "no" if read <= 0 else "part"
    text = f'{chip(name, number)}<span class="dd-mark {kind}">{word}</span>'
    if drawn is not None:
        right = "yes" if drawn.right == drawn.told else "no" if drawn.right == 0 else "part"
        text += f'<span class="dd-mark {right}">drawn {drawn.right}/{drawn.told}</span>'
    if judged is not None:
        text += f'<span class="dd-mark">judged {100 * judged:.1f}</span>'
    if similarity is not None:
        width = round(100 * min(1.0, max(0.0, similarity)))
        text += (
            f'<span class="dd-bar" role="img" aria-label="similarity {similarity:.2f}"><span class="set{number}" '
            f'style="width:{width}%"></span></span><span class="dd-number">{similarity:.2f}</span>'
        )
    return f'<div class="dd-cell">{text}</div>'


def _curve(attention: Sequence[float]) -> list[tuple[float, float]]:
    """(token, multiple of an even share) of means over neighbouring tokens."""
    count = len(attention)
    edges = [round(i * count / min(_POINTS, count)) for i in range(min(_POINTS, count) + 1)]
    return [((a + b) / 2, sum(attention[a:b]) / (b - a) * count) for a, b in pairwise(edges) if b > a]


def _rule(x: float) -> str:
    return f'<line class="dd-rule" x1="{_x(x)}" x2="{_x(x)}" y1="0" y2="{_HEIGHT}"/>'


def _even(y: float) -> str:
    return f'<line class="dd-even" x1="0" x2="{_WIDTH}" y1="{_y(y)}" y2="{_y(y)}"/>'


def _x(share: float) -> str:
    return f"{share * _WIDTH:.1f}"


def _y(share: float) -> str:
    return f"{(1 - share) * _HEIGHT:.1f}"
