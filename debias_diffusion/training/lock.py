"""One run to a folder: two would overwrite each other's checkpoints without a word."""

import json
import os
import socket
import time
from pathlib import Path
from types import TracebackType

import psutil

_WRITING = 0.5
"""Seconds after which an empty lock is no longer one that is being written."""


class FolderLock:
    """Holds `folder`/.lock while a run writes there; a lock whose process has ended is taken over.

    Entering raises ValueError where another run is alive in the folder.
    """

    def __init__(self, folder: Path) -> None:
        self.path = folder / ".lock"
        started = psutil.Process().create_time()  # process numbers are used again
        self._mine = json.dumps({"pid": os.getpid(), "started": started, "host": socket.gethostname()})

    def __enter__(self) -> "FolderLock":
        self.path.parent.mkdir(parents=True, exist_ok=True)
        for _ in range(3):
            try:
                with self.path.open("x") as file:
                    file.write(self._mine)
                return self
            except FileExistsError:
                self._remove_if_stale()
        raise ValueError(f"{self.path} cannot be taken: another run is starting in this folder; name another --output")

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._holder() == json.loads(self._mine):
            self.path.unlink(missing_ok=True)

    def _remove_if_stale(self) -> None:
        try:
            age = time.time() - self.path.stat().st_mtime
        except FileNotFoundError:
            return  # it went away meanwhile
        holder = self._holder()
        if not holder and age < _WRITING:
            time.sleep(_WRITING)
            return
        here = not holder or holder.get("host") == socket.gethostname()
        if here and not _is_alive(holder.get("pid"), holder.get("started")):
            self.path.unlink(missing_ok=True)
            return
        where = "" if here else f" on {holder.get('host')}"
        raise ValueError(
            f"another run writes to {self.path.parent} (process {holder.get('pid')}{where}); wait for it, or name "
            f"another --output{'' if here else f'; if it is gone, delete {self.path}'}"
        )

    def _holder(self) -> dict[str, object]:
        """What the lock says, empty where it says nothing: its process ended, or is only just writing it."""
        try:
            holder = json.loads(self.path.read_text())
        except (FileNotFoundError, ValueError):
            return {}
        return holder if isinstance(holder, dict) else {}


def _is_alive(pid: object, started: object) -> bool:
    if not isinstance(pid, int) or not isinstance(started, float):
        return False
    try:
        return abs(psutil.Process(pid).create_time() - started) < 1
    except psutil.Error:
        return False
