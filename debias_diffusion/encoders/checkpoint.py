"""Load any encoder, save one thing: an open_clip folder."""

import json
import shutil
from pathlib import Path
from typing import Any

from safetensors.torch import save_file

from debias_diffusion.encoders.encoder import MINIATURE_FOLDER, Encoder, build, spec_config
from debias_diffusion.encoders.foreign import Tables, infer_config, read_weights
from debias_diffusion.encoders.specs import RANDOM, SPECS, EncoderSpec, find_spec, split_source

CONFIG_FILE = "open_clip_config.json"
WEIGHTS_FILE = "open_clip_model.safetensors"
BPE_FILE = "bpe.txt.gz"
_OWN_FILES = {CONFIG_FILE, WEIGHTS_FILE, BPE_FILE, "README.md"}


def load_encoder(
    source: str | Path,
    device: str = "cpu",
    *,
    quick_gelu: bool | None = None,
    tables: Tables = "fused",
) -> Encoder:
    """The encoder at `source`, in float32, ready for inference.

    `source` is a saved folder, a transformers CLIPModel folder, a checkpoint file (ours, open_clip's, Long-CLIP's, the
    official DeBias-CLIP's), "ROW:TAG" such as "ViT-L-14:openai", "ROW:random", or "ROW:PATH" where the file alone does
    not tell its architecture. `quick_gelu` states the activation of a file that does not record it; such a file is
    refused without it. `tables` says how two position tables become one (see `foreign.Tables`).
    """
    encoder = _open(str(source), quick_gelu, tables)
    try:
        encoder.model.to(device)
    except (RuntimeError, AssertionError) as error:
        raise ValueError(f"no device {device!r} here: {str(error).splitlines()[0]}") from error
    return encoder


def save_encoder(encoder: Encoder, folder: str | Path) -> Path:
    """Writes `encoder` as an open_clip folder; an interrupted write leaves what was there before.

    Replaces an encoder folder, and nothing else (see `refuse_foreign_folder`).
    """
    folder = Path(folder).resolve()
    refuse_foreign_folder(folder)
    partial = folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    state = {k: v.detach().cpu().contiguous() for k, v in encoder.model.state_dict().items()}
    save_file(state, partial / WEIGHTS_FILE, metadata={"format": "pt"})
    (partial / WEIGHTS_FILE).chmod(0o644)  # safetensors writes for its owner alone
    model_config: dict[str, Any] = json.loads(json.dumps(encoder.model_config))
    if encoder.tokenizer.bpe_file:
        shutil.copyfile(encoder.tokenizer.bpe_file, partial / BPE_FILE)
        model_config["text_cfg"]["tokenizer_kwargs"] = {"bpe_path": BPE_FILE}
    config = {
        "model_cfg": model_config,
        "preprocess_cfg": encoder.preprocess_config,
        "debias_diffusion": {"name": encoder.name, "history": encoder.history},
    }
    (partial / CONFIG_FILE).write_text(json.dumps(config, indent=2) + "\n")
    replace_folder(partial, folder)
    return folder


def replace_folder(source: Path, target: Path) -> None:
    """Gives `source` the name `target`; what had that name is moved aside first and deleted last."""
    old = target.with_name(f".{target.name}.old")
    shutil.rmtree(old, ignore_errors=True)
    if target.exists():
        target.rename(old)
    source.rename(target)
    shutil.rmtree(old, ignore_errors=True)


def refuse_foreign_folder(folder: str | Path) -> None:
    """Raises ValueError where `folder` is not free for an encoder: a file, or a folder with anything but an encoder in it."""
    folder = Path(folder).resolve()
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"{folder} is a file; an encoder is a folder: name another")
    foreign = sorted(p.name for p in folder.iterdir() if p.name not in _OWN_FILES) if folder.is_dir() else []
    if foreign:
        raise ValueError(
            f"{folder} holds more than an encoder ({', '.join(foreign[:4])}) and would be replaced; name another"
        )


def source_context_length(source: str | Path) -> int | None:
    """The context length of a source as far as it can be told without reading weights, for early checks."""
    named = split_source(str(source))
    if named:
        return find_spec(named[0]).context_length
    config_file = Path(source) / CONFIG_FILE
    if not config_file.is_file():
        return None
    return _read_config(config_file, "model_cfg")["model_cfg"]["text_cfg"].get("context_length", 77)


def _read_config(file: Path, *needed: str) -> dict[str, Any]:
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


def _open(source: str, quick_gelu: bool | None, tables: Tables) -> Encoder:
    named = split_source(source)
    if named:
        return _open_row(find_spec(named[0]), named[1], tables)
    path = Path(source)
    if path.is_dir():
        return _open_folder(path, tables)
    if path.is_file():
        weights = read_weights(path, tables)
        recorded = weights.quick_gelu if quick_gelu is None else quick_gelu
        return _from_state(
            path.stem, infer_config(weights.state), weights.state, recorded, f"{weights.kind} file {path}"
        )
    raise FileNotFoundError(
        f"no encoder at {source!r}: expected a folder, a checkpoint file, or ROW:PRETRAINED with ROW one of "
        f"{', '.join(SPECS)}"
    )


def _open_row(spec: EncoderSpec, pretrained: str, tables: Tables) -> Encoder:
    config = spec_config(spec)
    name = f"{spec.name}:{pretrained}"
    bpe_file = MINIATURE_FOLDER / BPE_FILE if spec.name == "miniature" else None
    if pretrained == RANDOM:
        return build(name, config, bpe_file=bpe_file, history={"base": name})
    if Path(pretrained).is_file():
        weights = read_weights(Path(pretrained), tables)
        config["text_cfg"]["context_length"] = len(weights.state["text.positional_embedding"])
        return build(name, config, bpe_file=bpe_file, state=weights.state, history={"base": name})
    if spec.name == "miniature":
        return _open_folder(MINIATURE_FOLDER / pretrained, tables)
    return _open_tag(spec, config, pretrained)


def _open_tag(spec: EncoderSpec, config: dict[str, Any], tag: str) -> Encoder:
    from open_clip.pretrained import download_pretrained, get_pretrained_cfg, list_pretrained_tags_by_model

    known = get_pretrained_cfg(spec.architecture, tag)
    if not known:
        tags = sorted({*spec.tags, *list_pretrained_tags_by_model(spec.architecture)})
        raise ValueError(
            f"row {spec.name!r} has no pretrained weights {tag!r}; tags: {', '.join(tags)}; or a file, or {RANDOM!r}"
        )
    if bool(known.get("quick_gelu", False)) != spec.quick_gelu:
        raise ValueError(f"{spec.name}:{tag} was trained with the other activation than row {spec.name!r} has")
    weights = read_weights(Path(download_pretrained(known)))
    preprocess = {k: known[k] for k in ("mean", "std", "interpolation", "resize_mode") if known.get(k) is not None}
    name = f"{spec.name}:{tag}"
    return build(name, config, preprocess, state=weights.state, history={"base": name})


def _open_folder(folder: Path, tables: Tables) -> Encoder:
    config_file = folder / CONFIG_FILE
    if config_file.is_file():
        return _open_saved(folder, _read_config(config_file, "model_cfg"), tables)
    if (folder / "config.json").is_file():
        return _open_transformers(folder, _read_config(folder / "config.json"))
    raise FileNotFoundError(
        f"{folder} is no encoder folder: it holds neither {CONFIG_FILE} nor a transformers config.json"
    )


def _open_saved(folder: Path, content: dict[str, Any], tables: Tables) -> Encoder:
    weights = read_weights(folder / WEIGHTS_FILE, tables)
    model_config = content["model_cfg"]
    bpe_name = (model_config["text_cfg"].pop("tokenizer_kwargs", None) or {}).get("bpe_path")
    ours = content.get("debias_diffusion") or {}
    try:
        return build(
            ours.get("name", folder.name),
            model_config,
            content.get("preprocess_cfg"),
            bpe_file=folder / Path(bpe_name).name if bpe_name else None,
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
    return _from_state(
        folder.name, config, weights.state, activations == {"quick_gelu"}, f"transformers folder {folder}"
    )


def _from_state(
    name: str, config: dict[str, Any], state: dict[str, Any], quick_gelu: bool | None, base: str
) -> Encoder:
    if quick_gelu is None:
        raise ValueError(
            f"{base} does not record its activation, and the wrong one changes every feature without an error; say "
            "quick_gelu=True (OpenAI's weights) or quick_gelu=False (LAION's), or name its row, as in ROW:PATH"
        )
    return build(name, {**config, "quick_gelu": quick_gelu}, state=state, history={"base": base})
