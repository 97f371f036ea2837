"""Drawing tasks: what their captions describe, and that it fits where it must."""

import pytest

from debias_diffusion.data.drawings import FEW, drawing_set, few_drawing, long_set, num_tokens, training_drawing
from debias_diffusion.data.scenes import make_scene
from debias_diffusion.data.wording import PLACES
from debias_diffusion.encoders.encoder import MINIATURE_FOLDER
from debias_diffusion.encoders.tokens import Tokenizer

TOKENIZER = Tokenizer(248, MINIATURE_FOLDER / "bpe.txt.gz")


def test_token_counts_are_the_tokenizer_s():
    captions = [d.caption for d in [*drawing_set(30), *long_set(30), *(training_drawing(0, i) for i in range(40))]]
    for caption in captions:
        assert num_tokens(caption) == int((TOKENIZER([caption]).input_ids[0] != 0).sum()), caption


def test_each_described_shape_is_told_in_order():
    for drawing in [*drawing_set(40), *long_set(40), *(training_drawing(3, i) for i in range(100))]:
        at = -1
        for thing in drawing.described:
            positions = [drawing.caption.find(p, at + 1) for p in PLACES[thing.place]]
            here = [p for p in positions if p > -1]
            assert here, (thing, drawing.caption)
            at = min(here)
            sentence = next(s for s in drawing.caption.split(".") if any(p in s for p in PLACES[thing.place]))
            assert thing.colour in sentence
            assert thing.shape in sentence


def test_held_out_sets_fit_their_lengths_and_share_no_scene_with_training():
    few, many = drawing_set(200), long_set(50)
    assert all(num_tokens(d.caption) <= 77 and FEW[0] <= len(d.scene.things) <= FEW[1] for d in few)
    assert all(100 <= num_tokens(d.caption) <= 200 for d in many)
    trained = {training_drawing(0, i).scene for i in range(500)}
    assert not trained & {d.scene for d in few + many}


def test_a_scene_of_many_shapes_is_no_short_drawing():
    with pytest.raises(ValueError, match="at most 5"):
        few_drawing(make_scene(0, "t", 0), (0,))


def test_a_shorter_set_is_the_beginning_of_a_longer_one():
    assert drawing_set(5) == drawing_set(9)[:5]
    assert long_set(3) == long_set(6)[:3]
