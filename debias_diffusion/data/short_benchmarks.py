"""The benchmarks with short captions, several to a picture, as their owners ship them: a row each, and their readers.

Counts in the protocol lines are those of the complete set, so a partial copy shows beside the set's own `counts`.
"""

import re
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from debias_diffusion.data.benchmark_files import Benchmark, Found, Needs
from debias_diffusion.data.pictures import relative_name
from debias_diffusion.data.retrieval_set import Entry, PictureFile
from debias_diffusion.data.text_files import json_document, json_field, objects, read_text

_SPLITS = ("train", "val", "test")
_TOKEN_LINE = re.compile(r"(?P<image>[^/\t]+)#\d+\t(?P<caption>.*)")
# The one malformed row of results.csv has white space where the second bar should be.
_CSV_LINE = re.compile(r"(?P<image>[^/|]+)\|\s*\d+(?:\s*\||\s)(?P<caption>.*)")


def _coco(found: Found, first: int | None = None) -> Iterator[Entry]:
    path = found["captions"]
    document = json_document(path)
    captions: dict[int, list[str]] = {}
    for where, row in objects(json_field(document, "annotations", list, str(path)), f"{path}: annotations"):
        captions.setdefault(json_field(row, "image_id", int, where), []).append(json_field(row, "caption", str, where))
    for where, row in objects(json_field(document, "images", list, str(path)), f"{path}: images"):
        image = relative_name(json_field(row, "file_name", str, where), where)
        of_image = captions.pop(json_field(row, "id", int, where), [])
        yield Entry(PictureFile(found["pictures"] / image), of_image[:first])
    if captions:
        raise ValueError(f"{path}: 'annotations' names image_id {next(iter(captions))}, which 'images' does not have")


def _flickr_karpathy(found: Found, splits: tuple[str, ...] = _SPLITS) -> Iterator[Entry]:
    documents = {path: json_document(path) for path in dict.fromkeys(found[split] for split in splits)}
    rows = (row for split in splits for row in _karpathy_rows(documents[found[split]], split, found[split]))
    return _by_picture(found["pictures"], rows)


def _karpathy_rows(document: Any, split: str, path: Path) -> Iterator[tuple[str, list[str]]]:
    """(image, captions) of a split, from Karpathy's own file or from the split's list of {"image", "caption"}."""
    if isinstance(document, list):
        for where, row in objects(document, str(path)):
            captions = row.get("caption")
            several = captions if isinstance(captions, list) else [captions]
            yield (
                json_field(row, "image", str, where),
                [json_field({"caption": one}, "caption", str, where) for one in several],
            )
        return
    for where, row in objects(json_field(document, "images", list, str(path)), f"{path}: images"):
        if json_field(row, "split", str, where) == split:
            sentences = objects(json_field(row, "sentences", list, where), f"{where}: sentences")
            yield (
                json_field(row, "filename", str, where),
                [json_field(one, "raw", str, place) for place, one in sentences],
            )


def _flickr_raw(found: Found) -> Iterator[Entry]:
    path = found["captions"]
    pattern = _TOKEN_LINE if path.suffix == ".token" else _CSV_LINE
    return _by_picture(found["pictures"], _raw_rows(path, pattern))


def _raw_rows(path: Path, pattern: re.Pattern[str]) -> Iterator[tuple[str, list[str]]]:
    for number, line in enumerate(read_text(path).split("\n"), start=1):
        match = pattern.fullmatch(line)
        if match:
            yield match["image"].strip(), [match["caption"]]
        elif line.strip() and not (number == 1 and line.startswith("image_name")):
            raise ValueError(f"{path}:{number}: got {line[:60]!r}, expected an image, a number and a caption")


def _by_picture(folder: Path, rows: Iterable[tuple[str, list[str]]]) -> Iterator[Entry]:
    captions: dict[str, list[str]] = {}
    for image, some in rows:
        captions.setdefault(image.rsplit("/", 1)[-1], []).extend(some)  # some files put the folder before the name
    for name, of_picture in captions.items():
        yield Entry(PictureFile(folder / relative_name(name, str(folder))), of_picture)


_COCO_NEEDS: Needs = {
    "captions": ("annotations/captions_val2017.json",),
    "pictures": ("images/val2017", "val2017"),
}
_COCO_SOURCE = "Get annotations_trainval2017.zip and val2017.zip from the COCO site (COCO 2017)."

_FLICKR_PICTURES = ("flickr30k-images", "flickr30k_images", "images")
_FLICKR_NEEDS: Needs = {
    "pictures": _FLICKR_PICTURES,
    **{split: ("dataset_flickr30k.json", f"flickr30k_{split}.json") for split in _SPLITS},
}
_FLICKR_SOURCE = (
    "Get the pictures from the University of Illinois (Flickr30k) into flickr30k-images, and either Karpathy's "
    "dataset_flickr30k.json or the flickr30k_{train,val,test}.json made from it."
)

SHORT_BENCHMARKS = (
    Benchmark(
        name="coco",
        needs=_COCO_NEEDS,
        source=_COCO_SOURCE,
        protocol="COCO val2017, 5,000 images: all 25,014 captions (DeBias-CLIP, FLAIR)",
        read=_coco,
    ),
    Benchmark(
        name="coco-first5",
        needs=_COCO_NEEDS,
        source=_COCO_SOURCE,
        protocol="COCO val2017, 5,000 images: the first 5 captions of each, 25,000 (Long-CLIP)",
        read=partial(_coco, first=5),
    ),
    Benchmark(
        name="flickr30k",
        needs=_FLICKR_NEEDS,
        source=_FLICKR_SOURCE,
        protocol="Flickr30k, Karpathy's train, val and test, 31,014 images: all 155,070 captions (DeBias-CLIP)",
        read=_flickr_karpathy,
    ),
    Benchmark(
        name="flickr30k-raw",
        needs={"captions": ("results_20130124.token", "results.csv"), "pictures": _FLICKR_PICTURES},
        source="Get results_20130124.token and flickr30k-images from the University of Illinois (Flickr30k).",
        protocol="Flickr30k, all 31,783 images as released: all 158,915 captions (Long-CLIP, TULIP)",
        read=_flickr_raw,
    ),
    Benchmark(
        name="flickr30k-1k",
        needs={purpose: _FLICKR_NEEDS[purpose] for purpose in ("pictures", "test")},
        source=_FLICKR_SOURCE,
        protocol="Flickr30k, Karpathy's test split, 1,000 images: all 5,000 captions",
        read=partial(_flickr_karpathy, splits=("test",)),
    ),
)
