"""Encoders by name: the rows of `specs`, and any other open_clip model whose text tower permits."""

import dataclasses
from pathlib import Path
from typing import Any

import open_clip
from open_clip.pretrained import download_pretrained, get_pretrained_cfg, list_pretrained_tags_by_model

from debias_diffusion.encoders.encoder import MINIATURE_FOLDER, Encoder, build, spec_config
from debias_diffusion.encoders.folders import open_folder, tokenizer_of
from debias_diffusion.encoders.foreign import Tables, read_weights
from debias_diffusion.encoders.specs import CLIP, KEEP, RANDOM, SPECS, EncoderSpec, Family
from debias_diffusion.encoders.tokens import BPE_FILE

_PREPROCESS = ("mean", "std", "interpolation", "resize_mode")


def named_source(source: str) -> tuple[EncoderSpec, str] | None:
    """The row and what follows the colon of "NAME:PRETRAINED", NAME being a row or one of open_clip's models; else None.

    Raises ValueError for an open_clip model whose text tower does not permit the method.
    """
    name, colon, pretrained = source.partition(":")
    if not colon:
        return None
    if name in SPECS:
        return SPECS[name], pretrained
    return (other_spec(name), pretrained) if name in open_clip.list_models() else None


def other_spec(name: str) -> EncoderSpec:
    """A row for an open_clip model that has none; ValueError with the reason where its text tower does not permit it."""
    config = open_clip.get_model_config(name)
    if config is None:
        raise ValueError(f"open_clip {open_clip.__version__} has no model {name!r}")
    if reason := why_not_stretched(config):
        raise ValueError(f"{name} cannot be trained or stretched here: {reason}; rows: {', '.join(SPECS)}")
    tags = tuple(list_pretrained_tags_by_model(name))
    return EncoderSpec(name, name, bool(config.get("quick_gelu", False)), tags, _family(config))


def why_not_stretched(config: dict[str, Any]) -> str | None:
    """The reason why the text tower of an open_clip model config cannot be stretched, or None."""
    text = config["text_cfg"]
    if text.get("hf_model_name"):
        return f"its text tower is transformers' {text['hf_model_name']}, whose positions are not one table"
    if text.get("embed_cls"):
        return "it appends a class token, which would be the last of its positions (CoCa)"
    if text.get("tokenizer_mode") or set(text.get("tokenizer_kwargs") or {}) - {"clean"}:
        return f"its tokenizer ({text.get('hf_tokenizer_name')}) drops the end token (CLIPA)"
    if text.get("context_length", 77) < KEEP + 2:
        return f"it has {text['context_length']} positions, and the first {KEEP} would stay as they are"
    return None


def _family(config: dict[str, Any]) -> Family:
    """The facts that open_clip's config states; the padding id of a tokenizer of its own is known once that is read."""
    text = config["text_cfg"]
    last = text.get("pool_type") == "last"
    return dataclasses.replace(
        CLIP,
        name="other",
        causal=not text.get("no_causal_mask", False),
        has_sot=not last,
        pooling="last" if last else "eot",
        loss="sigmoid" if "init_logit_bias" in config else "softmax",
        context_length=text.get("context_length", 77),
        stretch="ends" if last else "ratio",
        tokenizer=text.get("hf_tokenizer_name") or CLIP.tokenizer,
    )


def open_row(spec: EncoderSpec, pretrained: str, tables: Tables, tokenizer: Path | None = None) -> Encoder:
    """The encoder of a row with the weights of a tag or a file, or random ones.

    `tokenizer` is a folder to read its tokenizer from where that is not CLIP's own; only a tag lets anything be fetched.
    """
    config = spec_config(spec)
    name, is_ours = f"{spec.name}:{pretrained}", spec.config is not None
    bpe_file = MINIATURE_FOLDER / BPE_FILE if is_ours and spec.family.tokenizer == CLIP.tokenizer else None
    state = None
    if Path(pretrained).is_file():
        state = read_weights(Path(pretrained), tables).state
        config["text_cfg"]["context_length"] = len(state["text.positional_embedding"])
    elif pretrained != RANDOM and is_ours:
        return open_folder(MINIATURE_FOLDER / (pretrained + spec.name.removeprefix("miniature")), tables)
    elif pretrained != RANDOM:
        return _open_tag(spec, config, pretrained, tokenizer)
    beside = MINIATURE_FOLDER / "siglip_tokenizer" if is_ours else Path(pretrained).parent if state else None
    reader = tokenizer_of(config["text_cfg"], (tokenizer, beside))
    preprocess = {} if is_ours else _preprocess(spec, next(iter(spec.tags), ""))
    history = {"base": name}
    return build(name, config, preprocess, bpe_file=bpe_file, tokenizer=reader, state=state, history=history)


def _preprocess(spec: EncoderSpec, tag: str) -> dict[str, Any]:
    known = get_pretrained_cfg(spec.architecture, tag)
    return {key: known[key] for key in _PREPROCESS if known.get(key) is not None}


def _open_tag(spec: EncoderSpec, config: dict[str, Any], tag: str, tokenizer: Path | None) -> Encoder:
    known = get_pretrained_cfg(spec.architecture, tag)
    if not known:
        tags = sorted({*spec.tags, *list_pretrained_tags_by_model(spec.architecture)})
        raise ValueError(
            f"row {spec.name!r} has no pretrained weights {tag!r}; tags: {', '.join(tags)}; or a file, or {RANDOM!r}"
        )
    if bool(known.get("quick_gelu", False)) != spec.quick_gelu:
        raise ValueError(f"{spec.name}:{tag} was trained with the other activation than row {spec.name!r} has")
    # The tokenizer first: where it is missing, no gigabytes are fetched in vain.
    reader = tokenizer_of(config["text_cfg"], (tokenizer,), fetch=True)
    state = read_weights(Path(download_pretrained(known))).state
    name = f"{spec.name}:{tag}"
    return build(name, config, _preprocess(spec, tag), tokenizer=reader, state=state, history={"base": name})
