"""Rows to batches: each caption's two text branches, drawn from (seed, epoch, index) alone."""

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import Dataset, Sampler

from debias_diffusion.captions.augment import Recipe, augment, caption_rng, draw_prefix
from debias_diffusion.captions.sentences import join_sentences, split_sentences
from debias_diffusion.data.pictures import BadPicture
from debias_diffusion.data.retrieval_set import Picture
from debias_diffusion.data.streamed import StreamedShards
from debias_diffusion.encoders.tokens import CLIP_LAYOUT, TokenBatch, Tokenizer, TokenLayout, collate_tokens


@runtime_checkable
class PairSource(Protocol):
    """What training needs of a data set: row i's key, caption and picture."""

    @property
    def keys(self) -> Sequence[str]: ...
    @property
    def captions(self) -> Sequence[str]: ...
    def __len__(self) -> int: ...
    def open(self, index: int, min_side: int | None = None) -> Image.Image: ...
    def picture(self, index: int) -> Picture: ...


@dataclass(frozen=True)
class TextViews:
    """A caption's two branches as ids cut nowhere, and the pads in front of the augmented one."""

    full: list[int]
    augmented: list[int]
    num_prefix: int


@dataclass(frozen=True)
class Row:
    """One sample; `image` is None where its picture could not be read, and `fault` then says why."""

    key: str
    image: Tensor | None
    views: TextViews
    fault: str = ""


@dataclass(frozen=True)
class Batch:
    """The readable rows of one step: `images`, both branches, and what was left out. Images are pixel values (batch, 3,
    height, width), or features (batch, dim) where the image tower is frozen."""

    images: Tensor
    full: TokenBatch
    augmented: TokenBatch
    keys: list[str]
    faults: list[str]

    def texts(self) -> tuple[Tensor, Tensor]:
        """Both branches stacked, full first: ids (2 * batch, length) and pads in front (2 * batch,)."""
        length = max(self.full.input_ids.shape[1], self.augmented.input_ids.shape[1])
        rows = [
            torch.nn.functional.pad(t.input_ids, (0, length - t.input_ids.shape[1]), value=t.pad_id)
            for t in (self.full, self.augmented)
        ]
        return torch.cat(rows), torch.cat([self.full.num_prefix, self.augmented.num_prefix])

    def pin_memory(self) -> "Batch":
        return Batch(self.images.pin_memory(), self.full, self.augmented, self.keys, self.faults)


@dataclass(frozen=True)
class TextBranches:
    """Makes both branches of a caption (paper: text augmentation and token padding)."""

    tokenizer: Tokenizer
    recipe: Recipe
    splitter: str
    seed: int

    def __call__(self, caption: str, epoch: int, index: int) -> TextViews:
        rng = caption_rng(self.seed, epoch, index)
        sentences = split_sentences(caption, self.splitter)
        text = join_sentences(augment(sentences, self.recipe, rng), self.splitter)
        augmented = self.tokenizer.encode(text)
        context_length = self.tokenizer.context_length
        num_tokens = min(len(augmented), context_length)
        num_prefix = draw_prefix(num_tokens, context_length, rng) if self.recipe.token_padding else 0
        return TextViews(self.tokenizer.encode(caption), augmented, num_prefix)


class TrainingRows(Dataset[Row]):
    """Rows by (epoch, index): a worker needs no state, so any number of them sees the same samples.

    `image` gives what the image side reads of row i, or raises `BadPicture`.
    """

    def __init__(self, pairs: PairSource, branches: TextBranches, image: Callable[[int], Tensor]) -> None:
        self.pairs, self.branches, self.image = pairs, branches, image

    def __getitem__(self, position: tuple[int, int]) -> Row:
        epoch, index = position
        key = self.pairs.keys[index]
        views = self.branches(self.pairs.captions[index], epoch, index)
        try:
            return Row(key, self.image(index), views)
        except BadPicture as fault:
            return Row(key, None, views, str(fault))

    def __getitems__(self, positions: list[tuple[int, int]]) -> list[Row]:
        """The rows of one batch, their pictures read at once where they are streamed."""
        if isinstance(self.image, PixelValues) and isinstance(self.image.pairs, StreamedShards):
            self.image.pairs.fetch([index for _, index in positions])
        return [self[position] for position in positions]


@dataclass(frozen=True)
class PixelValues:
    """Row i's picture, decoded and preprocessed; a large JPEG at a scale that leaves twice `side`, what `preprocess`
    resizes to: its own filter averages over what the decoder leaves out."""

    pairs: PairSource
    preprocess: Callable[[Image.Image], Tensor]
    side: int

    def __call__(self, index: int) -> Tensor:
        return self.preprocess(self.pairs.open(index, 2 * self.side))


def collate_rows(rows: list[Row], context_length: int, layout: TokenLayout = CLIP_LAYOUT) -> Batch:
    """One batch of the rows whose picture could be read; nothing takes the place of the others."""
    good = [row for row in rows if row.image is not None]
    images = [row.image for row in good if row.image is not None]
    return Batch(
        images=torch.stack(images) if images else torch.empty(0),
        full=collate_tokens([r.views.full for r in good], [0] * len(good), context_length, layout),
        augmented=collate_tokens(
            [r.views.augmented for r in good], [r.views.num_prefix for r in good], context_length, layout
        ),
        keys=[row.key for row in good],
        faults=[f"{row.key}: {row.fault}" for row in rows if row.image is None],
    )


def keys_digest(pairs: PairSource) -> str:
    """A hash of the rows' keys in order: rows are trained on by index, so other rows or another order is other data."""
    hasher = hashlib.blake2b(digest_size=16)
    for key in pairs.keys:
        hasher.update(f"{len(key)}:{key}".encode("utf-8", "replace"))
    return hasher.hexdigest()


def epoch_order(num_rows: int, seed: int, epoch: int, block: int = 1) -> Tensor:
    """The rows of an epoch as they are trained on, (num_rows,), each once; it follows from the arguments alone.

    Blocks of `block` consecutive rows (the last one's next is the first) stay together, as rows that are read from afar
    should; where they begin is drawn anew for every epoch. The rows that fill no block come last.
    """
    generator = torch.Generator().manual_seed(seed * 1_000_003 + epoch)
    order = torch.randperm(num_rows // block, generator=generator)
    if block == 1:
        return order
    first = int(torch.randint(num_rows, (), generator=generator))
    blocks = order[:, None] * block + torch.arange(block)
    return (torch.cat([blocks.flatten(), torch.arange(len(order) * block, num_rows)]) + first) % num_rows


class StepOrder(Sampler[list[tuple[int, int]]]):
    """This process's rows of each step, as lists of (epoch, index), from `first_step` on.

    The order of an epoch depends on (seed, epoch, block) alone, a step's global batch on the step alone, and each process
    takes its consecutive share of it: runs on other numbers of processes, or resumed ones, see the same batches. The
    last rows of an epoch that fill no batch are left out, as published.
    """

    def __init__(
        self,
        num_rows: int,
        batch_size: int,
        steps: int,
        *,
        seed: int,
        block: int = 1,
        first_step: int = 0,
        rank: int = 0,
        world: int = 1,
    ) -> None:
        if batch_size % world:
            raise ValueError(
                f"a batch of {batch_size} pairs does not divide among {world} processes; choose a multiple"
            )
        if num_rows < batch_size:
            raise ValueError(
                f"the data holds {num_rows} pairs, fewer than one batch of {batch_size}; lower --batch-size"
            )
        self.num_rows, self.batch_size, self.steps, self.seed, self.block = num_rows, batch_size, steps, seed, block
        self.first_step, self.rank, self.world = first_step, rank, world

    def __len__(self) -> int:
        return max(0, self.steps - self.first_step)

    def __iter__(self) -> Iterator[list[tuple[int, int]]]:
        per_epoch, local = self.num_rows // self.batch_size, self.batch_size // self.world
        order, order_epoch = torch.empty(0), -1
        for step in range(self.first_step, self.steps):
            epoch, number = divmod(step, per_epoch)
            if epoch != order_epoch:
                order, order_epoch = epoch_order(self.num_rows, self.seed, epoch, self.block), epoch
            start = number * self.batch_size + self.rank * local
            yield [(epoch, int(i)) for i in order[start : start + local]]
