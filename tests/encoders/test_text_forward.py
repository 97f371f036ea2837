"""The fast text forward against the plain one: features and gradients of the very same weights."""

import pytest
import torch
import torch._dynamo.testing
from open_clip.model import _build_text_tower

from debias_diffusion.encoders.text_forward import encode_text, plain_encode_text, why_not_packed

EOT = 99


def tower(**changes):
    torch.manual_seed(0)
    config = {"context_length": 48, "vocab_size": 100, "width": 32, "heads": 2, "layers": 3, **changes}
    text = _build_text_tower(16, config)
    for parameter in text.parameters():
        parameter.data += 0.05 * torch.randn_like(parameter)
    return text


def rows(count, *, prefixes, seed=0):
    generator = torch.Generator().manual_seed(seed)
    ids, num_prefix = torch.zeros(count, 48, dtype=torch.long), torch.zeros(count, dtype=torch.long)
    for i in range(count):
        words = int(torch.randint(0, 20, (1,), generator=generator))
        prefix = int(torch.randint(0, 48 - words - 1, (1,), generator=generator)) if prefixes and i % 2 else 0
        ids[i, 0], ids[i, 1 + prefix + words], num_prefix[i] = 98, EOT, prefix
        ids[i, 1 + prefix : 1 + prefix + words] = torch.randint(0, 98, (words,), generator=generator)
    return ids, num_prefix


def gradients(text, output):
    weights = torch.randn(output.shape, generator=torch.Generator().manual_seed(1))
    return torch.autograd.grad((output * weights).sum(), list(text.parameters()))


@pytest.mark.parametrize("prefixes", [False, True])
@pytest.mark.parametrize("count", [1, 5, 40])
def test_equal_features_and_gradients(prefixes, count):
    text = tower()
    ids, num_prefix = rows(count, prefixes=prefixes)
    plain, fast = text(ids), encode_text(text, ids, num_prefix)
    torch.testing.assert_close(fast, plain, atol=1e-5, rtol=1e-5)
    for a, b in zip(gradients(text, plain), gradients(text, fast), strict=True):
        torch.testing.assert_close(b, a, atol=1e-5 * float(a.abs().max()) + 1e-9, rtol=0)


def test_pads_in_front_that_are_not_declared_are_computed_like_words():
    text = tower()
    ids, _ = rows(6, prefixes=True)
    torch.testing.assert_close(encode_text(text, ids), text(ids), atol=1e-5, rtol=1e-5)


def test_short_rows_need_no_padding():
    text = tower()
    ids, num_prefix = rows(6, prefixes=False)
    torch.testing.assert_close(encode_text(text, ids[:, :24], num_prefix), text(ids), atol=1e-5, rtol=1e-5)


def test_gradient_checkpointing_changes_nothing():
    text = tower()
    ids, num_prefix = rows(9, prefixes=True)
    without = gradients(text, encode_text(text, ids, num_prefix))
    text.set_grad_checkpointing(True)
    for a, b in zip(without, gradients(text, encode_text(text, ids, num_prefix)), strict=True):
        assert torch.equal(a, b)


def test_autocast_stays_close():
    text = tower()
    ids, num_prefix = rows(9, prefixes=True)
    with torch.autocast("cpu", torch.bfloat16):
        half = encode_text(text, ids, num_prefix)
    cosine = torch.cosine_similarity(half.float(), text(ids), dim=-1)
    assert cosine.min() > 0.99


def test_bidirectional_towers_take_the_plain_path_and_say_why():
    text = tower(no_causal_mask=True, pool_type="last")
    ids, num_prefix = rows(4, prefixes=True)
    assert "bidirectional" in why_not_packed(text)
    assert torch.equal(encode_text(text, ids, num_prefix), plain_encode_text(text, ids))


def test_a_row_without_eot_is_an_error():
    text = tower()
    ids = torch.zeros(1, 48, dtype=torch.long)
    with pytest.raises(ValueError, match="no EOT"):
        encode_text(text, ids, torch.tensor([5]))


def test_inside_a_compiled_model_it_runs_as_it_is_for_any_lengths():
    """Packed rows have another shape in every batch: compiling them would start anew with each."""
    text = tower()

    class Model(torch.nn.Module):
        def forward(self, ids, num_prefix, scale):
            return encode_text(text, ids, num_prefix) * scale.exp()

    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounter()
    compiled, scale = torch.compile(Model(), backend=counter), torch.tensor(0.5)
    for seed in range(4):
        ids, num_prefix = rows(5, prefixes=True, seed=seed)
        torch.testing.assert_close(compiled(ids, num_prefix, scale), text(ids) * scale.exp(), atol=1e-5, rtol=1e-5)
    assert counter.frame_count <= 2
