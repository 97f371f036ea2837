"""The training job: rows -> both branches -> one forward -> gathered loss -> step -> checkpoint -> encoder folder."""

import dataclasses
import json
import logging
import math
from functools import partial
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from torch import Tensor
from torch.utils.data import DataLoader

from debias_diffusion.captions.augment import RECIPES
from debias_diffusion.config import RunStopped, TrainConfig
from debias_diffusion.data.collate import Batch, PairSource, StepOrder, TextBranches, TrainingRows, collate_rows
from debias_diffusion.data.pairs import open_pairs
from debias_diffusion.data.scene_sets import ScenePairs
from debias_diffusion.encoders.checkpoint import load_encoder, save_encoder
from debias_diffusion.encoders.encoder import Encoder
from debias_diffusion.encoders.positions import freeze_first_positions, thaw_positions
from debias_diffusion.training.checkpoints import find_checkpoints, load_checkpoint, save_checkpoint
from debias_diffusion.training.checks import check_config, check_processes
from debias_diffusion.training.memory import release_freed_memory
from debias_diffusion.training.optim import choose_towers, learning_rate_at, make_optimizer
from debias_diffusion.training.progress import FaultLog, Progress
from debias_diffusion.training.signals import StopSignals, prepare_worker
from debias_diffusion.training.step import LossRule, StepLoss, TwoBranchModel, two_branch_loss

logger = logging.getLogger(__name__)


class Interrupted(RunStopped):
    """The run was asked to stop; it has saved a checkpoint."""


class NonFiniteLoss(RunStopped):
    """The loss became NaN or infinite; the last good checkpoint is untouched."""


def train(config: TrainConfig) -> Path:
    """Runs the job and returns the folder of the trained encoder, `config.output`/encoder.

    Raises ValueError for impossible settings before anything is loaded, `NonFiniteLoss`, and `Interrupted` after SIGTERM
    or Ctrl-C with a checkpoint saved.
    """
    check_config(config)
    AcceleratorState._reset_state()  # a second run in one process may want another precision
    accelerator = Accelerator(mixed_precision={"fp32": "no"}.get(config.precision, config.precision))
    check_processes(config, accelerator)
    folder = Path(config.output)
    checkpoints = find_checkpoints(folder / "checkpoints")
    if accelerator.is_main_process:
        folder.mkdir(parents=True, exist_ok=True)
        partial_config = folder / ".config.json.partial"
        partial_config.write_text(config.to_json())
        partial_config.replace(folder / "config.json")
    run = _Run(config, accelerator)
    if config.resume and checkpoints:
        run.restore(checkpoints[-1])
    with StopSignals() as stop:
        run.go(stop)
    return run.export(folder / "encoder")


def open_source(config: TrainConfig) -> PairSource:
    """The training pairs that `config.data` names."""
    if config.data == "scenes":
        return ScenePairs(size=config.batch_size * max(config.max_steps, 1000), seed=config.seed)
    pairs = open_pairs(config.data, config.image_root or None, held_out=config.held_out)
    for reason, count in pairs.left_out.items():
        logger.warning("%s: %d left out: %s", config.data, count, reason.replace("_", " "))
    return pairs


def _nothing_read(faults: FaultLog) -> ValueError:
    return ValueError(
        f"no picture could be read in any step, so nothing was learned and no encoder is written; the first: "
        f"{next(iter(faults.named), 'on another process')}; check --data and --image-root"
    )


class _Run:
    """Everything one run holds between steps."""

    def __init__(self, config: TrainConfig, accelerator: Accelerator) -> None:
        self.config, self.accelerator, self.step = config, accelerator, 0
        torch.manual_seed(config.seed)  # for ROW:random only: nothing else here is drawn from a global stream
        self.pairs = open_source(config)
        per_epoch = len(self.pairs) // config.batch_size
        self.total_steps = config.max_steps or per_epoch * config.epochs
        self.encoder = load_encoder(config.encoder).stretched(
            config.context_length, config.keep_positions, in_place=True
        )
        clip = self.encoder.model
        choose_towers(clip, config.train_towers)
        freeze_first_positions(clip.text, config.keep_positions)
        if config.gradient_checkpointing:
            clip.set_grad_checkpointing(True)
        optimizer = make_optimizer(clip.parameters(), config.learning_rate, config.weight_decay, config.betas)
        self.model, self.optimizer = accelerator.prepare(TwoBranchModel(clip), optimizer)
        self.rule = LossRule(
            config.short_weight, config.pca_dim, config.pca_batch, config.pca_renormalise, config.label_smoothing
        )
        self.faults = FaultLog([])

    def restore(self, checkpoint: Path) -> None:
        """Goes back to a checkpoint."""
        run = load_checkpoint(self.accelerator, checkpoint)
        now, then = (len(self.pairs), self.total_steps), (run["pairs"], run["total_steps"])
        if now != then:
            raise ValueError(f"a resumed run keeps its data: pairs and steps were {then}, now they are {now}")
        self.step = run["step"]
        self.faults = FaultLog(run["faults"])
        logger.info("resumed at step %d from %s", self.step, checkpoint)

    def go(self, stop: "StopSignals") -> None:
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
                    raise _nothing_read(self.faults)
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
        if self.faults.named:
            logger.warning("%d pictures could not be read and were left out", len(self.faults.named))

    def export(self, folder: Path) -> Path:
        """Writes the encoder as it is now."""
        clip = self.accelerator.unwrap_model(self.model).clip
        thaw_positions(clip.text)
        history = {
            **self.encoder.history,
            "training": dataclasses.asdict(self.config) | {"output": "", "steps": self.step, "pairs": len(self.pairs)},
            "unreadable_pictures": len(self.faults.named),
        }
        encoder: Encoder = dataclasses.replace(
            self.encoder, name=self.config.recipe, model=clip.eval(), history=history
        )
        if self.accelerator.is_main_process:
            save_encoder(encoder, folder)
        self.accelerator.wait_for_everyone()
        return folder

    def _loader(self) -> "DataLoader[Any]":
        config, accelerator = self.config, self.accelerator
        order = StepOrder(
            len(self.pairs), config.batch_size, self.total_steps, seed=config.seed, first_step=self.step,
            rank=accelerator.process_index, world=accelerator.num_processes,
        )  # fmt: skip
        branches = TextBranches(self.encoder.tokenizer, RECIPES[config.recipe], config.splitter, config.seed)
        return DataLoader(
            TrainingRows(self.pairs, branches, self.encoder.preprocess),
            batch_sampler=order,
            collate_fn=partial(collate_rows, context_length=config.context_length),
            num_workers=config.workers,
            worker_init_fn=prepare_worker,
            pin_memory=accelerator.device.type == "cuda",
        )

    def _step(self, batch: Batch) -> StepLoss:
        config, device = self.config, self.accelerator.device
        self.faults.add(batch.faults)
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate_at(self.step, config.learning_rate, config.warmup_steps, self.total_steps)
        input_ids, num_prefix = batch.texts()
        with self.accelerator.autocast():
            image, text, logit_scale = self.model(
                batch.pixel_values.to(device, non_blocking=True), input_ids, num_prefix
            )
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
        self.optimizer.step()
        clip = self.accelerator.unwrap_model(self.model).clip
        with torch.no_grad():
            clip.logit_scale.clamp_(0, math.log(config.max_logit_scale))
        return loss

    def _values(self, loss: StepLoss) -> dict[str, float]:
        parts: Tensor = torch.stack([loss.full, loss.short, loss.recall])
        full, short, recall = self.accelerator.reduce(parts, reduction="mean").tolist()
        weight = self.config.short_weight
        clip = self.accelerator.unwrap_model(self.model).clip
        return {
            "loss": weight * short + (1 - weight) * full,
            "loss_full": full,
            "loss_short": short,
            "recall": recall,
            "logit_scale": float(clip.logit_scale.detach().exp()),
            "learning_rate": self.optimizer.param_groups[0]["lr"],
        }

    def _save(self, folder: Path) -> None:
        self._check_weights()
        run = {"faults": list(self.faults.named), "pairs": len(self.pairs), "total_steps": self.total_steps}
        save_checkpoint(self.accelerator, folder / "checkpoints", self.step, run, self.config.keep_checkpoints)

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


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    """What a run recorded, oldest first."""
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
