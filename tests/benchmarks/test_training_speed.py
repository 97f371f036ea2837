"""The benchmarks run, agree with themselves and write what they say they write, at sizes that say nothing of speed."""

import importlib
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


@pytest.fixture
def beside(monkeypatch):
    """A module of the benchmarks, imported as their own programs import it."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module


@pytest.mark.slow
def test_every_part_runs_small(tmp_path):
    result = run("training_speed.py", "--small", "--threads", "1", "--output", str(tmp_path))
    assert result.returncode == 0, result.stderr
    records = json.loads((tmp_path / "training_speed.json").read_text())
    assert records.keys() == {"text", "step", "full", "cached", "data", "growth"}
    figures = {name: part["figures"] for name, part in records.items()}
    for name in ("text", "step", "full", "cached"):
        assert figures[name]["difference"] < 1e-5
    assert figures["step"]["moved"] < 1e-5
    losses = figures["step"]["losses"]
    assert losses == pytest.approx([losses[0]] * 3, abs=1e-5)
    assert min(figures["data"]["cosines"].values()) > 0.99
    assert all(f["peak_gb"] < 2 for f in figures.values())
    assert (tmp_path / "growth.png").stat().st_size > 10_000
    said = (tmp_path / "training_speed.md").read_text()
    assert "Share of each part" in said
    assert str(tmp_path) not in said


@pytest.mark.slow
def test_a_step_that_holds_all_graphs_gives_the_same_loss(tmp_path):
    losses = []
    for more in ((), ("--graphs-at-once",)):
        result = run("training_speed.py", "--small", "--parts", "step", "--output", str(tmp_path), *more)
        assert result.returncode == 0, result.stderr
        figures = json.loads((tmp_path / "training_speed.json").read_text())["step"]["figures"]
        losses.append(figures["losses"][0])
        assert figures["moved"] < 1e-5
    assert losses[0] == pytest.approx(losses[1], abs=1e-6)


@pytest.mark.slow
def test_what_freezing_costs_is_written_seed_by_seed(tmp_path):
    result = run("frozen_image_tower.py", "--small", "--seeds", "0", "1", "--output", str(tmp_path))
    assert result.returncode == 0, result.stderr
    for way in ("both towers", "image tower frozen"):
        assert all(f"| {way}, seed {seed} |" in result.stdout for seed in (0, 1))
    figures = json.loads((tmp_path / "frozen_image_tower.json").read_text())["table"]["figures"]
    assert figures["seeds"] == [0, 1]
    assert (tmp_path / "frozen_image_tower.md").read_text().count("| image tower frozen |") == 1


def test_parts_measured_on_other_days_are_kept(beside, tmp_path):
    recorded = beside("recorded")

    def write(**found):
        records = {
            n: recorded.Record(f"run {n}", day, "a machine", [f"### {n}", ""], {"s": 1.5}) for n, day in found.items()
        }
        recorded.keep(tmp_path, "speed", "Speed", records, ("a", "b"))
        return json.loads((tmp_path / "speed.json").read_text()), (tmp_path / "speed.md").read_text()

    write(b="Monday", z="Monday")
    records, said = write(a="Tuesday")
    assert {name: part["date"] for name, part in records.items()} == {"a": "Tuesday", "b": "Monday", "z": "Monday"}
    assert [line for line in said.splitlines() if line.startswith("#")] == ["# Speed", "### a", "### b", "### z"]
    assert "`run b`, Monday. a machine." in said
    records, said = write(b="Wednesday")
    assert records["b"]["date"] == "Wednesday"
    assert records["a"]["date"] == "Tuesday"
    assert "Monday" not in said.replace("`run z`, Monday", "")
    assert {path.name for path in tmp_path.iterdir()} == {"speed.json", "speed.md"}


@pytest.mark.parametrize("text", ["[]", "{", '{"a": {"ratio": 2}}', '{"a": 1}'])
def test_a_file_of_other_figures_is_refused_and_left_alone(beside, tmp_path, text):
    (tmp_path / "speed.json").write_text(text)
    recorded = beside("recorded")
    found = {"a": recorded.Record("run", "Monday", "a machine", [], {})}
    with pytest.raises(ValueError, match=r"speed\.json holds no records of parts"):
        recorded.keep(tmp_path, "speed", "Speed", found)
    assert (tmp_path / "speed.json").read_text() == text
    assert not (tmp_path / "speed.md").exists()


@pytest.mark.parametrize(
    ("argv", "command"),
    [
        (["/a/b/x.py", "--parts", "text", "--output", "/tmp/x", "--small"], "x.py --parts text --small"),
        (["x.py", "--output=/tmp/x", "--threads", "1"], "x.py --threads 1"),
        (["x.py"], "x.py"),
    ],
)
def test_a_recorded_command_names_no_folder(beside, argv, command):
    assert beside("recorded").command_line(argv) == f"python benchmarks/{command}"


def test_peak_memory_can_be_begun_anew(beside):
    timing = beside("timing")
    held = bytearray(200_000_000)
    high = timing.peak_bytes()
    del held
    if not timing.forget_peak():
        pytest.skip("this system keeps the peak of the whole program")
    assert timing.peak_bytes() < high - 150_000_000


def test_chunks_are_exact_in_float64_and_the_naive_loss_is_the_loss(beside):
    import torch

    parts = beside("cached_gradients")
    plain, chunks = parts.gradients(24, 0, torch.float64), parts.gradients(24, 7, torch.float64)
    whole, worst, _ = parts.distances(plain, chunks)
    assert whole < 1e-12
    assert worst < 1e-12
    ours = parts.gradients(
        24, 7, torch.float32
    )  # through the library's loss, with its own derivative of the components
    assert parts.distances(plain, ours)[0] < 1e-5
    ours["clip.logit_scale"] += 1
    assert parts.distances(plain, ours)[2] == "clip.logit_scale"


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
