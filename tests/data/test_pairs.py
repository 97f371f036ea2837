"""Training pairs: each source read as it lies, what is left out counted, and a bad row named by file and place."""

import json
import os
import pickle
import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from debias_diffusion.data import text_files
from debias_diffusion.data.packed import PackedStrings
from debias_diffusion.data.pairs import Pairs, open_pairs, read_folder, read_manifest, read_sharegpt4v
from debias_diffusion.data.pictures import BadPicture
from debias_diffusion.data.text_files import json_array


def picture(path: Path, paint: str = "red") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (4, 4), paint).save(path)
    return path


def colour(image: Image.Image) -> str:
    """The picture's colour by name: JPEG moves the numbers a little."""
    pixel = image.getpixel((0, 0))
    assert isinstance(pixel, tuple)
    return ("red", "green", "blue")[max(range(3), key=lambda channel: pixel[channel])]


def record(image: str, caption: str, **more: object) -> dict[str, object]:
    turns = [{"from": "human", "value": "<image>\nDescribe it."}, {"from": "gpt", "value": caption}]
    return {"id": Path(image).stem, "image": image, "conversations": turns, **more}


def write_json(path: Path, records: Sequence[object]) -> Path:
    path.write_text(json.dumps(records), encoding="utf-8")
    return path


def write_lines(path: Path, *rows: object) -> Path:
    path.write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows), encoding="utf-8")
    return path


@pytest.fixture
def captions_json(tmp_path: Path) -> Path:
    """Six records in the owners' form: two to hold out, one empty caption, one picture that is not there."""
    for name in ("sam/images/sa_1.jpg", "sam/images/sa_2.jpg", "coco/train2017/000000000009.jpg"):
        picture(tmp_path / name)
    return write_json(
        tmp_path / "captions.json",
        [
            record("sam/images/sa_1.jpg", "Held out one."),
            record("sam/images/sa_2.jpg", "Held out two."),
            record("coco/train2017/000000000009.jpg", "A red square.\n\nIt is café red."),
            record("coco/train2017/000000000025.jpg", " \n "),
            record("llava/llava_pretrain/images/00453/004539375.jpg", "Not there."),
            record("sam/images/sa_2.jpg", "The same picture again."),
        ],
    )


def test_sharegpt4v_trains_on_everything_but_the_held_out(captions_json: Path) -> None:
    pairs = read_sharegpt4v(captions_json, captions_json.parent, held_out=2)
    assert list(pairs.keys) == ["000000000009", "004539375", "sa_2"]
    assert list(pairs.captions) == ["A red square.\n\nIt is café red.", "Not there.", "The same picture again."]
    assert pairs.pictures[0] == captions_json.parent / "coco/train2017/000000000009.jpg"
    assert (pairs.name, len(pairs), pairs.left_out) == ("captions", 3, {"empty_captions": 1})
    assert colour(pairs.open(0)) == "red"


def test_sharegpt4v_held_out_is_the_rest(captions_json: Path) -> None:
    pairs = read_sharegpt4v(captions_json, captions_json.parent, held_out=2, split="held_out")
    assert list(pairs.captions) == ["Held out one.", "Held out two."]
    assert pairs.left_out == {}


def test_held_out_counts_records_not_captions(captions_json: Path) -> None:
    pairs = read_sharegpt4v(captions_json, captions_json.parent, held_out=4)
    assert list(pairs.captions) == ["Not there.", "The same picture again."]
    assert pairs.left_out == {}


def test_the_default_holds_out_a_thousand(tmp_path: Path) -> None:
    path = write_json(tmp_path / "a.json", [record(f"sam/images/sa_{n}.jpg", f"Caption {n}.") for n in range(1003)])
    assert list(open_pairs(path).captions) == ["Caption 1000.", "Caption 1001.", "Caption 1002."]
    assert len(read_sharegpt4v(path, tmp_path, split="held_out")) == 1000


def test_a_file_that_is_all_held_out_says_so(captions_json: Path) -> None:
    with pytest.raises(ValueError, match=r"6 records, all held out \(held_out=1,000\); .* smaller held_out"):
        open_pairs(captions_json)


def test_a_missing_picture_shows_only_when_opened(captions_json: Path) -> None:
    pairs = open_pairs(captions_json, held_out=2)
    with pytest.raises(BadPicture, match=r"004539375\.jpg: there is no such file"):
        pairs.open(1)


def test_images_may_lie_elsewhere(captions_json: Path, tmp_path: Path) -> None:
    root = tmp_path / "elsewhere"
    picture(root / "coco/train2017/000000000009.jpg", "blue")
    pairs = open_pairs(captions_json, root, held_out=2)
    assert colour(pairs.open(0)) == "blue"
    with pytest.raises(ValueError, match="there is no such folder; expected the folder that the images lie in"):
        open_pairs(captions_json, tmp_path / "nowhere")


def test_a_wrong_split_lists_the_right_ones(captions_json: Path) -> None:
    with pytest.raises(ValueError, match="split is 'val', expected one of train, held_out"):
        read_sharegpt4v(captions_json, captions_json.parent, split="val")


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        (record("/etc/a.jpg", "x"), r"image '/etc/a.jpg' leads out of the image folder"),
        (record("sam/../../a.jpg", "x"), r"leads out of the image folder"),
        (record("", "x"), r"the image name is empty"),
        ({"id": "1", "conversations": []}, r"the key 'image' is missing; it has 'id', 'conversations'"),
        ({"image": 5, "conversations": []}, r"'image' is a number, expected a string"),
        ({"image": "a.jpg", "conversations": "x"}, r"'conversations' is a string, expected a list"),
        ({"image": "a.jpg", "conversations": [{"from": "human", "value": "x"}]}, r"no turn .* is from \"gpt\""),
        ({"image": "a.jpg", "conversations": [{"from": "gpt", "value": None}]}, r"'value' is null, expected a string"),
        (["a.jpg"], r"got a list, expected an object"),
        (12, r"got a number, expected an object"),
    ],
)
def test_a_bad_record_is_named_by_its_number(tmp_path: Path, bad: object, reason: str) -> None:
    path = write_json(tmp_path / "a.json", [record("a.jpg", "x"), record("b.jpg", "y"), bad])
    with pytest.raises(ValueError, match=rf"a\.json: record 2 \(counted from 0\).*{reason}"):
        read_sharegpt4v(path, tmp_path, held_out=0)


@pytest.mark.parametrize("chunk", [1, 7, 1 << 20])
@pytest.mark.parametrize("indent", [None, 2])
def test_an_array_is_read_the_same_in_pieces(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chunk: int, indent: int | None
) -> None:
    records = [record(f"{n}.jpg", 'quotes " braces }] and 🦊, ] commas') for n in range(5)]
    path = tmp_path / "a.json"
    path.write_text("\n " * 3 + json.dumps(records, indent=indent, ensure_ascii=False), encoding="utf-8")
    monkeypatch.setattr(text_files, "_CHUNK", chunk)
    assert [row for _, row in json_array(path)] == records


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ('[{"a": 1}, {"a": 2', r"record 1 \(counted from 0\): not valid JSON, or the file was cut"),
        ('[{"a": 1}', r"record 1 \(counted from 0\): not valid JSON, or the file was cut"),
        ('[{"a": 1}, {a: 2}]', r"record 1 \(counted from 0\): not valid JSON"),
        ('{"a": 1}', r"expected a JSON array of records, got a file that starts"),
        ("", r"expected a JSON array of records"),
    ],
)
def test_a_cut_or_broken_array_is_refused(tmp_path: Path, text: str, reason: str) -> None:
    path = tmp_path / "a.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=reason):
        list(json_array(path))


def test_a_broken_record_does_not_drag_in_the_rest_of_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_files, "_CHUNK", 100)
    monkeypatch.setattr(text_files, "_LARGEST_RECORD", 1000)
    path = tmp_path / "a.json"
    path.write_bytes(b'[{"a" 1},' + b" " * 50_000 + b"\xff")  # the last byte fails to decode if it is ever reached
    with pytest.raises(ValueError, match="record 0"):
        list(json_array(path))


@pytest.mark.parametrize("name", ["deep.json", "deep.jsonl"])
def test_json_nested_without_end_is_refused_not_a_crash(tmp_path: Path, name: str) -> None:
    nest = '{"image": ' * 100_000
    (tmp_path / name).write_text(f"[{nest}" if name.endswith("json") else nest)
    with pytest.raises(ValueError, match=r"deep\.jsonl?: ?.*nested too deeply"):
        open_pairs(tmp_path / name)
    with pytest.raises(ValueError, match="nested too deeply"):
        text_files.json_document(tmp_path / name)


def test_a_manifest_is_relative_to_its_folder_and_keeps_its_keys(tmp_path: Path) -> None:
    picture(tmp_path / "images/a.jpg", "blue")
    path = write_lines(
        tmp_path / "mine.jsonl",
        {"image": "images/a.jpg", "caption": "One.\u2028Still one.", "id": 7},
        "",
        {"image": "images/b.jpg", "caption": "Two.", "key": "b", "short_caption": "2"},
        {"image": "images/c.jpg", "caption": ""},
        "   ",
        {"image": "images/d.jpg", "caption": "Three.", "extra": [1]},
    )
    pairs = open_pairs(str(path))
    assert list(pairs.keys) == ["7", "b", "images/d.jpg"]
    assert list(pairs.captions) == ["One.\u2028Still one.", "Two.", "Three."]
    assert (pairs.name, pairs.left_out) == ("mine", {"empty_captions": 1})
    assert colour(pairs.open(0)) == "blue"
    assert read_manifest(path, tmp_path / "images").pictures[0] == tmp_path / "images/images/a.jpg"


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        ('{"image": "a.jpg", ', "not valid JSON .* expected one JSON object a line"),
        ('["a.jpg"]', "got a list, expected one JSON object a line"),
        ({"caption": "x"}, "the key 'image' is missing; it has 'caption'"),
        ({"image": "a.jpg"}, "the key 'caption' is missing"),
        ({"image": "a.jpg", "caption": ["x"]}, "'caption' is a list, expected a string"),
        ({"image": "a.jpg", "caption": None}, "'caption' is null, expected a string"),
        ({"image": "a.jpg", "caption": "x", "short_caption": 1}, "'short_caption' is a number, expected a string"),
        ({"image": "a.jpg", "caption": "x", "id": {}}, "'id' is {}, expected a string or a number"),
        ({"image": "../a.jpg", "caption": "x"}, "leads out of the image folder"),
        ({"image": "/a.jpg", "caption": "x"}, "leads out of the image folder"),
    ],
)
def test_a_bad_line_is_named_by_file_and_number(tmp_path: Path, bad: object, reason: str) -> None:
    path = write_lines(tmp_path / "mine.jsonl", {"image": "a.jpg", "caption": "x"}, "", bad)
    with pytest.raises(ValueError, match=rf"mine\.jsonl:3: .*{reason}"):
        read_manifest(path)


def test_a_line_that_is_not_utf8_is_named(tmp_path: Path) -> None:
    path = tmp_path / "mine.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"image": "a.jpg", "caption": "x"}\n{"image": "b.jpg", "caption": "caf\xe9"}\n')
    with pytest.raises(ValueError, match=r"mine\.jsonl:2: not valid JSON .*utf-8"):
        read_manifest(path)


def test_a_folder_pairs_pictures_with_the_text_beside_them(tmp_path: Path) -> None:
    picture(tmp_path / "b.png", "blue")
    (tmp_path / "b.txt").write_bytes("\ufeffThe whole text.\r\nTwo lines.\n".encode())
    picture(tmp_path / "a/deep/C.JPG")
    (tmp_path / "a/deep/C.txt").write_text("Deep.")
    picture(tmp_path / "a/alone.jpg")
    (tmp_path / "a/nobody.txt").write_text("No picture.")
    (tmp_path / "a/notes.md").write_text("Not a caption.")
    picture(tmp_path / "empty.jpg")
    (tmp_path / "empty.txt").write_text("\n")
    (tmp_path / "._b.txt").write_bytes(b"\xff\xfe junk")
    picture(tmp_path / ".cache/x.jpg")
    pairs = open_pairs(tmp_path)
    assert list(pairs.keys) == ["a/deep/C.JPG", "b.png"]
    assert list(pairs.captions) == ["Deep.", "The whole text.\nTwo lines."]
    assert pairs.left_out == {"pictures_without_text": 1, "empty_captions": 1, "texts_without_picture": 1}
    assert pairs.name == tmp_path.name
    assert colour(pairs.open(1)) == "blue"


def test_a_picture_whose_name_is_not_utf8_is_left_out_and_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for name in (b"caf\xe9.png", b"cafe.png"):
        Path(picture(tmp_path / "new.png")).rename(tmp_path / os.fsdecode(name))
        (tmp_path / os.fsdecode(name)).with_suffix(".txt").write_text("A cup.")
    pairs = open_pairs(tmp_path)
    assert list(pairs.keys) == ["cafe.png"]
    assert pairs.left_out == {"pictures_not_named_in_utf8": 1}
    assert r"left out b'caf\xe9.png': its name is not UTF-8" in caplog.text


def test_a_text_that_is_not_utf8_is_named(tmp_path: Path) -> None:
    picture(tmp_path / "a.jpg")
    (tmp_path / "a.txt").write_bytes(b"caf\xe9")
    with pytest.raises(ValueError, match=r"a\.txt: not UTF-8 text"):
        read_folder(tmp_path)


def test_a_source_without_pairs_says_what_it_holds(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"holds no picture with a caption \(it is empty\)"):
        open_pairs(tmp_path)
    picture(tmp_path / "a.jpg")
    with pytest.raises(ValueError, match=r"holds no picture with a caption \(1 picture without text\)"):
        open_pairs(tmp_path)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("pairs.csv", r"got a \.csv file; expected a ShareGPT4V \.json file, a \.jsonl manifest, a folder"),
        ("pairs", r"got a file without suffix; expected"),
        ("none.jsonl", r"there is no such file or folder; expected"),
    ],
)
def test_any_other_source_is_refused_in_one_line(tmp_path: Path, name: str, reason: str) -> None:
    if not name.startswith("none"):
        (tmp_path / name).write_text("x")
    with pytest.raises(ValueError, match=reason) as caught:
        open_pairs(tmp_path / name)
    assert "\n" not in str(caught.value)


def test_a_folder_takes_no_image_root(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="holds its own pictures; leave it out"):
        open_pairs(tmp_path, tmp_path)


def test_columns_of_unlike_length_are_refused() -> None:
    with pytest.raises(ValueError, match="1 keys, 0 captions and 0 pictures"):
        Pairs("x", ["a"], [], [])


@given(st.lists(st.text()), st.integers(-9, 9), st.slices(8))
def test_packed_strings_are_a_list(strings: list[str], index: int, part: slice) -> None:
    packed = PackedStrings()
    for text in strings:
        packed.append(text)
    packed = pickle.loads(pickle.dumps(packed))
    assert list(packed) == strings
    assert packed[part] == strings[part]
    if -len(strings) <= index < len(strings):
        assert packed[index] == strings[index]
    else:
        with pytest.raises(IndexError):
            packed[index]


def test_half_a_surrogate_pair_is_replaced(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "mine.jsonl", '{"image": "a.jpg", "caption": "a \\ud83d b"}')
    assert list(read_manifest(path).captions) == ["a ? b"]


def test_real_captions_read_as_a_manifest(shared: Path, tmp_path: Path) -> None:
    source = shared / "data/asp_storybook"
    rows = [json.loads(line) for line in (source / "pairs.jsonl").read_text(encoding="utf-8").splitlines()]
    path = shutil.copy(source / "pairs.jsonl", tmp_path / "pairs.jsonl")
    pairs = open_pairs(path, source)
    assert len(pairs) == len(rows) == 305
    assert list(pairs.keys) == [row["id"] for row in rows]
    assert pairs.open(0).size == Image.open(source / rows[0]["image"]).size
