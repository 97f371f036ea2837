"""Zero-shot accuracy is open_clip's classifier on the pictures that can be read, and says what it counted."""

import hashlib
import json
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch
from open_clip import IMAGENET_CLASSNAMES, OPENAI_IMAGENET_TEMPLATES, build_zero_shot_classifier
from PIL import Image
from torch import Tensor
from torchvision.datasets import CIFAR10, CIFAR100

from debias_diffusion.encoders.checkpoint import load_encoder
from debias_diffusion.encoders.encoder import Encoder
from debias_diffusion.encoders.features import image_features
from debias_diffusion.encoders.tokens import fit
from debias_diffusion.evaluation.zero_shot import class_features, folder_classes, zero_shot_accuracy

COLOURS = ("red", "lime", "blue", "cyan", "gold", "pink", "navy")


@pytest.fixture(scope="module")
def encoder() -> Encoder:
    torch.manual_seed(0)
    return load_encoder("miniature:random")


def by_open_clip(encoder: Encoder, class_names: list[str]) -> Tensor:
    """(classes, dim) open_clip's own classifier, fed whole rows."""

    def tokenize(texts: list[str]) -> Tensor:
        rows = [fit(encoder.tokenizer.encode(text), encoder.context_length) for text in texts]
        return torch.tensor([row + [0] * (encoder.context_length - len(row)) for row in rows])

    return build_zero_shot_classifier(encoder.model, tokenize, class_names, OPENAI_IMAGENET_TEMPLATES).T


def places_of(encoder: Encoder, pictures: list[Image.Image], labels: list[int], class_names: list[str]) -> Tensor:
    """(pictures,) Classes that score higher than the right one."""
    scores = image_features(encoder, pictures) @ by_open_clip(encoder, class_names).T
    return (scores > scores[torch.arange(len(labels)), labels][:, None]).sum(1)


def share(hits: Tensor) -> float:
    return 100 * hits.double().mean().item()


def noisy(colour: str, seed: int) -> Image.Image:
    pixels = np.asarray(Image.new("RGB", (32, 32), colour)).astype(int)
    noise = np.random.default_rng(seed).integers(-90, 90, pixels.shape)
    return Image.fromarray((pixels + noise).clip(0, 255).astype(np.uint8))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Seven classes of three pictures."""
    for colour in COLOURS:
        (tmp_path / f"{colour}_square").mkdir()
        for seed in range(3):
            noisy(colour, seed).save(tmp_path / f"{colour}_square" / f"{seed}.png")
    return tmp_path


def test_class_features_are_those_of_open_clip(encoder: Encoder) -> None:
    names = ["red square", "blue circle", "a"]
    assert torch.allclose(class_features(encoder, names), by_open_clip(encoder, names), atol=1e-6)


def test_folder_accuracy_equals_open_clips_classifier(encoder: Encoder, folder: Path) -> None:
    folders = sorted(path.name for path in folder.iterdir())
    labels = [label for label in range(7) for _ in range(3)]
    pictures = [Image.open(folder / folders[label] / f"{i % 3}.png") for i, label in enumerate(labels)]
    places = places_of(encoder, pictures, labels, [name.replace("_", " ") for name in folders])
    expected = {"top1": share(places < 1), "top5": share(places < 5)}
    assert zero_shot_accuracy(encoder, "folder", folder) == {
        "dataset": "folder", "classes": 7, "prompts": 80, "pictures": 21, "bad_pictures": 0, **expected
    }  # fmt: skip
    assert 0 < expected["top5"] < 100, "a sum that could come out by not looking"


def test_bad_pictures_are_counted_logged_and_left_out(
    encoder: Encoder, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    before = zero_shot_accuracy(encoder, "folder", folder)
    (folder / "blue_square" / "00.jpg").write_bytes(b"no picture")
    (folder / "pink_square" / "zz.PNG").write_bytes(b"")
    (folder / "pink_square" / "notes.txt").write_text("not meant as a picture")
    after = zero_shot_accuracy(encoder, "folder", folder)
    assert after == {**before, "bad_pictures": 2}, "labels must stay with their pictures"
    assert "00.jpg" in caplog.text
    assert "zz.PNG: the file is empty" in caplog.text


def test_a_folder_of_bad_pictures_alone_is_refused(encoder: Encoder, tmp_path: Path) -> None:
    (tmp_path / "cat").mkdir()
    (tmp_path / "cat" / "1.png").write_bytes(b"")
    with pytest.raises(ValueError, match=r"1 picture, none of which can be read"):
        zero_shot_accuracy(encoder, "folder", tmp_path)


def test_class_names_come_from_the_file_where_there_is_one(folder: Path) -> None:
    names = {f"{colour}_square": f"thing {number}" for number, colour in enumerate(COLOURS)}
    (folder / "class_names.json").write_text(json.dumps({**names, "unused": "another"}))
    assert folder_classes(folder) == dict(sorted(names.items()))
    (folder / "class_names.json").write_text(json.dumps({"red_square": "thing"}))
    with pytest.raises(ValueError, match="names no class for 6 folders, such as 'blue_square'"):
        folder_classes(folder)
    (folder / "class_names.json").write_text('["red"]')
    with pytest.raises(ValueError, match=r'expected an object such as \{"blue_square": '):
        folder_classes(folder)


def test_two_classes_of_one_name_are_refused(folder: Path) -> None:
    names = {f"{colour}_square": f"thing {number}" for number, colour in enumerate(COLOURS)}
    (folder / "class_names.json").write_text(json.dumps({**names, "navy_square": "Thing  2"}))
    with pytest.raises(ValueError, match="the folders 'blue_square' and 'navy_square' are both the class 'Thing  2'"):
        folder_classes(folder)
    (folder / "class_names.json").unlink()
    (folder / "red square").mkdir()
    with pytest.raises(ValueError, match="'red square' and 'red_square' are both the class 'red square'; merge them"):
        folder_classes(folder)


def test_imagenets_folders_get_imagenets_names(tmp_path: Path) -> None:
    # The names are in the order of the sorted ids, whatever the ids are.
    for number in range(1000):
        (tmp_path / f"n{1440764 + 7 * number:08d}").mkdir()
    classes = folder_classes(tmp_path)
    assert list(classes.values()) == list(IMAGENET_CLASSNAMES)
    assert classes["n01440764"] == "tench"
    (tmp_path / "n01440764").rmdir()
    with pytest.raises(ValueError, match=r"holds 999 folders called by WordNet ids, .* put class_names.json"):
        folder_classes(tmp_path)


def test_what_is_missing_is_named(encoder: Encoder, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="unknown dataset 'mnist'; choose one of cifar10, cifar100, folder"):
        zero_shot_accuracy(encoder, "mnist", tmp_path)
    for nothing in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(FileNotFoundError, match="holds no class folders"):
            zero_shot_accuracy(encoder, "folder", nothing)
        with pytest.raises(FileNotFoundError, match=r"CIFAR10, .* unpack cifar-10-python.tar.gz .*cifar-10-batches-py"):
            zero_shot_accuracy(encoder, "cifar10", nothing)
    (tmp_path / "cat").mkdir()
    with pytest.raises(FileNotFoundError, match=r"1 class folder without a picture"):
        zero_shot_accuracy(encoder, "folder", tmp_path)


@pytest.mark.parametrize(
    ("dataset", "kind", "labels_key", "names_key"),
    [("cifar10", CIFAR10, "labels", "label_names"), ("cifar100", CIFAR100, "fine_labels", "fine_label_names")],
)
def test_cifar_in_its_own_files(
    encoder: Encoder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    dataset: str, kind: type[CIFAR10], labels_key: str, names_key: str,
) -> None:  # fmt: skip
    """torchvision's reader on a small data set in CIFAR's format; only its table of checksums is replaced."""
    names = [f"{colour}_square" for colour in COLOURS]
    labels = [number % 7 for number in range(14)]
    pictures = [noisy(COLOURS[label], seed) for seed, label in enumerate(labels)]
    pixels = np.stack([np.asarray(picture).transpose(2, 0, 1).reshape(-1) for picture in pictures])
    contents = {"test": {"data": pixels, labels_key: labels}, "names": {names_key: names}}
    (tmp_path / kind.base_folder).mkdir()
    checksums = {}
    for name, content in contents.items():
        raw = pickle.dumps(content)
        (tmp_path / kind.base_folder / name).write_bytes(raw)
        checksums[name] = hashlib.md5(raw).hexdigest()
    monkeypatch.setattr(kind, "train_list", [])
    monkeypatch.setattr(kind, "test_list", [["test", checksums["test"]]])
    monkeypatch.setattr(kind, "meta", {"filename": "names", "key": names_key, "md5": checksums["names"]})
    result = zero_shot_accuracy(encoder, dataset, tmp_path)
    places = places_of(encoder, pictures, labels, [name.replace("_", " ") for name in names])
    assert (result["classes"], result["pictures"], result["bad_pictures"]) == (7, 14, 0)
    assert (result["top1"], result["top5"]) == (share(places < 1), share(places < 5))
    (tmp_path / kind.base_folder / "test").write_bytes(b"cut short")
    with pytest.raises(FileNotFoundError, match="or files of it are damaged"):
        zero_shot_accuracy(encoder, dataset, tmp_path)
