"""The miniature's base encoders: small CLIPs and a small SigLIP, trained from scratch on short captions of its world.

  python train/miniature_clip.py --row miniature-siglip --output runs/base-siglip      one of them, alone

Three captions in ten are summaries, the rest describe two to four small shapes: the bases read summaries well and
details a little, as CLIP does. `miniature` has GELU and goes into SDXL's second slot, `miniature-l` has QuickGELU and
goes into the first; `miniature-siglip` learns from the same captions by the sigmoid loss.
"""

import dataclasses
import json
import math
import time
from pathlib import Path

import torch
import tyro
from miniature_binding import BindingConfig, teach_binding
from torch import Tensor
from torch.utils.data import DataLoader, Dataset
from tqdm import tqdm

from debias_diffusion.data.scene_sets import ScenePairs, scene_retrieval_set
from debias_diffusion.data.scenes import pretraining_caption, scene_rng
from debias_diffusion.encoders.checkpoint import BPE_FILE, save_encoder
from debias_diffusion.encoders.encoder import MINIATURE_FOLDER, Encoder, build, spec_config
from debias_diffusion.encoders.folders import tokenizer_of
from debias_diffusion.encoders.specs import find_spec
from debias_diffusion.evaluation.runner import evaluate_encoder
from debias_diffusion.training.losses import contrastive_loss
from debias_diffusion.training.optim import learning_rate_at
from debias_diffusion.training.sigmoid import sigmoid_loss
from debias_diffusion.training.step import TwoBranchModel

PREPROCESS = {"mean": (0.5, 0.5, 0.5), "std": (0.5, 0.5, 0.5)}
SIGLIP_TOKENIZER = MINIATURE_FOLDER / "siglip_tokenizer"


@dataclasses.dataclass(frozen=True)
class BaseConfig:
    """How a base encoder of the miniature is trained."""

    output: Path = MINIATURE_FOLDER / "base"
    row: str = "miniature"
    steps: int = 2000
    batch_size: int = 128
    learning_rate: float = 1e-3
    weight_decay: float = 0.05
    warmup_steps: int = 200
    seed: int = 0
    binding_steps: int = 0
    """Further steps in which the text tower's tokens are taught what they tell (see miniature_binding)."""


class ShortPairs(Dataset[tuple[Tensor, str]]):
    """Pictures with the short captions a base model learns from; no pair is seen twice."""

    def __init__(self, size: int, seed: int, encoder: Encoder) -> None:
        self.pairs = ScenePairs(size, seed)
        self.preprocess = encoder.preprocess

    def __len__(self) -> int:
        return len(self.pairs)

    def __getitem__(self, index: int) -> tuple[Tensor, str]:
        scene = self.pairs.scene(index)
        return self.preprocess(self.pairs.open(index)), pretraining_caption(scene, scene_rng("pre", index))


def fresh_encoder(row: str) -> Encoder:
    """The encoder of a row with random weights and the miniature's vocabulary."""
    config = spec_config(find_spec(row))
    reader = tokenizer_of(config["text_cfg"], (SIGLIP_TOKENIZER,))
    bpe_file = None if reader else MINIATURE_FOLDER / BPE_FILE
    return build(f"{row}:base", config, PREPROCESS, bpe_file=bpe_file, tokenizer=reader)


def pair_loss(image: Tensor, text: Tensor, logit: Tensor) -> Tensor:
    """The loss of unit-norm features (batch, dim) each: InfoNCE, or the sigmoid loss where `logit` holds a bias too.

    `logit` is the exponentiated scale (), or scale and bias (2,): as `TwoBranchModel` gives them.
    """
    if logit.ndim:
        scale, bias = logit.unbind()
        return sigmoid_loss(image, text, scale, bias)
    return contrastive_loss(image, text, image, text, logit)


def train_base(config: BaseConfig) -> Encoder:
    """The base encoder, trained."""
    torch.manual_seed(config.seed)
    encoder = fresh_encoder(config.row)
    model = TwoBranchModel(encoder.model).train()
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=config.learning_rate, weight_decay=config.weight_decay, betas=(0.9, 0.98)
    )
    pairs = ShortPairs(config.steps * config.batch_size, config.seed, encoder)
    bar = tqdm(DataLoader(pairs, batch_size=config.batch_size, num_workers=1), unit="step")
    for step, (pixel_values, captions) in enumerate(bar):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate_at(step, config.learning_rate, config.warmup_steps, config.steps)
        tokens = encoder.tokenizer(captions)
        loss = pair_loss(*model(pixel_values, tokens.input_ids, tokens.num_prefix))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if encoder.loss == "softmax":  # as in fine-tuning: the sigmoid loss's scale has no limit
            with torch.no_grad():
                encoder.model.logit_scale.clamp_(0, math.log(100))
        bar.set_postfix_str(f"loss {loss.item():.3f}")
    encoder.model.eval()
    return encoder


def make_base(config: BaseConfig) -> None:
    """Trains a base, measures it, and leaves a card beside it."""
    started = time.perf_counter()
    encoder = train_base(config)
    if config.binding_steps:
        right = teach_binding(encoder, BindingConfig(steps=config.binding_steps))
        print(f"tokens tell their thing rightly: {right:.2%}")
    finish(encoder, config, (time.perf_counter() - started) / 60)


def finish(encoder: Encoder, config: BaseConfig, minutes: float) -> None:
    """Measures the base and saves it with its card."""
    results = evaluate_encoder(encoder, scene_retrieval_set(), ["none", "first_only", "remove_first", "short"])
    numbers = {name: round(result.metrics["t2i_recall@1"], 1) for name, result in results.items()}
    settings = {k: v for k, v in dataclasses.asdict(config).items() if k != "output"}
    history = {"base": "trained from scratch by train/miniature.py", "settings": settings, "t2i_recall@1": numbers}
    save_encoder(dataclasses.replace(encoder, history=history), config.output)
    (config.output / "README.md").write_text(_card(config, settings, numbers, minutes))
    print(f"{config.output}: {numbers}, {minutes:.1f} minutes")


def _card(config: BaseConfig, settings: dict[str, object], numbers: dict[str, float], minutes: float) -> str:
    family = find_spec(config.row).family
    rows = "\n".join(f"| {name} | {value} |" for name, value in numbers.items())
    bound = config.binding_steps and (
        "\n\nIn its last steps (`binding_steps`) a linear reader of the states before the last layer was trained along, by\n"
        "cross-entropy, to name the thing that each token has just told whole, as a UNet must read it there: see\n"
        "train/miniature_binding.py. Those steps saw the captions of drawings, mostly whole ones, and no short captions: hence\n"
        "more of the whole captions found below, and fewer of the short ones, than by a base without them."
    )
    return f"""# The miniature's base encoder

A small {family.name} ({family.context_length} tokens) trained from scratch on short captions of the miniature world by
`python train/miniature.py`, in {minutes:.0f} minutes on shared CPU cores, with
{json.dumps(settings)}.{bound or ""}

Text-to-image recall@1 on 1,000 held-out pairs, captions cut at {family.context_length} tokens:

| caption | % |
| --- | --- |
{rows}

MIT licence, like the code. It knows coloured shapes and nothing else.
"""


if __name__ == "__main__":
    make_base(tyro.cli(BaseConfig, description=__doc__))
