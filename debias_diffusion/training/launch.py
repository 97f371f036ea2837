"""How many processes a launch asked for, so that one that started fewer is an error and not a slow surprise."""

import os
from pathlib import Path

import psutil
import yaml

_FLAGS = ("--num_processes", "--num-processes", "--nproc_per_node", "--nproc-per-node")


def asked_processes() -> int:
    """The number of processes that the launcher was asked for; 1 where there is no launcher.

    `accelerate launch --cpu --num_processes 2` starts a single process and says nothing, so the launcher's own command
    line is read where it left no WORLD_SIZE behind.
    """
    if "WORLD_SIZE" in os.environ:
        return int(os.environ["WORLD_SIZE"])
    parent = psutil.Process().parent()
    try:
        return processes_in_command(parent.cmdline()) if parent else 1
    except psutil.Error:
        return 1


def processes_in_command(command: list[str]) -> int:
    """What an `accelerate launch` command line asks for, by its flag or by its config file; 1 for any other command.

    >>> processes_in_command(["accelerate", "launch", "--cpu", "--num_processes", "2", "train/encoder.py"])
    2
    >>> processes_in_command(["bash"])
    1
    """
    if not any("accelerate" in Path(word).name for word in command[:3]):
        return 1
    for flag in _FLAGS:
        value = _value(command, flag)
        if value and value.isdigit():
            return int(value)
    config = _value(command, "--config_file") or _value(command, "--config-file")
    if config and Path(config).is_file():
        return int((yaml.safe_load(Path(config).read_text()) or {}).get("num_processes") or 1)
    return 1


def _value(command: list[str], flag: str) -> str | None:
    for word, following in zip(command, [*command[1:], ""], strict=True):
        if word == flag:
            return following
        if word.startswith(f"{flag}="):
            return word.removeprefix(f"{flag}=")
    return None
