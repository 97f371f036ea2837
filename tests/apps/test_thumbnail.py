"""The small picture by which a comparison is found again."""

from PIL import Image

from apps.thumbnail import write_thumbnail


def test_the_first_picture_of_each_set_stands_side_by_side_unsmoothed(tmp_path):
    for name, colour in (("a", "red"), ("b", "blue")):
        Image.new("RGB", (64, 32), colour).save(tmp_path / f"{name}.png")
    path = write_thumbnail({name: [tmp_path / f"{name}.png"] for name in "ab"}, tmp_path / "small.png")
    with Image.open(path) as image:
        assert image.size == (2 * 384 + 6, 192)
        assert {image.getpixel((x, 100)) for x in (0, 383)} == {(255, 0, 0)}
        assert {image.getpixel((x, 100)) for x in (390, 773)} == {(0, 0, 255)}
