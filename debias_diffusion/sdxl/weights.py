"""Prompt weighting as the A1111 web UI writes it, read into data that the pipeline file of this project encodes."""

import re
from collections.abc import Iterable
from itertools import groupby
from typing import NoReturn

Span = tuple[int, int]

STEP = 1.1
"""What one pair of brackets multiplies by, or divides by where they are square."""
STRONGEST = 10.0
"""Weights beyond this, either way, are taken for a slip of the pen."""
_DEEPEST = 32

_MARKS = re.compile(
    r"\\(?P<escaped>[()\[\]\\])|:\s*(?P<number>[+-]?[\d.]+)\s*\)|(?P<bracket>[()\[\]])"
    r"|(?:(?<!\s)\s+)?\b(?P<brk>BREAK)\b\s*"  # not within a run of spaces, which would be tried from each of them
)
_UNSUPPORTED = {
    "prompt editing": re.compile(r"(?<!\\)\[[^\[\]]*:\s*[\d.]+\s*\]"),
    "alternating words": re.compile(r"(?<!\\)\[[^\[\]]*\|[^\[\]]*\]"),
    "a network to load": re.compile(r"<(?:lora|lyco|hypernet):[^<>]*>"),
    "composition of prompts": re.compile(r"\bAND\b"),
}


class PromptText(str):
    """A prompt as it will be encoded, with what it was made from; everywhere else it is the string it looks like.

    `source` is what the user wrote, `origins` each character's span in it. `weights` are (start, end, weight) of the
    characters that have another than 1, in order and apart from one another; None where no syntax was read. `breaks`
    are the positions at which a new chunk starts.
    """

    source: str
    origins: tuple[Span, ...]
    weights: tuple[tuple[int, int, float], ...] | None
    breaks: tuple[int, ...]

    def __new__(
        cls,
        text: str,
        source: str,
        origins: Iterable[Span],
        weights: Iterable[tuple[int, int, float]] | None = None,
        breaks: Iterable[int] = (),
    ) -> "PromptText":
        self = super().__new__(cls, text)
        self.source, self.origins, self.breaks = source, tuple(origins), tuple(breaks)
        self.weights = None if weights is None else tuple(weights)
        if len(self.origins) != len(self):
            raise ValueError(f"a text of {len(self)} characters came with {len(self.origins)} origins")
        return self

    def in_source(self, span: Span) -> Span:
        """The span of `source` that a span of characters was made from."""
        start, end = span
        return self.origins[start][0], self.origins[end - 1][1]


def parse_weights(text: str) -> PromptText:
    r"""The plain words of an A1111 prompt, with their weights and breaks as data; give it to the pipeline as it is.

    `(x:1.2)` weighs 1.2, `(x)` 1.1, `[x]` 1/1.1; brackets within brackets multiply. An unclosed bracket holds to the
    end, a closing one without its opening is a character. A backslash makes a bracket a character, `BREAK` starts a new
    chunk. Prompt editing, alternating words, `<lora:...>` and `AND` raise ValueError, as do weights beyond 10.

    How they are encoded: the row of a weighted token is e + w (r - e), where r is its own row and e the row of an empty
    prompt in the same place, so 1 changes nothing, to the bit, and 0 leaves what an empty prompt has there. Rows of
    other tokens stay, although in a causal encoder the later ones have seen it. The pooled vector is the plain text's.

    >>> prompt = parse_weights(r"a (red:1.2) [cat] \(tabby\) BREAK a ((dog))")
    >>> prompt, [(prompt[a:b], round(w, 3)) for a, b, w in prompt.weights], [prompt[at:] for at in prompt.breaks]
    ('a red cat (tabby) a dog', [('red', 1.2), ('cat', 0.909), ('dog', 1.21)], ['a dog'])
    """
    for name, pattern in _UNSUPPORTED.items():
        found = pattern.search(text)
        if found:
            _refuse(text, found.start(), f"is {name}, which is not supported here; leave it out")
    reader = _Reader(text)
    end = 0
    for mark in _MARKS.finditer(text):
        reader.copy(end, mark.start())
        reader.read(mark)
        end = mark.end()
    reader.copy(end, len(text))
    return reader.finish()


class _Reader:
    """Characters kept so far, each with its factor and its span in the text, and the brackets still open."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.kept: list[str] = []
        self.factors: list[float] = []
        self.origins: list[Span] = []
        self.open: list[tuple[str, int]] = []
        self.breaks: list[int] = []

    def copy(self, start: int, end: int) -> None:
        for at in range(start, end):
            self.keep(self.text[at], (at, at + 1))

    def keep(self, character: str, origin: Span) -> None:
        self.kept.append(character)
        self.factors.append(1.0)
        self.origins.append(origin)

    def read(self, mark: re.Match[str]) -> None:
        start, bracket, last = mark.start(), mark["bracket"], self.open[-1][0] if self.open else ""
        if mark["escaped"]:
            self.keep(mark["escaped"], mark.span())
        elif mark["brk"]:
            self.keep(" ", mark.span())
            self.breaks.append(len(self.kept))
        elif mark["number"] and last == "(":
            self.close(self.weight(mark["number"], start))
        elif bracket in ("(", "["):
            if len(self.open) == _DEEPEST:
                _refuse(self.text, start, f"opens more than {_DEEPEST} brackets within one another")
            self.open.append((bracket, len(self.kept)))
        elif (last, bracket) in (("(", ")"), ("[", "]")):
            self.close(STEP if bracket == ")" else 1 / STEP)
        else:
            self.copy(*mark.span())

    def weight(self, number: str, at: int) -> float:
        try:
            return float(number)
        except ValueError:
            _refuse(self.text, at, f"has {number!r} for a weight, which is no number")

    def close(self, factor: float) -> None:
        _, start = self.open.pop()
        self.factors[start:] = [old * factor for old in self.factors[start:]]

    def finish(self) -> PromptText:
        while self.open:
            self.close(STEP if self.open[-1][0] == "(" else 1 / STEP)
        weights, end = [], 0
        for factor, run in groupby(self.factors):
            start, end, factor = end, end + len(list(run)), round(factor, 6)  # (x) within [ ] is 1, not nearly so
            if abs(factor) > STRONGEST:
                _refuse(self.text, self.origins[start][0], f"would weigh {factor:.3g}; weights lie in -10 to 10")
            if factor != 1:
                weights.append((start, end, factor))
        plain = PromptText("".join(self.kept), self.text, self.origins, weights, self.breaks)
        return rebased(plain, self.text) if isinstance(self.text, PromptText) else plain


def rebased(text: PromptText, middle: PromptText) -> PromptText:
    """The text, made from `middle`, as one made from what `middle` was made from."""
    origins = [middle.in_source(span) for span in text.origins]
    return PromptText(text, middle.source, origins, text.weights, text.breaks)


def _refuse(text: str, at: int, why: str) -> NoReturn:
    raise ValueError(f"in the prompt, {text[max(0, at - 10) : at + 20]!r} {why}")
