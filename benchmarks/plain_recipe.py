"""The published recipe run plainly, as Long-CLIP's code runs it: what our own path is measured against and equal to.

Both texts as full rows of 248 tokens, one after the other through open_clip's own text tower; the picture decoded at its
full size; every feature from the graph of the whole batch. The loss is the same function, so both ways end in the same
number.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import cycle, islice
from pathlib import Path

import torch
import torch.nn.functional as F
from open_clip.model import CustomTextCLIP
from torch import Tensor

from debias_diffusion.captions.augment import RECIPES
from debias_diffusion.data.collate import Batch, Row, TextBranches, collate_rows
from debias_diffusion.data.scene_sets import ScenePairs
from debias_diffusion.data.text_files import json_field, json_lines
from debias_diffusion.encoders.tokens import TokenBatch, Tokenizer

CONTEXT_LENGTH = 248
SHARED = Path(__file__).resolve().parents[2] / "shared" / "data"


@dataclass(frozen=True)
class Captions:
    """Captions and where they come from."""

    source: str
    texts: list[str]


def read_captions(count: int) -> Captions:
    """`count` long captions, evenly from ImageInWords' beside the checkout, or the miniature world's where it is absent."""
    files = [SHARED / "long_captions" / name for name in ("iiw_human.jsonl", "iiw_pali5b.jsonl")]
    if not all(file.is_file() for file in files):
        return Captions("the miniature world's", list(ScenePairs(count, split="test").captions))
    found = [json_field(row, "caption", str, where) for file in files for where, row in json_lines(file)]
    return Captions(
        "ImageInWords (human and PaLI)", [found[i * len(found) // count % len(found)] for i in range(count)]
    )


def text_rows(captions: Sequence[str], tokenizer: Tokenizer, images: Tensor | None = None) -> Batch:
    """One batch of both branches, drawn as training draws them, with pictures where they are given."""
    branches = TextBranches(tokenizer, RECIPES["debias"], "nupunkt", seed=0)
    views = [branches(caption, 0, i) for i, caption in enumerate(captions)]
    blank = torch.zeros(1)
    rows = [Row(str(i), blank if images is None else images[i], v) for i, v in enumerate(views)]
    return collate_rows(rows, tokenizer.context_length)


def exact_batch(count: int, length: int, vocabulary: int) -> tuple[Tensor, Tensor]:
    """(2 * count, length) ids of rows without any padding, and no pads in front: there is nothing to save."""
    ids = torch.randint(1, vocabulary - 2, (2 * count, length), generator=torch.Generator().manual_seed(0))
    ids[:, 0], ids[:, -1] = vocabulary - 2, vocabulary - 1
    return ids, torch.zeros(2 * count, dtype=torch.long)


def full_rows(tokens: TokenBatch, context_length: int) -> Tensor:
    """The ids (batch, context_length), padding included."""
    return F.pad(tokens.input_ids, (0, context_length - tokens.input_ids.shape[1]))


def plain_text(clip: CustomTextCLIP, batch: Batch) -> Tensor:
    """Unit-norm text features (2 * batch, dim), full branch first: two passes over full rows."""
    return torch.cat(list(plain_branches(clip, batch)))


def plain_branches(clip: CustomTextCLIP, batch: Batch) -> Iterator[Tensor]:
    """The same branch by branch, each (batch, dim), computed when it is asked for."""
    length, device = clip.text.context_length, clip.logit_scale.device
    for branch in (batch.full, batch.augmented):
        yield F.normalize(clip.text(full_rows(branch, length).to(device)).float(), dim=-1)


def real_pictures(count: int) -> list[Path] | None:
    """Photographs beside the checkout, or None where there are none."""
    files = sorted((SHARED / "coco_ccby" / "images").glob("*.jpg"))
    return list(islice(cycle(files), count)) if files else None


def make_large_pictures(folder: Path, count: int, size: tuple[int, int]) -> list[Path]:
    """`count` JPEGs of `size`, enlarged from photographs (the miniature world's pictures where there are none)."""
    from PIL import Image

    photographs = real_pictures(count)
    scenes = ScenePairs(count)
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for i in range(count):
        picture = Image.open(photographs[i]).convert("RGB") if photographs else scenes.open(i)
        path = folder / f"{i:04d}.jpg"
        picture.resize(size, Image.Resampling.LANCZOS).save(path, quality=90)
        path.with_suffix(".txt").write_text(scenes.captions[i])
        paths.append(path)
    return paths
