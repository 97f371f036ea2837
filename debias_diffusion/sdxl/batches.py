"""Many pictures of one pipeline, several at a time: for measuring, where thousands of small ones are drawn."""

import dataclasses
import json
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from diffusers import DiffusionPipeline
from tqdm import tqdm

from debias_diffusion.sdxl.generate import Settings, token_report
from debias_diffusion.sdxl.prompts import PromptLine, debias_pipeline, read_prompt
from debias_diffusion.sdxl.record import pipeline_record, read_record, write_png


@dataclasses.dataclass(frozen=True)
class Job:
    """A picture to draw: of which prompt, from which noise, into which PNG."""

    prompt: str
    seed: int
    path: Path


def draw_batches(
    pipe: DiffusionPipeline, jobs: Sequence[Job], settings: Settings, *, batch_size: int = 16, progress: bool = True
) -> int:
    """How many pictures were drawn; those that are there already with the very same record are kept.

    Each has its own noise, from its seed and size alone, and is the picture `generate.draw` gives up to rounding: only
    prompts that get the same number of rows share a batch. Pictures on disk have their record inside, and one without
    any is not overwritten (ValueError). Not to be called while another thread draws with the same scheduler.
    """
    if batch_size < 1:
        raise ValueError(f"batch_size is {batch_size}; expected 1 or more")
    own = debias_pipeline(pipe)
    shared = {"settings": dataclasses.asdict(settings)} | pipeline_record(own)
    records = {job: {"prompt": job.prompt, "seed": job.seed} | shared for job in jobs}
    missing = [job for job in jobs if read_record(job.path) != json.loads(json.dumps(records[job]))]
    with _quiet(own), tqdm(total=len(missing), unit="picture", disable=None if progress else True) as bar:
        for batch in _of_equal_rows(own, missing, settings, batch_size):
            for job, image in zip(batch, _draw(own, batch, settings), strict=True):
                job.path.parent.mkdir(parents=True, exist_ok=True)
                write_png(image.convert("RGB"), job.path, records[job])
            bar.update(len(batch))
    return len(missing)


@contextmanager
def _quiet(pipe: Any) -> Iterator[None]:
    """Without a bar for each batch, or a warning for each prompt that is cut: here prompts are cut to see what it costs."""
    before, logger = getattr(pipe, "_progress_bar_config", {}), logging.getLogger(type(pipe).__module__)
    level = logger.level
    pipe.set_progress_bar_config(**{**before, "disable": True})
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        pipe.set_progress_bar_config(**before)
        logger.setLevel(level)


def _of_equal_rows(pipe: Any, jobs: Sequence[Job], settings: Settings, batch_size: int) -> Iterator[list[Job]]:
    """Batches of prompts that the encoders give as many rows alone as together."""
    limits = {
        prompt: tuple(row.limit for row in token_report(pipe, PromptLine(prompt), settings))
        for prompt in dict.fromkeys(job.prompt for job in jobs)
    }
    for limit in dict.fromkeys(limits.values()):
        alike = [job for job in jobs if limits[job.prompt] == limit]
        yield from (alike[start : start + batch_size] for start in range(0, len(alike), batch_size))


def _draw(pipe: Any, batch: Sequence[Job], settings: Settings) -> Any:
    return pipe(
        [read_prompt(job.prompt, settings.syntax) for job in batch],
        **settings.of_call(),
        generator=[torch.Generator("cpu").manual_seed(job.seed) for job in batch],
    ).images
