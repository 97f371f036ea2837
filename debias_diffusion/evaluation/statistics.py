"""How sure a recall is, and whether two encoders differ: bootstrap intervals, an exact paired test, drops.

Hits take few distinct values, so queries (or groups of queries) that look alike are counted once and a resample draws
how often each kind comes up. This is the ordinary bootstrap, exactly, at a cost that does not grow with the queries.
"""

import math

import numpy as np
from torch import Tensor

Values = np.ndarray | Tensor


def bootstrap_interval(
    hits: Values, *, groups: Values | None = None, seed: int = 0, samples: int = 1000, level: float = 0.95
) -> tuple[float, float]:
    """Returns the (low, high) percentile bootstrap interval, in percent, of the share of `hits`.

    Shapes: `hits` (N,) of 0/1 or booleans; `groups` (N,) labels, equal where queries belong together (captions of one
    image): whole groups are then resampled, because captions of one image succeed or fail together. When every hit is
    equal the interval is a single point, which says that no variation was seen, not that there is none.

    Raises ValueError for other values or shapes, and for a level outside (0, 1).

    >>> bootstrap_interval(np.array([1, 1, 1, 1]))
    (100.0, 100.0)
    """
    cells, counts = _cells(_as_hits("hits", hits), groups)
    return _interval(cells[:, 1], cells[:, 0], counts, seed=seed, samples=samples, level=level)


def paired_test(
    hits_a: Values,
    hits_b: Values,
    groups: Values | None = None,
    *,
    seed: int = 0,
    samples: int = 1000,
    level: float = 0.95,
) -> dict[str, float]:
    """Returns how much better `b` is than `a` on the same queries, in points, and how likely that is by chance.

    Keys: `difference` (b - a, in points of 100), `low` and `high` (bootstrap interval of it), `p_value` (two-sided),
    `only_a` and `only_b` (queries that only one of them hits).

    The p-value is exact: under the null hypothesis the labels a and b may be exchanged within each query, so only the
    queries on which they differ count, each for either side with even odds (McNemar's test). With `groups` the labels
    are exchanged within a whole group (captions of one image), each group weighing as much as its captions differ.

    Shapes: `hits_a`, `hits_b` (N,) of 0/1 or booleans, `groups` (N,) labels. Raises ValueError where they do not fit.

    >>> result = paired_test(np.array([0, 0, 0, 0, 1]), np.array([1, 1, 1, 1, 1]))
    >>> result["difference"], result["p_value"]
    (80.0, 0.125)
    """
    first, second = _as_hits("hits_a", hits_a), _as_hits("hits_b", hits_b)
    if len(first) != len(second):
        raise ValueError(f"hits_a has {len(first)} queries, hits_b {len(second)}; pass hits on the same queries")
    cells, counts = _cells(second - first, groups)
    low, high = _interval(cells[:, 1], cells[:, 0], counts, seed=seed, samples=samples, level=level)
    return {
        "difference": 100 * float((second - first).mean()),
        "low": low,
        "high": high,
        "p_value": _sign_flip_p_value(cells[:, 1], counts),
        "only_a": float((first > second).sum()),
        "only_b": float((second > first).sum()),
    }


def drop(reference: float, value: float) -> dict[str, float]:
    """Returns the change from `reference` to `value` as `points` (value - reference) and as `percent` of the reference.

    Negative is a loss, the sign the paper's robustness figures have. `percent` is NaN where the reference is 0: a share
    of nothing is not defined, while the points still are.

    >>> drop(80.0, 76.0)
    {'points': -4.0, 'percent': -5.0}
    >>> drop(0.0, 3.0)
    {'points': 3.0, 'percent': nan}
    """
    points = value - reference
    return {"points": points, "percent": 100 * points / reference if reference else math.nan}


def _as_hits(name: str, hits: Values) -> np.ndarray:
    array = hits.detach().cpu().numpy() if isinstance(hits, Tensor) else np.asarray(hits)
    if array.ndim != 1 or len(array) == 0:
        raise ValueError(f"{name} has shape {array.shape}, expected (N,) with at least one query")
    if not np.isin(array, (0, 1)).all():
        raise ValueError(f"{name} holds values other than 0 and 1; pass whether each query hit, e.g. ranks < k")
    return array.astype(np.int64)


def _cells(values: np.ndarray, groups: Values | None) -> tuple[np.ndarray, np.ndarray]:
    """Returns the distinct (size, sum of values) of the groups (cell, 2), and how many groups are alike (cell,).

    Without groups every query is a group of one.
    """
    if groups is None:
        totals = np.stack([np.ones_like(values), values], axis=1)
    else:
        labels = groups.detach().cpu().numpy() if isinstance(groups, Tensor) else np.asarray(groups)
        if labels.shape != (len(values),):
            raise ValueError(f"groups has shape {labels.shape}, expected one label for each of {len(values)} queries")
        _, member = np.unique(labels, return_inverse=True)
        sums = np.zeros(member.max() + 1, dtype=np.int64)
        np.add.at(sums, member, values)
        totals = np.stack([np.bincount(member), sums], axis=1)
    return np.unique(totals, axis=0, return_counts=True)


def _interval(
    values: np.ndarray, sizes: np.ndarray, counts: np.ndarray, *, seed: int, samples: int, level: float
) -> tuple[float, float]:
    """Returns the percentile interval, in points of 100, of sum(values) / sum(sizes) over resampled groups."""
    if not 0 < level < 1:
        raise ValueError(f"level is {level}, expected a share between 0 and 1 such as 0.95")
    if samples < 1:
        raise ValueError(f"samples is {samples}, expected at least 1")
    generator = np.random.default_rng(seed)
    draws = generator.multinomial(counts.sum(), counts / counts.sum(), size=samples)
    shares = 100 * (draws @ values) / (draws @ sizes)
    low, high = np.quantile(shares, [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)


def _sign_flip_p_value(differences: np.ndarray, counts: np.ndarray) -> float:
    """Returns the exact two-sided p-value of the summed differences when each group's sign is a fair coin.

    Groups whose differences have one size share a binomial law; the law of the sum is the convolution of those.
    """
    sizes = np.abs(differences)
    distribution = np.ones(1)
    for size in np.unique(sizes[sizes > 0]):
        number = int(counts[sizes == size].sum())
        spaced = np.zeros(number * size + 1)
        spaced[::size] = _fair_coins(number)
        distribution = np.convolve(distribution, spaced)
    gained = int((counts * np.maximum(differences, 0)).sum())
    lost = int((counts * np.maximum(-differences, 0)).sum())
    # The law is symmetric, so the far side weighs as much as the near one; an even result has p = 1.
    return min(1.0, 2 * float(distribution[: min(gained, lost) + 1].sum()))


def _fair_coins(number: int) -> np.ndarray:
    """Returns the probabilities of 0 ... `number` heads, through logarithms because the coefficients overflow."""
    log_factorial = np.concatenate([[0.0], np.cumsum(np.log(np.arange(1, number + 1)))])
    return np.exp(log_factorial[-1] - log_factorial - log_factorial[::-1] - number * math.log(2))
