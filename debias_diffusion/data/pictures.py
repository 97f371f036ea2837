"""A picture file as RGB pixels, or a refusal that names the file and the reason."""

import errno
import io
import re
import struct
import zlib
from pathlib import Path

import numpy as np
from PIL import Image

PICTURE_SUFFIXES = frozenset({".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff"})

# What Pillow's readers were seen to raise on broken bytes. MemoryError is left out on purpose: it speaks of the
# machine, not of the picture, and a loader that skips bad pictures must not skip over it.
_PILLOW_ERRORS = (
    OSError,
    SyntaxError,
    ValueError,
    TypeError,
    AttributeError,
    LookupError,
    ArithmeticError,
    EOFError,
    NotImplementedError,
    struct.error,
    zlib.error,
    Image.DecompressionBombError,
    Image.DecompressionBombWarning,
)
_MACHINE_ERRNOS = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM})
_ESCAPE = re.compile(r"^[\\/]|^[A-Za-z]:|(?:^|[\\/])\.\.(?:[\\/]|$)|\0")


class BadPicture(ValueError):
    """A picture that cannot be shown to a model; `path` and `reason` say which one and why."""

    def __init__(self, path: Path, reason: str) -> None:
        super().__init__(path, reason)  # both in args, so that the error survives the trip out of a worker process
        self.path = path
        self.reason = reason

    def __str__(self) -> str:
        return f"{self.path}: {self.reason}"


_MAX_ASPECT = 100
"""Longest side over shortest: a strip of 1 x 100,000 pixels is a tiny file, but 15 GB once its short side is 224."""


def open_picture(path: Path, min_side: int | None = None) -> Image.Image:
    """Returns the picture, fully decoded, as RGB.

    Transparent parts come out white: that is the page such pictures were drawn for, while dropping the alpha channel
    shows whatever colour happens to lie under it, often black. 16-bit greyscale is scaled to 8 bits, which Pillow's own
    conversion would clip instead. Of an animation the first frame is taken. A camera's orientation tag is not applied,
    because the published retrieval numbers are measured without it.

    With `min_side` a large JPEG may come back smaller, at 1/2, 1/4 or 1/8, its short side never below `min_side`: its
    decoder then leaves out the frequencies that a later resize would average away, and takes a fraction of the time.

    Raises `BadPicture` for a file that is missing, empty, truncated, not a picture, or without a defined RGB form.
    """
    return _decoded(path, path, min_side)


def decode_picture(data: bytes, path: Path, min_side: int | None = None) -> Image.Image:
    """Returns the picture in the bytes of a file, as `open_picture` does; `path` names it in messages."""
    return _decoded(io.BytesIO(data), path, min_side)


def _decoded(source: Path | io.BytesIO, path: Path, min_side: int | None) -> Image.Image:
    try:
        with Image.open(source) as image:
            if max(image.size) > _MAX_ASPECT * min(image.size):
                raise ValueError(
                    f"it is {image.width} x {image.height}: resized to a square's height it would fill the memory"
                )
            scale = _decoding_scale(image.size, min_side) if min_side else 1
            if scale > 1:
                image.draft(None, (image.width // scale, image.height // scale))
            image.load()
            return _to_rgb(image)
    except _PILLOW_ERRORS as error:
        if isinstance(error, OSError) and error.errno in _MACHINE_ERRNOS:
            raise
        raise BadPicture(path, _reason(path, error)) from error


def _decoding_scale(size: tuple[int, int], min_side: int) -> int:
    """The largest of 8, 4, 2 and 1 that leaves `min_side`, and whose rounding up at the far edges nobody sees.

    >>> _decoding_scale((1500, 2250), 448), _decoding_scale((301, 203), 64)
    (2, 1)
    """
    for scale in (8, 4, 2):
        if min(size) // scale >= min_side and all(-length % scale <= length / 1000 for length in size):
            return scale
    return 1


def relative_name(name: str, where: str) -> str:
    """Returns `name` unchanged if it stays below the folder it will be joined to.

    Raises `ValueError`, opening with `where`, for an empty, absolute or climbing ("..") name.

    >>> relative_name("coco/train2017/000000000009.jpg", "captions.json: record 7")
    'coco/train2017/000000000009.jpg'
    """
    if not name.strip():
        raise ValueError(f"{where}: the image name is empty; expected a path below the image folder")
    if _ESCAPE.search(name):
        raise ValueError(
            f"{where}: image {name!r} leads out of the image folder; expected a path relative to it, without '..'"
        )
    return name


def _to_rgb(image: Image.Image) -> Image.Image:
    if image.mode == "I" or image.mode.startswith("I;16"):
        return _from_16_bits(image)
    if image.mode == "F":
        raise ValueError("its pixels are 32-bit floats, which have no agreed black and white; save it with 8 bits")
    if _has_transparency(image):
        # Pillow composites two RGBA pictures only.
        white = Image.new("RGBA", image.size, "white")
        return Image.alpha_composite(white, image.convert("RGBA")).convert("RGB")
    return image.convert("RGB")


def _has_transparency(image: Image.Image) -> bool:
    if image.mode in ("RGBA", "RGBa", "LA", "La", "PA") or "transparency" in image.info:
        return True
    return image.mode == "P" and image.palette is not None and image.palette.mode.endswith("A")


def _from_16_bits(image: Image.Image) -> Image.Image:
    # Older Pillow opens 16-bit PNG and PGM files as "I", the mode it also uses for 32-bit values.
    values = np.asarray(image).astype(np.int64)
    if values.size and not 0 <= values.min() <= values.max() <= 65535:
        raise ValueError("its pixels are 32-bit integers, which have no agreed black and white; save it with 8 bits")
    return Image.fromarray(((values + 128) // 257).astype(np.uint8)).convert("RGB")


def _reason(path: Path, error: BaseException) -> str:
    if isinstance(error, FileNotFoundError | NotADirectoryError):
        return "there is no such file"
    if isinstance(error, IsADirectoryError):
        return "this is a folder, not a picture"
    if isinstance(error, OSError) and error.errno == errno.ENAMETOOLONG:
        return "its name is too long for the file system"
    if path.exists() and path.stat().st_size == 0:
        return "the file is empty (0 bytes)"
    if isinstance(error, Image.UnidentifiedImageError):
        return "this is not a picture that Pillow can read"
    return f"{error}" or type(error).__name__
