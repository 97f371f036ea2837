"""Several sets of text encoders for one checkpoint, by names that a command line takes."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from debias_diffusion.sdxl.generate import as_pipeline, refuse_report_name
from debias_diffusion.sdxl.shipped import slots_source
from debias_diffusion.sdxl.slots import SLOTS


@dataclass(frozen=True)
class OpenedSet:
    """A pipeline with one set of text encoders, and the rows its prompts get: a number cuts them there."""

    pipe: Any
    max_length: int | str


def set_names(sets: Sequence[str]) -> dict[str, str]:
    """The sources of encoders by the names of their sets: NAME in NAME=SOURCE, else the last part of SOURCE.

    Raises ValueError for a name that cannot be a folder's, for two that are the same, and for none.

    >>> set_names(["stock", "miniature:debias", "runs/slots/mine", "b=runs/slots/mine"])
    {'stock': 'stock', 'debias': 'miniature:debias', 'mine': 'runs/slots/mine', 'b': 'runs/slots/mine'}
    """
    named: dict[str, str] = {}
    for text in sets:
        name, is_named, source = text.partition("=")
        source = source if is_named else text
        name = name if is_named else Path(source.rpartition(":")[2]).name
        if not re.fullmatch(r"\w[\w.+-]*", name) or not source:
            raise ValueError(
                f"{text!r} names no set; write SOURCE or NAME=SOURCE, the name of letters, digits and . + - _"
            )
        refuse_report_name(name)
        if name in named:
            raise ValueError(f"two sets are called {name!r}: {named[name]} and {source}; write NAME={source}")
        named[name] = source
    if not named:
        raise ValueError("no set of encoders to draw with; name some, such as stock miniature:debias")
    return named


def open_sets(base: Any, sources: Mapping[str, str]) -> dict[str, OpenedSet]:
    """Each named set as a pipeline that shares `base`'s UNet and VAE.

    A source is "stock" for `base`'s own encoders, cut at their length as diffusers does; "chunks" for the same read in
    pieces of that length; a name of `shipped`; or a folder with slots. All but "stock" read the whole prompt.
    """
    own = min(getattr(base, slot).config.max_position_embeddings for slot in SLOTS)
    lengths: dict[str, int | str] = {"stock": own, "chunks": "auto"}
    return {
        name: OpenedSet(
            as_pipeline(None if source in lengths else slots_source(source), base), lengths.get(source, "auto")
        )
        for name, source in sources.items()
    }
