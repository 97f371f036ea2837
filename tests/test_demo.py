import json

import pytest

from debias_diffusion import load_encoder
from debias_diffusion.demo import PERTURBATIONS, demo, measure


def test_the_demo_leaves_what_scripts_rely_on(tmp_path):
    text = demo(tmp_path / "demo", pairs=24, steps=2)
    results = json.loads((tmp_path / "demo" / "results.json").read_text())
    assert list(results) == ["base", "stretched", "long-clip", "debias"]
    for row in results.values():
        assert set(row) == set(PERTURBATIONS)
        for cell in row.values():
            assert cell.keys() == {"t2i_recall@1", "i2t_recall@1"}
            assert all(0 <= value <= 100 for value in cell.values())
    contexts = {name: load_encoder(tmp_path / "demo" / name).context_length for name in results}
    assert contexts == {"base": 77, "stretched": 248, "long-clip": 248, "debias": 248}
    assert (tmp_path / "demo" / "figure.png").stat().st_size > 10_000
    assert "| debias |" in text
    assert "| debias |" in (tmp_path / "demo" / "table.md").read_text()


def test_the_shipped_base_reads_summaries_and_a_few_details():
    row = measure({"base": "miniature:base"}, 200, ["first_only", "remove_first", "short"])["base"]
    recall = {name: cell["t2i_recall@1"] for name, cell in row.items()}
    assert recall["first_only"] > 50
    assert recall["short"] > 50
    assert 15 < recall["remove_first"] < recall["first_only"]


def test_too_few_pairs_are_refused(tmp_path):
    with pytest.raises(ValueError, match="ranking needs 2 or more"):
        demo(tmp_path, pairs=1)
