"""Encoders in folders: open_clip's, ours among them, and transformers' CLIPModel."""

import json
from pathlib import Path
from typing import Any

from debias_diffusion.encoders.encoder import Encoder, build
from debias_diffusion.encoders.foreign import Tables, infer_config, read_weights
from debias_diffusion.encoders.hub_tokens import find_tokenizer
from debias_diffusion.encoders.tokens import Tokenizer

CONFIG_FILE = "open_clip_config.json"
WEIGHTS_FILE = "open_clip_model.safetensors"


def open_folder(folder: Path, tables: Tables, tokenizer: Path | None = None) -> Encoder:
    """The encoder in `folder`; `tokenizer` is a folder to read its tokenizer from where that is not CLIP's own."""
    config_file = folder / CONFIG_FILE
    if config_file.is_file():
        return _open_saved(folder, read_config(config_file, "model_cfg"), tables, tokenizer)
    if (folder / "config.json").is_file():
        return _open_transformers(folder, read_config(folder / "config.json"))
    inside = sorted(str(file.parent) for file in folder.glob(f"*/{CONFIG_FILE}"))
    if inside:
        raise ValueError(f"{folder} is no encoder: it holds {', '.join(inside)}; name one of them")
    raise FileNotFoundError(
        f"{folder} is no encoder folder: it holds neither {CONFIG_FILE} nor a transformers config.json"
    )


def _open_saved(folder: Path, content: dict[str, Any], tables: Tables, tokenizer: Path | None) -> Encoder:
    weights = read_weights(folder / WEIGHTS_FILE, tables)
    model_config = content["model_cfg"]
    kwargs = model_config["text_cfg"].pop("tokenizer_kwargs", None) or {}
    bpe_name = kwargs.pop("bpe_path", None)
    if kwargs:
        model_config["text_cfg"]["tokenizer_kwargs"] = kwargs
    ours = content.get("debias_diffusion") or {}
    try:
        return build(
            ours.get("name", folder.name),
            model_config,
            content.get("preprocess_cfg"),
            bpe_file=folder / Path(bpe_name).name if bpe_name else None,
            tokenizer=tokenizer_of(model_config["text_cfg"], (tokenizer, folder)),
            state=weights.state,
            history=ours.get("history", {"base": str(folder)}),
        )
    except (TypeError, AttributeError) as error:
        raise ValueError(f"{folder / CONFIG_FILE} describes no model this open_clip builds: {error}") from error


def _open_transformers(folder: Path, content: dict[str, Any]) -> Encoder:
    if content.get("model_type") != "clip":
        raise ValueError(
            f"{folder} holds a transformers {content.get('model_type')!r} model; expected a CLIPModel ('clip')"
        )
    files = [folder / n for n in ("model.safetensors", "pytorch_model.bin") if (folder / n).is_file()]
    if not files:
        raise FileNotFoundError(f"{folder} has a config.json but no model.safetensors")
    weights = read_weights(files[0])
    # A config leaves out what equals transformers' own defaults.
    text, vision = content.get("text_config") or {}, content.get("vision_config") or {}
    activations = {part.get("hidden_act", "quick_gelu") for part in (text, vision)}
    if not activations <= {"quick_gelu", "gelu"} or len(activations) != 1:
        raise ValueError(f"{folder}: hidden_act is {sorted(activations)}; expected quick_gelu or gelu in both towers")
    heads = {"text_heads": text.get("num_attention_heads", 8), "vision_heads": vision.get("num_attention_heads", 12)}
    config = infer_config(weights.state, **heads)
    return from_state(
        folder.name, config, weights.state, activations == {"quick_gelu"}, f"transformers folder {folder}"
    )


def tokenizer_of(
    text_config: dict[str, Any], folders: tuple[Path | None, ...], *, fetch: bool = False
) -> Tokenizer | None:
    """The tokenizer that an open_clip `text_cfg` names, looked for in `folders` first; None where it is CLIP's own."""
    hub_name = text_config.get("hf_tokenizer_name")
    if not hub_name:
        return None
    length, kwargs = text_config.get("context_length", 77), text_config.get("tokenizer_kwargs")
    return find_tokenizer(hub_name, length, kwargs, folders=folders, fetch=fetch)


def from_state(name: str, config: dict[str, Any], state: dict[str, Any], quick_gelu: bool | None, base: str) -> Encoder:
    """An encoder whose file tells its architecture but perhaps not its activation; None is refused."""
    if quick_gelu is None:
        raise ValueError(
            f"{base} does not record its activation, and the wrong one changes every feature without an error; say "
            "quick_gelu=True (OpenAI's weights) or quick_gelu=False (LAION's), or name its row, as in ROW:PATH"
        )
    return build(name, {**config, "quick_gelu": quick_gelu}, state=state, history={"base": base})


def read_config(file: Path, *needed: str) -> dict[str, Any]:
    """The JSON object in `file`, with the fields that an encoder cannot be built without."""
    try:
        content = json.loads(file.read_text())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{file} is not whole JSON ({error}); the folder is damaged") from error
    missing = [k for k in needed if not isinstance(content, dict) or not isinstance(content.get(k), dict)]
    if not missing and "model_cfg" in needed:
        missing = [k for k in ("text_cfg", "vision_cfg") if not isinstance(content["model_cfg"].get(k), dict)]
    if missing or not isinstance(content, dict):
        raise ValueError(f"{file} has no {' or '.join(missing) or 'object'} in it; is this an encoder folder?")
    return content
