"""The benchmarks of families and of stretches, whole, on towers that know nothing: what they keep, write and repeat."""

import json
import sys
from pathlib import Path

import pytest
import torch

from debias_diffusion import save_encoder
from debias_diffusion.demo import PERTURBATIONS
from debias_diffusion.encoders.encoder import MINIATURE_FOLDER, build
from debias_diffusion.encoders.hub_tokens import read_tokenizer

ROOT = Path(__file__).resolve().parents[2]
CONFIG = {
    "embed_dim": 32,
    "init_logit_scale": 2.3,
    "init_logit_bias": -10,
    "vision_cfg": {"image_size": 16, "patch_size": 8, "width": 32, "layers": 1, "head_width": 16},
    "text_cfg": {
        **{"context_length": 64, "vocab_size": 851, "width": 32, "heads": 2, "layers": 1, "pad_id": 849},
        **{"no_causal_mask": True, "proj_bias": True, "pool_type": "last", "hf_tokenizer_name": "miniature-siglip"},
    },
}


@pytest.fixture
def start(monkeypatch):
    """Runs a benchmark's `main` with flags."""
    monkeypatch.syspath_prepend(ROOT / "benchmarks")

    def run(name: str, *flags: object) -> None:
        module = __import__(name)
        monkeypatch.setattr(sys, "argv", [f"{name}.py", *map(str, flags)])
        module.main()

    return run


@pytest.fixture(scope="module")
def siglip(tmp_path_factory) -> Path:
    torch.manual_seed(0)
    reader = read_tokenizer(MINIATURE_FOLDER / "siglip_tokenizer", 64, {"clean": "canonicalize"})
    return save_encoder(build("tiny", CONFIG, tokenizer=reader), tmp_path_factory.mktemp("bases") / "tiny-siglip")


def test_both_families_are_tuned_measured_kept_and_told_apart(start, siglip, tiny_folder, tmp_path, capsys):
    flags = ["--families", tiny_folder, siglip, "--steps", 2, "--pairs", 8, "--seeds", 3]
    flags += ["--output", tmp_path / "kept", "--results", tmp_path / "results"]
    start("families_seeds", *flags)
    said, file = capsys.readouterr().out, tmp_path / "results" / "families_seeds.json"
    first = json.loads(file.read_text())
    assert first["tables"].keys() == {str(tiny_folder), str(siglip)}
    for tables in first["tables"].values():
        assert [list(table) for table in tables] == [["base", "stretched", "long-clip", "debias"]]
        assert all(set(row) == set(PERTURBATIONS) for table in tables for row in table.values())
    configs = [json.loads(f.read_text()) for f in sorted((tmp_path / "kept").glob("*/*/training/config.json"))]
    assert len(configs) == 4
    assert {(c["stretch"], c["recipe"], c["label_smoothing"]) for c in configs} == {
        ("ratio", "debias", 0), ("ratio", "long-clip", 0.1), ("ends", "debias", 0), ("ends", "long-clip", 0),
    }  # fmt: skip
    text = (tmp_path / "results" / "families_seeds.md").read_text()
    assert text in said
    assert "64 tokens, sigmoid loss" in text
    assert "77 tokens, softmax loss" in text
    assert text.count("| debias |") == 4

    # What an interruption leaves: one encoder unmeasured. The others are read, and the table is the same.
    lost = next((tmp_path / "kept").glob("tiny-siglip-*/debias-248-ends-steps2-seed3/numbers-8.json"))
    before = lost.read_text()
    lost.unlink()
    start("families_seeds", *flags)
    again = capsys.readouterr().out
    assert again.count(" minutes") == 2  # the expected time, and that of the one
    assert lost.read_text() == before
    assert json.loads(file.read_text()) == first


@pytest.mark.parametrize(("name", "flag"), [("families_seeds", "--families"), ("siglip_stretch", "--base")])
def test_a_base_that_is_missing_is_one_line(start, name, flag, tmp_path):
    with pytest.raises(SystemExit) as stop:
        start(name, flag, "no/such/base", "--output", tmp_path, "--results", tmp_path)
    assert str(stop.value.code).startswith(f"{name}.py: ")
    assert "no/such/base" in str(stop.value.code)
    assert "\n" not in str(stop.value.code)


def test_a_base_made_anew_is_measured_anew(start, siglip, tmp_path):
    from kept_runs import KeptRuns
    from safetensors.torch import load_file, save_file

    folder = KeptRuns(str(siglip), tmp_path, 8).folder
    assert KeptRuns(str(siglip), tmp_path, 8).folder == folder
    other = save_encoder(KeptRuns(str(siglip), tmp_path, 8).encoder, tmp_path / "tiny-siglip")
    weights = load_file(other / "open_clip_model.safetensors")
    save_file({**weights, "text.positional_embedding": weights["text.positional_embedding"] + 1},
              other / "open_clip_model.safetensors")  # fmt: skip
    assert KeptRuns(str(other), tmp_path, 8).folder != folder


def test_stretches_are_compared_before_and_after_training(start, siglip, tmp_path, capsys):
    flags = ["--base", siglip, "--pairs", 8, "--output", tmp_path / "kept", "--results", tmp_path]
    start("siglip_stretch", *flags, "--steps", 1)
    figures = json.loads((tmp_path / "siglip_stretch.json").read_text())
    assert list(figures["before"]) == ["base", "196 by ratio", "196 by ends", "248 by ends"]
    assert list(figures["after"]) == ["196 by ratio", "196 by ends", "248 by ends"]
    assert all(-1 <= c["lowest"] <= c["mean"] < 1.0001 for c in figures["cosine"].values())
    configs = [json.loads(f.read_text()) for f in (tmp_path / "kept").glob("*/debias-*/training/config.json")]
    assert {(c["context_length"], c["stretch"]) for c in configs} == {(196, "ratio"), (196, "ends"), (248, "ends")}
    said = capsys.readouterr().out
    assert "## After 1 steps of DeBias, one seed" in said
    start("siglip_stretch", *flags, "--steps", 0)
    assert "## After" not in capsys.readouterr().out
