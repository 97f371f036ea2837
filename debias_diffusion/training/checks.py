"""What is refused before anything heavy is loaded: impossible settings, another run's folder, too few processes."""

import dataclasses
from pathlib import Path

from accelerate import Accelerator
from accelerate.utils import gather_object

from debias_diffusion.config import TrainConfig
from debias_diffusion.data.collate import PairSource, keys_digest
from debias_diffusion.encoders.checkpoint import refuse_foreign_folder, source_context_length
from debias_diffusion.training.checkpoints import find_checkpoints
from debias_diffusion.training.launch import asked_processes
from debias_diffusion.training.sharding import sharding_problems

_MAY_CHANGE = {
    *("output", "resume", "workers", "log_every", "save_every", "keep_checkpoints", "image_root", "data"),
    *("chunk_size", "gradient_checkpointing", "feature_cache"),
}
"""Fields that a resumed run may change: none of them changes what is learned."""

LAUNCH_LINES = (
    "for two processes on a CPU: ACCELERATE_USE_CPU=true accelerate launch --multi_gpu --num_processes 2 "
    "--num_machines 1 --mixed_precision no --dynamo_backend no train/encoder.py ..."
)


def check_config(config: TrainConfig, *, rehearsing: bool = False) -> None:
    """Refuses impossible settings and a folder that holds another run; raises ValueError with all that is wrong.

    A dry run, `rehearsing`, may go without a folder.
    """
    problems = config.problems(rehearsing=rehearsing)
    base = source_context_length(config.encoder)
    if base is not None and config.context_length < base and not problems:
        problems = [
            f"--context-length {config.context_length} is shorter than the base's {base}; it can only be stretched"
        ]
    if problems:
        raise ValueError("; ".join(problems))
    if not config.output:  # a dry run's: there is nothing it could meet
        return
    folder = Path(config.output)
    refuse_foreign_folder(folder / "encoder")
    found = find_checkpoints(folder / "checkpoints")
    if found and not config.resume:
        raise ValueError(
            f"{folder} already holds a run ({found[-1].name}); add --resume to go on, or name another --output"
        )
    if (folder / "encoder").exists() and not config.resume:
        raise ValueError(f"{folder} already holds a trained encoder; name another --output")
    if found:
        _check_same_run(config, TrainConfig.from_json((folder / "config.json").read_text()))
    elif config.resume and not (folder / "config.json").is_file():
        raise ValueError(f"--resume: {folder} holds no run to go on with; leave --resume out to start one there")


def _check_same_run(config: TrainConfig, earlier: TrainConfig) -> None:
    now, then = dataclasses.asdict(config), dataclasses.asdict(earlier)
    changed = [
        f"--{k.replace('_', '-')} {then[k]!r} -> {now[k]!r}" for k in now if k not in _MAY_CHANGE and now[k] != then[k]
    ]
    if changed:
        raise ValueError(f"a resumed run keeps its settings, but these changed: {', '.join(changed)}")


def check_processes(config: TrainConfig, accelerator: Accelerator) -> None:
    """Refuses a launch that started fewer processes than asked for, and settings that do not suit their number."""
    asked, started = asked_processes(), accelerator.num_processes
    if started != asked:
        raise ValueError(f"{asked} processes were asked for, but {started} started; {LAUNCH_LINES}")
    if config.batch_size % started:
        raise ValueError(
            f"--batch-size {config.batch_size} does not divide among {started} processes; choose a multiple"
        )
    if problems := sharding_problems(config, accelerator):
        raise ValueError("; ".join(problems))
    if config.precision == "fp16" and accelerator.device.type == "cpu":
        raise ValueError("--precision fp16 needs a GPU; on a CPU use fp32 or bf16")


def check_same_data(pairs: PairSource, accelerator: Accelerator) -> None:
    """Refuses processes that read different data, as machines with folders of their own may; every process must call it."""
    if accelerator.num_processes == 1:
        return
    found = gather_object([(len(pairs), keys_digest(pairs))])
    other = [str(i) for i, data in enumerate(found) if data != found[0]]
    if other:
        raise ValueError(
            f"process 0 reads {found[0][0]:,} pairs, but {len(other)} of {len(found)} processes read others (process "
            f"{', '.join(other[:8])}), and rows are trained on by their number; give --data one folder that all see"
        )
