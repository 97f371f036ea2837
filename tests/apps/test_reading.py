"""What the page says about a prompt: who reads how much of it, and what of it was drawn."""

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from apps.charts import attention_html, fidelity_text, sentences_html
from apps.looking import Look, look
from apps.prompt_examples import PROSE, example_prompts
from apps.reading_html import column_html, count_text, reading_html, status_html
from apps.sentences import Drawn, drawn_things, read_sentences, read_shares, told_things
from debias_diffusion.data.scenes import long_caption, make_scene, render, scene_rng
from debias_diffusion.encoders.checkpoint import BPE_FILE
from debias_diffusion.encoders.encoder import MINIATURE_FOLDER
from debias_diffusion.encoders.tokens import Tokenizer
from debias_diffusion.sdxl.generate import Settings
from debias_diffusion.sdxl.prompts import PromptLine

EVIL = '<script>alert("1")</script> <img src=x onerror=alert(2)> & "quotes" ${1+1} {{2*3}}'


@given(st.integers(0, 10_000))
@settings(max_examples=60, deadline=None)
def test_every_sentence_of_the_miniature_world_is_understood(index):
    scene = make_scene(0, "understood", index)
    sentences = read_sentences(long_caption(scene, scene_rng("caption", index)))
    assert tuple(thing for sentence in sentences for thing in told_things(sentence.text)) == scene.things


def test_prose_tells_nothing_that_could_be_looked_for():
    assert not [thing for text in PROSE.values() for s in read_sentences(text) for thing in told_things(s.text)]


def test_a_picture_is_compared_with_what_its_prompt_tells_sentence_by_sentence(tmp_path: Path):
    scene = make_scene(0, "drawn", 1)
    sentences = read_sentences(long_caption(scene, scene_rng("caption", 1)))
    render(scene).save(tmp_path / "right.png")
    render(make_scene(0, "drawn", 2)).save(tmp_path / "wrong.png")
    render(scene).resize((32, 32)).save(tmp_path / "small.png")
    right = drawn_things(sentences, [tmp_path / "right.png"])
    assert right == [Drawn(2, 2)] + [Drawn(1, 1)] * (len(sentences) - 1)
    both = drawn_things(sentences, [tmp_path / "right.png", tmp_path / "wrong.png"])
    assert both[0].told == 4
    assert sum(each.right for each in both) < sum(each.told for each in both)
    assert drawn_things(sentences, [tmp_path / "small.png"]) == [None] * len(sentences)
    assert fidelity_text(right) == f"drew {len(scene.things)} of {len(scene.things)} described things right"
    assert fidelity_text([None]) == ""


def test_examples_are_longer_than_stock_reads_and_fit_248_tokens(studio):
    assert set(example_prompts(False).values()) == set(PROSE.values())
    for title, text in PROSE.items():
        reports = studio.read("debias", PromptLine(text), Settings())
        assert all(100 <= report.num_tokens <= 240 for report in reports), title
    assert next(iter(example_prompts(True))) == "Scene, 9 shapes"  # it shows most of what the page is about
    tokenizer = Tokenizer(248, MINIATURE_FOLDER / BPE_FILE)
    for title, text in example_prompts(True).items():
        assert 100 <= len(tokenizer.encode(text)) <= 240, title
        assert sum(len(told_things(s.text)) for s in read_sentences(text)) >= 6


def test_the_prompt_is_cut_where_the_encoder_stops(studio, long_prompt):
    tokens = {name: studio.read(name, PromptLine(long_prompt), Settings()) for name in ("stock", "debias")}
    html = reading_html(long_prompt, tokens)
    before, after = html.split("stock stops here")
    assert "debias stops here" not in html
    assert "three white geese" in before
    assert 'class="dd-read-some"' in after
    assert "yellow kite" in after
    assert "reads 77 of" in count_text(tokens["stock"])
    assert "yellow kite" in column_html("stock", 0, tokens["stock"])
    assert "Nothing was cut" in column_html("debias", 1, tokens["debias"])
    sentences = read_sentences(long_prompt)
    stock, debias = (read_shares(sentences, tokens[name]) for name in ("stock", "debias"))
    assert debias == [1.0] * len(sentences)
    assert stock[0] == 1.0
    assert stock[-1] == 0.0
    assert stock == sorted(stock, reverse=True)


def test_a_prompt_is_text_and_never_markup(studio):
    prompt = EVIL + " word" * 100
    tokens = {"stock": studio.read("stock", PromptLine(prompt), Settings())}
    sentences = read_sentences(prompt)
    shares = {"stock": read_shares(sentences, tokens["stock"])}
    looks = {"stock": Look([0.5, 0.5], [0.3] * len(sentences), [0])}
    for html in (
        reading_html(prompt, tokens),
        column_html("stock", 0, tokens["stock"]),
        sentences_html(sentences, shares, looks),
        attention_html(looks),
        status_html(EVIL),
    ):
        assert "<script" not in html
        assert "<img" not in html


def test_a_look_is_a_share_of_attention_and_stops_where_reading_stops(studio, long_prompt):
    sentences = read_sentences(long_prompt)
    stock, debias = (look(studio.find(name), long_prompt, sentences) for name in ("stock", "debias"))
    cut = look(studio.find("debias"), long_prompt, sentences, 77)
    assert stock.num_tokens == cut.num_tokens == 75
    assert debias.num_tokens > 150
    for each in (stock, debias):
        assert sum(each.attention) == pytest.approx(1)
        assert each.starts[:2] == [0, 8]  # seven words and a full stop
        assert all(-1 <= value <= 1.001 for value in each.similarity)
    assert len(debias.starts) == len(sentences)
    assert len(stock.starts) < len(sentences)
    alone = look(studio.find("debias"), sentences[0].text, sentences[:1])
    assert alone.similarity == pytest.approx([1.0])


def test_it_is_said_where_nobody_scores_what_arrived():
    sentences, looks = read_sentences("A cat sleeps."), {"stock": Look([1.0], [0.5], [0])}
    shares, hint = {"stock": [1.0]}, "named by --judge"
    assert hint in sentences_html(sentences, shares, looks, {"stock": [None]}, {})
    assert hint not in sentences_html(sentences, shares, looks)  # nothing is drawn yet
    assert hint not in sentences_html(sentences, shares, looks, {"stock": [Drawn(0, 1)]}, {})
    assert hint not in sentences_html(sentences, shares, looks, {"stock": [None]}, {"stock": [0.2]})
