"""SIGTERM and Ctrl-C as a request to save first, in the training process alone."""

import logging
import signal
import time
from types import FrameType

import torch

logger = logging.getLogger(__name__)

_ECHO = 1.0
"""Seconds in which a second signal is the first one's echo: a launcher passes on what the terminal has told everyone."""


class StopSignals:
    """Turns SIGTERM and Ctrl-C into a request to stop after the step; a second one raises KeyboardInterrupt at once."""

    def __init__(self) -> None:
        self.requested = False
        self._since = 0.0

    def __enter__(self) -> "StopSignals":
        self._before = {s: signal.signal(s, self._handle) for s in (signal.SIGTERM, signal.SIGINT)}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _handle(self, number: int, _: FrameType | None) -> None:
        if self.requested:
            if time.monotonic() - self._since < _ECHO:
                return
            raise KeyboardInterrupt
        self.requested, self._since = True, time.monotonic()
        again = "press again" if number == signal.SIGINT else "send it again"
        logger.warning("%s: saving; %s to stop without saving", signal.Signals(number).name, again)


def prepare_worker(_: int) -> None:
    """For a process that reads pictures: one thread, and no signal of the user's ends it."""
    torch.set_num_threads(1)
    for number in (signal.SIGINT, signal.SIGTERM):  # the training process decides; a worker must not die first
        signal.signal(number, signal.SIG_IGN)
