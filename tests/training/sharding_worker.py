"""Trains one tiny encoder plainly and with its weights shared out, through train/configs/fsdp.yaml; leaves the runs.

    sharding_worker.py FOLDER ENCODER PAIRS

Everything is imported once and each rank is a fork, which costs seconds where a launcher would cost minutes.
"""

import dataclasses
import multiprocessing
import os
import shutil
import socket
import sys
from pathlib import Path

from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.utils.launch import prepare_multi_gpu_env

from debias_diffusion.config import TrainConfig
from debias_diffusion.training.checkpoints import find_checkpoints
from debias_diffusion.training.loop import dry_run, train

CONFIG = Path(__file__).resolve().parents[2] / "train" / "configs" / "fsdp.yaml"
STEPS, SAVED = 20, 15


def launch_variables(world: int) -> dict[str, str]:
    """What accelerate's launcher would tell each of `world` processes."""
    args = launch_command_parser().parse_args(["--config_file", str(CONFIG), "--num_processes", str(world), "x.py"])
    told = prepare_multi_gpu_env(_validate_launch_command(args)[0])
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        told |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}
    return told | {"WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": str(world), "ACCELERATE_USE_CPU": "true"}


def rank_main(config: TrainConfig, variables: dict[str, str], rehearsal: Path | None) -> None:
    os.environ.update(variables)
    if rehearsal:
        said = dry_run(config)
        if variables["RANK"] == "0":
            rehearsal.write_text(said)
        return
    train(config)


def run(config: TrainConfig, world: int = 0, rehearsal: Path | None = None) -> None:
    """`config` on `world` processes that share the weights; 0 means one process that knows of none of this."""
    told = launch_variables(world) if world else {}
    fork = multiprocessing.get_context("fork")
    ranks = [{**told, "RANK": str(r), "LOCAL_RANK": str(r)} if world else {} for r in range(world or 1)]
    processes = [fork.Process(target=rank_main, args=(config, rank, rehearsal)) for rank in ranks]
    for process in processes:
        process.start()
    for process in processes:
        process.join(240)
    if codes := [p.exitcode for p in processes if p.exitcode]:
        for process in processes:
            process.kill()
        sys.exit(f"{config.output} on {world} processes ended with {codes}")


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    plain = TrainConfig(
        output=str(folder / "plain"), encoder=sys.argv[2], data=sys.argv[3], batch_size=12, pca_dim=3, pca_batch=12,
        max_steps=STEPS, learning_rate=1e-3, warmup_steps=1, workers=0, log_every=1, save_every=SAVED,
    )  # fmt: skip
    run(plain)
    two = dataclasses.replace(plain, output=str(folder / "two"), gradient_checkpointing=True)
    run(two, 2)
    for world, chunk_size in ((1, 0), (3, 3)):
        again = dataclasses.replace(two, output=str(folder / f"on{world}"), resume=True, chunk_size=chunk_size)
        shutil.copytree(folder / "two", again.output)
        shutil.rmtree(find_checkpoints(Path(again.output) / "checkpoints")[-1])
        shutil.rmtree(Path(again.output) / "encoder")
        run(again, world)
    run(dataclasses.replace(two, output=str(folder / "not written")), 2, folder / "rehearsal.txt")
