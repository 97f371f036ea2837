"""Image features of a run whose image tower is frozen: computed once, kept on disk, then read instead of pictures."""

import logging
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from accelerate import Accelerator
from torch import Tensor

from debias_diffusion.config import TrainConfig
from debias_diffusion.data.collate import PairSource, PixelValues, epoch_order
from debias_diffusion.data.feature_cache import FeatureCache
from debias_diffusion.data.pictures import BadPicture
from debias_diffusion.data.retrieval_set import Picture
from debias_diffusion.encoders.encoder import Encoder

CHUNK = 2048
"""Pictures whose features share a file: an interrupted run has lost no more than these."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class FrozenImages:
    """Ready features of rows; a call with row i's index gives (dim,), or raises `BadPicture` where it has none."""

    features: Tensor
    place: Sequence[int]
    """Row of `features` for each row of the data, -1 where there is none."""
    faults: dict[int, str]

    def __call__(self, index: int) -> Tensor:
        place = self.place[index]
        if place < 0:
            raise BadPicture(Path("picture"), self.faults.get(index, "it is not among the rows of this run"))
        return self.features[place]


def visited_rows(num_rows: int, batch_size: int, steps: int, seed: int, block: int = 1) -> Sequence[int]:
    """The rows that `steps` steps read: all of them from one epoch on, before that those of the first steps, in order.

    In that order a longer run finds what a shorter one has kept.
    """
    if steps >= num_rows // batch_size:
        return range(num_rows)
    return epoch_order(num_rows, seed, 0, block)[: steps * batch_size].tolist()


def image_side(
    encoder: Encoder,
    pairs: PairSource,
    config: TrainConfig,
    steps: int,
    cache: FeatureCache,
    accelerator: Accelerator,
) -> Callable[[int], Tensor]:
    """What the image side of a run reads of row i: its pixel values, or its features where the image tower is frozen."""
    if config.train_towers != "text":
        size = encoder.preprocess_config["size"]
        side = max(size) if isinstance(size, tuple | list) else size
        return PixelValues(pairs, encoder.preprocess, side)
    rows = visited_rows(len(pairs), config.batch_size, steps, config.seed, config.shuffle_block)
    return frozen_images(encoder, pairs, rows, cache, accelerator, config.workers)


def frozen_images(
    encoder: Encoder,
    pairs: PairSource,
    rows: Sequence[int],
    cache: FeatureCache,
    accelerator: Accelerator,
    workers: int,
) -> FrozenImages:
    """The features of `rows`, from the cache or computed, the processes sharing the work; every process must call it.

    Features are float32, so they take 4 * dim bytes a row in each process (3.8 GB for 1.2 million at 768). Raises
    ValueError where no picture can be read.
    """
    chunks = [_Pictures(pairs, rows[start : start + CHUNK]) for start in range(0, len(rows), CHUNK)]
    rank, world, show = accelerator.process_index, accelerator.num_processes, accelerator.is_main_process
    tower = encoder.model.visual.to(accelerator.device)
    was_training = tower.training
    tower.eval()
    how = {"progress": show, "workers": workers, "may_be_empty": True}
    for chunk in chunks[rank::world] if world > 1 and cache.folder else ():
        cache.image_features(encoder, chunk, **how)
    accelerator.wait_for_everyone()
    features = torch.empty(len(rows), encoder.model_config["embed_dim"])
    place, faults, count = array("q", [-1]) * len(pairs), {}, 0
    for chunk in chunks:
        found = cache.image_features(encoder, chunk, **how)
        features[count : count + len(found.features)] = found.features
        for at, row in enumerate(chunk.rows):
            if at in found.unreadable:
                faults[row] = found.unreadable[at]
            else:
                place[row], count = count, count + 1
    tower.train(was_training).to("cpu")
    if not count:
        raise ValueError(
            f"none of the {len(rows):,} pictures can be read; the first: {faults[rows[0]]}; check --data and --image-root"
        )
    return FrozenImages(features[:count], place, faults)


class _Pictures(Sequence[Picture]):
    """The pictures of some rows, made when asked for."""

    def __init__(self, pairs: PairSource, rows: Sequence[int]) -> None:
        self.pairs, self.rows = pairs, rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index):  # type: ignore[no-untyped-def]
        if isinstance(index, slice):
            return [self.pairs.picture(row) for row in self.rows[index]]
        return self.pairs.picture(self.rows[index])
