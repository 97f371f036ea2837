"""A running average of the trained weights, often a better encoder than the last step's."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn


class WeightAverage:
    """An exponential moving average of a model's trainable parameters, in float32.

    After step n the average moves by 1 - d towards the weights, d the smaller of `decay` and (1 + n) / (10 + n): the
    first steps count for what they are, not for their order. `state_dict` and `load_state_dict` make it part of a
    checkpoint.
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        if not 0 < decay < 1:
            raise ValueError(f"ema-decay is {decay}; expected above 0 and below 1, such as 0.999")
        self.decay, self.steps = decay, 0
        self._average = {name: p.detach().float().clone() for name, p in _trained(model)}

    @torch.no_grad()
    def update(self, model: nn.Module) -> None:
        """Takes in the weights after an optimiser step."""
        self.steps += 1
        decay = min(self.decay, (1 + self.steps) / (10 + self.steps))
        for name, parameter in _trained(model):
            average = self._average[name]
            if average.device != parameter.device:  # the model has been moved since
                average = self._average[name] = average.to(parameter.device)
            average.lerp_(parameter.float(), 1 - decay)

    @torch.no_grad()
    def copy_to(self, model: nn.Module) -> None:
        """Writes the average into the model's weights."""
        for name, parameter in _trained(model):
            parameter.copy_(self._average[name])

    @contextmanager
    def in_place_of(self, model: nn.Module) -> Iterator[None]:
        """The model with averaged weights inside the `with` block, and with its own again after it."""
        own = {name: p.detach().clone() for name, p in _trained(model)}
        self.copy_to(model)
        try:
            yield
        finally:
            with torch.no_grad():
                for name, parameter in _trained(model):
                    parameter.copy_(own[name])

    def state_dict(self) -> dict[str, Tensor]:
        """The average and the number of steps in it, as tensors."""
        return {**{n: t.contiguous() for n, t in self._average.items()}, "steps": torch.tensor(self.steps)}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Goes on from a saved average; ValueError where it is of other weights."""
        saved = dict(state)
        steps = saved.pop("steps")
        if saved.keys() != self._average.keys():
            other = sorted(saved.keys() ^ self._average.keys())
            raise ValueError(f"the saved average is of other weights: {', '.join(other[:3])}")
        self.steps = int(steps)
        self._average = {name: saved[name].float().to(old.device) for name, old in self._average.items()}


def _trained(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    return ((name, p) for name, p in model.named_parameters() if p.requires_grad)
