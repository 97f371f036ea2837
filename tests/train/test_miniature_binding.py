"""What a token has told: the labels that teach the miniature's first slot to bind."""

from pathlib import Path

import pytest
import torch

from debias_diffusion import load_encoder
from debias_diffusion.data.drawings import drawing_set, long_set
from debias_diffusion.data.scenes import COLOURS, PLACES, SHAPES

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def binding(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "train")
    import miniature_binding

    return miniature_binding


@pytest.mark.parametrize("drawing", [*drawing_set(25), *long_set(25)])
def test_every_described_thing_is_told_with_its_own_answers(binding, drawing):
    told = list(dict.fromkeys(t.answers for t in binding.tellings(drawing.caption)))
    colours, shapes = list(COLOURS), list(SHAPES)
    assert told == [
        (colours.index(t.colour), shapes.index(t.shape), PLACES.index(t.place), int(t.large)) for t in drawing.described
    ]


def test_tokens_are_the_last_word_of_a_thing_and_the_full_stop(binding):
    encoder = load_encoder("miniature-l:base")
    ends = {"left", "right", "centre", "corner", "edge", "middle", "circle", "ring", ".", *COLOURS, *SHAPES}
    for drawing in [*drawing_set(10), *long_set(10)]:
        ids = encoder.tokenizer.encode(drawing.caption)
        for telling in binding.tellings(drawing.caption):
            assert encoder.tokenizer.piece(ids[telling.token]).strip() in ends


def test_labels_stay_within_what_sdxl_reads(binding):
    rows, tokens, answers = binding.labelled(long_set(8))
    assert int(tokens.max()) < 76
    assert rows.shape == tokens.shape
    assert answers.shape == (len(rows), 4)


def test_teaching_moves_the_text_tower_and_leaves_no_hook(binding):
    encoder = load_encoder("miniature-l:base")
    before = {name: p.clone() for name, p in encoder.model.text.named_parameters()}
    share = binding.teach_binding(encoder, binding.BindingConfig(steps=2, batch_size=4))
    assert 0 <= share <= 1
    assert any(not torch.equal(p, before[name]) for name, p in encoder.model.text.named_parameters())
    assert not encoder.model.text.transformer.resblocks[-2]._forward_hooks
    assert not encoder.model.training
