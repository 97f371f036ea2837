"""Between two encoders: the checkpoint's own, stretched, at 0, and the tuned one at 1."""

import copy
from typing import Any

import torch
from torch import Tensor

from debias_diffusion.encoders.positions import stretch_positions, stretch_ratio
from debias_diffusion.sdxl.slots import SLOTS

_TABLE = "embeddings.position_embedding.weight"


def blended_pipeline(stock: Any, tuned: Any, share: float) -> Any:
    """`tuned` with every weight of its text encoders at (1 - share) x stock's + share x its own; both stay as they are.

    Where the tuned encoder reads further, stock's position table is stretched to it first, as before training, so that
    0 is the untrained long encoder. Computed in float32. Raises ValueError where the towers are not of one kind.
    """
    own = copy.copy(tuned)
    for slot in SLOTS:
        old, new = getattr(stock, slot), getattr(tuned, slot)
        if old is new:
            continue
        mixed = copy.deepcopy(new)
        mixed.load_state_dict(_mix(old.state_dict(), new.state_dict(), share, slot))
        setattr(own, slot, mixed)
    return own


def _mix(old: dict[str, Tensor], new: dict[str, Tensor], share: float, slot: str) -> dict[str, Tensor]:
    mixed = {}
    for key, value in new.items():
        if key not in old:
            raise ValueError(f"{slot} has {key}, the checkpoint's own has not; these two cannot be blended")
        start = old[key]
        if key.endswith(_TABLE) and len(start) != len(value):
            start = stretch_positions(start, stretch_ratio(len(start), len(value)))
        if start.shape != value.shape:
            raise ValueError(
                f"{key} of {slot} is {tuple(value.shape)}, of the checkpoint's own {tuple(start.shape)}; only encoders "
                "of one size and vocabulary can be blended"
            )
        mixed[key] = torch.lerp(start.float().to(value.device), value.float(), share).to(value.dtype)
    return mixed
