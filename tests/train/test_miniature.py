"""The makers of the miniature's bases, at sizes that teach nothing: each family by its own loss, from one vocabulary."""

import math
import re
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from open_clip.loss import ClipLoss, SigLipLoss

from debias_diffusion import load_encoder, save_encoder, text_features
from debias_diffusion.data.scenes import all_phrases
from debias_diffusion.encoders.encoder import MINIATURE_FOLDER
from debias_diffusion.encoders.tokens import Tokenizer

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def clip_script(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "train")
    import miniature_clip

    return miniature_clip


def test_the_loss_is_softmax_s_for_a_scale_and_sigmoid_s_where_there_is_a_bias(clip_script):
    image, text = (F.normalize(torch.randn(6, 8, generator=torch.Generator().manual_seed(i)), dim=-1) for i in (0, 1))
    scale, bias = torch.tensor(7.0), torch.tensor(-3.0)
    own = clip_script.pair_loss(image, text, scale)
    torch.testing.assert_close(own, ClipLoss()(image, text, scale))
    own = clip_script.pair_loss(image, text, torch.stack([scale, bias]))
    torch.testing.assert_close(own, SigLipLoss()(image, text, scale, bias))


@pytest.mark.parametrize(
    ("row", "loss", "context"), [("miniature", "softmax", 77), ("miniature-siglip", "sigmoid", 64)]
)
def test_a_base_of_each_family_is_trained_two_steps(clip_script, row, loss, context, tmp_path):
    config = clip_script.BaseConfig(tmp_path / "base", row, steps=2, batch_size=4, warmup_steps=1)
    torch.manual_seed(config.seed)
    before = clip_script.fresh_encoder(row)
    assert before.loss == loss
    assert before.preprocess_config["mean"] == (0.5, 0.5, 0.5)
    after = load_encoder(save_encoder(clip_script.train_base(config), config.output))
    assert (after.loss, after.context_length) == (loss, context)
    assert after.tokenizer.encode("a red star") == before.tokenizer.encode("a red star")
    names = [name for name, p in after.model.named_parameters() if torch.equal(p, before.model.get_parameter(name))]
    assert names == []
    if loss == "sigmoid":
        # Every wrong pair at -10 teaches little, every right one much: both numbers go up, as fast as AdamW lets them.
        assert after.model.logit_bias.item() > -10
        assert after.model.logit_scale.exp().item() != pytest.approx(10, abs=1e-4)
    else:
        assert after.model.logit_bias is None
        assert after.model.logit_scale.item() <= math.log(100)
    torch.testing.assert_close(text_features(after, ["a ring"]).norm(dim=-1), torch.ones(1))


def test_the_siglip_tokenizer_is_remade_as_it_ships(clip_script, tmp_path):
    from miniature_vocabulary import write_siglip_tokenizer

    write_siglip_tokenizer(MINIATURE_FOLDER / "bpe.txt.gz", tmp_path / "siglip")
    shipped = MINIATURE_FOLDER / "siglip_tokenizer"
    assert {f.name for f in (tmp_path / "siglip").iterdir()} == {f.name for f in shipped.iterdir()}
    for file in shipped.iterdir():
        assert (tmp_path / "siglip" / file.name).read_text() == file.read_text(), file.name


def test_a_vocabulary_made_anew_has_a_token_for_every_word_of_the_world(clip_script, tmp_path):
    from miniature_vocabulary import write_vocabulary

    # Which merges come first among equals differs from run to run: the size is always the same, the file is not.
    assert write_vocabulary(tmp_path / "bpe.txt.gz") == 851
    made = Tokenizer(77, tmp_path / "bpe.txt.gz")
    assert made.vocab_size == 851
    words = sorted(
        {word for phrase in all_phrases() for word in re.findall(r"[a-z]+", re.sub(r"\{.*?\}", "", phrase.lower()))}
    )
    assert len(words) > 100
    assert [word for word in words if len(made.encode_words(word)) != 1] == []


def test_the_card_says_what_the_base_is(clip_script):
    config = clip_script.BaseConfig(row="miniature-siglip")
    card = clip_script._card(config, {"steps": 2}, {"none": 1.5}, 3.0)
    assert "A small SigLIP (64 tokens) trained from scratch" in card
    assert "| none | 1.5 |" in card


def test_the_shipped_names_lead_to_the_shipped_folders(tmp_path, monkeypatch):
    made = load_encoder("miniature-siglip:random")
    save_encoder(made, tmp_path / "base-siglip")
    monkeypatch.setattr("debias_diffusion.encoders.rows.MINIATURE_FOLDER", tmp_path)
    again = load_encoder("miniature-siglip:base")
    assert torch.equal(text_features(again, ["a ring"]), text_features(made, ["a ring"]))
