"""The pack command: training data with its pictures resized once, in shards that any number of processes read."""

import io
import json
import os
import tarfile
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

from tqdm import tqdm
from tyro.conf import Positional, arg

from debias_diffusion.data.pairs import Pairs, open_pairs
from debias_diffusion.data.shards import (
    FORMAT,
    INDEX_FILE,
    SETTINGS_FILE,
    picture_digest,
    read_shard_index,
    shard_name,
    shard_next,
)
from debias_diffusion.data.shrink import Packed, Rule, packed_rows
from debias_diffusion.data.text_files import counted, json_document, json_field

_LEFT_OUT_FILE = "left_out.jsonl"
_MEGABYTE = 1 << 20
_HEADER = 512  # bytes of a tar member's header; names here are short


def pack(
    source: Annotated[Positional[Path], arg(metavar="SOURCE")],
    output: Annotated[Positional[Path], arg(metavar="OUTPUT")],
    image_root: Path | None = None,
    held_out: int = 1000,
    short_side: int = 336,
    quality: int = 92,
    shard_mb: int = 256,
    workers: int = 0,
) -> str:
    """Packs training data into shards: pictures resized once, so that training reads small files in long rows.

    A large picture's short side becomes SHORT_SIDE; smaller JPEGs are kept byte for byte, other pictures become JPEGs.
    Shards are tar files with a .jpg and a .json (key, caption) for each row; `train/encoder.py --data OUTPUT` takes the
    folder. The same command goes on where an interrupted one stopped. What is left out is named in left_out.jsonl.

    Args:
        source: ShareGPT4V's .json, a .jsonl manifest, or a folder of pictures with .txt beside them.
        output: The folder of the shards.
        image_root: The folder that a file's picture paths start from; by default the file's.
        held_out: First records of ShareGPT4V's json that are never trained on, and not packed.
        short_side: Pixels of the short side; 1.5 times what the towers read, so that their own resize stays sharp.
        quality: JPEG quality of resized pictures.
        shard_mb: Megabytes after which a shard is closed.
        workers: Processes that resize; 0 means one for each core.
    """
    limits = {"short-side": (short_side, 16, 4096), "quality": (quality, 50, 100), "shard-mb": (shard_mb, 1, 1 << 16)}
    for name, (value, least, most) in limits.items():
        if not least <= value <= most:
            raise ValueError(f"--{name} is {value}, expected {least} to {most}")
    if workers < 0 or held_out < 0:
        raise ValueError("--workers and --held-out must not be negative")
    pairs = open_pairs(source, image_root, held_out=held_out)
    if not isinstance(pairs, Pairs):
        raise ValueError(f"{source} is packed already")
    rule = Rule(short_side, quality)
    settings = {"source": pairs.name, "data": _digest(pairs), "short_side": short_side, "quality": quality}
    _claim(output, {**settings, "shard_mb": shard_mb})
    first, number = _progress(output)
    is_done = first == len(pairs) and (output / INDEX_FILE).is_file()
    bar = tqdm(total=len(pairs), initial=first, desc="packing", unit="picture", disable=None)
    shard = _Shard(output, number, first)
    for index, result in packed_rows(pairs.pictures, first, rule, workers or os.cpu_count() or 1):
        shard.add(index, pairs.keys[index], pairs.captions[index], result)
        bar.update()
        if shard.size >= shard_mb * _MEGABYTE or index + 1 == len(pairs):
            shard.close(index + 1)
            shard = _Shard(output, shard.number + 1, index + 1)
    bar.close()
    said = _finish(output, pairs, settings)
    return f"nothing was left to do; {said}" if is_done else said


@dataclass
class _Shard:
    """A shard being written: under another name until it is whole, so that one with its own name always is."""

    folder: Path
    number: int
    first: int
    rows: list[list[Any]] = field(default_factory=list)
    left_out: list[list[str]] = field(default_factory=list)
    before: int = 0
    _tar: tarfile.TarFile | None = None

    @property
    def size(self) -> int:
        return self._tar.offset if self._tar else 0

    def add(self, index: int, key: str, caption: str, picture: Packed) -> None:
        """Writes one row, or notes why it is left out."""
        if picture.fault:
            self.left_out.append([key, picture.fault])
            return
        self.before += picture.before
        about = json.dumps({"key": key, "caption": caption}, ensure_ascii=False).encode("utf-8", "replace")
        offset = self._member(f"{index:08d}.jpg", picture.data)
        self._member(f"{index:08d}.json", about)
        digest = picture_digest(picture.data)
        self.rows.append([index, key, caption, offset, len(picture.data), digest])

    def _member(self, name: str, data: bytes) -> int:
        if self._tar is None:
            self._tar = tarfile.open(self._partial(".tar"), "w", format=tarfile.USTAR_FORMAT)  # noqa: SIM115
        info = tarfile.TarInfo(name)  # its time stays 0: the same data makes the same bytes
        info.size = len(data)
        offset = self._tar.offset + _HEADER
        self._tar.addfile(info, io.BytesIO(data))
        return offset

    def close(self, next_row: int) -> None:
        """Gives the shard its own name, the .json that makes it count last."""
        if self._tar is None:
            self._tar = tarfile.open(self._partial(".tar"), "w", format=tarfile.USTAR_FORMAT)  # noqa: SIM115
        self._tar.close()
        index = {
            "first": self.first, "next": next_row, "bytes": self._partial(".tar").stat().st_size,
            "bytes_before": self.before, "left_out": self.left_out, "rows": self.rows,
        }  # fmt: skip
        self._partial(".json").write_text(json.dumps(index), encoding="utf-8")
        for suffix in (".tar", ".json"):
            self._partial(suffix).replace((self.folder / shard_name(self.number)).with_suffix(suffix))

    def _partial(self, suffix: str) -> Path:
        return self.folder / f".{shard_name(self.number)}{suffix}.{os.getpid()}.partial"


def _digest(pairs: Pairs) -> str:
    """A hash of what is to be packed, so that one folder never holds rows of two sources."""
    rows = (f"{k}\n{c}\n" for k, c in zip(pairs.keys, pairs.captions, strict=True))
    return picture_digest("".join(picture_digest(row.encode()) for row in rows).encode())


def _claim(output: Path, settings: dict[str, Any]) -> None:
    """Takes the folder for this data and these settings; raises ValueError where it holds anything else."""
    file = output / SETTINGS_FILE
    if file.is_file():
        then = json_document(file)
        if not isinstance(then, dict):
            raise ValueError(
                f"{file}: got a {type(then).__name__}, expected an object with settings; it is damaged, so name another folder"
            )
        changed = [f"{k} {then.get(k)!r} -> {v!r}" for k, v in settings.items() if then.get(k) != v]
        if changed:
            raise ValueError(f"{output} was begun with other data or settings ({', '.join(changed)}); name another")
        for partial in output.glob(".shard-*.partial"):
            partial.unlink()
        return
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise ValueError(f"{output} is a file or holds other things; name a new folder for the shards")
    output.mkdir(parents=True, exist_ok=True)
    _write(file, json.dumps(settings, indent=2))


def _progress(output: Path) -> tuple[int, int]:
    """(next row, next shard) after the whole shards that are there."""
    row, number = 0, 0
    while (index := read_shard_index(output, number)) is not None:
        row, number = shard_next(index, row, f"{output / shard_name(number)}.json"), number + 1
    return row, number


def _finish(output: Path, pairs: Pairs, settings: dict[str, Any]) -> str:
    left_out, lines, rows, number = Counter(pairs.left_out), [], 0, 0
    row = before = after = 0
    while (index := read_shard_index(output, number)) is not None:
        where = f"{output / shard_name(number)}.json"
        row = shard_next(index, row, where)
        rows, number = rows + len(index["rows"]), number + 1
        before, after = before + json_field(index, "bytes_before", int, where), after + index["bytes"]
        left_out["unreadable_pictures"] += len(index["left_out"])
        lines += [json.dumps({"key": key, "reason": reason}) for key, reason in index["left_out"]]
    lines += [json.dumps({"key": key, "reason": reason.replace("_", " ")}) for key, reason in pairs.named_left_out]
    if row != len(pairs):
        raise ValueError(
            f"{output}: its shards end at row {row:,} of {len(pairs):,}; one is damaged, so delete the folder and pack again"
        )
    left_out = +left_out
    _write(output / _LEFT_OUT_FILE, "".join(f"{line}\n" for line in lines))
    content = {"format": FORMAT, "rows": rows, "shards": number, "left_out": left_out, "bytes": after, **settings}
    _write(output / INDEX_FILE, json.dumps(content, indent=2) + "\n")
    reasons = ", ".join(counted(count, reason.replace("_", " ")) for reason, count in left_out.items())
    names = f" (by name: {output / _LEFT_OUT_FILE})" if lines else ""
    return (
        f"{output}: {counted(rows, 'pairs')} in {counted(number, 'shards')}, {after / 1e6:,.1f} MB for "
        f"{before / 1e6:,.1f} MB of pictures; left out: {reasons or 'nothing'}{names}"
    )


def _write(path: Path, text: str) -> None:
    partial = path.with_name(f".{path.name}.partial")
    partial.write_text(text, encoding="utf-8")
    partial.replace(path)
