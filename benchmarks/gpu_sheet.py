"""A sheet of training speed on one GPU: tokens/s, pictures/s, share of the peak and memory for B/16, L/14 and bigG.

    python benchmarks/gpu_sheet.py                 # eight minutes on one H200-class card
    python benchmarks/gpu_sheet.py --minutes 4     # fewer repeats
    python benchmarks/gpu_sheet.py --small --device cpu --output /tmp/sheet.md   # shows that it works, on the miniature

bf16 towers with float32 weights, random weights, real captions of both branches, pictures already on the card. The plain
way (plain_recipe.py) and ours run the same steps; the frozen image tower and chunks are rows of their own. A row that does
not fit in memory says so. Writes results/gpu_sheet.md, which says "not run" until this has run on a card.
"""

import argparse
import gc
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import torch
from plain_recipe import CONTEXT_LENGTH, plain_text, read_captions, text_rows
from plan import Way as Counted
from plan import operations
from torch import Tensor

from debias_diffusion.data.collate import Batch
from debias_diffusion.encoders.checkpoint import load_encoder
from debias_diffusion.encoders.positions import freeze_first_positions
from debias_diffusion.encoders.specs import SPECS
from debias_diffusion.training.cached import cached_features, split_pairs
from debias_diffusion.training.optim import choose_towers, make_optimizer
from debias_diffusion.training.step import LossRule, TwoBranchModel, two_branch_loss

SHEET = Path(__file__).resolve().parent / "results" / "gpu_sheet.md"
NOT_RUN = (
    "Not run: no GPU was at hand. `python benchmarks/gpu_sheet.py` fills this sheet in eight minutes on one card.\n"
)
PEAKS = {"H100": 989, "H200": 989, "A100": 312, "4090": 165, "L40": 181}
"""Dense bf16 TFLOP/s by a part of the card's name; others have no share of peak."""


@dataclass(frozen=True)
class Row:
    """One line of the sheet."""

    encoder: str
    way: str
    batch: int
    chunk: int = 0
    checkpointing: bool = False

    @property
    def is_frozen(self) -> bool:
        return self.way == "frozen"


ROWS = (
    Row("ViT-B-16:random", "plain", 256),
    Row("ViT-B-16:random", "ours", 256),
    Row("ViT-B-16:random", "ours", 4096, chunk=512),
    Row("ViT-B-16:random", "frozen", 256),
    Row("ViT-L-14:random", "plain", 128),
    Row("ViT-L-14:random", "ours", 128),
    Row("ViT-L-14:random", "frozen", 256),
    Row("ViT-bigG-14:random", "plain", 64, checkpointing=True),
    Row("ViT-bigG-14:random", "ours", 64, checkpointing=True),
    Row("ViT-bigG-14:random", "frozen", 128, checkpointing=True),
)
SMALL = tuple(
    Row("miniature:random", way, 16, chunk) for way, chunk in (("plain", 0), ("ours", 0), ("ours", 4), ("frozen", 0))
)


class Job:
    """One row's model on the device and its step."""

    def __init__(self, row: Row, device: str) -> None:
        self.row, self.device = row, device
        torch.manual_seed(0)
        encoder = load_encoder(row.encoder).stretched(CONTEXT_LENGTH, in_place=True)
        clip = encoder.model
        choose_towers(clip, "text" if row.is_frozen else "both")
        freeze_first_positions(clip.text)
        if row.checkpointing:
            clip.set_grad_checkpointing(True)
        side = clip.visual.image_size[0]
        self.model = TwoBranchModel(clip, frozen_images=row.is_frozen).to(device).train()
        self.clip = self.model.clip
        self.optimizer = make_optimizer(self.model.parameters(), 1e-6, 0.01, (0.9, 0.999))
        self.batch: Batch = text_rows(read_captions(row.batch).texts, encoder.tokenizer)
        shape = (row.batch, encoder.model_config["embed_dim"]) if row.is_frozen else (row.batch, 3, side, side)
        self.images = torch.randn(shape)
        if row.is_frozen:
            self.images = torch.nn.functional.normalize(self.images, dim=-1)
        if not row.chunk:
            self.images = self.images.to(device)
        self.words = sum(
            int(b.num_tokens.clamp(max=CONTEXT_LENGTH).sum()) for b in (self.batch.full, self.batch.augmented)
        )
        self.rule = LossRule(0.1, 32 if row.batch > 64 else 8, 64, False, 0.0, block=row.chunk)

    def step(self) -> None:
        """One training step."""
        self.optimizer.zero_grad()
        if self.row.chunk:
            cached = cached_features(
                self.model, split_pairs(self.images, *self.batch.texts(), self.row.chunk), autocast=self._half
            )
            two_branch_loss(cached.image, cached.text, cached.logit_scale, self.rule).total.backward()
            cached.backward(self.model, autocast=self._half)
        else:
            with self._half():
                outputs = self._plain() if self.row.way == "plain" else self.model(self.images, *self.batch.texts())
            two_branch_loss(*outputs, self.rule).total.backward()
        self.optimizer.step()

    def _plain(self) -> tuple[Tensor, Tensor, Tensor]:
        image = torch.nn.functional.normalize(self.clip.visual(self.images).float(), dim=-1)
        return image, plain_text(self.clip, self.batch), self.clip.logit_scale.exp()

    def _half(self) -> torch.autocast:
        return torch.autocast(self.device, torch.bfloat16)


def measure(row: Row, device: str, seconds: float) -> str:
    """The sheet's line of a row."""
    start = f"| {row.encoder.partition(':')[0]} | {_way(row)} | {row.batch} |"
    sync: Callable[[], None] = torch.cuda.synchronize if device == "cuda" else lambda: None
    try:
        if device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        job = Job(row, device)
        job.step()
        sync()
        times: list[float] = []
        until = time.perf_counter() + seconds
        while len(times) < 3 or (time.perf_counter() < until and len(times) < 30):
            begin = time.perf_counter()
            job.step()
            sync()
            times.append(time.perf_counter() - begin)
    except torch.OutOfMemoryError:
        return f"{start} does not fit | | | | |"
    took = median(times)
    spread = f"{took * 1e3:.0f} ({min(times) * 1e3:.0f} to {max(times) * 1e3:.0f})"
    memory = f"{torch.cuda.max_memory_allocated() / 1e9:.1f}" if device == "cuda" else "not measured"
    return f"{start} {spread} | {row.batch / took:,.0f} | {job.words / took:,.0f} | {_share(row, device, took)} | {memory} |"


def _way(row: Row) -> str:
    extra = [f"chunks of {row.chunk}"] * bool(row.chunk) + ["gradient checkpointing"] * row.checkpointing
    return ", ".join([{"frozen": "image tower frozen"}.get(row.way, row.way), *extra])


def _share(row: Row, device: str, seconds: float) -> str:
    peak = next((t for name, t in PEAKS.items() if device == "cuda" and name in torch.cuda.get_device_name()), None)
    if peak is None:
        return "unknown peak"
    spec = SPECS[row.encoder.partition(":")[0]]
    done = operations(
        spec.architecture, Counted("", row.is_frozen, row.way == "plain", row.checkpointing or bool(row.chunk))
    )
    return f"{done * row.batch / seconds / 1e12 / peak:.0%}"


def main() -> None:
    """Prints and writes the sheet; without a GPU it says "not run" and leaves the sheet as it is."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--minutes", type=float, default=8.0, help="of the whole sheet, model building included (default: 8)"
    )
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"), help="cpu is for --small alone")
    parser.add_argument("--small", action="store_true", help="the miniature's towers")
    parser.add_argument(
        "--output", type=Path, default=SHEET, help="the sheet (default: results/gpu_sheet.md beside this)"
    )
    arguments = parser.parse_args()
    if arguments.device == "cpu" and not arguments.small:
        parser.error("--device cpu would take hours; add --small")
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    if arguments.device == "cuda" and not torch.cuda.is_available():
        if not arguments.output.exists():
            arguments.output.write_text(NOT_RUN)
        print("not run: no CUDA device here")
        return
    rows = SMALL if arguments.small else ROWS
    until = time.perf_counter() + 60 * arguments.minutes
    name = torch.cuda.get_device_name() if arguments.device == "cuda" else "cpu"
    lines = [
        f"{name}, bf16, torch {torch.__version__}", "",
        "| encoder | way | pairs | ms a step | pairs/s | words' tokens/s | share of peak | memory, GB |", "|" + "---|" * 8,
    ]  # fmt: skip
    for i, row in enumerate(rows):
        left = (until - time.perf_counter()) / (len(rows) - i)  # half of it builds the towers
        lines.append(
            measure(row, arguments.device, max(0.0, left / 3))
            if left > 0
            else f"| {row.encoder} | {_way(row)} | {row.batch} | no time left | | | | |"
        )
        print(lines[-1], flush=True)
        gc.collect()
        if arguments.device == "cuda":
            torch.cuda.empty_cache()
    arguments.output.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
