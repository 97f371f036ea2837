"""Encoder -> SDXL slot folder that opens in the stock pipeline, written whole or not at all."""

import json
import logging
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import CLIPTokenizer

from debias_diffusion.encoders.checkpoint import replace_folder
from debias_diffusion.encoders.convert import StateDict
from debias_diffusion.encoders.encoder import Encoder
from debias_diffusion.encoders.positions import stretch_positions, stretch_ratio
from debias_diffusion.sdxl.card_numbers import Numbers
from debias_diffusion.sdxl.model_card import CARD_FILE, is_miniature, is_our_card, model_card, public_history
from debias_diffusion.sdxl.slot_folder import check_slot, slot_metadata
from debias_diffusion.sdxl.slots import (
    DTYPES,
    RECORD,
    SLOTS,
    SlotSpec,
    cast_state,
    find_slot,
    hidden_act,
    refuse_encoder,
    slot_config,
    slot_tokenizer,
    text_tower,
    tower_state,
    vocabulary,
)

logger = logging.getLogger(__name__)


def export_slot(
    encoder: Encoder,
    slot: str,
    folder: str | Path,
    *,
    dtype: str = "fp16",
    blend: float = 1.0,
    base: Encoder | None = None,
    numbers: Numbers | None = None,
) -> Path:
    """Returns `folder`, with the encoder's text tower in its text_encoder and tokenizer (or the two `_2`).

    Both slots can be exported into one folder; its README.md tells of all it holds, with the encoder's `numbers` where
    they are given. `blend` below 1 mixes the weights with those of `base`, stretched to the same length: 0 is the base
    alone. What is written is read back and checked before it takes its place; a text encoder this package did not write
    is never replaced. Warns of a tower that stock SDXL cannot take.
    """
    if numbers and blend != 1:
        raise ValueError("the numbers are the encoder's, not a blend's; leave out one of the two")
    spec, folder = find_slot(slot), Path(folder)
    state = cast_state(blended_state(encoder, slot, blend, base), dtype, projection=spec.projects)
    _refuse_foreign(folder, spec)
    config = slot_config(text_tower(encoder), encoder.tokenizer, slot)
    config.dtype = DTYPES[dtype]
    record = slot_record(encoder, slot, dtype, blend, base)
    setattr(config, RECORD, record | ({"numbers": numbers} if numbers else {}))
    with partial_folder(folder) as partial:
        (partial / slot).mkdir()
        config.save_pretrained(partial / slot)
        save_weights(state, partial / slot / "model.safetensors", slot_metadata(spec, config.to_dict()))
        _write_tokenizer(encoder, spec, partial / spec.tokenizer)
        check_slot(partial, slot)
        folder.mkdir(parents=True, exist_ok=True)
        for name in (spec.tokenizer, slot):
            replace_folder(partial / name, folder / name)
    _write_card(folder)
    warn_of_width(encoder, spec, record)
    return folder


def warn_of_width(encoder: Encoder, spec: SlotSpec, record: dict[str, Any]) -> None:
    """Logs one line where stock SDXL cannot take a tower for its width; the miniature's own pipeline takes its own."""
    width = text_tower(encoder).token_embedding.embedding_dim
    if width != spec.width and not is_miniature(record):
        logger.warning(
            "%s has a text tower %d wide: only a UNet made for it can take it, not stock SDXL, whose %s is %s, %d wide",
            *(encoder.name, width, spec.name, spec.tower, spec.width),
        )


def blended_state(encoder: Encoder, slot: str, blend: float = 1.0, base: Encoder | None = None) -> StateDict:
    """Weights under transformers' keys: (1 - blend) of the stretched base and blend of the encoder, in float32."""
    refuse_encoder(encoder, slot)
    if not 0 <= blend <= 1:
        raise ValueError(f"blend is {blend}; expected 0 (the stretched base) to 1 (the encoder as it is)")
    tuned = tower_state(text_tower(encoder))
    if blend == 1:
        return tuned
    if base is None:
        raise ValueError(f"blend is {blend}, which mixes with a base, but no base encoder is given")
    other = _stretched_state(base, encoder, tuned)
    return {key: torch.lerp(other[key].float(), value.float(), blend) for key, value in tuned.items()}


def _stretched_state(base: Encoder, encoder: Encoder, tuned: StateDict) -> StateDict:
    state = tower_state(text_tower(base))
    key = "text_model.embeddings.position_embedding.weight"
    if base.context_length != encoder.context_length:
        ratio = stretch_ratio(base.context_length, encoder.context_length)
        state[key] = stretch_positions(state[key], ratio)
    if {k: v.shape for k, v in state.items()} != {k: v.shape for k, v in tuned.items()}:
        raise ValueError(
            f"{base.name} and {encoder.name} have text towers of different shape; blend an encoder with its own base"
        )
    if hidden_act(text_tower(base)) != hidden_act(text_tower(encoder)):
        raise ValueError(
            f"{base.name} and {encoder.name} have different activations; blend an encoder with its own base"
        )
    if vocabulary(base.tokenizer.bpe_file) != vocabulary(encoder.tokenizer.bpe_file):
        raise ValueError(
            f"{base.name} and {encoder.name} have different vocabularies; blend an encoder with its own base"
        )
    return state


def slot_record(encoder: Encoder, slot: str, dtype: str, blend: float, base: Encoder | None) -> dict[str, Any]:
    """What an exported tower is told to remember: slot, encoder, blend and history, as JSON values."""
    record = {
        "slot": slot,
        "encoder": encoder.name,
        "dtype": dtype,
        "blend": blend,
        "history": public_history(encoder.history),
    }
    if blend < 1 and base is not None:
        record["blended_with"] = base.name
    plain: dict[str, Any] = json.loads(json.dumps(record))
    return plain


def push_folder(folder: str | Path, repo: str, *, private: bool = True) -> str:
    """Uploads an exported folder to the Hugging Face hub, after checking it again; returns its address.

    The repository is made if it does not exist: private unless told otherwise. Needs a logged-in hub account.
    """
    from huggingface_hub import HfApi

    folder = Path(folder)
    slots = [slot for slot in SLOTS if (folder / slot).is_dir()]
    if not slots:
        raise FileNotFoundError(f"{folder} holds none of {', '.join(SLOTS)}; export a slot there first")
    for slot in slots:
        check_slot(folder, slot)
    api = HfApi()
    repo_id = api.create_repo(repo, private=private, exist_ok=True).repo_id
    patterns = [CARD_FILE, *(f"{name}/*" for slot in slots for name in (slot, SLOTS[slot].tokenizer))]
    api.upload_folder(
        repo_id=repo_id, folder_path=folder, allow_patterns=patterns, commit_message="Add SDXL text encoders"
    )
    return f"{api.endpoint}/{repo_id}"


@contextmanager
def partial_folder(target: Path) -> Iterator[Path]:
    """An empty folder beside `target` to write into; it is gone afterwards, whatever happened."""
    partial = target.with_name(f".{target.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        yield partial
    finally:
        shutil.rmtree(partial)


def save_weights(state: StateDict, path: Path, metadata: dict[str, str]) -> None:
    """Writes a safetensors file with the permissions of any new file; safetensors itself makes it its owner's alone."""
    save_file(state, path, metadata=metadata)
    umask = os.umask(0)
    os.umask(umask)
    path.chmod(0o666 & ~umask)


def _refuse_foreign(folder: Path, spec: SlotSpec) -> None:
    config = folder / spec.name / "config.json"
    if config.is_file() and RECORD in json.loads(config.read_text()):
        return
    for name in (spec.name, spec.tokenizer):
        if (folder / name).exists():
            raise ValueError(f"{folder / name} exists and was not written by this export; choose another folder")


def _write_tokenizer(encoder: Encoder, spec: SlotSpec, folder: Path) -> None:
    """transformers' two files, and the classic two beside them that older readers look for."""
    tokenizer: CLIPTokenizer = slot_tokenizer(encoder.tokenizer, spec.name)
    tokenizer.save_pretrained(folder)
    vocab, merges = vocabulary(encoder.tokenizer.bpe_file)
    (folder / "vocab.json").write_text(json.dumps(vocab, ensure_ascii=False), encoding="utf-8")
    lines = ["#version: 0.2", *(" ".join(pair) for pair in merges)]
    (folder / "merges.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")


def _write_card(folder: Path) -> None:
    card = folder / CARD_FILE
    if not card.exists() or is_our_card(card.read_text(encoding="utf-8")):
        configs = [
            json.loads((folder / slot / "config.json").read_text()) for slot in SLOTS if (folder / slot).is_dir()
        ]
        card.write_text(model_card(configs), encoding="utf-8")
