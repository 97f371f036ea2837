"""A plan on paper: time, memory and money of a whole training run, from counted operations and bytes.

    python benchmarks/plan.py                                  # Markdown tables
    python benchmarks/plan.py --utilisation 0.3 --price 3.5    # with other assumptions

Nothing here is measured. Operations are counted from the towers' shapes: two for each weight of a matrix and token, and the
attention scores; the backward pass costs twice the forward; recomputing activations one more forward.
"""

import argparse
from dataclasses import dataclass, replace

import open_clip

PAIRS, EPOCHS, BATCH = 1_245_901, 3, 256
FULL_TOKENS, AUGMENTED_TOKENS, CONTEXT = 130, 60, 248
ENCODERS = {"B/16": "ViT-B-16-quickgelu", "L/14": "ViT-L-14-quickgelu", "bigG/14": "ViT-bigG-14"}
BYTES_A_TRAINED_WEIGHT = 16  # float32: weight, gradient, two moments


@dataclass(frozen=True)
class Card:
    """A GPU: dense bf16 peak, memory, and what an hour of it costs."""

    name: str
    tflops: float
    gigabytes: float
    price: float


H100 = Card("80 GB card (H100 class)", 989, 80, 2.5)
CONSUMER = Card("24 GB card (RTX 4090 class)", 165, 24, 0.5)


@dataclass(frozen=True)
class Tower:
    """One transformer: layers of width, an MLP `mlp` times as wide, `other` weights outside the layers."""

    layers: int
    width: int
    mlp: float
    tokens: int
    other: int

    @property
    def layer_weights(self) -> int:
        return int((4 + 2 * self.mlp) * self.width**2 + (9 + self.mlp) * self.width)

    @property
    def weights(self) -> int:
        return self.layers * self.layer_weights + self.other

    def forward(self, tokens: float, seen: float | None = None) -> float:
        """Operations of one sequence of `tokens`, each attending to `seen` (default: all)."""
        attention = 4 * self.width * (tokens if seen is None else seen)
        return self.layers * tokens * (2 * self.layer_weights + attention)

    def kept(self, tokens: float, checkpointing: bool) -> float:
        """Bytes kept for the backward pass of one sequence, in bf16: 2 (10 + 2 mlp) a token and width, or each layer's input."""
        width = 2 * self.width * tokens
        inside = width * (10 + 2 * self.mlp)
        return inside + self.layers * width if checkpointing else self.layers * inside


def towers(architecture: str) -> tuple[Tower, Tower]:
    """(image, text) of an open_clip architecture, the text at 248 positions."""
    config = open_clip.get_model_config(architecture)
    vision, text, dim = config["vision_cfg"], config["text_cfg"], config["embed_dim"]
    patches = (vision["image_size"] // vision["patch_size"]) ** 2
    outside = vision["width"] * (3 * vision["patch_size"] ** 2 + patches + dim + 6)
    image = Tower(vision["layers"], vision["width"], vision.get("mlp_ratio", 4.0), patches + 1, outside)
    words = text["width"] * (text["vocab_size"] + CONTEXT + dim + 2)
    return image, Tower(text["layers"], text["width"], 4.0, CONTEXT, words)


@dataclass(frozen=True)
class Way:
    """A way to train: what runs, and what it costs."""

    name: str
    frozen: bool
    plain: bool
    checkpointing: bool

    @property
    def passes(self) -> int:
        """Forward passes that the operations are worth: one forward, two backward, one more where activations are redone."""
        return 4 if self.checkpointing else 3


PLAIN = Way("plain recipe", frozen=False, plain=True, checkpointing=False)
OURS = Way("both towers", frozen=False, plain=False, checkpointing=False)
CHECKPOINTED = Way("both towers, gradient checkpointing", frozen=False, plain=False, checkpointing=True)
TEXT = Way("image tower frozen", frozen=True, plain=False, checkpointing=True)


def operations(architecture: str, way: Way) -> float:
    """Operations of one pair, forward and backward."""
    image, text = towers(architecture)
    if way.plain:
        words = 2 * text.forward(CONTEXT)
    else:  # an augmented caption's tokens also look back at a padding prefix, half of what is free on average
        words = text.forward(FULL_TOKENS) + text.forward(
            AUGMENTED_TOKENS, AUGMENTED_TOKENS + (CONTEXT - AUGMENTED_TOKENS) / 2
        )
    return way.passes * (words + (0 if way.frozen else image.forward(image.tokens)))


def memory(architecture: str, way: Way, pairs: int) -> float:
    """Bytes on one card: weights with gradients and moments, and what `pairs` pairs at once keep."""
    image, text = towers(architecture)
    tokens = 2 * CONTEXT if way.plain else FULL_TOKENS + AUGMENTED_TOKENS
    state = BYTES_A_TRAINED_WEIGHT * (text.weights + (0 if way.frozen else image.weights))
    kept = text.kept(tokens, way.checkpointing) + (0 if way.frozen else image.kept(image.tokens, way.checkpointing))
    return state + pairs * kept


def chunk_that_fits(architecture: str, way: Way, card: Card, wanted: int) -> int:
    """The most pairs at once, up to `wanted`, in nine tenths of the card; 0 where not even the weights fit."""
    for pairs in (2**n for n in range(11, -1, -1)):
        if pairs <= wanted and memory(architecture, way, pairs) <= 0.9e9 * card.gigabytes:
            return pairs
    return 0


@dataclass(frozen=True)
class Assumed:
    """What is not counted but taken for granted."""

    utilisation: float
    prices: dict[Card, float]
    cores: int
    pictures_a_core: float


def tables(assumed: Assumed) -> list[str]:
    """The table as Markdown lines."""
    head = "| encoder | way | TFLOP a pair | GPUs | pairs at once | memory of a card, GB | hours | money, $ |"
    lines = [head, "|" + "---|" * 8]
    for name, architecture in ENCODERS.items():
        rows = [(way, H100, n) for way in (PLAIN, OURS) for n in (1, 4, 8)]
        rows += [(TEXT, H100, 1), (CHECKPOINTED, CONSUMER, 1), (TEXT, CONSUMER, 1)]
        for way, card, count in rows:
            local = BATCH // count
            if way in (PLAIN, OURS) and chunk_that_fits(architecture, way, card, local) < local:
                way = replace(way, name=f"{way.name}, gradient checkpointing", checkpointing=True)
            lines.append(f"| {name} | {way.name} |{_cells(architecture, way, card, count, assumed)}")
    return lines


def _cells(architecture: str, way: Way, card: Card, count: int, assumed: Assumed) -> str:
    local = BATCH // count
    fits = chunk_that_fits(architecture, way, card, local)
    spent, cards = operations(architecture, way), f"{count} x {card.gigabytes:g} GB"
    if not fits or (way.plain and fits < local):
        needed = memory(architecture, way, local if way.plain else 0) / 1e9
        return f" {spent / 1e12:.2f} | {cards} | | {needed:.0f} needed | does not fit | |"
    if fits < local:  # gradient caching computes the features once more
        spent *= (way.passes + 1) / way.passes
    samples = PAIRS * EPOCHS
    computing = spent * samples / (count * card.tflops * 1e12 * assumed.utilisation) / 3600
    reading = 0 if way.frozen else samples / (count * assumed.cores * assumed.pictures_a_core) / 3600
    hours = max(computing, reading)
    held = memory(architecture, way, fits) / 1e9
    chunked = f"{local}, in chunks of {fits}" if fits < local else f"{local}"
    bound = " (reading)" if reading > computing else ""
    money = hours * count * assumed.prices[card]
    return f" {spent / 1e12:.2f} | {cards} | {chunked} | {held:.0f} | {hours:.2f}{bound} | {money:.3g} |"


def main() -> None:
    """Prints the tables with their assumptions."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--utilisation", type=float, default=0.4, help="share of the peak that is reached (default: 0.4)"
    )
    parser.add_argument("--price", type=float, default=H100.price, help="$ for an hour of an 80 GB card (default: 2.5)")
    parser.add_argument(
        "--consumer-price", type=float, default=CONSUMER.price, help="$ for an hour of a 24 GB card (default: 0.5)"
    )
    parser.add_argument("--cores", type=int, default=16, help="CPU cores for each GPU (default: 16)")
    parser.add_argument(
        "--pictures-per-core", type=float, default=150, help="packed pictures that a core reads a second (default: 150)"
    )
    arguments = parser.parse_args()
    if not 0 < arguments.utilisation <= 1:
        parser.error(f"--utilisation is {arguments.utilisation}, expected above 0 to 1")
    prices = {H100: arguments.price, CONSUMER: arguments.consumer_price}
    assumed = Assumed(arguments.utilisation, prices, arguments.cores, arguments.pictures_per_core)
    print("\n".join(tables(assumed)))
    print(
        f"\nAssumed: {PAIRS:,} pairs, {EPOCHS} epochs, batch {BATCH}; captions of {FULL_TOKENS} tokens and augmented ones "
        f"of {AUGMENTED_TOKENS}; {arguments.utilisation:.0%} of the dense bf16 peak ({H100.tflops:g} and "
        f"{CONSUMER.tflops:g} TFLOP/s); weights, gradients and moments in float32; {arguments.cores} cores a GPU that "
        f"read {arguments.pictures_per_core:g} packed pictures a second each; ${arguments.price:g} and "
        f"${arguments.consumer_price:g} an hour. Frozen image features are computed once beforehand: one forward pass "
        "a picture, not in these hours."
    )


if __name__ == "__main__":
    main()
