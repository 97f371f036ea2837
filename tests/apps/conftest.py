"""A really launched app on tiny random SDXL components, saved and loaded as a checkpoint in SDXL's own layout."""

import importlib.util
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("gradio")

_SDXL = Path(__file__).parents[1] / "sdxl" / "conftest.py"

LONG = (
    "A red house stands beside the river. Behind it three white geese walk in a row. "
    + "A tall man with a lantern waits near the bridge. " * 12
    + "A yellow kite hangs in the last tree."
)
"""More than 77 tokens and fewer than 248."""


@pytest.fixture(autouse=True)
def _one_torch_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A checkpoint, and two pairs of long encoders for it, as folders; not to be changed."""
    spec = importlib.util.spec_from_file_location("tiny_sdxl", _SDXL)
    assert spec is not None
    assert spec.loader is not None
    tiny: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tiny)
    root = tmp_path_factory.mktemp("app")
    towers = {slot: tiny.make_tower(slot) for slot in tiny.SLOT_NAMES}
    tiny._export(towers, root / "base")
    for seed, name in enumerate(("long-clip", "debias"), 1):
        tiny._export({slot: tiny.trained(tower, seed) for slot, tower in towers.items()}, root / name)
    tiny.make_pipe(root / "base").save_pretrained(root / "checkpoint")
    return {name: root / name for name in ("checkpoint", "long-clip", "debias")}


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


@pytest.fixture(scope="session")
def long_prompt() -> str:
    """More than 77 tokens, fewer than 248."""
    return LONG
