"""Every perturbation by name: worked examples, then what must hold for any caption and any generator."""

import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from debias_diffusion.captions.augment import caption_rng
from debias_diffusion.captions.perturb import (
    FILLER,
    PERTURBATION_FORMS,
    parse_perturbation,
    perturb_captions,
)
from debias_diffusion.captions.sentences import SPLITTERS, join_sentences, split_sentences

FIVE = ["A.", "B.", "C.", "D.", "E."]
EXAMPLES = [
    ("none", FIVE, "A. B. C. D. E."),
    ("swap_1_4", FIVE, "D. B. C. A. E."),
    ("swap_1_4", FIVE[:3], "C. B. A."),
    ("swap_1_4", FIVE[:1], "A."),
    ("swap_1_2", FIVE, "B. A. C. D. E."),
    ("move_first_to_4", FIVE, "B. C. D. A. E."),
    ("move_first_to_4", FIVE[:3], "B. C. A."),
    ("move_first_to_4", FIVE[:1], "A."),
    ("move_first_to_1", FIVE, "A. B. C. D. E."),
    ("move_first_to_2", FIVE, "B. A. C. D. E."),
    ("move_first_to_12", FIVE, "B. C. D. E. A."),
    ("remove_first", FIVE, "B. C. D. E."),
    ("remove_first", FIVE[:1], "A."),
    ("first_only", FIVE, "A."),
    ("first_2", FIVE, "A. B."),
    ("first_3", FIVE[:2], "A. B."),
    ("swap_2", FIVE, "B. A."),
    ("swap_2", FIVE[:1], "A."),
    ("last_3", FIVE, "C. D. E."),
    ("last_3", FIVE[:2], "A. B."),
    ("filler_0", FIVE[:2], "A. B."),
    ("filler_2", FIVE[:3], "This is a photo. This is a photo. A. B. C."),
    ("first_2_filler_1", FIVE, "This is a photo. A. B."),
    ("first_2_filler_0", FIVE, "A. B."),
    ("dropout_0", FIVE, "A. B. C. D. E."),
    ("truncate_77", FIVE, "A. B. C. D. E."),
    ("short", FIVE, "A. B. C. D. E."),
]
NAMES = sorted({name for name, *_ in EXAMPLES} | {"shuffle", "dropout_0.5", "dropout_1"})
PERMUTING = ["none", "swap_1_4", "move_first_to_4", "move_first_to_1", "shuffle", "swap_1_2", "truncate_77", "short"]
SENTENCES = st.permutations([f"word{i} " * i + f"end{i}." for i in range(9)]).flatmap(
    lambda sentences: st.integers(0, 9).map(lambda number: sentences[:number])
)
SEEDS = st.integers(0, 2**32)


@pytest.mark.parametrize(("name", "sentences", "expected"), EXAMPLES)
def test_worked_examples(name: str, sentences: list[str], expected: str) -> None:
    assert " ".join(parse_perturbation(name).apply(sentences, random.Random(0))) == expected


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=30)
@given(sentences=SENTENCES, seed=SEEDS)
def test_same_generator_same_result_input_untouched_never_empty(name: str, sentences: list[str], seed: int) -> None:
    before = list(sentences)
    apply = parse_perturbation(name).apply
    result = apply(sentences, random.Random(seed))
    assert result == apply(sentences, random.Random(seed))
    assert sentences == before
    assert all(sentence.strip() for sentence in result)
    assert bool(result) == bool(sentences) or "filler" in name


@pytest.mark.parametrize("name", PERMUTING)
@settings(max_examples=30)
@given(sentences=SENTENCES, seed=SEEDS)
def test_permutations_lose_and_repeat_nothing(name: str, sentences: list[str], seed: int) -> None:
    assert sorted(parse_perturbation(name).apply(sentences, random.Random(seed))) == sorted(sentences)


@pytest.mark.parametrize("name", sorted(set(NAMES) - {name for name in NAMES if "filler" in name or "dropout" in name}))
@settings(max_examples=30)
@given(sentences=SENTENCES, seed=SEEDS)
def test_all_others_choose_without_repeats(name: str, sentences: list[str], seed: int) -> None:
    result = parse_perturbation(name).apply(sentences, random.Random(seed))
    assert set(result) <= set(sentences)
    assert len(result) == len(set(result))


@given(sentences=SENTENCES, count=st.integers(0, 5), first=st.integers(1, 5))
def test_filler_comes_in_front_of_what_would_be_there_without_it(sentences: list[str], count: int, first: int) -> None:
    rng = random.Random(0)
    assert parse_perturbation(f"filler_{count}").apply(sentences, rng) == [FILLER] * count + sentences
    few = parse_perturbation(f"first_{first}").apply(sentences, rng)
    assert parse_perturbation(f"first_{first}_filler_{count}").apply(sentences, rng) == [FILLER] * count + few


def test_shuffle_reaches_every_order_equally_often() -> None:
    apply = parse_perturbation("shuffle").apply
    counts = Counter(tuple(apply(FIVE[:3], caption_rng(0, 0, index))) for index in range(6_000))
    assert len(counts) == 6
    assert max(abs(count - 1_000) for count in counts.values()) < 5 * 29  # sigma = sqrt(6000 * 1/6 * 5/6) = 28.9


@given(sentences=SENTENCES, seed=SEEDS, probability=st.sampled_from(["0.1", "0.5", "0.9", "1"]))
def test_dropout_keeps_words_in_order(sentences: list[str], seed: int, probability: str) -> None:
    result = parse_perturbation(f"dropout_{probability}").apply(sentences, random.Random(seed))
    words = iter(" ".join(sentences).split())
    assert all(word in words for word in " ".join(result).split())  # a subsequence


def test_dropout_drops_each_word_with_its_probability() -> None:
    apply = parse_perturbation("dropout_0.3").apply
    text = [" ".join(str(number) for number in range(10)), " ".join(str(number) for number in range(10, 20))]
    kept: Counter = Counter()
    for index in range(4_000):
        kept.update(" ".join(apply(text, caption_rng(0, 0, index))).split())
    assert len(kept) == 20
    assert max(abs(count - 2_800) for count in kept.values()) < 5 * 29  # sigma = sqrt(4000 * 0.3 * 0.7) = 29.0


def test_dropout_of_everything_keeps_one_word_any_of_them() -> None:
    apply = parse_perturbation("dropout_1").apply
    kept = Counter(tuple(apply(["a b", "c"], caption_rng(0, 0, index))) for index in range(300))
    assert set(kept) == {("a",), ("b",), ("c",)}


def test_what_the_text_layer_cannot_do_is_carried_as_data() -> None:
    truncate, short = parse_perturbation("truncate_77"), parse_perturbation("short")
    assert (truncate.max_tokens, truncate.uses_short_caption) == (77, False)
    assert (short.max_tokens, short.uses_short_caption) == (None, True)
    assert all(parse_perturbation(name).max_tokens is None for name in set(NAMES) - {"truncate_77"})


@pytest.mark.parametrize("name", NAMES)
def test_every_perturbation_states_its_rule_in_one_line(name: str) -> None:
    perturbation = parse_perturbation(name)
    assert perturbation.name == name
    assert perturbation.rule
    assert "\n" not in perturbation.rule
    assert perturbation == parse_perturbation(name)


def test_every_form_has_a_name_that_parses() -> None:
    for form in PERTURBATION_FORMS:
        name = form.replace("_N", "_3").replace("_K", "_3").replace("_P", "_0.5")
        assert parse_perturbation(name).name == name


@pytest.mark.parametrize(
    "name",
    [
        "",
        "swap",
        "swap_1_0",
        "move_first_to_0",
        "first_0",
        "last_0",
        "last_-1",
        "filler_",
        "dropout_1.5",
        "dropout_x",
        "dropout_0.5.5",
        "none ",
        "none\n",
        "NONE",
        "first_2_filler_x",
        "first_\u0663",
        "truncate_0",
    ],
)
def test_wrong_names_list_the_forms(name: str) -> None:
    with pytest.raises(ValueError, match="unknown perturbation") as error:
        parse_perturbation(name)
    assert all(form in str(error.value) for form in PERTURBATION_FORMS)


def test_truncation_to_the_end_tokens_alone_is_refused() -> None:
    with pytest.raises(ValueError, match="'truncate_2' leaves no text"):
        parse_perturbation("truncate_2")


CAPTIONS = ["A park.\n\nA dog runs at 5 p.m. A boy “laughs”. The end.", "", "  One only ", "A cat. A dog. A cow."]


@pytest.mark.parametrize("name", ["none", "truncate_40", "short"])
def test_captions_that_are_not_rewritten_come_back_as_they_are(name: str) -> None:
    result = perturb_captions(CAPTIONS, name)
    assert result == CAPTIONS
    assert result is not CAPTIONS


def test_captions_are_split_rewritten_and_joined() -> None:
    assert perturb_captions(CAPTIONS, "swap_1_4") == [
        'The end. A dog runs at 5 p.m. A boy "laughs". A park.',
        "",
        "One only",
        "A cow. A dog. A cat.",
    ]
    assert perturb_captions(CAPTIONS[3:], "move_first_to_4", splitter="flair") == ["A dog. A cow. A cat"]
    assert perturb_captions(CAPTIONS[3:], "move_first_to_4", splitter="long-clip") == ["A dog. A cow. A cat"]
    assert perturb_captions(["A cat. A dog."], "filler_2", splitter="long-clip") == [f"{FILLER} {FILLER} A cat. A dog."]


@pytest.mark.parametrize("name", ["shuffle", "dropout_0.5"])
def test_captions_depend_on_seed_and_place_alone(name: str) -> None:
    captions = ["A red cat. Two big dogs. Three old men. Four new cars. Five wet birds."] * 6
    result = perturb_captions(captions, name, seed=4)
    assert result == perturb_captions(captions, name, seed=4)
    assert perturb_captions(captions[:2], name, seed=4) == result[:2]
    assert perturb_captions(["Another caption.", *captions[1:]], name, seed=4)[1:] == result[1:]
    assert len(set(result)) > 1
    assert perturb_captions(captions, name, seed=5) != result


@pytest.mark.parametrize("splitter", SPLITTERS)
@given(captions=st.lists(st.text(st.characters()), max_size=3), name=st.sampled_from(NAMES))
def test_any_text_survives_and_is_never_emptied(splitter: str, captions: list[str], name: str) -> None:
    result = perturb_captions(captions, name, splitter=splitter)
    assert len(result) == len(captions)
    for before, after in zip(captions, result, strict=True):
        if join_sentences(split_sentences(before)).strip():
            assert after.strip()


def test_an_unknown_splitter_is_refused() -> None:
    with pytest.raises(ValueError, match="nupunkt, flair, long-clip"):
        perturb_captions(["A cat."], "shuffle", splitter="spacy")
