"""Teaches a small CLIP's tokens what they tell: the thing that a caption has just told whole can be read off the token.

A CLIP this small, trained on whole pictures alone, keeps a bag of words: from its tokens no reader learns which colour
goes with which place, and so no UNet does. Large CLIPs bind a little, from data and size that are not to be had here. This
is the miniature's stand-in for them: a few minutes of the contrastive loss together with the cross-entropy of one linear
reader of the states that SDXL reads (those before the last layer). The reader is thrown away afterwards.
"""

import dataclasses
import math
import re
from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F
from miniature_vae import scene_pixels
from torch import Tensor, nn
from tqdm import tqdm

from debias_diffusion.data import wording
from debias_diffusion.data.drawings import SHORT_ROWS, Drawing, num_tokens, training_drawing
from debias_diffusion.data.scenes import COLOURS, PLACES, SHAPES
from debias_diffusion.encoders.encoder import Encoder
from debias_diffusion.training.losses import contrastive_loss
from debias_diffusion.training.optim import learning_rate_at

ANSWERS = (len(COLOURS), len(SHAPES), len(PLACES), 2)
"""What the reader chooses among: colours, shapes, places and the two sizes."""
_WORDS = {
    **{colour: (0, i) for i, colour in enumerate(COLOURS)},
    **{shape: (1, i) for i, shape in enumerate(SHAPES)},
    **{phrase: (2, PLACES.index(cell)) for cell, phrases in wording.PLACES.items() for phrase in phrases},
}
_WORD = re.compile(r"\b(" + "|".join(sorted(_WORDS, key=len, reverse=True)) + r")\b")


@dataclasses.dataclass(frozen=True)
class BindingConfig:
    """How long and on how many drawings at a time."""

    steps: int = 500
    batch_size: int = 64
    learning_rate: float = 1e-3
    warmup_steps: int = 50
    weight: float = 1.0
    """Of the reader's loss against the contrastive one."""
    first: int = 1_000_000
    """Number of the first drawing: far from those that the UNet is trained on."""
    seed: int = 0


class Telling(NamedTuple):
    """A token (row of the caption's ids, BOS is 0) at which a thing has been told whole, and the answers there."""

    token: int
    answers: tuple[int, int, int, int]


def tellings(caption: str) -> list[Telling]:
    """The tokens at which colour, shape and place of a thing are complete; for small ones their sentence's full stop too.

    >>> [t.token for t in tellings("A tiny red star in the top left. In the very centre a small blue ring.")]
    [8, 9, 17, 18]
    """
    found: list[Telling] = []
    for sentence in re.finditer(r"[^.]*\.", caption):
        is_large = int("large" in sentence.group())
        told: dict[int, int] = {}
        for word in _WORD.finditer(sentence.group()):
            kind, answer = _WORDS[word.group()]
            told[kind] = answer
            if len(told) == 3:
                end = num_tokens(caption[: sentence.start() + word.end()]) - 2
                found.append(Telling(end, (told[0], told[1], told[2], is_large)))
                told = {}
        if found and not is_large:
            found.append(Telling(num_tokens(caption[: sentence.end()]) - 2, found[-1].answers))
    return found


def labelled(drawings: list[Drawing]) -> tuple[Tensor, Tensor, Tensor]:
    """Rows (tellings,), tokens (tellings,) and answers (tellings, 4) of all tellings within 77 tokens."""
    every = [(row, t) for row, d in enumerate(drawings) for t in tellings(d.caption) if t.token < SHORT_ROWS - 1]
    rows, tokens = torch.tensor([row for row, _ in every]), torch.tensor([t.token for _, t in every])
    return rows, tokens, torch.tensor([t.answers for _, t in every])


def teach_binding(encoder: Encoder, config: BindingConfig) -> float:
    """Trains the encoder further, in place; returns the share of tellings that the reader had right at the end."""
    torch.manual_seed(config.seed)
    model = encoder.model.train()
    reader = nn.Linear(model.text.token_embedding.embedding_dim, sum(ANSWERS))
    parameters = [*model.parameters(), *reader.parameters()]
    optimizer = torch.optim.AdamW(parameters, lr=config.learning_rate, weight_decay=0.01, betas=(0.9, 0.98))
    states: list[Tensor] = []
    hook = model.text.transformer.resblocks[-2].register_forward_hook(lambda _, __, output: states.append(output))
    right: list[float] = []
    bar = tqdm(_batches(config), total=config.steps, unit="step")
    for step, drawings in enumerate(bar):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate_at(step, config.learning_rate, config.warmup_steps, config.steps)
        states.clear()
        contrastive = _contrastive(encoder, drawings)
        rows, tokens, answers = labelled(drawings)
        guesses = reader(states[0][rows, tokens]).split(ANSWERS, dim=-1)
        asked = answers.unbind(dim=1)
        told = torch.stack([F.cross_entropy(g, a) for g, a in zip(guesses, asked, strict=True)]).sum()
        optimizer.zero_grad()
        (contrastive + config.weight * told).backward()
        optimizer.step()
        with torch.no_grad():
            model.logit_scale.clamp_(0, math.log(100))
        hits = torch.stack([g.argmax(dim=-1) == a for g, a in zip(guesses, asked, strict=True)]).all(dim=0)
        right.append(hits.float().mean().item())
        bar.set_postfix_str(f"contrastive {contrastive.item():.3f}, told right {right[-1]:.3f}")
    hook.remove()
    model.eval()
    return sum(right[-50:]) / len(right[-50:])


def _batches(config: BindingConfig) -> Iterator[list[Drawing]]:
    for step in range(config.steps):
        start = config.first + step * config.batch_size
        yield [training_drawing(config.seed, i) for i in range(start, start + config.batch_size)]


def _contrastive(encoder: Encoder, drawings: list[Drawing]) -> Tensor:
    ids = encoder.tokenizer([d.caption for d in drawings]).input_ids[:, :SHORT_ROWS]
    ids = F.pad(ids, (0, SHORT_ROWS - ids.shape[1]))
    text = F.normalize(encoder.model.text(ids), dim=-1)
    image = F.normalize(encoder.model.visual(torch.stack([scene_pixels(d.scene) for d in drawings])), dim=-1)
    return contrastive_loss(image, text, image, text, encoder.model.logit_scale.exp())
