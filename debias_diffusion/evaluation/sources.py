"""What is to be measured: encoders read one at a time under short names, and benchmarks by name."""

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import torch
from open_clip import list_pretrained_tags_by_model
from tyro.conf import arg

from debias_diffusion.data.benchmarks import BENCHMARKS, MANIFEST, load_benchmark
from debias_diffusion.data.feature_cache import DEFAULT_FOLDER, FeatureCache
from debias_diffusion.data.retrieval_set import RetrievalSet
from debias_diffusion.data.scene_sets import scene_retrieval_set
from debias_diffusion.encoders.checkpoint import load_encoder
from debias_diffusion.encoders.encoder import Encoder
from debias_diffusion.encoders.folders import CONFIG_FILE
from debias_diffusion.encoders.foreign import Tables
from debias_diffusion.encoders.rows import named_source
from debias_diffusion.encoders.specs import RANDOM
from debias_diffusion.evaluation.page import printable


@dataclass(frozen=True)
class Loading:
    """How encoders are read.

    Args:
        device: Where towers run: cpu, cuda, cuda:1 ...; auto is a GPU where there is one.
        quick_gelu: The activation of weight files that do not record it: True for OpenAI's, False for LAION's.
        tables: How two position tables become one: "fused" as trained, "first" as the official loader does.
        cache: Keep features on disk, so that the next table takes seconds.
        cache_dir: Where they are kept.
    """

    device: Annotated[str, arg(metavar="NAME")] = "auto"
    quick_gelu: bool | None = None
    tables: Tables = "fused"
    cache: bool = True
    cache_dir: Annotated[Path, arg(metavar="DIR")] = DEFAULT_FOLDER

    def encoders(self, names: Mapping[str, str]) -> Iterator[tuple[str, Encoder]]:
        """Reads one encoder after another, so that only one is in memory."""
        device = self.device
        if device == "auto":
            device = "cuda" if torch.cuda.is_available() else "cpu"
        for name, source in names.items():
            yield name, load_encoder(source, device, quick_gelu=self.quick_gelu, tables=self.tables)

    def features(self) -> FeatureCache:
        """The cache that was asked for."""
        return FeatureCache(self.cache_dir if self.cache else None)


def encoder_names(sources: Sequence[str]) -> dict[str, str]:
    """The sources under short names (see `short_names`), after a look at whether there is an encoder at each.

    Raises ValueError where there is no source, or a folder of encoders in the place of one; FileNotFoundError where
    there is nothing at one.
    """
    if not sources:
        raise ValueError("no encoder was named: give a folder, a checkpoint file, or ROW:TAG such as ViT-L-14:openai")
    for source in sources:
        if _holds_none(source):
            load_encoder(source)  # says what may stand here, and reads nothing
    return short_names(sources)


def _holds_none(source: str) -> bool:
    """Whether a look at names tells that there is no encoder; ValueError for a folder that holds some, or will."""
    if named := named_source(source):
        spec, pretrained = named
        tags = {RANDOM, *spec.tags, *list_pretrained_tags_by_model(spec.architecture)}
        return pretrained not in tags and not Path(pretrained).is_file()
    folder = Path(source)
    if not folder.is_dir():
        return not folder.exists()
    if (folder / CONFIG_FILE).is_file():
        return False
    inside = sorted(str(config.parent) for config in folder.glob(f"*/{CONFIG_FILE}"))
    if inside:
        what = f"its encoder is {inside[0]}" if len(inside) == 1 else f"it holds {', '.join(inside)}; name those meant"
        raise ValueError(f"{source} is no encoder: {what}")
    if (folder / "checkpoints").is_dir():
        raise ValueError(
            f"{source} is a run whose training has not ended: end it with --resume, then name {source}/encoder"
        )
    return not (folder / "config.json").is_file()


def short_names(sources: Sequence[str]) -> dict[str, str]:
    """{name: source} in order, a name being the last parts of the source's path that tell it from the others, as text
    that can be printed.

    >>> short_names(["miniature:random", "miniature:random"])
    {'miniature:random': 'miniature:random'}
    """
    parts = {source: _parts(source) for source in sources}
    return {
        printable(
            next(("/".join(own[-n:]) for n in range(1, len(own) + 1) if _is_alone(own[-n:], parts.values())), source)
        ): source
        for source, own in parts.items()
    }


def load_sets(benchmarks: Sequence[str], root: Path | None) -> list[RetrievalSet]:
    """The retrieval sets by name; all names are checked before the first file is read.

    Raises ValueError for an unknown name, one without a folder, or two alike; FileNotFoundError for missing files.
    """
    wanted = [_parse_benchmark(spec, root) for spec in benchmarks]
    if not wanted:
        raise ValueError(f"no benchmark was named; known: miniature, {', '.join(BENCHMARKS)}, {MANIFEST}FILE.jsonl")
    sets = [
        scene_retrieval_set(folder) if isinstance(folder, int) else load_benchmark(name, folder)
        for name, folder in wanted
    ]
    names = [retrieval_set.name for retrieval_set in sets]
    if len(set(names)) < len(names):
        raise ValueError(f"two benchmarks have the same name among {', '.join(names)}; evaluate them in two runs")
    return sets


def _parse_benchmark(spec: str, root: Path | None) -> tuple[str, Path | int]:
    """(name, folder) of NAME or NAME=FOLDER, (name, pairs) of the miniature's."""
    if spec.startswith(MANIFEST):
        return spec, Path()
    if pairs := re.fullmatch(r"miniature(?::(\d+))?", spec):
        return "miniature", int(pairs[1] or 1000)
    name, equals, folder = spec.partition("=")
    if name not in BENCHMARKS:
        known = f"miniature, miniature:PAIRS, {', '.join(BENCHMARKS)}, {MANIFEST}FILE.jsonl"
        raise ValueError(f"unknown benchmark {name!r}; known: {known}")
    if not equals and root is None:
        raise ValueError(f"{name} needs its files: name the folder that holds them by --root DIR or as {name}=DIR")
    return name, Path(folder) if equals else root or Path()


def _parts(source: str) -> tuple[str, ...]:
    named = named_source(source)
    path = Path(named[1] if named else source)
    if not path.exists():
        return (source,)
    path = path.resolve()
    return (path.with_suffix("") if path.is_file() else path).parts


def _is_alone(tail: tuple[str, ...], others: Collection[tuple[str, ...]]) -> bool:
    return sum(other[-len(tail) :] == tail for other in others) == 1
