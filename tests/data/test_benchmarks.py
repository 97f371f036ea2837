"""Each benchmark in its owners' layout, at a few items, with something missing, doubled or empty in it."""

import json
import shutil
from pathlib import Path

import pytest
from PIL import Image

from debias_diffusion.data.benchmarks import BENCHMARKS, load_benchmark
from debias_diffusion.data.retrieval_set import PictureFile, RetrievalSet

COLOURS = ["red", "blue", "green", "yellow", "white", "black", "orange", "purple"]
SHAREGPT4V_JSON = "share-captioner_coco_lcs_sam_1246k_1107.json"


def pictures(folder: Path, *names: str) -> None:
    """Pictures that all differ, unless more are asked for than there are colours."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, colour in zip(names, COLOURS):
        Image.new("RGB", (8, 8), colour).save(folder / name)


def write(path: Path, data: object) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(data if isinstance(data, str) else json.dumps(data), encoding="utf-8")


def write_lines(path: Path, *rows: object) -> None:
    write(path, "".join(json.dumps(row) + "\n" for row in rows))


def pairs_of(made: RetrievalSet) -> list[tuple[str, str]]:
    """(picture's file name, caption), in order."""
    names = [picture.path.name for picture in made.pictures if isinstance(picture, PictureFile)]
    assert len(names) == len(made.pictures)
    return [(names[image], caption) for image, caption in zip(made.image_of_caption, made.captions)]


def odd(made: RetrievalSet) -> dict[str, int]:
    """The counts that are not zero, without the two that every set has."""
    assert made.counts["images"] == len(made.pictures)
    assert made.counts["captions"] == len(made.captions)
    return {key: count for key, count in made.counts.items() if count and key not in ("images", "captions")}


def urban1k(root: Path) -> None:
    pictures(root / "image", "1.jpg", "2.jpg", "10.jpg", "11.jpg", "12.jpg")
    shutil.copy(root / "image/1.jpg", root / "image/12.jpg")
    write(root / "caption/1.txt", "\ufeffA first line. And more of it.\nA second line.")
    write(root / "caption/2.txt", "\nThe first line is blank.")
    write(root / "caption/10.txt", "Ten.\r\n")
    write(root / "caption/12.txt", "Ten.")
    write(root / "caption/13.txt", "No picture.")
    (root / "caption/._1.txt").write_bytes(b"\xff")


def dci(root: Path) -> None:
    pictures(root / "photos", "sa_1.jpg", "sa_2.jpg", "sa_3.jpg")
    write(
        root / "splits.json",
        {"train": ["9-data.json", "10-data.json"], "valid": ["2-data.json"], "test": ["1-data.json"]},
    )
    write(root / "complete/unused.json", {})
    annotations = {
        "9": ("sa_1.jpg", "A bus.", "It is 3.5 m\nhigh. "),
        "10": ("sa_2.jpg", "A dog", ""),
        "2": ("sa_3.jpg", "", "A cat sits."),
        "1": ("sa_4.jpg", "Gone.", "Gone too."),
    }
    for number, (image, short, extra) in annotations.items():
        record = {"image": image, "short_caption": short, "extra_caption": extra, "mask_data": {}, "summaries": {}}
        write(root / f"annotations/{number}-data.json", record)


def docci(root: Path) -> None:
    pictures(root / "images", "test_00000.jpg", "test_00001.jpg", "train_00000.jpg", "qual_test_00000.jpg")
    rows = [("train", "train_00000"), ("test", "test_00000"), ("qual_test", "qual_test_00000"), ("test", "test_00001")]
    write_lines(
        root / "docci_descriptions.jsonlines",
        *(
            {
                "example_id": name,
                "split": split,
                "image_file": f"{name}.jpg",
                "description": f"About {name}.\u2028 More.",
            }
            for split, name in [*rows, ("test", "test_00002")]
        ),
    )


def iiw(root: Path) -> None:
    pictures(root / "images_aar", "aar_test_04600.jpg", "aar_test_04601.jpg")
    pictures(root / "photos", "sa_9.jpg")
    shutil.copytree(root / "images_aar", root / "images")
    (root / "images/aar_test_04601.jpg").rename(root / "images/test_00731.jpg")
    write_lines(
        root / "IIW-400/data.jsonl",
        {"IIW": "A thistle.", "IIW-P5B": "A bee.", "image/key": "aar_test_04600", "objects": []},
        {"IIW": "A wall.", "image/key": "aar_test_04601"},
        {"IIW": "Lost.", "image/key": "aar_test_04602"},
    )
    write_lines(
        root / "DCI_Test/data.jsonl", {"IIW": "A balcony.\n\nBoxes.\n", "ex_id": "1-data.json", "image": "sa_9.jpg"}
    )
    write_lines(root / "DOCCI_Test/data.jsonl", {"DOCCI": "Not this.", "IIW": "A wall.", "image": "test_00731"})


def sharegpt4v(root: Path) -> None:
    pictures(root / "sam/images", "sa_1.jpg", "sa_2.jpg")
    turns = [{"from": "human", "value": "<image>\nDescribe."}, {"from": "gpt", "value": "One.\nTwo."}]
    records = [{"id": f"sa_{n}", "image": f"sam/images/sa_{n}.jpg", "conversations": turns} for n in range(1, 1001)]
    write(root / SHAREGPT4V_JSON, [*records, {"image": "sam/images/sa_1.jpg", "conversations": turns}])


def coco(root: Path) -> None:
    pictures(root / "images/val2017", "000000000139.jpg", "000000000285.jpg", "000000000632.jpg")
    images = [{"id": number, "file_name": f"{number:012}.jpg"} for number in (285, 139, 632, 724)]
    annotations = [{"id": k, "image_id": 139, "caption": f"A room {k}."} for k in range(6)]
    annotations += [{"id": 9, "image_id": 285, "caption": "A bear.\n"}, {"id": 10, "image_id": 724, "caption": "Gone."}]
    annotations.insert(2, {"id": 11, "image_id": 285, "caption": "A bear."})
    write(root / "annotations/captions_val2017.json", {"info": {}, "images": images, "annotations": annotations})


FLICKR = {"train": ["1.jpg", "2.jpg"], "val": ["3.jpg"], "test": ["4.jpg", "5.jpg"]}


def flickr_karpathy(root: Path) -> None:
    pictures(root / "flickr30k-images", "1.jpg", "2.jpg", "3.jpg", "4.jpg", "5.jpg", "6.jpg")
    images = [
        {"filename": name, "split": split, "sentences": [{"raw": f"{name} {k}", "tokens": []} for k in range(5)]}
        for split, names in FLICKR.items()
        for name in names
    ]
    write(root / "dataset_flickr30k.json", {"dataset": "flickr30k", "images": images[::-1]})


def flickr_splits(root: Path) -> None:
    """The lists made from Karpathy's file: one row a caption for training, one a picture for the rest."""
    flickr_karpathy(root)
    (root / "dataset_flickr30k.json").unlink()
    for split, names in FLICKR.items():
        rows = [{"image": f"flickr30k-images/{name}", "caption": [f"{name} {k}" for k in range(5)]} for name in names]
        if split == "train":
            rows = [{**row, "caption": caption} for row in rows for caption in row["caption"]]
        write(root / f"flickr30k_{split}.json", rows)


def flickr_token(root: Path) -> None:
    pictures(root / "flickr30k-images", "1.jpg", "2.jpg")
    lines = [f"{name}#{k}\t{name} | {k} .\n" for name in ("1.jpg", "2.jpg", "3.jpg") for k in range(2)]
    write(root / "results_20130124.token", "".join([*lines, "1.jpg#2\t\n"]))


def flickr_csv(root: Path) -> None:
    pictures(root / "flickr30k_images", "1.jpg", "2199200615.jpg")
    write(
        root / "results.csv",
        "image_name| comment_number| comment\n"
        "1.jpg| 0| Two men , one | bar .\n"
        "1.jpg| 1| 4 people .\n"
        "2199200615.jpg| 3| A dog .\n"
        "2199200615.jpg| 4   A dog runs across the grass .\n",
    )


LAYOUTS = {
    "urban1k": urban1k,
    "dci": dci,
    "dci-split": dci,
    "long-dci": dci,
    "docci": docci,
    "iiw-400": iiw,
    "iiw": iiw,
    "sharegpt4v-1k": sharegpt4v,
    "coco": coco,
    "coco-first5": coco,
    "flickr30k": flickr_karpathy,
    "flickr30k-raw": flickr_token,
    "flickr30k-1k": flickr_karpathy,
}


def test_urban1k_takes_first_lines(tmp_path: Path) -> None:
    urban1k(tmp_path)
    made = load_benchmark("urban1k", tmp_path)
    assert pairs_of(made) == [
        ("1.jpg", "A first line. And more of it."),
        ("2.jpg", ""),
        ("10.jpg", "Ten."),
        ("12.jpg", "Ten."),
    ]
    assert odd(made) == {
        "empty_captions": 1,
        "missing_pictures": 1,
        "dropped_captions": 1,
        "pictures_without_captions": 1,
        "duplicate_captions": 1,
        "duplicate_pictures": 1,
    }


@pytest.mark.parametrize(
    ("name", "captions"),
    [
        ("dci", ["A bus.It is 3.5 m\nhigh.", "A dog", "A cat sits."]),
        ("dci-split", ["A bus. It is 3. 5 m. high", "A dog", "A cat sits"]),
    ],
)
def test_dci_takes_every_split_in_either_joining(tmp_path: Path, name: str, captions: list[str]) -> None:
    dci(tmp_path)
    made = load_benchmark(name, tmp_path)
    assert pairs_of(made) == list(zip(["sa_1.jpg", "sa_2.jpg", "sa_3.jpg"], captions))
    assert made.short_captions == ["A bus.", "A dog", ""]
    assert odd(made) == {"missing_pictures": 1, "dropped_captions": 1}


def test_long_dci_goes_by_file_name_and_skips_empty_ones(tmp_path: Path) -> None:
    dci(tmp_path)
    (tmp_path / "splits.json").unlink()
    made = load_benchmark("long-dci", tmp_path)
    assert pairs_of(made) == [("sa_3.jpg", "A cat sits."), ("sa_1.jpg", "It is 3.5 m\nhigh.")]
    assert odd(made) == {"missing_pictures": 1, "dropped_captions": 1, "pictures_without_captions": 1}


def test_docci_takes_the_test_split_alone(tmp_path: Path) -> None:
    docci(tmp_path)
    made = load_benchmark("docci", tmp_path)
    assert pairs_of(made) == [(f"test_0000{n}.jpg", f"About test_0000{n}.\u2028 More.") for n in (0, 1)]
    assert odd(made) == {"missing_pictures": 1, "dropped_captions": 1}


def test_iiw_finds_each_parts_pictures(tmp_path: Path) -> None:
    iiw(tmp_path)
    made = load_benchmark("iiw", tmp_path)
    first = [("aar_test_04600.jpg", "A thistle."), ("aar_test_04601.jpg", "A wall.")]
    assert pairs_of(made) == [*first, ("sa_9.jpg", "A balcony.\n\nBoxes."), ("test_00731.jpg", "A wall.")]
    assert odd(made) == {
        "missing_pictures": 1,
        "dropped_captions": 1,
        "duplicate_captions": 1,
        "duplicate_pictures": 2,
    }
    for extra in ("DCI_Test", "DOCCI_Test", "photos", "images"):
        shutil.rmtree(tmp_path / extra)
    assert pairs_of(load_benchmark("iiw-400", tmp_path)) == first


def test_sharegpt4v_1k_is_the_first_thousand_records(tmp_path: Path) -> None:
    sharegpt4v(tmp_path)
    made = load_benchmark("sharegpt4v-1k", tmp_path)
    assert pairs_of(made) == [("sa_1.jpg", "One.\nTwo."), ("sa_2.jpg", "One.\nTwo.")]
    assert odd(made) == {"missing_pictures": 998, "dropped_captions": 998, "duplicate_captions": 1}


@pytest.mark.parametrize(("name", "of_room"), [("coco", 6), ("coco-first5", 5)])
def test_coco_takes_all_captions_or_the_first_five(tmp_path: Path, name: str, of_room: int) -> None:
    coco(tmp_path)
    made = load_benchmark(name, tmp_path)
    bears = [("000000000285.jpg", "A bear.")] * 2
    assert pairs_of(made) == [*bears, *(("000000000139.jpg", f"A room {k}.") for k in range(of_room))]
    assert odd(made) == {
        "missing_pictures": 1,
        "dropped_captions": 1,
        "pictures_without_captions": 1,
        "duplicate_captions": 1,
    }


def test_coco_as_its_archives_unpack(tmp_path: Path) -> None:
    coco(tmp_path)
    (tmp_path / "images/val2017").rename(tmp_path / "val2017")
    assert len(load_benchmark("coco", tmp_path).pictures) == 2


def test_a_coco_caption_without_its_image_row_is_refused(tmp_path: Path) -> None:
    coco(tmp_path)
    write(
        tmp_path / "annotations/captions_val2017.json",
        {"images": [{"id": 139, "file_name": "000000000139.jpg"}], "annotations": [{"image_id": 7, "caption": "x"}]},
    )
    with pytest.raises(ValueError, match="'annotations' names image_id 7, which 'images' does not have"):
        load_benchmark("coco", tmp_path)


@pytest.mark.parametrize("layout", [flickr_karpathy, flickr_splits])
def test_flickr30k_is_karpathys_three_splits_from_either_source(tmp_path: Path, layout) -> None:
    layout(tmp_path)
    made = load_benchmark("flickr30k", tmp_path)
    assert set(pairs_of(made)) == {(f"{n}.jpg", f"{n}.jpg {k}") for n in range(1, 6) for k in range(5)}
    assert len(made.captions) == 25
    assert odd(made) == {}
    made = load_benchmark("flickr30k-1k", tmp_path)
    assert set(pairs_of(made)) == {(f"{n}.jpg", f"{n}.jpg {k}") for n in (4, 5) for k in range(5)}


def test_flickr30k_1k_needs_the_test_list_alone(tmp_path: Path) -> None:
    flickr_splits(tmp_path)
    (tmp_path / "flickr30k_train.json").unlink()
    assert len(load_benchmark("flickr30k-1k", tmp_path).pictures) == 2
    with pytest.raises(FileNotFoundError, match=r"lacks dataset_flickr30k\.json or flickr30k_train\.json; it holds"):
        load_benchmark("flickr30k", tmp_path)


def test_flickr30k_raw_from_the_token_file(tmp_path: Path) -> None:
    flickr_token(tmp_path)
    made = load_benchmark("flickr30k-raw", tmp_path)
    assert pairs_of(made) == [
        ("1.jpg", "1.jpg | 0 ."),
        ("1.jpg", "1.jpg | 1 ."),
        ("1.jpg", ""),
        ("2.jpg", "2.jpg | 0 ."),
        ("2.jpg", "2.jpg | 1 ."),
    ]
    assert odd(made) == {"empty_captions": 1, "missing_pictures": 1, "dropped_captions": 2}


def test_flickr30k_raw_mends_the_malformed_row_of_the_csv(tmp_path: Path) -> None:
    flickr_csv(tmp_path)
    assert pairs_of(load_benchmark("flickr30k-raw", tmp_path)) == [
        ("1.jpg", "Two men , one | bar ."),
        ("1.jpg", "4 people ."),
        ("2199200615.jpg", "A dog ."),
        ("2199200615.jpg", "A dog runs across the grass ."),
    ]


def test_any_other_malformed_row_is_named(tmp_path: Path) -> None:
    flickr_csv(tmp_path)
    write(tmp_path / "results.csv", "image_name| comment_number| comment\n1.jpg| 0| Fine .\n1.jpg and no number\n")
    with pytest.raises(ValueError, match=r"results\.csv:3: got '1\.jpg and no number', expected an image, a number"):
        load_benchmark("flickr30k-raw", tmp_path)


def test_a_manifest_gathers_the_rows_of_one_image(tmp_path: Path) -> None:
    pictures(tmp_path / "images", "a.jpg", "b.jpg")
    rows = [("a", "One a.", "1a"), ("b", "One b.", "1b"), ("./a", "Two a.", "2a"), ("c", "No c.", "c"), ("b", "", "")]
    path = tmp_path / "mine.jsonl"
    write_lines(path, *({"image": f"images/{n}.jpg", "caption": c, "short_caption": s} for n, c, s in rows))
    made = load_benchmark(f"manifest:{path}", tmp_path / "not looked at")
    assert pairs_of(made) == [("a.jpg", "One a."), ("a.jpg", "Two a."), ("b.jpg", "One b."), ("b.jpg", "")]
    assert made.short_captions == ["1a", "2a", "1b", ""]
    assert made.name == "manifest:mine.jsonl"
    assert odd(made) == {"empty_captions": 1, "missing_pictures": 1, "dropped_captions": 1}


def test_a_manifest_needs_no_short_captions_but_all_or_none(tmp_path: Path) -> None:
    pictures(tmp_path, "a.jpg")
    path = tmp_path / "mine.jsonl"
    plain, short = {"image": "a.jpg", "caption": "One."}, {"image": "a.jpg", "caption": "Two.", "short_caption": "2"}
    write_lines(path, plain, plain)
    assert load_benchmark(f"manifest:{path}").short_captions is None
    for rows in ((plain, short), (short, plain)):
        write_lines(path, *rows)
        with pytest.raises(ValueError, match=r"mine\.jsonl:2: 'short_caption' is in some rows only"):
            load_benchmark(f"manifest:{path}")


def test_a_missing_manifest_is_said(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"there is no such file; expected manifest:PATH of a \.jsonl file"):
        load_benchmark(f"manifest:{tmp_path}/none.jsonl")


def test_a_wrong_name_lists_the_right_ones(tmp_path: Path) -> None:
    with pytest.raises(
        ValueError, match=r"unknown benchmark 'flickr'; known: urban1k, dci, .*, manifest:PATH\.jsonl"
    ) as caught:
        load_benchmark("flickr", tmp_path)
    assert all(name in str(caught.value) for name in LAYOUTS)


def test_every_benchmark_has_a_layout_here() -> None:
    assert list(LAYOUTS) == list(BENCHMARKS)


@pytest.mark.parametrize("name", LAYOUTS)
def test_the_set_may_lie_one_folder_deeper_beside_others(tmp_path: Path, name: str) -> None:
    LAYOUTS[name](tmp_path / "here")
    shutil.copytree(tmp_path / "here", tmp_path / "__MACOSX")
    (tmp_path / "something else").mkdir()
    plain, deeper = load_benchmark(name, tmp_path / "here"), load_benchmark(name, tmp_path)
    assert (deeper.captions, deeper.counts) == (plain.captions, plain.counts)
    assert [deeper.picture_id(i) for i in range(len(deeper.pictures))] == [
        plain.picture_id(i) for i in range(len(plain.pictures))
    ]
    assert deeper.protocol == BENCHMARKS[name].protocol
    assert "\n" not in deeper.protocol


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("removed", ["captions", "pictures", "all"])
def test_a_wrong_folder_names_what_is_missing_and_where_to_get_it(tmp_path: Path, name: str, removed: str) -> None:
    row = BENCHMARKS[name]
    LAYOUTS[name](tmp_path)
    is_pictures = {purpose: "pictures" in purpose for purpose in row.needs}
    gone = [purpose for purpose in row.needs if removed == "all" or is_pictures[purpose] == (removed == "pictures")]
    for alternatives in (row.needs[purpose] for purpose in gone):
        for path in (tmp_path / alternative for alternative in alternatives):
            if path.is_dir():
                shutil.rmtree(path)
            path.unlink(missing_ok=True)
    with pytest.raises(FileNotFoundError) as caught:
        load_benchmark(name, tmp_path)
    message = str(caught.value)
    assert message.startswith(f"{name}: {tmp_path} lacks ")
    assert all(" or ".join(row.needs[purpose]) in message for purpose in gone)
    assert message.endswith(row.source)
    assert "\n" not in message


def test_the_folder_above_or_two_below_is_pointed_out(tmp_path: Path) -> None:
    urban1k(tmp_path / "a/b/Urban1k")
    for wrong in ("a/b/Urban1k/image", "a"):
        with pytest.raises(FileNotFoundError, match=r"lacks caption.*; .*/a/b/Urban1k holds the set: pass that folder"):
            load_benchmark("urban1k", tmp_path / wrong)


def test_what_is_there_instead_is_said(tmp_path: Path) -> None:
    coco(tmp_path)
    shutil.rmtree(tmp_path / "images")
    pictures(tmp_path / "train2017", "1.jpg")
    with pytest.raises(
        FileNotFoundError, match=r"lacks images/val2017 or val2017; it holds annotations/, train2017/\. Get"
    ):
        load_benchmark("coco", tmp_path)


def test_two_folders_that_fit_are_not_guessed_between(tmp_path: Path) -> None:
    urban1k(tmp_path / "first")
    urban1k(tmp_path / "second")
    with pytest.raises(
        ValueError, match=r"several folders in .* hold the set: first, second; pass the one that is meant"
    ):
        load_benchmark("urban1k", tmp_path)


def test_a_root_that_is_no_folder_is_said(tmp_path: Path) -> None:
    with pytest.raises(
        FileNotFoundError, match=r"none does not exist; expected the folder that holds caption, image\. Get"
    ):
        load_benchmark("urban1k", tmp_path / "none")
    write(tmp_path / "file", "x")
    with pytest.raises(FileNotFoundError, match="file is a file; expected the folder"):
        load_benchmark("urban1k", tmp_path / "file")


def test_pictures_that_are_all_elsewhere_are_an_error_not_an_empty_set(tmp_path: Path) -> None:
    coco(tmp_path)
    for path in (tmp_path / "images/val2017").iterdir():
        path.unlink()
    with pytest.raises(ValueError, match=r"coco: no picture is left: 3 missing, the first of them .*000000000285\.jpg"):
        load_benchmark("coco", tmp_path)


@pytest.mark.parametrize(
    ("name", "file", "content", "reason"),
    [
        (
            "docci",
            "docci_descriptions.jsonlines",
            '{"split": "test"}\n',
            r"jsonlines:1: the key 'image_file' is missing",
        ),
        ("docci", "docci_descriptions.jsonlines", "{\n", r"jsonlines:1: not valid JSON"),
        ("dci", "splits.json", "[]", r"splits\.json: expected an object of split names"),
        ("dci", "splits.json", '{"train": ["../a.json"]}', r"splits\.json: train: image .* leads out"),
        ("dci", "annotations/9-data.json", "{", r"9-data\.json: not valid JSON"),
        ("dci", "annotations/9-data.json", '{"image": "/a.jpg"}', r"9-data\.json: image '/a\.jpg' leads out"),
        (
            "long-dci",
            "annotations/9-data.json",
            '{"image": "a.jpg", "extra_caption": 1}',
            r"is a number, expected a str",
        ),
        ("iiw", "IIW-400/data.jsonl", '{"IIW": "x"}\n', r"data\.jsonl:1: the key 'image/key' is missing"),
        ("coco", "annotations/captions_val2017.json", "[]", r"got a list, expected an object with 'annotations'"),
        (
            "coco",
            "annotations/captions_val2017.json",
            '{"annotations": [5]}',
            r"annotations\[0\]: got a number, expected",
        ),
        ("flickr30k", "dataset_flickr30k.json", '{"images": [{"split": "val"}]}', r"images\[0\]: the key 'sentences'"),
        (
            "flickr30k",
            "dataset_flickr30k.json",
            '[{"image": "1.jpg"}]',
            r"json\[0\]: 'caption' is null, expected a string",
        ),
        ("flickr30k-raw", "results_20130124.token", "1.jpg A dog .", r"token:1: got '1\.jpg A dog \.'"),
        ("sharegpt4v-1k", SHAREGPT4V_JSON, "[{}]", r"record 0 \(counted from 0\): the key 'image' is missing"),
    ],
)
def test_a_file_that_is_not_what_it_should_be_is_named(
    tmp_path: Path, name: str, file: str, content: str, reason: str
) -> None:
    LAYOUTS[name](tmp_path)
    write(tmp_path / file, content)
    with pytest.raises(ValueError, match=reason):
        load_benchmark(name, tmp_path)


def test_the_real_photos_as_a_manifest(shared: Path, tmp_path: Path) -> None:
    source = shared / "data/coco_ccby"
    rows = [json.loads(line) for line in (source / "pairs.jsonl").read_text(encoding="utf-8").splitlines()]
    (tmp_path / "images").symlink_to(source / "images")
    write_lines(
        tmp_path / "all.jsonl", *({"image": r["image"], "caption": c} for r in rows for c in r["short_captions"])
    )
    made = load_benchmark(f"manifest:{tmp_path}/all.jsonl")
    assert made.counts["images"] == 60
    assert made.counts["captions"] == 300
    assert odd(made).keys() <= {"duplicate_captions"}
