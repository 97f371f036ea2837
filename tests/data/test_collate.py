from pathlib import Path

import pytest
import torch
from PIL import Image

from debias_diffusion.captions.augment import RECIPES
from debias_diffusion.captions.sentences import split_sentences
from debias_diffusion.data.collate import PixelValues, StepOrder, TextBranches, TrainingRows, collate_rows
from debias_diffusion.data.pictures import BadPicture
from debias_diffusion.data.scene_sets import ScenePairs
from debias_diffusion.encoders.encoder import MINIATURE_FOLDER
from debias_diffusion.encoders.tokens import PAD_ID, Tokenizer

TOKENIZER = Tokenizer(248, MINIATURE_FOLDER / "bpe.txt.gz")
CAPTION = ScenePairs(1).captions[0]


def branches(recipe, seed=0):
    return TextBranches(TOKENIZER, RECIPES[recipe], "nupunkt", seed)


@pytest.mark.parametrize("recipe", RECIPES)
def test_each_recipe_reads_what_its_row_says(recipe):
    sentences = [TOKENIZER.encode(s)[1:-1] for s in split_sentences(CAPTION)]
    for epoch in range(20):
        views = branches(recipe)(CAPTION, epoch, 0)
        assert views.full == TOKENIZER.encode(CAPTION)
        words = views.augmented[1:-1]
        if recipe == "long-clip":
            assert words == sentences[0]
        elif recipe == "+remove":
            assert words == sum(sentences[1:], [])
        else:
            chosen = [s for s in sentences[1:] if any(words[i : i + len(s)] == s for i in range(len(words)))]
            assert sum(map(len, chosen)) == len(words)
        if recipe == "debias":
            assert 0 <= views.num_prefix <= 248 - len(views.augmented)
        else:
            assert views.num_prefix == 0


def test_views_depend_on_seed_epoch_and_index_alone():
    one = branches("debias")
    assert one(CAPTION, 3, 5) == branches("debias")(CAPTION, 3, 5)
    others = [one(CAPTION, 4, 5), one(CAPTION, 3, 6), branches("debias", seed=1)(CAPTION, 3, 5)]
    assert all(o != one(CAPTION, 3, 5) for o in others)


def test_a_caption_longer_than_the_context_leaves_no_room_for_padding():
    views = branches("debias")("The sky is blue today. " + "A red dog runs along. " * 200, 0, 0)
    assert views.num_prefix <= max(0, 248 - len(views.augmented))


class Broken(ScenePairs):
    def open(self, index, min_side=None):
        if index == 1:
            raise BadPicture(Path("one.png"), "is empty")
        return super().open(index, min_side)


def to_tensor(picture: Image.Image) -> torch.Tensor:
    return torch.full((3, 2, 2), float(picture.size[0]))


def test_an_unreadable_picture_is_left_out_and_named():
    rows = TrainingRows(Broken(3), branches("debias"), PixelValues(Broken(3), to_tensor, 1))
    batch = collate_rows([rows[0, i] for i in range(3)], 248)
    assert batch.keys == ["train/0/0", "train/0/2"]
    assert batch.images.shape == (2, 3, 2, 2)
    assert len(batch.faults) == 1
    assert "one.png" in batch.faults[0]
    ids, num_prefix = batch.texts()
    assert ids.shape[0] == 4
    assert num_prefix[:2].tolist() == [0, 0]
    for row, prefix in zip(ids, num_prefix, strict=True):
        assert row[1 : 1 + prefix].tolist() == [PAD_ID] * int(prefix)
        assert row[1 + prefix] != PAD_ID


def test_a_batch_with_no_readable_picture_is_empty():
    rows = TrainingRows(Broken(3), branches("debias"), PixelValues(Broken(3), to_tensor, 1))
    assert len(collate_rows([rows[0, 1]], 248).images) == 0


def steps(order):
    return [batch for batch in order]


def test_processes_share_each_step_s_batch_and_resuming_goes_on_where_it_stopped():
    whole = steps(StepOrder(103, 12, 20, seed=4))
    assert len(whole) == 20
    for world in (2, 3):
        parts = [steps(StepOrder(103, 12, 20, seed=4, rank=r, world=world)) for r in range(world)]
        assert [sum(step, []) for step in zip(*parts, strict=True)] == whole
    assert steps(StepOrder(103, 12, 20, seed=4, first_step=11)) == whole[11:]


def test_an_epoch_shows_each_row_at_most_once_and_the_next_in_another_order():
    whole = steps(StepOrder(103, 12, 16, seed=0))
    epochs = [[i for batch in whole[k : k + 8] for _, i in batch] for k in (0, 8)]
    assert all(len(set(e)) == 96 for e in epochs)
    assert epochs[0] != epochs[1]
    assert {e for batch in whole[:8] for e, _ in batch} == {0}


@pytest.mark.parametrize(("rows", "batch", "world"), [(10, 12, 1), (100, 12, 5)])
def test_batches_that_cannot_be_made_are_refused(rows, batch, world):
    with pytest.raises(ValueError, match="fewer than one batch|does not divide"):
        StepOrder(rows, batch, 1, seed=0, world=world)
