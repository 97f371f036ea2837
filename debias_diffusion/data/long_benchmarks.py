"""The benchmarks with long captions, as their owners ship them: a row each, and a reader for each layout.

Counts in the protocol lines are those of the complete set, so a partial copy shows beside the set's own `counts`.
"""

import re
from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

from debias_diffusion.data.benchmark_files import Benchmark, Found, Needs
from debias_diffusion.data.pairs import sharegpt4v_rows
from debias_diffusion.data.pictures import relative_name
from debias_diffusion.data.retrieval_set import Entry, PictureFile
from debias_diffusion.data.text_files import json_document, json_field, json_lines, read_text


def joined_bare(short: str, extra: str) -> str:
    """Returns the two captions with nothing between them, as the paper's evaluation reads DCI.

    >>> joined_bare("A red bus.", "It is 3.5 m high. ")
    'A red bus.It is 3.5 m high.'
    """
    return (short + extra).strip()


def joined_by_dots(short: str, extra: str) -> str:
    """Returns both captions cut at line ends, "</s>" and full stops, the pieces joined by ". " (LoTLIP, FLAIR).

    >>> joined_by_dots("A red bus.", "It is 3.5 m high. ")
    'A red bus. It is 3. 5 m high'
    """
    pieces = (piece.strip() for piece in re.split(r"\n|</s>|\.", f"{short}\n{extra}"))
    return ". ".join(piece for piece in pieces if piece)


def _urban1k(found: Found) -> Iterator[Entry]:
    texts = {path.stem: path for path in found["captions"].glob("*.txt") if not path.name.startswith(".")}
    pictures = {path.stem for path in found["pictures"].glob("*.jpg") if not path.name.startswith(".")}
    for stem in sorted(texts.keys() | pictures, key=lambda stem: (len(stem), stem)):  # 2 before 10
        captions = [read_text(texts[stem]).split("\n")[0]] if stem in texts else []
        yield Entry(PictureFile(found["pictures"] / f"{stem}.jpg"), captions)


def _dci(found: Found, caption: Callable[[str, str], str]) -> Iterator[Entry]:
    splits = json_document(found["splits"])
    if not isinstance(splits, dict):
        raise ValueError(f"{found['splits']}: expected an object of split names and lists of file names")
    for split in splits:
        for name in json_field(splits, split, list, str(found["splits"])):
            yield _dci_entry(found, relative_name(str(name), f"{found['splits']}: {split}"), caption)


def _long_dci(found: Found) -> Iterator[Entry]:
    for name in sorted(path.name for path in found["annotations"].glob("*.json")):
        entry = _dci_entry(found, name, lambda _, extra: extra)
        yield entry if entry.captions[0].strip() else Entry(entry.picture, [])


def _dci_entry(found: Found, name: str, caption: Callable[[str, str], str]) -> Entry:
    path = found["annotations"] / name
    record = json_document(path)
    image = relative_name(json_field(record, "image", str, str(path)), str(path))
    short, extra = (_text_or_empty(record, key, path) for key in ("short_caption", "extra_caption"))
    return Entry(PictureFile(found["pictures"] / image), [caption(short, extra)], [short])


def _text_or_empty(record: dict[str, Any], key: str, path: Path) -> str:
    return json_field(record, key, str, str(path)) if record.get(key) is not None else ""


def _docci(found: Found) -> Iterator[Entry]:
    for where, row in json_lines(found["captions"]):
        if json_field(row, "split", str, where) == "test":
            image = relative_name(json_field(row, "image_file", str, where), where)
            yield Entry(PictureFile(found["pictures"] / image), [json_field(row, "description", str, where)])


def _iiw(found: Found, parts: tuple[str, ...]) -> Iterator[Entry]:
    for part in parts:
        for where, row in json_lines(found[part]):
            image = relative_name(json_field(row, "image" if "image" in row else "image/key", str, where), where)
            file = image if image.endswith(".jpg") else f"{image}.jpg"
            yield Entry(PictureFile(found[f"{part} pictures"] / file), [json_field(row, "IIW", str, where)])


def _sharegpt4v(found: Found) -> Iterator[Entry]:
    for row in islice(sharegpt4v_rows(found["captions"]), 1000):
        yield Entry(PictureFile(found["captions"].parent / row.image), [row.caption])


_DCI_SOURCE = (
    "Get it from facebookresearch/DCI on GitHub (dci.tar.gz); the photos are archive sa_000138 of SA-1B, unpacked into "
    "densely_captioned_images/photos."
)
_DCI_NEEDS: Needs = {"annotations": ("annotations",), "pictures": ("photos",)}
_DCI_SPLIT_NEEDS: Needs = {"splits": ("splits.json",), **_DCI_NEEDS}

_IIW_SOURCE = (
    "Get IIW-400, DCI_Test and DOCCI_Test from google/imageinwords on GitHub (datasets/) and put the pictures beside "
    "them: DOCCI's AAR archive as images_aar, DOCCI's own as images, DCI's as photos."
)
_IIW_PARTS = ("IIW-400", "DCI_Test", "DOCCI_Test")
_IIW_NEEDS: Needs = {
    "IIW-400": ("IIW-400/data.jsonl",),
    "IIW-400 pictures": ("images_aar", "docci_aar"),
    "DCI_Test": ("DCI_Test/data.jsonl",),
    "DCI_Test pictures": ("photos", "dci", "densely_captioned_images/photos"),
    "DOCCI_Test": ("DOCCI_Test/data.jsonl",),
    "DOCCI_Test pictures": ("images", "docci"),
}

LONG_BENCHMARKS = (
    Benchmark(
        name="urban1k",
        needs={"captions": ("caption",), "pictures": ("image",)},
        source="Get it from BeichenZhang/Urban1k on Hugging Face (Urban1k.zip).",
        protocol="Urban1k, all 1,000 pairs: the first line of each caption file, empty where that line is blank",
        read=_urban1k,
    ),
    Benchmark(
        name="dci",
        needs=_DCI_SPLIT_NEEDS,
        source=_DCI_SOURCE,
        protocol="DCI, all splits, 7,805 pairs: short_caption + extra_caption without a separator (DeBias-CLIP)",
        read=partial(_dci, caption=joined_bare),
    ),
    Benchmark(
        name="dci-split",
        needs=_DCI_SPLIT_NEEDS,
        source=_DCI_SOURCE,
        protocol="DCI, all splits, 7,805 pairs: both captions cut at full stops, joined by '. ' (LoTLIP, FLAIR)",
        read=partial(_dci, caption=joined_by_dots),
    ),
    Benchmark(
        name="long-dci",
        needs=_DCI_NEEDS,
        source=_DCI_SOURCE,
        protocol="Long-DCI, annotation files in name order, 7,602 pairs: extra_caption where not empty (TULIP)",
        read=_long_dci,
    ),
    Benchmark(
        name="docci",
        needs={"captions": ("docci_descriptions.jsonlines",), "pictures": ("images",)},
        source="Get docci_descriptions.jsonlines and docci_images.tar.gz from Google's DOCCI page (google/docci).",
        protocol="DOCCI, split test, 5,000 pairs: the full description",
        read=_docci,
    ),
    Benchmark(
        name="iiw-400",
        needs={purpose: _IIW_NEEDS[purpose] for purpose in ("IIW-400", "IIW-400 pictures")},
        source=_IIW_SOURCE,
        protocol="ImageInWords, IIW-400 alone, 400 pairs: the human IIW caption as written",
        read=partial(_iiw, parts=_IIW_PARTS[:1]),
    ),
    Benchmark(
        name="iiw",
        needs=_IIW_NEEDS,
        source=_IIW_SOURCE,
        protocol="ImageInWords, IIW-400 + DCI_Test + DOCCI_Test, 612 pairs: the human IIW caption as written",
        read=partial(_iiw, parts=_IIW_PARTS),
    ),
    Benchmark(
        name="sharegpt4v-1k",
        needs={"captions": ("share-captioner_coco_lcs_sam_1246k_1107.json",), "pictures": ("sam/images",)},
        source="Get the captions from Lin-Chen/ShareGPT4V on Hugging Face, the pictures from SA-1B into sam/images.",
        protocol="ShareGPT4V-1k, the first 1,000 records, which training holds out: the full caption",
        read=_sharegpt4v,
    ),
)
