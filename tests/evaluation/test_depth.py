"""The depth curve tells an encoder that reads its first tokens only from one that reads them all."""

import json
from dataclasses import dataclass
from itertools import combinations_with_replacement
from pathlib import Path

import pytest
import torch
from PIL import Image
from torch import Tensor

from debias_diffusion.captions.perturb import perturb_captions
from debias_diffusion.data.retrieval_set import RetrievalSet
from debias_diffusion.data.scene_sets import ScenePairs
from debias_diffusion.encoders.checkpoint import load_encoder
from debias_diffusion.encoders.encoder import Encoder
from debias_diffusion.encoders.features import image_features, text_features
from debias_diffusion.evaluation.depth import BIN_TOKENS, DepthBin, DepthCurve, position_sensitivity
from debias_diffusion.evaluation.retrieval import recall_at, retrieval_ranks
from debias_diffusion.evaluation.sentence_tokens import sentence_starts

WORDS = ("red", "blue", "green", "yellow", "circle", "square", "star", "triangle", "small", "large")
COMMON = ["There is nothing else to be seen in this picture, not near it or above it or below it, nothing at all."] * 4


@dataclass(frozen=True)
class Blank:
    """A picture told from others by its name alone."""

    name: str

    @property
    def identity(self) -> str:
        return self.name

    def open(self) -> Image.Image:
        return Image.new("RGB", (8, 8), self.name)


def made(captions: list[str], image_of_caption: list[int] | None = None) -> RetrievalSet:
    owners = list(range(len(captions))) if image_of_caption is None else image_of_caption
    pictures = [Blank(f"#{number:06x}") for number in range(len(set(owners)))]
    return RetrievalSet("made", "for this test", pictures, captions, owners, None, {})


def telling_apart(num_captions: int, common: list[str]) -> list[str]:
    """Captions whose first sentence alone tells the picture, whatever the order of its words."""
    pairs = list(combinations_with_replacement(WORDS, 2))[:num_captions]
    return [" ".join([f"A {a} thing on {b}.", *common]) for a, b in pairs]


def averaging(num_positions: int, context_length: int = 248) -> Encoder:
    """An encoder whose feature is the plain mean of the tokens at its first positions, in whatever order.

    One layer at work: queries are constant, keys tell whether a position is among the first, values are the tokens.
    Tokens are as many 1 as -1, and the mark of a position sums to zero, so that layer norm scales all of them alike.
    """
    torch.manual_seed(0)
    encoder = load_encoder("miniature:random").stretched(context_length)
    text = encoder.model.text
    text.transformer.resblocks = text.transformer.resblocks[:1]
    block, width = text.transformer.resblocks[0], text.width
    with torch.no_grad():
        text.token_embedding.weight.zero_()
        text.token_embedding.weight[:, 2:] = (
            torch.rand(text.vocab_size, width - 2).argsort(1).lt(width // 2 - 1) * 2.0 - 1
        )
        text.positional_embedding.zero_()
        text.positional_embedding[:, :2] = torch.tensor([-10.0, 10.0])
        text.positional_embedding[:num_positions, :2] = torch.tensor([10.0, -10.0])
        block.attn.in_proj_weight.zero_()
        block.attn.in_proj_bias.zero_()
        block.attn.in_proj_bias[:width] = 10.0
        block.attn.in_proj_weight[width : 2 * width, 0] = 1.0
        block.attn.in_proj_weight[2 * width + 2 :, 2:] = torch.eye(width - 2)
        block.attn.out_proj.weight.copy_(100 * torch.eye(width))
        block.mlp.c_proj.weight.zero_()
        block.mlp.c_proj.bias.zero_()
    return encoder


def test_an_encoder_of_the_first_ten_positions_loses_the_picture_with_depth() -> None:
    encoder, captions = averaging(10), telling_apart(30, COMMON)
    curve = position_sensitivity(
        encoder, made(captions), max_places=4, image_features=text_features(encoder, captions), min_queries=10
    )
    assert [place.t2i_recall for place in curve.places] == [100.0, *[pytest.approx(100 / 30)] * 3]
    assert [place.num_shorter for place in curve.places] == [0, 0, 0, 0]
    assert (curve.best, curve.worst) == (curve.bins[0], curve.bins[1])
    assert curve.worst_recall == pytest.approx(100 / 30)
    assert curve.spread == pytest.approx(100 - 100 / 30)
    assert all(depth.unmoved_recall == 100 for depth in curve.bins)


def test_an_encoder_that_averages_all_positions_is_untouched_by_depth() -> None:
    encoder, captions = averaging(248), telling_apart(30, COMMON)
    curve = position_sensitivity(
        encoder, made(captions), max_places=5, image_features=text_features(encoder, captions), min_queries=10
    )
    assert {place.t2i_recall for place in curve.places} == {100.0}
    assert len(curve.bins) > 2
    assert (curve.worst_recall, curve.spread) == (100.0, 0.0)
    assert curve.worst == curve.best == curve.bins[0], "the shallowest of equals"


@pytest.mark.parametrize("splitter", ["nupunkt", "flair", "long-clip"])
def test_equals_the_perturbations_place_by_place(splitter: str) -> None:
    encoder = averaging(40)
    captions = [*ScenePairs(20, seed=1).captions, "A red circle. A blue star is here.", "A green square."]
    owners = [number // 2 for number in range(len(captions))]  # two captions a picture
    images = text_features(encoder, captions[::2])
    curve = position_sensitivity(
        encoder, made(captions, owners), max_places=3, image_features=images, splitter=splitter, min_queries=1
    )
    hits: list[tuple[int, bool, bool]] = []  # depth, hit, hit unmoved
    first: Tensor | None = None
    for place in (1, 2, 3):
        moved = perturb_captions(captions, f"move_first_to_{place}", splitter=splitter)
        ranks = retrieval_ranks(images, text_features(encoder, moved), torch.tensor(owners)).t2i
        first = ranks if first is None else first
        assert curve.places[place - 1].t2i_recall == pytest.approx(recall_at(ranks, 1))
        starts = [sentence_starts(encoder.tokenizer, caption, splitter) for caption in moved]
        has_place = [len(start) >= place for start in starts]
        assert curve.places[place - 1].num_shorter == has_place.count(False)
        hits += [
            (start[place - 1], rank == 0, unmoved == 0)
            for start, rank, unmoved, has in zip(starts, ranks.tolist(), first.tolist(), has_place, strict=True)
            if has
        ]
    expected = []
    for start in range(0, 247, BIN_TOKENS):
        if inside := [hit for hit in hits if start <= hit[0] < start + BIN_TOKENS]:
            shares = [100 * sum(hit[column] for hit in inside) / len(inside) for column in (1, 2)]
            expected.append((max(start, 1), min(start + BIN_TOKENS, 247), len(inside), *map(pytest.approx, shares)))
    assert [(b.start, b.stop, b.num_queries, b.t2i_recall, b.unmoved_recall) for b in curve.bins] == expected
    assert curve.num_cut == 0


def test_a_sentence_behind_the_context_is_in_no_bin() -> None:
    encoder = averaging(77, context_length=77)
    captions = telling_apart(12, ["It is plain."] * 20)
    curve = position_sensitivity(
        encoder, made(captions), max_places=20, image_features=text_features(encoder, captions), min_queries=1
    )
    depths = [
        sentence_starts(encoder.tokenizer, moved)[place - 1]
        for place in range(1, 21)
        for moved in perturb_captions(captions, f"move_first_to_{place}")
    ]
    assert curve.num_cut == sum(depth >= 76 for depth in depths) > 0
    assert sum(depth.num_queries for depth in curve.bins) + curve.num_cut == len(depths)
    assert curve.bins[-1].stop <= 76
    assert curve.places[-1].t2i_recall == pytest.approx(100 / 12), "cut away, so all captions read alike"


def test_one_sentence_and_no_sentence_keep_their_place() -> None:
    encoder = averaging(248)
    captions = ["A red thing.", "", "A blue thing. It is small."]
    curve = position_sensitivity(encoder, made(captions), max_places=3, image_features=text_features(encoder, captions))
    assert [place.num_shorter for place in curve.places] == [0, 2, 3]
    assert [depth.num_queries for depth in curve.bins] == [4], "three in front, one moved"
    assert curve.places[2].t2i_recall == 100.0
    assert (curve.worst, curve.best, curve.worst_recall, curve.spread) == (None, None, None, None)


def test_only_bins_of_enough_queries_are_named() -> None:
    bins = (DepthBin(1, 25, 100, 80.0, 80.0), DepthBin(25, 50, 100, 60.0, 81.0), DepthBin(50, 75, 99, 10.0, 82.0))
    curve = DepthCurve((), bins, min_queries=100, num_cut=0)
    assert (curve.best, curve.worst, curve.spread) == (bins[0], bins[1], 20.0)


def test_pictures_are_encoded_where_no_features_are_given() -> None:
    encoder, captions = averaging(248), telling_apart(6, COMMON[:1])
    pairs = made(captions)
    given = image_features(encoder, [picture.open() for picture in pairs.pictures])
    assert position_sensitivity(encoder, pairs) == position_sensitivity(encoder, pairs, image_features=given)


def test_numbers_that_do_not_fit_are_refused() -> None:
    encoder, captions = averaging(248), telling_apart(3, [])
    with pytest.raises(ValueError, match="max_places is 0, min_queries 100"):
        position_sensitivity(encoder, made(captions), max_places=0)
    with pytest.raises(ValueError, match="image_features have 2 rows, made has 3 pictures"):
        position_sensitivity(encoder, made(captions), image_features=text_features(encoder, captions[:2]))


def test_depths_are_those_of_the_rewritten_captions_on_real_text(shared: Path) -> None:
    lines = (shared / "data" / "long_captions" / "iiw_human.jsonl").read_text().splitlines()[::30]
    captions = [json.loads(line)["caption"] for line in lines]
    encoder = averaging(10)
    curve = position_sensitivity(
        encoder, made(captions), max_places=6, image_features=torch.eye(len(captions), 128), min_queries=1
    )
    depths = []
    for place in range(1, 7):
        starts = [
            sentence_starts(encoder.tokenizer, text) for text in perturb_captions(captions, f"move_first_to_{place}")
        ]
        depths += [start[place - 1] for start in starts if len(start) >= place]
    counts = [sum(b.start <= depth < b.stop for depth in depths) for b in curve.bins]
    assert [b.num_queries for b in curve.bins] == counts
    assert sum(counts) + curve.num_cut == len(depths)
