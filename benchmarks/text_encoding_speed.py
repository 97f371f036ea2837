"""Times the encoding of long captions at 248 tokens: the exact fast text forward against the plain open_clip tower.

    python benchmarks/text_encoding_speed.py --limit 48            # minutes on two cores
    python benchmarks/text_encoding_speed.py --captions my.jsonl   # a "caption" in every line

One text tower of ViT-L/14 (QuickGELU, 248 positions, random weights: speed does not depend on them) takes the same
captions in both ways, strings to unit features, tokenising included. "ours" is `text_features`, which pays for the
words alone; "plain" feeds the tower full rows of 248 tokens, as open_clip and Long-CLIP do. The two alternate, and
medians are shown. Wall time is what a user waits on an idle machine; processor time (summed over threads) is the one to
read when other jobs run beside this. Fails where any feature differs by more than 1e-5.

Without --captions, the ImageInWords captions of the shared data folder beside the checkout are read, and where that is
absent the miniature world's long captions, which are shorter.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import open_clip
import torch
import torch.nn.functional as F
from open_clip.model import CLIPTextCfg, _build_text_tower
from torch import Tensor, nn

from debias_diffusion.data.scene_sets import ScenePairs
from debias_diffusion.data.text_files import json_field, json_lines
from debias_diffusion.encoders.encoder import Encoder
from debias_diffusion.encoders.features import text_features
from debias_diffusion.encoders.tokens import Tokenizer, fit

CONTEXT_LENGTH = 248
ALLOWED_DIFFERENCE = 1e-5
LONG_CAPTIONS = Path(__file__).resolve().parents[2] / "shared" / "data" / "long_captions"


class TextOnly(nn.Module):
    """What encoding captions needs of a CLIP model, without the image tower."""

    def __init__(self, text: nn.Module) -> None:
        super().__init__()
        self.text = text
        self.logit_scale = nn.Parameter(torch.zeros(()))


@dataclass
class Timing:
    """Seconds of every repeat, and the features of the last."""

    wall: list[float]
    processor: list[float]
    features: Tensor

    def add(self, encode: Callable[[], Tensor]) -> None:
        """Runs `encode` once and notes what it took and gave."""
        start, start_processor = time.perf_counter(), time.process_time()
        self.features = encode()
        self.wall.append(time.perf_counter() - start)
        self.processor.append(time.process_time() - start_processor)

    def medians(self) -> tuple[float, float]:
        """Returns the median seconds of wall and processor time."""
        return statistics.median(self.wall), statistics.median(self.processor)


def read_captions(path: Path | None) -> tuple[str, list[str]]:
    """Returns where the captions come from and the captions."""
    files = [path] if path else [LONG_CAPTIONS / name for name in ("iiw_human.jsonl", "iiw_pali5b.jsonl")]
    if path is None and not all(file.is_file() for file in files):
        return "the miniature world's long captions", list(ScenePairs(1700, split="test").captions)
    captions = [json_field(row, "caption", str, where) for file in files for where, row in json_lines(file)]
    return ", ".join(file.name for file in files), captions


def build_encoder(device: str) -> Encoder:
    """Returns an encoder that can encode captions, with random weights."""
    config = open_clip.get_model_config("ViT-L-14-quickgelu")
    text_config = CLIPTextCfg(**{**config["text_cfg"], "context_length": CONTEXT_LENGTH})
    torch.manual_seed(0)
    text = _build_text_tower(config["embed_dim"], text_config, quick_gelu=config["quick_gelu"])
    return Encoder("ViT-L-14:random", TextOnly(text).to(device).eval(), Tokenizer(CONTEXT_LENGTH), config, {})


@torch.inference_mode()
def plain_text_features(encoder: Encoder, captions: Sequence[str], batch_size: int) -> Tensor:
    """Returns unit features (captions, dim) on the CPU from full rows, a fixed number of captions at a time."""
    features = []
    for first in range(0, len(captions), batch_size):
        rows = [fit(encoder.tokenizer.encode(c), CONTEXT_LENGTH) for c in captions[first : first + batch_size]]
        input_ids = torch.tensor([row + [0] * (CONTEXT_LENGTH - len(row)) for row in rows], device=encoder.device)
        features.append(F.normalize(encoder.model.text(input_ids).float(), dim=-1).cpu())
    return torch.cat(features)


def main() -> None:
    """Prints a markdown table of seconds and ratios, and the largest difference of a feature."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--captions", type=Path, help="JSONL file with a caption in every line")
    parser.add_argument("--limit", type=int, help="captions taken, evenly from all of them (default: all)")
    parser.add_argument("--repeats", type=int, default=5, help="times each way is run, alternating (default: 5)")
    parser.add_argument(
        "--batch-size", type=int, default=16, help="captions at a time for the plain tower (default: 16)"
    )
    parser.add_argument("--threads", type=int, default=2, help="torch threads, for both (default: 2)")
    parser.add_argument("--device", default="cpu", help="cpu or cuda (default: cpu)")
    arguments = parser.parse_args()
    if arguments.repeats < 1 or (arguments.limit is not None and arguments.limit < 1):
        parser.error(f"--repeats is {arguments.repeats}, --limit {arguments.limit}: expected at least 1 each")
    torch.set_num_threads(arguments.threads)

    source, captions = read_captions(arguments.captions)
    count = min(arguments.limit or len(captions), len(captions))
    captions = [captions[index * len(captions) // count] for index in range(count)]
    encoder = build_encoder(arguments.device)
    lengths = [min(len(encoder.tokenizer.encode(caption)), CONTEXT_LENGTH) for caption in captions]
    ways: dict[str, Callable[[], Tensor]] = {
        "plain": lambda: plain_text_features(encoder, captions, arguments.batch_size),
        "ours": lambda: text_features(encoder, captions),
    }
    plain_text_features(encoder, captions[:1], 1)  # warm-up; the tokenizer has cached its words above
    text_features(encoder, captions[:1])
    timings = {name: Timing([], [], torch.empty(0)) for name in ways}
    for _ in range(arguments.repeats):
        for name, encode in ways.items():
            timings[name].add(encode)

    mean = sum(lengths) / count
    print(f"{count:,} captions ({source}), {mean:.0f} of {CONTEXT_LENGTH} tokens on average; ViT-L/14 text tower,")
    print(f"float32, {arguments.device}, {arguments.threads} threads, median of {arguments.repeats} runs each\n")
    print("| way | wall, s | captions/s | processor, s | faster by (wall) | faster by (processor) |")
    print("|---|---|---|---|---|---|")
    plain_wall, plain_processor = timings["plain"].medians()
    for name, timing in timings.items():
        wall, processor = timing.medians()
        ratios = f"{plain_wall / wall:.2f}x | {plain_processor / processor:.2f}x"
        print(f"| {name} | {wall:.2f} | {count / wall:.2f} | {processor:.2f} | {ratios} |")
    difference = float((timings["plain"].features - timings["ours"].features).abs().max())
    print(f"\nLargest difference of a normalised feature: {difference:.1e} (allowed: {ALLOWED_DIFFERENCE:.0e}).")
    if not difference <= ALLOWED_DIFFERENCE:
        sys.exit("the fast forward is not exact")


if __name__ == "__main__":
    main()
