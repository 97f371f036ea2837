"""Split a caption into sentences and join sentences to a caption, under three named rules.

Which rule the paper's training used is not known. Dropping the first sentence is the method, so a bad cut corrupts it;
the default is therefore the rule that cuts best, and the two of related code are kept for comparison.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from itertools import pairwise, product
from string import ascii_lowercase
from typing import TYPE_CHECKING

from debias_diffusion.captions.clean import clean_lines

if TYPE_CHECKING:
    from nupunkt import PunktSentenceTokenizer

# nupunkt's own model learned from law reports and scanned text: it holds "wall.", "row.", "hand.", "car." and "black."
# for abbreviations and misses the sentence end behind them. Captions get these words instead.
_TITLES = (
    "mr mrs ms dr prof rev hon gen lt col capt cpt sgt cpl gov sen messrs mme mlle st ste jr sr ph.d m.d b.sc m.sc"
)
_NAMES = "mt ft ave blvd rd hwy pkwy bldg apt dept univ inc ltd llc corp co bros assn est no nos vol fig pp ed eds"
_LATIN = "etc vs cf al ca viz approx incl esp misc i.e e.g"
_UNITS = "in lb lbs oz sq cu hr hrs mph tbsp tsp"
_MONTHS = "jan feb mar apr jun jul aug sep sept oct nov dec"
# Two or three dotted letters: U.S., D.C., J.R.R., a.m.
_INITIALISMS = {".".join(letters) for count in (2, 3) for letters in product(ascii_lowercase, repeat=count)}
_ABBREVIATIONS = {word for group in (_TITLES, _NAMES, _LATIN, _UNITS, _MONTHS) for word in group.split()} | _INITIALISMS
# Before a capital these end the sentence more often than not ("5 p.m. Sunlight", "10 in. Behind").
_OFTEN_LAST = {"etc", "fig", "a.m", "p.m", *_UNITS.split()}
# An abbreviation or an initial before one of these, capitalised, ends the sentence ("in the U.S. The flag").
_OPENING_WORDS = (
    "the an this that these those there here it its he she his her they their them we our you your "
    "it's there's he's she's they're "
    "in on at to by of for from with within without into onto above below beneath under underneath over behind beside "
    "besides between beyond near nearby next adjacent opposite across along alongside among amongst amid amidst around "
    "surrounding inside outside against atop toward towards throughout through up down off further farther furthermore "
    "one two three four five six seven eight nine ten several some many most both each every all another other others "
    "only no not just while when where as if after before during since although though despite overall additionally "
    "also however finally then and but or so"
)
_OPENERS = set(_OPENING_WORDS.split())

_CLOSERS = "\"'”’»)\\]}】》」』"
_WIDE = "\u3001-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\uff00-\uff60\U00020000-\U0003ffff"  # no spaces in between
# Ends that nupunkt, written for spaced scripts with ".", "!" and "?", does not see.
_UNSPACED_ENDS = re.compile(
    rf"(?:[。｡।۔؟]+"  # full stops of their own
    rf"|(?<=[{_WIDE}])(?:[!?]+|\.+(?=[{_CLOSERS}]*[{_WIDE}]))"  # ASCII marks (ftfy narrows ！ and ？) in unspaced text
    r"|(?<=[^\W\d_A-Z]{2})(?<!www)[.!?](?=[A-Z][a-z ])(?!(?:Com|Net|Org)\b)"  # "... grass.The dog": a forgotten space
    rf")[{_CLOSERS}]*"
)
# No word is as long. nupunkt's time grows with the square of such a run ("!?!?!?..."), so no end is looked for in one.
_ENDLESS = re.compile(r"(\S{1000,})")
_ENUMERATOR = re.compile(r"\(?\d{1,3}[.)]")
_CONTINUATION = re.compile(rf"[{_CLOSERS}]*\s*[,;:]|[-–—]+\s*[^\W\d_A-Z]")  # `"STOP! ", which is ...`, `"Go!" - in red`
_ENDS_WIDE = re.compile(rf"[{_WIDE}][.!?{_CLOSERS}]*$")
_STARTS_WIDE = re.compile(rf"[\"'(\[]*[{_WIDE}]")


@cache
def _tokenizer() -> "PunktSentenceTokenizer":
    from nupunkt import PunktParameters, PunktSentenceTokenizer  # only this splitter needs it
    from nupunkt.core.constants import ORTHO_MID_LC

    parameters = PunktParameters(
        abbrev_types=set(_ABBREVIATIONS),
        sent_starters=_OPENERS | {"a"},  # not an opener after an initial: "J. A. Smith"
        ortho_context=dict.fromkeys(_OPENERS, ORTHO_MID_LC),
        abbrev_break_rates=dict.fromkeys(_OFTEN_LAST, (100, 100)),
    )
    return PunktSentenceTokenizer(parameters, include_common_abbrevs=False)  # these words alone, in any release


def _split_nupunkt(text: str) -> list[str]:
    sentences: list[str] = []
    pending = ""  # a list number or a mark without words, which belongs to the sentence after it
    for line in text.split("\n"):
        for number, piece in enumerate(_split_line(line)):
            if not _has_word(piece) and sentences and not pending:
                sentences[-1] += " " + piece
            elif not _has_word(piece) or _ENUMERATOR.fullmatch(piece):
                pending = f"{pending} {piece}".strip()
            elif number and sentences and not pending and _CONTINUATION.match(piece):
                sentences[-1] += " " + piece
            else:
                sentences.append(f"{pending} {piece}".strip())
                pending = ""
    if pending and sentences:
        sentences[-1] += " " + pending
    elif pending:
        sentences.append(pending)
    return sentences


def _split_line(line: str) -> list[str]:
    parts = _UNSPACED_ENDS.sub(r"\g<0>\n", line).split("\n")
    return [piece for part in parts for piece in _split_part(part)]


def _split_part(part: str) -> list[str]:
    pieces: list[str] = []
    for number, text in enumerate(_ENDLESS.split(part)):
        found = [text] if number % 2 else [piece.strip() for piece in _tokenizer().tokenize(text) if piece.strip()]
        if number and pieces and found:  # what stands before or behind an endless run belongs to its sentence
            pieces[-1] += " " + found.pop(0)
        pieces += found
    return pieces


def _has_word(text: str) -> bool:
    return any(character.isalnum() for character in text)


def _join_spaced(sentences: Sequence[str]) -> str:
    joined = "".join(sentences[:1])
    for left, right in pairwise(sentences):
        unspaced = _ENDS_WIDE.search(left) and _STARTS_WIDE.match(right)
        joined += right if unspaced else " " + right
    return joined


def _split_flair(text: str) -> list[str]:
    return [piece.strip() for piece in re.split(r"\n|</s>|[.]", text) if piece.strip()]


def _split_long_clip(text: str) -> list[str]:
    return [piece.strip() for piece in text.replace("\n", " ").split(". ") if piece.strip()]


def _join_full_stop(sentences: Sequence[str]) -> str:
    # A sentence that kept its own full stop, such as a caption's last one moved forward, must not get a second.
    return ". ".join([*(sentence.removesuffix(".") for sentence in sentences[:-1]), *sentences[-1:]])


@dataclass(frozen=True)
class Splitter:
    """A named rule: how cleaned lines are cut into sentences, and how sentences become one caption again."""

    name: str
    split: Callable[[str], list[str]]
    join: Callable[[Sequence[str]], str]


SPLITTERS: dict[str, Splitter] = {
    row.name: row
    for row in (
        Splitter("nupunkt", _split_nupunkt, _join_spaced),
        Splitter("flair", _split_flair, _join_full_stop),
        Splitter("long-clip", _split_long_clip, _join_full_stop),
    )
}


def split_sentences(caption: str, splitter: str = "nupunkt") -> list[str]:
    """The sentences of a caption in order, none of them empty; `[]` only for a caption without visible text.

    Every splitter works on the cleaned caption (`clean_caption`), its line breaks kept.
    `"nupunkt"` ends a sentence at every line break, and knows abbreviations, initials, decimals, closing quotes,
    Chinese and Japanese full stops, and full stops without a space behind them; sentences keep their marks. List
    numbers and marks without words never stand alone. A hard-wrapped caption must be unwrapped first.
    `"flair"` cuts at every full stop, line break and `</s>`. No sentence keeps its full stop, and joining puts one
    between sentences but none at the end, as in the code it comes from.
    `"long-clip"` cuts at ". ", so the last sentence alone keeps its full stop.

    Raises ValueError for an unknown splitter.

    >>> split_sentences("St. Mark's tower is 3.5 m wide. It opens at 5 p.m. A U.S. ARMY truck waits.")
    ["St. Mark's tower is 3.5 m wide.", 'It opens at 5 p.m.', 'A U.S. ARMY truck waits.']
    >>> split_sentences("A cat.\\n\\nNo full stop\\nWow! Really?")
    ['A cat.', 'No full stop', 'Wow!', 'Really?']
    >>> split_sentences("It is 3.5 m wide. A cat sleeps.", "flair")
    ['It is 3', '5 m wide', 'A cat sleeps']
    >>> split_sentences("It is 3.5 m wide. A cat sleeps.", "long-clip")
    ['It is 3.5 m wide', 'A cat sleeps.']
    """
    _find_splitter(splitter)
    split = _split_remembered if len(caption) <= _LONGEST_REMEMBERED else _split_caption
    return list(split(caption, splitter))


_LONGEST_REMEMBERED = 4096
"""Characters: ten times a long caption, so that what is remembered stays below 100 MB whatever comes in."""


def _split_caption(caption: str, splitter: str) -> tuple[str, ...]:
    lines = clean_lines(caption)
    if not lines:
        return ()
    return tuple(_find_splitter(splitter).split("\n".join(lines))) or (" ".join(lines),)


# One caption is split for every perturbation of it. As many as the largest long-caption benchmark has (DCI, 7,805).
_split_remembered = lru_cache(maxsize=8192)(_split_caption)


def join_sentences(sentences: Sequence[str], splitter: str = "nupunkt") -> str:
    """One caption made of the sentences in the given order; the empty string for none.

    `"nupunkt"` puts a space between sentences, and nothing between two in a script written without spaces; the other
    two put ". ", as the code they come from does. Raises ValueError for an unknown splitter.

    >>> join_sentences(["It is red.", "A cat sleeps."])
    'It is red. A cat sleeps.'
    >>> join_sentences(["A cat sleeps.", "It is red"], "long-clip")
    'A cat sleeps. It is red'
    """
    return _find_splitter(splitter).join(sentences)


def _find_splitter(name: str) -> Splitter:
    if name not in SPLITTERS:
        raise ValueError(f"unknown splitter {name!r}; choose one of {', '.join(SPLITTERS)}")
    return SPLITTERS[name]
