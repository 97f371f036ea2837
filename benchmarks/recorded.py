"""Results that several runs add up to: each part with the command, day and machine of its run; the others are kept."""

import json
import os
import platform
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path
from typing import Any

import torch

from debias_diffusion.evaluation.page import write_whole

RESULTS = Path(__file__).resolve().parent / "results"


@dataclass(frozen=True)
class Record:
    """What one run says of one part: how it was run, Markdown, and the figures that a claim can be checked against."""

    command: str
    date: str
    machine: str
    lines: list[str]
    figures: dict[str, Any]


def record(machine: str, lines: Sequence[str], figures: Mapping[str, Any]) -> Record:
    """A record of what this program has measured today."""
    return Record(command_line(sys.argv), date.today().isoformat(), machine, list(lines), dict(figures))


def command_line(argv: Sequence[str]) -> str:
    """The command to repeat a run by; where its results went is left out.

    >>> command_line(["/a/b/benchmarks/growth.py", "--parts", "text", "--output", "/tmp/x", "--threads", "1"])
    'python benchmarks/growth.py --parts text --threads 1'
    """
    kept, skipped = [f"python benchmarks/{Path(argv[0]).name}"], False
    for word in argv[1:]:
        if not skipped and not word.startswith("--output"):
            kept.append(word)
        skipped = word == "--output"
    return " ".join(kept)


def machine_line(threads: int) -> str:
    """What the figures were measured on, and what else it did then."""
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else float("nan")
    return (
        f"float32, {threads} thread{'s' * (threads > 1)} of {os.cpu_count()} cores ({platform.machine()}), "
        f"torch {torch.__version__}; load of the machine at the start {load:.1f}"
    )


def keep(folder: Path, stem: str, title: str, found: Mapping[str, Record], order: Sequence[str] = ()) -> None:
    """Writes `stem`.json and .md in a folder: the parts found now in place of their earlier records, the others as they are.

    `order` is that of the parts in the Markdown; parts it does not name come last. Raises ValueError for a file that
    holds no records, before anything is written.
    """
    path = folder / f"{stem}.json"
    records = _read(path) | {name: asdict(part) for name, part in found.items()}
    names = sorted(records, key=lambda name: (order.index(name) if name in order else len(order), name))
    lines = [f"# {title}", ""]
    for name in names:
        part = Record(**records[name])
        lines += [*part.lines, f"`{part.command}`, {part.date}. {part.machine}.", ""]
    write_whole(path, json.dumps({name: records[name] for name in names}, indent=1) + "\n")
    write_whole(folder / f"{stem}.md", "\n".join(lines).rstrip() + "\n")


def _read(path: Path) -> dict[str, dict[str, Any]]:
    if not path.is_file():
        return {}
    try:
        records = json.loads(path.read_text())
        return {name: asdict(Record(**part)) for name, part in records.items()}
    except (ValueError, TypeError, AttributeError) as error:
        raise ValueError(
            f"{path.name} holds no records of parts ({error}); expected what a run writes; move it away and run again"
        ) from error
