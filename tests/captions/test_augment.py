"""The augmented view: what each recipe may read, with the right chances, from a generator of its own."""

import math
import random
import subprocess
import sys
from collections import Counter
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from debias_diffusion.captions.augment import RECIPES, augment, caption_rng, draw_prefix

SENTENCES = ["s1", "s2", "s3", "s4"]
SENTENCE_LISTS = st.integers(0, 12).map(lambda number: [f"s{i}" for i in range(number)])
NUMBERS = st.integers(0, 2**40)


def _assert_uniform(counts: Counter, outcomes: int, draws: int) -> None:
    assert len(counts) == outcomes
    sigma = math.sqrt(draws * (1 / outcomes) * (1 - 1 / outcomes))
    assert max(abs(count - draws / outcomes) for count in counts.values()) < 5 * sigma


def test_recipes_are_the_rows_of_the_ablation() -> None:
    rows = {name: (row.remove_summary, row.sample, row.token_padding) for name, row in RECIPES.items()}
    assert rows == {
        "long-clip": (False, False, False),
        "+remove": (True, False, False),
        "+sample": (True, True, False),
        "debias": (True, True, True),
    }


def test_recipes_without_sampling() -> None:
    assert augment(SENTENCES, RECIPES["long-clip"], random.Random(0)) == ["s1"]
    assert augment(SENTENCES, RECIPES["+remove"], random.Random(0)) == ["s2", "s3", "s4"]


@pytest.mark.parametrize("name", RECIPES)
def test_one_sentence_is_kept_and_none_stays_none(name: str) -> None:
    assert augment(["only"], RECIPES[name], random.Random(0)) == ["only"]
    assert augment([], RECIPES[name], random.Random(0)) == []


@pytest.mark.parametrize("name", ["+sample", "debias"])
@given(sentences=SENTENCE_LISTS.filter(lambda sentences: len(sentences) > 1), seed=NUMBERS)
def test_sampling_is_one_randint_then_one_sample(name: str, sentences: list[str], seed: int) -> None:
    rng, pool = random.Random(seed), sentences[1:]
    number = rng.randint(1, len(pool))
    assert augment(sentences, RECIPES[name], random.Random(seed)) == rng.sample(pool, number)


@pytest.mark.parametrize("name", RECIPES)
@given(sentences=SENTENCE_LISTS, seed=NUMBERS)
def test_result_is_a_repeatable_choice_without_repeats(name: str, sentences: list[str], seed: int) -> None:
    before = list(sentences)
    chosen = augment(sentences, RECIPES[name], random.Random(seed))
    assert chosen == augment(tuple(sentences), RECIPES[name], random.Random(seed))
    assert set(chosen) <= set(sentences)
    assert len(chosen) == len(set(chosen))
    assert bool(chosen) == bool(sentences)
    assert sentences == before
    if RECIPES[name].remove_summary and len(sentences) > 1:
        assert sentences[0] not in chosen


def test_every_size_is_equally_likely_and_every_order_within_it() -> None:
    draws = 12_000
    seen = [tuple(augment(SENTENCES, RECIPES["debias"], caption_rng(0, 0, index))) for index in range(draws)]
    sizes = Counter(len(chosen) for chosen in seen)
    _assert_uniform(sizes, 3, draws)
    for size in (1, 2, 3):
        orders = Counter(chosen for chosen in seen if len(chosen) == size)
        _assert_uniform(orders, math.perm(3, size), sizes[size])


def test_prefix_is_uniform_over_all_room_there_is() -> None:
    draws = 12_000
    counts = Counter(draw_prefix(243, 248, caption_rng(3, 1, index)) for index in range(draws))
    assert set(counts) == {0, 1, 2, 3, 4, 5}
    _assert_uniform(counts, 6, draws)


def test_prefix_of_a_full_window_is_nothing() -> None:
    assert draw_prefix(248, 248, random.Random(0)) == 0


@pytest.mark.parametrize("num_tokens", [249, -1])
def test_prefix_refuses_tokens_that_do_not_fit(num_tokens: int) -> None:
    with pytest.raises(ValueError, match=f"num_tokens is {num_tokens}.*context_length=248"):
        draw_prefix(num_tokens, 248, random.Random(0))


@given(st.tuples(NUMBERS, NUMBERS, NUMBERS), st.tuples(NUMBERS, NUMBERS, NUMBERS))
def test_generators_are_equal_only_for_equal_numbers(left: tuple[int, int, int], right: tuple[int, int, int]) -> None:
    equal = caption_rng(*left).getrandbits(128) == caption_rng(*right).getrandbits(128)
    assert equal == (left == right)


def test_numbers_that_sum_or_concatenate_alike_still_differ() -> None:
    alike = [(0, 0, 12), (0, 12, 0), (12, 0, 0), (1, 2, 9), (0, 1, 2), (0, 0, 121), (1, 21, 0), (12, 1, 0), (1, 0, 21)]
    assert len({caption_rng(*numbers).getrandbits(128) for numbers in alike}) == len(alike)


def test_neighbouring_streams_are_unrelated() -> None:
    # First draws of neighbours along each axis: uniform in themselves, and as pairs.
    for axis in range(3):
        numbers = [[5, 5, 5] for _ in range(8_001)]
        for step, row in enumerate(numbers):
            row[axis] += step
        draws = [caption_rng(*row).randrange(4) for row in numbers]
        _assert_uniform(Counter(draws), 4, len(draws))
        pairs = Counter(pairwise(draws))
        _assert_uniform(pairs, 16, len(draws) - 1)


def test_generator_is_the_same_in_another_process_and_as_recorded() -> None:
    # Recorded once; a change here changes every training run's captions, so it needs a good reason.
    assert caption_rng(0, 0, 0).random() == 0.09804161357043362
    code = "from debias_diffusion.captions.augment import caption_rng; print(caption_rng(7, 2, 123456).random())"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert float(result.stdout) == caption_rng(7, 2, 123456).random()


@pytest.mark.parametrize(("position", "name"), [(0, "seed"), (1, "epoch"), (2, "index")])
def test_negative_numbers_are_refused_by_name(position: int, name: str) -> None:
    numbers = [1, 1, 1]
    numbers[position] = -3
    with pytest.raises(ValueError, match=f"{name} is -3.*zero or more"):
        caption_rng(*numbers)


def test_global_seeds_change_nothing() -> None:
    def draw() -> tuple[list[str], int]:
        rng = caption_rng(0, 0, 0)
        return augment(SENTENCES, RECIPES["debias"], rng), draw_prefix(10, 248, rng)

    random.seed(1)
    first = draw()
    random.seed(2)
    assert draw() == first
