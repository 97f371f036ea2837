"""Training's second view of a caption: without its summary sentence, some sentences, another order."""

import hashlib
import operator
import random
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Recipe:
    """What the short branch reads: a row of the paper's ablation."""

    name: str
    remove_summary: bool  # read all sentences but the first; otherwise the first alone
    sample: bool  # read a random number of them in random order
    token_padding: bool  # move padding in front of the text; done on token ids, by `draw_prefix`


RECIPES: dict[str, Recipe] = {
    recipe.name: recipe
    for recipe in (
        Recipe("long-clip", remove_summary=False, sample=False, token_padding=False),
        Recipe("+remove", remove_summary=True, sample=False, token_padding=False),
        Recipe("+sample", remove_summary=True, sample=True, token_padding=False),
        Recipe("debias", remove_summary=True, sample=True, token_padding=True),
    )
}


def caption_rng(seed: int, epoch: int, index: int) -> random.Random:
    """A generator that depends on these three numbers alone, with streams unrelated to one another.

    Workers, processes and resumed runs that visit sample `index` in `epoch` therefore draw the same caption. The
    numbers are hashed because `random.Random` turns nearby seeds, or a sum of the three, into related or equal streams.
    Raises ValueError for a negative number.
    """
    numbers = {"seed": seed, "epoch": epoch, "index": index}
    for name, number in numbers.items():
        if number < 0:
            raise ValueError(f"{name} is {number}, but must be zero or more; give each run a seed of its own from 0 up")
    key = ":".join(str(operator.index(number)) for number in numbers.values())
    return random.Random(int.from_bytes(hashlib.blake2b(key.encode(), digest_size=16).digest(), "little"))


def augment(sentences: Sequence[str], recipe: Recipe, rng: random.Random) -> list[str]:
    """The sentences the short branch reads, in the order it reads them (paper: text augmentation).

    With `remove_summary` the pool is every sentence but the first, without it the first alone; a caption of one
    sentence keeps it, and no sentences give none. With `sample`, n is drawn uniformly from 1 to the size of the pool,
    then n sentences without replacement, in the order drawn.

    >>> augment(["A park.", "A dog runs.", "A boy laughs."], RECIPES["+remove"], caption_rng(0, 0, 0))
    ['A dog runs.', 'A boy laughs.']
    >>> augment(["A park.", "A dog runs.", "A boy laughs."], RECIPES["long-clip"], caption_rng(0, 0, 0))
    ['A park.']
    """
    pool = list(sentences[1:] or sentences) if recipe.remove_summary else list(sentences[:1])
    if not recipe.sample or not pool:
        return pool
    return rng.sample(pool, rng.randint(1, len(pool)))


def draw_prefix(num_tokens: int, context_length: int, rng: random.Random) -> int:
    """How many padding tokens go between the start token and the text: uniform over 0 to all there are.

    `num_tokens` counts the start and end tokens, so no text token is ever pushed out (paper: token padding). Raises
    ValueError where the tokens do not fit.
    """
    if not 0 <= num_tokens <= context_length:
        raise ValueError(
            f"num_tokens is {num_tokens}, but must be from 0 to context_length={context_length}; cut the text first"
        )
    return rng.randint(0, context_length - num_tokens)
