"""The README.md of an exported folder: what the towers are, how they were made, how to use them, what is not known."""

import re
from pathlib import Path
from typing import Any

from debias_diffusion.sdxl.card_numbers import numbers_section
from debias_diffusion.sdxl.slots import RECORD, SLOTS

CARD_FILE = "README.md"
_UNSTATED = "license: unknown"
_MARK = "tags: [debias-diffusion, text-encoder, sdxl]"

_RECIPE_FIELDS = (
    *("recipe", "context_length", "keep_positions", "short_weight", "pca_dim", "batch_size", "steps"),
    *("learning_rate", "weight_decay", "precision", "train_towers", "seed"),
)

_LIMITS = """## Limits

- Only positions up to the end of the text were trained; SDXL also reads the padding rows after it.
- SDXL's UNet was trained with the original encoders; `debias-diffusion drift` says how far these are from them.
- A checkpoint that tuned its own text encoders loses that tuning when they are replaced.
- The tokenizer does not repair text: clean curly quotes, ligatures and HTML entities first, as in training
  (`debias_diffusion.captions.clean`)."""

_USAGE = """## Use

```python
import torch
from diffusers import StableDiffusionXLPipeline
from transformers import {classes}, CLIPTokenizer

folder = "path/to/this/folder"
parts = {{
{parts}
}}
base = "stabilityai/stable-diffusion-xl-base-1.0"
pipe = StableDiffusionXLPipeline.from_pretrained(base, dtype=torch.float16, **parts)
```"""

_LICENCE = """## Licence

Not known to this card. Whoever publishes this folder checks the licences of what it was made from, and states the result
here and in the `license` field above:
"""

_ALONE = """

The stock pipeline joins both encoders position by position, so `{other}` must read {length} tokens too: export one into
this folder, or use debias-diffusion's own pipeline, which takes mixed lengths."""


def is_our_card(text: str) -> bool:
    """Whether a README.md was written by this export and may be rewritten by it: not once its licence is stated."""
    return _MARK in text[:400] and _UNSTATED in text[:400]


def model_card(configs: list[dict[str, Any]]) -> str:
    """The card of a folder whose slots have these config.json contents, as Markdown with the hub's front matter."""
    records = [config[RECORD] for config in configs]
    table = ["| slot | class | tower | tokens | activation | dtype |", "| --- | --- | --- | --- | --- | --- |"]
    parts = [
        f"---\n{_UNSTATED}\nlibrary_name: diffusers\n{_MARK}\n---",
        f"# SDXL text encoder{'s' if len(configs) > 1 else ''}: {', '.join(record['encoder'] for record in records)}",
        "\n".join([*table, *(_row(config) for config in configs)]),
        _usage(configs),
        *(_making(record) for record in records),
        *(numbers_section(record["slot"], record["numbers"]) for record in records if record.get("numbers")),
        "\n".join([_LICENCE, *(_ingredients(record) for record in records)]),
        _LIMITS,
    ]
    if any(map(is_miniature, records)):
        parts[-1] += "\n- A miniature: it shows that the code works and says nothing about photographs."
    return "\n\n".join(parts) + "\n"


def _row(config: dict[str, Any]) -> str:
    record = config[RECORD]
    tower = f"{config['num_hidden_layers']} layers, {config['hidden_size']} wide"
    return (
        f"| `{record['slot']}` | {SLOTS[record['slot']].model_class.__name__} | {tower} | "
        f"{config['max_position_embeddings']} | {config['hidden_act']} | {record['dtype']} |"
    )


def _usage(configs: list[dict[str, Any]]) -> str:
    specs = [SLOTS[config[RECORD]["slot"]] for config in configs]
    parts = []
    for spec in specs:
        for component, kind in ((spec.name, spec.model_class.__name__), (spec.tokenizer, "CLIPTokenizer")):
            dtype = "" if kind == "CLIPTokenizer" else ", dtype=torch.float16"
            parts.append(f'    "{component}": {kind}.from_pretrained(folder, subfolder="{component}"{dtype}),')
    classes = ", ".join(spec.model_class.__name__ for spec in specs)
    text = _USAGE.format(classes=classes, parts="\n".join(parts))
    length = max(config["max_position_embeddings"] for config in configs)
    if len(specs) == 1 and length != 77:
        text += _ALONE.format(other=next(name for name in SLOTS if name != specs[0].name), length=length)
    return text


def _making(record: dict[str, Any]) -> str:
    history = dict(record.get("history") or {})
    training = history.pop("training", None)
    lines = [f"## How `{record['slot']}` was made", "", f"- start: {history.pop('base', 'not recorded')}"]
    if training:
        pairs = training.get("pairs", "an unrecorded number of")
        lines += [f"- data: {training.get('data') or 'not recorded'}, {pairs} pairs"]
        lines += ["- recipe: " + ", ".join(f"{f} {training[f]}" for f in _RECIPE_FIELDS if f in training)]
    else:
        lines += ["- not trained further here; positions past its own context, if any, are interpolated"]
    if record["blend"] != 1:
        lines += [
            f"- weights: {record['blend']} of the tuned tower, the rest from {record.get('blended_with')}, stretched"
        ]
    start = "the start's " if training else ""  # what the history told before this training is not of its result
    told = {key: "" if key == "unreadable_pictures" else start for key in history}
    lines += [f"- {told[key]}{key.replace('_', ' ')}: {_value(value)}" for key, value in history.items()]
    return "\n".join(lines)


def _ingredients(record: dict[str, Any]) -> str:
    """What a publisher has to look up: the weights a slot started from and the data it was trained on, by name."""
    history = record.get("history") or {}
    training = history.get("training")
    text = f"- `{record['slot']}`: the weights it started from ({history.get('base', 'not recorded')})"
    if training:
        text += f", the pictures and captions it was trained on ({training.get('data') or 'not recorded'})"
    if record["blend"] != 1:
        text += f", the weights it is blended with ({record.get('blended_with')})"
    return text


def is_miniature(record: dict[str, Any]) -> bool:
    """Whether a slot's record says that its tower comes from the miniature, which has widths of its own."""
    history = record.get("history") or {}
    starts = (history.get("base"), (history.get("training") or {}).get("encoder"), record.get("encoder"))
    return any("miniature" in str(start) for start in starts)


def _value(value: object) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key} {_value(inner)}" for key, inner in value.items())
    return str(value)


def public_history(history: dict[str, Any]) -> dict[str, Any]:
    """A history fit to travel: folders of the machine that trained are left out, files keep their name.

    >>> public_history({"base": "ViT-L-14:openai", "training": {"data": "/disk/a.json", "output": "runs/x"}})
    {'base': 'ViT-L-14:openai', 'training': {'data': 'a.json'}}
    >>> public_history({"base": "openai file /home/me/ViT-L-14.pt"})
    {'base': 'openai file ViT-L-14.pt'}
    """
    history = {key: _without_folders(value) if key == "base" else value for key, value in history.items()}
    if "training" not in history:
        return history
    kept = {k: v for k, v in history["training"].items() if k not in ("output", "image_root")}
    if "data" in kept:
        kept["data"] = Path(str(kept["data"])).name
    if "encoder" in kept:
        kept["encoder"] = _without_folders(kept["encoder"])
    return {**history, "training": kept}


def _without_folders(text: object) -> str:
    """A text that may end in the absolute path of a file, with the file's name alone."""
    return re.sub(r"(?<![\w.~-])~?/(?:[^/]+/)*", "", str(text))
