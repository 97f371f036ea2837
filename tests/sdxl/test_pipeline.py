"""The custom SDXL pipeline against the stock one, and where the stock one cannot go."""

import ast
import copy
import inspect
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import (
    DiffusionPipeline,
    StableDiffusionXLImg2ImgPipeline,
    StableDiffusionXLInpaintPipeline,
    StableDiffusionXLPipeline,
)
from diffusers.hooks import apply_group_offloading
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image
from transformers import CLIPTextModel, CLIPTextModelWithProjection

from debias_diffusion.sdxl.prompts import pipeline_class

FILE = Path(__file__).parents[2] / "pipelines" / "pipeline_debias_sdxl.py"
WIDTH = 64
HALVES = {"text_encoder": slice(0, WIDTH), "text_encoder_2": slice(WIDTH, None)}
TOKENIZERS = {"text_encoder": "tokenizer", "text_encoder_2": "tokenizer_2"}
FAST = {"num_inference_steps": 2, "height": 32, "width": 32, "output_type": "pt", "guidance_scale": 3.0}

SENTENCES = " ".join(
    f"The {word} geese walk past {i} small houses beside the river." for i, word in enumerate("abcdefgh")
)
SIX_HUNDRED = " ".join(["a small red house stands beside the river"] * 75)  # 600 words of one token


def ours(stock: Any, **more: Any) -> Any:
    pipe = pipeline_class()(**stock.components | more, add_watermarker=False)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def fresh(stock: Any, *, with_tokenizers: bool = False) -> Any:
    """A stock pipeline that a test may change: its parts are copies, which loading them again would take longer for."""
    parts = {
        name: copy.deepcopy(part)
        for name, part in stock.components.items()
        if isinstance(part, torch.nn.Module) or (with_tokenizers and name.startswith("tokenizer"))
    }
    pipe = StableDiffusionXLPipeline(**stock.components | parts, add_watermarker=False)
    pipe.set_progress_bar_config(disable=True)
    return pipe


@pytest.fixture(scope="module")
def stock(make_pipe: Callable[..., Any], slots_77: Path, slots_248: Path) -> dict[int, Any]:
    """Stock pipelines by their encoders' length; not to be changed."""
    return {77: make_pipe(slots_77), 248: make_pipe(slots_248)}


@pytest.fixture(scope="module")
def pipes(stock: dict[int, Any]) -> dict[Any, Any]:
    """Our pipelines on the same parts, also with one long encoder, by the lengths of the two; not to be changed."""
    mixed = {}
    for first, second in ((248, 77), (77, 248)):
        parts = {"text_encoder": stock[first].text_encoder, "tokenizer": stock[first].tokenizer}
        parts |= {"text_encoder_2": stock[second].text_encoder_2, "tokenizer_2": stock[second].tokenizer_2}
        mixed[first, second] = ours(stock[77], **parts)
    return {(77, 77): ours(stock[77]), (248, 248): ours(stock[248]), **mixed}


@pytest.fixture(autouse=True)
def _no_gradients():
    with torch.no_grad():
        yield


def same(first: Any, second: Any) -> bool:
    return all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def noise(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


# Where the stock pipeline works

CALLS = {
    "one": {"prompt": "a cat"},
    "with a negative": {"prompt": "a cat", "negative_prompt": "blurred, wow!"},
    "empty negative": {"prompt": "a cat", "negative_prompt": ""},
    "empty": {"prompt": "", "negative_prompt": ""},
    "two texts": {"prompt": "a cat", "prompt_2": "oil painting", "negative_prompt": "x", "negative_prompt_2": "y z"},
    "lists": {
        "prompt": ["a cat", "two dogs!"],
        "prompt_2": ["", "oil"],
        "negative_prompt": ["x", ""],
        "num_images_per_prompt": 2,
    },
    "string negative": {"prompt": ["a", "b"], "negative_prompt": "x"},
    "no guidance": {"prompt": "a cat", "negative_prompt": "x", "do_classifier_free_guidance": False},
    "curly": {"prompt": "“a” ﬁeld, naïve 日本語 🐈‍⬛ <|endoftext|> x"},
    "clip skip": {"prompt": "a cat", "clip_skip": 1},
    "no skip": {"prompt": "a cat", "clip_skip": 0},
    "last layer": {"prompt": "a cat", "clip_skip": -1},
    "cut": {"prompt": SIX_HUNDRED, "negative_prompt": "x " * 500},
    "cut within a sentence": {"prompt": SENTENCES * 5, "negative_prompt": "red, green, " * 200},
}


@pytest.mark.parametrize("length", [77, 248])
@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_at_a_fixed_length_embeddings_equal_the_stock_ones_bit_for_bit(length, call, stock, pipes):
    theirs = stock[length].encode_prompt(**call)
    mine = pipes[length, length].encode_prompt(**call, max_length=length)
    assert [None if t is None else t.shape for t in mine] == [None if t is None else t.shape for t in theirs]
    assert same([t for t in mine if t is not None], [t for t in theirs if t is not None])


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    text=st.text(st.characters(codec="utf-8", exclude_characters="\\()[]"), max_size=60),
    negative=st.none() | st.text("ab !,.é🐈", max_size=300),
    length=st.sampled_from([77, 248]),
)
def test_any_text_is_encoded_as_the_stock_pipeline_does(text, negative, length, stock, pipes):
    call = {"prompt": text, "negative_prompt": negative}
    assert same(stock[length].encode_prompt(**call), pipes[length, length].encode_prompt(**call, max_length=length))


@pytest.mark.parametrize(("length", "prompt"), [(77, "a cat"), (248, None)])
def test_pictures_equal_the_stock_ones_bit_for_bit_where_the_prompt_fills_the_rows(length, prompt, stock, pipes, draw):
    more = {"negative_prompt": "blurred"} | ({"prompt": prompt} if prompt else {})
    assert torch.equal(draw(stock[length], **more), draw(pipes[length, length], **more))


def test_texts_and_their_own_embeddings_give_the_same_picture(pipes, draw, long_prompt):
    pipe = pipes[248, 248]
    embeds = pipe.prompt_embeddings(long_prompt, negative_prompt="blurred")
    assert torch.equal(draw(pipe, negative_prompt="blurred"), draw(pipe, **embeds))


# How many rows


@pytest.mark.parametrize("lengths", [(77, 77), (248, 248), (248, 77), (77, 248)])
def test_a_short_prompt_gets_seventy_seven_rows_whatever_the_encoders(lengths, pipes):
    states, negative, *_ = pipes[lengths].encode_prompt("a cat", negative_prompt="x " * 75)
    assert states.shape == negative.shape == (1, 77, 2 * WIDTH)


@pytest.mark.parametrize("part", ["prompt", "prompt_2", "negative_prompt", "negative_prompt_2"])
def test_one_long_text_anywhere_in_the_batch_makes_all_rows_two_hundred_and_forty_eight(part, pipes, long_prompt):
    texts = {
        "prompt": ["a", "b"],
        "prompt_2": ["c", "d"],
        "negative_prompt": ["e", "f"],
        "negative_prompt_2": ["g", "h"],
    }
    texts[part][1] = long_prompt
    states, negative, *_ = pipes[248, 248].encode_prompt(**texts)
    assert states.shape == negative.shape == (2, 248, 2 * WIDTH)


def test_a_long_negative_counts_only_where_there_is_guidance(pipes, long_prompt):
    states, negative, _, pooled = pipes[248, 248].encode_prompt(
        "a cat", negative_prompt=long_prompt, do_classifier_free_guidance=False
    )
    assert states.shape[1] == 77
    assert negative is None
    assert pooled is None


def test_seventy_seven_rows_are_the_first_of_two_hundred_and_forty_eight(pipes):
    short, long = (pipes[248, 248].encode_prompt("a cat", max_length=n) for n in (77, 248))
    torch.testing.assert_close(short[0], long[0][:, :77], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(short[2], long[2], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("max_length", [3, 30, 100, 248, 300, 500])
@pytest.mark.parametrize("lengths", [(248, 248), (248, 77)])
def test_a_number_of_rows_is_what_comes_out(max_length, lengths, pipes, long_prompt):
    for prompt in ("a cat", long_prompt, SIX_HUNDRED):
        states = pipes[lengths].encode_prompt(prompt, negative_prompt="x", max_length=max_length)[0]
        assert states.shape[1] == max_length
        assert states.isfinite().all()


@pytest.mark.parametrize("max_length", [2, 0, -1, 77.0, "248", None, True])
def test_a_length_that_is_none_is_refused(max_length, pipes):
    with pytest.raises(ValueError, match="max_length is .* expected 'auto' or a number of rows"):
        pipes[248, 248].encode_prompt("a cat", max_length=max_length)


def test_a_tokenizer_left_at_seventy_seven_beside_a_longer_encoder_cuts_nothing(stock, long_prompt):
    pipe = ours(fresh(stock[248], with_tokenizers=True))
    expected = pipe.encode_prompt(long_prompt)
    pipe.tokenizer.model_max_length = pipe.tokenizer_2.model_max_length = 77
    assert same(pipe.encode_prompt(long_prompt)[::2], expected[::2])


# Chunks


def test_more_than_the_encoders_hold_is_read_in_chunks_each_as_if_alone(pipes):
    pipe, text = pipes[77, 77], SENTENCES
    reports = pipe.prompt_report(text)
    assert {row.chunks for row in reports} == {2}
    start = text.index("The g geese")
    pieces = [text[:start], text[start:]]
    states, _, pooled, _ = pipe.encode_prompt(text)
    alone = [pipe.encode_prompt(piece, max_length=77) for piece in pieces]
    assert states.shape == (1, 154, 2 * WIDTH)
    torch.testing.assert_close(states, torch.cat([states for states, *_ in alone], dim=1), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(pooled, alone[0][2], atol=1e-5, rtol=1e-5)


SPLITS = {
    "a sentence, not the phrase after it": ("one two. " + "a, " * 24 + "end. Next one, " + "b " * 20, "Next"),
    "no sentence in an abbreviation": ("w, " * 30 + "at 5 p.m. and, x " + "b " * 20, "x"),
    "a phrase": ("w " * 60 + "red roof, green door " + "b " * 20, "green"),
    "a word": ("w " * 72 + "photosynthesises endoplasmically " + "b " * 20, "endoplasmically"),
    "a Chinese full stop": ("w " * 50 + "日本。中国" + "b " * 40, "中"),
}


@pytest.mark.parametrize(("text", "opening"), SPLITS.values(), ids=SPLITS)
def test_a_chunk_ends_where_the_text_pauses(text, opening, pipes):
    pipe = pipes[77, 77]
    states = pipe.encode_prompt(text)[0]
    start = text.index(opening)
    pieces = [pipe.encode_prompt(piece, max_length=77)[0] for piece in (text[:start], text[start:])]
    torch.testing.assert_close(states, torch.cat(pieces, dim=1), atol=1e-5, rtol=1e-5)


def test_text_without_any_pause_is_cut_between_tokens_and_loses_nothing(pipes):
    reports = pipes[77, 77].prompt_report("x" * 2000)
    assert all(row.cut == () and row.chunks > 1 for row in reports)


@pytest.mark.parametrize("lengths", [(77, 77), (248, 248), (248, 77)])
def test_a_short_prompt_beside_a_very_long_one_is_encoded_as_alone_at_that_length(lengths, pipes):
    pipe = pipes[lengths]
    both = pipe.encode_prompt(["five small words are here", SIX_HUNDRED], negative_prompt=["", "x"])
    rows = both[0].shape[1]
    alone = pipe.encode_prompt("five small words are here", negative_prompt="", max_length=rows)
    assert rows >= 600
    for batched, single in zip(both, alone, strict=True):
        torch.testing.assert_close(batched[:1], single, atol=1e-5, rtol=1e-5)


def test_rows_beyond_a_short_text_are_those_of_an_empty_prompts_padding_and_never_zero(pipes):
    pipe = pipes[248, 248]
    states = pipe.encode_prompt("a cat", max_length=600)[0][0]
    empty = pipe.encode_prompt("", max_length=248)[0][0]
    torch.testing.assert_close(states[248:494], empty[2:], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(states[494:], empty[2:108], atol=1e-5, rtol=1e-5)
    assert (states.abs().amax(dim=1) > 0.01).all()


def test_a_hundred_thousand_characters_stop_at_a_stated_number_of_rows(pipes, caplog):
    text = "a small red house, " * 5300
    with caplog.at_level(logging.WARNING):
        states, _, pooled, _ = pipes[248, 248].encode_prompt(text)
    assert states.shape == (1, 992, 2 * WIDTH)
    assert states.isfinite().all()
    assert pooled.shape == (1, WIDTH)
    assert "text_encoder reads 986 of" in caplog.text
    report = pipes[248, 248].prompt_report(text)[0]
    assert report.text[report.cut[0][0] :].rstrip().endswith("a small red house,")


def test_long_text_in_chunks_makes_no_alarming_noise(stock, long_prompt, capfd, caplog):
    with caplog.at_level(logging.WARNING):
        ours(fresh(stock[77], with_tokenizers=True)).encode_prompt(long_prompt, negative_prompt=SIX_HUNDRED)
    assert "indexing errors" not in capfd.readouterr().err
    assert caplog.text == ""


# One long encoder beside a short one


@pytest.mark.parametrize("long", ["text_encoder", "text_encoder_2"])
def test_beside_a_long_encoder_the_short_one_reads_everything_in_chunks(long, pipes, stock, long_prompt):
    lengths = (248, 77) if long == "text_encoder" else (77, 248)
    short = next(slot for slot in HALVES if slot != long)
    states, negative, pooled, _ = pipes[lengths].encode_prompt(long_prompt, negative_prompt="x")
    assert states.shape == negative.shape == (1, 248, 2 * WIDTH)
    expected = stock[248].encode_prompt(long_prompt)
    assert torch.equal(states[..., HALVES[long]], expected[0][..., HALVES[long]])
    chunked = pipes[77, 77].encode_prompt(long_prompt)
    torch.testing.assert_close(states[:, :231, HALVES[short]], chunked[0][..., HALVES[short]], atol=1e-5, rtol=1e-5)
    empty = pipes[77, 77].encode_prompt("")[0][:, 2:19, HALVES[short]]
    torch.testing.assert_close(states[:, 231:, HALVES[short]], empty, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(pooled, (expected if long == "text_encoder_2" else chunked)[2], atol=1e-5, rtol=1e-5)


def test_both_encoders_read_the_end_of_a_long_prompt(pipes, long_prompt):
    for lengths, pipe in pipes.items():
        one, other = (pipe.encode_prompt(f"{long_prompt} and {end}")[0] for end in ("a dog", "two cats"))
        for slot, half in HALVES.items():
            assert not torch.allclose(one[..., half], other[..., half], atol=1e-3), (lengths, slot)


def test_a_picture_comes_out_of_mixed_encoders(pipes, draw):
    picture = draw(pipes[248, 77], negative_prompt="x")
    assert picture.shape == (3, 32, 32)
    assert picture.isfinite().all()


# Prompts, second prompts and negatives in every combination


@pytest.mark.parametrize("negative_2", [None, "", "y", ["y", "w"]], ids=repr)
@pytest.mark.parametrize("negative", [None, "", "x", ["x", "z"]], ids=repr)
@pytest.mark.parametrize("second", [None, "", "oil", ["oil", ""]], ids=repr)
def test_every_combination_of_texts_gives_four_tensors_of_one_length(second, negative, negative_2, pipes):
    pipe = pipes[248, 248]
    states, negative_states, pooled, negative_pooled = pipe.encode_prompt(
        ["a", "b c"], prompt_2=second, negative_prompt=negative, negative_prompt_2=negative_2, num_images_per_prompt=2
    )
    assert states.shape == negative_states.shape == (4, 77, 2 * WIDTH)
    assert pooled.shape == negative_pooled.shape == (4, WIDTH)
    assert torch.equal(states[0], states[1])
    assert not torch.equal(states[1], states[2])
    assert all(t.isfinite().all() for t in (states, negative_states, pooled, negative_pooled))
    assert negative_states.any() == (negative is not None or negative_2 is not None)


def row(text: str, slot: str, pipes: Any) -> torch.Tensor:
    return pipes[77, 77].encode_prompt(text)[0][..., HALVES[slot]]


READ = [
    ({"prompt": "a"}, {"negative": None}),
    ({"prompt": "a", "prompt_2": "b"}, {"text_encoder_2": "b"}),
    ({"prompt": "a", "prompt_2": ""}, {"text_encoder_2": ""}),
    ({"prompt": ["a"], "prompt_2": "b"}, {"text_encoder_2": "b"}),
    ({"prompt": "a", "prompt_2": ["b"]}, {"text_encoder_2": "b"}),
    ({"prompt": "a", "negative_prompt": "x"}, {"negative": ("x", "x")}),
    ({"prompt": "a", "negative_prompt_2": "y"}, {"negative": ("", "y")}),
    ({"prompt": "a", "negative_prompt": "x", "negative_prompt_2": "y"}, {"negative": ("x", "y")}),
    ({"prompt": "a", "negative_prompt": "x", "negative_prompt_2": ""}, {"negative": ("x", "")}),
]


@pytest.mark.parametrize(("texts", "read"), READ, ids=[str(texts) for texts, _ in READ])
def test_each_text_reaches_its_own_encoder(texts, read, pipes):
    states, negative, *_ = pipes[77, 77].encode_prompt(**texts)
    assert torch.equal(states[..., HALVES["text_encoder"]], row("a", "text_encoder", pipes))
    second = read.get("text_encoder_2", "a")
    assert torch.equal(states[..., HALVES["text_encoder_2"]], row(second, "text_encoder_2", pipes))
    for slot, text in zip(HALVES, read.get("negative") or (), strict=False):
        assert torch.equal(negative[..., HALVES[slot]], row(text, slot, pipes))
    if read.get("negative", ...) is None:
        assert not negative.any()


def test_a_negative_reaches_both_encoders(pipes):
    for half in HALVES.values():
        one, other = (pipes[77, 77].encode_prompt("a", negative_prompt=text)[1][..., half] for text in ("x", "y"))
        assert not torch.equal(one, other)


def test_one_prompt_goes_with_a_list_of_negatives_all_the_way_to_pictures(pipes, draw):
    output = pipes[77, 77]("a cat", negative_prompt=["x", "y"], generator=[noise(1), noise(1)], **FAST).images
    assert output.shape == (2, 3, 32, 32)
    assert not torch.equal(output[0], output[1])


def test_without_a_negative_where_zeros_are_not_forced_the_empty_prompt_is_encoded(stock):
    pipe = ours(stock[77])
    pipe.register_to_config(force_zeros_for_empty_prompt=False)
    _, negative, _, pooled = pipe.encode_prompt("a cat")
    assert same((negative, pooled), pipe.encode_prompt("")[::2])
    stock[77].register_to_config(force_zeros_for_empty_prompt=False)
    try:
        assert same(pipe.encode_prompt("a cat"), stock[77].encode_prompt("a cat"))
    finally:
        stock[77].register_to_config(force_zeros_for_empty_prompt=True)


@pytest.mark.parametrize(("positive", "negative"), [("long", "short"), ("short", "long"), ("six hundred", "short")])
def test_negatives_shorter_and_longer_than_the_prompt_come_out_equally_long(positive, negative, pipes, long_prompt):
    texts = {"short": "a cat", "long": long_prompt, "six hundred": SIX_HUNDRED}
    for pipe in pipes.values():
        states, negative_states, pooled, negative_pooled = pipe.encode_prompt(
            texts[positive], negative_prompt=texts[negative]
        )
        assert states.shape == negative_states.shape
        assert pooled.shape == negative_pooled.shape == (1, WIDTH)


def test_a_batch_of_negatives_that_need_different_numbers_of_chunks(pipes):
    negatives = ["x " * 60, "y " * 130]
    states, negative, *_ = pipes[77, 77].encode_prompt(["a", "b"], negative_prompt=negatives)
    assert states.shape == negative.shape == (2, 154, 2 * WIDTH)


# Clip skip


@pytest.mark.parametrize("clip_skip", [None, 0, 1, -1])
def test_clip_skip_takes_the_same_layer_for_prompt_and_negative(clip_skip, pipes, stock):
    states, negative, pooled, negative_pooled = pipes[77, 77].encode_prompt(
        "a cat", negative_prompt="a cat", clip_skip=clip_skip
    )
    assert torch.equal(states, negative)
    assert torch.equal(states, stock[77].encode_prompt("a cat", clip_skip=clip_skip)[0])
    assert torch.equal(pooled, stock[77].encode_prompt("a cat")[2])  # the pooled vector is always the last layer's
    assert torch.equal(pooled, negative_pooled)


@pytest.mark.parametrize("clip_skip", [2, 40, -2])
def test_more_layers_to_skip_than_there_are_is_an_error_that_says_how_many(clip_skip, pipes):
    with pytest.raises(ValueError, match=f"clip_skip is {clip_skip}; text_encoder has 2 layers and takes -1 to 1"):
        pipes[77, 77].encode_prompt("a cat", clip_skip=clip_skip)


# Embeddings in and out


def test_one_call_returns_all_four_tensors_by_the_names_pipelines_take(pipes, stock):
    embeds = pipes[77, 77].prompt_embeddings("a cat", negative_prompt="x")
    assert list(embeds) == [
        "prompt_embeds",
        "negative_prompt_embeds",
        "pooled_prompt_embeds",
        "negative_pooled_prompt_embeds",
    ]
    picture = stock[77](**embeds, generator=noise(), **FAST).images
    assert torch.equal(picture, stock[77]("a cat", negative_prompt="x", generator=noise(), **FAST).images)


def test_a_batch_of_prepared_embeddings_takes_a_list_of_generators_and_no_encoders(pipes):
    pipe = pipes[248, 248]
    embeds = pipe.prompt_embeddings(["a cat", "a dog"], negative_prompt="x")
    nothing = dict.fromkeys(("text_encoder", "text_encoder_2", "tokenizer", "tokenizer_2"))
    bare = ours(pipe, **nothing)
    pictures = bare(**embeds, generator=[noise(1), noise(2)], **FAST).images
    expected = pipe(["a cat", "a dog"], negative_prompt="x", generator=[noise(1), noise(2)], **FAST).images
    assert torch.equal(pictures, expected)
    with pytest.raises(ValueError, match="no text_encoder_2 to read it with"):
        bare("a cat", **FAST)


def test_several_pictures_of_one_prompt_with_embeddings(pipes):
    pipe = pipes[77, 77]
    embeds = pipe.prompt_embeddings("a cat", negative_prompt="x")
    pictures = pipe(**embeds, num_images_per_prompt=3, generator=[noise(i) for i in range(3)], **FAST).images
    again = pipe("a cat", negative_prompt="x", num_images_per_prompt=3, generator=[noise(i) for i in range(3)], **FAST)
    assert pictures.shape == (3, 3, 32, 32)
    assert torch.equal(pictures, again.images)


def test_embeddings_longer_than_the_encoders_take_a_negative_string(pipes):
    pipe = pipes[77, 77]
    states, _, pooled, _ = pipe.encode_prompt(SIX_HUNDRED)
    given = pipe.encode_prompt(prompt_embeds=states, pooled_prompt_embeds=pooled, negative_prompt="bad")
    assert given[1].shape == states.shape
    torch.testing.assert_close(given[1][:, :77], pipe.encode_prompt("bad")[0], atol=1e-5, rtol=1e-5)
    negative = pipe.encode_prompt("bad", negative_prompt_embeds=states, negative_pooled_prompt_embeds=pooled)
    assert negative[0].shape == states.shape
    assert torch.equal(negative[1], states)


def test_a_pooled_vector_given_beside_a_text_is_used_as_in_the_stock_pipeline(pipes, stock):
    pooled = torch.ones(1, WIDTH)
    call = {"prompt": "a cat", "pooled_prompt_embeds": pooled}
    assert same(pipes[77, 77].encode_prompt(**call), stock[77].encode_prompt(**call))


STATES, POOLED = torch.zeros(1, 77, 2 * WIDTH), torch.zeros(1, WIDTH)
WRONG_EMBEDDINGS = {
    "states without pooled": ({"prompt_embeds": STATES}, "prompt_embeds must come with pooled_prompt_embeds"),
    "negative states without pooled": (
        {"prompt": "a", "negative_prompt_embeds": STATES},
        "negative_prompt_embeds must come with negative_pooled_prompt_embeds",
    ),
    "both texts and embeddings": (
        {"prompt": "a", "prompt_embeds": STATES, "pooled_prompt_embeds": POOLED},
        "without texts",
    ),
    "pooled vectors for states": (
        {"prompt_embeds": POOLED, "pooled_prompt_embeds": POOLED},
        r"\(pictures, rows, dim\)",
    ),
    "two lengths": (
        {
            "prompt_embeds": torch.zeros(1, 154, 2 * WIDTH),
            "pooled_prompt_embeds": POOLED,
            "negative_prompt_embeds": STATES,
            "negative_pooled_prompt_embeds": POOLED,
        },
        r"rows; encode both in one call",
    ),
    "another number than texts": (
        {"prompt_embeds": STATES, "pooled_prompt_embeds": POOLED, "negative_prompt": ["x", "y"]},
        "'negative_prompt': 2, 'prompt_embeds': 1",
    ),
}


@pytest.mark.parametrize(("call", "message"), WRONG_EMBEDDINGS.values(), ids=WRONG_EMBEDDINGS)
def test_embeddings_that_cannot_be_used_are_refused_with_what_is_missing(call, message, pipes):
    for method in (pipes[77, 77].encode_prompt, lambda **call: pipes[77, 77](**call, **FAST)):
        with pytest.raises(ValueError, match=message):
            method(**call)


@pytest.mark.parametrize("name", ["negative_embeds", "negative", "prompt_embed", "max_lenght"])
def test_a_misspelt_argument_is_refused_with_the_right_names(name, pipes):
    with pytest.raises(TypeError, match=f"no argument '{name}'; it takes max_length, .*negative_prompt_embeds"):
        pipes[77, 77]("a cat", **{name: "x"}, **FAST)


# Bad input

WRONG_TEXTS = {
    "nothing": ({"prompt": None}, "no prompt"),
    "second prompt alone": ({"prompt": None, "prompt_2": "b"}, "no prompt"),
    "None in a list": ({"prompt": ["a", None]}, "a prompt is None; expected a string"),
    "None in the negatives": ({"prompt": ["a", "b"], "negative_prompt": ["x", None]}, "a prompt is None"),
    "a number": ({"prompt": 5}, "a prompt is 5; expected a string"),
    "no prompts": ({"prompt": []}, "'prompt': 0"),
    "lists of two lengths": ({"prompt": ["a", "b"], "negative_prompt": ["x"]}, "'prompt': 2, 'negative_prompt': 1"),
}


@pytest.mark.parametrize(("call", "message"), WRONG_TEXTS.values(), ids=WRONG_TEXTS)
def test_what_is_no_prompt_is_refused_with_what_was_got(call, message, pipes):
    with pytest.raises(ValueError, match=message):
        pipes[77, 77].encode_prompt(**call)


@pytest.mark.parametrize(
    "text",
    ["", "   \n\t", "🐈‍⬛🐈‍⬛", "!" * 300, "\u0000\u200b", "x" * 5000, "<|endoftext|>" * 100, "ا" * 400],
    ids=["empty", "spaces", "emoji", "marks", "invisible", "one long word", "end of text", "arabic"],
)
def test_odd_text_gives_finite_rows_of_the_right_shape(text, pipes):
    for pipe in (pipes[248, 248], pipes[248, 77]):
        tensors = pipe.encode_prompt([text, "a cat"], negative_prompt=["a cat", text])
        assert all(tensor.isfinite().all() for tensor in tensors)
        assert tensors[0].shape == tensors[1].shape


# Devices, dtypes and what is left behind


def test_a_bfloat16_unet_takes_prompts_from_float32_encoders(stock, draw):
    pipe = ours(fresh(stock[77]))
    pipe.unet.to(torch.bfloat16)
    pipe.vae.to(torch.bfloat16)
    tensors = pipe.encode_prompt("a cat", negative_prompt="x")
    assert {tensor.dtype for tensor in tensors} == {torch.bfloat16}
    assert draw(pipe).isfinite().all()


def test_model_offload_gives_the_same_picture_twice(stock, draw, long_prompt):
    pipe = ours(fresh(stock[248]))
    expected = draw(pipe, negative_prompt="x")
    before = pipe.encode_prompt(long_prompt)[0]
    pipe.enable_model_cpu_offload(device="cpu")
    assert torch.equal(pipe.encode_prompt(long_prompt)[0], before)
    assert torch.equal(draw(pipe, negative_prompt="x"), expected)
    assert torch.equal(draw(pipe, negative_prompt="x"), expected)


def test_group_offload_gives_the_same_embeddings(stock, long_prompt):
    pipe = ours(fresh(stock[248]))
    expected = pipe.encode_prompt(long_prompt, negative_prompt="x")
    for slot in HALVES:
        onload = {"onload_device": torch.device("cpu"), "offload_device": torch.device("cpu")}
        apply_group_offloading(getattr(pipe, slot), offload_type="leaf_level", **onload)
    assert same(pipe.encode_prompt(long_prompt, negative_prompt="x"), expected)


def test_encoders_whose_older_config_says_another_end_of_text_pool_the_same_vector(stock):
    pipe = fresh(stock[77])
    for slot in HALVES:
        parts = [getattr(pipe, slot), getattr(getattr(pipe, slot), "text_model", None)]
        for part in filter(None, parts):
            part.config.eos_token_id = 2
            part.eos_token_id = 2
    assert same(ours(pipe).encode_prompt("a cat, wow!")[::2], stock[77].encode_prompt("a cat, wow!")[::2])


def lora(rank: int = 2, layers: int = 2) -> dict[str, torch.Tensor]:
    generator, state = noise(3), {}
    for number in (1, 2):
        for layer in range(layers):
            for part in ("q_proj", "out_proj"):  # diffusers tells the format by the second
                name = f"lora_te{number}_text_model_encoder_layers_{layer}_self_attn_{part}"
                state[f"{name}.lora_down.weight"] = torch.randn(rank, WIDTH, generator=generator)
                state[f"{name}.lora_up.weight"] = torch.randn(WIDTH, rank, generator=generator)
                state[f"{name}.alpha"] = torch.tensor(1.0)
    return state


def scalings(pipe: Any) -> list[Any]:
    modules = [module for slot in HALVES for module in getattr(pipe, slot).modules()]
    return [dict(module.scaling) for module in modules if hasattr(module, "lora_A")]


@pytest.mark.parametrize("scale", [None, 0.0, 0.3, 1.0])
def test_the_scale_of_a_lora_is_respected_and_left_as_it_was(scale, stock):
    plain = stock[248].encode_prompt("a cat")
    stock = fresh(stock[248])
    stock.load_lora_weights(lora(), adapter_name="style")
    stock.set_adapters("style", 0.7)
    pipe = ours(stock)
    before = scalings(pipe)
    expected = [t.clone() for t in stock.encode_prompt("a cat", lora_scale=scale)]
    for module in (m for slot in HALVES for m in getattr(stock, slot).modules() if hasattr(m, "lora_A")):
        module.scaling["style"] = before[0]["style"]  # the stock pipeline does not put a scale of 0 back
    mine = pipe.encode_prompt("a cat", lora_scale=scale, max_length=248)
    assert same(mine, expected)
    for half in HALVES.values():
        assert torch.equal(mine[0][..., half], plain[0][..., half]) == (scale == 0)
    assert scalings(pipe) == before
    with pytest.raises(ValueError, match="clip_skip"):
        pipe.encode_prompt("a cat", lora_scale=0.3, clip_skip=40)
    assert scalings(pipe) == before


def test_the_scale_given_to_the_call_reaches_the_encoders(stock, draw):
    pipe = ours(fresh(stock[77]))
    pipe.load_lora_weights(lora(), adapter_name="style")
    full = draw(pipe)
    none = draw(pipe, cross_attention_kwargs={"scale": 0.0})
    assert not torch.equal(full, none)
    pipe.unload_lora_weights()
    assert torch.equal(draw(pipe), none)


def test_a_call_changes_no_part_of_the_pipeline(stock, draw, long_prompt):
    pipe = ours(fresh(stock[248]))

    def state() -> list[Any]:
        parts = []
        for slot, tokenizer in TOKENIZERS.items():
            encoder = getattr(pipe, slot)
            parts += [id(encoder), encoder.training, encoder.config.to_dict()]
            parts += [(name, tensor.clone()) for name, tensor in encoder.state_dict().items()]
            parts += [getattr(pipe, tokenizer).model_max_length, getattr(pipe, tokenizer).get_vocab()]
            parts += [getattr(pipe, tokenizer).backend_tokenizer.to_str()]
        return parts

    before = state()
    draw(pipe, negative_prompt=SIX_HUNDRED, clip_skip=1)
    for old, new in zip(before, state(), strict=True):
        if isinstance(old, tuple):
            assert old[0] == new[0]
            assert torch.equal(old[1], new[1])
        else:
            assert old == new


def test_prompts_are_encoded_with_gradients_where_the_caller_wants_them(stock):
    pipe = ours(fresh(stock[248]))
    with torch.enable_grad():
        states, negative, pooled, _ = pipe.encode_prompt(SIX_HUNDRED, negative_prompt="x")
        (states.sum() + negative.sum() + pooled.sum()).backward()
    assert all(getattr(pipe, slot).get_input_embeddings().weight.grad.any() for slot in HALVES)


def test_a_model_with_projection_in_the_first_slot_is_never_pooled(stock):
    wrong = CLIPTextModelWithProjection(stock[77].text_encoder.config).eval()
    wrong.text_model.load_state_dict(stock[77].text_encoder.state_dict())
    assert same(ours(stock[77], text_encoder=wrong).encode_prompt("a cat"), stock[77].encode_prompt("a cat"))


def test_a_model_without_projection_in_the_second_slot_is_refused(stock):
    wrong = CLIPTextModel(stock[77].text_encoder_2.config)
    with pytest.raises(ValueError, match="text_encoder_2 is a CLIPTextModel, expected CLIPTextModelWithProjection"):
        ours(stock[77], text_encoder_2=wrong).encode_prompt("a cat")


# Textual inversion


def add_inversion(pipe: Any, token: str, vectors: int = 2) -> None:
    state = {key: torch.randn(vectors, WIDTH, generator=noise(5)) for key in ("clip_l", "clip_g")}
    for key, (slot, tokenizer) in zip(("clip_l", "clip_g"), TOKENIZERS.items(), strict=True):
        pipe.load_textual_inversion(
            state[key], token=token, text_encoder=getattr(pipe, slot), tokenizer=getattr(pipe, tokenizer)
        )


@pytest.fixture(scope="module")
def inverted(stock: dict[int, Any]) -> Any:
    """A stock pipeline at 248 tokens with an inversion of three vectors and one of one."""
    with torch.no_grad():
        pipe = fresh(stock[248], with_tokenizers=True)
        add_inversion(pipe, "<cat>", 3)
        add_inversion(pipe, "<dog>", 1)
    return pipe


@pytest.mark.parametrize("prompt", ["a <cat> house", "<cat>", "a<cat><cat> ! <cat>, <dog>"])
def test_textual_inversions_of_several_vectors_are_read_by_both_slots_as_in_the_stock_pipeline(prompt, inverted):
    mine = ours(inverted).encode_prompt(prompt, negative_prompt=prompt, max_length=248)
    assert same(mine, inverted.encode_prompt(prompt, negative_prompt=prompt))
    report = ours(inverted).prompt_report(prompt)[0]
    plain = ours(inverted).prompt_report(prompt.replace("<cat>", "cat").replace("<dog>", "dog"))[0]
    assert report.num_tokens == plain.num_tokens + 2 * prompt.count("<cat>")


def test_the_vectors_of_an_inversion_are_not_torn_apart_at_the_end_of_a_chunk(inverted):
    pipe, text = ours(inverted), "w " * 244 + "<cat> house"
    states = pipe.encode_prompt(text)[0]
    pieces = [pipe.encode_prompt(piece, max_length=248)[0] for piece in ("w " * 244, "<cat> house")]
    torch.testing.assert_close(states, torch.cat(pieces, dim=1), atol=1e-5, rtol=1e-5)


def test_a_textual_inversion_the_swapped_encoder_never_saw_is_named(inverted, stock):
    pipe = ours(inverted, text_encoder=stock[248].text_encoder)
    with pytest.raises(
        ValueError, match="tokenizer knows '<.*>', text_encoder does not; load textual inversions after"
    ):
        pipe.encode_prompt("a <cat> <dog>")


# As a file for custom_pipeline


def test_the_file_holds_one_pipeline_class_and_imports_nothing_of_the_library():
    tree = ast.parse(FILE.read_text())
    imported = {
        name.split(".")[0]
        for node in ast.walk(tree)
        for name in (
            [alias.name for alias in node.names]
            if isinstance(node, ast.Import)
            else [node.module]
            if isinstance(node, ast.ImportFrom)
            else []
        )
    }
    assert imported <= {"torch", "transformers", "diffusers", "inspect", "re", "functools", "itertools", "typing"}
    module = inspect.getmodule(pipeline_class())
    classes = [c for c in vars(module).values() if inspect.isclass(c) and issubclass(c, DiffusionPipeline)]
    assert [c.__name__ for c in classes if not c.__module__.startswith("diffusers.")] == [pipeline_class().__name__]
    gradient_free = [
        function.name
        for function in ast.walk(tree)
        if isinstance(function, ast.FunctionDef)
        if "no_grad" in ast.unparse(function) or "inference_mode" in ast.unparse(function)
    ]
    assert gradient_free == ["__call__"]


@pytest.fixture
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """diffusers' cache of pipeline files, without any."""
    monkeypatch.setattr("diffusers.utils.dynamic_modules_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.syspath_prepend(str(tmp_path / "modules"))


def test_the_file_loads_by_path_from_an_empty_cache_and_only_with_consent(
    empty_cache, pipes, draw, tmp_path, long_prompt
):
    StableDiffusionXLPipeline(**pipes[77, 77].components).save_pretrained(tmp_path / "stock")
    own = {name: pipes[248, 248].components[name] for name in (*TOKENIZERS, *TOKENIZERS.values())}
    with pytest.raises(ValueError, match="trust_remote_code"):
        DiffusionPipeline.from_pretrained(tmp_path / "stock", custom_pipeline=str(FILE), **own)
    pipe = DiffusionPipeline.from_pretrained(
        tmp_path / "stock", custom_pipeline=str(FILE), trust_remote_code=True, **own
    )
    pipe.set_progress_bar_config(disable=True)
    assert type(pipe).__name__ == pipeline_class().__name__
    assert torch.equal(draw(pipe, negative_prompt="x"), draw(pipes[248, 248], negative_prompt="x"))
    report = pipe.prompt_report(long_prompt, max_length=77)[0]
    assert report.cut


def test_a_saved_pipeline_comes_back_three_ways(empty_cache, pipes, draw, tmp_path):
    pipe, folder = pipes[248, 248], tmp_path / "saved"
    pipe.save_pretrained(folder)
    expected = draw(pipe)
    for load, more in (
        (pipeline_class(), {}),
        (StableDiffusionXLPipeline, {}),
        (DiffusionPipeline, {"custom_pipeline": str(FILE), "trust_remote_code": True}),
    ):
        again = load.from_pretrained(folder, **more)
        again.set_progress_bar_config(disable=True)
        assert again.tokenizer.model_max_length == again.tokenizer_2.model_max_length == 248
        assert torch.equal(draw(again), expected)


@pytest.mark.parametrize("other", [StableDiffusionXLImg2ImgPipeline, StableDiffusionXLInpaintPipeline])
def test_other_sdxl_pipelines_take_its_embeddings(other, pipes, draw):
    pipe = other.from_pipe(pipes[248, 77])
    pipe.set_progress_bar_config(disable=True)
    embeds = pipes[248, 77].prompt_embeddings(SIX_HUNDRED, negative_prompt="x")
    picture = Image.new("RGB", (32, 32), "red")
    more = {"image": picture, "strength": 1.0} | ({"mask_image": picture} if "Inpaint" in other.__name__ else {})
    assert draw(pipe, **embeds, **more).isfinite().all()
