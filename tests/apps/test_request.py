"""What a visitor may ask for."""

import pytest

from apps.request import MAX_CHARACTERS, Request, finite, read_size, size_names, whole


def test_a_request_becomes_the_librarys_own_settings():
    request = Request("a cat", ("stock", "debias"), "  ", 7, 3, 20, 4.5, 64, 32, "248", "a1111")
    assert request.seeds == [7, 8, 9]
    assert request.line.negative is None  # blank: what SDXL does without one
    settings = request.settings
    assert (settings.steps, settings.guidance_scale, settings.width, settings.height) == (20, 4.5, 64, 32)
    assert (settings.max_length, settings.syntax) == (248, "a1111")
    assert Request("a cat", ("stock",)).settings.max_length == "auto"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"prompt": " \n"}, "prompt is empty"),
        ({"prompt": "x" * (MAX_CHARACTERS + 1)}, "at most 40,000"),
        ({"negative": "x" * (MAX_CHARACTERS + 1)}, "negative prompt has 40,001"),
        ({"prompt": "a\n" * 501}, "501 sentences or lines; at most 500"),
        ({"prompt": "a cat \ud800"}, "half of a character"),
        ({"sets": ()}, "choose 1 to 3"),
        ({"sets": ("a", "b", "c", "d")}, "4 sets"),
        ({"sets": ("a", "a")}, "different"),
        ({"seed": -1}, "seed is -1"),
        ({"num_seeds": 10}, "expected 1 to 9"),
        ({"steps": 0}, "number of steps is 0"),
        ({"guidance_scale": float("nan")}, "guidance is nan"),
        ({"blend": 1.5}, "blend is 1.5"),
        ({"length": "100"}, "lengths: auto, 77, 248"),
        ({"syntax": "comfy"}, "syntaxes: plain, a1111"),
    ],
)
def test_what_cannot_be_drawn_is_refused_in_words(change, message):
    with pytest.raises(ValueError, match=message):
        Request(**({"prompt": "a cat", "sets": ("stock",)} | change))


@pytest.mark.parametrize("text", ["", "64", "64 x", "63 x 64", "0 x 64", "136 x 64", "64 x 64; rm", None])
def test_a_size_is_two_sides_the_checkpoint_can_draw(text):
    with pytest.raises(ValueError, match="the size is"):
        read_size(text, 64)


def test_every_offered_size_can_be_asked_for():
    for own in (32, 64, 512, 1024):
        for name in size_names(own):
            read_size(name, own)


@pytest.mark.parametrize("value", [None, True, float("nan"), float("inf"), 10**400, "many"])
def test_an_empty_or_odd_field_is_no_number(value):
    for read in (finite, whole):
        with pytest.raises(ValueError, match=r"seed is .*; expected a|could not convert"):
            read(value, "seed")
    assert (finite(4.5, "seed"), whole(7.0, "seed")) == (4.5, 7)
    with pytest.raises(ValueError, match="seed is 4.5; expected a whole number"):
        whole(4.5, "seed")
