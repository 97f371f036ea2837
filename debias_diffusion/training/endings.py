"""How a run may end before its time, each with a message that says what to do."""

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
