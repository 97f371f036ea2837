"""What the app draws with: one checkpoint, and the named sets of text encoders that share its UNet and VAE."""

import copy
import dataclasses
import re
import threading
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from diffusers import DiffusionPipeline

from apps.blend import blended_pipeline
from debias_diffusion.encoders.encoder import Encoder
from debias_diffusion.sdxl.generate import Settings, token_report
from debias_diffusion.sdxl.judge import refuse_tested
from debias_diffusion.sdxl.prompts import PromptLine, TokenReport, debias_pipeline
from debias_diffusion.sdxl.sets import open_sets
from debias_diffusion.sdxl.slots import SLOTS

STOCK = "stock"
"""The checkpoint's own encoders, cut at their length as diffusers does."""
MAX_SETS = 8

_SMALL_VOCABULARY = 5000  # the miniature world's has 851 entries, CLIP's 49,408


@dataclass
class Studio:
    """Pipelines by set name, "stock" first. Whoever runs a model holds `device`: pipelines share their scheduler.

    `judge` is an independent encoder that says how much of each sentence is in a real picture, where there is one.
    """

    pipes: dict[str, Any]
    sources: dict[str, str]
    judge: Encoder | None = None
    device: threading.Lock = field(default_factory=threading.Lock)
    _blended: dict[tuple[str, float], Any] = field(default_factory=dict)
    _readers: dict[str, Any] = field(default_factory=dict)
    _reading: threading.Lock = field(default_factory=threading.Lock)

    @property
    def stock(self) -> Any:
        return self.pipes[STOCK]

    @property
    def own_size(self) -> int:
        """Side of the checkpoint's own pictures in pixels."""
        return int(self.stock.default_sample_size * self.stock.vae_scale_factor)

    @property
    def is_miniature(self) -> bool:
        """Whether the checkpoint knows only the few words of the miniature world."""
        return len(self.stock.tokenizer) < _SMALL_VOCABULARY

    @property
    def stock_length(self) -> int:
        """Tokens at which the checkpoint's own encoders cut."""
        return min(int(getattr(self.stock, slot).config.max_position_embeddings) for slot in SLOTS)

    def find(self, name: str, blend: float = 1.0) -> Any:
        """The pipeline of a set; below 1, `blend` takes its encoders back towards the checkpoint's own, stretched.

        A wrong name lists the right ones. The last blend of each set is kept.
        """
        self.choose(name)
        if blend == 1 or name == STOCK:
            return self.pipes[name]
        if (name, blend) not in self._blended:
            for key in [key for key in self._blended if key[0] == name]:
                del self._blended[key]
            self._blended[name, blend] = blended_pipeline(self.stock, self.pipes[name], blend)
        return self._blended[name, blend]

    def choose(self, sets: Any) -> list[str]:
        """The names a visitor or a program chose: a list of them, or one by itself; a wrong name lists the right ones."""
        names = [sets] if isinstance(sets, str) else sets
        if not names or not isinstance(names, list | tuple):
            raise ValueError(f"{sets!r} chooses no set of encoders; expected one or more of: {', '.join(self.pipes)}")
        for name in names:
            if name not in list(self.pipes):
                raise ValueError(f"no set of encoders is called {name!r}; sets: {', '.join(self.pipes)}")
        return list(names)

    def add(self, name: str, source: str) -> list[str]:
        """Adds a set from a folder (or encoder) and returns what should be known about it, in sentences.

        Raises ValueError or FileNotFoundError that says what is wrong with the name or the folder.
        """
        if not re.fullmatch(r"\w[\w.+-]{0,39}", name):
            raise ValueError(f"a set is called {name!r}; expected up to 40 letters, digits and . + - _")
        if name in self.pipes:
            raise ValueError(f"a set called {name!r} is there already; sets: {', '.join(self.pipes)}")
        if len(self.pipes) >= MAX_SETS:
            raise ValueError(f"there are {len(self.pipes)} sets already; start the app again to make room")
        if not source.strip():
            raise ValueError(f"no folder is given for {name!r}; expected one with text_encoder and text_encoder_2")
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", UserWarning)
            pipe = open_sets(self.stock, {name: str(Path(source).expanduser())})[name].pipe
        if self.judge is not None:
            refuse_tested(self.judge, {name: pipe})
        self.pipes[name], self.sources[name] = pipe, source
        return [str(warning.message) for warning in caught if issubclass(warning.category, UserWarning)]

    def read(self, name: str, line: PromptLine, settings: Settings) -> list[TokenReport]:
        """What each encoder of a set reads of the prompt and negative; runs no model, so needs no turn on the device."""
        own = dataclasses.replace(settings, max_length=self.max_length(name, settings))
        with self._reading:
            if name not in self._readers:
                self._readers[name] = _reader(self.find(name))
            return token_report(self._readers[name], line, own)

    def max_length(self, name: str, settings: Settings) -> int | str:
        """Rows at which a set is cut: the checkpoint's own encoders always at their length."""
        if name != STOCK:
            return settings.max_length
        return self.stock_length if settings.max_length == "auto" else min(self.stock_length, int(settings.max_length))


def _reader(pipe: Any) -> Any:
    """A copy with tokenizers of its own, so that counting while one types never meets a drawing in the same tokenizer."""
    own = copy.copy(pipe)
    for spec in SLOTS.values():
        setattr(own, spec.tokenizer, copy.deepcopy(getattr(pipe, spec.tokenizer)))
    return own


def open_studio(
    pipe: DiffusionPipeline, sets: Mapping[str, str], judge: Encoder | None = None
) -> tuple[Studio, list[str]]:
    """A studio of a checkpoint's pipeline and its further sets by name and source, and what should be known of them.

    Sources are those of `open_sets`. Raises ValueError where the judge is an encoder that draws.
    """
    own = debias_pipeline(pipe)
    own.set_progress_bar_config(disable=True)
    if judge is not None:
        refuse_tested(judge, {STOCK: own})
    studio = Studio({STOCK: own}, {STOCK: "the checkpoint's own"}, judge)
    notes = [f"{name}: {note}" for name, source in sets.items() for note in studio.add(name, source)]
    return studio, notes
