"""Encoders of the miniature world that start from one base, and their numbers, kept: an interrupted benchmark goes on."""

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from debias_diffusion.config import PRESETS
from debias_diffusion.data.feature_cache import FeatureCache
from debias_diffusion.demo import PERTURBATIONS, PRESET, fine_tune, measure
from debias_diffusion.encoders.checkpoint import load_encoder, save_encoder
from debias_diffusion.encoders.specs import SPECS, StretchRule
from debias_diffusion.evaluation.page import write_whole

Row = dict[str, dict[str, float]]
"""perturbation -> metric -> percent"""

LENGTH = 248


@dataclass(frozen=True)
class Cost:
    """Seconds of one core: a fine-tuning step of 64 pairs, and one caption measured; both at 248 tokens."""

    step: float
    caption: float


COST = {"softmax": Cost(3.0, 0.007), "sigmoid": Cost(5.5, 0.013)}
"""By the loss, which tells the families apart. Captions were timed; steps are worked out from them: forward and backward, two
texts a pair, and the pictures."""


@dataclass(frozen=True)
class Job:
    """An encoder to be measured: the base as it is (`length` 0), stretched, or stretched and fine-tuned by a recipe."""

    length: int = 0
    rule: StretchRule = "ratio"
    recipe: str = ""
    seed: int = 0
    steps: int = 0

    @property
    def name(self) -> str:
        """Tells it from every other job of the same base."""
        if not self.length:
            return "base"
        grown = f"{self.length}-{self.rule}"
        return f"{self.recipe}-{grown}-steps{self.steps}-seed{self.seed}" if self.recipe else f"stretched-{grown}"


class KeptRuns:
    """Numbers of jobs that start from `source` (a row, meaning ROW:base, or what `load_encoder` opens).

    They are kept under `output` by the base's name and weights, the job and the number of pairs, so that a base made anew
    is measured anew.
    """

    def __init__(self, source: str, output: Path, pairs: int) -> None:
        self.source = f"{source}:base" if source in SPECS else source
        self.encoder = load_encoder(self.source)
        self.pairs = pairs
        name = self.source.removesuffix(":base").replace(":", "-").rstrip("/").rpartition("/")[2]
        self.folder = output / f"{name}-{FeatureCache().tower_hash(self.encoder, 'text')[:8]}"

    def expected_seconds(self, jobs: Sequence[Job]) -> float:
        """What the jobs will cost on one core; those that are kept cost nothing."""
        cost = COST[self.encoder.loss]
        seconds = 0.0
        for job in jobs:
            share = (job.length or self.encoder.context_length) / LENGTH
            reading = cost.caption * self.pairs * len(PERTURBATIONS)
            seconds += 0 if self._file(job).is_file() else share * (cost.step * job.steps + reading)
        return seconds

    def numbers(self, job: Job) -> Row:
        """What the demo measures of the job's encoder, which is made first where it is not kept."""
        file = self._file(job)
        if not file.is_file():
            started = time.perf_counter()
            encoder = self._make(job, file.parent)
            row = measure({job.name: encoder}, self.pairs)[job.name]
            write_whole(file, json.dumps(row, indent=1) + "\n")
            print(f"{self.folder.name} {job.name}: {(time.perf_counter() - started) / 60:.1f} minutes", flush=True)
        kept: Row = json.loads(file.read_text())
        return kept

    def _file(self, job: Job) -> Path:
        return self.folder / job.name / f"numbers-{self.pairs}.json"

    def _make(self, job: Job, folder: Path) -> str:
        if not job.length:
            return self.source
        if not job.recipe:
            return str(save_encoder(self.encoder.stretched(job.length, rule=job.rule), folder / "encoder"))
        config = replace(
            PRESETS[PRESET[self.encoder.loss].format(job.recipe)],
            encoder=self.source,
            context_length=job.length,
            stretch=job.rule,
            seed=job.seed,
            max_steps=job.steps,
            save_every=50,
            keep_checkpoints=1,
            output=str(folder / "training"),
        )
        return str(fine_tune(config, folder / "encoder"))
