import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch.autograd import gradcheck

from debias_diffusion.training.losses import contrastive_loss, grouped_principal_part, mix_branches, principal_part


def by_svd(x, dim):
    """The published computation, written out: an SVD that is differentiated through."""
    mean = x.mean(0, keepdim=True)
    _, _, vt = torch.linalg.svd((x - mean).double(), full_matrices=False)
    basis = vt.T[:, :dim]
    return ((x - mean).double() @ basis @ basis.T).to(x.dtype) + mean


def test_the_published_components(shared):
    golden = np.load(shared / "vectors" / "longclip_tiny.npz")
    rebuilt = principal_part(torch.from_numpy(golden["pca_input"]), 32)
    torch.testing.assert_close(rebuilt, torch.from_numpy(golden["pca_output"]), atol=1e-6, rtol=0)


@pytest.mark.parametrize(("rows", "width", "dim"), [(20, 64, 5), (64, 32, 8), (40, 40, 32)])
def test_equal_to_the_svd_in_value_and_gradient(rows, width, dim):
    x = F.normalize(torch.randn(rows, width, generator=torch.Generator().manual_seed(0)), dim=-1).requires_grad_()
    weights = torch.randn(rows, width, generator=torch.Generator().manual_seed(1))
    ours, svd = principal_part(x, dim), by_svd(x, dim)
    torch.testing.assert_close(ours, svd, atol=1e-5, rtol=0)
    (a,), (b,) = (torch.autograd.grad((y * weights).sum(), x) for y in (ours, svd))
    torch.testing.assert_close(a, b, atol=2e-4, rtol=1e-3)


def test_gradient_is_the_derivative():
    from debias_diffusion.training.losses import _PrincipalPart

    x = torch.randn(7, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).requires_grad_()
    assert gradcheck(lambda t: _PrincipalPart.apply(t - t.mean(0, keepdim=True), 2), (x,))


def test_equal_pictures_do_not_blow_up_the_gradient():
    """Repeated singular values make a differentiated SVD return NaN or infinity."""
    x = torch.eye(12).repeat(2, 1).requires_grad_()
    (gradient,) = torch.autograd.grad(principal_part(x, 5).square().sum(), x)
    assert torch.isfinite(gradient).all()


def test_small_batches_and_zero_components_come_back_whole():
    x = torch.randn(6, 10)
    assert torch.equal(principal_part(x, 8), x)
    assert grouped_principal_part(x, 0, 4) is x


def test_groups_do_not_see_one_another():
    x = torch.randn(20, 16)
    grouped = grouped_principal_part(x, 3, 10)
    torch.testing.assert_close(grouped, torch.cat([principal_part(x[:10], 3), principal_part(x[10:], 3)]))
    assert not torch.allclose(grouped, principal_part(x, 3))


def test_the_published_losses_and_gradients(shared):
    """0.1 * short + 0.9 * full with label smoothing 0.1, on the published model's own features."""
    golden = np.load(shared / "vectors" / "longclip_tiny.npz")
    image, full, short = (
        F.normalize(torch.from_numpy(golden[f"{n}_features"]), dim=-1) for n in ("image", "long", "short")
    )
    scale = torch.tensor(float(golden["sd/logit_scale"])).exp()
    coarse = principal_part(image, 32)
    loss_full = contrastive_loss(image, full, image, full, scale, label_smoothing=0.1)
    loss_short = contrastive_loss(coarse, short, coarse, short, scale, label_smoothing=0.1)
    assert float(loss_full) == pytest.approx(float(golden["loss_long"]), abs=1e-5)
    assert float(loss_short) == pytest.approx(float(golden["loss_short"]), abs=1e-5)


def test_gradients_through_the_whole_model(shared):
    from debias_diffusion.encoders.checkpoint import load_encoder
    from debias_diffusion.encoders.foreign import read_weights  # noqa: F401 - the path below goes through it
    from debias_diffusion.training.step import LossRule, TwoBranchModel, two_branch_loss

    golden = np.load(shared / "vectors" / "longclip_tiny.npz")
    import tempfile
    from pathlib import Path

    state = {k[3:]: torch.from_numpy(golden[k]) for k in golden.files if k.startswith("sd/")}
    with tempfile.TemporaryDirectory() as folder:
        torch.save(state, Path(folder) / "longclip.pt")
        encoder = load_encoder(Path(folder) / "longclip.pt")
    ids = torch.from_numpy(np.concatenate([golden["long_ids"], golden["short_ids"]])).long()
    model = TwoBranchModel(encoder.model)
    image, text, scale = model(torch.from_numpy(golden["images"]).float(), ids, torch.zeros(len(ids), dtype=torch.long))
    loss = two_branch_loss(image, text, scale, LossRule(0.1, 32, 0, False, 0.1))
    loss.total.backward()
    clip = encoder.model
    for ours, theirs in [
        (clip.text.positional_embedding.grad[20:], golden["grad_positional_embedding_res"][20:]),
        (clip.logit_scale.grad, golden["grad_logit_scale"]),
        (clip.text.text_projection.grad, golden["grad_text_projection"]),
        (clip.visual.proj.grad, golden["grad_visual_proj"]),
    ]:
        torch.testing.assert_close(ours, torch.from_numpy(np.asarray(theirs)), atol=1e-5, rtol=1e-4)


def test_loss_of_a_batch_by_hand():
    eye = torch.eye(2)
    expected = -np.log(np.exp(3) / (np.exp(3) + 1))
    assert float(contrastive_loss(eye, eye, eye, eye, torch.tensor(3.0))) == pytest.approx(expected, abs=1e-6)
    assert float(mix_branches(torch.tensor(2.0), torch.tensor(1.0), 0.1)) == pytest.approx(1.9)
