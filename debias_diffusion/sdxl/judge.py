"""Whether an encoder may judge pictures: not where it had a part in drawing them."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from debias_diffusion.encoders.encoder import Encoder
from debias_diffusion.encoders.text_forward import why_not_packed
from debias_diffusion.sdxl.slots import SLOTS, text_tower, tower_state


def refuse_tested(judge: Encoder, pipes: Mapping[str, Any]) -> None:
    """Raises ValueError where the judge's text tower is one that a named pipeline draws with, whatever its length and
    dtype."""
    if why_not_packed(text_tower(judge)):
        return  # no slot can hold such a tower
    own = _weights(tower_state(text_tower(judge)))
    for name, pipe in pipes.items():
        for slot in SLOTS:
            tested = getattr(pipe, slot)
            state = {} if tested is None else _weights(tested.state_dict())
            if state.keys() == own.keys() and all(_is_same(own[key], state[key]) for key in own):
                raise ValueError(
                    f"{judge.name} is what {name!r} draws with ({slot}) and would judge itself; name an encoder of "
                    "another family with --judge"
                )


def _weights(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """All but what a stretched or differently used copy may lack: positions and the projection."""
    plain = {key.removeprefix("text_model."): value for key, value in state.items()}
    return {k: v for k, v in plain.items() if "position" not in k and "projection" not in k}


def _is_same(a: Tensor, b: Tensor) -> bool:
    """Equal up to rounding to half precision, through which one of them may have gone."""
    return a.shape == b.shape and torch.allclose(a.float().cpu(), b.float().cpu(), rtol=2**-8, atol=1e-6)
