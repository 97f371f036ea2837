"""Text encoders side by side in a browser: `python -m apps.compare`, or `debias-diffusion demo --app`.

With nothing said it opens the miniature that is shipped. With real SDXL:

    python -m apps.compare --checkpoint stabilityai/stable-diffusion-xl-base-1.0 \
        --set long-clip=slots/long-clip debias=slots/debias
"""

import logging
import os
import signal
import sys
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

if TYPE_CHECKING:
    import gradio as gr

    from apps.studio import Studio

STYLE = Path(__file__).with_name("style.css")
# Either `--set a=x b=y` or `--set a=x --set b=y`: with a plain tuple the second form would lose a.
Sets = Annotated[
    tuple[tuple[str, ...], ...], tyro.conf.UseAppendAction, tyro.conf.arg(name="set", metavar="NAME=FOLDER ...")
]
LOOPBACK = ("127.0.0.1", "localhost", "::1")


def compare(
    checkpoint: str = "miniature",
    sets: Sets = (),
    judge: str | None = None,
    config: Path | None = None,
    variant: str | None = None,
    dtype: Literal["fp16", "bf16", "fp32"] | None = None,
    device: str | None = None,
    offload: bool = False,
    host: str = "127.0.0.1",
    port: int | None = None,
    share: bool = False,
) -> None:
    """Opens the app and serves it until it is interrupted.

    Args:
        checkpoint: SDXL checkpoint: a diffusers folder or hub name, one .safetensors file, or "miniature".
        sets: Encoders beside the checkpoint's own, each NAME=FOLDER with text_encoder and text_encoder_2; for the
            miniature those shipped where left out. NAME=chunks is the checkpoint's own, reading in pieces.
        judge: Encoder that says how much of each sentence is in a real picture; never one that draws.
        config: Folder with the configuration of a one-file checkpoint, where there is no network.
        variant: Of the checkpoint's weight files, such as fp16; needed only where a folder has several.
        dtype: Of all models; fp16 on a GPU and fp32 on a CPU where left out.
        device: Where to draw; a GPU where there is one.
        offload: Keeps on the device only the model that is at work (needs a GPU).
        host: Address to listen at. Others than this machine reach the app only where this says so, such as 0.0.0.0.
        port: Port; the first free one from 7860 on where left out.
        share: Opens a public link through gradio's servers as well.
    """
    more: dict[str, Any] = {"config": config, "variant": variant, "dtype": dtype, "device": device, "offload": offload}
    studio, notes = load_studio(checkpoint, tuple(chain.from_iterable(sets)), judge=judge, **more)
    for note in notes:
        print(f"note: {note}", file=sys.stderr)
    # What is cut stands on the page; visitors' prompts stay out of the terminal.
    logging.getLogger("pipeline_debias_sdxl").setLevel(logging.ERROR)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # ends as Ctrl+C does, so that visitors' files go too
    app, url = launch(studio, host=host, port=port, share=share)
    print(f"Comparing {', '.join(studio.pipes)} of {checkpoint} at {url}  (Ctrl+C ends it)", flush=True)
    app.block_thread()


def load_studio(
    checkpoint: str,
    sets: tuple[str, ...] = (),
    *,
    judge: str | None = None,
    config: Path | None = None,
    variant: str | None = None,
    dtype: str | None = None,
    device: str | None = None,
    offload: bool = False,
) -> "tuple[Studio, list[str]]":
    """The studio of a checkpoint and its sets, and what should be known of them; errors name the folder."""
    from apps.studio import open_studio
    from debias_diffusion.encoders.checkpoint import load_encoder
    from debias_diffusion.sdxl.checkpoint_pipeline import load_pipeline
    from debias_diffusion.sdxl.devices import find_device, find_precision
    from debias_diffusion.sdxl.sets import set_names
    from debias_diffusion.sdxl.shipped import CHECKPOINT, SLOT_SETS, checkpoint_source

    named = set_names(sets) if sets else {}
    if not sets and checkpoint == CHECKPOINT:
        named = set_names([f"{CHECKPOINT}:{kind}" for kind in SLOT_SETS])
    device = find_device(device)
    pipe = load_pipeline(checkpoint_source(checkpoint), find_precision(device, dtype), variant, config)
    if offload:
        pipe.enable_model_cpu_offload(device=device)
    else:
        pipe.to(device)
    return open_studio(pipe, named, None if judge is None else load_encoder(judge, device))


def launch(
    studio: "Studio", *, host: str = "127.0.0.1", port: int | None = None, share: bool = False
) -> "tuple[gr.Blocks, str]":
    """Starts serving and returns the app and its address; nothing outside this machine is asked for anything."""
    os.environ.setdefault("GRADIO_ANALYTICS_ENABLED", "False")  # before gradio is imported
    import gradio as gr

    from apps.wiring import build_app

    app = build_app(studio, may_add=host in LOOPBACK and not share)
    fonts: dict[str, Any] = {
        "font": ["system-ui", "-apple-system", "Segoe UI", "Liberation Sans", "sans-serif"],
        "font_mono": ["ui-monospace", "monospace"],
    }
    _, url, shared = app.launch(
        server_name=host,
        server_port=port,
        share=share,
        prevent_thread_lock=True,
        quiet=True,
        show_error=True,
        footer_links=["api"],
        run_history=False,
        ssr_mode=False,
        pwa=False,
        mcp_server=False,
        enable_monitoring=False,
        max_file_size="64kb",  # no field takes a file
        theme=gr.themes.Default(**fonts),
        css_paths=STYLE,
    )
    return app, shared or url


def main(argv: list[str] | None = None) -> None:
    """Runs the app; what is wrong with an argument is one line on stderr and exit status 2."""
    try:
        tyro.cli(compare, prog="python -m apps.compare", args=argv)
    except (ValueError, OSError, ModuleNotFoundError) as error:
        print(f"apps.compare: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
