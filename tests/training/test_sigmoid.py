import pytest
import torch
import torch.nn.functional as F
from open_clip.loss import SigLipLoss

from debias_diffusion.training.losses import mix_branches, principal_part
from debias_diffusion.training.sigmoid import sigmoid_loss


def features(rows, dim=16, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return F.normalize(torch.randn(rows, dim, generator=generator), dim=-1).requires_grad_()


SCALE, BIAS = torch.tensor(10.0), torch.tensor(-10.0)


@pytest.mark.parametrize("rows", [1, 2, 13])
@pytest.mark.parametrize(("scale", "bias"), [(10.0, -10.0), (117.0, -12.9)])
def test_equal_to_open_clip_in_one_process(rows, scale, bias):
    image, text = features(rows), features(rows, seed=1)
    numbers = [torch.tensor(v, requires_grad=True) for v in (scale, bias)]
    own, theirs = sigmoid_loss(image, text, *numbers), SigLipLoss()(image, text, *numbers)
    torch.testing.assert_close(own, theirs)
    wanted = torch.autograd.grad(theirs, [image, text, *numbers])
    for a, b in zip(torch.autograd.grad(own, [image, text, *numbers]), wanted, strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("counts", [(5, 5), (1, 7, 4)])
def test_shares_of_any_size_add_up_to_the_whole_batch(counts):
    image, text = features(sum(counts)), features(sum(counts), seed=1)
    whole = sigmoid_loss(image, text, SCALE, BIAS)
    first, total = 0, 0.0
    for count in counts:
        total += count * sigmoid_loss(image[first : first + count], text, SCALE, BIAS, first=first)
        first += count
    torch.testing.assert_close(total / sum(counts), whole)


def test_blocks_change_nothing():
    image, text = features(11), features(11, seed=1)
    whole = sigmoid_loss(image, text, SCALE, BIAS)
    blocks = sigmoid_loss(image, text, SCALE, BIAS, block=4)
    torch.testing.assert_close(blocks, whole)
    for a, b in zip(torch.autograd.grad(blocks, [image, text]), torch.autograd.grad(whole, [image, text]), strict=True):
        torch.testing.assert_close(a, b)


def test_a_shuffled_batch_is_worse_and_the_right_share_matters():
    image = features(8)
    right = sigmoid_loss(image, image, SCALE, BIAS)
    assert sigmoid_loss(image, image.roll(1, 0), SCALE, BIAS) > right + 1
    assert (
        sigmoid_loss(image[4:], image, SCALE, BIAS, first=0) > sigmoid_loss(image[4:], image, SCALE, BIAS, first=4) + 1
    )


def test_both_branches_with_principal_parts_mix_as_the_softmax_loss_does():
    image, full, augmented = features(40), features(40, seed=1), features(40, seed=2)
    coarse = principal_part(image, 8)
    short = SigLipLoss()(coarse, augmented, SCALE, BIAS)
    wanted = 0.1 * short + 0.9 * SigLipLoss()(image, full, SCALE, BIAS)
    own = mix_branches(sigmoid_loss(image, full, SCALE, BIAS), sigmoid_loss(coarse, augmented, SCALE, BIAS), 0.1)
    torch.testing.assert_close(own, wanted)
    assert torch.isfinite(torch.autograd.grad(own, image)[0]).all()


def test_no_rows_are_a_zero_that_can_be_differentiated():
    text = features(4)
    loss = sigmoid_loss(text[:0], text, SCALE, BIAS)
    assert loss.item() == 0
    assert float(torch.autograd.grad(loss, text)[0].abs().sum()) == 0
