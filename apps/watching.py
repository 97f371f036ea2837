"""A pipeline that tells after every denoising step how far it is, can be stopped there, and shows what it has so far."""

import base64
import copy
import io
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from diffusers import DiffusionPipeline
from PIL import Image
from torch import Tensor

from debias_diffusion.sdxl.prompts import debias_pipeline, pipeline_class

_PREVIEWS = 6  # looks at a picture while it is made; each costs one decoding
_PREVIEW_LATENTS = 64  # a preview's longer side in latents: 512 pixels are enough to see where it goes


class Stopped(Exception):
    """The visitor asked for an end; nothing is wrong."""


@dataclass(frozen=True)
class Step:
    """One denoising step done: of picture number `picture` (from 0) of the set, `done` of `total` steps.

    `preview` is the picture so far, or None between looks.
    """

    set_name: str
    picture: int
    done: int
    total: int
    preview: Image.Image | None


def watched(
    pipe: DiffusionPipeline, name: str, tell: Callable[[Step], None], stop: threading.Event
) -> DiffusionPipeline:
    """The same pipeline, pixel for pixel, which calls `tell` after every step and raises `Stopped` once `stop` is set.

    All parts are shared with `pipe`, which stays as it is.
    """
    own: Any = copy.copy(debias_pipeline(pipe))
    own.__class__ = _watched_class()
    own._watcher = _Watcher(name, tell, stop)
    return own


class _Watcher:
    def __init__(self, name: str, tell: Callable[[Step], None], stop: threading.Event) -> None:
        self.name, self.tell, self.stop = name, tell, stop
        self.pictures_done = 0

    def __call__(self, pipe: Any, index: int, timestep: Any, tensors: dict[str, Any]) -> dict[str, Any]:
        if self.stop.is_set():
            raise Stopped
        done, total = index + 1, pipe.num_timesteps
        every = max(1, -(-total // _PREVIEWS))
        wanted = done % every == 0 and done < total and not getattr(pipe, "_all_hooks", [])
        # Under offload a decoding would throw the UNet off the device in mid-picture.
        preview = decode_preview(pipe, tensors["latents"]) if wanted else None
        self.tell(Step(self.name, self.pictures_done, done, total, preview))
        self.pictures_done += done == total
        return {}


@cache
def _watched_class() -> type[DiffusionPipeline]:
    kind: Any = pipeline_class()

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self._watcher.stop.is_set():
            raise Stopped
        return kind.__call__(self, *args, callback_on_step_end=self._watcher, **kwargs)

    # The same name: the library knows its own pipeline by it.
    made: type[DiffusionPipeline] = type(kind.__name__, (kind,), {"__call__": call, "__module__": __name__})
    return made


@torch.no_grad()
def decode_preview(pipe: Any, latents: Tensor) -> Image.Image:
    """RGB picture of unfinished `latents` (1, 4, height, width), reduced to 512 pixels; draws no random numbers."""
    vae = pipe.vae
    scale = _PREVIEW_LATENTS / max(latents.shape[-2:])
    small = latents.float()
    if scale < 1:
        small = F.interpolate(small, scale_factor=scale, mode="area")
    config = vae.config
    std, mean = getattr(config, "latents_std", None), getattr(config, "latents_mean", None)
    small = small * (1 if std is None else small.new_tensor(std).view(1, -1, 1, 1)) / config.scaling_factor
    small = small + (0 if mean is None else small.new_tensor(mean).view(1, -1, 1, 1))
    upcast = vae.dtype == torch.float16 and config.force_upcast
    if upcast:  # SDXL's own VAE overflows in half precision
        vae.to(torch.float32)
    try:
        pixels = vae.decode(small.to(vae.dtype), return_dict=False)[0]
    finally:
        if upcast:
            vae.to(torch.float16)
    array = ((pixels[0].float().nan_to_num() / 2 + 0.5).clamp(0, 1) * 255).round().byte()
    return Image.fromarray(array.permute(1, 2, 0).cpu().numpy())


def data_uri(picture: Image.Image) -> str:
    """The picture as a PNG that stands in the page itself, so that a preview leaves no file behind."""
    buffer = io.BytesIO()
    picture.save(buffer, format="PNG")
    return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()
