"""One run between its steps: the model, its optimiser, the data in order, and what is kept of them."""

import dataclasses
import logging
import math
from collections.abc import Callable
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DynamoBackend, gather_object
from torch import Tensor
from torch.utils.data import DataLoader

from debias_diffusion.captions.augment import RECIPES
from debias_diffusion.config import TrainConfig
from debias_diffusion.data.collate import (
    Batch,
    PairSource,
    PixelValues,
    StepOrder,
    TextBranches,
    TrainingRows,
    collate_rows,
    keys_digest,
)
from debias_diffusion.data.feature_cache import DEFAULT_FOLDER, FeatureCache
from debias_diffusion.encoders.checkpoint import load_encoder, save_encoder
from debias_diffusion.encoders.encoder import Encoder
from debias_diffusion.encoders.positions import freeze_first_positions, thaw_positions
from debias_diffusion.encoders.text_forward import why_not_packed
from debias_diffusion.training.cached import CachedFeatures, cached_features, split_pairs
from debias_diffusion.training.checkpoints import load_checkpoint, refuse_other_data, save_checkpoint
from debias_diffusion.training.endings import Interrupted, NonFiniteLoss, nothing_read
from debias_diffusion.training.frozen import frozen_images, visited_rows
from debias_diffusion.training.memory import release_freed_memory
from debias_diffusion.training.optim import choose_towers, learning_rate_at, make_optimizer
from debias_diffusion.training.progress import FaultLog, Progress, start_line
from debias_diffusion.training.signals import StopSignals, prepare_worker
from debias_diffusion.training.step import LossRule, StepLoss, TwoBranchModel, two_branch_loss

logger = logging.getLogger(__name__)


class Run:
    """Everything one run holds between steps."""

    def __init__(self, config: TrainConfig, accelerator: Accelerator, pairs: PairSource) -> None:
        self.config, self.accelerator, self.pairs, self.step = config, accelerator, pairs, 0
        torch.manual_seed(config.seed)  # for ROW:random only: nothing else here is drawn from a global stream
        per_epoch = len(pairs) // config.batch_size
        self.total_steps = config.max_steps or per_epoch * config.epochs
        self._order(0)  # refuses data too small for a batch before anything heavy is loaded
        self.encoder = load_encoder(config.encoder).stretched(
            config.context_length, config.keep_positions, in_place=True
        )
        clip = self.encoder.model
        choose_towers(clip, config.train_towers)
        freeze_first_positions(clip.text, config.keep_positions)
        if config.gradient_checkpointing:
            clip.set_grad_checkpointing(True)
        self.images = self._images()
        optimizer = make_optimizer(clip.parameters(), config.learning_rate, config.weight_decay, config.betas)
        model = TwoBranchModel(clip, frozen_images=config.train_towers == "text")
        self.model, self.optimizer = accelerator.prepare(model, optimizer)
        self.rule = LossRule(
            config.short_weight, config.pca_dim, config.pca_batch, config.pca_renormalise, config.label_smoothing,
            block=config.chunk_size,
        )  # fmt: skip
        self.faults = FaultLog([])

    def _images(self) -> Callable[[int], Tensor]:
        """What the image side reads of a row."""
        config = self.config
        if config.train_towers != "text":
            size = self.encoder.preprocess_config["size"]
            side = max(size) if isinstance(size, tuple | list) else size
            return PixelValues(self.pairs, self.encoder.preprocess, side)
        rows = visited_rows(len(self.pairs), config.batch_size, self.total_steps, config.seed)
        cache = FeatureCache(Path(config.feature_cache) if config.feature_cache else DEFAULT_FOLDER)
        return frozen_images(self.encoder, self.pairs, rows, cache, self.accelerator, config.workers)

    def describe(self) -> str:
        """One line that says what is trained on what."""
        clip, accelerator = self.encoder.model, self.accelerator
        compiled = accelerator.state.dynamo_plugin.backend != DynamoBackend.NO and why_not_packed(clip.text) is None
        return start_line(
            self.config, weights=sum(p.numel() for p in clip.parameters()),
            trained=sum(p.numel() for p in clip.parameters() if p.requires_grad), pairs=len(self.pairs),
            steps=(self.step, self.total_steps), device=accelerator.device.type, processes=accelerator.num_processes,
            compiled=compiled,
        )  # fmt: skip

    def restore(self, checkpoint: Path) -> None:
        """Goes back to a checkpoint."""
        run = load_checkpoint(self.accelerator, checkpoint)
        now = {"pairs": len(self.pairs), "total_steps": self.total_steps, "keys": self._keys}
        refuse_other_data(checkpoint, run, now)
        self.step = run["step"]
        self.faults = FaultLog(run["faults"])
        logger.info("resumed at step %d from %s", self.step, checkpoint)

    def go(self, stop: StopSignals) -> None:
        """Trains to the last step, or until `stop` asks for an end."""
        config, folder = self.config, Path(self.config.output)
        title = f"{config.recipe} from {self.encoder.name}"
        progress = Progress(folder, self.total_steps, self.step, is_main=self.accelerator.is_main_process, title=title)
        try:
            self.model.train()
            saved, seen = self.step, 0
            for batch in self._loader():
                loss = self._step(batch)
                self.step += 1
                progress.step(loss.num_pairs)
                seen += loss.num_pairs
                if not seen and self.step == self.total_steps:
                    raise nothing_read(self.faults)
                stopping = self._any(stop.requested)
                if self.step % config.log_every == 0 or self.step in (1, self.total_steps):
                    progress.record(self.step, self._values(loss))
                    release_freed_memory()
                if stopping or self.step % config.save_every == 0 or self.step == self.total_steps:
                    self._save(folder)
                    saved = self.step
                if stopping and self.step < self.total_steps:
                    raise Interrupted(f"stopped at step {saved} of {self.total_steps}; go on with --resume")
        finally:
            progress.close()
        faults = self._all_faults()
        if faults:
            logger.warning("%d pictures could not be read and were left out", len(faults))

    def export(self, folder: Path) -> Path:
        """Writes the encoder as it is now."""
        clip = self.encoder.model
        thaw_positions(clip.text)
        history = {
            **self.encoder.history,
            "training": dataclasses.asdict(self.config)
            | {"output": "", "feature_cache": "", "steps": self.step, "pairs": len(self.pairs)},
            "unreadable_pictures": len(self._all_faults()),
        }
        encoder: Encoder = dataclasses.replace(
            self.encoder, name=self.config.recipe, model=clip.eval(), history=history
        )
        if self.accelerator.is_main_process:
            save_encoder(encoder, folder)
        self.accelerator.wait_for_everyone()
        return folder

    def _order(self, first_step: int) -> StepOrder:
        config, accelerator = self.config, self.accelerator
        return StepOrder(
            len(self.pairs), config.batch_size, self.total_steps, seed=config.seed, first_step=first_step,
            rank=accelerator.process_index, world=accelerator.num_processes,
        )  # fmt: skip

    def _loader(self) -> "DataLoader[Any]":
        config = self.config
        branches = TextBranches(self.encoder.tokenizer, RECIPES[config.recipe], config.splitter, config.seed)
        return DataLoader(
            TrainingRows(self.pairs, branches, self.images),
            batch_sampler=self._order(self.step),
            collate_fn=partial(
                collate_rows, context_length=config.context_length, layout=self.encoder.tokenizer.layout
            ),
            num_workers=config.workers,
            worker_init_fn=prepare_worker,
            pin_memory=self.accelerator.device.type == "cuda",
        )

    def _step(self, batch: Batch) -> StepLoss:
        config = self.config
        self.faults.add(batch.faults)
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate_at(self.step, config.learning_rate, config.warmup_steps, self.total_steps)
        cached, (image, text, logit_scale) = self._features(batch)
        loss = two_branch_loss(image, text, logit_scale, self.rule)
        if not loss.num_pairs:
            logger.warning("no picture of step %d could be read; the step changes nothing", self.step)
            return loss
        if self._any(not bool(torch.isfinite(loss.total))):
            raise NonFiniteLoss(
                f"the loss is {float(loss.total)} at step {self.step}; samples here: {', '.join(batch.keys)}; "
                "the last checkpoint is untouched; try a lower --learning-rate or fp32"
            )
        self.optimizer.zero_grad()
        self.accelerator.backward(loss.total)
        if cached:
            cached.backward(
                self.model,
                autocast=self.accelerator.autocast,
                no_sync=partial(self.accelerator.no_sync, self.model),
            )
        self.optimizer.step()
        with torch.no_grad():
            self._logit_scale.clamp_(0, math.log(config.max_logit_scale))
        return loss

    def _features(self, batch: Batch) -> tuple[CachedFeatures | None, tuple[Tensor, Tensor, Tensor]]:
        input_ids, num_prefix = batch.texts()
        if self.config.chunk_size:
            chunks = split_pairs(batch.images, input_ids, num_prefix, self.config.chunk_size)
            bare = self.accelerator.unwrap_model(self.model)
            cached = cached_features(bare, chunks, autocast=self.accelerator.autocast)
            return cached, (cached.image, cached.text, cached.logit_scale)
        with self.accelerator.autocast():
            images = batch.images.to(self.accelerator.device, non_blocking=True)
            return None, self.model(images, input_ids, num_prefix)

    def _values(self, loss: StepLoss) -> dict[str, float]:
        parts: Tensor = torch.stack([loss.full, loss.short, loss.recall])
        full, short, recall = self.accelerator.reduce(parts, reduction="mean").tolist()
        weight = self.config.short_weight
        return {
            "loss": weight * short + (1 - weight) * full,
            "loss_full": full,
            "loss_short": short,
            "recall": recall,
            "logit_scale": float(self._logit_scale.detach().exp()),
            "learning_rate": self.optimizer.param_groups[0]["lr"],
        }

    def _save(self, folder: Path) -> None:
        self._check_weights()
        run = {
            "faults": self._all_faults(), "pairs": len(self.pairs), "total_steps": self.total_steps,
            "keys": self._keys,
        }  # fmt: skip
        save_checkpoint(self.accelerator, folder / "checkpoints", self.step, run, self.config.keep_checkpoints)

    @property
    def _logit_scale(self) -> Tensor:
        return self.accelerator.unwrap_model(self.model).clip.logit_scale

    @cached_property
    def _keys(self) -> str:
        return keys_digest(self.pairs)

    def _all_faults(self) -> list[str]:
        """The unreadable pictures of all processes; every process must call it."""
        return list(dict.fromkeys(gather_object(list(self.faults.named))))

    def _check_weights(self) -> None:
        bad = [n for n, p in self.model.named_parameters() if not bool(torch.isfinite(p).all())]
        if self._any(bool(bad)):
            raise NonFiniteLoss(
                f"after step {self.step} weights are not finite ({', '.join(bad[:3])}); nothing was saved of them and the "
                "last checkpoint is untouched; try a lower --learning-rate"
            )

    def _any(self, flag: bool) -> bool:
        if self.accelerator.num_processes == 1:
            return flag
        votes = torch.tensor(float(flag), device=self.accelerator.device)
        return float(self.accelerator.reduce(votes, reduction="sum")) > 0
