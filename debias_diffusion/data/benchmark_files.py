"""What a benchmark is, and finding its files under a folder or saying what is missing."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from debias_diffusion.data.retrieval_set import Entry

Needs = dict[str, tuple[str, ...]]  # what a file is for -> the paths, relative to the set's folder, it may have
Found = dict[str, Path]

_NUM_SHOWN = 8


@dataclass(frozen=True)
class Benchmark:
    """What a benchmark is called, which files it needs, where they come from, how it is asked and how it is read."""

    name: str
    needs: Needs
    source: str
    protocol: str
    read: Callable[[Found], Iterable[Entry]]


def find_files(benchmark: Benchmark, root: Path) -> Found:
    """Returns the path of everything the benchmark needs, from `root` or the one folder in it that holds them all.

    So `root` may be the set's own folder, the folder an archive was unpacked in, or a folder of many sets. Raises
    `FileNotFoundError` naming what is missing, what is there instead and where to get the set, and `ValueError` where
    several folders fit.
    """
    name, needs = benchmark.name, benchmark.needs
    if not root.is_dir():
        what = "is a file" if root.exists() else "does not exist"
        raise FileNotFoundError(
            f"{name}: {root} {what}; expected the folder that holds {_list(needs)}. {benchmark.source}"
        )
    found = _look(needs, root)
    if len(found) == len(needs):
        return found
    inside = {folder: _look(needs, folder) for folder in sorted(root.iterdir()) if _may_hold_data(folder)}
    complete = [folder for folder, there in inside.items() if len(there) == len(needs)]
    if len(complete) == 1:
        return inside[complete[0]]
    if complete:
        names = ", ".join(folder.name for folder in complete)
        raise ValueError(f"{name}: several folders in {root} hold the set: {names}; pass the one that is meant")
    raise FileNotFoundError(_missing(benchmark, root, {root: found, **inside}))


def _look(needs: Needs, folder: Path) -> Found:
    found = {}
    for purpose, alternatives in needs.items():
        for path in (folder / alternative for alternative in alternatives):
            if path.exists():
                found[purpose] = path
                break
    return found


def _may_hold_data(folder: Path) -> bool:
    return folder.is_dir() and not folder.name.startswith((".", "__"))  # as __MACOSX, left by some archives


def _missing(benchmark: Benchmark, root: Path, looked: dict[Path, Found]) -> str:
    needs = benchmark.needs
    nearest = max(looked, key=lambda folder: len(looked[folder]))  # of equals the first, which is root
    absent = {purpose: needs[purpose] for purpose in needs if purpose not in looked[nearest]}
    message = f"{benchmark.name}: {nearest} lacks {_list(absent)}"
    above = next((up for up in (root.parent, root.parent.parent) if len(_look(needs, up)) == len(needs)), None)
    below = next((low for low in _two_below(root) if len(_look(needs, low)) == len(needs)), None)
    if above or below:
        return f"{message}; {above or below} holds the set: pass that folder"
    here = sorted(path.name + "/" * path.is_dir() for path in nearest.iterdir())
    more = f" and {len(here) - _NUM_SHOWN} more" if len(here) > _NUM_SHOWN else ""
    return f"{message}; it holds {', '.join(here[:_NUM_SHOWN]) or 'nothing'}{more}. {benchmark.source}"


def _two_below(root: Path) -> list[Path]:
    folders = [folder for folder in sorted(root.iterdir()) if _may_hold_data(folder)]
    return [low for folder in folders for low in sorted(folder.iterdir()) if _may_hold_data(low)]


def _list(needs: Needs) -> str:
    return ", ".join(dict.fromkeys(" or ".join(alternatives) for alternatives in needs.values()))
