"""Weights shared out among processes (FSDP2 over gloo) against one process, as train/configs/fsdp.yaml launches them."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from debias_diffusion import load_encoder
from debias_diffusion.config import TrainConfig
from debias_diffusion.encoders.checkpoint import WEIGHTS_FILE
from debias_diffusion.training.checks import check_processes
from debias_diffusion.training.loop import read_metrics
from debias_diffusion.training.sharding import make_accelerator

WORKER = Path(__file__).with_name("sharding_worker.py")


@pytest.fixture(scope="module")
def folder(tiny_folder, pair_folder, tmp_path_factory):
    folder = tmp_path_factory.mktemp("sharded")
    env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(WORKER.parents[2])}
    command = [sys.executable, str(WORKER), str(folder), str(tiny_folder), str(pair_folder)]
    subprocess.run(command, env=env, check=True, timeout=550)
    return folder


def losses(folder):
    return [m["loss"] for m in read_metrics(folder)]


@pytest.mark.slow
def test_two_processes_have_the_loss_curve_of_one(folder):
    plain, two = losses(folder / "plain"), losses(folder / "two")
    assert len(plain) == 20
    assert plain[-1] < 0.8 * plain[0]
    assert two == pytest.approx(plain, abs=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("world", [1, 3])
def test_a_checkpoint_of_two_processes_resumes_on_another_number(folder, world):
    assert sorted(p.name for p in (folder / "two" / "checkpoints").iterdir()) == ["step-00000015", "step-00000020"]
    assert (folder / "two" / "checkpoints" / "step-00000015" / "optimizer_0").is_dir(), "not sharded"
    metrics = read_metrics(folder / f"on{world}")
    assert [m["step"] for m in metrics] == list(range(1, 21))
    assert [m["loss"] for m in metrics] == pytest.approx(losses(folder / "plain"), abs=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["two", "on1", "on3"])
def test_the_shards_become_one_plain_encoder(folder, name, tiny_folder):
    plain, gathered = (load_file(folder / n / "encoder" / WEIGHTS_FILE) for n in ("plain", name))
    assert {k: v.shape for k, v in gathered.items()} == {k: v.shape for k, v in plain.items()}
    for key in plain:
        if not key.endswith("in_proj_bias"):  # a key's bias has no gradient but rounding, which Adam enlarges
            assert (gathered[key] - plain[key]).norm() <= 5e-3 * plain[key].norm() + 1e-5, key
    base = load_file(tiny_folder / WEIGHTS_FILE)["text.positional_embedding"]
    assert torch.equal(gathered["text.positional_embedding"][:20], base[:20])
    assert load_encoder(folder / name / "encoder").history["training"]["steps"] == 20


@pytest.mark.slow
def test_a_dry_run_counts_what_one_process_holds_and_writes_nothing(folder):
    said = (folder / "rehearsal.txt").read_text()
    assert "batch        12 pairs in 2 processes; here 6 pictures" in said
    shown = float(said.split("first loss   ")[1].split()[0])
    assert shown == pytest.approx(losses(folder / "plain")[0], abs=1e-4)
    assert not (folder / "not written").exists()


def test_what_does_not_go_with_sharding_is_one_line(monkeypatch):
    from accelerate.utils import DistributedType

    config = TrainConfig(batch_size=8, ema_decay=0.9, lora_rank=4)
    accelerator = make_accelerator("fp32")
    check_processes(config, accelerator)
    monkeypatch.setitem(accelerator.state.__dict__, "distributed_type", DistributedType.FSDP)
    monkeypatch.setitem(accelerator.state.__dict__, "fsdp_plugin", type("Plugin", (), {"fsdp_version": 1})())
    with pytest.raises(ValueError, match=r"fsdp_version must be 2.*ema-decay does not go.*lora-rank does not go"):
        check_processes(config, accelerator)
