"""SIGTERM and Ctrl-C as a request to save first, in the training process alone."""

import logging
import signal
from types import FrameType

import torch

logger = logging.getLogger(__name__)


class StopSignals:
    """Turns SIGTERM and Ctrl-C into a request to stop after the step; a second one stops at once."""

    def __init__(self) -> None:
        self.requested = False

    def __enter__(self) -> "StopSignals":
        self._before = {s: signal.signal(s, self._handle) for s in (signal.SIGTERM, signal.SIGINT)}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _handle(self, number: int, _: FrameType | None) -> None:
        if self.requested:
            raise KeyboardInterrupt
        self.requested = True
        logger.warning("%s: saving after this step", signal.Signals(number).name)


def prepare_worker(_: int) -> None:
    """For a process that reads pictures: one thread, and no signal of the user's ends it."""
    torch.set_num_threads(1)
    for number in (signal.SIGINT, signal.SIGTERM):  # the training process decides; a worker must not die first
        signal.signal(number, signal.SIG_IGN)
