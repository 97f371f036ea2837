"""A really launched app on tiny random SDXL components, saved and loaded as a checkpoint in SDXL's own layout."""

import importlib.util
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("gradio")

_SDXL = Path(__file__).parents[1] / "sdxl"

LONG = (
    "A red house stands beside the river. Behind it three white geese walk in a row. "
    + "A tall man with a lantern waits near the bridge. " * 12
    + "A yellow kite hangs in the last tree."
)
"""More than 77 tokens and fewer than 248."""


@pytest.fixture(autouse=True)
def _one_torch_thread() -> None:
    torch.set_num_threads(1)


def _load(name: str) -> Any:
    """A module of the tests of SDXL, for what it builds."""
    spec = importlib.util.spec_from_file_location(f"tiny_sdxl_{name}", _SDXL / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A checkpoint, and two pairs of long encoders for it, as folders; not to be changed."""
    tiny = _load("conftest")
    root = tmp_path_factory.mktemp("app")
    towers = {slot: tiny.make_tower(slot) for slot in tiny.SLOT_NAMES}
    tiny._export(towers, root / "base")
    for seed, name in enumerate(("long-clip", "debias"), 1):
        tiny._export({slot: tiny.trained(tower, seed) for slot, tower in towers.items()}, root / name)
    tiny.make_pipe(root / "base").save_pretrained(root / "checkpoint")
    return {name: root / name for name in ("checkpoint", "long-clip", "debias")}


@dataclass(frozen=True)
class RealLayout:
    """SDXL as it is handed around, but tiny: see `layouts`. `parts` are the same models in memory."""

    folder: Path
    file: Path
    config: Path
    slots: Path
    parts: Any


@pytest.fixture(scope="session")
def real_layout(tmp_path_factory: pytest.TempPathFactory) -> RealLayout:
    """A folder in fp16, a single file with its configuration, and long encoders for both; not to be changed."""
    tiny, layouts = _load("conftest"), _load("layouts")
    root, parts = tmp_path_factory.mktemp("real-layout"), layouts.make_parts()
    return RealLayout(
        layouts.write_folder(parts, root / "folder", ("fp16",)),
        layouts.write_file(parts, root / "sdxl.safetensors"),
        layouts.write_config(parts, root / "config"),
        tiny._export({slot: tiny.trained(tower) for slot, tower in parts.towers.items()}, root / "debias"),
        parts,
    )


@pytest.fixture(scope="session")
def studio(folders: dict[str, Path]) -> Any:
    """The checkpoint with both pairs beside its own, loaded as the command line does."""
    from apps.compare import load_studio

    sets = tuple(f"{name}={folders[name]}" for name in ("long-clip", "debias"))
    opened, notes = load_studio(str(folders["checkpoint"]), sets, device="cpu")
    assert notes == []
    return opened


@dataclass(frozen=True)
class Served:
    """A running app: where, and what draws in it."""

    url: str
    studio: Any


@pytest.fixture(scope="session")
def served(studio: Any) -> Iterator[Served]:
    """The app, launched on this machine and closed at the end."""
    from apps.compare import launch

    app, url = launch(studio)
    yield Served(url, studio)
    app.close()


@dataclass(frozen=True)
class Running:
    """An app in a process of its own."""

    url: str
    pid: int


@contextmanager
def _started(*words: str) -> Iterator[Running]:
    command = [sys.executable, "-m", "apps.compare", *words, "--device", "cpu"]
    more = {"cwd": _SDXL.parents[1], "env": os.environ | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, **more) as process:
        try:
            assert process.stdout is not None
            said = process.stdout.readline()
            found = re.search(r"http://127\.0\.0\.1:\d+/?", said)
            assert found is not None, said
            yield Running(found[0], process.pid)
        finally:
            process.terminate()


@pytest.fixture(scope="session")
def start_app() -> Callable[..., AbstractContextManager[Running]]:
    """start_app(*words): the app as a user starts it with these words, without network, ended after the block."""
    return _started


@pytest.fixture(scope="session")
def long_prompt() -> str:
    """More than 77 tokens, fewer than 248."""
    return LONG
