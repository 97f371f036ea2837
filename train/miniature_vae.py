"""The miniature SDXL's AutoencoderKL: 64x64 pictures of the miniature world to 16x16 latents of four channels and back."""

import dataclasses

import numpy as np
import torch
import torch.nn.functional as F
from diffusers import AutoencoderKL
from torch import Tensor
from torch.utils.data import DataLoader, Dataset
from tqdm import tqdm

from debias_diffusion.data.scenes import SIZE, Scene, make_scene, render
from debias_diffusion.training.optim import learning_rate_at

LATENT_CHANNELS, VAE_SCALE = 4, 4
CONFIG = {
    "down_block_types": ("DownEncoderBlock2D",) * 3,
    "up_block_types": ("UpDecoderBlock2D",) * 3,
    "block_out_channels": (16, 32, 64),
    "layers_per_block": 1,
    "latent_channels": LATENT_CHANNELS,
    "norm_num_groups": 4,
    "sample_size": SIZE,
    "force_upcast": False,
}


@dataclasses.dataclass(frozen=True)
class VaeConfig:
    """How the miniature's VAE is trained."""

    steps: int = 1600
    refine_steps: int = 1600
    """Of the decoder alone, afterwards."""
    batch_size: int = 8
    learning_rate: float = 1.5e-3
    warmup_steps: int = 50
    kl_weight: float = 1e-6
    seed: int = 0


def scene_pixels(scene: Scene) -> Tensor:
    """A scene's picture as (3, SIZE, SIZE) floats in [-1, 1]."""
    array = np.asarray(render(scene), np.float32)
    return torch.from_numpy(array / 127.5 - 1).permute(2, 0, 1)


def pixels(seed: int, split: str, index: int, things: tuple[int, int]) -> Tensor:
    """`scene_pixels` of scene number `index` of a split."""
    return scene_pixels(make_scene(seed, split, index, things))


class Pictures(Dataset[Tensor]):
    """Pictures of scenes with one to nine shapes; none is seen twice."""

    def __init__(self, size: int, seed: int) -> None:
        self.size, self.seed = size, seed

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Tensor:
        return pixels(self.seed, "vae", index, (1, 9))


def train_vae(config: VaeConfig) -> AutoencoderKL:
    """The VAE, trained, with the scaling factor that gives its latents unit variance."""
    torch.manual_seed(config.seed)
    vae = AutoencoderKL(**CONFIG).to(memory_format=torch.channels_last)
    _initialise(vae)
    _fit(vae, config, Pictures(config.steps * config.batch_size, config.seed))
    with torch.no_grad():
        batch = torch.stack([pixels(config.seed, "vae-scale", i, (1, 9)) for i in range(256)])
        latents = vae.encode(batch).latent_dist.mean
    vae.register_to_config(scaling_factor=float(1 / latents.std()))
    return vae


def refine_decoder(vae: AutoencoderKL, config: VaeConfig) -> AutoencoderKL:
    """The same VAE with its decoder trained further on fresh pictures; latents stay what they are."""
    vae.encoder.requires_grad_(False)
    vae.quant_conv.requires_grad_(False)
    _fit(vae, config, Pictures(config.refine_steps * config.batch_size, config.seed + 1))
    return vae.requires_grad_(True)


def _fit(vae: AutoencoderKL, config: VaeConfig, pictures: Pictures) -> None:
    vae.train()
    parameters = [p for p in vae.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=config.learning_rate, weight_decay=0.0, betas=(0.9, 0.99))
    loader = DataLoader(pictures, config.batch_size)
    bar = tqdm(loader, unit="step")
    for step, batch in enumerate(bar):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate_at(step, config.learning_rate, config.warmup_steps, len(loader))
        posterior = vae.encode(batch.to(memory_format=torch.channels_last)).latent_dist
        picture = vae.decode(posterior.sample()).sample
        error = F.mse_loss(picture, batch)
        loss = error + 0.2 * F.l1_loss(picture, batch) + config.kl_weight * posterior.kl().mean()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        bar.set_postfix_str(f"mse {error.item():.4f}")
    vae.eval()


@torch.no_grad()
def _initialise(vae: AutoencoderKL) -> None:
    """Convolutions that keep the variance: with torch's default the error after 150 steps is more than twice as large.

    A posterior as wide as the prior would drown the first thousand steps in noise, so it starts narrow.
    """
    for module in vae.modules():
        if isinstance(module, torch.nn.Conv2d):
            torch.nn.init.kaiming_normal_(module.weight, nonlinearity="linear")
            torch.nn.init.zeros_(module.bias)
    vae.quant_conv.weight[LATENT_CHANNELS:] = 0
    vae.quant_conv.bias[LATENT_CHANNELS:] = -6


@torch.no_grad()
def reconstruction_error(vae: AutoencoderKL, count: int = 200, seed: int = 0) -> float:
    """Root mean square error of reconstructed held-out pictures, in grey levels of 0 to 255."""
    batch = torch.stack([pixels(seed, "vae-test", i, (6, 9)) for i in range(count)])
    picture = vae.decode(vae.encode(batch).latent_dist.mean).sample.clamp(-1, 1)
    return float(F.mse_loss(picture, batch).sqrt() * 127.5)
