"""Batched, normalised features of captions and pictures."""

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice

import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor
from tqdm import tqdm

from debias_diffusion.encoders.encoder import Encoder
from debias_diffusion.encoders.text_forward import encode_text
from debias_diffusion.encoders.tokens import collate_tokens

_TOKENS_A_BATCH = 8192


@torch.inference_mode()
def text_features(encoder: Encoder, captions: Sequence[str], *, progress: bool = False) -> Tensor:
    """Unit-norm text features (captions, dim), float32 on the CPU, in the order given.

    Captions are cut at the encoder's context length, EOT kept. They are encoded in order of length, a fixed budget of
    tokens at a time, so time and memory follow the number of words.
    """
    if isinstance(captions, str):
        raise ValueError("text_features takes a list of captions; for one caption give [caption]")
    rows = [encoder.tokenizer.encode(c) for c in captions]
    order = sorted(range(len(rows)), key=lambda i: len(rows[i]))
    features = torch.empty(len(rows), encoder.model.text.output_dim)
    bar = tqdm(total=len(rows), desc="captions", unit="caption", disable=not progress, leave=False)
    for chunk in _by_budget(order, [min(len(r), encoder.context_length) for r in rows]):
        batch = collate_tokens([rows[i] for i in chunk], [0] * len(chunk), encoder.context_length)
        encoded = encode_text(encoder.model.text, batch.input_ids, batch.num_prefix)
        features[chunk] = F.normalize(encoded.float(), dim=-1).cpu()
        bar.update(len(chunk))
    bar.close()
    return features


@torch.inference_mode()
def image_features(
    encoder: Encoder, images: Iterable[Image.Image], *, batch_size: int = 32, progress: bool = False
) -> Tensor:
    """Unit-norm image features (images, dim), float32 on the CPU; pictures are converted to RGB and preprocessed."""
    if isinstance(images, Image.Image):
        raise ValueError("image_features takes a list of pictures; for one picture give [picture]")
    preprocess = encoder.preprocess
    parts = []
    bar = tqdm(desc="pictures", unit="picture", disable=not progress, leave=False)
    for chunk in _chunks(images, batch_size):
        pixel_values = torch.stack([preprocess(image.convert("RGB")) for image in chunk]).to(encoder.device)
        parts.append(F.normalize(encoder.model.visual(pixel_values).float(), dim=-1).cpu())
        bar.update(len(chunk))
    bar.close()
    return torch.cat(parts) if parts else torch.empty(0, encoder.model_config["embed_dim"])


def _chunks(images: Iterable[Image.Image], size: int) -> Iterator[list[Image.Image]]:
    iterator = iter(images)
    while chunk := list(islice(iterator, size)):
        yield chunk


def _by_budget(order: list[int], lengths: list[int]) -> Iterator[list[int]]:
    chunk: list[int] = []
    tokens = 0
    for i in order:
        if chunk and tokens + lengths[i] > _TOKENS_A_BATCH:
            yield chunk
            chunk, tokens = [], 0
        chunk.append(i)
        tokens += lengths[i]
    if chunk:
        yield chunk
