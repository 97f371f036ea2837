"""Where to draw: a device that is there, or an error that lists those that are."""

import torch

from debias_diffusion.sdxl.slots import find_dtype


def find_device(name: str | None = None) -> str:
    """The device called `name`, once something could be put there; None is a GPU where there is one, else the CPU.

    Raises ValueError that lists what this machine has.
    """
    if name is None:
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        is_usable = not torch.empty(1, device=name).is_meta
    except (RuntimeError, AssertionError, NotImplementedError):  # torch raises each of them for one kind or another
        is_usable = False
    if not is_usable:
        raise ValueError(f"no device {name!r} here; devices: {', '.join(_devices())}")
    return name


def find_precision(device: str, name: str | None = None) -> torch.dtype:
    """The dtype called `name`; None is fp32 on a CPU, which computes little in halves, and fp16 elsewhere."""
    return find_dtype(name or ("fp32" if torch.device(device).type == "cpu" else "fp16"))


def _devices() -> list[str]:
    gpus = [f"cuda:{i}" for i in range(torch.cuda.device_count())] if torch.cuda.is_available() else []
    return ["cpu", *gpus, *(["mps"] if torch.backends.mps.is_available() else [])]
