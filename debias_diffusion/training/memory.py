"""Gives freed memory back to the system, where captions of many lengths have left the C heap full of holes."""

import ctypes
import sys


def release_freed_memory() -> None:
    """Returns whole free pages to the system (glibc's malloc_trim; elsewhere nothing happens).

    Every batch has other lengths, so its tensors have other sizes and glibc keeps what the last ones left: on a CPU a
    run would grow by megabytes a step.
    """
    if sys.platform == "linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if trim is not None:
            trim(0)
