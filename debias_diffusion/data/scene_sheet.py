"""Pictures of the miniature world beside what they should show, enlarged for human eyes."""

from collections.abc import Mapping, Sequence

from PIL import Image, ImageDraw, ImageFont

from debias_diffusion.data.scenes import Scene, render

_CELL, _GAP, _WIDTH, _HEAD = 96, 8, 1300, 20


def scene_sheet(scenes: Sequence[Scene], pictures: Mapping[str, Sequence[Image.Image]]) -> Image.Image:
    """One group of cells a scene, side by side and then in rows: the scene itself, and its picture of each named set.

    Raises ValueError where a set has another number of pictures than there are scenes.
    """
    for name, own in pictures.items():
        if len(own) != len(scenes):
            raise ValueError(
                f"{name} has {len(own)} pictures, there are {len(scenes)} scenes; pass one a scene, in order"
            )
    names = ["scene", *pictures]
    across = max(1, min(len(scenes), _WIDTH // (len(names) * _CELL + _GAP)))
    rows = -(-len(scenes) // across)
    width = len(names) * _CELL + _GAP
    sheet = Image.new("RGB", (across * width, _HEAD + rows * (_CELL + _GAP)), "white")
    pen, font = ImageDraw.Draw(sheet), ImageFont.load_default(12)
    for group in range(across):
        for column, name in enumerate(names):
            pen.text((group * width + column * _CELL + 2, 2), name, "black", font)
    for number, scene in enumerate(scenes):
        left, top = (number % across) * width, _HEAD + (number // across) * (_CELL + _GAP)
        for column, picture in enumerate([render(scene), *(own[number] for own in pictures.values())]):
            large = picture.convert("RGB").resize((_CELL, _CELL), Image.Resampling.BICUBIC)
            sheet.paste(large, (left + column * _CELL, top))
    return sheet
