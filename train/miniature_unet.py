"""The miniature SDXL's UNet: SDXL's own class and conditioning, trained on latents and text states made once."""

import dataclasses
import time
from collections.abc import Callable, Iterator

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from diffusers import AutoencoderKL, EulerDiscreteScheduler, UNet2DConditionModel
from miniature_vae import LATENT_CHANNELS, VAE_SCALE, scene_pixels
from torch import Tensor
from tqdm import tqdm

from debias_diffusion.data.drawings import SHORT_ROWS, Drawing, training_drawing
from debias_diffusion.data.scenes import SIZE
from debias_diffusion.sdxl.slots import Slot
from debias_diffusion.training.ema import WeightAverage
from debias_diffusion.training.optim import learning_rate_at

SCHEDULER = {
    "beta_start": 0.00085,
    "beta_end": 0.012,
    "beta_schedule": "scaled_linear",
    "timestep_spacing": "trailing",
    "prediction_type": "v_prediction",
    "rescale_betas_zero_snr": True,
}
"""SDXL's schedule, but with velocities and no signal left at the last step: with noise predictions, as SDXL has, a UNet this
small never learns where things go, because there the steps that decide it weigh next to nothing in the loss."""
TIME_IDS = (SIZE, SIZE, 0, 0, SIZE, SIZE)
TIME_DIM = 16
GROUP = 100
"""Drawings that are encoded at a time."""


@dataclasses.dataclass(frozen=True)
class UNetConfig:
    """How the miniature's UNet is trained."""

    steps: int = 4200
    batch_size: int = 32
    drawings: int = 40_000
    widths: tuple[int, int, int] = (48, 96, 96)
    learning_rate: float = 8e-4
    warmup_steps: int = 200
    weight_decay: float = 0.01
    ema: float = 0.999
    max_snr: float = 5.0
    """Velocity losses, which weigh the clean latents' error by SNR + 1, are weighed so by this at most (compare Hang et al.
    2023): without it the nearly clean steps dominate."""
    drop_text: float = 0.1
    """Share of rows trained with zeros for text: what SDXL's guidance takes for an empty negative."""
    seed: int = 0
    minutes: float = 0.0
    """Ends the run, and its schedule, after so many minutes; 0 means by steps alone."""


def new_unet(widths: tuple[int, int, int], text_width: int, pooled_width: int) -> UNet2DConditionModel:
    """A fresh UNet, conditioned as SDXL's and like it without attention at its highest resolution.

    At its lowest, 4x4, zero padding tells every cell where it stands: nothing else in this UNet does.
    """
    return UNet2DConditionModel(
        sample_size=SIZE // VAE_SCALE,
        in_channels=LATENT_CHANNELS,
        out_channels=LATENT_CHANNELS,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
        block_out_channels=widths,
        layers_per_block=1,
        transformer_layers_per_block=1,
        attention_head_dim=widths[1] // 32,
        cross_attention_dim=text_width,
        use_linear_projection=True,
        norm_num_groups=16,
        addition_embed_type="text_time",
        addition_time_embed_dim=TIME_DIM,
        projection_class_embeddings_input_dim=pooled_width + len(TIME_IDS) * TIME_DIM,
    )


@dataclasses.dataclass(frozen=True)
class Prepared:
    """Latents (rows, channels, 16, 16), text states (rows, 77, dim) and pooled vectors (rows, dim), in half precision."""

    latents: Tensor
    states: Tensor
    pooled: Tensor


@torch.no_grad()
def text_states(slots: list[Slot], captions: list[str]) -> tuple[Tensor, Tensor]:
    """What SDXL reads of both slots at 77 rows: penultimate states side by side, and the second's pooled vectors."""
    states, pooled = [], None
    for slot in slots:
        tokens = slot.tokenizer(
            captions, padding="max_length", max_length=SHORT_ROWS, truncation=True, return_tensors="pt"
        )
        output = slot.model(tokens.input_ids, output_hidden_states=True)
        states.append(output.hidden_states[-2])
        pooled = getattr(output, "text_embeds", pooled)
    assert pooled is not None
    return torch.cat(states, dim=-1), pooled


@torch.no_grad()
def picture_latents(vae: AutoencoderKL, drawings: list[Drawing]) -> Tensor:
    """Scaled latents of the drawings' pictures."""
    batch = torch.stack([scene_pixels(d.scene) for d in drawings])
    return vae.encode(batch.contiguous(memory_format=torch.channels_last)).latent_dist.mean * vae.config.scaling_factor


def prepare(vae: AutoencoderKL, slots: list[Slot], count: int, seed: int) -> Prepared:
    """All that the UNet is trained on, computed once: encoders and VAE are frozen."""
    latents, states, pooled = [], [], []
    for drawings in tqdm(_groups(count, seed), total=count // GROUP, unit="batch", desc="latents and text states"):
        latents.append(picture_latents(vae, drawings).half())
        text, vector = text_states(slots, [d.caption for d in drawings])
        states.append(text.half())
        pooled.append(vector.half())
    return Prepared(torch.cat(latents), torch.cat(states), torch.cat(pooled))


def _groups(count: int, seed: int) -> Iterator[list[Drawing]]:
    for start in range(0, count, GROUP):
        yield [training_drawing(seed, i) for i in range(start, min(start + GROUP, count))]


def batches(count: int, size: int, generator: torch.Generator) -> Iterator[Tensor]:
    """Row numbers without end, each epoch in a new order."""
    while True:
        yield from torch.randperm(count, generator=generator)[: count // size * size].view(-1, size)


def train_unet(
    config: UNetConfig, prepared: Prepared, checkpoint: Callable[[int, UNet2DConditionModel], None] | None = None
) -> UNet2DConditionModel:
    """The UNet, trained: the moving average of its weights. `checkpoint(step, unet)` is called with it now and then.

    Where torch.distributed is on (torchrun), each process computes its share of every batch.
    """
    rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    torch.manual_seed(config.seed)
    order, noise = torch.Generator().manual_seed(config.seed), torch.Generator().manual_seed(config.seed + rank)
    unet = new_unet(config.widths, prepared.states.shape[-1], prepared.pooled.shape[-1])
    unet.to(memory_format=torch.channels_last)  # a step is about a quarter faster so
    average = WeightAverage(unet, config.ema)
    alphas = EulerDiscreteScheduler(**SCHEDULER).alphas_cumprod
    optimizer = torch.optim.AdamW(
        unet.parameters(), lr=config.learning_rate, weight_decay=config.weight_decay, betas=(0.9, 0.99)
    )
    started, losses = time.perf_counter(), []
    bar = tqdm(total=config.steps, unit="step", mininterval=5, disable=rank > 0)
    for step, rows in enumerate(batches(len(prepared.latents), config.batch_size, order)):
        done = _share_done(config, step, started, world)
        if done >= 1:
            break
        rate = learning_rate_at(int(done * config.steps), config.learning_rate, 0, config.steps)
        for group in optimizer.param_groups:
            group["lr"] = rate * min(1.0, (step + 1) / config.warmup_steps)
        loss = _loss(unet, prepared, rows.chunk(world)[rank], alphas, config, noise)
        optimizer.zero_grad()
        loss.backward()
        _average_gradients(unet, world)
        torch.nn.utils.clip_grad_norm_(unet.parameters(), 1.0)
        optimizer.step()
        average.update(unet)
        losses.append(loss.item())
        bar.update()
        bar.set_postfix_str(f"loss {np.mean(losses[-200:]):.4f}", refresh=False)
        if checkpoint and rank == 0 and step % 1000 == 999:
            with average.in_place_of(unet):
                checkpoint(step + 1, unet)
    average.copy_to(unet)
    return unet.eval()


def _share_done(config: UNetConfig, step: int, started: float, world: int) -> float:
    """How much of the run is over, the same on every process."""
    if not config.minutes:
        return step / config.steps
    done = torch.tensor((time.perf_counter() - started) / 60 / config.minutes)
    if world > 1:
        dist.broadcast(done, 0)
    return done.item()


def _average_gradients(unet: UNet2DConditionModel, world: int) -> None:
    if world == 1:
        return
    gradients = [p.grad for p in unet.parameters() if p.grad is not None]
    flat = torch.cat([g.flatten() for g in gradients])
    dist.all_reduce(flat)
    parts = (flat / world).split([g.numel() for g in gradients])
    for gradient, part in zip(gradients, parts, strict=True):
        gradient.copy_(part.view_as(gradient))


def _loss(unet, prepared, rows, alphas, config, generator) -> Tensor:
    latents = prepared.latents[rows].float()
    states, pooled = prepared.states[rows].float(), prepared.pooled[rows].float()
    kept = (torch.rand(len(rows), generator=generator) >= config.drop_text).float()
    noise = torch.randn(latents.shape, generator=generator)
    timesteps = torch.randint(len(alphas), (len(rows),), generator=generator)
    alpha = alphas[timesteps].view(-1, 1, 1, 1)
    noisy = (alpha.sqrt() * latents + (1 - alpha).sqrt() * noise).contiguous(memory_format=torch.channels_last)
    conditions = {
        "text_embeds": pooled * kept[:, None],
        "time_ids": torch.tensor([TIME_IDS] * len(rows), dtype=torch.float32),
    }
    found = unet(noisy, timesteps, states * kept[:, None, None], added_cond_kwargs=conditions).sample
    velocity = alpha.sqrt() * noise - (1 - alpha).sqrt() * latents
    weights = (config.max_snr * (1 - alpha)).clamp(max=1).view(-1)  # 1 / (1 - alpha) is SNR + 1
    return (weights * F.mse_loss(found, velocity, reduction="none").mean(dim=(1, 2, 3))).mean()
