"""Where in a caption's tokens its sentences start."""

from collections.abc import Sequence
from itertools import accumulate, chain, pairwise, takewhile

from debias_diffusion.captions.clean import clean_caption
from debias_diffusion.captions.sentences import split_sentences
from debias_diffusion.encoders.tokens import Tokenizer


def sentence_starts(tokenizer: Tokenizer, caption: str, splitter: str = "nupunkt") -> list[int]:
    """The token position at which each sentence of the whole caption starts; the first starts at 1, after SOT, or at 0
    where the tokenizer has no SOT.

    What a splitter drops between sentences (full stops, `</s>`) belongs to the sentence before. Tokens do not
    cross white space, so the tokens of the sentences are those of the caption. Where sentences meet without a space and
    a token does cross, it goes to the later sentence, which may leave none to the earlier. `[]` for a caption without
    text. Raises ValueError for an unknown splitter.
    """
    text = clean_caption(caption)
    bounds = _character_starts(text, split_sentences(caption, splitter))
    first, ids = int(tokenizer.layout.has_sot), tokenizer.encode_words(text)
    pieces = [tokenizer.encode_words(text[start:stop]) for start, stop in pairwise([*bounds, len(text)])]
    if list(chain.from_iterable(pieces)) == ids:
        return [first + before for before in accumulate(map(len, pieces), initial=0)][: len(pieces)]
    shared = [_num_shared(tokenizer.encode_words(text[:start]), ids) for start in bounds]
    return [first + before for before in accumulate(shared, max)]


def _character_starts(text: str, sentences: Sequence[str]) -> list[int]:
    """Where each sentence starts in the cleaned caption; compared without white space, which splitting may add."""
    solid = [index for index, character in enumerate(text) if not character.isspace()]
    packed = "".join(text[index] for index in solid)
    starts: list[int] = []
    cursor = 0
    for sentence in sentences:
        key = "".join(sentence.split())
        cursor = packed.index(key, cursor)
        starts.append(solid[cursor] if starts else 0)  # a mark dropped in front of the first sentence counts as its own
        cursor += len(key)
    return starts


def _num_shared(ids: Sequence[int], others: Sequence[int]) -> int:
    """Ids that both begin with."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(ids, others, strict=False)))
