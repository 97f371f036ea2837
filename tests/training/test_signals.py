"""One request to stop saves first; its echo changes nothing; a second one ends the run."""

import os
import signal
import time

import pytest

from debias_diffusion.training import signals
from debias_diffusion.training.signals import StopSignals


def test_the_first_asks_the_echo_is_passed_over_and_the_second_interrupts(monkeypatch, caplog):
    before = signal.getsignal(signal.SIGINT)
    with StopSignals() as stop:
        assert not stop.requested
        os.kill(os.getpid(), signal.SIGINT)
        assert stop.requested
        assert caplog.messages == ["SIGINT: saving; press again to stop without saving"]
        os.kill(os.getpid(), signal.SIGTERM)
        monkeypatch.setattr(signals, "_ECHO", 0.0)
        time.sleep(0.01)
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) == before
