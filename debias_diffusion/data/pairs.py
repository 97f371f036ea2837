"""Training data: pictures with long captions, from ShareGPT4V's file, a JSONL manifest, a folder or packed shards."""

import logging
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from PIL import Image

from debias_diffusion.data.packed import PackedStrings, PicturePaths
from debias_diffusion.data.pictures import PICTURE_SUFFIXES, open_picture, relative_name
from debias_diffusion.data.retrieval_set import PictureFile
from debias_diffusion.data.shards import Shards, is_packed
from debias_diffusion.data.streamed import StreamedShards
from debias_diffusion.data.streamed_index import open_streamed
from debias_diffusion.data.text_files import counted, json_array, json_field, json_lines, read_text

SPLITS = ("train", "held_out")

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Pairs:
    """Pictures and their captions, row by row; `left_out` counts what the source held and these rows do not, and
    `named_left_out` names it: (key, reason as it is counted).

    Reading them touches no picture, so a missing or broken one shows only in `open`.
    """

    name: str
    keys: Sequence[str]
    captions: Sequence[str]
    pictures: Sequence[Path]
    left_out: dict[str, int] = field(default_factory=dict)
    named_left_out: Sequence[tuple[str, str]] = ()

    def __post_init__(self) -> None:
        if not len(self.keys) == len(self.captions) == len(self.pictures):
            raise ValueError(
                f"{self.name}: {len(self.keys)} keys, {len(self.captions)} captions and {len(self.pictures)} pictures; "
                "expected one of each a row"
            )

    def __len__(self) -> int:
        return len(self.captions)

    def open(self, index: int, min_side: int | None = None) -> Image.Image:
        """Returns the row's picture as RGB; see `open_picture` for `min_side` and for what raises `BadPicture`."""
        return open_picture(self.pictures[index], min_side)

    def picture(self, index: int) -> PictureFile:
        """Returns the row's picture with its identity, for caching what is computed from it."""
        return PictureFile(self.pictures[index])


class CaptionRow(NamedTuple):
    """One row of a caption file; `image` is a checked path relative to the image folder, `where` is for messages."""

    where: str
    key: str
    image: str
    caption: str
    short_caption: str | None


def sharegpt4v_rows(json_path: Path) -> Iterator[CaptionRow]:
    """Yields the file's records in order: `image`, and as caption the first turn from "gpt" (ShareGPT4V, Long-CLIP).

    Raises `ValueError` naming the record, counted from 0, that has no such turn or whose image leads out of the folder.
    """
    for where, record in json_array(json_path):
        image = relative_name(json_field(record, "image", str, where), where)
        turns = json_field(record, "conversations", list, where)
        answer = next((turn for turn in turns if isinstance(turn, dict) and turn.get("from") == "gpt"), None)
        if answer is None:
            raise ValueError(f"{where}: no turn of 'conversations' is from \"gpt\"; its text is the caption")
        caption = json_field(answer, "value", str, f'{where}, turn from "gpt"')
        yield CaptionRow(where, str(record.get("id", image)), image, caption, None)


def manifest_rows(path: Path) -> Iterator[CaptionRow]:
    """Yields the manifest's rows: {"image", "caption"} and, where given, "short_caption" and "id" (or "key").

    Blank lines are allowed. Raises `ValueError` naming file and line for anything else that is not such a row.
    """
    for where, row in json_lines(path):
        image = relative_name(json_field(row, "image", str, where), where)
        caption = json_field(row, "caption", str, where)
        short = json_field(row, "short_caption", str, where) if "short_caption" in row else None
        yield CaptionRow(where, _key(row, image, where), image, caption, short)


def read_sharegpt4v(json_path: Path, image_root: Path, *, held_out: int = 1000, split: str = "train") -> Pairs:
    """Returns the pairs of a ShareGPT4V caption file, images relative to `image_root`.

    The first `held_out` records are the held-out set and are never trained on (Long-CLIP's rule, which the paper's step
    count confirms); `split` is "train" or "held_out". Captions are kept as written.
    """
    if split not in SPLITS:
        raise ValueError(f"split is {split!r}, expected one of {', '.join(SPLITS)}")
    _require_folder(image_root)
    gather = _Gather()
    num_records = 0
    for num_records, row in enumerate(sharegpt4v_rows(json_path), start=1):
        if (num_records <= held_out) == (split == "held_out"):
            gather.add(row.key, row.image, row.caption)
        elif split == "held_out":
            break
    if not len(gather.captions) and split == "train" and 0 < num_records <= held_out:
        raise ValueError(
            f"{json_path}: {counted(num_records, 'records')}, all held out (held_out={held_out:,}); "
            "for a smaller file pass a smaller held_out (--held-out)"
        )
    return gather.pairs(json_path, json_path.stem, image_root)


def read_manifest(jsonl_path: Path, image_root: Path | None = None) -> Pairs:
    """Returns the pairs of a JSONL manifest, images relative to `image_root` or else to the manifest's folder.

    A row is {"image", "caption"}, with "id" or "key" if wanted; see `manifest_rows` for what is refused.
    """
    root = jsonl_path.parent if image_root is None else image_root
    _require_folder(root)
    gather = _Gather()
    for row in manifest_rows(jsonl_path):
        gather.add(row.key, row.image, row.caption)
    return gather.pairs(jsonl_path, jsonl_path.stem, root)


def read_folder(folder: Path) -> Pairs:
    """Returns the pictures below `folder` that have a text file of the same name beside them, sorted by path.

    The whole text is the caption. Hidden files and folders are passed over; a picture without text, a text without
    picture and a picture whose name is not UTF-8 are in `left_out`.
    """
    _require_folder(folder)
    names = sorted(_visible_files(folder))
    texts = {name for name in names if name.lower().endswith(".txt")}
    pictures = [name for name in names if os.path.splitext(name)[1].lower() in PICTURE_SUFFIXES]
    gather = _Gather()
    used = set()
    for name in pictures:
        if not _is_utf8(name):
            _log.warning("%s: left out %r: its name is not UTF-8; rename it", folder, os.fsencode(name))
            gather.leave_out("pictures_not_named_in_utf8", os.fsencode(name).decode("utf-8", "backslashreplace"))
            used.add(f"{os.path.splitext(name)[0]}.txt")
            continue
        text = f"{os.path.splitext(name)[0]}.txt"
        if text not in texts:
            gather.leave_out("pictures_without_text", name)
            continue
        used.add(text)
        gather.add(name, name, read_text(folder / text).strip())
    for name in sorted(texts - used):
        gather.leave_out("texts_without_picture", os.fsencode(name).decode("utf-8", "backslashreplace"))
    return gather.pairs(folder, folder.resolve().name, folder)


def open_pairs(
    source: str | Path, image_root: str | Path | None = None, *, held_out: int = 1000
) -> Pairs | Shards | StreamedShards:
    """Returns the training pairs of a ShareGPT4V .json file, a .jsonl manifest, a folder of pictures and texts, a folder
    that `debias-diffusion pack` wrote, or shards at a url (see `open_streamed`).

    `image_root` is where a file's images lie, by default the file's folder; `held_out` applies to .json only. Raises
    `ValueError` where the source is none of these or holds no pair.
    """
    if "://" in str(source):
        if image_root is not None:
            raise ValueError(f"image_root (--image-root) is {image_root}, but shards hold their pictures; leave it out")
        return open_streamed(str(source))
    path = Path(source)
    root = None if image_root is None else Path(image_root)
    if not path.exists():
        raise ValueError(f"{path}: there is no such file or folder; {_EXPECTED}")
    if path.is_dir():
        if root is not None:
            raise ValueError(f"image_root (--image-root) is {root}, but {path} holds its own pictures; leave it out")
        return Shards.read(path) if is_packed(path) else read_folder(path)
    match path.suffix.lower():
        case ".json":
            return read_sharegpt4v(path, path.parent if root is None else root, held_out=held_out)
        case ".jsonl":
            return read_manifest(path, root)
        case suffix:
            raise ValueError(f"{path}: got {f'a {suffix} file' if suffix else 'a file without suffix'}; {_EXPECTED}")


_FOLDER = "expected the folder that the images lie in"
_EXPECTED = (
    "expected a ShareGPT4V .json file, a .jsonl manifest, a folder of pictures with a .txt beside each, a folder that "
    "`debias-diffusion pack` wrote, or the url of shards"
)


class _Gather:
    """Collects rows into packed columns; counts and names what is left out."""

    def __init__(self) -> None:
        self.keys, self.images, self.captions = PackedStrings(), PackedStrings(), PackedStrings()
        self.left_out: dict[str, int] = {}
        self.named_left_out: list[tuple[str, str]] = []

    def add(self, key: str, image: str, caption: str) -> None:
        if not caption.strip():
            self.leave_out("empty_captions", key)
            return
        self.keys.append(key)
        self.images.append(image)
        self.captions.append(caption)

    def leave_out(self, reason: str, key: str) -> None:
        self.left_out[reason] = self.left_out.get(reason, 0) + 1
        self.named_left_out.append((key, reason))

    def pairs(self, source: Path, name: str, root: Path) -> Pairs:
        if not len(self.captions):
            found = ", ".join(counted(count, reason.replace("_", " ")) for reason, count in self.left_out.items())
            raise ValueError(f"{source}: holds no picture with a caption ({found or 'it is empty'})")
        pictures = PicturePaths(root, self.images)
        return Pairs(name, self.keys, self.captions, pictures, self.left_out, self.named_left_out)


def _key(row: dict[str, Any], image: str, where: str) -> str:
    key = row.get("id", row.get("key", image))
    if not isinstance(key, str | int):
        raise ValueError(f"{where}: 'id' is {key!r}, expected a string or a number")
    return str(key)


def _require_folder(folder: Path) -> None:
    if not folder.is_dir():
        raise ValueError(f"{folder}: {'this is a file' if folder.exists() else 'there is no such folder'}; {_FOLDER}")


def _is_utf8(name: str) -> bool:
    """Whether a file's name is text: other bytes come as lone surrogates, which no packed column or report can hold."""
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True


def _visible_files(folder: Path) -> Iterator[str]:
    """Yields paths relative to `folder`; names that open with a dot are a system's own files, never data."""
    for parent, folders, files in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith(".")]
        for name in files:
            if not name.startswith("."):
                yield os.path.relpath(os.path.join(parent, name), folder).replace(os.sep, "/")
