"""What was cut, in the user's own words; cleaning; prompt files."""

import copy
import time
from typing import Any

import pytest
import torch
from diffusers import StableDiffusionXLImg2ImgPipeline
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from debias_diffusion.captions.clean import clean_caption
from debias_diffusion.encoders.tokens import Tokenizer
from debias_diffusion.sdxl.prompts import (
    PromptLine,
    _matches,
    clean_prompt,
    debias_pipeline,
    prompt_report,
    read_prompt,
    read_prompts,
)

TRAINING = Tokenizer(248)
FIXTURE = {"deadline": None, "suppress_health_check": [HealthCheck.function_scoped_fixture]}
GEESE = "three white geese walk in a row"


@pytest.fixture(scope="module")
def stock(make_pipe, slots_77, slots_248) -> dict[int, Any]:
    """Stock pipelines by their encoders' length; not to be changed."""
    return {77: make_pipe(slots_77), 248: make_pipe(slots_248)}


# What was cut


def test_the_report_of_the_stock_pipeline_says_what_it_leaves_out(stock, long_prompt):
    rows = prompt_report(stock[77], long_prompt)
    assert [(row.slot, row.num_tokens, row.limit, row.chunks) for row in rows] == [
        ("text_encoder", 153, 77, 1),
        ("text_encoder_2", 153, 77, 1),
    ]
    cut = rows[0].cut[0][0]
    with torch.no_grad():
        whole, kept = (stock[77].encode_prompt(text)[0] for text in (long_prompt, long_prompt[:cut]))
    assert torch.equal(whole, kept)
    assert rows[0].words_cut[-3:] == ("in", "a", "row")
    assert not any(row.cut for row in prompt_report(stock[248], long_prompt))


@settings(max_examples=40, **FIXTURE)
@given(words=st.lists(st.sampled_from(["cat", "Dog,", "3.5", "don't", "wow!", "red!!", "日本", "🐈"]), max_size=160))
def test_what_is_cut_is_the_end_of_the_text_and_what_is_kept_fits(words, stock):
    text = "  ".join(words)
    for row in prompt_report(stock[77], text):
        assert row.text == text
        assert bool(row.cut) == (row.num_tokens > row.limit)
        assert row.num_tokens >= len(TRAINING.encode(text))  # a run of marks is more tokens in the second slot
        if row.cut:
            assert row.cut[-1][1] == len(text)
            assert "".join(row.words_cut) == text[row.cut[0][0] :].replace(" ", "")
            kept = text[: row.cut[0][0]]
            assert prompt_report(stock[77], kept, max_length=77)[0].num_tokens <= 77


def test_a_word_read_in_part_is_reported_from_where_the_encoder_stops(stock):
    text = "cat " * 74 + "photosynthesising"
    row = prompt_report(stock[77], text)[0]
    assert row.cut[0][0] > text.index("photo")
    assert text.endswith(row.words_cut[0])
    assert len(row.words_cut) == 1


def test_exclamation_marks_are_words_in_the_second_slot_not_padding(stock):
    text = "wow! " * 40 + "end"
    first, second = prompt_report(stock[77], text)
    assert first.num_tokens == second.num_tokens == 83
    assert first.words_cut == second.words_cut == ("!", "wow!", "wow!", "end")
    run = "!" * 200
    assert prompt_report(stock[77], run)[1].num_tokens == 202
    assert prompt_report(stock[77], run)[0].num_tokens < 202


def test_a_short_prompt_beside_a_long_one_is_reported_uncut_and_without_padding(stock, long_prompt):
    rows = prompt_report(stock[77], ["a cat!", long_prompt], negative_prompt=["bad!", "worse"])
    short = [row for row in rows if row.text in ("a cat!", "bad!", "worse")]
    assert [(row.index, row.slot, row.negative, row.num_tokens) for row in short] == [
        (0, "text_encoder", False, 5),
        (0, "text_encoder_2", False, 5),
        (0, "text_encoder", True, 4),
        (1, "text_encoder", True, 3),
        (0, "text_encoder_2", True, 4),
        (1, "text_encoder_2", True, 3),
    ]
    assert not any(row.cut for row in short)
    assert all("<|" not in word for row in rows for word in row.words_cut)


RAW = {
    "curly quotes and entities": ("a “red” barn &amp; ", "the “blue” caf&eacute;"),
    "emoji of many bytes": ("🐈‍⬛ and 🏳️‍🌈 ", "👩‍👩‍👧‍👦 end"),
    "ligatures, wide letters, combining marks": ("ﬁeld Ｗｉｄｅ e\u0301 ", "ﬂower ＡＢＣ e\u0301nd"),
    "lines and tabs": ("one\n\n two\t ", "three\r\n four"),
    "upper case": ("A RED Barn ", "THE End"),
    "mojibake": ("a café, a cafÃ© ", "a naÃ¯ve “end”"),
}


@pytest.mark.parametrize(("opening", "end"), RAW.values(), ids=RAW)
def test_spans_point_into_what_the_user_wrote_however_it_is_cleaned(opening, end, stock):
    text = opening + "cat " * 90 + end
    for row in prompt_report(stock[77], text):
        assert row.text == text
        assert row.cut[-1][1] == len(text)
        assert list(row.words_cut) == text[row.cut[0][0] :].split()
        assert row.words_cut[0] == "cat"


def test_spans_of_weighted_prompts_point_past_the_brackets(stock):
    text = "((masterpiece:1.3)), " + "cat " * 80 + r"(a \(blue\) dog:0.8)"
    row = prompt_report(stock[77], text, syntax="a1111")[0]
    assert row.text == text
    assert row.words_cut[-3:] == ("a", r"\(blue\)", "dog")


def test_the_report_of_chunked_encoders_says_that_nothing_is_cut(stock, long_prompt):
    pipe = debias_pipeline(stock[77])
    rows = prompt_report(pipe, long_prompt)
    assert [(row.chunks, row.cut) for row in rows] == [(3, ()), (3, ())]
    rows = prompt_report(pipe, long_prompt, max_length=154)
    assert all(row.chunks == 2 and row.cut for row in rows)


def test_the_words_reported_as_cut_at_two_chunks_change_nothing(stock, long_prompt):
    pipe = debias_pipeline(stock[77])
    row = prompt_report(pipe, long_prompt, max_length=154)[0]
    other = long_prompt[: row.cut[0][0]] + "elephants"
    with torch.no_grad():
        assert torch.equal(*(pipe.encode_prompt(text, max_length=154)[0] for text in (long_prompt, other)))


def test_encoders_of_two_lengths_in_the_stock_class_have_no_report(stock):
    parts = stock[248].components | {name: stock[77].components[name] for name in ("text_encoder_2", "tokenizer_2")}
    mixed = type(stock[77])(**parts, add_watermarker=False)
    with pytest.raises(ValueError, match="cannot join encoders of different lengths.*give max_length"):
        prompt_report(mixed, "a cat")
    assert [row.limit for row in prompt_report(mixed, "cat " * 100, max_length="auto")] == [248, 77 + 75 + 75]


# Cleaning


@settings(max_examples=150, deadline=None)
@given(text=st.text(max_size=40) | st.text("a “ﬁ&;amp<é\u0301\u200b \n\tÃ©", max_size=40))
def test_a_cleaned_prompt_has_the_ids_training_gave_it_and_knows_where_it_came_from(text):
    prompt = clean_prompt(text)
    assert TRAINING.encode(text)[1:-1] == TRAINING._bpe.encode(str(prompt))
    assert prompt.source == text
    starts = [start for start, _ in prompt.origins]
    assert starts == sorted(starts)
    assert all(0 <= start <= end <= len(text) for start, end in prompt.origins)
    if prompt == text:
        assert prompt.origins == tuple((i, i + 1) for i in range(len(text)))


def test_curly_quotes_give_the_first_slot_the_ids_of_training(stock):
    text = "the “red” caf&eacute;’s ﬁeld"
    ids = stock[248].tokenizer(read_prompt(text)).input_ids
    assert ids == TRAINING.encode(text)
    assert stock[248].tokenizer(text).input_ids != ids


def test_words_that_only_their_neighbours_explain_are_spanned_together():
    text = "a naÃ¯ve cafÃ© is â€œopenâ€\x9d today"
    prompt = clean_prompt(text)
    assert prompt == 'a naïve café is "open" today'
    assert text[slice(*prompt.in_source((prompt.index("today"), len(prompt))))] == "today"
    start = prompt.index("café")
    assert "caf" in text[slice(*prompt.in_source((start, start + 4)))]


@pytest.mark.parametrize("text", ["a (cat:1.2)", "(cat:2)", r"cat \(animal\)", "((cat))", "a BREAK b", "(a (b) c:.5)"])
def test_weights_in_plain_text_are_refused_never_read_as_words(text, stock):
    pipe = debias_pipeline(stock[77])
    with pytest.raises(ValueError, match=r"is weighting, not words; use debias_diffusion.sdxl.weights"):
        pipe.encode_prompt(read_prompt(text))
    with pytest.raises(ValueError, match="is weighting"):
        pipe.encode_prompt("a", negative_prompt=text)


@pytest.mark.parametrize(
    "text",
    ["a (small) cat [left]", "(16:9)", "John (3:16)", "smile :)", ":((", "at 5:30", "PRISON BREAK POSTER", "a break"],
)
def test_ordinary_brackets_numbers_and_capitals_are_words(text, stock):
    with torch.no_grad():
        mine = debias_pipeline(stock[77]).encode_prompt(text)
        assert torch.equal(mine[0], stock[77].encode_prompt(text)[0])


def test_an_unknown_syntax_lists_the_known_ones():
    with pytest.raises(ValueError, match="'compel'; syntaxes: plain, a1111"):
        read_prompt("a cat", "compel")


# Files


def test_a_text_file_holds_a_prompt_a_line(tmp_path):
    (tmp_path / "p.txt").write_text("a cat\n\n  two dogs \r\nein Käfer\n", encoding="utf-8-sig")
    lines = read_prompts(tmp_path / "p.txt")
    assert [line.prompt.strip() for line in lines] == ["a cat", "two dogs", "ein Käfer"]


def test_a_json_lines_file_holds_prompts_with_their_negatives_and_seeds(tmp_path):
    path = tmp_path / "p.jsonl"
    path.write_text('{"prompt": "a cat", "seed": 3}\n\n{"prompt": "a dog", "negative": "x", "prompt_2": "oil"}\n')
    assert read_prompts(path) == [PromptLine("a cat", seed=3), PromptLine("a dog", "oil", "x")]


WRONG_FILES = {
    "not JSON": ("p.jsonl", "a cat\n", "p.jsonl:1: not valid JSON"),
    "no prompt": ("p.jsonl", '{"prompt": "a"}\n{"seed": 1}', "p.jsonl:2: prompt is None, expected text"),
    "wrong name": (
        "p.jsonl",
        '{"prompt": "a", "sed": 1}',
        "p.jsonl:1: unknown sed; fields: prompt, prompt_2, negative, seed",
    ),
    "seed in words": ("p.jsonl", '{"prompt": "a", "seed": "1"}', "seed is '1', expected a whole number"),
    "seed is true": ("p.jsonl", '{"prompt": "a", "seed": true}', "seed is True"),
    "a number": ("p.jsonl", '{"prompt": 5}', "prompt is 5, expected text"),
    "empty": ("p.txt", "\n \n", "holds no prompt"),
    "another kind": ("p.csv", "a", "neither .txt"),
}


@pytest.mark.parametrize(("name", "content", "message"), WRONG_FILES.values(), ids=WRONG_FILES)
def test_a_file_that_holds_no_prompts_says_where_and_why(name, content, message, tmp_path):
    (tmp_path / name).write_text(content)
    with pytest.raises(ValueError, match=message):
        read_prompts(tmp_path / name)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match="no file of prompts at .*nowhere.txt"):
        read_prompts(tmp_path / "nowhere.txt")


# Our class on a stock pipeline's parts


def test_our_pipeline_made_of_a_stock_one_leaves_it_as_it_was(stock, draw):
    before = draw(stock[77], prompt="a cat")
    own = debias_pipeline(stock[77])
    assert own.unet is stock[77].unet
    assert type(stock[77]).__name__ == "StableDiffusionXLPipeline"
    assert torch.equal(draw(own, prompt="a cat"), before)
    assert torch.equal(draw(stock[77], prompt="a cat"), before)
    assert debias_pipeline(own) is own


def test_offload_of_the_stock_pipeline_is_carried_over(stock, draw):
    parts = {n: copy.deepcopy(p) for n, p in stock[77].components.items() if isinstance(p, torch.nn.Module)}
    pipe = copy.copy(stock[77])
    pipe.register_modules(**parts)
    expected = draw(pipe, prompt="a cat")
    pipe.enable_model_cpu_offload(device="cpu")
    own = debias_pipeline(pipe)
    assert torch.equal(draw(own, prompt="a cat"), expected)
    assert torch.equal(draw(own, prompt="a cat"), expected)
    assert torch.equal(draw(pipe, prompt="a cat"), expected)


def test_other_pipelines_are_told_how_to_use_the_embeddings(stock):
    other = StableDiffusionXLImg2ImgPipeline(**stock[77].components, add_watermarker=False)
    with pytest.raises(ValueError, match="got a StableDiffusionXLImg2ImgPipeline.*prompt_embeddings"):
        debias_pipeline(other)


def test_a_long_prompt_that_cleaning_changes_throughout_is_spanned_in_moments():
    odd = " ".join(f"\u00c3 {i:x}" for i in range(5_000))
    start = time.process_time()
    prompt = clean_prompt(f"{odd} three white geese")
    assert time.process_time() - start < 10
    words = prompt.split()
    assert prompt.source[slice(*prompt.in_source((len(prompt) - 5, len(prompt))))] == "geese"
    at = prompt.index(f" {2_000:x} ") + 1
    assert f"{2_000:x}" in prompt.source[slice(*prompt.in_source((at, at + 3)))]
    assert len(words) > 5_000


@given(st.text("ab \u00c3\u00a9&;", max_size=60))
def test_matching_nearby_covers_every_word_and_piece_in_order(text):
    pieces, words = text.split(), clean_caption(text).split()
    runs = list(_matches(pieces * 600, words * 600))
    ends = [(0, 0), *((b, d) for _, _, b, _, d in runs)]
    assert [(a, c) for _, a, _, c, _ in runs] == ends[:-1]
    assert ends[-1] == (len(pieces) * 600, len(words) * 600)
    assert all((pieces * 600)[a:b] == (words * 600)[c:d] for is_same, a, b, c, d in runs if is_same)
