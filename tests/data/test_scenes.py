import re

import numpy as np
import pytest

from debias_diffusion.captions.sentences import split_sentences
from debias_diffusion.data.scene_sets import ScenePairs, scene_retrieval_set, short_captions
from debias_diffusion.data.scenes import (
    BACKGROUNDS,
    COLOURS,
    SHAPES,
    SIZE,
    Scene,
    Thing,
    all_phrases,
    make_scene,
    pretraining_caption,
    render,
    scene_rng,
)
from debias_diffusion.encoders.encoder import MINIATURE_FOLDER
from debias_diffusion.encoders.tokens import Tokenizer

PAIRS = ScenePairs(300)


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer(248, MINIATURE_FOLDER / "bpe.txt.gz")


def test_scenes_follow_the_rules():
    for i in range(300):
        scene = PAIRS.scene(i)
        assert 6 <= len(scene.things) <= 9
        assert len(scene.large) == 2
        assert len({t.place for t in scene.things}) == len(scene.things)


def test_everything_depends_on_seed_split_and_index_alone():
    assert make_scene(1, "train", 5) == make_scene(1, "train", 5)
    scenes = {make_scene(seed, split, i) for seed in (0, 1) for split in ("train", "test") for i in range(200)}
    assert len(scenes) > 795  # the streams are apart; a few coincidences are allowed
    assert PAIRS.captions[7] == ScenePairs(10).captions[7]


def test_captions_open_with_a_summary_and_tell_each_small_shape_in_a_sentence():
    for i in range(100):
        scene, sentences = PAIRS.scene(i), split_sentences(PAIRS.captions[i])
        assert len(sentences) == 1 + len(scene.small)
        assert scene.background in sentences[0]
        assert all(f"large {t.colour} {t.shape}" in sentences[0] for t in scene.large)
        for thing, sentence in zip(scene.small, sentences[1:], strict=True):
            assert thing.colour in sentence
            assert thing.shape in sentence


def test_captions_are_as_long_as_real_ones(tokenizer):
    lengths = np.array([len(tokenizer.encode(PAIRS.captions[i])) for i in range(300)])
    assert 120 < lengths.mean() < 160
    assert lengths.max() <= 248
    assert (lengths >= 100).mean() > 0.9


def test_what_the_base_learns_from_fits_its_context(tokenizer):
    lengths = [len(tokenizer.encode(pretraining_caption(PAIRS.scene(i), scene_rng(i)))) for i in range(300)]
    assert max(lengths) <= 77
    assert max(len(tokenizer.encode(c)) for c in short_captions(PAIRS)) <= 24


def test_every_word_is_one_token(tokenizer):
    words = {w for phrase in all_phrases() for w in re.findall(r"[a-z]+", re.sub(r"\{.*?\}", "", phrase.lower()))}
    assert len(words) > 100
    assert {w for w in words if len(tokenizer.encode(w)) != 3} == set()


@pytest.mark.parametrize("shape", SHAPES)
def test_pictures_show_what_the_scene_says(shape):
    thing = Thing(shape, "red", (0, 2), large=True)
    pixels = np.asarray(render(Scene((thing,), "navy"))).astype(int)
    assert pixels.shape == (SIZE, SIZE, 3)
    is_red = np.abs(pixels - COLOURS["red"]).sum(-1) < 30
    is_navy = np.abs(pixels - BACKGROUNDS["navy"]).sum(-1) < 30
    assert is_red[:22, 42:].sum() > 60
    assert not is_red[22:].any()
    assert is_navy[22:].all()


def test_all_shapes_differ():
    pictures = {s: np.asarray(render(Scene((Thing(s, "red", (1, 1), False),), "grey"))).tobytes() for s in SHAPES}
    assert len(set(pictures.values())) == len(SHAPES)


def test_the_test_set_is_apart_from_training_and_grows_at_its_end():
    small, large = scene_retrieval_set(20), scene_retrieval_set(30)
    assert small.captions == large.captions[:20]
    assert not set(small.captions) & set(PAIRS.captions[0:300])
    assert large.short_captions is not None
    assert large.counts["duplicate_pictures"] == 0
