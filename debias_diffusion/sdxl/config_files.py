"""Configuration of a diffusers folder, read with care: a broken file is named, a foreign class is never imported."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import diffusers
from diffusers import SchedulerMixin
from transformers import CLIPTokenizer

CONFIG_FILES = (
    "model_index.json",
    "scheduler/scheduler_config.json",
    "text_encoder/config.json",
    "text_encoder_2/config.json",
    "tokenizer/tokenizer_config.json",
    "tokenizer_2/tokenizer_config.json",
    "unet/config.json",
    "vae/config.json",
)
"""What a single file does not hold, by their paths in a diffusers folder (beside the tokenizers' vocabularies)."""

VOCABULARY = ("vocab.json", "merges.txt")
"""A tokenizer's vocabulary in its folder, where there is no tokenizer.json."""

_TOKENIZERS = ("tokenizer", "tokenizer_2")
_COMPONENTS: dict[str, tuple[str, tuple[str, ...]]] = {
    "unet": ("diffusers", ("UNet2DConditionModel",)),
    "vae": ("diffusers", ("AutoencoderKL",)),
    "text_encoder": ("transformers", ("CLIPTextModel",)),
    "text_encoder_2": ("transformers", ("CLIPTextModelWithProjection",)),
    "tokenizer": ("transformers", ("CLIPTokenizer", "CLIPTokenizerFast")),
    "tokenizer_2": ("transformers", ("CLIPTokenizer", "CLIPTokenizerFast")),
    "image_encoder": ("transformers", ("CLIPVisionModelWithProjection",)),
    "feature_extractor": ("transformers", ("CLIPImageProcessor", "CLIPImageProcessorFast")),
}
_OPTIONAL = ("image_encoder", "feature_extractor")


def read_object(path: Path) -> dict[str, Any]:
    """The JSON object in a file; ValueError names a file that holds anything else, FileNotFoundError one not there."""
    if not path.is_file():
        raise FileNotFoundError(f"no {path.name} in {path.parent}")
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is no JSON ({error}); copy or download it again") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} holds a {type(content).__name__}, expected a JSON object; copy or download it again")
    return content


@contextmanager
def reading(what: str | Path, advice: str = "copy or download it again") -> Iterator[None]:
    """Whatever a library raises inside over odd content becomes one ValueError that names `what` was read.

    An OSError is left as it is: it names its file.
    """
    try:
        yield
    except OSError:
        raise
    except Exception as error:  # the tokenizers library raises nothing more special
        said = (str(error).strip() or "no reason given").splitlines()[0]
        raise ValueError(f"{what} cannot be used ({type(error).__name__}: {said}); {advice}") from error


def missing_files(folder: Path) -> list[str]:
    """The configuration files an SDXL folder lacks, vocabularies among them, by their paths in it."""
    vocabularies = [f"{name}/{file}" for name in _TOKENIZERS for file in missing_vocabulary(folder / name)]
    return [*(name for name in CONFIG_FILES if not (folder / name).is_file()), *vocabularies]


def missing_vocabulary(folder: Path) -> list[str]:
    """The files that a tokenizer's folder lacks; none where a tokenizer.json stands for them."""
    if (folder / "tokenizer.json").is_file():
        return []
    return [name for name in VOCABULARY if not (folder / name).is_file()]


def open_tokenizer(folder: Path) -> CLIPTokenizer:
    """The tokenizer in a folder; ValueError that names it where it cannot be used."""
    with reading(folder):
        tokenizer: CLIPTokenizer = CLIPTokenizer.from_pretrained(folder, local_files_only=True)
    return tokenizer


def check_config(folder: Path) -> None:
    """Raises ValueError for a configuration file that is no JSON object, and for a component of any class not SDXL's.

    To be called before diffusers, which imports what model_index.json names.
    """
    for name in CONFIG_FILES:
        if (folder / name).is_file():
            read_object(folder / name)
    index = folder / "model_index.json"
    named = read_object(index)
    listed = {name for name, value in named.items() if isinstance(value, list) and not name.startswith("_")}
    for name in ["scheduler", *_COMPONENTS, *sorted(listed - _COMPONENTS.keys() - {"scheduler"})]:
        got = named.get(name)
        if got in (None, [None, None]) and name not in ("scheduler", *_COMPONENTS.keys() - set(_OPTIONAL)):
            continue
        if not _is_expected(name, got):
            raise ValueError(f"{index} names {got!r} as {name}; expected {_expected(name)}. Nothing of it was loaded")


def load_small(folder: Path) -> dict[str, Any]:
    """The tokenizers and the scheduler of a folder that `check_config` passed, as a pipeline takes them.

    Raises ValueError that names the folder of the one that cannot be used.
    """
    parts: dict[str, Any] = {name: open_tokenizer(folder / name) for name in _TOKENIZERS}
    kind = getattr(diffusers, read_object(folder / "model_index.json")["scheduler"][1])
    with reading(folder / "scheduler" / "scheduler_config.json"):
        parts["scheduler"] = kind.from_pretrained(folder / "scheduler", local_files_only=True)
    return parts


def _is_expected(name: str, got: Any) -> bool:
    if not (isinstance(got, list) and len(got) == 2 and all(isinstance(part, str) for part in got)):
        return False
    if name == "scheduler":
        kind = getattr(diffusers, got[1], None) if got[0] == "diffusers" else None
        return isinstance(kind, type) and issubclass(kind, SchedulerMixin)
    library, classes = _COMPONENTS.get(name, ("", ()))
    return got[0] == library and got[1] in classes


def _expected(name: str) -> str:
    if name == "scheduler":
        return "diffusers and one of its schedulers, such as EulerDiscreteScheduler"
    if name not in _COMPONENTS:
        return f"none; SDXL's components: scheduler, {', '.join(_COMPONENTS)}"
    library, classes = _COMPONENTS[name]
    return f"{library} and {' or '.join(classes)}"
