"""SigLIP towers: bidirectional, no start token, pooled at the last position, read with a tokenizer from a folder."""

import json
import logging
import shutil
from pathlib import Path

import open_clip
import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from safetensors.torch import save_file
from tokenizers import Tokenizer as Pieces
from tokenizers import models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from debias_diffusion import image_features, load_encoder, save_encoder, text_features
from debias_diffusion.encoders import text_forward
from debias_diffusion.encoders.encoder import MINIATURE_FOLDER
from debias_diffusion.encoders.hub_tokens import find_tokenizer, read_tokenizer
from debias_diffusion.encoders.tokens import TokenLayout, collate_tokens
from debias_diffusion.training.sigmoid import sigmoid_loss

CAPTIONS = ["A large red star; and a small, blue ring.", "ring " * 300, ""]


@pytest.fixture(scope="module")
def siglip():
    torch.manual_seed(0)
    encoder = load_encoder("miniature-siglip:random")
    for parameter in encoder.model.parameters():
        parameter.data += 0.02 * torch.randn_like(parameter)
    return encoder


@pytest.fixture(scope="module")
def pieces(tmp_path_factory) -> Path:
    """A folder like SigLIP's own: SentencePiece unigrams of 32,000 ids, EOT and padding both 1, no start token."""
    words = ["▁a", "▁red", "▁star", "▁ring", "▁small", "▁", *map(chr, range(97, 123))]
    vocab = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), *((w, -float(i + 1)) for i, w in enumerate(words))]
    vocab += [(f"<extra{i}>", -100.0) for i in range(32000 - len(vocab))]
    backend = Pieces(models.Unigram(vocab, unk_id=2))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    folder = tmp_path_factory.mktemp("pieces")
    PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>", pad_token="</s>").save_pretrained(folder)
    return folder


def test_rows_have_no_start_token_and_padding_goes_to_the_very_front(siglip):
    ids = siglip.tokenizer.encode("A small ring.")
    assert [siglip.tokenizer.piece(i) for i in ids][-2:] == ["ring ", "</s>"]
    assert ids[0] == siglip.tokenizer.encode_words("a")[0]
    batch = collate_tokens([ids], [3], 64, siglip.tokenizer.layout)
    assert batch.input_ids[0, :3].tolist() == [849] * 3 == [siglip.tokenizer.layout.pad_id] * 3
    assert batch.input_ids[0, 3:].tolist() == ids
    assert siglip.tokenizer.layout == TokenLayout(has_sot=False, pad_id=849)


def test_the_miniature_s_words_are_the_same_ids_in_both_its_tokenizers(siglip):
    bpe = load_encoder("miniature:base").tokenizer
    for text in ("a large red star", "two small blue rings lie below the square", "zebra crossing 42"):
        assert siglip.tokenizer.encode_words(text) == bpe.encode_words(text)
    assert siglip.tokenizer.vocab_size == bpe.vocab_size == 851


def test_plain_open_clip_opens_the_folder_with_equal_ids_and_features(siglip, tmp_path):
    long = siglip.stretched(248)
    folder = save_encoder(long, tmp_path / "long")
    model, _, preprocess = open_clip.create_model_and_transforms(f"local-dir:{folder}")
    ids = open_clip.get_tokenizer(f"local-dir:{folder}")(CAPTIONS)
    own = long.tokenizer(CAPTIONS)
    assert torch.equal(F.pad(own.input_ids, (0, 248 - own.input_ids.shape[1]), value=own.pad_id), ids)
    assert own.num_cut == 1
    pictures = [Image.new("RGB", (40, 30), colour) for colour in ("red", "navy")]
    model.eval()
    with torch.no_grad():
        texts = model.encode_text(ids, normalize=True)
        images = model.encode_image(torch.stack([preprocess(p) for p in pictures]), normalize=True)
    torch.testing.assert_close(text_features(long, CAPTIONS), texts, atol=1e-5, rtol=0)
    torch.testing.assert_close(image_features(long, pictures), images, atol=1e-5, rtol=0)


def test_saved_and_loaded_gives_the_same_bits_and_tokenizer(siglip, tmp_path):
    long = siglip.stretched(196, rule="ratio")
    again = load_encoder(save_encoder(long, tmp_path / "a"))
    assert torch.equal(text_features(again, CAPTIONS), text_features(long, CAPTIONS))
    assert again.tokenizer.identity == siglip.tokenizer.identity != load_encoder("miniature:base").tokenizer.identity
    assert again.loss == "sigmoid"
    twice = save_encoder(again, tmp_path / "a")  # the tokenizer's files are an encoder's own
    assert load_encoder(twice).context_length == 196


def test_the_plain_path_fills_rows_with_the_tower_s_pad_and_says_so_once(siglip, caplog):
    text_forward._say_once.cache_clear()
    ids = siglip.tokenizer(CAPTIONS[:1]).input_ids
    full = F.pad(ids, (0, 64 - ids.shape[1]), value=849)
    with caplog.at_level(logging.WARNING), torch.no_grad():
        for _ in range(3):
            assert torch.equal(text_forward.encode_text(siglip.model.text, ids), siglip.model.text(full))
        assert not torch.equal(siglip.model.text(full), siglip.model.text(F.pad(ids, (0, 64 - ids.shape[1]))))
    assert [r.message for r in caplog.records if "full length" in r.message] == [
        "this text tower reads every row at its full length, padding included: its attention is bidirectional: "
        "every position sees the padding"
    ]


def test_pads_in_front_change_a_bidirectional_feature(siglip):
    ids = siglip.tokenizer.encode(CAPTIONS[0])
    with torch.no_grad():
        rows = [collate_tokens([ids], [n], 64, siglip.tokenizer.layout).input_ids for n in (0, 10)]
        plain, padded = (text_forward.encode_text(siglip.model.text, row) for row in rows)
    assert not torch.allclose(plain, padded, atol=1e-3)


def test_a_siglip_tokenizer_from_a_folder(pieces):
    tokenizer = read_tokenizer(pieces, 64, {"clean": "canonicalize"})
    assert tokenizer.layout == TokenLayout(has_sot=False, pad_id=1)
    assert tokenizer.vocab_size == 32000
    ids = tokenizer.encode("A small, RED star!")
    assert [tokenizer.piece(i).strip() for i in ids] == ["a", "small", "red", "star", "</s>"]
    theirs = open_clip.tokenizer.HFTokenizer(str(pieces), 64, clean="canonicalize")(
        ["A small, RED star!", "ring " * 99]
    )
    own = tokenizer(["A small, RED star!", "ring " * 99])
    assert torch.equal(own.input_ids, theirs)


def test_ids_beyond_the_tower_s_table_that_no_caption_has_do_not_count(pieces, tmp_path):
    hub = PreTrainedTokenizerFast.from_pretrained(pieces)
    hub.add_special_tokens({"additional_special_tokens": [f"<extra_id_{i}>" for i in range(100)]})
    hub.save_pretrained(tmp_path)
    tokenizer = read_tokenizer(tmp_path, 64, {"clean": "canonicalize"})
    assert len(hub) == 32100
    assert tokenizer.vocab_size == 32000
    assert max(tokenizer.encode("a <extra_id_7> ring")) < 32000


def test_weights_by_path_take_the_tokenizer_beside_them(siglip, tmp_path):
    folder = save_encoder(siglip, tmp_path / "encoder")
    by_path = load_encoder(f"miniature-siglip:{folder / 'open_clip_model.safetensors'}")
    assert torch.equal(text_features(by_path, CAPTIONS), text_features(siglip, CAPTIONS))
    with pytest.raises(ValueError, match="name its row, as in ROW:PATH"):
        load_encoder(folder / "open_clip_model.safetensors", quick_gelu=False)


def test_nothing_is_fetched_and_the_error_says_what_to_place_where(tmp_path):
    with pytest.raises(FileNotFoundError) as raised:
        load_encoder("SigLIP-B-16:random")
    message = str(raised.value)
    assert "tokenizer of timm/ViT-B-16-SigLIP is not here and is fetched only for ROW:TAG" in message
    assert "Place its tokenizer.json and tokenizer_config.json in a folder" in message
    with pytest.raises(FileNotFoundError, match=f"looked in {tmp_path}"):
        find_tokenizer("timm/ViT-B-16-SigLIP", 64, folders=(tmp_path,))
    with pytest.raises(FileNotFoundError, match="holds no tokenizer: tokenizer.json and tokenizer_config.json"):
        read_tokenizer(tmp_path, 64)
    with pytest.raises(FileNotFoundError, match="no tokenizer folder at"):
        load_encoder("SigLIP-B-16:random", tokenizer=tmp_path / "none")


def test_a_folder_without_its_tokenizer_or_with_another_is_refused(siglip, pieces, tmp_path):
    folder = save_encoder(siglip, tmp_path / "encoder")
    (folder / "tokenizer.json").unlink()
    with pytest.raises(FileNotFoundError, match=f"looked in {folder}"):
        load_encoder(folder)
    with pytest.raises(ValueError, match="the tokenizer has 32000 ids, the text tower 851"):
        load_encoder(folder, tokenizer=pieces)
    again = load_encoder(folder, tokenizer=MINIATURE_FOLDER / "siglip_tokenizer")
    assert again.tokenizer.identity == siglip.tokenizer.identity


def test_a_tokenizer_without_an_end_token_is_refused(pieces, tmp_path):
    folder = shutil.copytree(pieces, tmp_path / "endless")
    content = json.loads((folder / "tokenizer.json").read_text())
    content["post_processor"] = None
    (folder / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(ValueError, match="an empty caption becomes"):
        read_tokenizer(folder, 64)
    (folder / "tokenizer.json").write_text("{")
    with pytest.raises(ValueError, match="cannot be read"):
        read_tokenizer(folder, 64)


@pytest.mark.slow
def test_siglip_b16_trains_two_steps_with_a_local_tokenizer(pieces, tmp_path):
    """The real architecture with random weights: both branches, the sigmoid loss, AdamW, twice; then saved and loaded."""
    torch.manual_seed(0)
    encoder = load_encoder("SigLIP-B-16:random", tokenizer=pieces).stretched(248, in_place=True)
    clip, layout = encoder.model.train(), encoder.tokenizer.layout
    optimizer = torch.optim.AdamW(clip.parameters(), lr=1e-4)
    rows = [encoder.tokenizer.encode(c) for c in ("a red star", "a small ring")]
    batch = collate_tokens([*rows, *rows], [0, 0, 30, 100], 248, layout)
    pictures = torch.stack([encoder.preprocess(Image.new("RGB", (64, 48), c)) for c in ("red", "navy")])
    losses = []
    for _ in range(2):
        image = F.normalize(clip.visual(pictures), dim=-1)
        full, augmented = F.normalize(text_forward.encode_text(clip.text, batch.input_ids), dim=-1).chunk(2)
        scale = clip.logit_scale.exp()
        loss = 0.9 * sigmoid_loss(image, full, scale, clip.logit_bias) + 0.1 * sigmoid_loss(
            image, augmented, scale, clip.logit_bias
        )
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss))
    assert losses[1] < losses[0]
    clip.eval()
    save_file({k: v.contiguous() for k, v in clip.state_dict().items()}, tmp_path / "weights.safetensors")
    again = load_encoder(f"SigLIP-B-16:{tmp_path / 'weights.safetensors'}", tokenizer=pieces)
    assert again.context_length == 248
    torch.testing.assert_close(text_features(again, ["a red star"]), text_features(encoder, ["a red star"]))
