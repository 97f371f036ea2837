"""The training job: rows -> both branches -> one forward -> gathered loss -> step -> checkpoint -> encoder folder."""

import dataclasses
import json
import logging
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from accelerate.utils import broadcast_object_list

from debias_diffusion.config import TrainConfig
from debias_diffusion.data.collate import PairSource
from debias_diffusion.data.feature_cache import FeatureCache
from debias_diffusion.data.pairs import open_pairs
from debias_diffusion.data.scene_sets import ScenePairs
from debias_diffusion.data.streamed import StreamedShards
from debias_diffusion.training.checkpoints import find_checkpoints, remove_leftovers
from debias_diffusion.training.checks import check_config, check_processes, check_same_data
from debias_diffusion.training.endings import Interrupted, NonFiniteLoss
from debias_diffusion.training.lock import FolderLock
from debias_diffusion.training.run import Run
from debias_diffusion.training.sharding import make_accelerator
from debias_diffusion.training.signals import StopSignals

__all__ = ["Interrupted", "NonFiniteLoss", "dry_run", "open_source", "read_metrics", "train"]

logger = logging.getLogger(__name__)


def train(config: TrainConfig) -> Path:
    """Runs the job and returns the folder of the trained encoder, `config.output`/encoder.

    Raises ValueError for impossible settings before anything is loaded and for a folder in which another run is at work,
    `NonFiniteLoss`, `Interrupted` after SIGTERM or Ctrl-C with a checkpoint saved, and KeyboardInterrupt after a second.
    """
    check_config(config)
    accelerator = make_accelerator(config.precision)
    check_processes(config, accelerator)
    folder = Path(config.output)
    with ExitStack() as stack:
        _take(folder, accelerator, stack)
        if accelerator.is_main_process:
            remove_leftovers(folder / "checkpoints")
            partial_config = folder / ".config.json.partial"
            partial_config.write_text(config.to_json())
            partial_config.replace(folder / "config.json")
        checkpoints = find_checkpoints(folder / "checkpoints")
        if config.resume and not checkpoints:
            logger.warning("%s holds no checkpoint yet; starting from the beginning", folder)
        pairs = open_source(config)
        check_same_data(pairs, accelerator)
        run = Run(config, accelerator, pairs)
        if config.resume and checkpoints:
            run.restore(checkpoints[-1])
        logger.info("%s", run.describe())
        with StopSignals() as stop:
            run.go(stop)
        return run.export(folder / "encoder")


def dry_run(config: TrainConfig) -> str:
    """What `train(config)` would do, told without doing it: one forward pass is run, and no file or folder is written.

    Raises ValueError for impossible settings, as `train` does, but for a missing `output`.
    """
    check_config(config, rehearsing=True)
    accelerator = make_accelerator(config.precision)
    check_processes(config, accelerator)
    pairs = open_source(config)
    steps = config.max_steps or len(pairs) // config.batch_size * config.epochs
    first = dataclasses.replace(config, max_steps=1, workers=0)  # a frozen image tower reads the first batch alone
    run = Run(first, accelerator, pairs, FeatureCache(None))
    return f"{run.describe(steps)}\n\n{run.rehearse(steps)}"


def _take(folder: Path, accelerator: Accelerator, stack: ExitStack) -> None:
    """Locks the folder on the main process; where that fails, every process raises the same ValueError."""
    problem = ""
    if accelerator.is_main_process:
        try:
            stack.enter_context(FolderLock(folder))
        except ValueError as error:
            problem = str(error)
    (problem,) = broadcast_object_list([problem])
    if problem:
        raise ValueError(problem)


def open_source(config: TrainConfig) -> PairSource:
    """The training pairs that `config.data` names."""
    if config.data == "scenes":
        return ScenePairs(size=config.batch_size * max(config.max_steps, 1000), seed=config.seed)
    pairs = open_pairs(config.data, config.image_root or None, held_out=config.held_out)
    if isinstance(pairs, StreamedShards) and config.shuffle_block == 1:
        logger.warning("each row is a read of its own; --shuffle-block 16 reads 16 neighbours at once")
    for reason, count in pairs.left_out.items():
        logger.warning("%s: %d left out: %s", config.data, count, reason.replace("_", " "))
    return pairs


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    """What a run recorded, oldest first."""
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
