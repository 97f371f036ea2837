"""A small picture of a comparison, by which a visitor finds it again: the first seed of each set, side by side."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from PIL import Image

_SIDE = 192
_GAP = 6


def write_thumbnail(pictures: Mapping[str, Sequence[Path]], path: Path) -> Path:
    """Writes the first picture of every set beside the others at one height, as PNG, and returns where.

    Pictures smaller than that are enlarged without smoothing.
    """
    tiles = []
    for paths in pictures.values():
        with Image.open(paths[0]) as image:
            width = max(1, round(image.width * _SIDE / image.height))
            how = Image.Resampling.NEAREST if image.height < _SIDE else Image.Resampling.LANCZOS
            tiles.append(image.convert("RGB").resize((width, _SIDE), how))
    joined = Image.new("RGB", (sum(tile.width + _GAP for tile in tiles) - _GAP, _SIDE), "grey")
    x = 0
    for tile in tiles:
        joined.paste(tile, (x, 0))
        x += tile.width + _GAP
    joined.save(path, format="PNG")
    return path
