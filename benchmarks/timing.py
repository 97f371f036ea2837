"""Times several ways of one thing against each other, alternating, and the parts that each is made of; and memory."""

import resource
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from tqdm import tqdm


@dataclass
class Clock:
    """Seconds of the named parts of one way, a list of repeats each."""

    parts: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Adds what runs inside to a part; nested uses of one name in one repeat are summed by `start`."""
        begin = time.perf_counter()
        yield
        self.parts[name][-1] += time.perf_counter() - begin

    def start(self, names: tuple[str, ...]) -> None:
        """Begins a repeat of these parts."""
        for name in names:
            self.parts[name].append(0.0)


@dataclass(frozen=True)
class Timed:
    """Wall and processor seconds of every repeat of one way."""

    wall: list[float]
    processor: list[float]

    @property
    def median(self) -> float:
        return statistics.median(self.wall)

    @property
    def cell(self) -> str:
        """Median, lowest and highest."""
        return f"{self.median:.3g} ({min(self.wall):.3g} to {max(self.wall):.3g})"


def alternate(ways: Mapping[str, Callable[[], object]], repeats: int, warmup: int = 1) -> dict[str, Timed]:
    """Runs the ways in turn, so that whatever else the machine does falls on all of them alike."""
    for run in ways.values():
        for _ in range(warmup):
            run()
    timed = {name: Timed([], []) for name in ways}
    for _ in tqdm(range(repeats), desc=" / ".join(ways)[:40], unit="round", disable=None, leave=False):
        for name, run in ways.items():
            wall, processor = time.perf_counter(), time.process_time()
            run()
            timed[name].wall.append(time.perf_counter() - wall)
            timed[name].processor.append(time.process_time() - processor)
    return timed


def table(title: str, timed: Mapping[str, Timed], unit: str, per_run: float) -> list[str]:
    """Markdown lines: each way's seconds, its rate, and how many times the first one's speed it has.

    The ratio of medians comes with the lowest and highest ratio of runs that stood next to each other; the last column
    has the ratio in processor time, the one to read where other jobs ran beside.
    """
    first = next(iter(timed.values()))
    lines = [
        f"### {title}",
        "",
        f"| way | s, median of {len(first.wall)} | {unit}/s | times the speed | in processor time |",
        "|---|---|---|---|---|",
    ]
    for name, way in timed.items():
        pairs = [a / b for a, b in zip(first.wall, way.wall, strict=True)]
        processor = ratio_in_processor_time(timed, name)
        ratio = f"{first.median / way.median:.2f} ({min(pairs):.2f} to {max(pairs):.2f}) | {processor:.2f}"
        lines.append(f"| {name} | {way.cell} | {per_run / way.median:.3g} | {ratio} |")
    return [*lines, ""]


def ratio_in_processor_time(timed: Mapping[str, Timed], name: str) -> float:
    """How many times the first way's speed a way has, by medians of processor seconds."""
    first = next(iter(timed.values()))
    return statistics.median(first.processor) / max(1e-9, statistics.median(timed[name].processor))


def share_table(title: str, clocks: Mapping[str, Clock]) -> list[str]:
    """Markdown lines: the share of each part in each way's whole, from medians."""
    names = list(dict.fromkeys(name for clock in clocks.values() for name in clock.parts))
    lines = [f"### {title}", "", f"| way | {' | '.join(names)} |", "|---|" + "---|" * len(names)]
    for way, clock in clocks.items():
        medians = {name: statistics.median(clock.parts[name]) if clock.parts[name] else 0.0 for name in names}
        whole = sum(medians.values()) or 1.0
        cells = (f"{seconds:.3g} s, {seconds / whole:.0%}" for seconds in medians.values())
        lines.append(f"| {way} | {' | '.join(cells)} |")
    return [*lines, ""]


def peak_bytes() -> int:
    """The most resident memory of this program alone: on Linux, what getrusage says includes the program that started it."""
    status = Path("/proc/self/status")
    if status.is_file():
        return 1024 * int(next(line for line in status.read_text().splitlines() if line.startswith("VmHWM")).split()[1])
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def forget_peak() -> bool:
    """Begins `peak_bytes` anew from what is held now; says whether this system can."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return False
    return True
