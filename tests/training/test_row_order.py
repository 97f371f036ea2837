"""Rows of packed shards through `DataLoader` workers of many processes: none twice, none lost, the same after a resume."""

import io
import json
import tarfile
from collections import Counter
from pathlib import Path

import pytest
from PIL import Image
from torch.utils.data import DataLoader, Dataset

from debias_diffusion.data.collate import StepOrder
from debias_diffusion.data.shards import FORMAT, INDEX_FILE, SETTINGS_FILE, Shards, picture_digest, shard_name

SIZES = (3001, 7, 1999, 2500, 1, 492, 2000)
WORLD, WORKERS, BATCH, SEED = 3, 2, 48, 5


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Seven unequal shards of one small picture each and 10,000 rows in all, laid out as `debias-diffusion pack` does."""
    folder = tmp_path_factory.mktemp("shards")
    buffer = io.BytesIO()
    Image.new("RGB", (8, 8), "teal").save(buffer, "JPEG")
    picture, row = buffer.getvalue(), 0
    for number, size in enumerate(SIZES):
        stem, rows = folder / shard_name(number), []
        with tarfile.open(stem.with_suffix(".tar"), "w", format=tarfile.USTAR_FORMAT) as tar:
            info = tarfile.TarInfo("picture.jpg")
            info.size = len(picture)
            tar.addfile(info, io.BytesIO(picture))
        for _ in range(size):
            rows.append([row, f"key {row}", f"Caption {row}.", 512, len(picture), picture_digest(picture)])
            row += 1
        index = {"bytes": stem.with_suffix(".tar").stat().st_size, "rows": rows}
        stem.with_suffix(".json").write_text(json.dumps(index))
    about = {"format": FORMAT, "shards": len(SIZES), "rows": row, "left_out": {}}
    (folder / INDEX_FILE).write_text(json.dumps(about))
    (folder / SETTINGS_FILE).write_text("{}")
    return folder


class Keys(Dataset[tuple[int, str, str]]):
    """What a row is known by, read from the shards by the worker; one in a hundred pictures is opened as well."""

    def __init__(self, shards: Shards) -> None:
        self.shards = shards

    def __getitem__(self, position: tuple[int, int]) -> tuple[int, str, str]:
        epoch, index = position
        if index % 100 == 0:
            assert self.shards.open(index).size == (8, 8)
        return epoch, self.shards.keys[index], self.shards.captions[index]


def steps_of(shards, steps, *, first_step=0, world=WORLD, workers=WORKERS):
    """The rows of each step, as each of `world` processes reads them."""
    ranks = []
    for rank in range(world):
        order = StepOrder(len(shards), BATCH, steps, seed=SEED, first_step=first_step, rank=rank, world=world)
        ranks.append(list(DataLoader(Keys(shards), batch_sampler=order, collate_fn=list, num_workers=workers)))
    return [[row for share in step for row in share] for step in zip(*ranks, strict=True)]


def test_every_row_comes_once_an_epoch_and_a_resumed_run_sees_the_same_steps(folder):
    shards = Shards.read(folder)
    assert len(shards) == 10_000
    per_epoch = len(shards) // BATCH
    steps = steps_of(shards, 2 * per_epoch)
    assert {len(step) for step in steps} == {BATCH}
    for epoch in range(2):
        rows = [row for step in steps[epoch * per_epoch : (epoch + 1) * per_epoch] for row in step]
        assert {e for e, _, _ in rows} == {epoch}
        counts = Counter(key for _, key, _ in rows)
        assert max(counts.values()) == 1
        assert len(counts) == per_epoch * BATCH == 9984  # the last rows fill no batch and wait for the next epoch
        assert all(caption == f"Caption {key.split()[1]}." for _, key, caption in rows)
    missing = [
        {f"key {i}" for i in range(10_000)} - {k for s in steps[a : a + per_epoch] for _, k, _ in s}
        for a in (0, per_epoch)
    ]
    assert len(missing[0]) == len(missing[1]) == 16
    assert missing[0] != missing[1]
    first = per_epoch - 3  # in the first epoch's last steps, on other numbers of processes and workers
    for world, workers in ((3, 2), (1, 0), (2, 1)):
        resumed = steps_of(shards, per_epoch + 4, first_step=first, world=world, workers=workers)
        assert resumed == steps[first : per_epoch + 4]
