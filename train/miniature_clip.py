"""The miniature's two base encoders: small CLIPs trained from scratch at 77 tokens on short captions of its world.

Three captions in ten are summaries, the rest describe two to four small shapes: the bases read summaries well and
details a little, as CLIP does. `miniature` has GELU and goes into SDXL's second slot, `miniature-l` has QuickGELU and
goes into the first.
"""

import dataclasses
import gzip
import json
import math
import re
import time
from pathlib import Path

import torch
from torch.utils.data import DataLoader, Dataset
from tqdm import tqdm

from debias_diffusion.data.scene_sets import ScenePairs, scene_retrieval_set
from debias_diffusion.data.scenes import all_phrases, pretraining_caption, scene_rng
from debias_diffusion.encoders.checkpoint import BPE_FILE, save_encoder
from debias_diffusion.encoders.encoder import MINIATURE_FOLDER, Encoder, build, spec_config
from debias_diffusion.encoders.specs import find_spec
from debias_diffusion.evaluation.runner import evaluate_encoder
from debias_diffusion.training.losses import contrastive_loss
from debias_diffusion.training.optim import learning_rate_at
from debias_diffusion.training.step import TwoBranchModel

PREPROCESS = {"mean": (0.5, 0.5, 0.5), "std": (0.5, 0.5, 0.5)}


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


class ShortPairs(Dataset[tuple[torch.Tensor, str]]):
    """Pictures with the short captions a base model learns from; no pair is seen twice."""

    def __init__(self, size: int, seed: int, encoder: Encoder) -> None:
        self.pairs = ScenePairs(size, seed)
        self.preprocess = encoder.preprocess

    def __len__(self) -> int:
        return len(self.pairs)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, str]:
        scene = self.pairs.scene(index)
        return self.preprocess(self.pairs.open(index)), pretraining_caption(scene, scene_rng("pre", index))


def write_vocabulary(path: Path) -> int:
    """Writes a CLIP byte-pair file in which every word of the world is one token; returns the vocabulary's size."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    words = sorted({w for p in all_phrases() for w in re.findall(r"[a-z]+", re.sub(r"\{.*?\}", "", p.lower()))})
    tokenizer = Tokenizer(models.BPE(end_of_word_suffix="</w>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    trainer = trainers.BpeTrainer(vocab_size=5000, end_of_word_suffix="</w>", min_frequency=1, show_progress=False)
    tokenizer.train_from_iterator([" ".join(words)], trainer)
    merges = [" ".join(merge) for merge in json.loads(tokenizer.to_str())["model"]["merges"]]
    with gzip.GzipFile(path, "wb", mtime=0) as file:
        file.write("\n".join(["#version: 0.2", *merges]).encode())
    return 2 * 256 + len(merges) + 2


def train_base(config: BaseConfig) -> Encoder:
    """The base encoder, trained."""
    torch.manual_seed(config.seed)
    encoder = build(
        f"{config.row}:base", spec_config(find_spec(config.row)), PREPROCESS, bpe_file=MINIATURE_FOLDER / BPE_FILE
    )
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
        image, text, scale = model(pixel_values, tokens.input_ids, tokens.num_prefix)
        loss = contrastive_loss(image, text, image, text, scale)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            encoder.model.logit_scale.clamp_(0, math.log(100))
        bar.set_postfix_str(f"loss {loss.item():.3f}")
    encoder.model.eval()
    return encoder


def make_base(config: BaseConfig) -> None:
    """Trains a base, measures it, and leaves a card beside it."""
    started = time.perf_counter()
    encoder = train_base(config)
    finish(encoder, config, (time.perf_counter() - started) / 60)


def finish(encoder: Encoder, config: BaseConfig, minutes: float) -> None:
    """Measures the base and saves it with its card."""
    results = evaluate_encoder(encoder, scene_retrieval_set(), ["none", "first_only", "remove_first", "short"])
    numbers = {name: round(result.metrics["t2i_recall@1"], 1) for name, result in results.items()}
    settings = {k: v for k, v in dataclasses.asdict(config).items() if k != "output"}
    history = {"base": "trained from scratch by train/miniature.py", "settings": settings, "t2i_recall@1": numbers}
    save_encoder(dataclasses.replace(encoder, history=history), config.output)
    (config.output / "README.md").write_text(_card(settings, numbers, minutes))
    print(f"{config.output}: {numbers}, {minutes:.1f} minutes")


def _card(settings: dict[str, object], numbers: dict[str, float], minutes: float) -> str:
    rows = "\n".join(f"| {name} | {value} |" for name, value in numbers.items())
    return f"""# The miniature's base encoder

A small CLIP (77 tokens) trained from scratch on short captions of the miniature world by `python train/miniature.py`, in
{minutes:.0f} minutes on two shared CPU cores, with {json.dumps(settings)}.

Text-to-image recall@1 on 1,000 held-out pairs, captions cut at 77 tokens:

| caption | % |
| --- | --- |
{rows}

MIT licence, like the code. It knows coloured shapes and nothing else.
"""
