"""Features kept on disk, so that a picture or caption an encoder has read is not read again for the next table."""

import hashlib
import json
import logging
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import version
from itertools import islice
from pathlib import Path
from typing import Any, Literal
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from PIL import Image
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset
from tqdm import tqdm

from debias_diffusion import __version__
from debias_diffusion.data.pictures import BadPicture
from debias_diffusion.data.retrieval_set import Picture
from debias_diffusion.encoders.encoder import Encoder
from debias_diffusion.encoders.features import text_features

DEFAULT_FOLDER = Path("~/.cache/debias-diffusion/features")

Tower = Literal["visual", "text"]
Tensors = dict[str, Tensor]

_BATCH = 32

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ImageFeatures:
    """`features` (readable pictures, dim), unit norm; `unreadable` names the others by index, with the reason."""

    features: Tensor
    unreadable: dict[int, str]


@dataclass(frozen=True)
class TextFeatures:
    """`features` (captions, dim), unit norm; `num_tokens` (captions,) of whole captions, both end tokens counted."""

    features: Tensor
    num_tokens: Tensor


class FeatureCache:
    """Features of encoders, computed once and kept under `folder`; None keeps nothing.

    What is kept is found by a hash of all that features follow from: the tower's weights and config, and either the
    picture transform and the pictures' identities or the vocabulary, the length limit and the captions, besides the
    versions of the libraries that turn pictures and captions into numbers.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self.folder = folder.expanduser() if folder is not None else None
        self._hashes: WeakKeyDictionary[nn.Module, tuple[list[int], str]] = WeakKeyDictionary()

    def tower_hash(self, encoder: Encoder, tower: Tower) -> str:
        """The hash of a tower's weights and config, computed again only once weights have changed."""
        module: nn.Module = getattr(encoder.model, tower)
        state = module.state_dict()
        changes = [tensor._version for tensor in state.values()]  # counts in-place changes, as those of an optimiser
        if module not in self._hashes or self._hashes[module][0] != changes:
            config = encoder.model_config["vision_cfg" if tower == "visual" else "text_cfg"]
            # The activation and the number of heads change every feature, and no weight tells them.
            shape = [encoder.model_config.get("quick_gelu", False), encoder.model_config["embed_dim"], config]
            self._hashes[module] = changes, _digest(state, shape)
        return self._hashes[module][1]

    def image_features(
        self,
        encoder: Encoder,
        pictures: Sequence[Picture],
        *,
        progress: bool = False,
        workers: int = 0,
        may_be_empty: bool = False,
    ) -> ImageFeatures:
        """The features of the readable pictures, in order; each unreadable one is named, never raised.

        `workers` processes decode, 0 means this one. Raises ValueError where no picture can be read, unless that
        `may_be_empty`, as a part of a larger set may.
        """
        path = self._path(encoder, "visual", [encoder.preprocess_config, [picture.identity for picture in pictures]])
        found = _load(path, ("features",))
        if found:
            known = {int(index): reason for index, reason in json.loads(found[1]["unreadable"]).items()}
            if not any(isinstance(_Opened(pictures)[index], Tensor) for index in known):
                return ImageFeatures(found[0]["features"], known)
        unreadable: dict[int, str] = {}
        bar = tqdm(
            total=len(pictures), desc="pictures", unit="picture", disable=None if progress else True, leave=False
        )
        features = _encoded(encoder, _readable(encoder, pictures, unreadable, workers, bar))
        bar.close()
        if len(unreadable) == len(pictures) and not may_be_empty:
            raise ValueError(f"none of the {len(pictures)} pictures can be read; the first: {unreadable.get(0)}")
        _save(path, {"features": features}, {"unreadable": json.dumps(unreadable)})
        return ImageFeatures(features, unreadable)

    def text_features(
        self, encoder: Encoder, captions: Sequence[str], *, max_tokens: int | None = None, progress: bool = False
    ) -> TextFeatures:
        """The features of captions cut to the encoder's context, or to `max_tokens` where that is less."""
        limit = min(encoder.context_length, max_tokens or encoder.context_length)
        path = self._path(encoder, "text", [encoder.tokenizer.identity, limit, list(captions)])
        found = _load(path, ("features", "num_tokens"))
        if found:
            return TextFeatures(found[0]["features"], found[0]["num_tokens"])
        limited = encoder
        if limit < encoder.context_length:
            limited = replace(encoder, tokenizer=encoder.tokenizer.with_context(limit))
        features = text_features(limited, captions, progress=progress)
        num_tokens = torch.tensor([len(encoder.tokenizer.encode(caption)) for caption in captions])
        _save(path, {"features": features, "num_tokens": num_tokens}, {})
        return TextFeatures(features, num_tokens)

    def _path(self, encoder: Encoder, tower: Tower, inputs: list[object]) -> Path | None:
        if self.folder is None:
            return None
        weights = self.tower_hash(encoder, tower)
        key = hashlib.blake2b(json.dumps([_versions(), inputs], sort_keys=True).encode(), digest_size=16).hexdigest()
        return self.folder / f"{tower}-{weights[:16]}" / f"{key}.safetensors"


def _versions() -> list[str]:
    return [__version__, *(version(name) for name in ("open_clip_torch", "torchvision", "pillow", "ftfy"))]


class _Opened(Dataset["Tensor | str"]):
    """Pixel values of picture i; or, where it cannot be read, the reason."""

    def __init__(self, pictures: Sequence[Picture], preprocess: Callable[[Image.Image], Tensor] | None = None) -> None:
        self.pictures, self.preprocess = pictures, preprocess or (lambda _: torch.empty(0))

    def __len__(self) -> int:
        return len(self.pictures)

    def __getitem__(self, index: int) -> "Tensor | str":
        try:
            return self.preprocess(self.pictures[index].open())
        except BadPicture as error:
            return str(error)


def _readable(
    encoder: Encoder, pictures: Sequence[Picture], unreadable: dict[int, str], workers: int, bar: "tqdm[Any]"
) -> Iterator[Tensor]:
    """Yields the pixel values of pictures that open, and enters the others in `unreadable`."""
    opened = DataLoader(
        _Opened(pictures, encoder.preprocess), batch_size=None, num_workers=workers, worker_init_fn=_one_thread
    )
    for index, pixels in enumerate(opened):
        bar.update()
        if isinstance(pixels, Tensor):
            yield pixels
        else:
            unreadable[index] = pixels


def _one_thread(_: int) -> None:
    torch.set_num_threads(1)


@torch.inference_mode()
def _encoded(encoder: Encoder, pixels: Iterator[Tensor]) -> Tensor:
    tower = encoder.model.visual
    device = next(tower.parameters()).device
    parts = []
    while batch := list(islice(pixels, _BATCH)):
        parts.append(F.normalize(tower(torch.stack(batch).to(device)).float(), dim=-1).cpu())
    return torch.cat(parts) if parts else torch.empty(0, encoder.model_config["embed_dim"])


def _digest(tensors: Tensors, about: object) -> str:
    hasher = hashlib.blake2b(json.dumps(about, sort_keys=True).encode(), digest_size=16)
    for name, tensor in sorted(tensors.items()):
        hasher.update(f"{name}|{tensor.dtype}|{tuple(tensor.shape)}".encode())
        flat = tensor.detach().cpu().contiguous().reshape(-1)
        hasher.update(flat.view(torch.uint8).numpy().data)
    return hasher.hexdigest()


def _load(path: Path | None, names: tuple[str, ...]) -> tuple[Tensors, dict[str, str]] | None:
    """What the file holds, or None where there is none or it is not what was written."""
    if path is None or not path.is_file():
        return None
    try:
        with safe_open(path, framework="pt") as file:
            metadata = dict(file.metadata() or {})
            tensors = {name: file.get_tensor(name) for name in names}
    except (SafetensorError, OSError) as error:
        _log.warning("%s is damaged (%s); its features are computed again", path, error)
        return None
    if metadata.pop("digest", "") != _digest(tensors, metadata):
        _log.warning("%s is damaged (its content changed); its features are computed again", path)
        return None
    return tensors, metadata


def _save(path: Path | None, tensors: Tensors, metadata: dict[str, str]) -> None:
    """Writes the file whole or not at all; a disk that takes no files costs the cache, not the evaluation."""
    if path is None:
        return
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        save_file(tensors, partial, metadata={"digest": _digest(tensors, metadata), **metadata})
        partial.replace(path)
    except (SafetensorError, OSError) as error:
        if partial.exists():
            partial.unlink()
        _log.warning("features were not kept in %s: %s", path.parent, error)
