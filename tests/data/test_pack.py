"""Packed shards: the same rows with smaller pictures, whatever interrupted the packing, and damage that shows."""

import io
import json
import shutil
import tarfile
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from debias_diffusion.data import pack as pack_module
from debias_diffusion.data.pack import pack
from debias_diffusion.data.pairs import open_pairs
from debias_diffusion.data.pictures import BadPicture, decode_picture
from debias_diffusion.data.shards import Shards


def noise(width: int, height: int, seed: int = 0) -> Image.Image:
    """A picture that JPEG cannot make tiny: shards are closed by size."""
    pixels = np.random.default_rng(seed).integers(0, 255, (height // 12, width // 12, 3), dtype=np.uint8)
    return Image.fromarray(pixels).resize((width, height), Image.Resampling.BICUBIC)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """Twelve rows: large and small JPEGs, a transparent PNG, a broken file, one that is missing, an empty caption."""
    folder = tmp_path / "source"
    folder.mkdir()
    rows = []
    for i in range(9):
        noise(300, 200 + i, i).save(folder / f"{i}.jpg", quality=95)
        rows.append((f"{i}.jpg", f"Picture {i} of café. It is number {i}."))
    noise(60, 50).save(folder / "small.jpg", quality=95)
    Image.new("RGBA", (60, 40), (255, 0, 0, 0)).save(folder / "clear.png")
    (folder / "broken.jpg").write_bytes((folder / "0.jpg").read_bytes()[:400])
    rows += [
        ("small.jpg", "Small."),
        ("broken.jpg", "Broken."),
        ("clear.png", "Clear."),
        ("gone.jpg", "Gone."),
        ("1.jpg", " "),
    ]
    lines = [json.dumps({"image": image, "caption": caption}) for image, caption in rows]
    (folder / "rows.jsonl").write_text("\n".join(lines), encoding="utf-8")
    return folder / "rows.jsonl"


def packed(source: Path, output: Path, **more) -> str:
    return pack(source, output, **{"short_side": 64, "workers": 1, **more})


def test_rows_come_back_in_order_with_smaller_pictures(source, tmp_path):
    said = packed(source, tmp_path / "packed")
    assert said.startswith(f"{tmp_path / 'packed'}: 11 pairs in 1 shard, ")
    assert "1 empty caption, 2 unreadable pictures" in said
    before, after = open_pairs(source), open_pairs(tmp_path / "packed")
    kept = [i for i in range(len(before)) if before.keys[i] not in ("broken.jpg", "gone.jpg")]
    assert isinstance(after, Shards)
    assert list(after.keys) == [before.keys[i] for i in kept]
    assert list(after.captions) == [before.captions[i] for i in kept]
    assert after.left_out == {"empty_captions": 1, "unreadable_pictures": 2}
    for j, i in enumerate(kept):
        small, large = after.open(j), before.open(i)
        assert min(small.size) == min(64, min(large.size))
        assert small.width / small.height == pytest.approx(large.width / large.height, abs=0.02)
        difference = np.asarray(small, float) - np.asarray(large.resize(small.size, Image.Resampling.LANCZOS), float)
        assert np.abs(difference).mean() < 4


def test_what_is_left_out_is_named_with_its_reason(source, tmp_path):
    packed(source, tmp_path / "packed")
    lines = [json.loads(line) for line in (tmp_path / "packed" / "left_out.jsonl").read_text().splitlines()]
    assert [line["key"] for line in lines] == ["broken.jpg", "gone.jpg", "1.jpg"]
    assert "no such file" in lines[1]["reason"]
    assert lines[2]["reason"] == "empty captions"


def test_pictures_and_texts_alone_are_named_too(source, tmp_path):
    for name in ("0.txt", "alone.txt"):
        (source.parent / name).write_text("A caption.")
    said = packed(source.parent, tmp_path / "packed")
    lines = [json.loads(line) for line in (tmp_path / "packed" / "left_out.jsonl").read_text().splitlines()]
    found = {line["key"]: line["reason"] for line in lines}
    assert found.pop("alone.txt") == "texts without picture"
    assert set(found) == {path.name for path in source.parent.iterdir() if path.suffix in (".jpg", ".png")} - {"0.jpg"}
    assert set(found.values()) == {"pictures without text"}
    assert "1 pair in 1 shard" in said
    assert "11 pictures without text, 1 text without picture" in said


def test_a_second_run_says_that_nothing_was_left_to_do(source, tmp_path):
    said = packed(source, tmp_path / "packed")
    assert packed(source, tmp_path / "packed") == f"nothing was left to do; {said}"
    (tmp_path / "packed" / "index.json").unlink()  # stopped before its last file
    assert packed(source, tmp_path / "packed") == said


def test_a_small_jpeg_is_kept_byte_for_byte(source, tmp_path):
    packed(source, tmp_path / "packed")
    with tarfile.open(tmp_path / "packed" / "shard-00000.tar") as tar:
        member = next(m for m in tar if m.name == "00000009.jpg")
        file = tar.extractfile(member)
        assert file is not None
        assert file.read() == (source.parent / "small.jpg").read_bytes()
        about = tar.extractfile("00000000.json")
        assert about is not None
        assert json.load(about) == {"key": "0.jpg", "caption": "Picture 0 of café. It is number 0."}


def test_workers_and_interruptions_change_no_byte(source, tmp_path, monkeypatch):
    small_shards = {"short_side": 128, "quality": 100, "shard_mb": 1}
    monkeypatch.setattr(pack_module, "_MEGABYTE", 1 << 16)
    packed(source, tmp_path / "whole", **small_shards)
    names = sorted(p.name for p in (tmp_path / "whole").iterdir())
    assert "shard-00002.tar" in names
    packed(source, tmp_path / "parallel", workers=2, **small_shards)
    cut = tmp_path / "cut"
    shutil.copytree(tmp_path / "whole", cut)
    for name in ("index.json", "left_out.jsonl", "shard-00001.json"):
        (cut / name).unlink()
    (cut / ".shard-00001.tar.99.partial").write_bytes(b"half")
    with pytest.raises(ValueError, match="not packed to the end; run the same"):
        open_pairs(cut)
    packed(source, cut, **small_shards)
    for other in ("parallel", "cut"):
        assert sorted(p.name for p in (tmp_path / other).iterdir()) == names
        for name in names:
            assert (tmp_path / other / name).read_bytes() == (tmp_path / "whole" / name).read_bytes(), (other, name)


@pytest.mark.parametrize(
    ("name", "change", "why"),
    [
        ("pack.json", lambda it: [1], r"pack\.json: got a list, expected an object with settings"),
        ("shard-00000.json", lambda it: [1], r"shard-00000\.json: got a list, expected an object"),
        ("shard-00000.json", lambda it: {**it, "rows": it["rows"][1:]}, r"shard-00000\.json: 10 rows and 2 left out"),
        ("shard-00000.json", lambda it: {**it, "first": 2, "next": 15}, r"shard-00000\.json: its first row is 2"),
        ("shard-00000.json", lambda it: {**it, "next": "x"}, r"shard-00000\.json: 'next' is a string"),
        ("shard-00000.json", lambda it: {**it, "bytes_before": "x"}, r"shard-00000\.json: 'bytes_before' is a string"),
        (
            "shard-00000.json",
            lambda it: {**it, "left_out": [5, 6]},
            r"shard-00000\.json: 'left_out' holds other things",
        ),
        (
            "shard-00000.json",
            lambda it: {**it, "rows": it["rows"] * 2, "next": it["next"] + len(it["rows"])},
            "end at row 24 of 13",
        ),
    ],
)
def test_a_damaged_index_is_never_gone_on_from(source, tmp_path, name, change, why):
    packed(source, tmp_path / "packed")
    (tmp_path / "packed" / "index.json").unlink()
    file = tmp_path / "packed" / name
    file.write_text(json.dumps(change(json.loads(file.read_text()))))
    with pytest.raises(ValueError, match=why):
        packed(source, tmp_path / "packed")
    assert not (tmp_path / "packed" / "index.json").exists()


def test_other_data_or_settings_do_not_go_into_one_folder(source, tmp_path):
    packed(source, tmp_path / "packed")
    with pytest.raises(ValueError, match=r"other data or settings \(short_side 64 -> 32\)"):
        packed(source, tmp_path / "packed", short_side=32)
    source.write_text(source.read_text().replace("number 0", "number zero"), encoding="utf-8")
    with pytest.raises(ValueError, match=r"other data or settings \(data "):
        packed(source, tmp_path / "packed")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "letter.txt").touch()
    with pytest.raises(ValueError, match="holds other things"):
        packed(source, tmp_path / "mine")
    with pytest.raises(ValueError, match="is packed already"):
        packed(tmp_path / "packed", tmp_path / "again")
    with pytest.raises(ValueError, match="--quality is 30, expected 50 to 100"):
        packed(source, tmp_path / "x", quality=30)


def test_damage_is_named_not_shown(source, tmp_path):
    packed(source, tmp_path / "packed")
    tar = tmp_path / "packed" / "shard-00000.tar"
    data = bytearray(tar.read_bytes())
    data[2000] ^= 1
    tar.write_bytes(bytes(data))
    shards = open_pairs(tmp_path / "packed")
    with pytest.raises(BadPicture, match="not those that were packed; the shard is damaged"):
        shards.open(0)
    assert shards.open(1)
    tar.write_bytes(bytes(data[:-1024]))
    with pytest.raises(ValueError, match="missing or cut short"):
        open_pairs(tmp_path / "packed")


def test_identity_follows_the_content_and_not_the_place(source, tmp_path):
    packed(source, tmp_path / "packed")
    packed(source, tmp_path / "moved")
    one, two = open_pairs(tmp_path / "packed"), open_pairs(tmp_path / "moved")
    identities = [one.picture(i).identity for i in range(len(one))]
    assert identities == [two.picture(i).identity for i in range(len(two))]
    assert len(set(identities)) == len(identities)


@pytest.mark.parametrize(
    ("size", "side", "scale"), [((300, 200), 50, 4), ((301, 199), 64, 1), ((2002, 1001), 300, 2), ((300, 200), 150, 1)]
)
def test_large_jpegs_are_decoded_smaller_but_never_below_the_side_asked_for(size, side, scale):
    file = io.BytesIO()
    noise(*size).save(file, "JPEG", quality=95)
    whole, reduced = (decode_picture(file.getvalue(), Path("a.jpg"), s) for s in (None, side))
    assert whole.size == size
    assert reduced.size == tuple(-(-length // scale) for length in size)
    assert min(reduced.size) >= side
    small = [np.asarray(p.resize((32, 32), Image.Resampling.BICUBIC), float) for p in (whole, reduced)]
    assert np.abs(small[0] - small[1]).mean() < 1.5


def test_only_jpegs_are_decoded_smaller():
    file = io.BytesIO()
    noise(300, 200).save(file, "PNG")
    assert decode_picture(file.getvalue(), Path("a.png"), 50).size == (300, 200)
