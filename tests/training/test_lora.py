import pytest
import torch
from open_clip.model import _build_text_tower

from debias_diffusion import load_encoder, save_encoder, text_features
from debias_diffusion.encoders.positions import freeze_first_positions, thaw_positions
from debias_diffusion.encoders.split_attention import SplitAttention, join_attention, split_attention
from debias_diffusion.encoders.text_forward import encode_text, plain_encode_text, why_not_packed
from debias_diffusion.training.lora import add_lora, has_lora, merge_lora

CAPTIONS = ["A small red star in the top left.", "A ring. A blue star. A large square below it.", ""]
ROWS = {"causal": {}, "bidirectional": {"no_causal_mask": True, "pool_type": "last", "proj_bias": True}}


def tower(**changes):
    torch.manual_seed(0)
    text = _build_text_tower(
        16, {"context_length": 48, "vocab_size": 100, "width": 32, "heads": 2, "layers": 3, **changes}
    )
    for parameter in text.parameters():
        parameter.data += 0.05 * torch.randn_like(parameter)
    return text


def token_rows():
    ids = torch.randint(1, 98, (5, 40), generator=torch.Generator().manual_seed(1))
    ids[:, 0], ids[:, 30], ids[:, 31:] = 98, 99, 0
    return ids


def stir(clip):
    """Fresh adapters add nothing: their second factor is zero."""
    generator = torch.Generator().manual_seed(2)
    for name, parameter in clip.text.named_parameters():
        if "lora_" in name:
            parameter.data = 0.2 * torch.randn(parameter.shape, generator=generator)


@pytest.mark.parametrize("kind", ROWS)
def test_split_attention_computes_the_same_features_and_gradients(kind):
    text, ids = tower(**ROWS[kind]), token_rows()
    before = encode_text(text, ids)
    wanted = torch.autograd.grad(before.square().sum(), text.transformer.resblocks[0].attn.in_proj_weight)[0]
    split_attention(text)
    assert (why_not_packed(text) is None) == (kind == "causal")
    torch.testing.assert_close(plain_encode_text(text, ids), before, atol=1e-5, rtol=1e-5)
    after = encode_text(text, ids)
    torch.testing.assert_close(after, before, atol=1e-5, rtol=1e-5)
    attn = text.transformer.resblocks[0].attn
    parts = torch.autograd.grad(after.square().sum(), [attn.q_proj.weight, attn.k_proj.weight, attn.v_proj.weight])
    torch.testing.assert_close(torch.cat(parts), wanted, atol=1e-4 * float(wanted.abs().max()), rtol=1e-4)
    with pytest.raises(ValueError, match="is SplitAttention; expected"):
        split_attention(text)


def test_splitting_and_joining_gives_the_same_bits():
    text, untouched = tower(), tower().state_dict()
    split_attention(text)
    join_attention(text)
    state = text.state_dict()
    assert list(state) == list(untouched)
    assert all(torch.equal(state[k], untouched[k]) for k in state)


@pytest.mark.parametrize("name", ["tiny", "miniature-siglip"])
def test_the_merged_export_equals_the_unmerged_forward(name, tiny, tmp_path):
    encoder = tiny if name == "tiny" else load_encoder(f"{name}:random")
    encoder = encoder.stretched(248)
    clip = encoder.model
    before = text_features(encoder, CAPTIONS)
    freeze_first_positions(clip.text)
    add_lora(clip, rank=4, alpha=8)
    torch.testing.assert_close(text_features(encoder, CAPTIONS), before, atol=1e-5, rtol=0)
    stir(clip)
    unmerged = text_features(encoder, CAPTIONS)
    assert (unmerged - before).abs().max() > 0.05
    ids = encoder.tokenizer(CAPTIONS).input_ids
    if name == "tiny":
        torch.testing.assert_close(encode_text(clip.text, ids), plain_encode_text(clip.text, ids), atol=1e-5, rtol=1e-5)
    thaw_positions(clip.text)
    merge_lora(clip)
    assert not has_lora(clip)
    torch.testing.assert_close(text_features(encoder, CAPTIONS), unmerged, atol=1e-5, rtol=0)
    again = load_encoder(save_encoder(encoder, tmp_path / "merged"))
    torch.testing.assert_close(text_features(again, CAPTIONS), unmerged, atol=1e-5, rtol=0)


def test_adapters_positions_and_what_lies_beside_the_text_tower_train(tiny):
    clip = tiny.stretched(248).model
    freeze_first_positions(clip.text)
    add_lora(clip, rank=2)
    trained = {name for name, p in clip.named_parameters() if p.requires_grad and not name.startswith("visual.")}
    assert "logit_scale" in trained
    assert "text.parametrizations.positional_embedding.original" in trained
    assert {n for n in trained if "lora_" not in n} == {
        "logit_scale",
        "text.parametrizations.positional_embedding.original",
    }
    assert len([n for n in trained if "lora_" in n]) == 2 * 6 * len(clip.text.transformer.resblocks)
    frozen = {n: p.detach().clone() for n, p in clip.text.named_parameters() if not p.requires_grad}
    optimizer = torch.optim.AdamW([p for p in clip.text.parameters() if p.requires_grad], lr=0.01)
    for _ in range(3):  # the frozen weights must be the same bits after any number of steps
        optimizer.zero_grad()
        encode_text(clip.text, tiny.tokenizer(CAPTIONS).input_ids).square().sum().backward()
        optimizer.step()
    now = dict(clip.text.named_parameters())
    assert all(torch.equal(now[n], frozen[n]) for n in frozen)
    assert all(isinstance(b.attn, SplitAttention) for b in clip.text.transformer.resblocks)


def test_gradient_checkpointing_reaches_the_adapters(tiny):
    clip, ids = tiny.model, tiny.tokenizer(CAPTIONS).input_ids
    add_lora(clip, rank=2)
    stir(clip)
    adapters = [p for n, p in clip.text.named_parameters() if "lora_" in n]
    wanted = torch.autograd.grad(encode_text(clip.text, ids).square().sum(), adapters)
    clip.text.set_grad_checkpointing(True)
    for a, b in zip(torch.autograd.grad(encode_text(clip.text, ids).square().sum(), adapters), wanted, strict=True):
        torch.testing.assert_close(a, b)


def test_a_rank_below_one_is_refused(tiny):
    with pytest.raises(ValueError, match="lora-rank is 0"):
        add_lora(tiny.model, rank=0)
