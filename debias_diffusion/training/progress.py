"""What a run tells: a line at the start, progress bar, metrics.jsonl, TensorBoard, and pictures that could not be read."""

import json
import logging
import math
import time
from pathlib import Path
from typing import Any

from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm

from debias_diffusion.config import TrainConfig

logger = logging.getLogger(__name__)
_faults_logger = logger.getChild("faults")  # each process has its own to tell; the rest they all would say alike

_QUIET = 60.0
"""Seconds between two lines of a log that stands in for the bar."""


def start_line(
    config: TrainConfig,
    *,
    weights: int,
    trained: int,
    pairs: int,
    steps: tuple[int, int],
    device: str,
    processes: int,
    compiled: bool,
) -> str:
    """One line that says what a run is about to do; `compiled` tells that towers go through torch.compile."""
    parts = [
        f"{config.recipe} from {config.encoder} at {config.context_length} tokens",
        f"{trained / 1e6:,.1f} of {weights / 1e6:,.1f} million weights train",
        f"{pairs:,} pairs, {config.batch_size} a step" + (f" on {processes} processes" if processes > 1 else ""),
        f"steps {steps[0]:,} to {steps[1]:,}",
        f"{config.precision} on {device}",
    ]
    if config.lora_rank:
        parts.append(f"adapters of rank {config.lora_rank} in the text tower")
    if config.frozen_text_layers:
        parts.append(f"the first {config.frozen_text_layers} text layers stay as they are")
    if config.ema_decay:
        parts.append(f"the average of the weights (decay {config.ema_decay}) is what is saved")
    if config.chunk_size:
        parts.append(f"chunks of {config.chunk_size}, computed twice")
    if config.train_towers == "text":
        parts.append("image features are ready, the image tower stays as it is")
    if compiled:
        parts.append("the text tower is not compiled: packing gives each batch another shape")
    return "; ".join(parts)


class Progress:
    """Bar and files of one run; on processes other than the main one it does nothing."""

    def __init__(self, folder: Path, total_steps: int, first_step: int, *, is_main: bool, title: str) -> None:
        self._is_main = is_main
        if not is_main:
            return
        self._metrics = folder / "metrics.jsonl"
        _forget_after(self._metrics, first_step)
        self._writer = SummaryWriter(str(folder / "tensorboard"), purge_step=first_step)
        self._total, self._told = total_steps, -math.inf
        # None: no bar where nobody watches; lines in the log take its place there.
        self._bar = tqdm(
            total=total_steps, initial=first_step, desc=title, unit="step", dynamic_ncols=True, disable=None
        )
        self._since, self._pairs = time.perf_counter(), 0

    def step(self, num_pairs: int) -> None:
        """Counts one step of `num_pairs` pairs."""
        if self._is_main:
            self._pairs += num_pairs
            self._bar.update()

    def record(self, step: int, values: dict[str, float]) -> None:
        """Writes values after `step` steps, with the pairs a second since the last record."""
        if not self._is_main:
            return
        elapsed = time.perf_counter() - self._since
        values = {**values, "samples_per_second": self._pairs / max(elapsed, 1e-9)}
        self._since, self._pairs = time.perf_counter(), 0
        with self._metrics.open("a") as file:
            file.write(json.dumps({"step": step, **values}) + "\n")
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)
        told = f"loss {values['loss']:.3f}, recall {values['recall']:.0%}, {values['samples_per_second']:.1f} samples/s"
        self._bar.set_postfix_str(told)
        if self._bar.disable and (step == self._total or time.monotonic() - self._told >= _QUIET):
            self._told = time.monotonic()
            logger.info("step %d of %d: %s", step, self._total, told)

    def close(self) -> None:
        """Ends bar and files."""
        if self._is_main:
            self._bar.close()
            self._writer.close()


class FaultLog:
    """Names each unreadable picture once and counts them all."""

    def __init__(self, known: list[str]) -> None:
        self.named = dict.fromkeys(known)  # in order, found at once

    def add(self, faults: list[str]) -> None:
        """Takes the faults of a batch."""
        for fault in faults:
            if fault not in self.named:
                self.named[fault] = None
                _faults_logger.warning("picture left out: %s", fault)


def _forget_after(metrics: Path, step: int) -> None:
    """A resumed run repeats the steps since its checkpoint: what was recorded of them would stand there twice."""
    if not metrics.is_file():
        return
    kept = [line for line in metrics.read_text().splitlines() if _step_of(line) <= step]
    partial = metrics.with_suffix(".partial")
    partial.write_text("".join(f"{line}\n" for line in kept))
    partial.replace(metrics)


def _step_of(line: str) -> float:
    try:
        record: dict[str, Any] = json.loads(line)
        return float(record["step"])
    except (ValueError, KeyError, TypeError):
        return float("inf")  # a line cut off by a kill
