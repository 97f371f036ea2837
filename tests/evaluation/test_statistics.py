"""Intervals and p-values against sums written out, brute force over all sign flips, and a resampling loop."""

import itertools
import math
import time

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from debias_diffusion.evaluation.statistics import bootstrap_interval, drop, paired_test

HITS = st.lists(st.integers(0, 1), min_size=1, max_size=10)


def resampled_interval(hits: np.ndarray, groups: np.ndarray, samples: int) -> tuple[float, float]:
    """The cluster bootstrap as a plain loop: draw groups with replacement, take the share of hits among them."""
    generator = np.random.default_rng(1)
    members = [hits[groups == group] for group in np.unique(groups)]
    shares = []
    for _ in range(samples):
        drawn = generator.integers(len(members), size=len(members))
        shares.append(100 * np.concatenate([members[index] for index in drawn]).mean())
    low, high = np.quantile(shares, [0.025, 0.975])
    return float(low), float(high)


def brute_force_p_value(differences: list[int]) -> float:
    """Every way of giving each difference a sign, counted."""
    observed = abs(sum(differences))
    flips = list(itertools.product((-1, 1), repeat=len(differences)))
    extreme = sum(abs(sum(s * d for s, d in zip(signs, differences, strict=True))) >= observed for signs in flips)
    return extreme / len(flips)


def test_interval_has_the_normal_width() -> None:
    hits = np.arange(5000) % 10 < 3
    low, high = bootstrap_interval(hits, samples=20000)
    half_width = 1.96 * 100 * math.sqrt(0.3 * 0.7 / 5000)
    assert low == pytest.approx(30 - half_width, abs=0.1)
    assert high == pytest.approx(30 + half_width, abs=0.1)


@pytest.mark.parametrize("ragged", [False, True])
def test_grouped_interval_equals_a_resampling_loop(ragged: bool) -> None:
    generator = np.random.default_rng(0)
    sizes = generator.integers(1, 8, size=80) if ragged else np.full(80, 5)
    groups = np.repeat(generator.permutation(80) * 3, sizes)
    hits = (generator.random(80)[:, None] > generator.random(8)).ravel()[: len(groups)].astype(int)
    hits = hits[np.argsort(generator.random(len(groups)))]
    expected = resampled_interval(hits, groups, samples=8000)
    assert bootstrap_interval(hits, groups=groups, samples=20000) == pytest.approx(expected, abs=0.5)


def test_captions_that_agree_within_an_image_widen_the_interval() -> None:
    hits = np.repeat(np.arange(400) % 2, 5)
    low, high = bootstrap_interval(hits)
    grouped_low, grouped_high = bootstrap_interval(hits, groups=np.repeat(np.arange(400), 5))
    # Five equal captions carry the information of one, so the interval is sqrt(5) times wider.
    assert (grouped_high - grouped_low) / (high - low) == pytest.approx(math.sqrt(5), rel=0.1)


def test_groups_of_one_are_no_groups() -> None:
    hits = np.arange(50) % 3 == 0
    assert bootstrap_interval(hits, groups=np.arange(50)[::-1]) == bootstrap_interval(hits)


def test_seed_decides_and_level_widens() -> None:
    hits = torch.arange(200) % 3 == 0
    assert bootstrap_interval(hits, seed=3) == bootstrap_interval(hits.numpy(), seed=3)
    assert bootstrap_interval(hits, seed=3) != bootstrap_interval(hits, seed=4)
    low, high = bootstrap_interval(hits, level=0.99)
    narrow_low, narrow_high = bootstrap_interval(hits, level=0.5)
    assert low < narrow_low < 100 * 67 / 200 < narrow_high < high


def test_five_thousand_queries_take_under_a_second() -> None:
    hits, groups = np.arange(5000) % 3 == 0, np.arange(5000) // 5
    start = time.perf_counter()
    bootstrap_interval(hits, groups=groups, samples=1000)
    paired_test(hits, ~hits, groups)
    assert time.perf_counter() - start < 1.0


def test_mcnemar_by_hand() -> None:
    # 3 queries only a hits, 9 only b hits: p = 2 (C(12,0) + C(12,1) + C(12,2) + C(12,3)) / 2^12 = 598 / 4096.
    hits_a = [1] * 3 + [0] * 9 + [1] * 20 + [0] * 8
    hits_b = [0] * 3 + [1] * 9 + [1] * 20 + [0] * 8
    result = paired_test(torch.tensor(hits_a), torch.tensor(hits_b))
    assert (result["only_a"], result["only_b"]) == (3.0, 9.0)
    assert result["difference"] == pytest.approx(15.0)
    assert result["p_value"] == pytest.approx(598 / 4096, rel=1e-12)
    assert result["low"] < 15.0 < result["high"]
    half_width = 1.96 * 100 * math.sqrt((12 / 40 - 0.15**2) / 40)
    assert result["high"] - result["low"] == pytest.approx(2 * half_width, rel=0.1)


@pytest.mark.parametrize(("only_a", "only_b"), [(400, 520), (30, 2), (0, 3000), (1500, 1500)])
def test_mcnemar_equals_the_sum_of_whole_binomials(only_a: int, only_b: int) -> None:
    flags = np.arange(only_a + only_b) < only_a
    number = only_a + only_b
    tail = sum(math.comb(number, heads) for heads in range(min(only_a, only_b) + 1))
    exact = (
        min(1.0, 2 * tail / 2**number)
        if number < 1000
        else min(1.0, math.exp(math.log(2 * tail) - number * math.log(2)))
    )
    assert paired_test(flags, ~flags)["p_value"] == pytest.approx(exact, rel=1e-9, abs=1e-300)


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_p_value_equals_every_sign_flip_counted(data: st.DataObject) -> None:
    hits_a = data.draw(st.lists(st.integers(0, 1), min_size=1, max_size=16))
    like = st.lists(st.integers(0, 1), min_size=len(hits_a), max_size=len(hits_a))
    hits_b = data.draw(like)
    groups = data.draw(st.lists(st.integers(0, 5), min_size=len(hits_a), max_size=len(hits_a)))
    differences = [0] * 6
    for first, second, group in zip(hits_a, hits_b, groups, strict=True):
        differences[group] += second - first
    result = paired_test(np.array(hits_a), np.array(hits_b), np.array(groups))
    assert result["p_value"] == pytest.approx(brute_force_p_value(differences), rel=1e-9)


@given(HITS)
def test_an_encoder_does_not_differ_from_itself(hits: list[int]) -> None:
    result = paired_test(np.array(hits), np.array(hits))
    assert result == {"difference": 0.0, "low": 0.0, "high": 0.0, "p_value": 1.0, "only_a": 0.0, "only_b": 0.0}


def test_exchanging_the_encoders_turns_the_difference_around() -> None:
    generator = np.random.default_rng(2)
    hits_a, hits_b = generator.random(300) < 0.5, generator.random(300) < 0.6
    one, other = paired_test(hits_a, hits_b), paired_test(hits_b, hits_a)
    assert one["difference"] == pytest.approx(-other["difference"])
    assert one["p_value"] == other["p_value"]
    assert one["low"] == pytest.approx(-other["high"], abs=1.5)


def test_captions_that_flip_together_count_as_one_piece_of_evidence() -> None:
    hits_a, hits_b = np.zeros(25, dtype=int), np.ones(25, dtype=int)
    assert paired_test(hits_a, hits_b)["p_value"] == pytest.approx(2 / 2**25)
    assert paired_test(hits_a, hits_b, np.arange(25) // 5)["p_value"] == pytest.approx(2 / 2**5)


def test_drop_in_points_and_percent() -> None:
    assert drop(50.0, 40.0) == {"points": -10.0, "percent": -20.0}
    assert drop(40.0, 50.0) == {"points": 10.0, "percent": 25.0}
    nothing = drop(0.0, 0.0)
    assert nothing["points"] == 0.0
    assert math.isnan(nothing["percent"])


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: bootstrap_interval(np.array([0, 2])), "values other than 0 and 1"),
        (lambda: bootstrap_interval(np.array([0.0, np.nan])), "values other than 0 and 1"),
        (lambda: bootstrap_interval(np.array([])), "at least one query"),
        (lambda: bootstrap_interval(np.eye(2)), "expected \\(N,\\)"),
        (lambda: bootstrap_interval(np.ones(3), groups=np.ones(2)), "one label for each of 3"),
        (lambda: bootstrap_interval(np.ones(3), level=95.0), "level is 95.0"),
        (lambda: bootstrap_interval(np.ones(3), samples=0), "samples is 0"),
        (lambda: paired_test(np.ones(3), np.ones(2)), "hits_a has 3 queries, hits_b 2"),
        (lambda: paired_test(np.ones(2), np.full(2, 3)), "hits_b holds values"),
    ],
)
def test_errors_say_what_was_expected(call, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()
