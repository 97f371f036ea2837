"""The attention profile is the tower's own attention, and shows a tower's blind spots exactly."""

import json
from pathlib import Path

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from transformers import CLIPTextConfig, CLIPTextModel, CLIPTextModelWithProjection

from debias_diffusion.captions.sentences import SPLITTERS, split_sentences
from debias_diffusion.encoders.checkpoint import load_encoder
from debias_diffusion.encoders.convert import text_to_transformers
from debias_diffusion.encoders.encoder import Encoder, build
from debias_diffusion.encoders.tokens import Tokenizer
from debias_diffusion.evaluation.attention import attention_profile, tower_attention_profile
from debias_diffusion.evaluation.pooled_attention import pooled_attention
from debias_diffusion.evaluation.sentence_tokens import sentence_starts

CAPTIONS = [
    "A red barn stands beside a pond. Two ducks swim. The sky is grey, with low clouds over the hills.",
    "A cat.",
    "Three boats lie on the sand. One of them is blue. Its paint is peeling. A rope hangs from it. Nobody is near.",
]


def tiny_encoder(context_length: int = 248) -> Encoder:
    torch.manual_seed(0)
    return load_encoder("miniature:random").stretched(context_length)


@pytest.fixture(scope="module")
def encoder() -> Encoder:
    """The miniature architecture with weights large enough to give attention a shape, in float64."""
    encoder = tiny_encoder()
    with torch.no_grad():
        for parameter in encoder.model.text.parameters():
            parameter.normal_(std=0.3)
    encoder.model.double()
    return encoder


@pytest.fixture(scope="module")
def ids(encoder: Encoder) -> Tensor:
    return encoder.tokenizer(CAPTIONS).input_ids


def in_transformers(encoder: Encoder, implementation: str) -> CLIPTextModelWithProjection:
    """The encoder's text tower as an SDXL slot holds it."""
    text = encoder.model_config["text_cfg"]
    config = CLIPTextConfig(
        vocab_size=text["vocab_size"],
        hidden_size=text["width"],
        intermediate_size=4 * text["width"],
        projection_dim=encoder.model_config["embed_dim"],
        num_hidden_layers=text["layers"],
        num_attention_heads=text["heads"],
        max_position_embeddings=encoder.context_length,
        hidden_act="gelu",
        eos_token_id=encoder.tokenizer.eot_id,
        attn_implementation=implementation,
    )
    tower = CLIPTextModelWithProjection(config)
    tower.load_state_dict(text_to_transformers(encoder.model.text.state_dict()))
    return tower.double().eval()


@torch.no_grad()
def by_hand(text: nn.Module, row: list[int]) -> Tensor:
    """(layers, heads, positions) of one caption, with a loop over heads and PyTorch's own layer for the rest."""
    x = text.token_embedding(torch.tensor(row)) + text.positional_embedding[: len(row)]
    found = []
    for block in text.transformer.resblocks:
        h, attn = block.ln_1(x), block.attn
        q, k, _ = (h @ attn.in_proj_weight.T + attn.in_proj_bias).split(h.shape[-1], dim=-1)
        width = h.shape[-1] // attn.num_heads
        heads = [slice(i * width, (i + 1) * width) for i in range(attn.num_heads)]
        found.append(torch.stack([(k[:, s] @ q[-1, s] / width**0.5).softmax(0) for s in heads]))
        causal = torch.ones(len(row), len(row)).triu(1).bool()
        x = x + attn(h[None], h[None], h[None], attn_mask=causal, need_weights=True)[0][0]
        x = x + block.mlp(block.ln_2(x))
    return torch.stack(found)


def test_rows_sum_to_one_up_to_eot_and_are_zero_behind(encoder: Encoder, ids: Tensor) -> None:
    padded = nn.functional.pad(ids, (0, 248 - ids.shape[1]))
    rows = pooled_attention(encoder.model.text, padded)
    layers, heads = (encoder.model_config["text_cfg"][name] for name in ("layers", "heads"))
    assert rows.shape == (layers, heads, 3, ids.shape[1]), "columns behind the last EOT are cut off"
    assert torch.allclose(rows.sum(-1), torch.ones(()).double(), atol=1e-12)
    for number, end in enumerate(ids.argmax(1).tolist()):
        assert (rows[:, :, number, : end + 1] > 0).all()
        assert (rows[:, :, number, end + 1 :] == 0).all()


def test_equals_attention_by_hand(encoder: Encoder, ids: Tensor) -> None:
    rows = pooled_attention(encoder.model.text, ids)
    spread = 0.0
    for number, caption in enumerate(CAPTIONS):
        expected = by_hand(encoder.model.text, encoder.tokenizer.encode(caption))
        assert torch.allclose(rows[:, :, number, : expected.shape[-1]], expected, atol=1e-12)
        spread = max(spread, float((expected.amax(-1) / expected.amin(-1)).max()))
    assert spread > 5, "an even attention would agree with anything"


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_transformers_towers_agree_and_stay_as_they_were(
    encoder: Encoder, ids: Tensor, implementation: str, tmp_path: Path
) -> None:
    expected = pooled_attention(encoder.model.text, ids)
    tower = in_transformers(encoder, implementation)
    assert torch.allclose(pooled_attention(tower, ids), expected, atol=1e-12)
    assert tower.config._attn_implementation == implementation
    assert not any(module._forward_hooks for module in tower.modules())
    flat = CLIPTextModel(tower.config).double().eval()
    flat.load_state_dict(tower.text_model.state_dict())
    assert not hasattr(flat, "text_model")
    assert torch.allclose(pooled_attention(flat, ids), expected, atol=1e-12)
    flat.save_pretrained(tmp_path)
    reloaded = CLIPTextModel.from_pretrained(tmp_path).double().eval()
    assert torch.allclose(pooled_attention(reloaded, ids), expected, atol=1e-6)


def test_pads_that_are_eot_do_not_move_the_pooled_position(encoder: Encoder, ids: Tensor) -> None:
    padded = nn.functional.pad(ids, (0, 20))
    padded[torch.arange(padded.shape[1]) > padded.argmax(1, keepdim=True)] = encoder.tokenizer.eot_id
    tower = in_transformers(encoder, "sdpa")
    assert torch.allclose(pooled_attention(tower, padded), pooled_attention(encoder.model.text, ids), atol=1e-12)
    tower.config.eos_token_id = 2
    assert torch.allclose(pooled_attention(tower, padded), pooled_attention(encoder.model.text, ids), atol=1e-12)


def test_half_precision_is_read_in_float32(encoder: Encoder, ids: Tensor) -> None:
    half = in_transformers(encoder, "sdpa").bfloat16()
    rows = pooled_attention(half, ids)
    assert rows.dtype == torch.float32
    assert torch.allclose(rows.double(), pooled_attention(encoder.model.text, ids), atol=0.1)


def test_towers_without_such_attention_are_refused(encoder: Encoder) -> None:
    text = {**encoder.model_config["text_cfg"], "no_causal_mask": True, "pool_type": "last"}
    two_way = build("two-way", {**encoder.model_config, "text_cfg": text}, bpe_file=encoder.tokenizer.bpe_file)
    with pytest.raises(ValueError, match="bidirectional"):
        attention_profile(two_way, CAPTIONS)
    cut_off = torch.tensor([[encoder.tokenizer.sot_id, 5, encoder.tokenizer.eot_id], [encoder.tokenizer.sot_id, 5, 6]])
    with pytest.raises(ValueError, match="row 1 of input_ids has no EOT"):
        pooled_attention(in_transformers(encoder, "sdpa"), cut_off)


def test_profile_equals_the_definition(encoder: Encoder) -> None:
    profile = attention_profile(encoder, CAPTIONS)
    rows = [encoder.tokenizer.encode(caption) for caption in CAPTIONS]
    means = [by_hand(encoder.model.text, row).mean(1)[:, 1:-1] for row in rows]  # heads first, then without SOT and EOT
    shares = [mean / mean.sum(-1, keepdim=True) for mean in means]
    longest = max(share.shape[-1] for share in shares)
    for position in range(longest):
        reach = [share[:, position] for share in shares if share.shape[-1] > position]
        assert profile.counts[position] == len(reach)
        assert torch.allclose(profile.by_layer[:, position], torch.stack(reach).mean(0), atol=1e-12)
    assert profile.positions.tolist() == list(range(1, longest + 1))
    assert torch.allclose(profile.on_text, torch.stack([mean.sum(-1) for mean in means]).mean(0), atol=1e-12)
    assert torch.equal(profile.last_layer, profile.by_layer[-1])
    assert torch.allclose(profile.average, profile.by_layer.mean(0))
    starts = [sentence_starts(encoder.tokenizer, caption) for caption in CAPTIONS]
    assert profile.sentence_counts.tolist() == [3, 2, 2, 1, 1]
    second = [shares[i][:, starts[i][1] - 1 : starts[i][2] - 1].sum(-1) for i in (0, 2)]
    assert torch.allclose(profile.by_sentence[:, 1], torch.stack(second).mean(0), atol=1e-12)
    lengths = [len(row) - 2 for row in rows]
    first = [start[1] - 1 if len(start) > 1 else length for start, length in zip(starts, lengths, strict=True)]
    first_tokens = [count / length for count, length in zip(first, lengths, strict=True)]
    assert profile.first_sentence_tokens == pytest.approx(sum(first_tokens) / 3)
    assert (profile.num_captions, profile.num_empty, profile.num_cut) == (3, 0, 0)


def test_an_even_tower_has_no_favourite_sentence() -> None:
    encoder = tiny_encoder()
    with torch.no_grad():
        for block in encoder.model.text.transformer.resblocks:
            block.attn.in_proj_weight.zero_()
    profile = attention_profile(encoder, CAPTIONS)
    assert profile.first_sentence_ratio == pytest.approx(1)
    assert torch.allclose(profile.by_sentence, profile.sentence_tokens.expand_as(profile.by_sentence), atol=1e-6)


def looking_only_at_its_first(num_positions: int, context_length: int = 248) -> Encoder:
    """An encoder whose attention is even over its first positions, SOT included, and nothing anywhere else.

    Feature 0 of a token says whether it stands there; every query asks for it. Blocks add nothing to the stream.
    """
    encoder = tiny_encoder(context_length)
    text = encoder.model.text
    with torch.no_grad():
        text.token_embedding.weight.zero_()
        text.positional_embedding.zero_()
        text.positional_embedding[:, 0] = -1.0
        text.positional_embedding[:num_positions, 0] = 1.0
        width = text.width
        for block in text.transformer.resblocks:
            block.attn.in_proj_weight.zero_()
            block.attn.in_proj_bias.zero_()
            block.attn.in_proj_bias[:width] = 100.0
            block.attn.in_proj_weight[width : 2 * width, 0] = 1.0
            block.attn.out_proj.weight.zero_()
            block.mlp.c_proj.weight.zero_()
            block.mlp.c_proj.bias.zero_()
    return encoder


def test_an_encoder_that_looks_at_its_first_ten_positions_shows_exactly_that() -> None:
    encoder = looking_only_at_its_first(10)
    profile = attention_profile(encoder, [CAPTIONS[0], CAPTIONS[2]])
    expected = torch.zeros(len(profile.counts), dtype=torch.float64)
    expected[:9] = 1 / 9  # text positions 1 ... 9; position 0 is SOT
    assert torch.allclose(profile.by_layer, expected.expand_as(profile.by_layer), atol=1e-6)
    assert (profile.by_layer[:, 9:] == 0).all()
    assert torch.allclose(profile.on_text, torch.tensor(0.9).double(), atol=1e-6)
    within = [min(start[1], 10) - 1 for start in (sentence_starts(encoder.tokenizer, CAPTIONS[i]) for i in (0, 2))]
    assert profile.first_sentence_share == pytest.approx(sum(within) / 9 / 2, abs=1e-6)


def test_cut_empty_and_capped_captions_are_counted() -> None:
    encoder = tiny_encoder(77)
    long = " ".join(f"Thing {number} is blue." for number in range(40))
    profile = attention_profile(encoder, ["", "A cat.", long, "Never read."], max_captions=3)
    assert (profile.num_captions, profile.num_empty, profile.num_cut) == (2, 1, 1)
    assert len(profile.counts) == 75, "two of 77 positions are SOT and EOT"
    kept = [start for start in sentence_starts(encoder.tokenizer, long) if start < 76]
    assert len(profile.sentence_counts) == len(kept)
    # "A cat." gives its first sentence everything; what is left is the long caption's, and sums to one.
    of_long = torch.cat([2 * profile.by_sentence[:, :1] - 1, profile.by_sentence[:, 1:]], dim=1)
    assert torch.allclose(of_long.sum(1), torch.ones(len(of_long)).double(), atol=1e-9)


def test_what_cannot_be_profiled_is_refused(encoder: Encoder) -> None:
    with pytest.raises(ValueError, match="2 captions, none with any text"):
        attention_profile(encoder, ["", "  "])
    with pytest.raises(ValueError, match="max_captions is 0"):
        attention_profile(encoder, CAPTIONS, max_captions=0)
    with pytest.raises(ValueError, match="unknown splitter 'spacy'"):
        attention_profile(encoder, CAPTIONS, splitter="spacy")
    broken = tiny_encoder()
    with torch.no_grad():
        broken.model.text.positional_embedding.fill_(torch.nan)
    with pytest.raises(ValueError, match="are the weights finite"):
        attention_profile(broken, CAPTIONS)


def test_an_exported_slot_is_profiled_with_its_tokenizer(encoder: Encoder) -> None:
    slot = tower_attention_profile(in_transformers(encoder, "sdpa"), encoder.tokenizer, CAPTIONS)
    assert torch.allclose(slot.by_layer, attention_profile(encoder, CAPTIONS).by_layer, atol=1e-12)


@pytest.fixture(scope="module")
def bpe() -> Tokenizer:
    return Tokenizer(248)


@pytest.mark.parametrize("splitter", list(SPLITTERS))
def test_sentence_starts_on_plain_captions(bpe: Tokenizer, splitter: str) -> None:
    # a(1) red(2) barn(3) .(4) two(5) ducks(6) swim(7) .(8) grey(9) sky(10) .(11)
    assert sentence_starts(bpe, "A red barn. Two ducks swim.\nGrey sky.", splitter) == [1, 5, 9]
    assert sentence_starts(bpe, "", splitter) == []


def test_sentences_that_meet_without_a_space(bpe: Tokenizer) -> None:
    assert sentence_starts(bpe, "A red barn.Two ducks swim.") == [1, 5]
    # 犬 takes three tokens. "!「" is read in one go, and its "!" has another id than a "!" at the end of a word.
    caption = "犬！「猫。"
    assert len(split_sentences(caption)) == 2
    assert sentence_starts(bpe, caption) == [1, 4]


@pytest.mark.parametrize("splitter", list(SPLITTERS))
@settings(max_examples=80, deadline=None)
@given(caption=st.text(st.sampled_from("Aab 1.!?,-\n\"'()&;</s>。！「」St猫 "), max_size=40) | st.text(max_size=40))
@example(caption="... A cat.")
@example(caption="Wow!! . . A cat.The dog</s> ran. \n 1. 2.")
def test_sentence_starts_are_found_for_any_text(bpe: Tokenizer, splitter: str, caption: str) -> None:
    starts = sentence_starts(bpe, caption, splitter)
    assert len(starts) == len(split_sentences(caption, splitter))
    assert starts == sorted(starts)
    assert starts[:1] in ([], [1])
    assert all(start <= len(bpe.encode(caption)) - 1 for start in starts)


def test_sentence_tokens_concatenate_on_real_captions(bpe: Tokenizer, shared: Path) -> None:
    lines = (shared / "data" / "long_captions" / "iiw_human.jsonl").read_text().splitlines()[::10]
    crossing = 0
    for caption in (json.loads(line)["caption"] for line in lines):
        ids, starts = bpe.encode(caption), sentence_starts(bpe, caption)
        sentences = split_sentences(caption)
        own = [ids[a:b] for a, b in zip(starts, [*starts[1:], len(ids) - 1], strict=True)]
        crossing += own != [bpe.encode(sentence)[1:-1] for sentence in sentences]
    assert crossing == 0
