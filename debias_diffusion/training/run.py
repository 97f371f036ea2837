"""One run between its steps: the model, its optimiser, the data in order, and what is kept of them."""

import dataclasses
import logging
import math
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
    StepOrder,
    TextBranches,
    TrainingRows,
    collate_rows,
    keys_digest,
)
from debias_diffusion.data.feature_cache import DEFAULT_FOLDER, FeatureCache
from debias_diffusion.encoders.checkpoint import save_encoder
from debias_diffusion.encoders.text_forward import why_not_packed
from debias_diffusion.training.cached import CachedFeatures, cached_features, on_device, split_pairs
from debias_diffusion.training.checkpoints import load_checkpoint, refuse_other_data, save_checkpoint
from debias_diffusion.training.dry_run import dry_run_report
from debias_diffusion.training.ema import WeightAverage
from debias_diffusion.training.endings import Interrupted, loss_not_finite, nothing_read, weights_not_finite
from debias_diffusion.training.frozen import image_side
from debias_diffusion.training.gather import any_process
from debias_diffusion.training.memory import release_freed_memory
from debias_diffusion.training.optim import learning_rate_at, learning_rates
from debias_diffusion.training.progress import FaultLog, Progress, start_line
from debias_diffusion.training.sharding import gathered_encoder, is_sharded, local_part, make_shardable, whole
from debias_diffusion.training.signals import StopSignals, prepare_worker
from debias_diffusion.training.step import LossRule, StepLoss, TwoBranchModel, two_branch_loss
from debias_diffusion.training.towers import make_plain, open_encoder, optimizer_of

logger = logging.getLogger(__name__)


class Run:
    """Everything one run holds between steps."""

    def __init__(
        self, config: TrainConfig, accelerator: Accelerator, pairs: PairSource, cache: FeatureCache | None = None
    ) -> None:
        self.config, self.accelerator, self.pairs, self.step = config, accelerator, pairs, 0
        torch.manual_seed(config.seed)  # for random weights and adapters: nothing else is drawn from a global stream
        self.total_steps = config.max_steps or len(pairs) // config.batch_size * config.epochs
        self._order(0)  # refuses data too small for a batch before anything heavy is loaded
        self.encoder = open_encoder(config)
        clip = self.encoder.model
        cache = cache or FeatureCache(Path(config.feature_cache or DEFAULT_FOLDER))
        self.images = image_side(self.encoder, pairs, config, self.total_steps, cache, accelerator)
        if is_sharded(accelerator):
            make_shardable(clip, accelerator)
        model = TwoBranchModel(clip, frozen_images=config.train_towers == "text")
        self.model, self.optimizer = accelerator.prepare(model, optimizer_of(model, config))
        self.average = WeightAverage(clip, config.ema_decay) if config.ema_decay else None
        self.rule = LossRule(
            config.short_weight, config.pca_dim, config.pca_batch, config.pca_renormalise, config.label_smoothing,
            block=config.chunk_size,
        )  # fmt: skip
        self.faults = FaultLog([])

    def describe(self, total_steps: int | None = None) -> str:
        """One line that says what is trained on what, for `total_steps` steps (default: this run's own)."""
        clip, accelerator = self.encoder.model, self.accelerator
        compiled = accelerator.state.dynamo_plugin.backend != DynamoBackend.NO and why_not_packed(clip.text) is None
        return start_line(
            self.config, weights=sum(p.numel() for p in clip.parameters()),
            trained=sum(p.numel() for p in clip.parameters() if p.requires_grad), pairs=len(self.pairs),
            steps=(self.step, total_steps or self.total_steps), device=accelerator.device.type,
            processes=accelerator.num_processes, compiled=compiled,
        )  # fmt: skip

    def restore(self, checkpoint: Path) -> None:
        """Goes back to a checkpoint."""
        run = load_checkpoint(self.accelerator, checkpoint, self.average)
        now = {"pairs": len(self.pairs), "total_steps": self.total_steps, "keys": self._keys}
        refuse_other_data(checkpoint, run, now)
        self.step, self.faults = run["step"], FaultLog(run["faults"])
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
                stopping = any_process(stop.requested, self.accelerator.device)
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

    def rehearse(self, total_steps: int) -> str:
        """What a run of `total_steps` steps would do, as text; every process must call it, and nothing is changed."""
        rows, batch = next(iter(self._order(0))), next(iter(self._loader()))
        captions = {self.pairs.keys[i]: self.pairs.captions[i] for _, i in rows}

        def first_loss() -> Tensor:
            cached, features = self._features(batch)
            if cached:  # the features came without a graph; what a step keeps at once is one chunk's
                self.model(*on_device(cached.chunks[0], self.accelerator.device))
            return self.accelerator.reduce(two_branch_loss(*features, self.rule).total.detach(), reduction="mean")

        return dry_run_report(
            self.encoder.model, self.encoder.tokenizer, [captions[key] for key in batch.keys],
            (batch.full, batch.augmented), first_loss, steps=total_steps, processes=self.accelerator.num_processes,
            average=self.average is not None,
        )  # fmt: skip

    def export(self, folder: Path) -> Path:
        """Writes the encoder as it is now, or its average where one is kept."""
        history = {
            **self.encoder.history,
            "training": dataclasses.asdict(self.config)
            | {"output": "", "feature_cache": "", "tokenizer": "", "steps": self.step, "pairs": len(self.pairs)},
            "unreadable_pictures": len(self._all_faults()),
        }
        if is_sharded(self.accelerator):
            plain = gathered_encoder(self.accelerator, self.model, self.encoder)
        else:
            make_plain(plain := self.encoder, self.average)
        if plain is not None and self.accelerator.is_main_process:
            plain.model.eval()
            save_encoder(dataclasses.replace(plain, name=self.config.recipe, history=history), folder)
        self.accelerator.wait_for_everyone()
        return folder

    def _order(self, first_step: int) -> StepOrder:
        config, accelerator = self.config, self.accelerator
        return StepOrder(
            len(self.pairs), config.batch_size, self.total_steps, seed=config.seed, block=config.shuffle_block,
            first_step=first_step, rank=accelerator.process_index, world=accelerator.num_processes,
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
            peak = group.get("peak", config.learning_rate)
            group["lr"] = learning_rate_at(self.step, peak, config.warmup_steps, self.total_steps)
        cached, features = self._features(batch)
        loss = two_branch_loss(*features, self.rule)
        if not loss.num_pairs:
            logger.warning("no picture of step %d could be read; the step changes nothing", self.step)
            return loss
        if any_process(not bool(torch.isfinite(loss.total)), self.accelerator.device):
            raise loss_not_finite(loss.total.item(), self.step, batch.keys)
        self.optimizer.zero_grad()
        self.accelerator.backward(loss.total)
        if cached:
            cached.backward(
                self.model,
                autocast=self.accelerator.autocast,
                no_sync=partial(self.accelerator.no_sync, self.model),
            )
        self.optimizer.step()
        if self.encoder.loss == "softmax":  # sigmoid scales have no limit: SigLIP's released ones are above 100
            with torch.no_grad():
                self._clip.logit_scale.clamp_(0, math.log(config.max_logit_scale))
        if self.average:
            self.average.update(self.encoder.model)
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
        weight, clip = self.config.short_weight, self._clip
        logit = {"logit_scale": whole(clip.logit_scale.detach()).exp()}
        if clip.logit_bias is not None:
            logit["logit_bias"] = whole(clip.logit_bias.detach())
        return {
            "loss": weight * short + (1 - weight) * full,
            "loss_full": full,
            "loss_short": short,
            "recall": recall,
            **{name: float(value) for name, value in logit.items()},
            **learning_rates(self.optimizer.param_groups),
        }

    def _save(self, folder: Path) -> None:
        self._check_weights()
        run = {
            "faults": self._all_faults(), "pairs": len(self.pairs), "total_steps": self.total_steps,
            "keys": self._keys,
        }  # fmt: skip
        keep = self.config.keep_checkpoints
        save_checkpoint(self.accelerator, folder / "checkpoints", self.step, run, keep, self.average)

    @property
    def _clip(self) -> Any:
        return self.accelerator.unwrap_model(self.model).clip

    @cached_property
    def _keys(self) -> str:
        return keys_digest(self.pairs)

    def _all_faults(self) -> list[str]:
        """The unreadable pictures of all processes; every process must call it."""
        return list(dict.fromkeys(gather_object(list(self.faults.named))))

    def _check_weights(self) -> None:
        bad = [n for n, p in self.model.named_parameters() if not bool(torch.isfinite(local_part(p)).all())]
        if any_process(bool(bad), self.accelerator.device):
            raise weights_not_finite(bad, self.step)
