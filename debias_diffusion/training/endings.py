"""How a run may end before its time, each with a message that says what to do."""

from collections.abc import Sequence

from debias_diffusion.config import RunStopped
from debias_diffusion.training.progress import FaultLog


class Interrupted(RunStopped):
    """The run was asked to stop; it has saved a checkpoint."""


class NonFiniteLoss(RunStopped):
    """The loss became NaN or infinite; the last good checkpoint is untouched."""


def nothing_read(faults: FaultLog) -> ValueError:
    """The error of a run in which no picture was read."""
    return ValueError(
        f"no picture could be read in any step, so nothing was learned and no encoder is written; the first: "
        f"{next(iter(faults.named), 'on another process')}; check --data and --image-root"
    )


def loss_not_finite(loss: float, step: int, keys: Sequence[str]) -> NonFiniteLoss:
    """The end of a run whose loss at `step` is no number; `keys` are this process's samples."""
    return NonFiniteLoss(
        f"the loss is {loss} at step {step}; samples here: {', '.join(keys)}; "
        "the last checkpoint is untouched; try a lower --learning-rate or fp32"
    )


def weights_not_finite(names: Sequence[str], step: int) -> NonFiniteLoss:
    """The end of a run whose weights are no numbers after `step` steps, found before they were saved."""
    return NonFiniteLoss(
        f"after step {step} weights are not finite ({', '.join(names[:3])}); nothing was saved of them and the "
        "last checkpoint is untouched; try a lower --learning-rate"
    )
