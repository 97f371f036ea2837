"""The benchmarks run, agree with themselves and write what they say they write, at sizes that say nothing of speed."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
ENV = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


def run(name: str, *args: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "benchmarks" / name), *args]
    return subprocess.run(command, env=ENV, capture_output=True, text=True, timeout=900, check=False)


@pytest.mark.slow
def test_every_part_runs_small(tmp_path):
    result = run("training_speed.py", "--small", "--threads", "1", "--output", str(tmp_path))
    assert result.returncode == 0, result.stderr
    figures = json.loads((tmp_path / "training_speed.json").read_text())
    assert figures.keys() == {"text", "step", "full", "cached", "data", "growth"}
    assert figures["text"]["difference"] < 1e-5
    assert figures["cached"]["difference"] < 1e-5
    losses = figures["step"]["losses"]
    assert losses == pytest.approx([losses[0]] * 3, abs=1e-4)
    assert min(figures["data"]["cosines"].values()) > 0.99
    assert (tmp_path / "growth.png").stat().st_size > 10_000
    assert "Share of each part" in (tmp_path / "training_speed.md").read_text()


def test_the_plan_counts_every_encoder_and_names_its_assumptions():
    said = run("plan.py").stdout
    rows = [line.split("|")[1:-1] for line in said.splitlines() if line.startswith("| ")][1:]
    assert {row[0].strip() for row in rows} == {"B/16", "L/14", "bigG/14"}
    cost = {(r[0].strip(), r[1].strip(), r[3].strip()): float(r[2]) for r in rows}
    # The literature's own count for B/16 with two texts of 248 tokens: 0.21 TFLOP a picture, forward and backward.
    assert cost["B/16", "plain recipe", "1 x 80 GB"] == pytest.approx(0.21, abs=0.03)
    assert cost["L/14", "image tower frozen", "1 x 80 GB"] < 0.5 * cost["L/14", "both towers", "4 x 80 GB"]
    assert "Assumed:" in said


def test_the_sheet_says_not_run_where_there_is_no_gpu(tmp_path):
    import torch

    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    assert "not run" in run("gpu_sheet.py", "--output", str(tmp_path / "sheet.md")).stdout
    assert (tmp_path / "sheet.md").read_text().startswith("Not run")


@pytest.mark.slow
def test_the_sheet_fills_on_the_miniature(tmp_path):
    result = run(
        "gpu_sheet.py", "--small", "--device", "cpu", "--minutes", "0.2", "--output", str(tmp_path / "sheet.md")
    )
    assert result.returncode == 0, result.stderr
    rows = [line for line in (tmp_path / "sheet.md").read_text().splitlines() if line.startswith("| miniature")]
    assert len(rows) == 4
    assert not [row for row in rows if "no time left" in row or "does not fit" in row]
