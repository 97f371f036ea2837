"""The miniature world's words: sentence templates as data, and the names of the nine places."""

import random

SUMMARIES = (
    "The picture shows a {a} at the {pa} and a {b} at the {pb} on a {background} background.",
    "This image features a {a} in the {pa} together with a {b} in the {pb}, set against a plain {background} background.",
    "A {a} in the {pa} and a {b} in the {pb} dominate this {background} scene.",
    "On a {background} background, a {a} fills the {pa} while a {b} fills the {pb}.",
    "We see a {background} backdrop with a {a} at the {pa} and a {b} at the {pb}.",
)
SHORT = (
    "A {a} and a {b} on {background}.",
    "A {background} picture of a {a} and a {b}.",
    "A {a} with a {b} on a {background} background.",
    "There is a {a} and a {b} in this {background} image.",
)
DETAILS = (
    "In the {place} of the picture there is a {small} {colour} {shape}.",
    "A {small} {colour} {shape} can be seen in the {place} of the scene.",
    "If you look at the {place} you will find a {small} {colour} {shape} there.",
    "There is also one {small} {shape} painted in {colour} and placed in the {place}.",
    "The {place} of the image holds a {small} {shape} that is coloured {colour}.",
    "Somebody has drawn a {small} {colour} {shape} right in the {place}.",
    "Sitting quietly in the {place} is a {small} {shape} in a bright {colour} colour.",
    "The artist has put a {small} {colour} {shape} into the {place} of the frame.",
)
TERSE = (
    "A {small} {colour} {shape} in the {place}.",
    "In the {place} a {small} {colour} {shape}.",
)
TAILS = (
    ", which stands out clearly from what is around it",
    ", drawn with clean and simple edges",
    ", and nothing else is near it",
    ", adding a small accent to the composition",
    ", where the eye comes to rest for a moment",
)
SMALL = ("small", "little", "tiny")

PLACES: dict[tuple[int, int], tuple[str, ...]] = {
    (0, 0): ("top left", "upper left corner"),
    (0, 1): ("top centre", "middle of the top edge"),
    (0, 2): ("top right", "upper right corner"),
    (1, 0): ("centre left", "middle of the left edge"),
    (1, 1): ("very centre", "exact middle"),
    (1, 2): ("centre right", "middle of the right edge"),
    (2, 0): ("bottom left", "lower left corner"),
    (2, 1): ("bottom centre", "middle of the bottom edge"),
    (2, 2): ("bottom right", "lower right corner"),
}


def place(cell: tuple[int, int], rng: random.Random) -> str:
    """One of the phrases for a grid cell (row, column)."""
    return rng.choice(PLACES[cell])
