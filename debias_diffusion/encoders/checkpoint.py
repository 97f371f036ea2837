"""Load any encoder, save one thing: an open_clip folder."""

import json
import shutil
from pathlib import Path
from typing import Any, get_args

from safetensors.torch import save_file

from debias_diffusion.encoders.encoder import Encoder
from debias_diffusion.encoders.folders import CONFIG_FILE, WEIGHTS_FILE, from_state, open_folder, read_config
from debias_diffusion.encoders.foreign import Tables, infer_config, read_weights
from debias_diffusion.encoders.hub_tokens import ALL_FILES
from debias_diffusion.encoders.rows import named_source, open_row
from debias_diffusion.encoders.specs import SPECS
from debias_diffusion.encoders.tokens import BPE_FILE

_OWN_FILES = {CONFIG_FILE, WEIGHTS_FILE, BPE_FILE, "README.md", *ALL_FILES}


def load_encoder(
    source: str | Path,
    device: str = "cpu",
    *,
    quick_gelu: bool | None = None,
    tables: Tables = "fused",
    tokenizer: str | Path | None = None,
) -> Encoder:
    """The encoder at `source`, in float32, ready for inference.

    `source` is a saved folder, a transformers CLIPModel folder, a checkpoint file (ours, open_clip's, Long-CLIP's, the
    official DeBias-CLIP's), "ROW:TAG" such as "ViT-L-14:openai", "ROW:random", or "ROW:PATH" where the file alone does
    not tell its architecture; ROW may be the name of any open_clip model whose text tower permits. `quick_gelu` states
    the activation of a file that does not record it; such a file is refused without it. `tables` says how two position
    tables become one (see `foreign.Tables`). `tokenizer` is the folder of a tokenizer that open_clip does not carry
    (SigLIP's); without it, it is looked for beside the weights and in the hub's local cache, and fetched for a TAG alone.
    """
    if tables not in get_args(Tables):
        raise ValueError(f"tables is {tables!r}; expected one of {', '.join(get_args(Tables))}")
    folder = Path(tokenizer) if tokenizer else None
    if folder is not None and not folder.is_dir():
        raise FileNotFoundError(f"no tokenizer folder at {folder}")
    encoder = _open(str(source), quick_gelu, tables, folder)
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
    if kwargs := encoder.tokenizer.save(partial):
        model_config["text_cfg"]["tokenizer_kwargs"] = kwargs
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
    named = named_source(str(source))
    if named:
        return named[0].context_length
    config_file = Path(source) / CONFIG_FILE
    if not config_file.is_file():
        return None
    return read_config(config_file, "model_cfg")["model_cfg"]["text_cfg"].get("context_length", 77)


def _open(source: str, quick_gelu: bool | None, tables: Tables, tokenizer: Path | None) -> Encoder:
    named = named_source(source)
    if named:
        return open_row(*named, tables, tokenizer)
    path = Path(source)
    if path.is_dir():
        return open_folder(path, tables, tokenizer)
    if path.is_file():
        weights = read_weights(path, tables)
        recorded = weights.quick_gelu if quick_gelu is None else quick_gelu
        return from_state(
            path.stem, infer_config(weights.state), weights.state, recorded, f"{weights.kind} file {path}"
        )
    raise FileNotFoundError(
        f"no encoder at {source!r}: expected a folder, a checkpoint file, or ROW:PRETRAINED with ROW one of "
        f"{', '.join(SPECS)}"
    )
