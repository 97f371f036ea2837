"""WebDataset shards without an index: one pass over a tar finds its pictures and captions."""

import json
import tarfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import Any

from debias_diffusion.data.pictures import PICTURE_SUFFIXES
from debias_diffusion.data.shards import picture_digest

_LARGEST = {"picture": 1 << 28, "text": 1 << 22}
"""Bytes beyond which a member is passed over: a name and a size in a tar cost nothing to write."""
_LARGEST_EXTENSION = 1 << 20  # bytes of a header that holds long names; tarfile reads it whole, whatever size it claims
_EXTENSIONS = (
    tarfile.GNUTYPE_LONGNAME,
    tarfile.GNUTYPE_LONGLINK,
    tarfile.XHDTYPE,
    tarfile.XGLTYPE,
    tarfile.SOLARIS_XHDTYPE,
)
_SPARSE = "stored with holes (GNU sparse), which a shard's pictures and texts never are"
_BROKEN = (tarfile.TarError, EOFError, ValueError, ArithmeticError, LookupError, RecursionError)
"""What tarfile raises for headers that make no sense."""


class _Header(tarfile.TarInfo):
    """A member's header, refused before tarfile follows a size that leads back, or reads one that nothing could hold."""

    @classmethod
    def frombuf(cls, buf: bytes | bytearray, encoding: str, errors: str) -> "_Header":
        header = super().frombuf(buf, encoding, errors)
        if header.size < 0:
            raise tarfile.ReadError(f"{header.name!r} has the size {header.size:,}")
        if header.type in _EXTENSIONS and header.size > _LARGEST_EXTENSION:
            raise tarfile.ReadError(f"the header {header.name!r} has the size {header.size:,}")
        if header.type == tarfile.GNUTYPE_SPARSE:
            raise tarfile.ReadError(f"{header.name!r} is {_SPARSE}")
        return header


@dataclass
class _Sample:
    """The members of one stem, which stand together in a tar."""

    stem: str
    key: str
    picture: tuple[int, int, str] | None = None
    caption: str | None = None


@dataclass
class _Rows:
    """What a pass has found so far, in the form of the index that `debias-diffusion pack` writes."""

    rows: list[list[Any]] = field(default_factory=list)
    left_out: Counter[str] = field(default_factory=Counter)

    def add(self, sample: _Sample | None) -> None:
        """Keeps a sample that has picture and caption, and counts any other."""
        if sample is None:
            return
        if sample.picture is None:
            self.left_out["texts_without_picture"] += sample.caption is not None
        elif sample.caption is None:
            self.left_out["pictures_without_text"] += 1
        elif not sample.caption.strip():
            self.left_out["empty_captions"] += 1
        else:
            self.rows.append([len(self.rows), sample.key, sample.caption.strip(), *sample.picture])


def tar_index(file: Any, where: str) -> dict[str, Any]:
    """The rows of a tar in which the members of a sample share a name up to its first dot and stand together.

    A sample is a picture and a .txt, or a .json with "caption" (and "key"); other members are passed over, and names are
    keys, never paths. Returns `bytes`, `rows` ([number, key, caption, offset, size, digest] each) and `left_out`, counts
    by reason. Raises ValueError, opening with `where`, for what is no tar, was cut, or has headers that make no sense.
    """
    found, sample = _Rows(), None
    file.seek(0, 2)
    size = file.tell()
    file.seek(0)
    for tar, member in _members(file, size, where):
        stem, suffix = member_stem(member.name)
        if not member.isfile() or not stem:
            continue
        if sample is None or stem != sample.stem:
            found.add(sample)
            sample = _Sample(stem, stem)
        _read_member(tar, member, suffix, sample, found.left_out, where)
    found.add(sample)
    return {"bytes": size, "rows": found.rows, "left_out": dict(+found.left_out)}


def _members(file: Any, size: int, where: str) -> Iterator[tuple[tarfile.TarFile, tarfile.TarInfo]]:
    """Yields the members one after another, each further on than the last; none is held, so memory does not grow."""
    tar, end = None, 0
    while True:
        try:
            if tar is None:
                tar = tarfile.open(fileobj=file, mode="r:", tarinfo=_Header)  # noqa: SIM115  its file is the caller's
            member = tar.next()
            tar.members.clear()  # type: ignore[attr-defined]  # its stubs leave it out
            if member is None:
                file.seek(tar.offset)
                if file.read(tarfile.BLOCKSIZE) != bytes(tarfile.BLOCKSIZE):  # tarfile stops in silence at a broken one
                    raise EOFError(f"after {tar.offset:,} bytes there is neither a member nor the mark of the end")
                return
            _check_place(member, end, tar.offset, size)
            end = tar.offset
        except _BROKEN as error:
            raise ValueError(
                f"{where}: not a whole tar file ({error}); expected a WebDataset shard, not compressed"
            ) from error
        yield tar, member


def _check_place(member: tarfile.TarInfo, start: int, stop: int, size: int) -> None:
    """Refuses a member that lies elsewhere than between the last one's end and the next one's start: an extended header
    may give any size to it."""
    if member.issparse():
        raise tarfile.ReadError(f"{member.name!r} is {_SPARSE}")
    held = member.size if member.isfile() else 0
    if held < 0 or not start < member.offset_data <= member.offset_data + held <= stop:
        raise tarfile.ReadError(f"{member.name!r} at byte {start:,} has the size {member.size:,}")
    if stop > size:
        raise EOFError(f"unexpected end of data: {member.name!r} ends at byte {stop:,} of {size:,}")


def member_stem(name: str) -> tuple[str, str]:
    """A member's key and its suffix: folders count, and all that follows the first dot of the file's name is suffix.

    >>> member_stem("train/0001.jpg"), member_stem("a.b/c.seg.png"), member_stem("a/._0001.jpg")
    (('train/0001', '.jpg'), ('a.b/c', '.seg.png'), ('', ''))
    """
    path = PurePosixPath(name)
    stem, dot, suffix = path.name.partition(".")
    return (str(path.with_name(stem)), f"{dot}{suffix}".lower()) if stem else ("", "")


def _read_member(
    tar: tarfile.TarFile, member: tarfile.TarInfo, suffix: str, sample: _Sample, left_out: Counter[str], where: str
) -> None:
    kind = "picture" if suffix in PICTURE_SUFFIXES else "text" if suffix in (".txt", ".json") else ""
    opened = tar.extractfile(member) if kind else None
    if opened is None:
        return
    if member.size > _LARGEST[kind]:
        left_out[f"{kind}s_too_large"] += 1
        return
    data = opened.read()
    if kind == "picture":
        sample.picture = member.offset_data, member.size, picture_digest(data)
        return
    try:
        text = data.decode("utf-8-sig")
        if suffix == ".txt":
            sample.caption = text if sample.caption is None else sample.caption
            return
        about = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{where}: {member.name!r} is not UTF-8 text or not JSON ({error})") from error
    if isinstance(about, dict) and isinstance(about.get("caption"), str):
        sample.caption, sample.key = about["caption"], str(about.get("key", sample.key))
