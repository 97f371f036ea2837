"""What is reported is what the features say: for every perturbation, with pictures missing, and between encoders."""

import dataclasses
import math
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from debias_diffusion import load_encoder
from debias_diffusion.captions.perturb import perturb_captions
from debias_diffusion.data.feature_cache import FeatureCache
from debias_diffusion.data.retrieval_set import Entry, PictureFile, RetrievalSet, build_retrieval_set
from debias_diffusion.data.scene_sets import ScenePicture, scene_retrieval_set
from debias_diffusion.data.scenes import make_scene
from debias_diffusion.encoders.features import image_features, text_features
from debias_diffusion.evaluation.retrieval import Ranks, hits_at, retrieval_metrics, retrieval_ranks
from debias_diffusion.evaluation.runner import (
    RECALLS,
    check_perturbations,
    compare_encoders,
    evaluate_encoder,
    readable_part,
)
from debias_diffusion.evaluation.statistics import bootstrap_interval, paired_test

SIZE = 16


@pytest.fixture(scope="module")
def miniature() -> RetrievalSet:
    return scene_retrieval_set(SIZE)


@pytest.fixture(scope="module")
def several(miniature: RetrievalSet) -> RetrievalSet:
    """Eight pictures with one to three captions each."""
    entries = [Entry(miniature.pictures[i], miniature.captions[2 * i : 2 * i + 1 + i % 3]) for i in range(8)]
    return build_retrieval_set("several", "a protocol", entries)


def expected_ranks(encoder, retrieval_set: RetrievalSet, captions: list[str]) -> Ranks:
    images = image_features(encoder, [picture.open() for picture in retrieval_set.pictures])
    return retrieval_ranks(images, text_features(encoder, captions), torch.tensor(retrieval_set.image_of_caption))


def test_the_miniature_set_is_drawn_the_same_every_time(miniature):
    again = scene_retrieval_set(SIZE)
    assert again == miniature
    assert [p.identity for p in again.pictures] == [p.identity for p in miniature.pictures]
    assert scene_retrieval_set(3).captions == miniature.captions[:3]
    assert scene_retrieval_set(3, seed=1).captions != miniature.captions[:3]
    assert miniature.counts["images"] == miniature.counts["captions"] == SIZE
    assert miniature.short_captions is not None
    assert all(len(s) < len(c) for s, c in zip(miniature.short_captions, miniature.captions, strict=True))
    assert len({p.identity for p in miniature.pictures}) == SIZE
    assert ScenePicture(make_scene(0, "test", 0)).identity == miniature.picture_id(0)
    with pytest.raises(ValueError, match="asked for 0 pairs, expected 1 or more"):
        scene_retrieval_set(0)


@pytest.mark.parametrize("name", ["none", "remove_first", "swap_1_4", "filler_3", "shuffle", "dropout_0.5"])
def test_metrics_are_those_of_the_perturbed_captions(name, tiny, miniature):
    result = evaluate_encoder(tiny, miniature, [name], seed=3)[name]
    ranks = expected_ranks(tiny, miniature, perturb_captions(miniature.captions, name, seed=3))
    assert result.metrics == retrieval_metrics(ranks)
    assert torch.equal(result.ranks.t2i, ranks.t2i)


def test_none_is_always_measured_first_and_drops_are_from_it(tiny, miniature):
    results = evaluate_encoder(tiny, miniature, ["remove_first", "none", "first_only", "first_only"])
    assert list(results) == ["none", "remove_first", "first_only"]
    reference = results["none"].metrics
    for result in results.values():
        for metric in RECALLS:
            points = result.metrics[metric] - reference[metric]
            assert result.drops[metric]["points"] == points
            percent = result.drops[metric]["percent"]
            assert math.isnan(percent) if reference[metric] == 0 else percent == 100 * points / reference[metric]
    assert set(results["none"].drops["t2i_recall@10"].values()) == {0.0}
    row = results["first_only"].to_row()
    assert row["t2i_recall@1"] == results["first_only"].metrics["t2i_recall@1"]
    assert {type(v) for d in row["drops"].values() for v in d.values()} <= {float, type(None)}


def test_short_reads_the_short_captions(tiny, miniature):
    result = evaluate_encoder(tiny, miniature, ["short"])["short"]
    assert torch.equal(result.ranks.t2i, expected_ranks(tiny, miniature, miniature.short_captions).t2i)
    assert result.truncated == 0


def test_truncation_cuts_tokens_and_counts_who_did_not_fit(tiny, miniature):
    results = evaluate_encoder(tiny, miniature, ["truncate_30", "truncate_9999", "first_only"])
    lengths = torch.tensor([len(tiny.tokenizer.encode(caption)) for caption in miniature.captions])
    assert results["none"].truncated == results["truncate_9999"].truncated == int((lengths > 77).sum()) > 0
    assert results["truncate_30"].truncated == int((lengths > 30).sum()) == SIZE
    assert results["first_only"].truncated == 0
    shorter = dataclasses.replace(tiny, tokenizer=tiny.tokenizer.with_context(30))
    assert torch.equal(results["truncate_30"].ranks.t2i, expected_ranks(shorter, miniature, miniature.captions).t2i)
    assert torch.equal(results["truncate_9999"].ranks.t2i, results["none"].ranks.t2i)


@pytest.mark.parametrize("name", ["shuffle", "dropout_0.3"])
def test_random_perturbations_depend_on_the_seed_alone(name, tiny, miniature):
    first, again, other = (evaluate_encoder(tiny, miniature, [name], seed=seed)[name] for seed in (1, 1, 2))
    assert torch.equal(first.ranks.t2i, again.ranks.t2i)
    assert first.intervals == again.intervals
    assert not torch.equal(first.ranks.t2i, other.ranks.t2i)


def test_pictures_are_encoded_once_for_all_perturbations(tiny, miniature):
    seen = []
    hook = tiny.model.visual.register_forward_hook(lambda _, inputs, __: seen.append(len(inputs[0])))
    evaluate_encoder(tiny, miniature, ["remove_first", "shuffle"])
    hook.remove()
    assert sum(seen) == SIZE


def test_captions_of_one_picture_are_resampled_together(tiny, several):
    result = evaluate_encoder(tiny, several, [], seed=5)["none"]
    hits, owner = hits_at(result.ranks.t2i, 1), torch.tensor(several.image_of_caption)
    assert result.intervals["t2i_recall@1"] == bootstrap_interval(hits, groups=owner, seed=5)
    assert result.intervals["t2i_recall@1"] != bootstrap_interval(hits, seed=5)
    assert result.intervals["i2t_recall@5"] == bootstrap_interval(hits_at(result.ranks.i2t, 5), seed=5)


def test_unreadable_pictures_go_with_their_captions_and_change_no_other(tiny, miniature, tmp_path):
    broken = tmp_path / "broken.jpg"
    broken.write_bytes(b"no picture")
    pictures = list(miniature.pictures)
    pictures[5] = pictures[12] = PictureFile(broken)
    damaged = dataclasses.replace(miniature, pictures=pictures)
    for name in ("none", "shuffle", "dropout_0.5"):
        result = evaluate_encoder(tiny, damaged, [name])[name]
        assert sorted(result.unreadable) == [5, 12]
        assert "not a picture that Pillow can read" in result.unreadable[5]
        assert result.dropped == 2
        assert len(result.ranks.t2i) == len(result.ranks.i2t) == SIZE - 2
        part = readable_part(damaged, result.unreadable)
        perturbed = perturb_captions(miniature.captions, name)
        captions = [caption for j, caption in enumerate(perturbed) if j not in (5, 12)]
        assert torch.equal(result.ranks.t2i, expected_ranks(tiny, part, captions).t2i)


@settings(max_examples=25, deadline=None)
@given(st.lists(st.integers(1, 3), min_size=1, max_size=6), st.data())
def test_a_readable_part_keeps_every_pair_of_what_is_left(sizes, data):
    entries = [Entry(PictureFile(Path(__file__).with_name(f"{i}")), [f"{i}-{j}" for j in range(n)], [f"{i}"] * n)
               for i, n in enumerate(sizes)]  # fmt: skip
    whole = RetrievalSet(
        "s", "p", [e.picture for e in entries], [c for e in entries for c in e.captions],
        [i for i, n in enumerate(sizes) for _ in range(n)], [c for e in entries for c in e.short_captions or ()], {},
    )  # fmt: skip
    unreadable = data.draw(st.sets(st.integers(0, len(sizes) - 1), max_size=len(sizes) - 1))
    part = readable_part(whole, unreadable)
    assert len(part.pictures) == len(sizes) - len(unreadable)
    pairs = {(part.pictures[i].path.name, c) for i, c in zip(part.image_of_caption, part.captions, strict=True)}
    assert pairs == {(f"{i}", f"{i}-{j}") for i, n in enumerate(sizes) for j in range(n) if i not in unreadable}
    assert part.short_captions == [caption.split("-")[0] for caption in part.captions]


def test_wrong_requests_are_refused_before_anything_is_encoded(tiny, several):
    tiny.model.visual.register_forward_hook(lambda *_: pytest.fail("a picture was encoded"))
    with pytest.raises(ValueError, match="unknown perturbation 'reverse'; choose one of none, swap_1_K"):
        evaluate_encoder(tiny, several, ["reverse"])
    with pytest.raises(ValueError, match="'short' needs short captions, which several has not"):
        evaluate_encoder(tiny, several, ["short"])
    with pytest.raises(ValueError, match="unknown splitter 'spacy'; splitters: nupunkt"):
        evaluate_encoder(tiny, several, ["none"], splitter="spacy")
    assert [p.name for p in check_perturbations(["filler_2"], [several], "flair")] == ["none", "filler_2"]


def test_encoders_are_compared_on_the_same_queries(tiny, several):
    torch.manual_seed(7)
    other = load_encoder("miniature:random")
    results = {name: evaluate_encoder(e, several, ["shuffle"], seed=2) for name, e in (("a", tiny), ("b", other))}
    del results["b"]["shuffle"]
    rows = compare_encoders(results, seed=2)
    assert [(row["a"], row["b"], row["perturbation"], row["metric"]) for row in rows] == [
        ("a", "b", "none", "t2i_recall@1"),
        ("a", "b", "none", "i2t_recall@1"),
    ]
    first, second = results["a"]["none"].ranks, results["b"]["none"].ranks
    owner = torch.tensor(several.image_of_caption)
    t2i = paired_test(hits_at(first.t2i, 1), hits_at(second.t2i, 1), owner, seed=2)
    i2t = paired_test(hits_at(first.i2t, 1), hits_at(second.i2t, 1), seed=2)
    assert [{k: row[k] for k in t2i} for row in rows] == [t2i, i2t]


def test_encoders_that_saw_other_pictures_are_not_compared(tiny, several):
    one = evaluate_encoder(tiny, several, [])
    other = {"none": dataclasses.replace(one["none"], unreadable={0: "gone"})}
    with pytest.raises(ValueError, match="a and b did not see the same pictures"):
        compare_encoders({"a": one, "b": other})


def test_golden_text_features_come_through_the_path_that_is_evaluated(shared, tmp_path):
    golden = np.load(shared / "vectors" / "longclip_tiny.npz")
    state = {k.removeprefix("sd/"): torch.from_numpy(golden[k]) for k in golden.files if k.startswith("sd/")}
    names = {k: k if k.startswith(("visual.", "logit_scale")) else f"text.{k}" for k in state}
    official = {"epoch": 3, "name": "x_vitb16_openai", "optimizer": {}, "scaler": {}}
    torch.save(state, tmp_path / "longclip.pt")
    torch.save({**official, "state_dict": {names[k]: v for k, v in state.items()}}, tmp_path / "debias.pt")
    theirs = F.normalize(torch.from_numpy(golden["long_features"]), dim=-1)
    for file in ("longclip.pt", "debias.pt"):
        encoder = load_encoder(tmp_path / file)
        ours = FeatureCache(tmp_path / "cache").text_features(encoder, golden["captions"].tolist())
        torch.testing.assert_close(ours.features, theirs, atol=1e-5, rtol=0)
        assert (ours.num_tokens <= 248).tolist() == (golden["long_ids"][:, -1] == 0).tolist()
