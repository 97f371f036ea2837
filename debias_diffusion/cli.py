"""The command line: one row a command, imported only when it is called."""

import inspect
import logging
import os
import sys
from collections.abc import Callable
from importlib import import_module
from typing import Any

COMMANDS: dict[str, tuple[str, str]] = {
    "demo": (
        "debias_diffusion.demo:demo",
        "train, measure and compare on the miniature world, on this machine, in minutes",
    ),
    "evaluate": (
        "debias_diffusion.evaluation.command:evaluate",
        "benchmarks x perturbations for encoders: table, report, figures",
    ),
    "compare-results": (
        "debias_diffusion.evaluation.command:compare_results",
        "result files side by side, next to published rows",
    ),
    "attention": (
        "debias_diffusion.evaluation.command:attention",
        "where in the text encoders look, by depth in tokens",
    ),
    "zero-shot": (
        "debias_diffusion.evaluation.command:zero_shot",
        "zero-shot classification on CIFAR or a folder of classes",
    ),
    "pack": ("debias_diffusion.data.pack:pack", "training data -> shards with pictures resized once"),
    "export": ("debias_diffusion.sdxl.command:export", "encoder folder -> SDXL slot folder or single file, and back"),
    "drift": ("debias_diffusion.sdxl.command:drift", "how far a tower is from the one SDXL was trained with"),
    "generate": ("debias_diffusion.sdxl.generate_command:generate", "prompts -> pictures with their record"),
    "fidelity": (
        "debias_diffusion.fidelity:fidelity",
        "how much of a prompt its picture shows, by depth in tokens, for several sets of encoders",
    ),
}


EXAMPLES: dict[str, tuple[str, ...]] = {
    "demo": ("", "--seed 1 --output runs/seed1", "--base miniature-siglip:base --output runs/siglip"),
    "evaluate": (
        "runs/demo/base runs/demo/long-clip runs/demo/debias",
        "ViT-B-16:openai runs/b16/encoder --benchmarks urban1k docci coco --root data",
        "runs/b16/encoder --benchmarks manifest:mine.jsonl --perturbations swap_1_4 filler_5",
    ),
    "compare-results": ("runs/evaluation runs/other/results.json",),
    "attention": ("runs/demo/long-clip runs/demo/debias --benchmark miniature:400",),
    "zero-shot": ("ViT-B-16:openai runs/b16/encoder --dataset cifar10 --root data",),
    "pack": ("sharegpt4v.json packed --image-root data", "my-pictures packed --short-side 384"),
    "export": (
        "runs/l14/encoder slots --slot text_encoder",
        "runs/bigg14/encoder slots --slot text_encoder_2",
        "sd_xl_base_1.0.safetensors from_sdxl --to encoder --slot text_encoder --base ViT-L-14:openai",
    ),
    "drift": (
        "miniature:debias miniature",
        "slots ViT-L-14:openai --slot text_encoder --prompts prompts.txt --output drift.json",
    ),
    "generate": (
        "miniature pictures --prompt 'A red star in the top left.' --seed 0 1 --text-encoder miniature:debias",
        "stabilityai/stable-diffusion-xl-base-1.0 pictures --prompts prompts.txt --text-encoder slots --compare-with-base",
    ),
    "fidelity": (
        "runs/fidelity --scenes 20 --seeds 2",
        "runs/fidelity-short --short --sets stock miniature:debias",
        "runs/fidelity-sdxl --checkpoint sdxl-folder --sets stock mine=slots --prompts prompts.txt --judge ViT-B-16:openai",
    ),
}
"""Words that follow a command, shown in its help."""


def main(argv: list[str] | None = None) -> None:
    """Runs one command; what it returns is printed, what is wrong is one line on stderr and exit status 2.

    Ends quietly where nobody reads what is printed any more (`| head`).
    """
    try:
        try:
            _run(sys.argv[1:] if argv is None else argv)
        finally:
            if sys.stdout:
                sys.stdout.flush()
    except BrokenPipeError:
        # What is still in the buffer would raise again when Python flushes it at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(0)


def _run(arguments: list[str]) -> None:
    if not arguments or arguments[0] in ("-h", "--help"):
        print(_overview())
        return
    name, *rest = arguments
    if name == "--version":
        from debias_diffusion import __version__

        print(__version__)
        return
    if name not in COMMANDS:
        _fail(f"no command is called {name!r}; commands: {', '.join(COMMANDS)}")
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s: %(message)s")
    import tyro

    from debias_diffusion.config import RunStopped

    module, function = COMMANDS[name][0].split(":")
    try:
        command = getattr(import_module(module), function)
        description = _description(name, command)
        result = tyro.cli(command, prog=f"debias-diffusion {name}", description=description, args=rest)
    except BrokenPipeError:
        raise
    except (ValueError, OSError, ModuleNotFoundError, RunStopped) as error:
        _fail(str(error))
    except KeyboardInterrupt:
        sys.exit(130)
    if result:
        print(result)


def _description(name: str, command: Callable[..., Any]) -> str:
    """What the command does, from its docstring, and lines to type."""
    says = (inspect.getdoc(command) or "").partition("\n\nArgs:")[0]
    lines = [f"  debias-diffusion {name} {words}".rstrip() for words in EXAMPLES.get(name, ())]
    return "\n".join([says, "", "Examples:", *lines]) if lines else says


def _overview() -> str:
    width = max(map(len, COMMANDS))
    rows = "\n".join(f"  {name:<{width}}  {text}" for name, (_, text) in COMMANDS.items())
    return (
        "usage: debias-diffusion COMMAND ... (COMMAND --help for its options)\n\n"
        f"{rows}\n\nTraining is its own script: accelerate launch train/encoder.py PRESET --output DIR"
    )


def _fail(message: str) -> None:
    print(f"debias-diffusion: {message}", file=sys.stderr)
    sys.exit(2)


if __name__ == "__main__":
    main()
