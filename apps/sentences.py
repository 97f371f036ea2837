"""A prompt sentence by sentence: how much of each an encoder reads, and what in it can be checked in the picture."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from PIL import Image

from debias_diffusion.captions.sentences import split_sentences
from debias_diffusion.data import wording
from debias_diffusion.data.scene_reader import Reading, read_scene, score_thing
from debias_diffusion.data.scenes import COLOURS, SHAPES, SIZE, Thing
from debias_diffusion.encoders.encoder import Encoder
from debias_diffusion.evaluation.coverage import sentence_coverage
from debias_diffusion.sdxl.prompts import TokenReport, clean_prompt


@dataclass(frozen=True)
class Sentence:
    """A sentence of a cleaned prompt: its text, where its characters start, and its first and last word's number."""

    text: str
    start: int
    first_word: int
    num_words: int


def read_sentences(prompt: str) -> list[Sentence]:
    """The sentences of a prompt, cleaned as the encoders will read it; a line break ends one too.

    >>> [(s.text, s.start, s.first_word, s.num_words) for s in read_sentences("A  red star.  A dog runs!")]
    [('A red star.', 0, 0, 3), ('A dog runs!', 12, 3, 3)]
    """
    text = str(clean_prompt(prompt))
    sentences, cursor, words = [], 0, 0
    for piece in split_sentences(prompt):
        start = max(cursor, text.find(piece, cursor))
        count = len(piece.split())
        sentences.append(Sentence(piece, start, words, count))
        cursor, words = start + len(piece), words + count
    return sentences


def read_shares(sentences: Sequence[Sentence], reports: Sequence[TokenReport]) -> list[float]:
    """The share (0-1) of each sentence's words that both encoders of a set see; `reports` are its of the prompt.

    What is cut is always the end, so the number of words cut tells where reading stopped.
    """
    total = sum(sentence.num_words for sentence in sentences)
    cut = max((len(report.cut) for report in reports if not report.negative), default=0)
    read = total - cut
    return [min(1.0, max(0.0, (read - s.first_word) / s.num_words)) for s in sentences]


@dataclass(frozen=True)
class Drawn:
    """How many of the things a sentence describes a picture shows: right in colour, shape and size at their place."""

    right: int
    told: int


def told_things(sentence: str) -> list[Thing]:
    """The things of the miniature world that a sentence describes; none where it is not plainly of that world.

    >>> told_things("A tiny red star can be seen in the top left of the scene, adding a small accent.")
    [Thing(shape='star', colour='red', place=(0, 0), large=False)]
    >>> [thing.large for thing in told_things("A large pink ring in the top left and a large red cross in the top right.")]
    [True, True]
    >>> told_things("A red star beside a blue ring.")
    []
    """
    text = sentence.lower()
    shapes, colours, places = (re.findall(pattern, text) for pattern in _patterns())
    if not shapes or not len(shapes) == len(colours) == len(places):
        return []
    is_large = len(re.findall(r"\blarge\b", text)) == len(shapes)
    return [
        Thing(shape, colour, _cells()[place], is_large)
        for shape, colour, place in zip(shapes, colours, places, strict=True)
    ]


def drawn_things(sentences: Sequence[Sentence], pictures: Sequence[Path]) -> list[Drawn | None]:
    """What the pictures of one set show of each sentence, over all seeds; None for a sentence that tells no such thing.

    Pictures of another size than the miniature world's show nothing that could be read: all None.
    """
    told = [told_things(sentence.text) for sentence in sentences]
    readings = [] if not any(told) else [reading for path in pictures if (reading := _read(path)) is not None]
    if not readings:
        return [None] * len(sentences)
    return [
        Drawn(sum(score_thing(r, thing).all_right for r in readings for thing in things), len(things) * len(readings))
        if things
        else None
        for things in told
    ]


def judged(judge: Encoder, prompt: str, pictures: Sequence[Path]) -> list[float]:
    """Cosine of each sentence of a prompt with the pictures of one set, by an independent encoder, mean over seeds."""
    scores = []
    for path in pictures:
        with Image.open(path) as image:
            scores.append([each.cosine for each in sentence_coverage(judge, image.convert("RGB"), prompt)])
    return [sum(column) / len(column) for column in zip(*scores, strict=True)]


def _read(path: Path) -> Reading | None:
    with Image.open(path) as image:
        return read_scene(image) if image.size == (SIZE, SIZE) else None


@cache
def _cells() -> dict[str, tuple[int, int]]:
    return {phrase: cell for cell, phrases in wording.PLACES.items() for phrase in phrases}


@cache
def _patterns() -> tuple[re.Pattern[str], ...]:
    return tuple(re.compile(rf"\b(?:{'|'.join(words)})\b") for words in (SHAPES, COLOURS, _cells()))
