"""Batched, normalised features of captions and pictures."""

import reprlib
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice

import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor
from tqdm import tqdm

from debias_diffusion.encoders.encoder import Encoder
from debias_diffusion.encoders.text_forward import encode_text, why_not_packed
from debias_diffusion.encoders.tokens import collate_tokens

_TOKENS_A_BATCH = 8192
_OPEN = "open files with PIL.Image.open(path)"


@torch.inference_mode()
def text_features(encoder: Encoder, captions: Sequence[str], *, progress: bool = False) -> Tensor:
    """Unit-norm text features (captions, dim), float32 on the CPU, in the order given.

    Captions are cut at the encoder's context length, EOT kept. They are encoded in order of length, a fixed budget of
    tokens at a time, so time and memory follow the number of words. Raises ValueError for anything but a list of strings;
    a progress bar is drawn on a terminal only.
    """
    if isinstance(captions, str):
        raise ValueError("text_features takes a list of captions; for one caption give [caption]")
    if not isinstance(captions, Iterable):
        raise ValueError(f"text_features takes a list of strings, got {captions!r}")
    rows = [encoder.tokenizer.encode(_checked(c, i)) for i, c in enumerate(captions)]
    layout = encoder.tokenizer.layout
    order = sorted(range(len(rows)), key=lambda i: len(rows[i]))
    features = torch.empty(len(rows), encoder.model.text.output_dim)
    bar = tqdm(total=len(rows), desc="captions", unit="caption", disable=_hidden(progress), leave=False)
    text = encoder.model.text
    # A tower that reads padding too pays for its full length, whatever the caption's.
    least = text.context_length if why_not_packed(text) else 0
    for chunk in _by_budget(order, [max(least, min(len(r), encoder.context_length)) for r in rows]):
        batch = collate_tokens([rows[i] for i in chunk], [0] * len(chunk), encoder.context_length, layout)
        encoded = encode_text(text, batch.input_ids, batch.num_prefix)
        features[chunk] = F.normalize(encoded.float(), dim=-1).cpu()
        bar.update(len(chunk))
    bar.close()
    return features


@torch.inference_mode()
def image_features(
    encoder: Encoder, images: Iterable[Image.Image], *, batch_size: int = 32, progress: bool = False
) -> Tensor:
    """Unit-norm image features (images, dim), float32 on the CPU; pictures are converted to RGB and preprocessed.

    Raises ValueError for anything but PIL pictures; a progress bar is drawn on a terminal only.
    """
    if isinstance(images, Image.Image):
        raise ValueError("image_features takes a list of pictures; for one picture give [picture]")
    if isinstance(images, str | bytes) or not isinstance(images, Iterable):
        raise ValueError(f"image_features takes a list of PIL pictures, got {images!r}; {_OPEN}")
    preprocess = encoder.preprocess
    parts = []
    bar = tqdm(desc="pictures", unit="picture", disable=_hidden(progress), leave=False)
    for chunk in _chunks(images, batch_size):
        if odd := [image for image in chunk if not isinstance(image, Image.Image)]:
            raise ValueError(f"image_features takes PIL pictures, got {reprlib.repr(odd[0])}; {_OPEN}")
        pixel_values = torch.stack([preprocess(image.convert("RGB")) for image in chunk]).to(encoder.device)
        parts.append(F.normalize(encoder.model.visual(pixel_values).float(), dim=-1).cpu())
        bar.update(len(chunk))
    bar.close()
    return torch.cat(parts) if parts else torch.empty(0, encoder.model_config["embed_dim"])


def _hidden(progress: bool) -> bool | None:
    """tqdm's `disable`: None draws on a terminal only, so that no log file fills with bars."""
    return None if progress else True


def _checked(caption: object, index: int) -> str:
    if not isinstance(caption, str):
        raise ValueError(f"text_features takes a list of strings, got {reprlib.repr(caption)} at place {index}")
    return caption


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
