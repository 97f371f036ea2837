"""Evaluation's rewritten captions, by name: sentences swapped, moved, removed, preceded by filler, words dropped."""

import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from debias_diffusion.captions.augment import caption_rng
from debias_diffusion.captions.sentences import join_sentences, split_sentences

FILLER = "This is a photo."

Rewrite = Callable[[list[str], random.Random], list[str]]


@dataclass(frozen=True)
class Perturbation:
    """A named rewrite of a caption's sentences; what needs a tokenizer or another caption is carried as data."""

    name: str
    rule: str  # one line, including what becomes of a caption with too few sentences
    apply: Rewrite = field(compare=False)
    max_tokens: int | None = None  # the text is to be cut to this many tokens, both end tokens counted
    uses_short_caption: bool = False  # the pair's own short caption is to be read instead


def _unchanged(sentences: list[str], rng: random.Random) -> list[str]:
    return sentences


def _swap(position: int) -> Rewrite:
    def apply(sentences: list[str], rng: random.Random) -> list[str]:
        swapped = list(sentences)
        if swapped:
            last = min(position, len(swapped)) - 1
            swapped[0], swapped[last] = swapped[last], swapped[0]
        return swapped

    return apply


def _move_first(position: int) -> Rewrite:
    return lambda sentences, rng: [*sentences[1:position], *sentences[:1], *sentences[position:]]


def _remove_first(sentences: list[str], rng: random.Random) -> list[str]:
    return sentences[1:] or sentences


def _shuffle(sentences: list[str], rng: random.Random) -> list[str]:
    return rng.sample(sentences, len(sentences))


def _drop_words(probability: float) -> Rewrite:
    def apply(sentences: list[str], rng: random.Random) -> list[str]:
        kept = [[word for word in sentence.split() if rng.random() >= probability] for sentence in sentences]
        if not any(kept):
            kept = [[rng.choice(words)] if (words := " ".join(sentences).split()) else []]
        return [" ".join(words) for words in kept if words]

    return apply


def _prepend_filler(count: int, first: int | None = None) -> Rewrite:
    return lambda sentences, rng: [FILLER] * count + sentences[:first]


def _truncate(name: str, count: int) -> Perturbation:
    if count < 3:
        raise ValueError(f"{name!r} leaves no text: the two end tokens count too, so cut to 3 tokens or more")
    return Perturbation(name, f"cut to {count} tokens, both end tokens counted", _unchanged, max_tokens=count)


@dataclass(frozen=True)
class _Form:
    form: str  # as shown to people; a capital letter stands for a number
    pattern: str
    build: Callable[..., Perturbation]  # the name, then the numbers found in it, as strings


_COUNT = "([1-9][0-9]*)"
_COUNT_OR_0 = "(0|[1-9][0-9]*)"
_PROBABILITY = r"(0|1|0\.[0-9]+|1\.0+)"

_FORMS = (
    _Form("none", "none", lambda name: Perturbation(name, "the caption unchanged", _unchanged)),
    _Form(
        "swap_1_K",
        f"swap_1_{_COUNT}",
        lambda name, k: Perturbation(
            name, f"first and sentence {k} exchanged; the last one where there are fewer", _swap(int(k))
        ),
    ),
    _Form(
        "move_first_to_K",
        f"move_first_to_{_COUNT}",
        lambda name, k: Perturbation(
            name, f"first sentence moved to place {k}; to the end where there are fewer", _move_first(int(k))
        ),
    ),
    _Form(
        "remove_first",
        "remove_first",
        lambda name: Perturbation(name, "first sentence removed; kept where it is the only one", _remove_first),
    ),
    _Form(
        "first_only",
        "first_only",
        lambda name: Perturbation(name, "first sentence alone", lambda sentences, rng: sentences[:1]),
    ),
    _Form(
        "first_N",
        f"first_{_COUNT}",
        lambda name, n: Perturbation(
            name, f"first {n} sentences in order; all where there are fewer", lambda sentences, rng: sentences[: int(n)]
        ),
    ),
    _Form(
        "swap_2",
        "swap_2",
        lambda name: Perturbation(
            name,
            "second then first sentence, rest dropped; unchanged where there is one",
            lambda sentences, rng: sentences[:2][::-1],
        ),
    ),
    _Form("shuffle", "shuffle", lambda name: Perturbation(name, "all sentences in random order", _shuffle)),
    _Form(
        "last_N",
        f"last_{_COUNT}",
        lambda name, n: Perturbation(
            name, f"last {n} sentences in order; all where there are fewer", lambda sentences, rng: sentences[-int(n) :]
        ),
    ),
    _Form(
        "filler_K",
        f"filler_{_COUNT_OR_0}",
        lambda name, k: Perturbation(name, f'{k} times "{FILLER}", then the caption', _prepend_filler(int(k))),
    ),
    _Form(
        "first_N_filler_K",
        f"first_{_COUNT}_filler_{_COUNT_OR_0}",
        lambda name, n, k: Perturbation(
            name,
            f'{k} times "{FILLER}", then the first {n} sentences; all where there are fewer',
            _prepend_filler(int(k), int(n)),
        ),
    ),
    _Form(
        "dropout_P",
        f"dropout_{_PROBABILITY}",
        lambda name, p: Perturbation(
            name, f"each word dropped with probability {p}; a random one kept where none is left", _drop_words(float(p))
        ),
    ),
    _Form("truncate_N", f"truncate_{_COUNT}", lambda name, n: _truncate(name, int(n))),
    _Form(
        "short",
        "short",
        lambda name: Perturbation(name, "the pair's own short caption", _unchanged, uses_short_caption=True),
    ),
)

PERTURBATION_FORMS: tuple[str, ...] = tuple(row.form for row in _FORMS)


def parse_perturbation(name: str) -> Perturbation:
    """The perturbation a name stands for (paper: robustness experiments; forms in `PERTURBATION_FORMS`).

    Raises ValueError for a name of no known form.

    >>> parse_perturbation("move_first_to_3").apply(["A.", "B.", "C.", "D."], random.Random(0))
    ['B.', 'C.', 'A.', 'D.']
    >>> parse_perturbation("swap_1_4").rule
    'first and sentence 4 exchanged; the last one where there are fewer'
    """
    for row in _FORMS:
        if match := re.fullmatch(row.pattern, name):
            return row.build(name, *match.groups())
    raise ValueError(
        f"unknown perturbation {name!r}; choose one of {', '.join(PERTURBATION_FORMS)}, "
        "with whole numbers for K and N and a probability from 0 to 1 for P"
    )


def perturb_captions(captions: Sequence[str], name: str, *, seed: int = 0, splitter: str = "nupunkt") -> list[str]:
    """The captions rewritten by the named perturbation, one for one.

    Each caption draws from a generator of its own, given by the seed and its place, so a part of a list gives the
    same beginning. `none`, `truncate_N` and `short` return the captions as they are: the last two ask for something
    only the caller has, a tokenizer or the short captions, and say so on the `Perturbation`. Words are what white space
    parts, so `dropout_P` takes a Chinese or Japanese sentence as one. Raises ValueError for an unknown name, and for
    an unknown splitter where captions are split.

    >>> perturb_captions(["A park. A dog runs. A boy laughs.", "A cat."], "remove_first")
    ['A dog runs. A boy laughs.', 'A cat.']
    """
    apply = parse_perturbation(name).apply
    if apply is _unchanged:
        return list(captions)
    return [
        join_sentences(apply(split_sentences(caption, splitter), caption_rng(seed, 0, index)), splitter)
        for index, caption in enumerate(captions)
    ]
