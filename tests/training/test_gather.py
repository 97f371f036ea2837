"""Two real processes over gloo against one process with the whole batch."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import torch

from debias_diffusion.training.gather import Shares, exchange_counts, gather_features

WORKER = Path(__file__).with_name("gather_worker.py")


def run_workers(folder: Path, world: int, sizes: str, worker: Path = WORKER) -> None:
    """Starts the ranks directly: a launcher adds nothing here but time."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    processes = []
    for rank in range(world):
        env = os.environ | {
            "RANK": str(rank), "WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
            "OMP_NUM_THREADS": "1",
        }  # fmt: skip
        processes.append(subprocess.Popen([sys.executable, str(worker), str(folder), sizes], env=env))
    assert [p.wait(timeout=240) for p in processes] == [0] * world


def test_one_process_needs_no_group():
    features = torch.randn(3, 4)
    shares = exchange_counts(3, features.device)
    assert shares == Shares((3,), 0)
    assert gather_features(features, shares) is features
    assert shares.weight == 1.0


def test_gradients_of_two_processes_equal_those_of_one(tmp_path):
    for sizes in ("6,6", "7,5", "12,0"):
        run_workers(tmp_path, 2, sizes)
        alone = torch.load(tmp_path / "alone.pt", weights_only=True)
        together = torch.load(tmp_path / "together.pt", weights_only=True)
        assert alone.keys() == together.keys()
        assert len(alone) > 20
        for name in alone:
            difference = (together[name] - alone[name]).norm() / alone[name].norm()
            assert difference <= 1e-6, f"{sizes} {name}: {difference:.1e}"
