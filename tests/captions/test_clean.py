"""Cleaning must leave nothing for open_clip's own cleaning to change, whatever comes in."""

import open_clip
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from debias_diffusion.captions.clean import clean_caption, clean_lines


@pytest.mark.parametrize(
    ("dirty", "clean"),
    [
        ("“Curly” ‘quotes’", "\"Curly\" 'quotes'"),
        ("ﬁne ﬂowers", "fine flowers"),
        ("ＦＵＬＬ　width！", "FULL width!"),
        ("A &amp; B &lt;3 &quot;C&quot;", 'A & B <3 "C"'),
        ("twice &amp;amp; escaped", "twice & escaped"),
        ("a < b &amp; c &amp;amp; d", "a < b & c & d"),  # ftfy leaves entities beside a literal "<"
        ("cafÃ©", "café"),
        (" a\t b\r\n\r\n\n c\u00a0d\u2028e ", "a b c d e"),
        ("a &#10;&#10; b", "a b"),
        ("wow! kept", "wow! kept"),
        ("CASE Kept", "CASE Kept"),
        ("a <end_of_text> b <START_of_text>", "a <end _of_text> b <START _of_text>"),
        ("&lt;end_of_text&gt; ＜ｅｎｄ＿of_text＞", "<end _of_text> <end _of_text>"),
        ("the end of text", "the end of text"),
        (" \n\t ", ""),
        ("", ""),
    ],
)
def test_known_damage(dirty: str, clean: str) -> None:
    assert clean_caption(dirty) == clean


@pytest.mark.parametrize(
    "text",
    [
        "“A” — café &amp; ﬁn",
        "ＦＵＬＬ width！",
        "one\n\ntwo &nbsp; three",
        "&amp;quot;x&amp;quot;",
        "plain words, 3.5 m",
        "",
    ],
)
def test_ids_are_those_open_clip_gives_without_our_cleaning(text: str) -> None:
    tokenizer = open_clip.tokenizer.SimpleTokenizer(context_length=248)
    assert torch.equal(tokenizer([text]), tokenizer([clean_caption(text)]))


@pytest.mark.parametrize(
    "name", ["<end_of_text>", "<Start_Of_Text>", "&lt;end_of_text&gt;", "&amp;amp;lt;end_of_text>"]
)
def test_the_name_of_a_special_token_is_plain_words(name: str) -> None:
    tokenizer = open_clip.tokenizer.SimpleTokenizer(context_length=77)
    special = {tokenizer.sot_token_id, tokenizer.eot_token_id}
    ids = tokenizer.encode(clean_caption(f"A sign reads {name} and more."))
    assert not special & set(ids)
    opening, closing = ("<start", "_of_text>") if "tart" in name else ("<end", "_of_text>")
    assert ids == tokenizer.encode(f"A sign reads {opening} {closing} and more.")  # no other id is changed


def test_lines_hold_text_and_join_to_the_caption() -> None:
    assert clean_lines("A cat.\r\n \n\n  A &amp; B\u2028C") == ["A cat.", "A & B", "C"]


@given(st.text(st.characters()))
@example("\ud800 lone surrogate \x00\x07")
def test_any_text_comes_back_on_one_line_without_needless_white_space(text: str) -> None:
    cleaned = clean_caption(text)
    assert cleaned == " ".join(cleaned.split())
    assert cleaned == " ".join(clean_lines(text))
    cleaned.encode()
