"""Times the encoding of one SDXL prompt by both text encoders at 248 positions: this project's pipeline against others.

    nice python benchmarks/prompt_encoding_speed.py              # full size: 3.5 GB of memory, minutes on one core
    python benchmarks/prompt_encoding_speed.py --tiny            # seconds; its ratios mean nothing

The towers are ViT-L/14's and ViT-bigG/14's text towers as transformers classes, float32, with random weights: speed does
not depend on them. Two prompts, of 20 and of 200 tokens (BOS and EOS counted), are encoded without a negative. "ours" is
the pipeline in pipelines/ with max_length="auto", 77 rows where the prompt fits. "stock" is diffusers' own pipeline with the
same encoders, which always pads to 248; "compel" is CompelForSDXL on it; "75-token chunks" is what
lpw_stable_diffusion_xl does for long prompts: 77 rows a chunk, one forward of each tower a chunk. Tokenising is included;
building compel is not. The ways alternate, and medians are shown; a ratio above 1 means that ours is faster. Processor
time (summed over threads) is the one to read when other jobs run beside this.

Fails where ours differs from stock: bit for bit at 248 rows, by more than 1e-4 of the largest value in the rows both have.
"""

import argparse
import resource
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from compel import CompelForSDXL
from diffusers import StableDiffusionXLPipeline
from torch import Tensor
from transformers import CLIPTextConfig

from debias_diffusion.encoders.tokens import Tokenizer
from debias_diffusion.sdxl.prompts import debias_pipeline
from debias_diffusion.sdxl.slots import SLOTS, slot_tokenizer

CONTEXT_LENGTH = 248
LENGTHS = (20, 200)
ALLOWED_DIFFERENCE = 1e-4
# Layers, heads, and activation of each slot's tower; widths are in SLOTS.
TOWERS = {"text_encoder": (12, 12, "quick_gelu"), "text_encoder_2": (32, 20, "gelu")}


@dataclass
class Timing:
    """Seconds of every repeat, and the embeddings of the last."""

    wall: list[float] = field(default_factory=list)
    processor: list[float] = field(default_factory=list)
    states: Tensor = field(default_factory=lambda: torch.empty(0))

    def add(self, encode: Callable[[], Tensor]) -> None:
        """Runs `encode` once and notes what it took and gave."""
        start, start_processor = time.perf_counter(), time.process_time()
        self.states = encode()
        self.wall.append(time.perf_counter() - start)
        self.processor.append(time.process_time() - start_processor)


def build_tower(slot: str, tiny: bool) -> Any:
    """Returns the slot's text encoder at 248 positions with small random weights."""
    spec, (layers, heads, activation) = SLOTS[slot], TOWERS[slot]
    width = 64 if tiny else spec.width
    config = CLIPTextConfig(
        vocab_size=49408,
        hidden_size=width,
        intermediate_size=4 * width,
        projection_dim=width,
        num_hidden_layers=2 if tiny else layers,
        num_attention_heads=4 if tiny else heads,
        max_position_embeddings=CONTEXT_LENGTH,
        hidden_act=activation,
        eos_token_id=49407,
    )
    tower = spec.model_class(config)
    generator = torch.Generator().manual_seed(0)
    for name, parameter in tower.named_parameters():
        is_norm = "norm" in name and name.endswith("weight")
        parameter.data.fill_(1) if is_norm else parameter.data.normal_(0, 0.02, generator=generator)
    return tower.eval()


def build_pipeline(tiny: bool) -> StableDiffusionXLPipeline:
    """Returns a stock pipeline that can encode prompts and nothing else."""
    parts: dict[str, Any] = {"vae": None, "unet": None, "scheduler": None, "add_watermarker": False}
    for spec in SLOTS.values():
        parts[spec.name] = build_tower(spec.name, tiny)
        parts[spec.tokenizer] = slot_tokenizer(Tokenizer(CONTEXT_LENGTH), spec.name)
    return StableDiffusionXLPipeline(**parts)


def in_chunks(pipe: Any, prompt: str) -> Tensor:
    """Returns hidden states (1, 77 a chunk, dim) of chunks of 75 tokens, both slots padded with EOS, run one by one."""
    halves = []
    for tokenizer, encoder in ((pipe.tokenizer, pipe.text_encoder), (pipe.tokenizer_2, pipe.text_encoder_2)):
        ids = tokenizer(prompt, add_special_tokens=False).input_ids
        chunks = [ids[i : i + 75] for i in range(0, len(ids), 75)] or [[]]
        rows = [[tokenizer.bos_token_id, *chunk, *[tokenizer.eos_token_id] * (76 - len(chunk))] for chunk in chunks]
        states = [encoder(torch.tensor([row]), output_hidden_states=True).hidden_states[-2] for row in rows]
        halves.append(torch.cat(states, dim=1))
    return torch.cat(halves, dim=-1)


def prompt_of(tokenizer: Any, length: int) -> str:
    """Returns a prompt of so many tokens, BOS and EOS counted."""
    words = ["red", "house", "river", "stone", "bird", "cloud", "tree", "boat", "sand", "light"]
    prompt = " ".join(words[i % len(words)] for i in range(length - 2))
    assert len(tokenizer(prompt).input_ids) == length
    return prompt


def difference(ours: Tensor, stock: Tensor) -> float:
    """Returns the largest difference in the rows both have, as a share of the largest value there."""
    rows = min(ours.shape[1], stock.shape[1])
    return float((ours[:, :rows] - stock[:, :rows]).abs().max() / stock[:, :rows].abs().max())


@torch.inference_mode()
def measure(stock: Any, length: int, repeats: int) -> tuple[dict[str, Timing], bool]:
    """Returns the timings of all ways for a prompt of this length, and whether ours is right."""
    own, compel, prompt = debias_pipeline(stock), CompelForSDXL(stock), prompt_of(stock.tokenizer, length)
    options = {"do_classifier_free_guidance": False}
    ways: dict[str, Callable[[], Tensor]] = {
        "ours": lambda: own.encode_prompt(prompt, **options)[0],
        "stock": lambda: stock.encode_prompt(prompt, **options)[0],
        "compel": lambda: compel(prompt).embeds,
        "75-token chunks": lambda: in_chunks(stock, prompt),
    }
    own.encode_prompt("warm up", **options)
    timings = {name: Timing() for name in ways}
    for _ in range(repeats):
        for name, encode in ways.items():
            timings[name].add(encode)
    ours, theirs = timings["ours"].states, timings["stock"].states
    exact = torch.equal(ours, theirs) if ours.shape == theirs.shape else difference(ours, theirs) <= ALLOWED_DIFFERENCE
    return timings, exact


def peak_gib() -> float:
    """Returns the most resident memory this process has held so far, in GiB."""
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**30


def main() -> None:
    """Prints a markdown table of seconds and ratios, and peak memory."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3, help="times each way is run, alternating (default: 3)")
    parser.add_argument("--threads", type=int, default=1, help="torch threads, for all (default: 1)")
    parser.add_argument("--tiny", action="store_true", help="towers of 2 layers, 64 wide, to try the script")
    arguments = parser.parse_args()
    if arguments.repeats < 1:
        parser.error(f"--repeats is {arguments.repeats}: expected at least 1")
    torch.set_num_threads(arguments.threads)
    stock = build_pipeline(arguments.tiny)

    size = "2 layers, 64 wide" if arguments.tiny else "ViT-L/14 and ViT-bigG/14 text towers"
    print(f"{size}, float32, {arguments.threads} threads, median of {arguments.repeats} runs each\n")
    print("| prompt | way | rows | wall, s | ours is faster by | processor, s | ours is faster by |")
    print("|---|---|---|---|---|---|---|")
    exact = True
    for length in LENGTHS:
        timings, is_exact = measure(stock, length, arguments.repeats)
        exact = exact and is_exact
        wall, processor = (
            {name: statistics.median(getattr(timing, kind)) for name, timing in timings.items()}
            for kind in ("wall", "processor")
        )
        for name, timing in timings.items():
            ratios = (
                f"{wall[name] / wall['ours']:.2f}x | {processor[name]:.2f} | {processor[name] / processor['ours']:.2f}x"
            )
            print(f"| {length} tokens | {name} | {timing.states.shape[1]} | {wall[name]:.2f} | {ratios} |", flush=True)
    print(f"\nPeak resident memory {peak_gib():.2f} GiB.")
    if not exact:
        sys.exit("our embeddings are not the stock pipeline's")


if __name__ == "__main__":
    main()
