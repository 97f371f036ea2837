"""A1111 weights and breaks as data and in embeddings; compel beside them."""

import copy
from typing import Any

import pytest
import torch
from compel import CompelForSDXL
from hypothesis import given, settings
from hypothesis import strategies as st

from debias_diffusion.sdxl.prompts import debias_pipeline, read_prompt
from debias_diffusion.sdxl.weights import PromptText, parse_weights

WIDTH = 64
HALVES = {"text_encoder": slice(0, WIDTH), "text_encoder_2": slice(WIDTH, None)}


def parsed(text: str) -> list[tuple[str, float]]:
    """The weighted parts of a prompt as (words, weight)."""
    prompt = parse_weights(text)
    return [(prompt[start:end], round(weight, 4)) for start, end, weight in prompt.weights]


PARSED = {
    "number": ("a (red:1.2) cat", "a red cat", [("red", 1.2)]),
    "round": ("a (red) cat", "a red cat", [("red", 1.1)]),
    "square": ("a [red] cat", "a red cat", [("red", 0.9091)]),
    "double": ("((red)) [[cat]]", "red cat", [("red", 1.21), ("cat", 0.8264)]),
    "nested": (
        "a ((house:1.3) [on] a (hill:0.5), sun, (((sky))))",
        "a house on a hill, sun, sky",
        [("house", 1.43), (" ", 1.1), (" a ", 1.1), ("hill", 0.55), (", sun, ", 1.1), ("sky", 1.4641)],  # "on": 1
    ),
    "escaped": (r"\(red\) \[cat\] \\ (\(x\):1.5)", r"(red) [cat] \ (x)", [("(x)", 1.5)]),
    "unclosed": ("a (red cat", "a red cat", [("red cat", 1.1)]),
    "unopened": ("a red) cat] :1.2)", "a red) cat] :1.2)", []),
    "spaces": ("( red cat : 1.5 )", " red cat ", [(" red cat ", 1.5)]),
    "none": ("(red:1.0) (cat:1)", "red cat", []),
    "signs": ("(a:-0.5)(b:+1.5)(c:.5)(d:0)", "abcd", [("a", -0.5), ("b", 1.5), ("c", 0.5), ("d", 0.0)]),
    "colons": ("a:b (c: d:1.5) 16:9", "a:b c: d 16:9", [("c: d", 1.5)]),
    "empty": ("() (:1.2) []", "  ", []),
}


@pytest.mark.parametrize(("text", "plain", "weights"), PARSED.values(), ids=PARSED)
def test_brackets_become_weights_and_never_words(text, plain, weights):
    prompt = parse_weights(text)
    assert prompt == plain
    assert parsed(text) == weights
    assert prompt.breaks == ()


def test_breaks_are_positions_of_the_plain_text():
    prompt = parse_weights("red (cat BREAK blue:1.5)  BREAK\n\ngreen, BREAKfast")
    assert prompt == "red cat blue green, BREAKfast"
    assert [prompt[at:].split()[0] for at in prompt.breaks] == ["blue", "green,"]
    assert [prompt[start:end] for start, end, _ in prompt.weights] == ["cat blue"]


def test_a_hundred_thousand_spaces_are_read_at_once():
    text = "(red:1.2)" + " " * 100_000 + "BREAK" + "\n" * 100_000 + "cat"
    assert [parse_weights(text)[at:] for at in parse_weights(text).breaks] == ["cat"]
    assert parse_weights(" " * 100_000) == " " * 100_000


REFUSED = {
    "editing": "a [cat:dog:0.5]",
    "late words": "a [dog:10]",
    "alternating": "a [cat|dog] here",
    "a lora": "a cat <lora:style:0.8>",
    "composition": "a cat AND a dog",
    "no number": "(cat:1.2.3)",
    "too strong": "(cat:30)",
    "too strong together": "((((((((cat:3):3):3):3):3):3):3):3)",
    "too deep": "(" * 40 + "cat" + ")" * 40,
}


@pytest.mark.parametrize("text", REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_translated_is_refused_with_the_place(text):
    with pytest.raises(ValueError, match="in the prompt, "):
        parse_weights(text)


@settings(max_examples=200, deadline=None)
@given(st.text("ab (){}[]:\\.12,BREAK\n", max_size=40))
def test_any_text_is_parsed_or_refused_and_every_character_knows_its_origin(text):
    try:
        prompt = parse_weights(text)
    except ValueError:
        return
    assert prompt.source == text
    assert len(prompt.origins) == len(prompt)
    for character, (start, end) in zip(prompt, prompt.origins, strict=True):
        assert character in text[start:end] or (character == " " and "BREAK" in text[start:end])
    ends = [0]
    for start, end, weight in prompt.weights:
        assert ends[-1] <= start < end <= len(prompt)
        assert weight != 1
        ends.append(end)


@settings(max_examples=50, deadline=None)
@given(
    st.text(st.characters(codec="utf-8", exclude_characters="\\()[]:|<B"), max_size=40).filter(lambda t: "AND" not in t)
)
def test_text_without_marks_is_itself(text):
    prompt = parse_weights(text)
    assert (str(prompt), prompt.weights, prompt.breaks) == (text, (), ())


def test_a_text_knows_how_many_origins_it_needs():
    with pytest.raises(ValueError, match="a text of 2 characters came with 1 origins"):
        PromptText("ab", "ab", [(0, 1)])


# In embeddings


@pytest.fixture(autouse=True)
def _no_gradients():
    with torch.no_grad():
        yield


@pytest.fixture(scope="module")
def pipes(make_pipe, slots_77, slots_248) -> dict[Any, Any]:
    """Our pipelines by the lengths of the two encoders; not to be changed."""
    short, long = (debias_pipeline(make_pipe(folder)) for folder in (slots_77, slots_248))
    mixed = long.components | {name: short.components[name] for name in ("text_encoder_2", "tokenizer_2")}
    return {(77, 77): short, (248, 248): long, (248, 77): type(long)(**mixed, add_watermarker=False)}


def test_weights_of_one_change_nothing_to_the_bit(pipes):
    plain = pipes[248, 248].encode_prompt("a red cat", negative_prompt="bad")
    weighted = pipes[248, 248].encode_prompt(parse_weights("a (red:1.0) cat"), negative_prompt=parse_weights("bad"))
    assert all(torch.equal(a, b) for a, b in zip(plain, weighted, strict=True))


@pytest.mark.parametrize("lengths", [(77, 77), (248, 248), (248, 77)])
@pytest.mark.parametrize("weight", [-1.0, 0.0, 0.5, 1.5, 3.0])
def test_a_weighted_row_lies_on_the_line_from_the_empty_prompts_row(weight, lengths, pipes):
    pipe = pipes[lengths]
    plain, empty = pipe.encode_prompt("a red cat here")[0], pipe.encode_prompt("")[0]
    states, _, pooled, _ = pipe.encode_prompt(parse_weights(f"a (red cat:{weight}) here"))
    expected = plain.clone()
    expected[:, 2:4] = empty[:, 2:4] + weight * (plain[:, 2:4] - empty[:, 2:4])
    torch.testing.assert_close(states, expected, atol=1e-5, rtol=1e-5)
    assert torch.equal(states[:, :2], plain[:, :2])
    assert torch.equal(states[:, 4:], plain[:, 4:])
    assert torch.equal(pooled, pipe.encode_prompt("a red cat here")[2])


def test_the_pooled_vector_of_a_long_weighted_prompt_is_one_row_and_the_plain_texts(pipes):
    text = "a (red:1.4) cat, " * 30
    states, _, pooled, _ = pipes[77, 77].encode_prompt(parse_weights(text))
    plain = pipes[77, 77].encode_prompt("a red cat, " * 30)
    assert states.shape == plain[0].shape
    assert torch.equal(pooled, plain[2])
    assert not torch.equal(states[:, 77:], plain[0][:, 77:])


def test_weights_beyond_the_first_chunk_reach_their_own_words(pipes):
    head = "cat " * 90
    plain = pipes[77, 77].encode_prompt(head + "red dog")[0]
    states = pipes[77, 77].encode_prompt(parse_weights(head + "(red:0) dog"))[0]
    changed = (states != plain).any(dim=-1)[0].nonzero().flatten().tolist()
    assert changed == [77 + 1 + 15]
    torch.testing.assert_close(states[0, 93], pipes[77, 77].encode_prompt("")[0][0, 16], atol=1e-5, rtol=1e-5)


def test_weights_of_one_prompt_leave_the_rest_of_the_batch_alone(pipes):
    states, negative, *_ = pipes[248, 248].encode_prompt(
        [parse_weights("a (red:1.5) cat"), "a dog"], negative_prompt=[parse_weights("(bad:1.3)"), ""]
    )
    plain = pipes[248, 248].encode_prompt(["a red cat", "a dog"], negative_prompt=["bad", ""])
    assert [torch.equal(a, b) for a, b in zip(states, plain[0], strict=True)] == [False, True]
    assert [torch.equal(a, b) for a, b in zip(negative, plain[1], strict=True)] == [False, True]


LONG_AND_WEIGHTED = "a (small:1.3) [red] house stands beside the river " * 75  # 600 words of one token


@pytest.mark.parametrize("negatives", [["(bad:1.2)", LONG_AND_WEIGHTED], [LONG_AND_WEIGHTED, "(bad:1.2), blurred"]])
@pytest.mark.parametrize("lengths", [(77, 77), (248, 248), (248, 77)])
def test_a_weighted_prompt_of_five_tokens_beside_one_of_six_hundred_is_encoded_as_alone(lengths, negatives, pipes):
    pipe, long, short = pipes[lengths], parse_weights(LONG_AND_WEIGHTED), parse_weights("a (cat:1.4) sits")
    negatives = [parse_weights(text) for text in negatives]
    report = pipe.prompt_report([long, short], negative_prompt=negatives)
    assert [row.num_tokens for row in report if not row.negative] == [602, 5] * 2
    assert not any(row.cut for row in report)
    both = pipe.encode_prompt([long, short], negative_prompt=negatives)
    rows = both[0].shape[1]
    assert [tuple(tensor.shape) for tensor in both] == [(2, rows, 2 * WIDTH)] * 2 + [(2, WIDTH)] * 2
    assert rows >= 602
    assert all(tensor.isfinite().all() for tensor in both)
    alone = pipe.encode_prompt(short, negative_prompt=negatives[1], max_length=rows)
    for batched, single in zip(both, alone, strict=True):
        torch.testing.assert_close(batched[1:], single, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(both[0][1:, :77], pipe.encode_prompt(short)[0], atol=1e-5, rtol=1e-5)
    assert not torch.allclose(both[0][1], pipe.encode_prompt("a cat sits", max_length=rows)[0][0], atol=1e-3)


def test_a_break_starts_a_new_chunk_of_seventy_seven_rows_where_all_pieces_fit(pipes):
    for pipe in pipes.values():
        states, negative, pooled, _ = pipe.encode_prompt(
            parse_weights("a cat BREAK a (dog:1.2)"), negative_prompt="bad"
        )
        pieces = [pipe.encode_prompt(text) for text in ("a cat", parse_weights("a (dog:1.2)"))]
        assert negative.shape == states.shape == (1, 154, 2 * WIDTH)
        torch.testing.assert_close(states, torch.cat([piece[0] for piece in pieces], dim=1), atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(pooled, pieces[0][2], atol=1e-5, rtol=1e-5)


def test_a_break_beside_a_long_piece_starts_a_whole_chunk(pipes, long_prompt):
    states = pipes[248, 248].encode_prompt(parse_weights(f"a cat BREAK {long_prompt}"))[0]
    pieces = [pipes[248, 248].encode_prompt(text, max_length=248)[0] for text in ("a cat", long_prompt)]
    torch.testing.assert_close(states, torch.cat(pieces, dim=1), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("text", ["BREAK", "BREAK BREAK a cat", "a cat BREAK", "BREAK a cat BREAK BREAK"])
def test_breaks_around_nothing_make_no_empty_chunks(text, pipes):
    states = pipes[77, 77].encode_prompt(parse_weights(text))[0]
    assert torch.equal(states, pipes[77, 77].encode_prompt("a cat" if "cat" in text else "")[0])


def test_pieces_that_do_not_fit_a_fixed_length_are_reported(pipes):
    rows = pipes[77, 77].prompt_report(parse_weights("a cat BREAK a dog BREAK a bird"), max_length=154)
    assert [[row.text[a:b] for a, b in row.cut] for row in rows] == [["a", "bird"]] * 2


def test_all_vectors_of_an_inversion_are_weighted(pipes):
    pipe = copy.copy(pipes[77, 77])
    names = ("text_encoder", "text_encoder_2", "tokenizer", "tokenizer_2")
    pipe.register_modules(**{name: copy.deepcopy(getattr(pipe, name)) for name in names})
    for slot, tokenizer in (("text_encoder", "tokenizer"), ("text_encoder_2", "tokenizer_2")):
        vectors = torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(1))
        parts = {"text_encoder": getattr(pipe, slot), "tokenizer": getattr(pipe, tokenizer)}
        pipe.load_textual_inversion(vectors, token="<cat>", **parts)
    plain = pipe.encode_prompt("a <cat> here")[0]
    states = pipe.encode_prompt(parse_weights("a (<cat>:1.5) here"))[0]
    assert (states != plain).any(dim=-1)[0].nonzero().flatten().tolist() == [2, 3, 4]


def test_a_cleaned_and_weighted_prompt_keeps_its_place_in_what_was_written():
    text = "a  “(red:1.2)” caf&eacute; (dog)"
    prompt = read_prompt(text, "a1111")
    assert prompt == 'a "red" café dog'
    spans = [prompt.in_source((start, end)) for start, end, _ in prompt.weights]
    assert [text[start:end] for start, end in spans] == ["“(red:1.2)”", "dog"]  # a cleaned word is one piece


# Beside compel


@pytest.mark.parametrize("length", [77, 248])
def test_compel_gives_plain_prompts_the_very_same_embeddings(length, pipes, long_prompt):
    pipe = pipes[length, length]
    for prompt, negative in (("a red cat", "bad"), (long_prompt if length == 248 else "a dog", "worse")):
        theirs = CompelForSDXL(pipe)(prompt, negative_prompt=negative)
        mine = pipe.encode_prompt(prompt, negative_prompt=negative, max_length=length)
        both = zip((theirs.embeds, theirs.negative_embeds, theirs.pooled_embeds, theirs.negative_pooled_embeds), mine)
        assert all(torch.equal(a, b) for a, b in both)


def test_compels_own_weights_work_on_swapped_encoders_up_to_the_picture(pipes, draw, long_prompt):
    theirs = CompelForSDXL(pipes[248, 248])(f"a (red)1.5 cat++, {long_prompt}", negative_prompt="bad")
    assert theirs.embeds.shape == (1, 248, 2 * WIDTH)
    embeds = {
        "prompt_embeds": theirs.embeds,
        "pooled_prompt_embeds": theirs.pooled_embeds,
        "negative_prompt_embeds": theirs.negative_embeds,
        "negative_pooled_prompt_embeds": theirs.negative_pooled_embeds,
    }
    assert draw(pipes[248, 248], **embeds).isfinite().all()


def test_a_positive_from_compel_takes_a_negative_in_words(pipes):
    theirs = CompelForSDXL(pipes[77, 77])("a red cat, " * 30)
    given = pipes[77, 77].encode_prompt(
        prompt_embeds=theirs.embeds, pooled_prompt_embeds=theirs.pooled_embeds, negative_prompt="bad"
    )
    assert given[0].shape == given[1].shape
    assert given[0].shape[1] > 77
