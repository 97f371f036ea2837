"""Features: what is no caption or picture is refused by name, and bars are drawn for eyes only."""

import subprocess
import sys

import pytest
import torch
from PIL import Image

from debias_diffusion import image_features, text_features

# In a process of its own, where no type checker of the tests speaks first.
_CALLS = """
import sys
from PIL import Image
from debias_diffusion import image_features, load_encoder, text_features
encoder = load_encoder(sys.argv[1])
picture = Image.new("RGB", (8, 8))
for call, value in (
    (text_features, "A cat."), (text_features, None), (text_features, ["A cat.", None]),
    (image_features, picture), (image_features, "a.png"), (image_features, None), (image_features, [picture, "a.png"]),
):
    try:
        call(encoder, value)
    except ValueError as error:
        print(error)
"""


def test_what_is_no_caption_or_picture_is_refused_with_what_to_give(tiny_folder):
    command = [sys.executable, "-c", _CALLS, str(tiny_folder)]
    shown = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    assert shown == [
        "text_features takes a list of captions; for one caption give [caption]",
        "text_features takes a list of strings, got None",
        "text_features takes a list of strings, got None at place 1",
        "image_features takes a list of pictures; for one picture give [picture]",
        "image_features takes a list of PIL pictures, got 'a.png'; open files with PIL.Image.open(path)",
        "image_features takes a list of PIL pictures, got None; open files with PIL.Image.open(path)",
        "image_features takes PIL pictures, got 'a.png'; open files with PIL.Image.open(path)",
    ]


@pytest.mark.parametrize("on_terminal", [False, True])
def test_a_bar_is_drawn_on_a_terminal_only(tiny, monkeypatch, capsys, on_terminal):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: on_terminal, raising=False)
    text_features(tiny, ["A cat."], progress=True)
    image_features(tiny, [Image.new("RGB", (8, 8))], progress=True)
    assert ("caption" in capsys.readouterr().err) == on_terminal


def test_features_are_unit_rows_in_the_order_given(tiny):
    captions = ["A very long caption about a red star and a blue one.", "A cat.", ""]
    features = text_features(tiny, captions)
    assert torch.allclose(features.norm(dim=1), torch.ones(3))
    for index, caption in enumerate(captions):
        assert torch.allclose(text_features(tiny, [caption])[0], features[index], atol=1e-5)
    assert image_features(tiny, []).shape == (0, 32)
