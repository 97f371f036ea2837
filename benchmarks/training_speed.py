"""Times training against the published recipe run plainly, part by part, with medians, spread and shares.

    python benchmarks/training_speed.py                        # everything: about half an hour on two cores
    python benchmarks/training_speed.py --parts text data      # some parts; results of the others are kept
    python benchmarks/training_speed.py --small                # seconds: shows that it works, says nothing of speed

The plain way is written in plain_recipe.py: open_clip towers, both texts as full rows of 248 tokens, pictures decoded at
full size. Each part checks first that both ways give the same numbers, then runs them in turn. Weights are random: speed
does not depend on them. Writes results/training_speed.md, .json and growth.png beside this file, part by part.

Reckoned for two free cores of about 90 GFLOP/s each, minutes and GB of memory: text 10, 9; step 8, 8; full 2, 4; cached 2, 4;
data 2, 2; growth 5, 7.
"""

import argparse
import gc
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from cached_gradients import cached_part
from growth import growth_part
from recorded import RESULTS, Record, keep, machine_line, record
from step_speed import step_part
from timing import forget_peak, peak_bytes
from training_parts import ALLOWED, SMALL, Result, Sizes, data_part, full_part, text_part

PARTS = ("text", "step", "full", "cached", "data", "growth")


def main() -> None:
    """Prints and writes the tables; exits with an error where two ways do not agree."""
    arguments = _arguments()
    sizes = SMALL if arguments.small else Sizes()
    if arguments.repeats is not None:
        sizes = Sizes(**{**vars(sizes), "repeats": arguments.repeats})
    torch.set_num_threads(arguments.threads)
    with tempfile.TemporaryDirectory() as unkept:
        output = arguments.output or (Path(unkept) if arguments.small else RESULTS)
        parts: dict[str, Callable[[Sizes], Result]] = {
            "text": text_part,
            "step": partial(step_part, graphs_at_once=arguments.graphs_at_once),
            "full": full_part,
            "cached": cached_part,
            "data": data_part,
            "growth": partial(growth_part, plot=output / "growth.png"),
        }
        wrong = []
        for name in arguments.parts:
            found = _measured(parts[name], sizes, arguments.threads)
            print("\n".join(found.lines), flush=True)
            keep(output, "training_speed", "Training against the recipe run plainly", {name: found}, PARTS)
            if not found.figures.get("difference", 0.0) <= ALLOWED:
                wrong.append(f"{name} {found.figures['difference']:.1e}")
    if wrong:
        sys.exit(f"the fast way is not exact (allowed: {ALLOWED:.0e}): {', '.join(wrong)}")


def _measured(part: Callable[[Sizes], Result], sizes: Sizes, threads: int) -> Record:
    """A part's record, with its time and the most memory it held."""
    gc.collect()  # what the part before held
    machine, begin, alone = machine_line(threads), time.perf_counter(), forget_peak()
    result = part(sizes)
    minutes, peak = (time.perf_counter() - begin) / 60, peak_bytes() / 1e9
    whose = "this part" if alone else "the program so far"
    lines = [*result.lines, f"{minutes:.1f} minutes; peak memory of {whose} {peak:.1f} GB.", ""]
    return record(machine, lines, result.figures | {"minutes": minutes, "peak_gb": peak})


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS, help="what is measured (default: all)")
    parser.add_argument(
        "--small", action="store_true", help="the miniature's towers and one repeat; kept only with --output"
    )
    parser.add_argument("--repeats", type=int, help="runs of each way (default: 5)")
    parser.add_argument("--threads", type=int, default=2, help="torch threads (default: 2)")
    parser.add_argument(
        "--graphs-at-once",
        action="store_true",
        help="step: hold all towers' graphs until the loss is known, as training does; takes 16 GB instead of 8",
    )
    parser.add_argument("--output", type=Path, help="folder of the tables (default: results beside this)")
    arguments = parser.parse_args()
    if arguments.repeats is not None and arguments.repeats < 1:
        parser.error(f"--repeats is {arguments.repeats}, expected 1 or more")
    return arguments


if __name__ == "__main__":
    main()
