"""Slot folders on disk: found, checked in every number that must agree, opened."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from transformers import CLIPTextConfig, CLIPTokenizer, PreTrainedModel

from debias_diffusion.sdxl.config_files import missing_vocabulary, open_tokenizer, read_object, reading
from debias_diffusion.sdxl.slots import EOS, RECORD, Slot, SlotSpec, find_slot

WEIGHTS_FILES = {"model.safetensors": None, "model.fp16.safetensors": "fp16"}
"""Weight files of a text-encoder folder, and transformers' name of the variant."""


def slot_root(path: str | Path, slot: str) -> Path | None:
    """The folder that holds the slot's two components, given it or its text-encoder folder; None where neither is."""
    path = Path(path)
    if (path / slot / "config.json").is_file():
        return path
    if path.name == slot and (path / "config.json").is_file():
        return path.parent
    return None


def open_slot(path: str | Path, slot: str) -> Slot:
    """The slot's encoder and tokenizer from a folder written by `export_slot`, or any diffusers SDXL folder.

    Everything that must agree is checked first (see `slot_problems`), since transformers itself fills what is missing
    with random weights. The dtype is the file's.
    """
    spec, root = find_slot(slot), slot_root(path, slot)
    if root is None:
        raise FileNotFoundError(f"{path} is no SDXL slot folder: it holds no {slot}/config.json")
    check_slot(root, slot)
    variant = WEIGHTS_FILES[_weights_file(root / slot).name]
    model = spec.model_class.from_pretrained(root / slot, variant=variant, dtype="auto", local_files_only=True)
    tokenizer = CLIPTokenizer.from_pretrained(root / spec.tokenizer, local_files_only=True)
    return Slot(slot, model, tokenizer)


def check_slot(root: Path, slot: str) -> None:
    """Raises ValueError naming every number of a slot folder that disagrees with another."""
    problems = slot_problems(root, slot)
    if problems:
        raise ValueError(f"{root / slot} cannot be used in SDXL: {'; '.join(problems)}")


def slot_problems(root: Path, slot: str) -> list[str]:
    """What is wrong with a slot folder, one text each: class, activation, EOS, pad token, lengths, weights by name."""
    spec = find_slot(slot)
    config = read_object(root / slot / "config.json")
    if config.get("model_type") != "clip_text_model":
        return [f"config.json describes a {config.get('model_type')!r} model, expected 'clip_text_model'"]
    problems = _field_problems(config)
    if problems:
        return problems
    header = _read_header(_weights_file(root / slot))
    tokenizer = _open_tokenizer(root / spec.tokenizer)
    rules = [
        *_class_rules(spec, config),
        *_tokenizer_rules(spec, config, tokenizer),
        *_record_rules(spec, config, header.metadata, tokenizer),
    ]
    problems = [text for wrong, text in rules if wrong]
    if problems:
        return problems
    with reading(root / slot / "config.json"):
        own = CLIPTextConfig.from_dict(config)
        with torch.device("meta"):
            model = spec.model_class(own)
    return _weight_problems(spec, config, model, header)


_FIELDS: dict[str, tuple[type, bool]] = {
    **dict.fromkeys(("vocab_size", "max_position_embeddings", "eos_token_id"), (int, True)),
    **dict.fromkeys(("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"), (int, False)),
    "hidden_act": (str, True),
    "architectures": (list, False),
    RECORD: (dict, False),
}
"""Fields of a text encoder's config.json: their type, and whether transformers' own value must not stand in for them."""

_KINDS: dict[type, str] = {int: "a whole number, 0 or more", str: "text", list: "a list of names", dict: "an object"}


def _field_problems(config: dict[str, Any]) -> list[str]:
    problems = []
    for name, (kind, is_needed) in _FIELDS.items():
        value = config.get(name)
        if value is None and is_needed:
            problems.append(f"config.json has no {name}")
        elif value is not None and (type(value) is not kind or (isinstance(value, int) and value < 0)):
            problems.append(f"config.json says {name} {value!r}, expected {_KINDS[kind]}")
    return problems


def _open_tokenizer(folder: Path) -> CLIPTokenizer:
    read_object(folder / "tokenizer_config.json")
    if missing := missing_vocabulary(folder):
        raise FileNotFoundError(f"{folder} has no {', '.join(missing)}; copy or download it again")
    return open_tokenizer(folder)


@dataclass(frozen=True)
class _Header:
    shapes: dict[str, tuple[int, ...]]  # keys always with `text_model.`
    metadata: dict[str, str]


def _class_rules(spec: SlotSpec, config: dict[str, Any]) -> list[tuple[bool, str]]:
    classes, activation = config.get("architectures") or ["nameless model"], config.get("hidden_act")
    slot = (config.get(RECORD) or {}).get("slot", spec.name)
    expected = spec.model_class.__name__
    return [
        (slot != spec.name, f"it was exported for {slot}, not for {spec.name}"),
        (expected not in classes, f"it is a {' or '.join(map(str, classes))}, expected {expected}"),
        (activation not in ("quick_gelu", "gelu"), f"hidden_act is {activation!r}, expected quick_gelu or gelu"),
    ]


def _tokenizer_rules(spec: SlotSpec, config: dict[str, Any], tokenizer: CLIPTokenizer) -> list[tuple[bool, str]]:
    eos, rows, ids = (config.get(key) for key in ("eos_token_id", "max_position_embeddings", "vocab_size"))
    pad, length = tokenizer.pad_token, tokenizer.model_max_length
    # Older CLIP configs say 2, which means: pool at the largest id. Equal for them, but never what we write.
    eos_ids = (tokenizer.eos_token_id,) if RECORD in config else (tokenizer.eos_token_id, 2)
    return [
        (tokenizer.eos_token != EOS, f"the tokenizer's EOS is {tokenizer.eos_token!r}, expected {EOS!r}"),
        (eos not in eos_ids, f"config.json says eos_token_id {eos}, the tokenizer {tokenizer.eos_token_id}"),
        (pad != spec.pad_token, f"the tokenizer pads with {pad!r}, SDXL's {spec.name} with {spec.pad_token!r}"),
        (length != rows, f"the tokenizer cuts at {length} tokens, config.json says max_position_embeddings {rows}"),
        (len(tokenizer) > (ids or 0), f"the tokenizer has {len(tokenizer)} ids, the token embedding {ids}"),
    ]


def _record_rules(
    spec: SlotSpec, config: dict[str, Any], metadata: dict[str, str], tokenizer: CLIPTokenizer
) -> list[tuple[bool, str]]:
    """A second witness beside config.json: what was true when the weights were written."""
    now = slot_metadata(spec, config)
    return [
        (
            metadata.get(key, value) != value,
            f"the weights were written with {key} {metadata.get(key)}, config.json says {value}",
        )
        for key, value in now.items()
    ]


def slot_metadata(spec: SlotSpec, config: dict[str, Any]) -> dict[str, str]:
    """The text fields of a slot's weight file: "format" is what other readers look for."""
    return {
        "format": "pt",
        "slot": spec.name,
        "hidden_act": str(config["hidden_act"]),
        "eos_token_id": str(config["eos_token_id"]),
        "context_length": str(config["max_position_embeddings"]),
    }


def _weight_problems(spec: SlotSpec, config: dict[str, Any], model: PreTrainedModel, header: _Header) -> list[str]:
    rows = header.shapes.get("text_model.embeddings.position_embedding.weight", (0,))[0]
    said = config["max_position_embeddings"]
    if rows not in (said, 0):
        advice = "a table is made longer with Encoder.stretched, not by editing the config"
        return [f"the position table has {rows} rows, config.json says max_position_embeddings {said}; {advice}"]
    wanted = with_prefix({key: tuple(value.shape) for key, value in model.state_dict().items()})
    found = dict(header.shapes)
    if not spec.projects:
        found.pop("text_projection.weight", None)
    missing, unknown = sorted(wanted.keys() - found.keys()), sorted(found.keys() - wanted.keys())
    shapes = [f"{k} has shape {found[k]}, expected {wanted[k]}" for k in wanted if k in found and found[k] != wanted[k]]
    return [
        *([f"weights are missing: {', '.join(missing[:5])}"] if missing else []),
        *([f"weights are unknown: {', '.join(unknown[:5])}"] if unknown else []),
        *shapes[:3],
    ]


def with_prefix(state: dict[str, Any]) -> dict[str, Any]:
    """The same entries with `text_model.` before every key of the tower, whatever wrote them, and no position ids.

    >>> with_prefix({"embeddings.position_ids": 0, "final_layer_norm.bias": 1, "text_projection.weight": 2})
    {'text_model.final_layer_norm.bias': 1, 'text_projection.weight': 2}
    """
    bare = ("text_model.", "text_projection.")
    return {
        key if key.startswith(bare) else f"text_model.{key}": value
        for key, value in state.items()
        if not key.endswith("position_ids")
    }


def _weights_file(folder: Path) -> Path:
    for name in WEIGHTS_FILES:
        if (folder / name).is_file():
            return folder / name
    raise FileNotFoundError(f"{folder} holds none of {', '.join(WEIGHTS_FILES)}; pickled weights are not read here")


def _read_header(path: Path) -> _Header:
    try:
        with safe_open(path, framework="pt") as file:
            shapes = {key: tuple(file.get_slice(key).get_shape()) for key in file.keys()}  # noqa: SIM118
            return _Header(with_prefix(shapes), file.metadata() or {})
    except SafetensorError as error:
        raise ValueError(f"{path} is not a whole safetensors file ({error}); copy or download it again") from error
