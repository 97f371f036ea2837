"""One tower, one file: for tools that read single files, and the way back from SDXL checkpoints to a training start."""

import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from debias_diffusion.encoders.convert import StateDict, text_from_transformers
from debias_diffusion.encoders.encoder import Encoder, build
from debias_diffusion.encoders.foreign import read_tensors
from debias_diffusion.sdxl.export import blended_state, save_weights, slot_record, warn_of_width
from debias_diffusion.sdxl.slot_folder import WEIGHTS_FILES, check_slot, slot_metadata, slot_root
from debias_diffusion.sdxl.slots import (
    RECORD,
    cast_state,
    find_slot,
    refuse_encoder,
    slot_config,
    slot_of_width,
    text_tower,
)


def export_single_file(
    encoder: Encoder,
    slot: str,
    path: str | Path,
    *,
    dtype: str = "fp16",
    blend: float = 1.0,
    base: Encoder | None = None,
) -> Path:
    """Writes the text tower as one safetensors file that ComfyUI and others open as clip_l or clip_g; returns `path`.

    Keys are transformers' with `text_model.`, and both towers carry `text_projection.weight` (out, in), without which
    such tools report a missing weight. They read the length off the position table. The file appears whole or not at
    all.
    """
    spec, path = find_slot(slot), Path(path)
    if path.suffix != ".safetensors":
        raise ValueError(f"a single file is named something.safetensors, got {path.name!r}")
    if text_tower(encoder).text_projection is None:
        raise ValueError(f"{encoder.name} has no text projection, which a single-file text encoder must carry")
    state = cast_state(blended_state(encoder, slot, blend, base), dtype, projection=True)
    config = slot_config(text_tower(encoder), encoder.tokenizer, slot)
    record = slot_record(encoder, slot, dtype, blend, base)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.partial")
    try:
        save_weights(state, partial, slot_metadata(spec, config.to_dict()) | {RECORD: json.dumps(record)})
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)
    warn_of_width(encoder, spec, record)
    return path


def import_tower(path: str | Path, slot: str, source: Encoder) -> Encoder:
    """An encoder with the text tower of an SDXL checkpoint and everything else of `source`: a start for training.

    `path` is an SDXL single-file checkpoint, a diffusers SDXL folder, a text-encoder folder or a ComfyUI clip file;
    only the tower's own tensors are read. `source` gives the image tower, the tokenizer, and the text projection where
    the file has none (SDXL's first slot); it should be the encoder the tower was tuned from.
    """
    find_slot(slot)
    refuse_encoder(source, slot)
    path = Path(path)
    tower = _from_folder(path, slot) if path.is_dir() else _from_file(path, slot)
    activation = "quick_gelu" if source.model_config["quick_gelu"] else "gelu"
    if tower.hidden_act not in (None, activation):
        raise ValueError(
            f"{path} has a tower with {tower.hidden_act}, {source.name} has {activation}; name the right source"
        )
    text = dict(tower.text)
    width, own = text["token_embedding.weight"].shape[1], text_tower(source).token_embedding.embedding_dim
    if width != own:
        raise ValueError(f"{path} has a tower {width} wide, {source.name} one {own} wide; {_hint(width, slot)}")
    history = {"base": f"{slot} of {path.name}", "image_tower": source.name}
    # Copies: training the result must not move the source.
    state = {k: v.clone() for k, v in source.model.state_dict().items() if not k.startswith("text.")}
    if "text_projection" not in text:
        text["text_projection"] = text_tower(source).text_projection.detach().clone()
        history["text_projection"] = source.name
    state |= {f"text.{key}": value for key, value in text.items()}
    config = json.loads(json.dumps(source.model_config))
    config["text_cfg"]["context_length"] = len(text["positional_embedding"])
    bpe_file = source.tokenizer.bpe_file
    return build(path.stem, config, source.preprocess_config, bpe_file=bpe_file, state=state, history=history)


@dataclass(frozen=True)
class _Tower:
    text: StateDict  # open_clip keys without `text.`
    hidden_act: str | None


@dataclass(frozen=True)
class _Layout:
    """Keys of one kind of file: the tower's begin with `prefix`; `marks` tells the layout from the rest."""

    slots: tuple[str, ...]
    prefix: str
    convert: Callable[[StateDict], StateDict]
    marks: str  # a key, after the prefix, that only this layout has
    others: tuple[str, ...] = ()  # beginnings of keys, after the prefix, that are not the tower's


def _open_clip_names(state: StateDict) -> StateDict:
    unused = ("logit_scale", "attn_mask")
    text = {key: value for key, value in state.items() if key not in unused and not key.endswith("position_ids")}
    if "text_projection.weight" in text:
        text["text_projection"] = text.pop("text_projection.weight").T.contiguous()
    return text


_HF_MARK = "text_model.embeddings.position_embedding.weight"
_LAYOUTS = (
    _Layout(("text_encoder",), "conditioner.embedders.0.transformer.", text_from_transformers, _HF_MARK),
    _Layout(("text_encoder_2",), "conditioner.embedders.1.model.", _open_clip_names, "positional_embedding"),
    _Layout(("text_encoder_2",), "conditioner.embedders.0.model.", _open_clip_names, "positional_embedding"),  # refiner
    _Layout(
        ("text_encoder", "text_encoder_2"),
        "",
        text_from_transformers,
        _HF_MARK,
        ("vision_model.", "visual_projection.", "logit_scale"),
    ),
)


def _from_file(path: Path, slot: str) -> _Tower:
    if path.suffix != ".safetensors":
        content = read_tensors(path)
        content = content.get("state_dict", content)
        layout, keys = _find_layout(list(content), slot, path)
        return _Tower(_tower(layout, {key: content[key] for key in keys}, path), None)
    if not path.is_file():
        raise FileNotFoundError(f"no file or folder at {path}")
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            layout, keys = _find_layout(list(file.keys()), slot, path)
            if metadata.get("slot", slot) != slot:
                raise ValueError(f"{path} was exported for {metadata['slot']}, not for {slot}")
            return _Tower(_tower(layout, {k: file.get_tensor(k) for k in keys}, path), metadata.get("hidden_act"))
    except SafetensorError as error:
        raise ValueError(f"{path} is not a whole safetensors file ({error}); copy or download it again") from error


def _from_folder(path: Path, slot: str) -> _Tower:
    root = slot_root(path, slot)
    folder = path if root is None else root / slot
    config_file = folder / "config.json"
    if not config_file.is_file():
        raise FileNotFoundError(f"{path} is no SDXL folder and no text-encoder folder: it holds no {slot}/config.json")
    if root is not None and (root / find_slot(slot).tokenizer).is_dir():
        check_slot(root, slot)
    config: dict[str, Any] = json.loads(config_file.read_text())
    if config.get("model_type") != "clip_text_model":
        raise ValueError(f"{folder} holds a {config.get('model_type')!r} model, expected a CLIP text encoder")
    files = [folder / name for name in WEIGHTS_FILES if (folder / name).is_file()]
    if not files:
        raise FileNotFoundError(f"{folder} holds none of {', '.join(WEIGHTS_FILES)}")
    return _Tower(_from_file(files[0], slot).text, config.get("hidden_act"))


def _find_layout(keys: list[str], slot: str, path: Path) -> tuple[_Layout, list[str]]:
    flat = _Layout((slot,), "", text_from_transformers, _HF_MARK.removeprefix("text_model."))
    for layout in (*_LAYOUTS, flat):
        if layout.prefix + layout.marks not in keys or slot not in layout.slots:
            continue
        chosen = [k for k in keys if k.startswith(layout.prefix) and not k.endswith("position_ids")]
        chosen = [k for k in chosen if not k.removeprefix(layout.prefix).startswith(layout.others)]
        return layout, chosen
    raise ValueError(
        f"{path} holds no text tower for {slot}: its keys start {sorted(keys)[:4]}; expected an SDXL checkpoint, a "
        "text-encoder file with text_model.* keys, or, for a whole open_clip or CLIPModel file, load_encoder"
    )


def _tower(layout: _Layout, state: StateDict, path: Path) -> StateDict:
    try:
        return layout.convert({key.removeprefix(layout.prefix): value for key, value in state.items()})
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def _hint(width: int, slot: str) -> str:
    try:
        right = slot_of_width(width)
    except ValueError:
        return "name the encoder this tower was tuned from"
    return f"that is {right}'s tower" if right != slot else f"name the {find_slot(slot).tower} it was tuned from"
