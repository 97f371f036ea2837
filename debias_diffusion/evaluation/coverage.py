"""Sentence coverage: how much of a prompt a real picture shows, by an encoder that had no part in drawing it.

Nobody can read a photograph exactly, so an independent encoder judges: each sentence against the picture, by itself, so
that no sentence is deep for the judge. A judge's cosine depends on the sentence's wording more than on the picture; what
counts is the same sentence with pictures of other prompts.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import numpy as np
from PIL import Image

from debias_diffusion.captions.sentences import join_sentences, split_sentences
from debias_diffusion.encoders.encoder import Encoder
from debias_diffusion.encoders.features import image_features, text_features
from debias_diffusion.encoders.tokens import Tokenizer
from debias_diffusion.evaluation.fidelity import BINS, WHOLE

MEASURES = {
    "margin": "margin over other prompts' pictures, cosine x 100",
    "won": "other prompts' pictures beaten (%)",
    "cosine": "cosine x 100",
}
PIECE_TOKENS = 77
"""Tokens of a piece of a sentence, SOT and EOT included: what every CLIP reads, and read in training."""


@dataclass(frozen=True)
class SentenceCoverage:
    """One sentence of a prompt against the picture, as a judge sees it.

    `depth` is the tokens of the prompt up to the sentence's end; `cosine` that of sentence and picture. `margin` is the
    cosine less its mean over pictures of other prompts, and `won` the share of these whose cosine is lower (ties count
    half): 0 and 0.5 is what a picture has that was drawn without the sentence. Both are None without other pictures.
    """

    sentence: str
    depth: int
    cosine: float
    margin: float | None = None
    won: float | None = None


def sentence_coverage(
    encoder: Encoder,
    picture: Image.Image,
    prompt: str,
    others: Sequence[Image.Image] = (),
    *,
    num_tokens: Callable[[str], int] | None = None,
) -> list[SentenceCoverage]:
    """How much of each sentence of `prompt` is in `picture`, judged by `encoder`; none for a prompt without text.

    With t a sentence's piece of at most 77 tokens, n its tokens, x the picture and y_1 ... y_k the others, all as unit
    features: cos(s, x) = sum(n t.x) / sum(n), over the sentence's pieces; margin = cos(s, x) - mean_j cos(s, y_j);
    won = mean_j [cos(s, x) > cos(s, y_j)]. `others` are pictures of other prompts by the same set of encoders, best of
    the same noise. `num_tokens` counts the tokens of a text, SOT and EOT included, for `depth`; the judge's own where None.
    """
    features = image_features(encoder, [picture, *others]).numpy()
    return coverage_of_features(encoder, features, prompt, num_tokens=num_tokens)


def coverage_of_features(
    encoder: Encoder, pictures: np.ndarray, prompt: str, *, num_tokens: Callable[[str], int] | None = None
) -> list[SentenceCoverage]:
    """`sentence_coverage` where the unit features of the pictures are there already: (1 + others, dim), its own first."""
    count = num_tokens or (lambda text: len(encoder.tokenizer.encode(text)))
    sentences = split_sentences(prompt)
    if not sentences:
        return []
    depths = [count(join_sentences(sentences[: i + 1])) for i in range(len(sentences))]
    room = min(PIECE_TOKENS, encoder.context_length)
    pieces = [
        (row, piece) for row, text in enumerate(sentences) for piece in split_pieces(encoder.tokenizer, text, room)
    ]
    weights = np.zeros((len(sentences), len(pieces)), np.float32)
    for column, (row, piece) in enumerate(pieces):
        weights[row, column] = len(encoder.tokenizer.encode(piece)) - 2
    weights /= weights.sum(axis=1, keepdims=True)
    texts = text_features(encoder, [piece for _, piece in pieces]).numpy()
    cosines = weights @ (texts @ pictures.T)  # (sentences, pictures)
    rows = []
    for sentence, depth, (value, *others) in zip(sentences, depths, cosines.tolist(), strict=True):
        margin = value - float(np.mean(others)) if others else None
        won = float(np.mean([(other < value) + 0.5 * (other == value) for other in others])) if others else None
        rows.append(SentenceCoverage(sentence, depth, value, margin, won))
    return rows


def split_pieces(tokenizer: Tokenizer, sentence: str, room: int) -> list[str]:
    """The sentence in as few pieces of whole words as fit `room` tokens each, SOT and EOT included.

    A single word of more tokens than that is a piece of its own.
    """
    pieces: list[str] = []
    current = ""
    for word in sentence.split():
        longer = f"{current} {word}".strip()
        if current and len(tokenizer.encode(longer)) > room:
            pieces.append(current)
            current = word
        else:
            current = longer
    return [*pieces, current] if current else pieces


def coverage_rows(judged: Sequence[tuple[int, SentenceCoverage]], *, seed: int = 0) -> list[dict[str, Any]]:
    """The mean cosine, margin and share won by depth, in the bins of `fidelity`, from (prompt number, sentence) pairs.

    `measures` holds them by name in hundredths, {value, low, high}, with the interval of a bootstrap of whole prompts;
    `margin` and `won` are left out where there were no other pictures. `first`, `last`, `depth` (the mean), `sentences`
    and `prompts` say of what.
    """
    rows = []
    for first, last in (*BINS, *WHOLE):
        inside = [(prompt, one) for prompt, one in judged if first <= one.depth <= last]
        if not inside:
            continue
        prompts = np.array([prompt for prompt, _ in inside])
        measures = {
            name: mean_interval(100 * np.array(values, float), prompts, seed=seed)
            for name in ("cosine", "margin", "won")
            if None not in (values := [getattr(one, name) for _, one in inside])
        }
        depth = float(np.mean([one.depth for _, one in inside]))
        counts = {"sentences": len(inside), "prompts": len(set(prompts.tolist()))}
        rows.append({"first": first, "last": last, "depth": depth, **counts, "measures": measures})
    return rows


def compare_coverage(
    judged: Mapping[str, Sequence[tuple[int, SentenceCoverage]]], *, seed: int = 0
) -> list[dict[str, Any]]:
    """Every two sets on the same sentences and noise: by bin, the mean of what `b` has over `a`, in hundredths.

    Keys `a`, `b`, `first`, `last`, `measure` ("cosine" or "margin"), `difference`, `low`, `high`. Raises ValueError where
    the sets were not judged on the same sentences.
    """
    rows = []
    for (a, first_set), (b, second_set) in combinations(judged.items(), 2):
        pairs = list(zip(first_set, second_set, strict=False))
        if len(first_set) != len(second_set) or any((p, x.sentence) != (q, y.sentence) for (p, x), (q, y) in pairs):
            raise ValueError(
                f"{a} and {b} were not judged on the same sentences; draw the same prompts and seeds with both"
            )
        for first, last in (*BINS, *WHOLE):
            inside = [(p, x, y) for (p, x), (_, y) in pairs if first <= x.depth <= last]
            for measure in ("cosine", "margin") if inside else ():
                both = [(getattr(x, measure), getattr(y, measure)) for _, x, y in inside]
                if None in both[0]:
                    continue
                values = 100 * np.array([after - before for before, after in both])
                found = mean_interval(values, np.array([p for p, _, _ in inside]), seed=seed)
                row = {"a": a, "b": b, "first": first, "last": last, "measure": measure}
                rows.append({**row, "difference": found["value"], "low": found["low"], "high": found["high"]})
    return rows


def mean_interval(
    values: np.ndarray, groups: np.ndarray, *, seed: int = 0, samples: int = 1000, level: float = 0.95
) -> dict[str, float]:
    """The mean of `values` (N,) and its percentile bootstrap interval, whole `groups` (N,) resampled.

    >>> mean_interval(np.array([1.0, 1.0, 1.0]), np.array([0, 0, 1]))
    {'value': 1.0, 'low': 1.0, 'high': 1.0}
    """
    _, member = np.unique(groups, return_inverse=True)
    sums, sizes = np.bincount(member, weights=values), np.bincount(member)
    picks = np.random.default_rng(seed).integers(len(sums), size=(samples, len(sums)))
    means = sums[picks].sum(axis=1) / sizes[picks].sum(axis=1)
    low, high = np.quantile(means, [(1 - level) / 2, (1 + level) / 2])
    return {"value": float(values.mean()), "low": float(low), "high": float(high)}
