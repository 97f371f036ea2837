"""Loading a retrieval benchmark by name."""

import os
from collections.abc import Iterator
from pathlib import Path

from debias_diffusion.data.benchmark_files import Benchmark, find_files
from debias_diffusion.data.long_benchmarks import LONG_BENCHMARKS
from debias_diffusion.data.pairs import manifest_rows
from debias_diffusion.data.retrieval_set import Entry, PictureFile, RetrievalSet, build_retrieval_set
from debias_diffusion.data.short_benchmarks import SHORT_BENCHMARKS

MANIFEST = "manifest:"
BENCHMARKS: dict[str, Benchmark] = {row.name: row for row in (*LONG_BENCHMARKS, *SHORT_BENCHMARKS)}


def load_benchmark(name: str, root: str | Path = ".") -> RetrievalSet:
    """Returns the benchmark `name`, its files found in `root` or one folder below; see `BENCHMARKS` for the names.

    "manifest:PATH.jsonl" reads a file of one's own, {"image", "caption"} and optionally "short_caption" a line, images
    relative to its folder; rows that name one image give it several captions. `root` plays no part then.

    Raises `ValueError` for an unknown name, `FileNotFoundError` naming what `root` lacks and where to get it.
    """
    if name.startswith(MANIFEST):
        path = Path(name.removeprefix(MANIFEST))
        if not path.is_file():
            raise FileNotFoundError(f"{name}: there is no such file; expected {MANIFEST}PATH of a .jsonl file")
        protocol = f"{path.name}: every row a caption, rows that name one image share it"
        return build_retrieval_set(f"{MANIFEST}{path.name}", protocol, _manifest(path))
    if name not in BENCHMARKS:
        raise ValueError(f"unknown benchmark {name!r}; known: {', '.join(BENCHMARKS)}, {MANIFEST}PATH.jsonl")
    row = BENCHMARKS[name]
    return build_retrieval_set(name, row.protocol, row.read(find_files(row, Path(root))))


def _manifest(path: Path) -> Iterator[Entry]:
    captions: dict[Path, list[str]] = {}
    short_captions: dict[Path, list[str]] = {}
    for number, row in enumerate(manifest_rows(path)):
        if number and bool(short_captions) != (row.short_caption is not None):
            raise ValueError(f"{row.where}: 'short_caption' is in some rows only; give it in every row or in none")
        picture = Path(os.path.normpath(path.parent / row.image))
        captions.setdefault(picture, []).append(row.caption)
        if row.short_caption is not None:
            short_captions.setdefault(picture, []).append(row.short_caption)
    for picture, of_picture in captions.items():
        yield Entry(PictureFile(picture), of_picture, short_captions.get(picture))
