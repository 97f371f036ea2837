import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from debias_diffusion.encoders.tokens import PAD_ID, Tokenizer, collate_tokens, fit, shift_tokens

CLIP = Tokenizer(248)


def test_ids_of_the_published_tokenizer(shared):
    golden = np.load(shared / "vectors" / "longclip_tiny.npz")
    batch = CLIP([str(c) for c in golden["captions"]])
    long_ids = torch.from_numpy(golden["long_ids"]).long()
    width = batch.input_ids.shape[1]
    assert torch.equal(batch.input_ids, long_ids[:, :width])
    assert not long_ids[:, width:].any()


def test_a_well_known_caption():
    assert CLIP.encode("a photo of a cat") == [49406, 320, 1125, 539, 320, 2368, 49407]


def test_typographic_text_gives_the_ids_of_plain_text():
    assert CLIP.encode("a dog&rsquo;s \u201cbone\u201d") == CLIP.encode('a dog\'s "bone"')


def test_a_long_caption_is_cut_with_eot_kept_and_counted():
    batch = CLIP(["word " * 400, "short"])
    assert batch.input_ids.shape == (2, 248)
    assert batch.input_ids[0, -1] == CLIP.eot_id
    assert batch.num_cut == 1
    assert batch.num_tokens.tolist() == [402, 3]


@given(st.lists(st.integers(1, 40), min_size=0, max_size=30), st.data())
def test_token_padding_keeps_every_token_and_the_place_that_is_pooled(words, data):
    ids = [98, *words, 99]
    num_prefix = data.draw(st.integers(0, 40 - len(ids) if len(ids) < 40 else 0))
    shifted = shift_tokens(ids, num_prefix)
    assert [shifted[0], *shifted[1 + num_prefix :]] == ids
    assert shifted[1 : 1 + num_prefix] == [PAD_ID] * num_prefix
    batch = collate_tokens([ids], [num_prefix], 80)
    assert int(batch.input_ids.argmax()) == len(ids) + num_prefix - 1


@given(st.lists(st.integers(1, 40), min_size=2, max_size=30), st.integers(2, 40))
def test_fit_ends_in_the_last_id(ids, context_length):
    cut = fit(ids, context_length)
    assert cut[-1] == ids[-1]
    assert len(cut) == min(len(ids), context_length)


def test_padding_beyond_the_context_is_an_error():
    with pytest.raises(ValueError, match="row of 12 tokens, the context holds 10"):
        collate_tokens([[98, 1, 99]], [9], 10)
