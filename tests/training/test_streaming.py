"""Training from a stream: the same rows at every step on any number of processes, and the same weights as from a folder."""

import dataclasses
import io
import json
import multiprocessing
import tarfile
from collections import Counter
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from PIL import Image
from safetensors.torch import load_file
from torch import Tensor
from torch.utils.data import DataLoader

from debias_diffusion.captions.augment import RECIPES
from debias_diffusion.config import TrainConfig
from debias_diffusion.data.collate import PixelValues, Row, StepOrder, TextBranches, TrainingRows, epoch_order
from debias_diffusion.data.pack import pack
from debias_diffusion.data.shards import FORMAT, INDEX_FILE, picture_digest, shard_name
from debias_diffusion.data.streamed_index import open_streamed
from debias_diffusion.encoders.checkpoint import BPE_FILE, WEIGHTS_FILE
from debias_diffusion.encoders.encoder import MINIATURE_FOLDER
from debias_diffusion.encoders.tokens import Tokenizer
from debias_diffusion.training.frozen import visited_rows
from debias_diffusion.training.loop import train
from debias_diffusion.training.signals import prepare_worker

SIZES = (3001, 7, 1999, 2500, 1, 492, 2000)
BATCH, BLOCK, SEED, STEPS = 48, 8, 5, 214  # 208 steps an epoch


@pytest.fixture(scope="module")
def url(tmp_path_factory) -> str:
    """Seven unequal shards and 10,000 rows in all, each with a picture of its own, laid out as packing does."""
    folder = tmp_path_factory.mktemp("shards")
    buffer = io.BytesIO()
    Image.new("RGB", (8, 8), "teal").save(buffer, "JPEG")
    row = 0
    for number, size in enumerate(SIZES):
        stem, rows = folder / shard_name(number), []
        with tarfile.open(stem.with_suffix(".tar"), "w", format=tarfile.USTAR_FORMAT) as tar:
            for _ in range(size):
                picture = buffer.getvalue() + f"row {row}".encode()  # what follows a picture's end is passed over
                info = tarfile.TarInfo(f"{row:08d}.jpg")
                info.size = len(picture)
                rows.append([row, f"{row}", f"Caption {row}.", tar.offset + 512, len(picture), picture_digest(picture)])
                tar.addfile(info, io.BytesIO(picture))
                row += 1
        index = {"bytes": stem.with_suffix(".tar").stat().st_size, "rows": rows}
        stem.with_suffix(".json").write_text(json.dumps(index))
    about = {"format": FORMAT, "shards": len(SIZES), "rows": row, "left_out": {}}
    (folder / INDEX_FILE).write_text(json.dumps(about))
    return f"file://{folder}"


def pixels(image: Image.Image) -> Tensor:
    return torch.tensor(image.size)


def keys_of(rows: list[Row]) -> list[int]:
    """What the rows are known by; a picture whose bytes are not its row's would be a fault."""
    assert not [row.fault for row in rows if row.fault]
    return [int(row.key) for row in rows]


def rank_main(url: str, folder: Path, rank: int, world: int, workers: int, first: int) -> None:
    """Reads steps `first` to STEPS as one of `world` processes; the first process writes down what all have read."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet-{world}", rank=rank, world_size=world)
    shards = open_streamed(url, folder / f"cache-{rank}")
    order = StepOrder(len(shards), BATCH, STEPS, seed=SEED, block=BLOCK, first_step=first, rank=rank, world=world)
    tokenizer = Tokenizer(248, MINIATURE_FOLDER / BPE_FILE)
    branches = TextBranches(tokenizer, RECIPES["debias"], "long-clip", SEED)
    rows = TrainingRows(shards, branches, PixelValues(shards, pixels, 8))
    loader = DataLoader(
        rows, batch_sampler=order, collate_fn=keys_of, num_workers=workers, worker_init_fn=prepare_worker
    )
    shares: list[list[list[int]]] = [[] for _ in range(world)]
    dist.all_gather_object(shares, list(loader))
    if rank == 0:
        steps = [[key for share in step for key in share] for step in zip(*shares, strict=True)]
        (folder / f"steps-{world}.json").write_text(json.dumps(steps))
    dist.destroy_process_group()


def steps_of(url: str, folder: Path, world: int, workers: int, first: int = 0) -> list[list[int]]:
    """The rows of every step, read by `world` processes that have found one another."""
    fork = multiprocessing.get_context("fork")
    ranks = [fork.Process(target=rank_main, args=(url, folder, rank, world, workers, first)) for rank in range(world)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(500)
    codes = [process.exitcode for process in ranks]
    for process in ranks:
        process.kill()
    assert codes == [0] * world
    steps: list[list[int]] = json.loads((folder / f"steps-{world}.json").read_text())
    return steps


def test_every_row_comes_once_an_epoch_and_another_number_of_processes_goes_on_with_the_same_steps(url, tmp_path):
    steps = steps_of(url, tmp_path, world=3, workers=2)
    assert [len(step) for step in steps] == [BATCH] * STEPS
    counts = Counter(key for step in steps[:208] for key in step)
    assert set(counts.values()) == {1}
    waiting = epoch_order(10_000, SEED, 0, BLOCK)[208 * BATCH :].tolist()  # they fill no batch
    assert len(waiting) == 16
    assert sorted([*counts, *waiting]) == list(range(10_000))
    resumed = steps_of(url, tmp_path, world=2, workers=1, first=150)
    assert resumed == steps[150:]


@pytest.mark.parametrize(("rows", "batch", "steps", "block"), [(50, 8, 3, 4), (53, 6, 5, 7), (16, 8, 1, 16)])
def test_the_visited_rows_of_a_short_run_are_those_that_its_steps_read(rows, batch, steps, block):
    read = [index for step in StepOrder(rows, batch, steps, seed=3, block=block) for _, index in step]
    assert list(visited_rows(rows, batch, steps, 3, block)) == read


def test_a_stream_trains_to_the_bits_that_the_folder_trains_to(config: TrainConfig, pair_folder, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    pack(pair_folder, tmp_path / "packed", short_side=64, workers=1)
    local = dataclasses.replace(config, data=str(tmp_path / "packed"), max_steps=2, shuffle_block=4)
    streamed = dataclasses.replace(
        local, data=f"file://{tmp_path}/packed", output=str(tmp_path / "streamed"), workers=1
    )
    one, two = (load_file(train(c) / WEIGHTS_FILE) for c in (local, streamed))
    assert one.keys() == two.keys()
    assert all(torch.equal(one[name], two[name]) for name in one)
    single = dataclasses.replace(local, shuffle_block=1, output=str(tmp_path / "single"))
    other = load_file(train(single) / WEIGHTS_FILE)
    assert not all(torch.equal(one[name], other[name]) for name in one)


def test_impossible_blocks_are_refused():
    assert any("--shuffle-block is 9" in p for p in TrainConfig(batch_size=8, shuffle_block=9).problems())
    assert any("--shuffle-block is 0" in p for p in TrainConfig(shuffle_block=0).problems())
    assert not any("--data" in p for p in TrainConfig(data="hf://datasets/owner/name/folder").problems())
