"""Zero-shot classification: a picture belongs to the class whose name, put into prompts, lies nearest."""

import logging
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from open_clip.zero_shot_metadata import IMAGENET_CLASSNAMES, OPENAI_IMAGENET_TEMPLATES
from PIL import Image
from torch import Tensor
from torchvision.datasets import CIFAR10, CIFAR100

from debias_diffusion.data.pictures import PICTURE_SUFFIXES, BadPicture, open_picture
from debias_diffusion.data.text_files import counted, json_document
from debias_diffusion.encoders.encoder import Encoder
from debias_diffusion.encoders.features import image_features, text_features
from debias_diffusion.evaluation.retrieval import recall_at, retrieval_ranks

CLASS_NAMES_FILE = "class_names.json"
_WORDNET_ID = re.compile(r"n\d{8}")

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Labelled:
    """Class names, and pictures with the number of their class; opening one raises `BadPicture` where it is broken."""

    class_names: Sequence[str]
    pictures: Sequence[tuple[Callable[[], Image.Image], int]]


def zero_shot_accuracy(
    encoder: Encoder, dataset: str, root: str | Path, *, progress: bool = False
) -> dict[str, str | int | float]:
    """Top-1 and top-5 accuracy in percent, with what was counted, of nearest-prompt classification.

    `dataset` is "cifar10", "cifar100" (their test pictures) or "folder" (see `folder_classes`), `root` where it lies.
    Every class name is put into the 80 prompts that CLIP was measured with on ImageNet, for all data sets alike; the
    class is the mean of their features, normalised again. Keys: dataset, classes, prompts, pictures, bad_pictures,
    top1, top5. Broken pictures are logged, counted and left out. With five classes or fewer top5 is 100 by definition.

    Raises ValueError for an unknown dataset, for class names that do not fit and where no picture can be read, and
    FileNotFoundError where nothing lies at `root`, saying what to put there.
    """
    if dataset not in _DATASETS:
        raise ValueError(f"unknown dataset {dataset!r}; choose one of {', '.join(_DATASETS)}")
    labelled = _DATASETS[dataset](Path(root))
    classes = class_features(encoder, labelled.class_names, progress=progress)
    labels: list[int] = []
    pictures = image_features(encoder, _readable(labelled.pictures, labels), progress=progress)
    if not labels:
        raise ValueError(
            f"{root}: {counted(len(labelled.pictures), 'pictures')}, none of which can be read; see the log"
        )
    # A picture looking for its class is a query looking for its one right candidate.
    ranks = retrieval_ranks(classes, pictures, torch.tensor(labels)).t2i
    return {
        "dataset": dataset,
        "classes": len(labelled.class_names),
        "prompts": len(OPENAI_IMAGENET_TEMPLATES),
        "pictures": len(labels),
        "bad_pictures": len(labelled.pictures) - len(labels),
        "top1": recall_at(ranks, 1),
        "top5": recall_at(ranks, 5),
    }


def class_features(encoder: Encoder, class_names: Sequence[str], *, progress: bool = False) -> Tensor:
    """(classes, dim) Unit-norm float32 features on the CPU: per class the mean of its prompts' features, normalised."""
    prompts = [template(name) for name in class_names for template in OPENAI_IMAGENET_TEMPLATES]
    features = text_features(encoder, prompts, progress=progress)  # (classes * prompts, dim)
    return F.normalize(features.unflatten(0, (len(class_names), -1)).mean(1), dim=-1)


def folder_classes(root: Path) -> dict[str, str]:
    """The class name of each folder below `root`, in the folders' order.

    Names come from class_names.json in `root` ({"folder": "name", ...}, which may name more folders than there are) or,
    without it, are the folders' own with "_" read as a space. The 1,000 folders of ImageNet (n01440764 ...) get
    open_clip's ImageNet names; fewer of them tell nothing without the file. Raises FileNotFoundError where there is no
    folder, ValueError where names are missing or two classes have one name (ImageNet's own two pairs excepted).
    """
    folders = []
    if root.is_dir():
        folders = sorted(entry.name for entry in root.iterdir() if entry.is_dir() and not entry.name.startswith("."))
    if not folders:
        raise FileNotFoundError(f"{root} holds no class folders; expected one folder of pictures for each class")
    names_file = root / CLASS_NAMES_FILE
    if names_file.is_file():
        return _named_by_file(folders, names_file)
    if not all(_WORDNET_ID.fullmatch(folder) for folder in folders):
        return _distinct({folder: folder.replace("_", " ") for folder in folders}, root)
    if len(folders) != len(IMAGENET_CLASSNAMES):
        raise ValueError(
            f"{root} holds {len(folders)} folders called by WordNet ids, and ImageNet has {len(IMAGENET_CLASSNAMES)}; "
            f'put {CLASS_NAMES_FILE} beside them, such as {{"{folders[0]}": "name of the class", ...}}'
        )
    return dict(zip(folders, IMAGENET_CLASSNAMES, strict=True))


def _named_by_file(folders: Sequence[str], path: Path) -> dict[str, str]:
    names = json_document(path)
    if not isinstance(names, dict) or not all(isinstance(name, str) and name.strip() for name in names.values()):
        raise ValueError(f'{path}: expected an object such as {{"{folders[0]}": "name of the class", ...}}')
    if missing := [folder for folder in folders if folder not in names]:
        raise ValueError(
            f"{path} names no class for {counted(len(missing), 'folders')}, such as {missing[0]!r}; add them"
        )
    return _distinct({folder: names[folder] for folder in folders}, path)


def _distinct(classes: dict[str, str], where: Path) -> dict[str, str]:
    """The classes, if prompts can tell them apart: of two with one name every picture of the later would count as wrong."""
    folders: dict[str, str] = {}
    for folder, name in classes.items():
        key = " ".join(name.lower().split())  # as the tokenizer reads it
        if key in folders:
            raise ValueError(
                f"{where}: the folders {folders[key]!r} and {folder!r} are both the class {name!r}; merge them, or give "
                f"each a name of its own in {CLASS_NAMES_FILE}"
            )
        folders[key] = folder
    return classes


def _open_folder(root: Path) -> _Labelled:
    classes = folder_classes(root)
    pictures = [
        (partial(open_picture, path), label)
        for label, folder in enumerate(classes)
        for path in sorted((root / folder).rglob("*"))
        if path.suffix.lower() in PICTURE_SUFFIXES and path.is_file()
    ]
    if not pictures:
        raise FileNotFoundError(f"{root}: {counted(len(classes), 'class folders')} without a picture in them")
    return _Labelled(list(classes.values()), pictures)


def _open_cifar(kind: type[CIFAR10], root: Path) -> _Labelled:
    try:
        data = kind(root, train=False, download=False)
    except RuntimeError as error:
        raise FileNotFoundError(
            f"{root} does not hold {kind.__name__}, or files of it are damaged; unpack {kind.filename} there, so that "
            f"{root / kind.base_folder} holds all its batches, those for training too"
        ) from error
    pictures = [
        (partial(Image.fromarray, pixels), label) for pixels, label in zip(data.data, data.targets, strict=True)
    ]
    return _Labelled([name.replace("_", " ") for name in data.classes], pictures)


_DATASETS: dict[str, Callable[[Path], _Labelled]] = {
    "cifar10": partial(_open_cifar, CIFAR10),
    "cifar100": partial(_open_cifar, CIFAR100),
    "folder": _open_folder,
}


def _readable(pictures: Iterable[tuple[Callable[[], Image.Image], int]], labels: list[int]) -> Iterator[Image.Image]:
    """The pictures that can be read; the label of each is appended to `labels` as it goes out."""
    for open_one, label in pictures:
        try:
            picture = open_one()
        except BadPicture as error:
            logger.warning("left out: %s", error)
            continue
        labels.append(label)
        yield picture
