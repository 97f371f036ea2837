"""Ranks counted tile by tile are the ranks a full stable sort gives, ties and ragged sizes included."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from debias_diffusion.evaluation.retrieval import Ranks, hits_at, recall_at, retrieval_metrics, retrieval_ranks


def naive_ranks(image_features: Tensor, text_features: Tensor, image_of_text: Tensor) -> tuple[list[int], list[int]]:
    """Ranks from the whole score matrix: sort every row, then look for the positive."""
    scores = text_features.float() @ image_features.float().T
    t2i, i2t = [], []
    for row, image in zip(scores, image_of_text.tolist(), strict=True):
        order = row.argsort(descending=True, stable=True).tolist()
        t2i.append(order.index(image))
    for image, column in enumerate(scores.T):
        order = column.argsort(descending=True, stable=True).tolist()
        texts = (image_of_text == image).nonzero().flatten().tolist()
        i2t.append(min((order.index(text) for text in texts), default=-1))
    return t2i, i2t


def assert_same_as_naive(image_features: Tensor, text_features: Tensor, image_of_text: Tensor, chunk: int) -> Ranks:
    ranks = retrieval_ranks(image_features, text_features, image_of_text, chunk=chunk)
    t2i, i2t = naive_ranks(image_features, text_features, image_of_text)
    assert ranks.t2i.tolist() == t2i
    assert ranks.i2t.tolist() == i2t
    assert ranks.t2i.dtype == ranks.i2t.dtype == torch.int64
    return ranks


def whole_features(rows: int, dim: int, low: int, high: int, seed: int) -> Tensor:
    """Small whole numbers: their products are exact in float32, so ties are ties whatever computes them."""
    return torch.randint(low, high + 1, (rows, dim), generator=torch.Generator().manual_seed(seed)).float()


def random_owners(num_images: int, num_texts: int, seed: int) -> Tensor:
    return torch.randint(0, num_images, (num_texts,), generator=torch.Generator().manual_seed(seed))


@pytest.fixture
def worked() -> Ranks:
    """Two images, four texts, by hand; texts 0 and 1 belong to image 0, texts 2 and 3 to image 1.

    Scores, one row a text: (3, 1), (1, 2), (2, 2), (0, 5).
    t2i: text 0 finds image 0 first; text 1 finds image 1 before its own; text 2 ties, so image 0 is ahead of its own;
    text 3 finds image 1 first. i2t: image 0 ranks texts 0, 2, 1, 3, its best being text 0 at rank 0; image 1 ranks
    texts 3, 1, 2, 0, its best being text 3 at rank 0.
    """
    texts = torch.tensor([[3.0, 1.0], [1.0, 2.0], [2.0, 2.0], [0.0, 5.0]])
    return retrieval_ranks(torch.eye(2), texts, torch.tensor([0, 0, 1, 1]))


def test_worked_example_ranks(worked: Ranks) -> None:
    assert worked.t2i.tolist() == [0, 1, 1, 0]
    assert worked.i2t.tolist() == [0, 0]


def test_worked_example_metrics(worked: Ranks) -> None:
    assert retrieval_metrics(worked) == {
        "t2i_recall@1": 50.0,
        "t2i_recall@5": 100.0,
        "t2i_recall@10": 100.0,
        "t2i_mean_rank": 1.5,
        "t2i_median_rank": 1.5,
        "i2t_recall@1": 100.0,
        "i2t_recall@5": 100.0,
        "i2t_recall@10": 100.0,
        "i2t_mean_rank": 1.0,
        "i2t_median_rank": 1.0,
    }


def test_image_takes_its_best_ranked_text_and_the_lower_index_wins_a_tie() -> None:
    # For the only captioned image: scores 1, 2, 2, 2 and positives 0, 2, 3, so text 1 alone is ahead of text 2.
    texts = torch.tensor([[1.0, 0.0], [2.0, 9.0], [2.0, 0.0], [2.0, 0.0]])
    ranks = retrieval_ranks(torch.eye(2), texts, torch.tensor([0, 1, 0, 0]))
    assert ranks.i2t.tolist() == [1, 0]


@pytest.mark.parametrize("chunk", [1, 3, 4, 7, 1024])
@pytest.mark.parametrize(("num_images", "num_texts"), [(11, 19), (13, 11), (19, 13), (1, 5), (5, 1)])
def test_ragged_sizes_with_ties_and_unordered_captions(num_images: int, num_texts: int, chunk: int) -> None:
    images, texts = whole_features(num_images, 3, -1, 1, seed=0), whole_features(num_texts, 3, -1, 1, seed=1)
    assert_same_as_naive(images, texts, random_owners(num_images, num_texts, seed=2), chunk)


@pytest.mark.parametrize("chunk", [3, 4])
@pytest.mark.parametrize("captions", [1, 5])
def test_grouped_captions_with_ties(captions: int, chunk: int) -> None:
    images, texts = whole_features(11, 4, 0, 1, seed=3), whole_features(11 * captions, 4, 0, 1, seed=4)
    assert_same_as_naive(images, texts, torch.arange(11).repeat_interleave(captions), chunk)


def test_interleaved_captions_with_ties() -> None:
    images, texts = whole_features(11, 4, 0, 1, seed=5), whole_features(33, 4, 0, 1, seed=6)
    assert_same_as_naive(images, texts, torch.arange(11).repeat(3), 4)


@pytest.mark.parametrize("owners", ["grouped", "shuffled"])
def test_random_features(owners: str) -> None:
    generator = torch.Generator().manual_seed(7)
    # Multiples of 1/64 with few bits: distinct scores almost everywhere, yet no rounding that could depend on the tile.
    images = torch.randint(-512, 513, (97, 64), generator=generator).float() / 64
    texts = torch.randint(-512, 513, (301, 64), generator=generator).float() / 64
    owner = random_owners(97, 301, seed=8)
    assert_same_as_naive(images, texts, owner.sort().values if owners == "grouped" else owner, 32)


def test_normalised_features_up_to_rounding() -> None:
    generator = torch.Generator().manual_seed(9)
    images = torch.nn.functional.normalize(torch.randn(60, 32, generator=generator), dim=1)
    texts = torch.nn.functional.normalize(torch.randn(150, 32, generator=generator), dim=1)
    owner = random_owners(60, 150, seed=10)
    ranks = retrieval_ranks(images, texts, owner, chunk=16)
    scores = texts.double() @ images.double().T
    positive = scores[torch.arange(150), owner][:, None]
    certainly_ahead = (scores > positive + 1e-6).sum(1)
    perhaps_ahead = (scores > positive - 1e-6).sum(1) - 1
    assert ((certainly_ahead <= ranks.t2i) & (ranks.t2i <= perhaps_ahead)).all()
    assert (certainly_ahead == perhaps_ahead).double().mean() > 0.95, "the bound must pin nearly all ranks"


def test_duplicated_pictures_tie_across_tiles() -> None:
    generator = torch.Generator().manual_seed(11)
    image = torch.nn.functional.normalize(torch.randn(1, 48, generator=generator), dim=1)
    texts = torch.nn.functional.normalize(torch.randn(23, 48, generator=generator), dim=1)
    ranks = retrieval_ranks(image.repeat(23, 1), texts, torch.arange(23), chunk=4)
    assert ranks.t2i.tolist() == list(range(23)), "among equal pictures only the lower index is ahead"


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_features_are_scored_in_float32(dtype: torch.dtype) -> None:
    # The products 64 * 64 + 1 and 64 * 64 + 2 are one number in half precision, and two in float32.
    images = torch.tensor([[64.0, 1.0], [64.0, 2.0], [64.0, 0.0]], dtype=dtype)
    texts = torch.tensor([[64.0, 1.0], [64.0, -1.0]], dtype=dtype)
    ranks = assert_same_as_naive(images, texts, torch.tensor([0, 2]), 2)
    assert ranks.t2i.tolist() == [1, 0]
    images, texts = whole_features(13, 3, -2, 2, seed=12).to(dtype), whole_features(19, 3, -2, 2, seed=13).to(dtype)
    assert_same_as_naive(images, texts, random_owners(13, 19, seed=14), 4)


def test_autocast_reaches_neither_the_scores_nor_the_counts() -> None:
    # Counts above 256 and scores above 256 * 256 both need more digits than bfloat16 has.
    images = torch.stack([torch.full((700,), 256.0), torch.arange(700.0)], dim=1)
    texts = torch.tensor([[256.0, 1.0]]).repeat(3, 1)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        ranks = retrieval_ranks(images, texts, torch.tensor([0, 38, 301]))
    assert ranks.t2i.tolist() == [699, 661, 398]


def test_images_without_captions_are_candidates_but_not_queries() -> None:
    images, texts = whole_features(19, 3, -1, 1, seed=15), whole_features(11, 3, -1, 1, seed=16)
    owner = torch.tensor([17, 2, 2, 3, 17, 9, 3, 2, 9, 9, 0])
    ranks = assert_same_as_naive(images, texts, owner, 4)
    assert (ranks.i2t >= 0).nonzero().flatten().tolist() == [0, 2, 3, 9, 17]
    assert recall_at(ranks.i2t, 11) == 100.0
    assert len(hits_at(ranks.i2t, 1)) == 5


def test_features_that_need_gradients_are_only_read() -> None:
    images, texts = torch.eye(3, requires_grad=True), torch.eye(3)
    before = texts.clone()
    ranks = retrieval_ranks(images, texts, torch.arange(3, dtype=torch.int32))
    assert ranks.t2i.tolist() == [0, 0, 0]
    assert torch.equal(texts, before)


@st.composite
def retrieval_cases(draw: st.DrawFn) -> tuple[Tensor, Tensor, Tensor, int]:
    num_images, num_texts, dim = draw(st.integers(1, 9)), draw(st.integers(1, 14)), draw(st.integers(1, 3))
    value = st.integers(-2, 2).map(float)
    images = draw(st.lists(value, min_size=num_images * dim, max_size=num_images * dim))
    texts = draw(st.lists(value, min_size=num_texts * dim, max_size=num_texts * dim))
    owner = draw(st.lists(st.integers(0, num_images - 1), min_size=num_texts, max_size=num_texts))
    owner = sorted(owner) if draw(st.booleans()) else owner
    tables = torch.tensor(images).view(num_images, dim), torch.tensor(texts).view(num_texts, dim)
    return *tables, torch.tensor(owner), draw(st.integers(1, 6))


@settings(max_examples=150, deadline=None)
@given(retrieval_cases())
def test_any_small_case_equals_the_naive_sort(case: tuple[Tensor, Tensor, Tensor, int]) -> None:
    assert_same_as_naive(*case)


def test_recall_and_median_by_hand() -> None:
    ranks = torch.tensor([0, 4, 5, 9, 10, -1])
    assert [recall_at(ranks, k) for k in (1, 5, 6, 10, 11)] == [20.0, 40.0, 60.0, 80.0, 100.0]
    metrics = retrieval_metrics(Ranks(t2i=ranks, i2t=torch.tensor([0, 9])))
    assert metrics["t2i_median_rank"] == 6.0
    assert metrics["t2i_mean_rank"] == pytest.approx(33 / 5)
    assert metrics["i2t_median_rank"] == 5.5


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1e30])
@pytest.mark.parametrize("side", ["image_features", "text_features"])
def test_broken_features_are_named_with_their_row(side: str, value: float) -> None:
    features = {"image_features": torch.eye(4), "text_features": torch.eye(4)}
    features[side][2, 1] = value
    with pytest.raises(ValueError, match=f"{side} hold NaN, infinity or .* in 1 of 4 rows, the first in row 2"):
        retrieval_ranks(**features, image_of_text=torch.arange(4))


@pytest.mark.parametrize(
    ("images", "texts", "owner", "chunk", "message"),
    [
        (torch.eye(2), torch.eye(3), torch.arange(3), 4, "of one width"),
        (torch.eye(2), torch.ones(2), torch.arange(2), 4, "of one width"),
        (torch.ones(0, 2), torch.eye(2), torch.arange(2), 4, "nothing to rank"),
        (torch.eye(2), torch.ones(0, 2), torch.arange(0), 4, "nothing to rank"),
        (torch.eye(2), torch.eye(2), torch.arange(3), 4, "one integer for each of the 2 texts"),
        (torch.eye(2), torch.eye(2), torch.arange(2.0), 4, "torch.float32, expected one integer"),
        (torch.eye(2), torch.eye(2), torch.tensor([0, 2]), 4, "runs from 0 to 2, expected 0 to 1"),
        (torch.eye(2), torch.eye(2), torch.tensor([-1, 0]), 4, "runs from -1 to 0"),
        (torch.eye(2), torch.eye(2), torch.arange(2), 0, "chunk is 0"),
    ],
)
def test_inputs_that_do_not_fit(images: Tensor, texts: Tensor, owner: Tensor, chunk: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        retrieval_ranks(images, texts, owner, chunk=chunk)


def test_recall_refuses_what_it_cannot_answer() -> None:
    with pytest.raises(ValueError, match="k is 0"):
        recall_at(torch.tensor([0]), 0)
    with pytest.raises(ValueError, match="no query left"):
        recall_at(torch.tensor([-1, -1]), 1)


@pytest.mark.gpu
def test_ranks_on_a_gpu_equal_the_naive_ones() -> None:
    images, texts = whole_features(97, 8, -2, 2, seed=17), whole_features(301, 8, -2, 2, seed=18)
    owner = random_owners(97, 301, seed=19)
    ranks = retrieval_ranks(images.cuda(), texts.cuda(), owner, chunk=32)
    assert (ranks.t2i.tolist(), ranks.i2t.tolist()) == naive_ranks(images, texts, owner)
