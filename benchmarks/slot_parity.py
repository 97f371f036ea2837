"""Full-size text towers against the SDXL slots made of them: how far apart, how long it takes, how much memory.

    python benchmarks/slot_parity.py                                   # both towers, both lengths
    python benchmarks/slot_parity.py --towers ViT-L-14 --lengths 248   # one of them

Weights are random, with norms and biases moved away from ones and zeros so that a swapped tensor would show; parity is
of arithmetic, not of quality. Only the text tower is built. For each row a fresh process builds open_clip's tower,
makes the slot, and compares penultimate states and the pooled vector on captions whose EOT lies at many places, padded
as the slot pads. Relative error is |slot - open_clip| / |open_clip| over all rows; memory is the process's peak. At 248 the
first 77 rows are also compared with the slot's own encoding of 77 tokens.
"""

import argparse
import resource
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context

import torch
from open_clip.model import _build_text_tower
from torch import Tensor, nn

from debias_diffusion.encoders.encoder import spec_config
from debias_diffusion.encoders.specs import SPECS
from debias_diffusion.encoders.tokens import Tokenizer
from debias_diffusion.sdxl.slots import SLOTS, build_slot

ENDS = (1, 2, 7, 20, 40, 75, 76, 100, 169, 246, 247)
"""Positions of EOT in the captions; those beyond the context are left out."""

SHORT = 77


@dataclass(frozen=True)
class Row:
    """What one tower at one length gave: relative errors, seconds, and GiB."""

    tower: str
    length: int
    parameters: int
    penultimate: float
    pooled: float
    built: float
    converted: float
    peak: float
    prefix: float | None


def main() -> None:
    """Prints a Markdown table, a row as soon as it is known."""
    known = [name for name, spec in SPECS.items() if spec.slot]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--towers", nargs="+", choices=known, default=known, metavar="ROW")
    parser.add_argument("--lengths", nargs="+", type=int, choices=(77, 248), default=(77, 248), metavar="LENGTH")
    parser.add_argument(
        "--captions", type=int, default=4, help="captions a batch, which memory grows with (default: 4)"
    )
    arguments = parser.parse_args()
    print("| tower | tokens | parameters | penultimate | pooled | rows 0-76 | build + convert, s | peak memory, GiB |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    for tower in arguments.towers:
        for length in arguments.lengths:
            with ProcessPoolExecutor(
                1, mp_context=get_context("spawn")
            ) as pool:  # its own process: the peak is the row's
                row = pool.submit(measure, tower, length, arguments.captions).result()
            seconds = f"{row.built:.1f} + {row.converted:.1f}"
            prefix = "-" if row.prefix is None else f"{row.prefix:.1e}"
            error = f"{row.penultimate:.1e} | {row.pooled:.1e} | {prefix}"
            print(
                f"| {row.tower} | {row.length} | {row.parameters / 1e6:.1f} M | {error} | {seconds} | {row.peak:.1f} |",
                flush=True,
            )


@torch.inference_mode()
def measure(name: str, length: int, captions: int) -> Row:
    """Builds one tower, makes its slot, and compares the two."""
    spec = SPECS[name]
    slot_name = str(spec.slot)
    start = time.perf_counter()
    text = build_tower(name, length)
    built = time.perf_counter() - start
    start = time.perf_counter()
    slot = build_slot(text, Tokenizer(length), slot_name)
    converted = time.perf_counter() - start
    rows = input_ids(length, slot.model.config.pad_token_id)
    sums = torch.zeros(2, 2, dtype=torch.float64)
    for batch in rows.split(captions):
        output = slot.model(batch, output_hidden_states=True)
        ours = (output.hidden_states[-2], output.text_embeds if SLOTS[slot_name].projects else output.pooler_output)
        for i, (a, b) in enumerate(zip(ours, open_clip_states(text, batch, SLOTS[slot_name].projects), strict=True)):
            sums[i] += torch.stack([(a - b).double().square().sum(), b.double().square().sum()])
    penultimate, pooled = (sums[:, 0] / sums[:, 1]).sqrt().tolist()
    parameters = sum(p.numel() for p in text.parameters())
    prefix = prefix_error(slot.model, rows[:captions]) if length > SHORT else None
    return Row(name, length, parameters, penultimate, pooled, built, converted, peak_gib(), prefix)


def prefix_error(model: nn.Module, ids: Tensor) -> float:
    """How far the first 77 rows of the long encoding are from the encoding of 77 tokens, relative."""
    whole, short = (model(part, output_hidden_states=True).hidden_states[-2] for part in (ids, ids[:, :SHORT]))
    return float((whole[:, :SHORT] - short).norm() / short.norm())


def build_tower(name: str, length: int) -> nn.Module:
    """open_clip's text tower of a row at a length, random, in float32."""
    config = spec_config(SPECS[name])
    torch.manual_seed(0)
    text = _build_text_tower(
        config["embed_dim"], {**config["text_cfg"], "context_length": length}, quick_gelu=config["quick_gelu"]
    )
    for parameter in text.parameters():
        if parameter.ndim == 1:
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    return text.eval()


def input_ids(length: int, pad_id: int) -> Tensor:
    """Rows (captions, length) of random words, EOT at each of `ENDS`."""
    tokenizer = Tokenizer(length)
    ends = [end for end in ENDS if end < length]
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(1, tokenizer.sot_id, (len(ends), length), generator=generator)
    for row, end in zip(ids, ends, strict=True):
        row[0], row[end], row[end + 1 :] = tokenizer.sot_id, tokenizer.eot_id, pad_id
    return ids


def open_clip_states(text: nn.Module, ids: Tensor, projected: bool) -> tuple[Tensor, Tensor]:
    """Penultimate states and the pooled vector of open_clip's own forward pass."""
    kept: dict[str, Tensor] = {}
    hooks = [
        text.transformer.resblocks[-2].register_forward_hook(lambda m, i, o: kept.update(penultimate=o)),
        text.ln_final.register_forward_hook(lambda m, i, o: kept.update(last=o)),
    ]
    features = text(ids)
    for hook in hooks:
        hook.remove()
    pooled = kept["last"][torch.arange(len(ids)), ids.argmax(dim=1)]
    return kept["penultimate"], features if projected else pooled


def peak_gib() -> float:
    """The most resident memory this process has held so far, in GiB."""
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**30


if __name__ == "__main__":
    main()
