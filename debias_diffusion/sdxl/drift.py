"""How far a text tower is from the one SDXL's UNet was trained with, on prompts both can read."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from debias_diffusion.captions.clean import clean_caption
from debias_diffusion.encoders.checkpoint import load_encoder
from debias_diffusion.encoders.encoder import Encoder
from debias_diffusion.sdxl.slot_folder import open_slot, slot_root
from debias_diffusion.sdxl.slots import SLOTS, Slot, slot_from_encoder, slot_of_width, text_tower

Source = Encoder | Slot | str | Path

PROMPTS = (
    "a red cube on a wooden table",
    "a photo of a cat sleeping on a grey sofa",
    "an oil painting of a harbour at dawn, fishing boats, pale light",
    "portrait of an old man with a white beard, dramatic side light",
    "two green bicycles leaning against a brick wall, one blue bag on the left one",
    "a bowl of oranges",
    "wide shot of a mountain lake under a cloudy sky, a small cabin on the far shore, pine trees in front",
    "close-up of a hummingbird in front of a purple flower, blurred garden behind it, morning dew on the petals",
)
"""Short prompts to measure with where none are given."""


def slot_drift(
    encoder: Source,
    reference: Source,
    prompts: Sequence[str] = PROMPTS,
    *,
    slot: str | None = None,
    batch_size: int = 32,
) -> dict[str, Any]:
    """How far `encoder` is from `reference` in what SDXL reads of the slot, over the prompts both can hold whole.

    `slot` may be left out for a `Slot` or a full-size `Encoder`.

    "penultimate" covers the rows of the text, SOT and EOT included; "padding" the rows after it, up to the reference's
    length, which the UNet reads too; "pooled" the vector at EOT, projected in text_encoder_2. Each holds
    "relative_error" |a - b| / |b| and "cosine", averaged over rows; the first two also "by_position", a list of
    {position, rows, relative_error, cosine}. "prompts" and "left_out" count those measured and those too long.
    """
    slot = slot or _slot_of(encoder)
    tested, stock = _open(encoder, slot), _open(reference, slot)
    length = min(tested.context_length, stock.context_length)
    cleaned = [clean_caption(prompt) for prompt in prompts]
    fitting = [p for p in cleaned if max(_num_tokens(tested, p), _num_tokens(stock, p)) <= length]
    if not fitting:
        raise ValueError(f"none of the {len(cleaned)} prompts fits {length} tokens; give shorter ones")
    text, padding, pooled = _Rows(length), _Rows(length), _Rows(1)
    for start in range(0, len(fitting), batch_size):
        batch = fitting[start : start + batch_size]
        states, ours, is_text = slot_states(tested, batch, length)
        stock_states, theirs, stock_is_text = slot_states(stock, batch, length)
        if not torch.equal(is_text, stock_is_text):
            raise ValueError("the two tokenizers cut the same prompts differently; drift needs one vocabulary")
        text.add(states, stock_states, is_text)
        padding.add(states, stock_states, ~is_text)
        pooled.add(ours[:, None], theirs[:, None], torch.ones(len(batch), 1, dtype=torch.bool))
    return {
        "slot": slot,
        "prompts": len(fitting),
        "left_out": len(cleaned) - len(fitting),
        "length": length,
        "penultimate": text.summary() | {"by_position": text.by_position()},
        "padding": padding.summary() | {"by_position": padding.by_position()},
        "pooled": pooled.summary(),
    }


@torch.inference_mode()
def slot_states(slot: Slot, prompts: Sequence[str], length: int) -> tuple[Tensor, Tensor, Tensor]:
    """What SDXL reads: penultimate states (batch, length, dim), pooled (batch, dim), both float32 on the CPU, and
    which rows (batch, length) belong to the text rather than the padding. Prompts are cut at `length`, EOT kept."""
    tokens = slot.tokenizer(
        list(prompts), padding="max_length", max_length=length, truncation=True, return_tensors="pt"
    )  # fmt: skip
    output = slot.model(tokens.input_ids.to(slot.model.device), output_hidden_states=True)
    pooled = output.text_embeds if hasattr(output, "text_embeds") else output.pooler_output
    return output.hidden_states[-2].float().cpu(), pooled.float().cpu(), tokens.attention_mask.bool()


def drift_table(drift: dict[str, Any]) -> str:
    """The numbers of `slot_drift` as a Markdown table, positions gathered in tens."""
    lines = [
        f"{drift['slot']}: {drift['prompts']} prompts of up to {drift['length']} tokens; {drift['left_out']} left out",
        "",
        "| what SDXL reads | rows | relative error | cosine |",
        "| --- | --- | --- | --- |",
    ]
    parts = [
        ("penultimate, text", drift["penultimate"]),
        ("penultimate, padding", drift["padding"]),
        ("pooled", drift["pooled"]),
    ]
    lines += [_line(name, part) for name, part in parts if part["rows"]]
    positions = drift["penultimate"]["by_position"]
    for first in range(0, drift["length"], 10):
        group = [p for p in positions if first <= p["position"] < first + 10]
        if group:
            rows = sum(p["rows"] for p in group)
            mean = {k: sum(p[k] * p["rows"] for p in group) / rows for k in ("relative_error", "cosine")}
            lines.append(_line(f"text, positions {first}-{first + 9}", mean | {"rows": rows}))
    return "\n".join(lines)


@dataclass
class _Rows:
    """Sums of error and cosine by position."""

    length: int

    def __post_init__(self) -> None:
        self.error, self.cosine, self.count = (torch.zeros(self.length, dtype=torch.float64) for _ in range(3))

    def add(self, ours: Tensor, theirs: Tensor, counted: Tensor) -> None:
        error = (ours - theirs).norm(dim=-1) / theirs.norm(dim=-1).clamp(min=1e-12)
        self.error += (error * counted).sum(0)
        self.cosine += (F.cosine_similarity(ours, theirs, dim=-1) * counted).sum(0)
        self.count += counted.sum(0)

    def summary(self) -> dict[str, Any]:
        rows = int(self.count.sum())
        share = max(rows, 1)
        return {
            "rows": rows,
            "relative_error": float(self.error.sum()) / share,
            "cosine": float(self.cosine.sum()) / share,
        }

    def by_position(self) -> list[dict[str, Any]]:
        return [
            {"position": i, "rows": int(n), "relative_error": float(e / n), "cosine": float(c / n)}
            for i, (n, e, c) in enumerate(zip(self.count, self.error, self.cosine, strict=True))
            if n
        ]


def _slot_of(source: Source) -> str:
    if isinstance(source, Slot):
        return source.name
    if isinstance(source, Encoder):
        return slot_of_width(text_tower(source).token_embedding.embedding_dim)
    raise ValueError(f"{source} does not tell its slot; say which: {', '.join(SLOTS)}")


def _open(source: Source, slot: str) -> Slot:
    if isinstance(source, Slot):
        return source
    if isinstance(source, Encoder):
        return slot_from_encoder(source, slot)
    if slot_root(source, slot):
        return open_slot(source, slot)
    return slot_from_encoder(load_encoder(source), slot)


def _num_tokens(slot: Slot, prompt: str) -> int:
    return len(slot.tokenizer(prompt).input_ids)


def _line(name: str, part: dict[str, Any]) -> str:
    return f"| {name} | {part['rows']} | {part['relative_error']:.4f} | {part['cosine']:.4f} |"
