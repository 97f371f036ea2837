"""What a visitor asks for: checked before anything is computed, whoever sends it."""

import math
import re
from dataclasses import dataclass
from typing import Any

from debias_diffusion.captions.sentences import split_sentences
from debias_diffusion.sdxl.generate import Settings
from debias_diffusion.sdxl.prompts import SYNTAXES, PromptLine

MAX_CHARACTERS = 40_000
MAX_SENTENCES = 500
"""Each is read once by every encoder, while other visitors wait."""
MAX_SEEDS = 9
MAX_STEPS = 150
MAX_SEED = 2**53 - 1
"""The largest whole number that a browser passes on unchanged."""
MAX_COLUMNS = 3
LENGTHS = ("auto", "77", "248")

_BUCKETS = ((1024, 1024), (1152, 896), (896, 1152), (1216, 832), (832, 1216), (1344, 768), (768, 1344))
"""Picture sizes SDXL was trained at; a smaller checkpoint gets the same shapes at its own scale."""


@dataclass(frozen=True)
class Request:
    """One comparison: a prompt, `num_seeds` seeds from `seed` on, and what all its pictures have in common.

    `sets` are the columns, in order. `length` is the policy: "auto" for 77 rows where the prompt fits them, else more;
    or a number at which it is cut. `blend` is 1 for the encoders as they are, 0 for the checkpoint's own, stretched.
    Raises ValueError for what cannot be drawn.
    """

    prompt: str
    sets: tuple[str, ...]
    negative: str = ""
    seed: int = 0
    num_seeds: int = 1
    steps: int = 30
    guidance_scale: float = 5.0
    width: int | None = None
    height: int | None = None
    length: str = "auto"
    syntax: str = "plain"
    blend: float = 1.0

    def __post_init__(self) -> None:
        refuse_empty(self.prompt)
        for name, text in (("prompt", self.prompt), ("negative prompt", self.negative)):
            refuse_long(text, name)
        if not 1 <= len(self.sets) <= MAX_COLUMNS or len(set(self.sets)) < len(self.sets):
            raise ValueError(f"{len(self.sets)} sets of encoders are chosen; choose 1 to {MAX_COLUMNS} different ones")
        for name, number, least, most in (
            ("seed", self.seed, 0, MAX_SEED),
            ("number of seeds", self.num_seeds, 1, MAX_SEEDS),
            ("number of steps", self.steps, 1, MAX_STEPS),
            ("guidance", self.guidance_scale, 0, 50),
            ("blend", self.blend, 0, 1),
        ):
            if not least <= number <= most:
                raise ValueError(f"the {name} is {number}; expected {least:,} to {most:,}")
        read_length(self.length)
        if self.syntax not in SYNTAXES:
            raise ValueError(f"no prompt syntax is called {self.syntax!r}; syntaxes: {', '.join(SYNTAXES)}")

    @property
    def seeds(self) -> list[int]:
        return [self.seed + i for i in range(self.num_seeds)]

    @property
    def line(self) -> PromptLine:
        """The prompt as the library takes it; no negative is not the same as an empty one."""
        return PromptLine(self.prompt, negative=self.negative if self.negative.strip() else None)

    @property
    def settings(self) -> Settings:
        return Settings(
            steps=self.steps,
            guidance_scale=self.guidance_scale,
            width=self.width,
            height=self.height,
            max_length=read_length(self.length),
            syntax=self.syntax,
        )


def size_names(own: int) -> list[str]:
    """The sizes offered for a checkpoint whose own side is `own` pixels, its square first.

    >>> size_names(1024)[:2]
    ['1024 x 1024', '1152 x 896']
    >>> size_names(64)[:2]
    ['64 x 64', '72 x 56']
    """
    scaled = [tuple(max(8, round(side * own / 1024 / 8) * 8) for side in bucket) for bucket in _BUCKETS]
    return [f"{width} x {height}" for width, height in dict.fromkeys(scaled)]


def read_size(text: str, own: int, multiple: int = 8) -> tuple[int, int]:
    """(width, height) of a size as it is offered or typed: at most twice the checkpoint's `own` side, in steps.

    >>> read_size("72x56", 64)
    (72, 56)
    """
    found = re.fullmatch(r"\s*(\d{1,5})\s*[x×*,]\s*(\d{1,5})\s*", str(text))
    if not found:
        raise ValueError(f"the size is {text!r}; expected width x height in pixels, such as {own} x {own}")
    sides = int(found[1]), int(found[2])
    if any(side % multiple or not multiple <= side <= 2 * own for side in sides):
        raise ValueError(
            f"the size is {sides[0]} x {sides[1]}; each side must be a multiple of {multiple}, at most {2 * own}"
        )
    return sides


def read_length(text: str) -> int | str:
    """The library's `max_length` of one of `LENGTHS`.

    >>> read_length("77"), read_length("auto")
    (77, 'auto')
    """
    if text not in LENGTHS:
        raise ValueError(f"the length is {text!r}; lengths: {', '.join(LENGTHS)}")
    return "auto" if text == "auto" else int(text)


def refuse_empty(text: str | None) -> None:
    """Raises ValueError where a prompt says nothing."""
    if not (text or "").strip():
        raise ValueError("the prompt is empty; write what the picture should show, or choose an example")


def refuse_long(text: str, name: str = "prompt") -> None:
    """Raises ValueError where a text is longer than is taken."""
    if len(text) > MAX_CHARACTERS:
        raise ValueError(
            f"the {name} has {len(text):,} characters; at most {MAX_CHARACTERS:,} are taken. No encoder reads more than "
            "its first thousand words anyway"
        )
    if not is_unicode(text):
        raise ValueError(f"the {name} holds half of a character that needs two; type it again")
    if (count := len(split_sentences(text))) > MAX_SENTENCES:
        raise ValueError(f"the {name} has {count:,} sentences or lines; at most {MAX_SENTENCES} are taken")


def is_unicode(text: str) -> bool:
    """Whether a text can be written down: a lone surrogate cannot.

    >>> is_unicode("é"), is_unicode(chr(0xD800))
    (True, False)
    """
    return not any("\ud800" <= character <= "\udfff" for character in text)


def finite(value: Any, name: str) -> float:
    """A number from what a browser sends for one; an empty field is an error that names it."""
    if value is None or isinstance(value, bool) or not _is_finite(value):
        raise ValueError(f"the {name} is {value!r}; expected a number")
    return float(value)


def whole(value: Any, name: str) -> int:
    """A whole number from what a browser sends for one; an empty field is an error that names it."""
    if value is None or isinstance(value, bool) or not _is_finite(value) or float(value) != int(value):
        raise ValueError(f"the {name} is {value!r}; expected a whole number")
    return int(value)


def _is_finite(value: Any) -> bool:
    try:
        return math.isfinite(float(value))
    except OverflowError:  # a whole number of hundreds of digits
        return False
