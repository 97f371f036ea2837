"""The command line: one row a command, imported only when it is called."""

import logging
import sys
from importlib import import_module

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
    "export": ("debias_diffusion.sdxl.command:export", "encoder folder -> SDXL slot folder or single file, and back"),
    "drift": ("debias_diffusion.sdxl.command:drift", "how far a tower is from the one SDXL was trained with"),
    "generate": ("debias_diffusion.sdxl.generate_command:generate", "prompts -> pictures with their record"),
}


def main(argv: list[str] | None = None) -> None:
    """Runs one command; what it returns is printed, what is wrong is one line on stderr and exit status 2."""
    arguments = sys.argv[1:] if argv is None else argv
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
        result = tyro.cli(getattr(import_module(module), function), prog=f"debias-diffusion {name}", args=rest)
    except (ValueError, OSError, ModuleNotFoundError, RunStopped) as error:
        _fail(str(error))
    except KeyboardInterrupt:
        sys.exit(130)
    if result:
        print(result)


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
