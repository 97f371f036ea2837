"""Times training against the published recipe run plainly, part by part, with medians, spread and shares.

    python benchmarks/training_speed.py                        # everything: about an hour on two cores
    python benchmarks/training_speed.py --parts text data      # some parts
    python benchmarks/training_speed.py --small                # seconds: shows that it works, says nothing of speed

The plain way is written in plain_recipe.py: open_clip towers, both texts as full rows of 248 tokens, pictures decoded at
full size. Each part checks first that both ways give the same numbers, then runs them in turn. Weights are random: speed
does not depend on them. Writes results/training_speed.md, .json and growth.png beside this file.
"""

import argparse
import json
import os
import platform
import sys
from functools import partial
from pathlib import Path

import torch
from growth import growth_part
from training_parts import ALLOWED, SMALL, Sizes, cached_part, data_part, full_part, step_part, text_part

RESULTS = Path(__file__).resolve().parent / "results"
PARTS = ("text", "step", "full", "cached", "data", "growth")


def main() -> None:
    """Prints and writes the tables; exits with an error where two ways do not agree."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS, help="what is measured (default: all)")
    parser.add_argument("--small", action="store_true", help="the miniature's towers and one repeat")
    parser.add_argument("--repeats", type=int, help="runs of each way (default: 5)")
    parser.add_argument("--threads", type=int, default=2, help="torch threads (default: 2)")
    parser.add_argument(
        "--output", type=Path, default=RESULTS, help="folder of the tables (default: results beside this)"
    )
    arguments = parser.parse_args()
    sizes: Sizes = SMALL if arguments.small else Sizes()
    if arguments.repeats is not None:
        if arguments.repeats < 1:
            parser.error(f"--repeats is {arguments.repeats}, expected 1 or more")
        sizes = Sizes(**{**vars(sizes), "repeats": arguments.repeats})
    torch.set_num_threads(arguments.threads)
    arguments.output.mkdir(parents=True, exist_ok=True)
    parts = {
        "text": text_part, "step": step_part, "full": full_part, "cached": cached_part, "data": data_part,
        "growth": partial(growth_part, plot=arguments.output / "growth.png"),
    }  # fmt: skip
    lines, figures = [_machine(arguments.threads, sizes.repeats), ""], {}
    print(lines[0], flush=True)
    for name in arguments.parts:
        result = parts[name](sizes)
        print("\n".join(result.lines), flush=True)
        lines += result.lines
        figures[name] = result.figures
    command = " ".join(["python", "benchmarks/training_speed.py", *sys.argv[1:]])
    (arguments.output / "training_speed.md").write_text("\n".join([f"`{command}`", "", *lines]) + "\n")
    (arguments.output / "training_speed.json").write_text(json.dumps(figures, indent=1) + "\n")
    differences = {n: f["difference"] for n, f in figures.items() if "difference" in f}
    wrong = [f"{name} {value:.1e}" for name, value in differences.items() if not value <= ALLOWED]
    if wrong:
        sys.exit(f"the fast way is not exact (allowed: {ALLOWED:.0e}): {', '.join(wrong)}")


def _machine(threads: int, repeats: int) -> str:
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else float("nan")
    return (
        f"float32, {threads} threads of {os.cpu_count()} cores ({platform.machine()}), torch {torch.__version__}, medians of "
        f"{repeats} runs (lowest to highest); load of the machine at the start {load:.1f}"
    )


if __name__ == "__main__":
    main()
