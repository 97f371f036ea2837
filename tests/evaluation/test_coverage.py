import math

import numpy as np
import pytest

from debias_diffusion.data.scene_sets import ScenePairs
from debias_diffusion.encoders.encoder import MINIATURE_FOLDER
from debias_diffusion.encoders.features import image_features, text_features
from debias_diffusion.encoders.tokens import Tokenizer
from debias_diffusion.evaluation.coverage import (
    SentenceCoverage,
    compare_coverage,
    coverage_of_features,
    coverage_rows,
    mean_interval,
    sentence_coverage,
    split_pieces,
)
from debias_diffusion.evaluation.fidelity_report import depth_figures, write_report

PAIRS = ScenePairs(6, split="coverage")
PICTURES = [PAIRS.open(i) for i in range(6)]
TOKENIZER = Tokenizer(248, MINIATURE_FOLDER / "bpe.txt.gz")


def test_each_sentence_meets_the_picture_and_the_others_as_the_formula_says(tiny):
    prompt = "A red star in the top left. In the centre right a tiny blue ring."
    own, *others = PICTURES
    found = sentence_coverage(tiny, own, prompt, others)
    assert [row.sentence for row in found] == ["A red star in the top left.", "In the centre right a tiny blue ring."]
    assert [row.depth for row in found] == [10, 19]
    cosines = text_features(tiny, [row.sentence for row in found]) @ image_features(tiny, PICTURES).T
    for row, (mine, *rest) in zip(found, cosines.tolist(), strict=True):
        assert row.cosine == pytest.approx(mine, abs=1e-5)
        assert row.margin == pytest.approx(mine - sum(rest) / len(rest), abs=1e-5)
        assert row.won == sum(mine > other for other in rest) / len(rest)
    alone = sentence_coverage(tiny, own, prompt)
    assert [(row.margin, row.won) for row in alone] == [(None, None)] * 2
    assert sentence_coverage(tiny, own, " ") == []
    assert sentence_coverage(tiny, own, "A cat.", num_tokens=len)[0].depth == 6


def test_margins_and_wins_even_out_over_all_pictures(tiny):
    prompt = "A red star in the top left."
    each = []
    for number, picture in enumerate(PICTURES):
        others = [other for i, other in enumerate(PICTURES) if i != number]
        each += sentence_coverage(tiny, picture, prompt, others)
    assert sum(row.margin for row in each) == pytest.approx(0, abs=1e-5)
    assert sum(row.won for row in each) == pytest.approx(len(each) / 2)
    assert len({row.cosine for row in each}) > 1


def test_a_picture_among_its_likes_wins_half(tiny):
    (row,) = coverage_of_features(tiny, np.zeros((4, 32), np.float32), "A red star.")
    assert (row.cosine, row.margin, row.won) == (0, 0, 0.5)


def test_a_long_sentence_is_judged_in_pieces_that_fit(tiny):
    long = "there is a small red star and " * 30 + "nothing else."
    pieces = split_pieces(tiny.tokenizer, long, 77)
    assert " ".join(pieces) == long
    lengths = [len(tiny.tokenizer.encode(piece)) for piece in pieces]
    assert len(pieces) == math.ceil((len(tiny.tokenizer.encode(long)) - 2) / 75)
    assert max(lengths) <= 77
    (row,) = sentence_coverage(tiny, PICTURES[0], long)
    cosines = (text_features(tiny, pieces) @ image_features(tiny, PICTURES[:1]).T)[:, 0].numpy()
    weights = np.array(lengths) - 2
    assert row.cosine == pytest.approx(float((weights * cosines).sum() / weights.sum()), abs=1e-5)
    # what stands in the last piece is read
    (other,) = sentence_coverage(tiny, PICTURES[0], long.replace("nothing else", "a blue ring"))
    assert abs(other.cosine - row.cosine) > 1e-4
    assert split_pieces(TOKENIZER, "", 77) == []
    assert split_pieces(TOKENIZER, "q" * 200 + " star", 77) == ["q" * 200, "star"]


def test_rows_are_means_by_depth_in_hundredths():
    judged = [(0, SentenceCoverage("a", 20, 0.3, 0.1, 1.0)), (1, SentenceCoverage("b", 25, 0.1, -0.1, 0.5)),
              (1, SentenceCoverage("c", 90, 0.2, 0.0, 0.0))]  # fmt: skip
    rows = {(row["first"], row["last"]): row for row in coverage_rows(judged)}
    assert list(rows) == [(1, 25), (78, 110), (1, 77), (78, 248), (1, 248)]
    first = rows[1, 25]
    assert (first["sentences"], first["prompts"], first["depth"]) == (2, 2, 22.5)
    values = {name: value["value"] for name, value in first["measures"].items()}
    assert values == pytest.approx({"cosine": 20, "margin": 0, "won": 75})
    assert (first["measures"]["won"]["low"], first["measures"]["won"]["high"]) == (50, 100)
    alone = coverage_rows([(0, SentenceCoverage("a", 20, 0.3))])
    assert alone[0]["measures"].keys() == {"cosine"}


def test_intervals_are_those_of_whole_groups():
    generator = np.random.default_rng(0)
    values, groups = generator.normal(3.0, 1.0, 300), np.arange(300)
    single = mean_interval(values, groups)
    expected = 1.96 * values.std() / math.sqrt(300)
    assert single["value"] == pytest.approx(values.mean())
    assert single["high"] - single["low"] == pytest.approx(2 * expected, rel=0.1)
    many = mean_interval(np.repeat(values, 9), np.repeat(groups, 9))
    assert many["high"] - many["low"] == pytest.approx(2 * expected, rel=0.1)


def test_differences_are_of_the_same_sentences():
    a = [(i, SentenceCoverage(f"s{i}", 30 + 60 * (i % 2), 0.2, 0.01 * i, 0.5)) for i in range(8)]
    b = [(i, SentenceCoverage(f"s{i}", 30 + 60 * (i % 2), 0.2, 0.01 * i + 0.05 * (i % 2), 0.5)) for i in range(8)]
    rows = {(r["first"], r["last"], r["measure"]): r for r in compare_coverage({"a": a, "b": b})}
    assert rows[78, 248, "margin"]["difference"] == pytest.approx(5)
    assert rows[78, 248, "margin"]["low"] == pytest.approx(5)
    assert rows[1, 77, "margin"]["difference"] == rows[1, 248, "cosine"]["difference"] == 0
    with pytest.raises(ValueError, match="a and b were not judged on the same sentences"):
        compare_coverage({"a": a, "b": b[::-1]})


def test_coverage_has_a_report_of_its_own(tmp_path):
    judged = [(i, SentenceCoverage(f"s{i}", 10 + 12 * (i % 12), 0.2, 0.001 * i, 0.5)) for i in range(24)]
    sets = {"stock": {"rows": coverage_rows(judged)}}
    text = write_report("24 prompts", [], {"kind": "coverage", "sets": sets, "comparisons": []}, tmp_path)
    assert "margin over other prompts' pictures" in text.lower()
    assert "chance" not in text
    assert {"margin.png", "won.png", "table.md"} <= {path.name for path in tmp_path.iterdir()}
    alone = {"stock": {"rows": coverage_rows([(0, SentenceCoverage("a", 20, 0.3))])}}
    assert depth_figures("coverage", alone) == {}
    assert "Cosine x 100" in write_report("1", [], {"kind": "coverage", "sets": alone, "comparisons": []}, tmp_path)
