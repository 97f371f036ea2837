"""Gradient caching against the plain step: the same weights, the same batch, other memory."""

import importlib.util
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import open_clip
import pytest
import torch

from debias_diffusion.training.cached import cached_features, split_pairs
from debias_diffusion.training.step import LossRule, TwoBranchModel, two_branch_loss


def beside(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, Path(__file__).with_name(f"{name}.py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


RULE, batch, model = (getattr(beside("gather_worker"), name) for name in ("RULE", "batch", "model"))
run_workers = beside("test_gather").run_workers
WORKER = Path(__file__).with_name("cached_worker.py")


def gradients(bare: TwoBranchModel) -> dict[str, torch.Tensor]:
    return {name: p.grad.clone() for name, p in bare.named_parameters() if p.grad is not None}


def plain_step(bare, count, rule=RULE):
    pixels, ids, prefix = batch(count)
    loss = two_branch_loss(*bare(pixels, ids.flatten(0, 1), prefix.flatten()), rule)
    loss.total.backward()
    return loss, gradients(bare)


def cached_step(bare, count, size, rule=RULE, autocast=nullcontext):
    pixels, ids, prefix = batch(count)
    cached = cached_features(bare, split_pairs(pixels, ids.flatten(0, 1), prefix.flatten(), size), autocast=autocast)
    loss = two_branch_loss(cached.image, cached.text, cached.logit_scale, rule)
    loss.total.backward()
    cached.backward(bare, autocast=autocast)
    return loss, gradients(bare)


def assert_close(a, b, tolerance=1e-5):
    assert a.keys() == b.keys()
    for name in a:
        assert (a[name] - b[name]).norm() <= tolerance * a[name].norm() + 1e-8, name


@pytest.mark.parametrize("size", [1, 5, 12, 100])
def test_any_chunk_gives_the_gradients_of_the_whole_batch(size):
    (plain, expected), (cached, found) = plain_step(model(), 12), cached_step(model(), 12, size)
    assert float(cached.total) == pytest.approx(float(plain.total), abs=1e-6)
    assert float(cached.recall) == float(plain.recall)
    assert len(expected) > 20
    assert_close(expected, found)


def test_scores_in_blocks_give_the_same_loss_and_gradients():
    blocks = LossRule(**{**vars(RULE), "block": 5})
    (plain, expected), (blocked, found) = plain_step(model(), 12), plain_step(model(), 12, blocks)
    assert float(blocked.total) == pytest.approx(float(plain.total), abs=1e-6)
    assert float(blocked.recall) == float(plain.recall)
    assert_close(expected, found)


def test_in_float64_chunks_are_exact():
    """Nothing but rounding parts the two ways; components are taken in float32, so they are left out here."""
    rule = replace(RULE, pca_dim=0)
    found = []
    for size in (12, 5):
        bare = model().double()
        pixels, ids, prefix = batch(12)
        cached = cached_features(bare, split_pairs(pixels.double(), ids.flatten(0, 1), prefix.flatten(), size))
        two_branch_loss(cached.image, cached.text, cached.logit_scale, rule).total.backward()
        cached.backward(bare)
        found.append(gradients(bare))
    bare = model().double()
    two_branch_loss(*bare(pixels.double(), ids.flatten(0, 1), prefix.flatten()), rule).total.backward()
    for chunked in found:
        assert_close(gradients(bare), chunked, tolerance=1e-12)


def test_with_gradient_checkpointing_too():
    both = model()
    both.clip.set_grad_checkpointing(True)
    both.train()
    assert_close(plain_step(model(), 12)[1], cached_step(both, 12, 5)[1])


def test_frozen_image_features_get_no_tower():
    whole = model()
    whole.clip.visual.requires_grad_(False)
    pixels, ids, prefix = batch(12)
    _, expected = plain_step(whole, 12)
    with torch.no_grad():
        features, _, _ = whole(pixels, ids.flatten(0, 1), prefix.flatten())
    text_side = TwoBranchModel(model().clip, frozen_images=True)
    assert not any("visual" in name for name in text_side.state_dict())
    cached = cached_features(text_side, split_pairs(features, ids.flatten(0, 1), prefix.flatten(), 5))
    two_branch_loss(cached.image, cached.text, cached.logit_scale, RULE).total.backward()
    cached.backward(text_side)
    assert_close(expected, gradients(text_side))


def test_what_is_drawn_at_random_is_drawn_alike_in_both_passes():
    """Patch dropout: were the second pass to drop other patches, its gradient would belong to other features."""
    dropping = model()
    dropping.clip.visual.patch_dropout = open_clip.transformer.PatchDropout(0.5)
    dropping.train()
    seen = []
    dropping.clip.visual.register_forward_hook(lambda _module, _inputs, output: seen.append(output.detach().clone()))
    torch.manual_seed(1)
    cached_step(dropping, 12, 5)
    after = torch.rand(1)
    assert len(seen) == 6
    for first, second in zip(seen[:3], seen[3:], strict=True):
        torch.testing.assert_close(first, second)
    torch.manual_seed(1)
    with torch.no_grad():
        pixels, ids, prefix = batch(12)
        for chunk in split_pairs(pixels, ids.flatten(0, 1), prefix.flatten(), 5):
            dropping(*chunk)
    assert torch.equal(after, torch.rand(1)), "the second pass must not move the generators on"


def test_autocast_computes_both_passes_alike():

    def half():
        return torch.autocast("cpu", torch.bfloat16)

    pixels, ids, prefix = batch(12)
    plain = model()
    with half():
        outputs = plain(pixels, ids.flatten(0, 1), prefix.flatten())
    two_branch_loss(*outputs, RULE).total.backward()
    assert_close(gradients(plain), cached_step(model(), 12, 5, autocast=half)[1], tolerance=0.05)


def test_two_processes_equal_one_whole_batch(tmp_path):
    for sizes in ("7,5", "12,0"):
        run_workers(tmp_path, 2, sizes, WORKER)
        alone = torch.load(tmp_path / "alone.pt", weights_only=True)
        together = torch.load(tmp_path / "together.pt", weights_only=True)
        assert_close(alone, together)
