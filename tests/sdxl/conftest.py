"""Tiny SDXL components: real classes, random weights, CLIP's whole vocabulary, nothing downloaded."""

import inspect
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import AutoencoderKL, EulerDiscreteScheduler, StableDiffusionXLPipeline, UNet2DConditionModel

from debias_diffusion.encoders.checkpoint import load_encoder
from debias_diffusion.encoders.encoder import Encoder, build
from debias_diffusion.sdxl.export import export_slot
from debias_diffusion.sdxl.slot_folder import open_slot

WIDTH = 64
SLOT_NAMES = ("text_encoder", "text_encoder_2")
QUICK_GELU = {"text_encoder": True, "text_encoder_2": False}

LONG = "a small red house stands beside the river, and behind it " * 12 + "three white geese walk in a row"
"""More than 77 tokens and fewer than 248."""


@pytest.fixture(autouse=True)
def _one_torch_thread() -> None:
    torch.set_num_threads(1)


def make_tower(slot: str, seed: int = 0) -> Encoder:
    """An open_clip encoder for the slot: 2 layers, 64 wide, 77 tokens, and the slot's own activation."""
    torch.manual_seed(seed + SLOT_NAMES.index(slot))
    config = {
        "embed_dim": WIDTH,
        "quick_gelu": QUICK_GELU[slot],
        "vision_cfg": {"image_size": 16, "patch_size": 8, "width": 32, "layers": 1, "head_width": 16},
        "text_cfg": {"context_length": 77, "vocab_size": 49408, "width": WIDTH, "heads": 4, "layers": 2},
    }
    encoder = build(f"tiny-{slot}", config, history={"base": "miniature:random"})  # as small, so without a warning
    for parameter in encoder.model.parameters():
        # Fresh norms are ones and biases zeros: a swapped or dropped one would not show.
        parameter.data += 0.1 * torch.randn_like(parameter)
    return encoder


def trained(encoder: Encoder, seed: int = 1) -> Encoder:
    """A copy at 248 tokens whose text tower has moved the way training moves it: all but the first 20 positions."""
    encoder = encoder.stretched(248)
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in encoder.model.text.named_parameters():
        step = 0.02 * torch.randn(parameter.shape, generator=generator)
        if name == "positional_embedding":
            step[:20] = 0
        parameter.data += step
    return encoder


@pytest.fixture(scope="session")
def towers() -> dict[str, Encoder]:
    """One base encoder a slot, at 77 tokens; not to be changed."""
    return {slot: make_tower(slot) for slot in SLOT_NAMES}


@pytest.fixture(scope="session")
def long_towers(towers: dict[str, Encoder]) -> dict[str, Encoder]:
    """The same after a training that moved them, at 248 tokens; not to be changed."""
    return {slot: trained(encoder) for slot, encoder in towers.items()}


@pytest.fixture(scope="session")
def slots_77(towers: dict[str, Encoder], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with both base towers exported in float32; not to be changed."""
    return _export(towers, tmp_path_factory.mktemp("slots") / "base")


@pytest.fixture(scope="session")
def slots_248(long_towers: dict[str, Encoder], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with both trained towers exported in float32; not to be changed."""
    return _export(long_towers, tmp_path_factory.mktemp("slots") / "trained")


@pytest.fixture(scope="session")
def mini(tiny_folder: Path) -> Encoder:
    """An encoder of 851 ids, for whatever does not depend on CLIP's own vocabulary; not to be changed."""
    return replace(load_encoder(tiny_folder), history={"base": "miniature:random"})


@pytest.fixture(scope="session")
def mini_slots(mini: Encoder, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with `mini` in both slots, at 77 tokens in float32; not to be changed."""
    return _export(dict.fromkeys(SLOT_NAMES, mini), tmp_path_factory.mktemp("slots") / "mini")


def _export(encoders: dict[str, Encoder], folder: Path) -> Path:
    for slot, encoder in encoders.items():
        export_slot(encoder, slot, folder, dtype="fp32")
    return folder


def make_pipe(folder: Path, dtype: torch.dtype = torch.float32) -> StableDiffusionXLPipeline:
    """A stock SDXL pipeline, 32 x 32 pixels, with the two slots of `folder`; the same weights each time."""
    first, second = (open_slot(folder, slot) for slot in SLOT_NAMES)
    torch.manual_seed(0)
    unet = UNet2DConditionModel(
        sample_size=16,
        block_out_channels=(16, 32),
        layers_per_block=1,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        attention_head_dim=(2, 4),
        use_linear_projection=True,
        addition_embed_type="text_time",
        addition_time_embed_dim=8,
        projection_class_embeddings_input_dim=6 * 8 + WIDTH,
        cross_attention_dim=2 * WIDTH,
        norm_num_groups=8,
    )
    vae = AutoencoderKL(
        block_out_channels=(16, 32),
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        norm_num_groups=8,
        sample_size=32,
    )
    pipe = StableDiffusionXLPipeline(
        vae=vae,
        text_encoder=first.model,
        text_encoder_2=second.model,
        tokenizer=first.tokenizer,
        tokenizer_2=second.tokenizer,
        unet=unet,
        scheduler=EulerDiscreteScheduler(beta_start=0.00085, beta_end=0.012, beta_schedule="scaled_linear"),
        add_watermarker=False,
    )
    pipe.set_progress_bar_config(disable=True)
    return pipe if dtype == torch.float32 else pipe.to(dtype=dtype)


@pytest.fixture
def pipe(slots_77: Path) -> StableDiffusionXLPipeline:
    """A fresh stock pipeline at 77 tokens, which a test may change."""
    return make_pipe(slots_77)


@pytest.fixture
def long_pipe(slots_248: Path) -> StableDiffusionXLPipeline:
    """A fresh stock pipeline at 248 tokens, which a test may change."""
    return make_pipe(slots_248)


@pytest.fixture(scope="session", name="make_tower")
def _make_tower() -> Callable[..., Encoder]:
    """make_tower(slot, seed): another base encoder for the slot."""
    return make_tower


@pytest.fixture(scope="session", name="trained")
def _trained() -> Callable[..., Encoder]:
    """trained(encoder, seed): its copy at 248 tokens, moved the way training moves it."""
    return trained


@pytest.fixture(scope="session", name="make_pipe")
def _make_pipe() -> Callable[..., StableDiffusionXLPipeline]:
    """make_pipe(folder, dtype): a stock pipeline with the slots of a folder, the same UNet and VAE each time."""
    return make_pipe


@pytest.fixture(scope="session")
def long_prompt() -> str:
    """More than 77 tokens, fewer than 248."""
    return LONG


@pytest.fixture(scope="session")
def draw() -> Callable[..., torch.Tensor]:
    """draw(pipe, **more): a picture (3, 32, 32) of two steps, from the same noise each time."""

    def run(pipe: Any, **more: Any) -> torch.Tensor:
        settings = {"num_inference_steps": 2, "guidance_scale": 3.0, "output_type": "pt"}
        if "height" in inspect.signature(pipe.__call__).parameters:
            settings |= {"height": 32, "width": 32}
        if "prompt_embeds" not in more:
            settings["prompt"] = LONG
        output = pipe(generator=torch.Generator().manual_seed(0), **settings | more)
        return output.images[0].float().cpu()

    return run
