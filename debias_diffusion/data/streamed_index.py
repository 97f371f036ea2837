"""The index of streamed shards: brought by packed ones, made in one pass over others, kept while they stay as they are."""

import hashlib
import json
import logging
import os
from collections import Counter
from collections.abc import Callable
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from tqdm import tqdm

from debias_diffusion.data.shards import (
    FORMAT,
    INDEX_FILE,
    ShardRows,
    chained_next,
    check_format,
    left_out_counts,
    shard_name,
)
from debias_diffusion.data.streamed import StreamedShards
from debias_diffusion.data.streamed_reader import RemoteFolder, StreamError, parent_and_name
from debias_diffusion.data.streamed_tars import tar_index
from debias_diffusion.data.text_files import counted, json_field, parse_json

DEFAULT_CACHE = Path("~/.cache/debias-diffusion/streams")
_MOST_SHARDS = 100_000  # what five digits number
_Index = Callable[[RemoteFolder, str, Path], dict[str, Any]]

_log = logging.getLogger(__name__)


def open_streamed(url: str, cache: Path = DEFAULT_CACHE) -> StreamedShards:
    """Returns the rows at a url: a folder that `debias-diffusion pack` wrote, a folder of WebDataset .tar files, or those
    that a pattern such as FOLDER/train-*.tar names.

    Packed shards bring their index; for others it is made in one pass over them. Either is kept under `cache` for as long
    as the file at the url stays as it is. Raises ValueError for a shard that is not the size its index says, `StreamError`
    for what cannot be read.
    """
    parent, last = parent_and_name(url)
    if "*" in last or last.endswith(".tar"):
        folder = RemoteFolder(parent)
        names = [name for name in folder.names() if fnmatchcase(name, last)] if "*" in last else [last]
        return _opened(url, folder, names, _tar_index, cache)
    folder = RemoteFolder(url)
    about = _packed_about(folder)
    if about is None:
        return _opened(url, folder, [name for name in folder.names() if name.endswith(".tar")], _tar_index, cache)
    where = folder.url_of(INDEX_FILE)
    shards = json_field(about, "shards", int, where)
    if not 0 < shards <= _MOST_SHARDS:
        raise ValueError(f"{where}: it names {shards:,} shards, expected 1 to {_MOST_SHARDS:,}")
    folder.names()  # many file systems then know every size without another request
    opened = _opened(url, folder, [f"{shard_name(number)}.tar" for number in range(shards)], _packed_index, cache)
    if len(opened) != json_field(about, "rows", int, where):
        raise ValueError(
            f"{where}: it names {about['rows']:,} rows, the shards hold {len(opened):,}; copy them all again"
        )
    opened.left_out.update(left_out_counts(about, where))
    return opened


def _opened(url: str, folder: RemoteFolder, names: list[str], index: _Index, cache: Path) -> StreamedShards:
    rows, left_out = ShardRows(), Counter[str]()
    begin: int | None = 0
    documents = folder.together(lambda name: index(folder, name, cache.expanduser()), names)
    bar = tqdm(documents, total=len(names), desc="indexing", unit="shard", disable=None, leave=False)
    for number, document in enumerate(bar):
        where = folder.url_of(_beside(names[number]) if index is _packed_index else names[number])
        rows.extend(number, json_field(document, "rows", list, where), where, json_field(document, "bytes", int, where))
        if index is _packed_index:  # such shards name what is left out, index.json counts it
            begin = chained_next(document, begin, where)
        else:
            left_out.update(left_out_counts(document, where))
    if not len(rows):
        counts = ", ".join(counted(number, reason.replace("_", " ")) for reason, number in left_out.items())
        raise ValueError(
            f"{url}: {counted(len(names), '.tar shards')}, and no picture with a caption ({counts or 'they are empty'})"
        )
    return StreamedShards(folder, names, rows, dict(left_out))


def _packed_about(folder: RemoteFolder) -> dict[str, Any] | None:
    """What the folder's index.json says, or None where there is none."""
    where = folder.url_of(INDEX_FILE)
    try:
        about = _object(folder.read(INDEX_FILE), where)
    except StreamError as error:
        if isinstance(error.__cause__, FileNotFoundError):
            return None
        raise
    check_format(about, where)
    return about


def _packed_index(folder: RemoteFolder, name: str, cache: Path) -> dict[str, Any]:
    beside = _beside(name)
    where = folder.url_of(beside)
    document = _kept(folder, beside, cache, lambda: _object(folder.read(beside), where))
    size, expected = folder.size(name), json_field(document, "bytes", int, where)
    if size != expected:
        raise ValueError(
            f"{folder.url_of(name)}: {size:,} bytes, but its index says {expected:,}; it was cut short or changed, so copy "
            "the shard there again"
        )
    return document


def _beside(name: str) -> str:
    return f"{name.removesuffix('.tar')}.json"


def _tar_index(folder: RemoteFolder, name: str, cache: Path) -> dict[str, Any]:
    where = folder.url_of(name)
    return _kept(folder, name, cache, lambda: folder.passed(name, lambda file: tar_index(file, where)))


def _kept(folder: RemoteFolder, name: str, cache: Path, make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """What `make` gives for a file, made once while the file stays as it is; a cache that fails costs time alone."""
    key = hashlib.blake2b(f"{FORMAT}|{folder.url_of(name)}|{folder.mark(name)}".encode(), digest_size=16).hexdigest()
    path = cache / f"{key}.json"
    if path.is_file():
        try:
            return _object(path.read_bytes(), str(path))
        except (OSError, ValueError) as error:
            _log.warning("%s is damaged (%s); it is made again", path, error)
    document = make()
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
    try:
        cache.mkdir(parents=True, exist_ok=True)
        partial.write_text(json.dumps(document), encoding="utf-8")
        partial.replace(path)
    except OSError as error:
        _log.warning("the index of %s was not kept in %s: %s", name, cache, error)
    return document


def _object(data: bytes, where: str) -> dict[str, Any]:
    document = parse_json(data, where)
    if not isinstance(document, dict):
        raise ValueError(f"{where}: got {type(document).__name__}, expected an object")
    return document
