"""Prompts as the encoders will read them: cleaned as in training, reported in the user's own words."""

import copy
import difflib
import importlib.util
import itertools
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from diffusers import DiffusionPipeline, StableDiffusionXLPipeline

from debias_diffusion.captions.clean import clean_caption
from debias_diffusion.data.text_files import json_lines, read_text
from debias_diffusion.sdxl.weights import PromptText, Span, parse_weights

Text = str | list[str]

SYNTAXES: dict[str, Callable[[PromptText], PromptText]] = {"plain": lambda text: text, "a1111": parse_weights}
"""How a prompt's brackets are read: as characters, or as weights. The pipeline refuses plain text with obvious weights."""

_FILE = "pipeline_debias_sdxl.py"
_MANY, _NEAR = 1000, 8
_CLASS = "DebiasStableDiffusionXLPipeline"


@dataclass(frozen=True)
class PromptLine:
    """One line of a prompt file; what is None is left to the settings of the run."""

    prompt: str
    prompt_2: str | None = None
    negative: str | None = None
    seed: int | None = None


@dataclass(frozen=True)
class TokenReport:
    """What one text encoder (`slot`) reads of one text of a batch, the negative one or the prompt.

    `num_tokens` and `limit` count BOS and EOS. `cut` are the spans, in `text` as the user wrote it, of the words the
    encoder never sees; a word it sees the start of has the rest of it there.
    """

    index: int
    slot: str
    negative: bool
    text: str
    num_tokens: int
    limit: int
    chunks: int
    cut: tuple[Span, ...]

    @property
    def words_cut(self) -> tuple[str, ...]:
        """The words the encoder never sees."""
        return tuple(self.text[start:end] for start, end in self.cut)


def clean_prompt(text: str) -> PromptText:
    """The prompt as training cleaned its captions (`clean_caption`), which knows where in `text` each character was.

    >>> prompt = clean_prompt("a  “red” caf&eacute;")
    >>> prompt, prompt.source[slice(*prompt.in_source((8, 12)))]
    ('a "red" café', 'caf&eacute;')
    """
    if not isinstance(text, str):
        raise ValueError(f"a prompt is {text!r}; expected a string")
    words = clean_caption(text).split()
    origins: list[Span] = []
    for word, (start, end) in zip(words, _word_origins(text, words), strict=True):
        if origins:
            origins.append((origins[-1][1], max(start, origins[-1][1])))
        is_same = text[start:end] == word
        origins += [(start + i, start + i + 1) if is_same else (start, end) for i in range(len(word))]
    return PromptText(" ".join(words), text, origins)


def read_prompt(text: str, syntax: str = "plain") -> PromptText:
    """The prompt cleaned, and its weights parsed where `syntax` is "a1111"; the pipeline encodes it as it is."""
    if syntax not in SYNTAXES:
        raise ValueError(f"no prompt syntax is called {syntax!r}; syntaxes: {', '.join(SYNTAXES)}")
    return SYNTAXES[syntax](clean_prompt(text))


def read_prompts(path: str | Path) -> list[PromptLine]:
    """The prompts of a file: .txt holds one a line, .jsonl objects with "prompt" and, where wanted, the other fields of
    `PromptLine`. Errors name the line."""
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"no file of prompts at {path}")
    if path.suffix == ".txt":
        lines = [PromptLine(line) for line in read_text(path).splitlines() if line.strip()]
    elif path.suffix == ".jsonl":
        lines = [_prompt_line(row, where) for where, row in json_lines(path)]
    else:
        raise ValueError(f"{path} is neither .txt (a prompt a line) nor .jsonl (objects with a prompt)")
    if not lines:
        raise ValueError(f"{path} holds no prompt")
    return lines


def prompt_report(
    pipe: DiffusionPipeline,
    prompt: Text,
    prompt_2: Text | None = None,
    negative_prompt: Text | None = None,
    negative_prompt_2: Text | None = None,
    *,
    max_length: int | str | None = None,
    syntax: str = "plain",
) -> list[TokenReport]:
    """What each encoder reads of each text, in the order of the pipeline's own report, with spans in the user's words.

    `max_length` None is what the pipeline does by itself: "auto" in this project's, and in the stock one, whose
    encoders must then be of one length, that of its tokenizers.
    """
    own = debias_pipeline(pipe)
    if max_length is None:
        max_length = "auto" if own is pipe else _stock_length(pipe)
    texts = [_read_each(value, syntax) for value in (prompt, prompt_2, negative_prompt, negative_prompt_2)]
    return [_in_source(row) for row in own.prompt_report(*texts, max_length=max_length)]


def debias_pipeline(pipe: DiffusionPipeline) -> Any:
    """This project's pipeline with the parts of a stock SDXL one, which keeps working; itself if it is one already."""
    if type(pipe).__name__ == _CLASS:
        return pipe
    if type(pipe) is not StableDiffusionXLPipeline:
        raise ValueError(
            f"got a {type(pipe).__name__}, expected a StableDiffusionXLPipeline. Others, such as img2img and ControlNet, "
            f"take what a {_CLASS} gives: pipe(**debias_pipeline(sdxl).prompt_embeddings(prompt), ...)"
        )
    # Not from_pipe, which casts every shared module to one dtype; a copy keeps offload, watermark and progress bar too.
    own = copy.copy(pipe)
    own.__class__ = pipeline_class()
    return own


def pipeline_file() -> Path:
    """The file of this project's pipeline, as `custom_pipeline=` takes it: in pipelines/ of a checkout, beside this module
    in an installed package."""
    here = Path(__file__).resolve()
    places = (here.parents[2] / "pipelines" / _FILE, here.with_name(_FILE))
    for path in places:
        if path.is_file():
            return path
    raise FileNotFoundError(
        f"{_FILE} is in neither {places[0].parent} nor {places[1].parent}; install the package again"
    )


@cache
def pipeline_class() -> type[StableDiffusionXLPipeline]:
    """The class in `pipeline_file`."""
    path = pipeline_file()
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} cannot be imported")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where pickling looks for its classes
    spec.loader.exec_module(module)
    found: type[StableDiffusionXLPipeline] = getattr(module, _CLASS)
    return found


def _word_origins(text: str, words: list[str]) -> list[Span]:
    """The span in `text` each cleaned word comes from: cleaned one by one, words nearly always give the same ones."""
    pieces = [
        (piece, found.span())
        for found in re.finditer(r"\S+", text)
        for piece in (clean_caption(found[0]).split() if _may_change(found[0]) else [found[0]])
    ]
    if [piece for piece, _ in pieces] == words:
        return [span for _, span in pieces]
    spans: list[Span] = []
    for is_same, a, b, c, d in _matches([piece for piece, _ in pieces], words):
        if is_same:
            spans += [span for _, span in pieces[a:b]]
        else:  # cleaned by what stands around them: all of these words come from all of those
            start = pieces[a][1][0] if a < len(pieces) else len(text)
            spans += [(start, max(start, pieces[b - 1][1][1]) if b else start)] * (d - c)
    return spans


def _matches(pieces: list[str], words: list[str]) -> Iterator[tuple[bool, int, int, int, int]]:
    """Runs `pieces[a:b]` and `words[c:d]` that are the same, or stand for each other, in order and without a gap.

    difflib takes time as the square of the words, or worse; beyond `_MANY` they are matched within `_NEAR` of each other.
    """
    if len(pieces) + len(words) <= _MANY:
        for tag, a, b, c, d in difflib.SequenceMatcher(None, pieces, words).get_opcodes():
            yield tag == "equal", a, b, c, d
        return
    steps = sorted(itertools.product(range(_NEAR), repeat=2), key=sum)
    a = c = 0
    while a < len(pieces) and c < len(words):
        near = ((i, k) for i, k in steps if pieces[a + i : a + i + 1] == words[c + k : c + k + 1] != [])
        i, k = next(near, (_NEAR, _NEAR))
        b, d = min(a + i, len(pieces)), min(c + k, len(words))
        if (a, c) != (b, d):
            yield False, a, b, c, d
        a, c = b, d
        if (i, k) != (_NEAR, _NEAR):
            yield True, a, a + 1, c, c + 1
            a, c = a + 1, c + 1
    if (a, c) != (len(pieces), len(words)):
        yield False, a, len(pieces), c, len(words)


def _may_change(word: str) -> bool:
    return not word.isascii() or "&" in word or not word.isprintable()


def _read_each(value: Text | None, syntax: str) -> Any:
    if value is None:
        return None
    return [read_prompt(text, syntax) for text in value] if isinstance(value, list) else read_prompt(value, syntax)


def _in_source(row: Any) -> TokenReport:
    fields = row._asdict()
    text = fields["text"]
    if isinstance(text, PromptText):
        spans = dict.fromkeys(text.in_source(span) for span in fields["cut"])  # words may come from one and the same
        fields |= {"text": text.source, "cut": tuple(spans)}
    return TokenReport(**fields)


def _stock_length(pipe: Any) -> int:
    lengths = {name: getattr(pipe, name).model_max_length for name in ("tokenizer", "tokenizer_2")}
    if len(set(lengths.values())) > 1:
        raise ValueError(f"the stock pipeline cannot join encoders of different lengths: {lengths}; give max_length")
    return int(lengths["tokenizer"])


def _prompt_line(row: dict[str, Any], where: str) -> PromptLine:
    unknown = ", ".join(sorted(row.keys() - PromptLine.__dataclass_fields__.keys()))
    if unknown:
        raise ValueError(f"{where}: unknown {unknown}; fields: {', '.join(PromptLine.__dataclass_fields__)}")
    for name, kind in (("prompt", str), ("prompt_2", str), ("negative", str), ("seed", int)):
        value = row.get(name)
        if type(value) is not kind and (value is not None or name == "prompt"):
            raise ValueError(f"{where}: {name} is {value!r}, expected {'text' if kind is str else 'a whole number'}")
    return PromptLine(**row)
