import pytest
import torch
from torch import nn

from debias_diffusion.training.ema import WeightAverage


def model():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    net[0].bias.requires_grad_(False)
    return net


def step(net, seed):
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in net.parameters():
            p.add_(torch.randn(p.shape, generator=generator))


def test_equal_to_a_hand_written_average():
    net = model()
    average = WeightAverage(net, 0.9)
    by_hand = net[1].weight.detach().double().clone()
    for n in range(1, 200):
        step(net, n)
        average.update(net)
        decay = min(0.9, (1 + n) / (10 + n))
        by_hand = decay * by_hand + (1 - decay) * net[1].weight.detach().double()
    torch.testing.assert_close(average.state_dict()["1.weight"].double(), by_hand, atol=1e-5, rtol=1e-5)
    assert "0.bias" not in average.state_dict()  # it does not train


def test_a_saved_average_goes_on_as_if_never_saved(tmp_path):
    net = model()
    straight = WeightAverage(net, 0.99)
    for n in range(10):
        step(net, n)
        straight.update(net)
        if n == 4:
            torch.save(straight.state_dict(), tmp_path / "average.pt")
            resumed = WeightAverage(model(), 0.99)
            resumed.load_state_dict(torch.load(tmp_path / "average.pt", weights_only=True))
        elif n > 4:
            resumed.update(net)
    states = straight.state_dict(), resumed.state_dict()
    assert states[0].keys() == states[1].keys()
    assert all(torch.equal(states[0][k], states[1][k]) for k in states[0])


def test_the_model_gets_its_own_weights_back_even_after_an_error():
    net = model()
    average = WeightAverage(net, 0.9)
    step(net, 1)
    average.update(net)
    own = net[1].weight.detach().clone()
    seen = []

    def fail():
        with average.in_place_of(net):
            seen.append(net[1].weight.detach().clone())
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert torch.equal(seen[0], average.state_dict()["1.weight"])
    assert torch.equal(net[1].weight, own)
    average.copy_to(net)
    assert not torch.equal(net[1].weight, own)


def test_another_model_s_average_and_a_wrong_decay_are_refused():
    with pytest.raises(ValueError, match="ema-decay is 1.0"):
        WeightAverage(model(), 1.0)
    with pytest.raises(ValueError, match="is of other weights: 0.weight, 1.bias, 1.weight"):
        WeightAverage(model(), 0.9).load_state_dict(WeightAverage(nn.Linear(2, 2, bias=False), 0.9).state_dict())
