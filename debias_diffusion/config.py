"""One frozen dataclass per job, its presets, and its JSON round trip. Nothing here imports torch."""

import dataclasses
import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from debias_diffusion.captions.augment import RECIPES
from debias_diffusion.captions.sentences import SPLITTERS
from debias_diffusion.encoders.specs import KEEP, SPECS, split_source


class RunStopped(RuntimeError):
    """A job ended before its time, in good order: its message says why and what to do."""


@dataclass(frozen=True)
class TrainConfig:
    """A training run. Defaults are the published DeBias-CLIP recipe; where it is silent, the field says whose choice it is."""

    output: str = ""
    """Folder of the run: config.json, metrics.jsonl, TensorBoard files, checkpoints/, and at the end encoder/."""
    data: str = ""
    """ShareGPT4V's .json, a .jsonl manifest (image, caption), a folder of pictures with .txt beside them, a folder that
    `debias-diffusion pack` wrote, the url of such a folder or of WebDataset shards (hf://datasets/OWNER/NAME/FOLDER), which
    are then streamed, or "scenes" for the miniature world."""
    image_root: str = ""
    """Folder that the picture paths of `data` start from; empty means the folder `data` lies in."""
    held_out: int = 1000
    """First records of ShareGPT4V's json that are never trained on."""
    encoder: str = "ViT-L-14:openai"
    """Start: ROW:TAG, ROW:random, ROW:PATH, a saved encoder folder, or a checkpoint file."""
    tokenizer: str = ""
    """Folder of a tokenizer that open_clip does not carry (SigLIP's); empty means beside the weights, or the hub's cache."""
    recipe: str = "debias"
    """What the short branch reads; one row of the paper's ablation: long-clip, +remove, +sample, debias."""
    context_length: int = 248
    """Positions of the trained text tower; the base's table is stretched to it."""
    keep_positions: int = KEEP
    """First position rows that stay the base's own."""
    stretch: Literal["", "ratio", "ends"] = ""
    """How the position table grows: Long-CLIP's "ratio", or "ends", which keeps the last row; empty means what suits the
    tower: "ends" where the last position is pooled."""
    splitter: str = "nupunkt"
    """Sentence splitter: nupunkt (our choice; the paper's is unknown), or flair / long-clip, the rules of earlier work."""
    short_weight: float = 0.1
    """Weight of the short branch's loss; the full branch has the rest."""
    pca_dim: int = 32
    """Principal components of the image features that the short branch is matched with; 0 leaves the features whole."""
    pca_batch: int = 64
    """Pictures over which the components are computed (unknown in the paper; 64 a GPU there); 0 means the whole batch.
    Groups are cut from the global batch, so the loss does not depend on the number of processes."""
    pca_renormalise: bool = False
    """Whether reconstructed features are normalised again (unknown in the paper; Long-CLIP does not)."""
    label_smoothing: float = 0.0
    """Label smoothing of both losses (the paper lists none; Long-CLIP has 0.1); the sigmoid loss has none."""
    epochs: int = 3
    batch_size: int = 256
    """Pairs in one contrastive batch, over all processes."""
    max_steps: int = 0
    """Ends the run, and its schedule, after so many steps; 0 means all epochs."""
    learning_rate: float = 1e-6
    text_learning_rate: float = 0.0
    """Of the text tower; 0 means `learning_rate`."""
    image_learning_rate: float = 0.0
    """Of the image tower; 0 means `learning_rate`."""
    weight_decay: float = 0.01
    """Of all trained weights, norms and biases included, as published."""
    betas: tuple[float, float] = (0.9, 0.999)
    warmup_steps: int = 200
    """Steps of linear warm-up before the cosine to zero."""
    max_logit_scale: float = 100.0
    """The learned logit scale is clamped to at most this (open_clip's habit); the sigmoid loss's is not."""
    precision: Literal["fp32", "bf16", "fp16"] = "fp32"
    """Of the forward pass; weights and optimiser stay in float32. The paper used fp16 on GPUs."""
    train_towers: Literal["both", "text", "image"] = "both"
    """With "text" the image tower is frozen: its features are computed once, in float32, and no picture is decoded again.
    SDXL uses the text tower alone."""
    frozen_text_layers: int = 0
    """First layers of the text tower, and its token embedding, that stay the base's; 0 freezes none."""
    lora_rank: int = 0
    """Rank of low-rank adapters that train in place of the text tower's weights, merged at the end; 0 means whole weights."""
    lora_alpha: int = 0
    """Scale of the adapters, divided by their rank; 0 means the rank."""
    ema_decay: float = 0.0
    """Decay of a moving average of the trained weights, which is then what is saved as the encoder; 0 means no average."""
    feature_cache: str = ""
    """Folder that features of a frozen image tower are kept in; empty means the one that `evaluate` uses."""
    chunk_size: int = 0
    """Pairs that go through the towers at once, on each process: the gradients are the whole batch's, the memory one
    chunk's, and each chunk is computed twice (gradient caching). 0 takes the batch whole."""
    gradient_checkpointing: bool = False
    """Recomputes block activations in the backward pass: less memory, a third more time."""
    seed: int = 0
    """Order of samples and augmentation depend on this, the epoch and the sample's index alone."""
    shuffle_block: int = 1
    """Consecutive rows that stay together when the order is drawn; streamed shards read them at once. 1 shuffles row by row,
    more makes neighbours share a batch."""
    workers: int = 4
    """Processes that read pictures, for each training process."""
    log_every: int = 10
    save_every: int = 500
    """Steps between checkpoints; one is also saved at the end and on SIGTERM or Ctrl-C."""
    keep_checkpoints: int = 2
    """Newest checkpoints that are kept."""
    resume: bool = False
    """Goes on from the newest checkpoint in `output`."""

    def problems(self, *, rehearsing: bool = False) -> list[str]:
        """Impossible settings, one line each, found without loading anything; a dry run, `rehearsing`, needs no output."""
        return [text for wrong, text in self._rules(rehearsing) if wrong]

    def _pca_pictures(self, pca_batch: int) -> int:
        """Pictures in each group of a batch that components are computed over."""
        return self.batch_size // (max(1, round(self.batch_size / pca_batch)) if pca_batch > 0 else 1)

    def _pca_advice(self, local: int) -> str:
        """Which of the two is the limit where `local` pictures are too few, and values that fit."""
        dim = local // 2 if local > 2 else 0
        if self.batch_size <= self.pca_dim + 1:
            both = "--batch-size and --pca-batch" if 0 < self.pca_batch <= self.pca_dim + 1 else "--batch-size"
            return f"--batch-size is the limit: lower --pca-dim (--pca-dim {dim} fits), or raise {both} above {self.pca_dim + 1}"
        twice = 2 * self.pca_dim
        enough = twice if self._pca_pictures(twice) > self.pca_dim + 1 else self.batch_size
        return (
            f"--pca-batch is the limit: raise it (--pca-batch {enough} fits), or lower --pca-dim (--pca-dim {dim} fits)"
        )

    def _rules(self, rehearsing: bool) -> list[tuple[bool, str]]:
        local = self._pca_pictures(self.pca_batch)
        numbers = {k: v for k, v in dataclasses.asdict(self).items() if isinstance(v, float)}
        odd = [f"--{k.replace('_', '-')} {v}" for k, v in numbers.items() if not math.isfinite(v)]
        row = split_source(self.encoder)
        sigmoid = row is not None and SPECS[row[0]].family.loss == "sigmoid"
        return [
            (not self.output and (self.resume or not rehearsing), "--output is missing: name the folder of the run"),
            (not self.data, "--data is missing: a .json, a .jsonl, a folder, a url, or scenes"),
            (self.recipe not in RECIPES, f"--recipe {self.recipe!r} is unknown; recipes: {', '.join(RECIPES)}"),
            (self.splitter not in SPLITTERS, f"--splitter {self.splitter!r} is unknown; splitters: {', '.join(SPLITTERS)}"),
            (not 0 <= self.short_weight <= 1, f"--short-weight is {self.short_weight}; expected 0 to 1"),
            (not 0 <= self.label_smoothing < 1, f"--label-smoothing is {self.label_smoothing}; expected 0 to below 1"),
            (sigmoid and self.label_smoothing > 0, "--label-smoothing is for the softmax loss; this row has the sigmoid loss"),
            (self.batch_size < 2, f"--batch-size is {self.batch_size}; a contrastive batch needs 2 pairs or more"),
            (self.pca_dim < 0 or self.pca_batch < 0, "--pca-dim and --pca-batch must not be negative"),
            (
                0 < local <= self.pca_dim + 1 and self.pca_dim > 0,
                f"--pca-dim is {self.pca_dim} but its batch holds {local} pictures, and {self._pca_advice(local)}",
            ),
            (
                row is not None and self.context_length < SPECS[row[0]].context_length,
                f"--context-length {self.context_length} is shorter than the base's; it can only be stretched",
            ),
            (bool(odd), f"not a finite number: {', '.join(odd)}"),
            (not 0 <= self.keep_positions <= 60, f"--keep-positions is {self.keep_positions}; expected 0 to 60"),
            (not 0 <= self.seed < 2**40, f"--seed is {self.seed}; expected 0 to below 2^40"),
            (self.learning_rate > 1, f"--learning-rate is {self.learning_rate}; expected 1 or less"),
            (not (0 <= self.text_learning_rate <= 1 and 0 <= self.image_learning_rate <= 1),
             "--text-learning-rate and --image-learning-rate must be 0 (--learning-rate) to 1"),
            (min(self.frozen_text_layers, self.lora_rank, self.lora_alpha) < 0,
             "--frozen-text-layers, --lora-rank and --lora-alpha must not be negative"),
            (self.lora_alpha > 0 and not self.lora_rank, "--lora-alpha without --lora-rank scales nothing; give both"),
            (self.lora_rank > 0 and self.train_towers == "image",
             "--lora-rank adapts the text tower, which --train-towers image freezes; give one of them"),
            (not 0 <= self.ema_decay < 1, f"--ema-decay is {self.ema_decay}; expected 0 (none) to below 1, such as 0.999"),
            (self.max_logit_scale < 1, f"--max-logit-scale is {self.max_logit_scale}; expected 1 or more"),
            (self.epochs < 1 and self.max_steps < 1, "nothing to do: --epochs and --max-steps are both below 1"),
            (min(self.learning_rate, self.weight_decay, self.warmup_steps, self.max_steps, self.workers, self.chunk_size) < 0,
             "--learning-rate, --weight-decay, --warmup-steps, --max-steps, --workers and --chunk-size must not be negative"),
            (min(self.log_every, self.save_every, self.keep_checkpoints) < 1,
             "--log-every, --save-every and --keep-checkpoints must be 1 or more"),
            (not 1 <= self.shuffle_block <= max(1, self.batch_size),
             f"--shuffle-block is {self.shuffle_block}; expected 1 to --batch-size, {self.batch_size}"),
            (self.data not in ("", "scenes") and "://" not in self.data and not Path(self.data).exists(),
             f"--data: no data at {self.data!r}"),
            (bool(self.tokenizer) and not Path(self.tokenizer).is_dir(), f"--tokenizer {self.tokenizer!r} is no folder"),
            (bool(self.image_root) and not Path(self.image_root).is_dir(), f"--image-root {self.image_root!r} is no folder"),
        ]  # fmt: skip

    def to_json(self) -> str:
        """The config as JSON text, every field named."""
        return json.dumps(dataclasses.asdict(self), indent=2) + "\n"

    @staticmethod
    def from_json(text: str) -> "TrainConfig":
        """The config a run was started with; an unknown field is an error."""
        try:
            values: dict[str, Any] = json.loads(text)
            return TrainConfig(**{**values, "betas": tuple(values["betas"])})
        except (TypeError, KeyError, ValueError) as error:
            raise ValueError(
                f"the run's config.json cannot be read ({error}); start the run anew in another folder"
            ) from error


LONG_CLIP = {"recipe": "long-clip", "short_weight": 0.5, "label_smoothing": 0.1}
"""Long-CLIP's own loss: both branches alike, the first sentence as the short text, label smoothing."""

_MINIATURE = TrainConfig(
    data="scenes",
    encoder="miniature:base",
    batch_size=64,
    learning_rate=5e-4,
    warmup_steps=30,
    epochs=1,
    max_steps=240,
    workers=0,
)

_MINIATURE_SIGLIP = dataclasses.replace(_MINIATURE, encoder="miniature-siglip:base")

PRESETS: dict[str, TrainConfig] = {
    "debias-b16": TrainConfig(encoder="ViT-B-16:openai"),
    "debias-l14": TrainConfig(encoder="ViT-L-14:openai"),
    "debias-bigg14": TrainConfig(
        encoder="ViT-bigG-14:laion2b_s39b_b160k", gradient_checkpointing=True, precision="bf16"
    ),
    "long-clip": TrainConfig(encoder="ViT-B-16:openai", recipe="long-clip"),
    "+remove": TrainConfig(encoder="ViT-B-16:openai", recipe="+remove"),
    "+sample": TrainConfig(encoder="ViT-B-16:openai", recipe="+sample"),
    "debias": TrainConfig(encoder="ViT-B-16:openai", recipe="debias"),
    "long-clip-published": TrainConfig(encoder="ViT-B-16:openai", **LONG_CLIP),  # type: ignore[arg-type]
    "miniature-debias": _MINIATURE,
    "miniature-long-clip": dataclasses.replace(_MINIATURE, **LONG_CLIP),  # type: ignore[arg-type]
    "miniature-siglip-debias": _MINIATURE_SIGLIP,
    "miniature-siglip-long-clip": dataclasses.replace(
        _MINIATURE_SIGLIP,
        **{**LONG_CLIP, "label_smoothing": 0.0},  # type: ignore[arg-type]
    ),
}
"""Named runs: three sizes of the published recipe; the paper's four ablation rows on ViT-B/16, differing in the short
text alone; Long-CLIP with its own published loss; and the miniature's two, for its CLIP and for its SigLIP, whose sigmoid
loss knows no label smoothing."""
