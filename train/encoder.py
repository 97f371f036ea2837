"""Trains a DeBias-CLIP encoder; the same command for one process and for many.

  accelerate launch train/encoder.py PRESET --data CAPTIONS.json --output runs/NAME

PRESET is a row of debias_diffusion.config.PRESETS; every field can be set by its flag. Examples:

  accelerate launch train/encoder.py debias-l14 --data sharegpt4v.json --image-root data --output runs/l14 --precision bf16
  accelerate launch train/encoder.py debias-b16 --data captions.jsonl --output runs/b16 --resume
  accelerate launch train/encoder.py miniature-debias --output runs/mini
  accelerate launch train/encoder.py debias-bigg14 --data captions.jsonl --dry-run

--dry-run prints model size, memory, one batch as the text tower reads it and the first loss, and stops; nothing is written, so
--output may be left out.
"""

import dataclasses
import logging
import os
import signal
import sys
import warnings

from debias_diffusion.config import PRESETS, TrainConfig

_DRY_RUN = "--dry-run"


def main(argv: list[str]) -> int:
    """Parses the preset and its overrides, runs the job, and turns what is wrong into one line and an exit status."""
    if not argv or argv[0] in ("-h", "--help"):
        print(_overview())
        return 0 if argv else 2
    preset, *rest = argv
    if preset not in PRESETS:
        return _fail(f"no preset is called {preset!r}; presets: {', '.join(PRESETS)}")
    rehearsing = _DRY_RUN in rest
    import tyro

    config = tyro.cli(
        TrainConfig,
        default=PRESETS[preset],
        args=[a for a in rest if a != _DRY_RUN],
        prog=f"train/encoder.py {preset}",
        description=__doc__,
    )
    problems = config.problems(rehearsing=rehearsing)
    if problems:
        return _fail("; ".join(problems)) if os.environ.get("RANK", "0") == "0" else 2
    return _run(config, rehearsing)


def _run(config: TrainConfig, rehearsing: bool) -> int:
    from debias_diffusion.training.loop import Interrupted, NonFiniteLoss, dry_run, train

    is_main = os.environ.get("RANK", "0") == "0"
    is_first_here = os.environ.get("LOCAL_RANK", "0") == "0"  # what only this machine lacks, only it can say
    logging.basicConfig(level=logging.INFO if is_main else logging.ERROR, format="%(levelname)s: %(message)s")
    for noisy in ("PIL", "matplotlib", "urllib3", "open_clip", "root"):
        logging.getLogger(noisy).setLevel(logging.WARNING if is_main else logging.ERROR)
    if not is_main:  # every process would say the same, but for pictures that only it has read
        logging.getLogger("debias_diffusion").setLevel(logging.ERROR)
        logging.getLogger("debias_diffusion.training.progress.faults").setLevel(logging.WARNING)
        warnings.simplefilter("ignore")
    try:
        said = dry_run(config) if rehearsing else f"encoder: {train(config)}"
    except (ValueError, OSError) as error:
        return _fail(str(error)) if is_first_here or isinstance(error, OSError) else 2
    except NonFiniteLoss as error:
        return _fail(str(error), 3)
    except Interrupted as stop:
        return _fail(str(stop), 143) if is_main else 143
    except KeyboardInterrupt:
        return _fail("stopped without saving; --resume goes on from the newest checkpoint", 130) if is_main else 130
    if is_main:
        print(said)
    return 0


def _overview() -> str:
    width = max(map(len, PRESETS))
    plain = TrainConfig()
    rows = []
    for name, preset in PRESETS.items():
        shown = {f.name: getattr(preset, f.name) for f in dataclasses.fields(preset)}
        changed = [f"{k} {v}" for k, v in shown.items() if v != getattr(plain, k) and k not in ("encoder", "recipe")]
        rows.append(
            f"  {name:<{width}}  {preset.recipe} from {preset.encoder}{'; ' if changed else ''}{', '.join(changed)}"
        )
    return f"{__doc__}\nPresets:\n" + "\n".join(rows) + "\n\nAll fields: train/encoder.py PRESET --help"


def _fail(message: str, status: int = 2) -> int:
    print(f"train/encoder.py: {message}", file=sys.stderr)
    return status


if __name__ == "__main__":
    status = main(sys.argv[1:])
    if status in (130, 143):  # it is ending as asked: one more Ctrl-C must not take its exit status away
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)
    sys.exit(status)
