"""A retrieval set holds what can be ranked and counts everything that was odd."""

from dataclasses import dataclass
from pathlib import Path

import pytest
from PIL import Image

from debias_diffusion.data.pictures import BadPicture
from debias_diffusion.data.retrieval_set import Entry, Picture, PictureFile, RetrievalSet, build_retrieval_set

NOTHING_ODD = {
    "empty_captions": 0,
    "missing_pictures": 0,
    "dropped_captions": 0,
    "pictures_without_captions": 0,
    "duplicate_captions": 0,
    "duplicate_pictures": 0,
}


@dataclass(frozen=True)
class Rendered:
    """A picture that was never a file, as the miniature world's are."""

    colour: str

    @property
    def identity(self) -> str:
        return f"rendered|{self.colour}"

    def open(self) -> Image.Image:
        return Image.new("RGB", (2, 2), self.colour)


def saved(path: Path, colour: str) -> PictureFile:
    Image.new("RGB", (4, 4), colour).save(path)
    return PictureFile(path)


def test_captions_point_to_their_pictures(tmp_path: Path) -> None:
    red, blue = saved(tmp_path / "a.png", "red"), saved(tmp_path / "b.png", "blue")
    entries = [Entry(red, [" Red.\n", "Still red."]), Entry(blue, ["Blue."])]
    made = build_retrieval_set("tiny", "two pictures", entries)
    assert made.captions == ["Red.", "Still red.", "Blue."]
    assert made.image_of_caption == [0, 0, 1]
    assert made.short_captions is None
    assert (made.name, made.protocol) == ("tiny", "two pictures")
    assert made.counts == {"images": 2, "captions": 3, **NOTHING_ODD}
    assert made.open(1).getpixel((0, 0)) == (0, 0, 255)


def test_pictures_need_not_be_files() -> None:
    assert isinstance(Rendered("red"), Picture)
    entries = [Entry(Rendered(colour), [f"{colour}."], [colour[0]]) for colour in ("red", "blue", "red")]
    made = build_retrieval_set("rendered", "three scenes", entries)
    assert made.counts == {"images": 3, "captions": 3, **NOTHING_ODD, "duplicate_captions": 1, "duplicate_pictures": 1}
    assert made.short_captions == ["r", "b", "r"]
    assert made.picture_id(1) == "rendered|blue"
    assert made.open(1).getpixel((0, 0)) == (0, 0, 255)


def test_missing_pictures_go_with_their_captions_and_are_counted(tmp_path: Path) -> None:
    there = saved(tmp_path / "a.png", "red")
    missing = PictureFile(tmp_path / "none.png")
    below_a_file = PictureFile(tmp_path / "a.png/b.png")
    entries = [Entry(missing, ["x", "y"]), Entry(there, ["Red."]), Entry(below_a_file, ["z"])]
    made = build_retrieval_set("tiny", "p", entries)
    assert (made.captions, made.image_of_caption) == (["Red."], [0])
    assert made.counts == {"images": 1, "captions": 1, **NOTHING_ODD, "missing_pictures": 2, "dropped_captions": 3}


def test_pictures_without_captions_go_and_are_counted(tmp_path: Path) -> None:
    entries = [Entry(saved(tmp_path / "a.png", "red"), []), Entry(saved(tmp_path / "b.png", "blue"), ["Blue."])]
    made = build_retrieval_set("tiny", "p", entries)
    assert made.captions == ["Blue."]
    assert made.counts == {"images": 1, "captions": 1, **NOTHING_ODD, "pictures_without_captions": 1}


def test_empty_captions_stay_as_queries_and_are_counted(tmp_path: Path) -> None:
    entries = [Entry(saved(tmp_path / "a.png", "red"), ["\n", "Red.", ""])]
    made = build_retrieval_set("tiny", "p", entries)
    assert made.captions == ["", "Red.", ""]
    assert made.counts == {"images": 1, "captions": 3, **NOTHING_ODD, "empty_captions": 2}


def test_duplicates_are_counted_and_not_merged(tmp_path: Path) -> None:
    first = saved(tmp_path / "a.png", "red")
    copy = saved(tmp_path / "copy.png", "red")
    other = saved(tmp_path / "b.png", "blue")
    same_size = PictureFile(tmp_path / "c.png")
    data = bytearray((tmp_path / "b.png").read_bytes())
    data[-1] ^= 1
    same_size.path.write_bytes(data)
    entries = [Entry(picture, [caption]) for picture, caption in zip((first, copy, other, same_size, first), "aabca")]
    made = build_retrieval_set("tiny", "p", entries)
    assert len(made.pictures) == 5
    assert made.counts == {"images": 5, "captions": 5, **NOTHING_ODD, "duplicate_captions": 2, "duplicate_pictures": 2}


def test_files_that_start_alike_are_compared_to_the_end(tmp_path: Path) -> None:
    for name, last in (("a", b"1"), ("b", b"2"), ("c", b"1")):
        (tmp_path / name).write_bytes(bytes(10_000) + last)
    entries = [Entry(PictureFile(tmp_path / name), [name]) for name in "abc"]
    assert build_retrieval_set("tiny", "p", entries).counts["duplicate_pictures"] == 1


def test_a_set_without_pictures_is_refused(tmp_path: Path) -> None:
    entries = [Entry(PictureFile(tmp_path / "none.png"), ["x"]), Entry(PictureFile(tmp_path / "too.png"), ["y"])]
    with pytest.raises(
        ValueError, match=r"tiny: no picture is left: 2 missing, the first of them .*none\.png, 0 without"
    ):
        build_retrieval_set("tiny", "p", entries)
    with pytest.raises(ValueError, match="no picture is left: 0 missing, 0 without captions"):
        build_retrieval_set("tiny", "p", [])


def test_the_identity_changes_with_the_file(tmp_path: Path) -> None:
    picture = saved(tmp_path / "a.png", "red")
    before = picture.identity
    assert PictureFile(tmp_path / "a.png").identity == before
    picture.path.write_bytes(picture.path.read_bytes() + b" ")
    assert picture.identity != before
    assert PictureFile(tmp_path / "none.png").identity.endswith("none.png|missing")
    assert saved(tmp_path / "b.png", "red").identity != before


def test_a_broken_picture_is_not_missing(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(b"")
    made = build_retrieval_set("tiny", "p", [Entry(PictureFile(tmp_path / "a.png"), ["x"])])
    with pytest.raises(BadPicture, match="empty"):
        made.open(0)


@pytest.mark.parametrize(
    ("captions", "image_of_caption", "short_captions", "reason"),
    [
        (["a", "b"], [0], None, "2 captions but 1 entries of image_of_caption"),
        (["a"], [0], ["a", "b"], "2 short captions for 1 captions"),
        (["a"], [1], None, "must name each of the 1 pictures, and no other"),
        ([], [], None, "must name each of the 1 pictures"),
        (["a", "b"], [0, -1], None, "and no other"),
    ],
)
def test_a_set_that_does_not_fit_together_is_refused(
    captions: list[str], image_of_caption: list[int], short_captions: list[str] | None, reason: str
) -> None:
    with pytest.raises(ValueError, match=reason):
        RetrievalSet("x", "p", [Rendered("red")], captions, image_of_caption, short_captions, {})
