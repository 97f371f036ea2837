"""Every kind of picture comes out as the RGB a viewer would see, and every broken one is refused with its reason."""

import io
import pickle
import resource
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image

from debias_diffusion.data.pictures import BadPicture, open_picture, relative_name

RED, WHITE = (200, 30, 10), (255, 255, 255)
ANY_FOLDER = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def gradient(width: int = 40, height: int = 30) -> Image.Image:
    """A picture in which no two rows or columns are alike, so that a lost part shows."""
    x, y = np.meshgrid(np.linspace(0, 255, width), np.linspace(0, 255, height))
    return Image.fromarray(np.stack([x, y, (x + y) / 2], axis=-1).astype(np.uint8))


def encoded(image: Image.Image, **how: object) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, **how)
    return buffer.getvalue()


def written(folder: Path, data: bytes, name: str = "picture") -> Path:
    path = folder / name
    path.write_bytes(data)
    return path


def corner(path: Path) -> tuple[int, ...]:
    image = open_picture(path)
    assert image.mode == "RGB"
    pixel = image.getpixel((0, 0))
    assert isinstance(pixel, tuple)
    return pixel


def test_rgb_comes_out_as_it_went_in(tmp_path: Path) -> None:
    path = written(tmp_path, encoded(gradient(), format="PNG"))
    assert np.array_equal(np.asarray(open_picture(path)), np.asarray(gradient()))


@pytest.mark.parametrize(
    ("mode", "value", "how", "expected"),
    [
        ("L", 77, {"format": "PNG"}, (77, 77, 77)),
        ("1", 1, {"format": "PNG"}, WHITE),
        ("1", 0, {"format": "PNG"}, (0, 0, 0)),
        ("CMYK", (0, 255, 255, 0), {"format": "TIFF"}, (255, 0, 0)),
        ("RGBA", (*RED, 255), {"format": "PNG"}, RED),
        ("RGBA", (*RED, 0), {"format": "PNG"}, WHITE),
        ("RGBA", (0, 0, 0, 51), {"format": "PNG"}, (204, 204, 204)),
        ("LA", (0, 0), {"format": "PNG"}, WHITE),
        ("LA", (90, 255), {"format": "PNG"}, (90, 90, 90)),
        ("RGB", RED, {"format": "PNG", "transparency": RED}, WHITE),
        ("L", 77, {"format": "PNG", "transparency": 77}, WHITE),
        ("1", 0, {"format": "PNG", "transparency": 0}, WHITE),
        ("I;16", 65535, {"format": "PNG"}, WHITE),
        ("I;16", 257 * 100, {"format": "PNG"}, (100, 100, 100)),
        ("I;16", 257 * 100 + 129, {"format": "PNG"}, (101, 101, 101)),
        ("I;16", 300, {"format": "TIFF"}, (1, 1, 1)),
        ("I;16B", 257 * 100, {"format": "TIFF"}, (100, 100, 100)),
    ],
)
def test_each_mode_has_the_colour_a_viewer_sees(
    tmp_path: Path, mode: str, value: object, how: dict[str, object], expected: tuple[int, ...]
) -> None:
    path = written(tmp_path, encoded(Image.new(mode, (3, 2), value), **how))
    assert corner(path) == expected


def test_a_cmyk_jpeg_keeps_its_colours(tmp_path: Path) -> None:
    path = written(tmp_path, encoded(Image.new("CMYK", (16, 16), (0, 255, 255, 0)), format="JPEG", quality=100))
    assert np.abs(np.subtract(corner(path), (255, 0, 0))).max() <= 3


@pytest.mark.parametrize(("alpha", "expected"), [(255, RED), (0, WHITE)])
def test_a_palette_with_transparency_is_laid_on_white(tmp_path: Path, alpha: int, expected: tuple[int, ...]) -> None:
    image = Image.new("P", (3, 2), 0)
    image.putpalette([*RED, 1, 2, 3])
    path = written(tmp_path, encoded(image, format="PNG", transparency=bytes([alpha, 255])))
    assert Image.open(path).mode == "P"
    assert corner(path) == expected


def test_an_animation_shows_its_first_frame(tmp_path: Path) -> None:
    frames = [Image.new("RGB", (4, 4), colour) for colour in ("red", "blue")]
    path = written(tmp_path, encoded(frames[0], format="GIF", save_all=True, append_images=frames[1:]))
    assert corner(path) == (255, 0, 0)


def test_the_orientation_tag_is_not_applied(tmp_path: Path) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    path = written(tmp_path, encoded(gradient(40, 30), format="JPEG", exif=exif))
    assert open_picture(path).size == (40, 30)


def test_the_picture_outlives_its_file(tmp_path: Path) -> None:
    path = written(tmp_path, encoded(gradient(), format="PNG"))
    image = open_picture(path)
    path.unlink()
    assert image.resize((5, 5)).size == (5, 5)


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "the file is empty (0 bytes)"),
        (b"<html>404</html>", "this is not a picture that Pillow can read"),
        (encoded(Image.new("F", (2, 2), 0.5), format="TIFF"), "32-bit floats"),
        (encoded(Image.new("I", (2, 2), 1 << 20), format="TIFF"), "32-bit integers"),
        (encoded(gradient(), format="JPEG")[:700], "truncated"),
    ],
    ids=["empty", "html", "float", "int32", "truncated"],
)
def test_a_bad_picture_is_refused_with_path_and_reason(tmp_path: Path, data: bytes, reason: str) -> None:
    path = written(tmp_path, data)
    with pytest.raises(BadPicture) as caught:
        open_picture(path)
    assert reason in caught.value.reason
    assert caught.value.path == path
    assert str(caught.value) == f"{path}: {caught.value.reason}"


def test_a_missing_picture_and_a_folder_are_told_apart(tmp_path: Path) -> None:
    with pytest.raises(BadPicture, match="there is no such file"):
        open_picture(tmp_path / "none.jpg")
    with pytest.raises(BadPicture, match="this is a folder"):
        open_picture(tmp_path)


def test_a_decompression_bomb_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 100)
    with pytest.raises(BadPicture, match="decompression bomb"):
        open_picture(written(tmp_path, encoded(gradient(), format="PNG")))


def test_running_out_of_open_files_is_not_blamed_on_the_picture(tmp_path: Path) -> None:
    path = written(tmp_path, encoded(gradient(), format="PNG"))
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, hard))
    try:
        with pytest.raises(OSError, match="Too many open files"):
            open_picture(path)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_the_refusal_survives_the_trip_out_of_a_worker_process() -> None:
    error = pickle.loads(pickle.dumps(BadPicture(Path("a.jpg"), "truncated")))
    assert (error.path, error.reason, str(error)) == (Path("a.jpg"), "truncated", "a.jpg: truncated")


@pytest.mark.parametrize("how", [{"format": "JPEG"}, {"format": "JPEG", "progressive": True}, {"format": "PNG"}])
def test_a_cut_file_is_refused_or_whole_never_half_grey(tmp_path: Path, how: dict[str, object]) -> None:
    data = encoded(gradient(), **how)
    whole = np.asarray(open_picture(written(tmp_path, data)))
    refused = 0
    for length in range(len(data)):
        path = written(tmp_path, data[:length])
        try:
            image = open_picture(path)
        except BadPicture:
            refused += 1
        else:
            assert np.array_equal(np.asarray(image), whole), f"cut at {length} of {len(data)}"
    assert refused >= len(data) - 24  # a cut within the end marks loses no pixel


SAMPLES = [
    encoded(gradient().convert(mode), **how)
    for mode, how in [
        ("RGB", {"format": "JPEG"}),
        ("RGBA", {"format": "PNG"}),
        ("P", {"format": "GIF"}),
        ("RGB", {"format": "TIFF"}),
        ("RGB", {"format": "WEBP"}),
        ("RGB", {"format": "BMP"}),
    ]
]


@ANY_FOLDER
@given(st.sampled_from(SAMPLES), st.lists(st.tuples(st.integers(0, 399), st.integers(0, 255)), min_size=1, max_size=9))
def test_damaged_bytes_give_a_picture_or_a_refusal_and_nothing_else(
    tmp_path: Path, data: bytes, damage: list[tuple[int, int]]
) -> None:
    broken = bytearray(data)
    for place, value in damage:
        broken[place % len(broken)] = value
    try:
        image = open_picture(written(tmp_path, bytes(broken)))
    except BadPicture:
        return
    assert image.mode == "RGB"


@pytest.mark.parametrize("name", ["a.jpg", "sam/images/sa_1.jpg", "./a.jpg", "a..b/..c.jpg", "a b.jpg", "ü.jpg"])
def test_names_that_stay_inside_are_kept(name: str) -> None:
    assert relative_name(name, "here") == name


@pytest.mark.parametrize(
    "name", ["/etc/a.jpg", "../a.jpg", "a/../../b.jpg", "a/..", "..", "\\a.jpg", "a\\..\\b.jpg", "C:\\a.jpg", "a\0.jpg"]
)
def test_names_that_lead_out_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match=r"^rows\.jsonl:3: image .* leads out of the image folder"):
        relative_name(name, "rows.jsonl:3")


def test_an_empty_name_is_refused() -> None:
    with pytest.raises(ValueError, match="the image name is empty"):
        relative_name(" ", "here")


def test_real_pictures_open(shared: Path) -> None:
    paths = sorted((shared / "data/coco_ccby/images").glob("*.jpg"))
    assert len(paths) == 60
    for path in paths:
        assert max(open_picture(path).size) <= 384
