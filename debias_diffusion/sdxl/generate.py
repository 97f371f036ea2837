"""Pictures from prompts and seeds: the same noise for every set of encoders, every picture with its record."""

import dataclasses
import json
import math
import re
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from diffusers import DiffusionPipeline
from PIL import Image
from tqdm import tqdm

from debias_diffusion.sdxl.prompts import PromptLine, TokenReport, debias_pipeline, prompt_report, read_prompt
from debias_diffusion.sdxl.record import SHEET, pipeline_record, read_record, write_contact_sheets, write_png
from debias_diffusion.sdxl.slot_folder import slot_root
from debias_diffusion.sdxl.slots import SLOTS
from debias_diffusion.sdxl.swap import Source, swap_text_encoders

EncoderSet = Mapping[str, Source] | str | Path | None
"""Encoders for a base pipeline: by slot, or a folder with slots; None leaves the base's own."""

_ONE_AT_A_TIME = threading.Lock()
# A scheduler counts its steps, and pipelines made by swapping share one: two pictures at once would mix.


@dataclass(frozen=True)
class Settings:
    """What all pictures of a run have in common."""

    steps: int = 30
    guidance_scale: float = 5.0
    width: int | None = None
    """Pixels; the pipeline's own size where None."""
    height: int | None = None
    clip_skip: int | None = None
    """Layers skipped from the one SDXL reads, in prompts and negatives alike."""
    max_length: int | str = "auto"
    """Rows a prompt gets: "auto" for 77 where it fits, else 248, else chunks; or a number, at which it is cut."""
    syntax: str = "plain"
    """How brackets are read: "plain" or "a1111" (weights)."""

    def __post_init__(self) -> None:
        if self.steps < 1:
            raise ValueError(f"steps is {self.steps}; expected 1 or more")
        if not (math.isfinite(self.guidance_scale) and self.guidance_scale >= 0):
            raise ValueError(f"guidance_scale is {self.guidance_scale}; expected a finite number, 0 or more")
        if self.max_length != "auto" and (isinstance(self.max_length, str) or self.max_length < 3):
            raise ValueError(f"max_length is {self.max_length!r}; expected 'auto' or 3 or more")
        read_prompt("", self.syntax)

    def of_call(self) -> dict[str, Any]:
        """The arguments of a pipeline's call that hold for every picture."""
        return {
            "num_inference_steps": self.steps,
            "guidance_scale": self.guidance_scale,
            "width": self.width,
            "height": self.height,
            "clip_skip": self.clip_skip,
            "max_length": self.max_length,
        }


def draw(pipe: DiffusionPipeline, line: PromptLine, seed: int, settings: Settings | None = None) -> Image.Image:
    """One RGB picture. The noise comes from a new CPU generator, so it depends on the seed and the size alone.

    Calls wait for each other, whatever thread or pipeline they come from.
    """
    options = settings or Settings()
    texts = {
        name: None if text is None else read_prompt(text, options.syntax)
        for name, text in (("prompt", line.prompt), ("prompt_2", line.prompt_2), ("negative_prompt", line.negative))
    }
    with _ONE_AT_A_TIME:
        output = debias_pipeline(pipe)(
            **texts,
            **options.of_call(),
            generator=torch.Generator("cpu").manual_seed(seed),
        )
    image: Image.Image = output.images[0].convert("RGB")
    return image


def generate(
    pipe: DiffusionPipeline,
    prompts: Sequence[str | PromptLine],
    seeds: Sequence[int],
    output: str | Path,
    *,
    settings: Settings | None = None,
    negative: str | None = None,
    resume: bool = True,
    progress: bool = True,
) -> list[Path]:
    """The pictures' paths in `output`, one PNG for each prompt and seed, in order, and contact-sheet.png beside them.

    A prompt with a seed of its own is drawn with that one alone; `negative` holds where a prompt has none. A picture
    that is there already with the very same record is kept; one with another record is replaced, and one without any
    record is an error. `resume=False` draws all of them.
    """
    options = settings or Settings()
    lines = _as_lines(prompts, negative)
    if not lines or not seeds:
        raise ValueError(f"nothing to draw: {len(lines)} prompts, {len(seeds)} seeds")
    own, folder = debias_pipeline(pipe), Path(output)
    shared = {"settings": dataclasses.asdict(options)} | pipeline_record(own)
    jobs = [(i, line, seed) for i, line in enumerate(lines) for seed in _seeds(line, seeds)]
    reports = [token_report(own, line, options) for line in lines]  # a bad prompt shows before the first picture
    folder.mkdir(parents=True, exist_ok=True)
    read_record(folder / SHEET)  # refuses somebody's own picture before any work is done
    paths = []
    for i, line, seed in tqdm(jobs, desc=folder.name, unit="picture", disable=None if progress else True):
        path = folder / f"{i:04}-{_slug(line.prompt)}-seed{seed}.png"
        tokens = [_report_record(row) for row in reports[i]]
        record = json.loads(json.dumps(dataclasses.asdict(line) | {"seed": seed, "tokens": tokens} | shared))
        if read_record(path) != record or not resume:
            write_png(draw(own, line, seed, options), path, record)
        paths.append(path)
    rows: dict[int, list[Path]] = {}
    for (i, _, _), path in zip(jobs, paths, strict=True):
        rows.setdefault(i, []).append(path)
    columns = [f"seed {seed}" for seed in seeds] if all(line.seed is None for line in lines) else ["own seed or first"]
    columns += [""] * (max(map(len, rows.values())) - len(columns))
    write_contact_sheets(folder, columns, [(lines[i].prompt, row) for i, row in rows.items()])
    return paths


def compare(
    sets: Mapping[str, DiffusionPipeline | EncoderSet],
    prompts: Sequence[str | PromptLine],
    seeds: Sequence[int],
    output: str | Path,
    *,
    base: DiffusionPipeline | None = None,
    settings: Settings | None = None,
    max_lengths: Mapping[str, int | str] | None = None,
    negative: str | None = None,
    resume: bool = True,
    progress: bool = True,
) -> dict[str, list[Path]]:
    """The pictures of each named set of encoders, in a folder of `output` each, and contact-sheet.png: a column a set.

    A set is a pipeline, or the encoders to swap into `base`. All get the same noise, size, negative and settings; what
    else pipelines could differ in (scheduler, picture size, how no negative is encoded) is refused. `max_lengths` names
    sets whose length differs on purpose: {"stock": 77} cuts there, as the stock pipeline does.
    """
    options = settings or Settings()
    unknown = ", ".join(sorted((max_lengths or {}).keys() - sets.keys()))
    if unknown or len(sets) < 1:
        raise ValueError(f"max_lengths names {unknown or 'nothing'}; sets: {', '.join(sets) or 'none'}")
    for name in sets:
        refuse_report_name(name)
        if not re.fullmatch(r"\w[\w.+-]*", name):
            raise ValueError(f"a set is called {name!r}; names become folders: letters, digits and . + - _ only")
    pipes = {name: as_pipeline(source, base) for name, source in sets.items()}
    _refuse_differences(pipes, options)
    read_record(Path(output) / SHEET)
    paths = {}
    for name, pipe in pipes.items():
        own = dataclasses.replace(options, max_length=(max_lengths or {}).get(name, options.max_length))
        more: dict[str, Any] = {"settings": own, "negative": negative, "resume": resume, "progress": progress}
        paths[name] = generate(pipe, prompts, seeds, Path(output) / name, **more)
    lines = _as_lines(prompts, negative)
    labels = [f"seed {seed}: {line.prompt}" for line in lines for seed in _seeds(line, seeds)]
    write_contact_sheets(Path(output), list(paths), list(zip(labels, zip(*paths.values(), strict=True), strict=True)))
    return paths


def refuse_report_name(name: str) -> None:
    """Raises ValueError for a set of encoders whose folder would be in the way of a report's file."""
    files = ("results.json", SHEET, "table.md", "report.html")
    if name.lower() in files:
        raise ValueError(f"a set is called {name!r}, as a file of the report is; files: {', '.join(files)}")


def as_pipeline(source: DiffusionPipeline | EncoderSet, base: DiffusionPipeline | None = None) -> Any:
    """The pipeline that a set of encoders stands for: itself, or `base` with the encoders swapped in."""
    if isinstance(source, DiffusionPipeline):
        return debias_pipeline(source)
    if base is None:
        raise ValueError("encoders alone draw nothing; give base, the pipeline to swap them into")
    if source is None:
        return debias_pipeline(base)
    if isinstance(source, str | Path):
        slots = {slot: source for slot in SLOTS if slot_root(source, slot)}
        if not slots:
            raise FileNotFoundError(
                f"{source} holds none of {', '.join(SLOTS)}; name the slot: {{'text_encoder': ...}}"
            )
        source = slots
    unknown = ", ".join(source.keys() - SLOTS.keys())
    if unknown:
        raise ValueError(f"SDXL has no slot {unknown}; slots: {', '.join(SLOTS)}")
    return swap_text_encoders(debias_pipeline(base), **source)


def token_report(pipe: DiffusionPipeline, line: PromptLine, settings: Settings | None = None) -> list[TokenReport]:
    """What each encoder reads of a line's prompt and negative under these settings."""
    options = settings or Settings()
    more: dict[str, Any] = {"max_length": options.max_length, "syntax": options.syntax}
    negative = line.negative if options.guidance_scale > 1 else None
    return prompt_report(debias_pipeline(pipe), line.prompt, line.prompt_2, negative, **more)


def _as_lines(prompts: Sequence[str | PromptLine], negative: str | None) -> list[PromptLine]:
    each = [prompts] if isinstance(prompts, str) else prompts
    lines = [PromptLine(prompt) if isinstance(prompt, str) else prompt for prompt in each]
    return [line if line.negative is not None else dataclasses.replace(line, negative=negative) for line in lines]


def _seeds(line: PromptLine, seeds: Sequence[int]) -> Sequence[int]:
    chosen = seeds if line.seed is None else [line.seed]
    for seed in chosen:
        if not -(2**63) <= seed < 2**63:
            raise ValueError(f"--seed {seed}, or a prompt's own, is too large; seeds go from -2**63 to 2**63 - 1")
    return chosen


def _slug(prompt: str) -> str:
    words = re.findall(r"[a-z0-9]+", prompt.lower())
    return "-".join(words)[:40].strip("-") or "prompt"


def _report_record(row: TokenReport) -> dict[str, Any]:
    fields = dataclasses.asdict(row)
    fields.pop("index"), fields.pop("text")
    fields["cut"] = [row.cut[0][0], row.cut[-1][1]] if row.cut else None  # from here on to the end of the text
    return fields | {"words_cut": len(row.cut)}


def _refuse_differences(pipes: Mapping[str, Any], settings: Settings) -> None:
    seen: dict[str, dict[str, str]] = {"scheduler": {}, "picture size": {}, "force_zeros_for_empty_prompt": {}}
    for name, pipe in pipes.items():
        config = sorted((k, v) for k, v in pipe.scheduler.config.items() if not k.startswith("_"))
        seen["scheduler"][name] = f"{type(pipe.scheduler).__name__} {config}"
        own_size = pipe.default_sample_size * pipe.vae_scale_factor
        seen["picture size"][name] = f"{settings.width or own_size} x {settings.height or own_size}"
        seen["force_zeros_for_empty_prompt"][name] = str(pipe.config.force_zeros_for_empty_prompt)
    for what, values in seen.items():
        if len(set(values.values())) > 1:
            raise ValueError(
                f"the pipelines differ in {what}, so pictures would not show what the encoders do: {values}"
            )
