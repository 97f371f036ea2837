"""Checkpoints of a run: written under another name and renamed when whole, the newest kept, the newest found."""

import json
import pickle
import re
import shutil
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint.api import CheckpointException

from debias_diffusion.training.ema import WeightAverage

_NAME = re.compile(r"step-(\d{8})")
_STATE_FILE = "run.json"
_AVERAGE_FILE = "average.safetensors"


def save_checkpoint(
    accelerator: Accelerator,
    folder: Path,
    step: int,
    run: dict[str, Any],
    keep: int,
    average: WeightAverage | None = None,
) -> None:
    """Writes model, optimiser, scaler, `average` and `run` as `folder`/step-N; every process must call it."""
    final = folder / f"step-{step:08d}"
    partial = folder / f".{final.name}.partial"
    if accelerator.is_main_process:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
    accelerator.wait_for_everyone()
    accelerator.save_state(str(partial))
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        if average:
            save_file(average.state_dict(), partial / _AVERAGE_FILE)
        (partial / _STATE_FILE).write_text(json.dumps({"step": step, **run}))
        shutil.rmtree(final, ignore_errors=True)
        partial.rename(final)
        for old in find_checkpoints(folder)[:-keep]:
            shutil.rmtree(old)
    accelerator.wait_for_everyone()


def find_checkpoints(folder: Path) -> list[Path]:
    """Whole checkpoints, oldest first; what an interrupted write left behind is not one."""
    if not folder.is_dir():
        return []
    return sorted(p for p in folder.iterdir() if _NAME.fullmatch(p.name) and (p / _STATE_FILE).is_file())


def remove_leftovers(folder: Path) -> None:
    """Deletes what writes that were cut short left among the checkpoints."""
    for partial in folder.glob(".step-*.partial") if folder.is_dir() else ():
        shutil.rmtree(partial, ignore_errors=True)


def load_checkpoint(accelerator: Accelerator, checkpoint: Path, average: WeightAverage | None = None) -> dict[str, Any]:
    """Restores what `save_checkpoint` wrote into the prepared objects and `average`; returns its `run` with "step"."""
    try:
        run: dict[str, Any] = json.loads((checkpoint / _STATE_FILE).read_text())
        accelerator.load_state(str(checkpoint))
        if average:
            average.load_state_dict(load_file(checkpoint / _AVERAGE_FILE))
        return {**run, "step": int(run["step"]), "faults": list(run.get("faults", []))}
    except (
        SafetensorError,
        RuntimeError,
        pickle.UnpicklingError,
        KeyError,
        TypeError,
        EOFError,
        OSError,
        ValueError,
        CheckpointException,
    ) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ValueError(
            f"the checkpoint {checkpoint} cannot be read ({reason}); remove that folder to go on from the one before"
        ) from error


_DATA = {"pairs": "the number of pairs", "total_steps": "the number of steps", "keys": "which pairs they are"}


def refuse_other_data(checkpoint: Path, then: dict[str, Any], now: dict[str, Any]) -> None:
    """Raises ValueError where the data are not those of the checkpoint; what an older one does not say is not asked."""
    changed = [k for k in _DATA if k in then and then[k] != now[k]]
    said = [_DATA[k] + (f" ({then[k]:,} -> {now[k]:,})" if isinstance(now[k], int) else "") for k in changed]
    if changed:
        raise ValueError(
            f"a resumed run keeps its data, but since {checkpoint.name} this changed: {', '.join(said)}; give --data what "
            "it had, or name another --output"
        )
