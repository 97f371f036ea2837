"""The commands, through the command line's own entry where it matters: files written, mistakes named early."""

import json
import os
import re
import shutil
from pathlib import Path

import pytest
from PIL import Image

from debias_diffusion import load_encoder, save_encoder
from debias_diffusion.cli import main
from debias_diffusion.evaluation.command import attention, compare_results, evaluate, zero_shot
from debias_diffusion.evaluation.page import Section, to_html, to_markdown
from debias_diffusion.evaluation.results import content_digest
from debias_diffusion.evaluation.sources import Loading, encoder_names, load_sets

PERTURBATIONS = ("remove_first", "first_2_filler_0", "first_2_filler_2")


@pytest.fixture(scope="module")
def folders(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """Two runs' encoder folders, the second one at 248 tokens."""
    root = tmp_path_factory.mktemp("runs")
    tiny = load_encoder(tiny_folder)
    return str(save_encoder_in(root / "short", tiny)), str(save_encoder_in(root / "long", tiny.stretched(248)))


def save_encoder_in(run: Path, encoder) -> Path:
    run.mkdir()
    return save_encoder(encoder, run / "encoder")


@pytest.fixture(scope="module")
def loading(tmp_path_factory: pytest.TempPathFactory) -> Loading:
    return Loading(device="cpu", cache_dir=tmp_path_factory.mktemp("cache"))


@pytest.fixture(scope="module")
def run(folders, loading, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    output = tmp_path_factory.mktemp("evaluation")
    text = evaluate(folders, ("miniature:12",), None, PERTURBATIONS, output, loading=loading)
    return output, text


def without_date(path: Path) -> dict[str, object]:
    content = json.loads(path.read_text())
    del content["date"]
    return content


def urban1k(root: Path, pairs: int = 3) -> Path:
    for name in ("caption", "image"):
        (root / name).mkdir(parents=True)
    for number in range(pairs):
        (root / "caption" / f"{number}.txt").write_text(f"A small red star number {number}. It is red.\n")
        Image.new("RGB", (8, 8), (number * 20, 0, 0)).save(root / "image" / f"{number}.jpg")
    return root


def test_evaluate_writes_results_report_page_and_figures(run, folders):
    output, text = run
    content = json.loads((output / "results.json").read_text())
    assert content["schema"] == 1
    assert content["command"].startswith(
        f"debias-diffusion evaluate {folders[0]} {folders[1]} --benchmarks miniature:12"
    )
    assert content["seed"] == 0
    assert {"debias-diffusion", "torch", "open_clip_torch"} <= content["versions"].keys()
    short, long = content["encoders"]["short/encoder"], content["encoders"]["long/encoder"]
    assert (short["context_length"], long["context_length"]) == (77, 248)
    assert short["source"] == folders[0]
    assert short["weights_hash"]["image"] == long["weights_hash"]["image"]
    assert short["weights_hash"]["text"] != long["weights_hash"]["text"]
    (benchmark,) = content["benchmarks"].values()
    assert "12 pairs" in benchmark["protocol"]
    assert benchmark["counts"]["images"] == 12
    assert list(benchmark["results"]) == ["short/encoder", "long/encoder"]
    for rows in benchmark["results"].values():
        assert list(rows) == ["none", *PERTURBATIONS]
        low, high = rows["none"]["intervals"]["t2i_recall@1"]
        assert low <= rows["none"]["t2i_recall@1"] <= high
    assert benchmark["results"]["short/encoder"]["none"]["truncated"] == 12
    assert benchmark["results"]["long/encoder"]["none"]["truncated"] == 0
    assert len(benchmark["comparisons"]) == 2 * (1 + len(PERTURBATIONS))
    assert "| remove_first" in text
    assert "history" not in text  # too long for a terminal
    assert "history" in (output / "report.md").read_text()
    assert str(output / "report.html") in text
    page = (output / "report.html").read_text()
    assert page.count("<svg ") == 3
    for name in ("recall", "drops", "filler-first-2"):
        assert (output / "figures" / f"miniature-{name}.png").is_file()
        assert f"figures/miniature-{name}.png" in (output / "report.md").read_text()


def test_a_second_run_reads_the_cache_and_says_the_same(run, folders, loading, tmp_path):
    kept = {path: path.stat().st_mtime_ns for path in loading.cache_dir.rglob("*.safetensors")}
    assert len(kept) == 1 + 2 * (1 + len(PERTURBATIONS))  # the image tower is the same in both
    evaluate(folders, ("miniature:12",), None, PERTURBATIONS, tmp_path, loading=loading)
    assert without_date(tmp_path / "results.json") == without_date(run[0] / "results.json")
    assert {path: path.stat().st_mtime_ns for path in loading.cache_dir.rglob("*.safetensors")} == kept


def test_the_command_line_takes_the_same_words(folders, tmp_path, capsys):
    main(["evaluate", folders[0], "--benchmarks", "miniature:5", "--perturbations", "short", "--output", str(tmp_path),
          "--no-cache", "--device", "cpu", "--seed", "3"])  # fmt: skip
    assert "| short" in capsys.readouterr().out
    assert json.loads((tmp_path / "results.json").read_text())["seed"] == 3


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "no encoder was named"),
        (["RUN"], "RUN is no encoder: its encoder is RUN/encoder"),
        (["UNFINISHED"], "UNFINISHED is a run whose training has not ended: end it with --resume"),
        (["RUNS"], "RUNS is no encoder: it holds RUNS/a, RUNS/b; name those meant"),
        (["EMPTY"], "EMPTY is no encoder folder: it holds neither open_clip_config.json nor"),
        # What is wrong with an encoder's name is said before a benchmark is looked for.
        (["ViT-B-16:opneai", "--benchmarks", "docci=no/such/place"], "no pretrained weights 'opneai'; tags: "),
        (["miniature:bse", "--benchmarks", "docci=no/such/place"], "bse is no encoder folder"),
        (["no/such/place"], "no encoder at 'no/such/place': expected a folder"),
        (
            ["ENCODER", "--benchmarks", "urban2k"],
            "unknown benchmark 'urban2k'; known: miniature, miniature:PAIRS, urban1k",
        ),
        (["ENCODER", "--benchmarks", "urban1k"], "urban1k needs its files: name the folder that holds them by --root"),
        (
            ["ENCODER", "--benchmarks", "docci=no/such/place"],
            "docci: no/such/place does not exist; expected the folder",
        ),
        (["ENCODER", "--benchmarks", "miniature:5", "miniature:6"], "two benchmarks have the same name"),
        (["ENCODER", "--benchmarks", "miniature:0"], "asked for 0 pairs"),
        (["ENCODER", "--perturbations", "reverse"], "unknown perturbation 'reverse'; choose one of none"),
        (["ENCODER", "--seed", "-1"], "seed is -1, expected 0 or more"),
        (["ENCODER", "--splitter", "spacy"], "unknown splitter 'spacy'"),
        (
            ["ENCODER", "--benchmarks", "urban1k=URBAN", "--perturbations", "short"],
            "short captions, which urban1k has not",
        ),
    ],
)
def test_a_mistake_is_one_line_said_before_any_encoder_is_read(words, message, tmp_path, capsys):
    # Of encoders the names are looked at alone: these would fail with a message of their own if they were read.
    for folder in ("encoder", "RUN/encoder", "RUNS/a", "RUNS/b"):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "open_clip_config.json").write_text("{}")
    for folder in ("RUN", "UNFINISHED"):
        (tmp_path / folder / "checkpoints").mkdir(parents=True)
        (tmp_path / folder / "config.json").write_text("{}")
    (tmp_path / "EMPTY").mkdir()
    urban1k(tmp_path / "urban")
    places = {"ENCODER": "encoder", "URBAN": "urban"} | {name: name for name in ("RUNS", "RUN", "UNFINISHED", "EMPTY")}

    def placed(text: str) -> str:
        return re.sub(r"\b[A-Z]{3,}\b", lambda m: str(tmp_path / places[m[0]]) if m[0] in places else m[0], text)

    words, message = [placed(word) for word in words], placed(message)
    with pytest.raises(SystemExit) as left:
        main(["evaluate", *words, "--output", str(tmp_path / "out")])
    assert left.value.code == 2
    lines = capsys.readouterr().err.strip().splitlines()
    assert len(lines) == 1
    assert message in lines[0]
    assert not (tmp_path / "out").exists()


def test_benchmarks_are_found_below_root_or_where_they_are_said_to_lie(tmp_path):
    urban1k(tmp_path / "data" / "Urban1k")
    for spec, root in (("urban1k", tmp_path / "data"), (f"urban1k={tmp_path / 'data' / 'Urban1k'}", None)):
        (found,) = load_sets([spec], root)
        assert (found.name, len(found.captions)) == ("urban1k", 3)
    (tmp_path / "own.jsonl").write_text('{"image": "data/Urban1k/image/0.jpg", "caption": "A star."}\n')
    own, miniature = load_sets([f"manifest:{tmp_path / 'own.jsonl'}", "miniature:4"], None)
    assert (len(own.captions), len(miniature.captions)) == (1, 4)


def test_a_part_of_a_benchmark_with_a_broken_picture_is_measured_and_said_to_be_one(folders, loading, tmp_path):
    (urban1k(tmp_path / "urban") / "image" / "1.jpg").write_bytes(b"broken")
    text = evaluate(folders[:1], (f"urban1k={tmp_path / 'urban'}",), None, (), tmp_path / "out", loading=loading)
    counts = json.loads((tmp_path / "out" / "results.json").read_text())["benchmarks"]["urban1k"]["counts"]
    assert (counts["images"], counts["unreadable_pictures"], counts["captions_of_unreadable"]) == (2, 1, 1)
    assert "1.jpg" in text
    assert "WARNING: this is a part of the benchmark" in text
    assert "this copy has 2 and 2" in text
    assert "1 unreadable picture, 1 caption of unreadable" in text
    assert "Published on the same protocol" not in text
    report = (tmp_path / "out" / "report.md").read_text()
    assert "NOT comparable" in report
    assert "measured on all 1,000 pictures" in report


def test_encoders_are_called_by_the_last_parts_that_tell_them_apart(tmp_path):
    for name in ("a/encoder", "b/encoder", "b/other"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "open_clip_config.json").touch()
    for name in ("b/weights.pt", "b/weights.safetensors"):
        (tmp_path / name).touch()
    paths = [str(tmp_path / n) for n in ("a/encoder", "b/encoder", "b/other")]
    assert list(encoder_names(paths)) == ["a/encoder", "b/encoder", "other"]
    assert list(encoder_names(paths[1:])) == ["encoder", "other"]
    assert encoder_names([paths[0], paths[0]]) == {"encoder": paths[0]}
    row = f"ViT-B-16:{tmp_path / 'b/weights.pt'}"
    assert encoder_names(["miniature:random", row]) == {"miniature:random": "miniature:random", "weights": row}
    alike = [str(tmp_path / "b/weights.pt"), str(tmp_path / "b/weights.safetensors")]
    assert list(encoder_names(alike)) == alike


def test_compare_results_puts_runs_side_by_side(run, folders, loading, tmp_path):
    output, _ = run
    other = shutil.copytree(output, tmp_path / "other")
    content = json.loads((other / "results.json").read_text())
    content["seed"] = 9
    content["benchmarks"]["docci"] = {
        **content["benchmarks"]["miniature"],
        "protocol": "DOCCI, split test",
        "counts": {"images": 5000, "captions": 5000},
    }
    (other / "results.json").write_text(json.dumps(content))
    text = compare_results((output / "results.json", other))
    header = next(line for line in text.splitlines() if line.startswith("| perturbation"))
    for name in (f"{output.name}: short/encoder T2I", "other: long/encoder I2T"):
        assert name in header
    assert "Seeds or sentence splitters differ" in text
    assert "DeBias-CLIP L/14" in text.split("## docci")[1]
    assert "DeBias-CLIP L/14" not in text.split("## docci")[0]
    assert "did not measure on one and the same" not in text
    for field, value in (("digest", "another"), ("counts", {"images": 11, "captions": 12})):  # no longer the same set
        changed = json.loads(json.dumps(content))
        changed["benchmarks"]["miniature"][field] = value
        (other / "results.json").write_text(json.dumps(changed))
        apart = compare_results((output, other))
        assert apart.count("## miniature") == 2
        assert apart.count("did not measure on one and the same miniature") == 2
    (other / "results.json").write_text(json.dumps(content))
    (other / "results.json").rename(tmp_path / "kept.json")
    assert "kept: long/encoder I2T" in compare_results((output, tmp_path / "kept.json"))
    with pytest.raises(FileNotFoundError, match="no results at .*other"):
        compare_results((output, other))
    with pytest.raises(ValueError, match="no results to compare"):
        compare_results(())


def test_the_demos_table_is_told_from_results_with_what_to_type(tmp_path):
    (tmp_path / "base").mkdir()
    table = {name: {"none": {"t2i_recall@1": 31.6, "i2t_recall@1": 37.7}} for name in ("base", "debias")}
    (tmp_path / "results.json").write_text(json.dumps(table))
    with pytest.raises(
        ValueError, match=rf"is the demo's table, .* evaluate {tmp_path}/base --output DIR, and compare"
    ):
        compare_results((tmp_path,))


def test_a_set_is_known_by_its_content_wherever_it_lies(tmp_path):
    def digest(place: str, captions: tuple[str, ...], colour: str = "red") -> str:
        (tmp_path / place).mkdir()
        rows = [json.dumps({"image": f"{n}.png", "caption": caption}) for n, caption in enumerate(captions)]
        (tmp_path / place / "own.jsonl").write_text("\n".join(rows))
        for n in range(len(captions)):
            size = 8 if colour == "red" else 9
            Image.new("RGB", (size, size), colour).save(tmp_path / place / f"{n}.png")
        (found,) = load_sets([f"manifest:{tmp_path / place / 'own.jsonl'}"], None)
        return content_digest(found)

    first = digest("a", ("A star.", "A ring."))
    assert digest("b", ("A star.", "A ring.")) == first
    assert digest("c", ("A star.", "A rink.")) != first
    assert digest("d", ("A star.", "A ring."), "blue") != first


def test_names_that_are_not_utf8_can_be_printed(tmp_path):
    folder = tmp_path / os.fsdecode(b"caf\xe9")
    folder.mkdir()
    (folder / "open_clip_config.json").write_text("{}")
    assert list(encoder_names([str(folder)])) == ["caf\\udce9"]
    section = Section(str(folder), [f"Left out: {folder}"], [])
    for text in (to_markdown(str(folder), [section]), to_html(str(folder), [section])):
        assert "caf\\udce9" in text
        text.encode()


def test_attention_writes_curves_for_every_encoder(folders, loading, tmp_path):
    text = attention(folders, "miniature:8", max_captions=4, max_places=2, output=tmp_path, loading=loading)
    rows = json.loads((tmp_path / "attention.json").read_text())["encoders"]
    assert list(rows) == ["short/encoder", "long/encoder"]
    assert rows["short/encoder"]["captions_cut"] == 4
    assert rows["long/encoder"]["captions_cut"] == 0
    assert 0 < rows["long/encoder"]["first_sentence_share"] < 1
    assert [place["place"] for place in rows["long/encoder"]["places"]] == [1, 2]
    assert "| long/encoder" in text
    assert (tmp_path / "report.html").read_text().count(
        "<svg "
    ) == 3  # of a depth nothing could be drawn, and it is said
    assert "Too few captions for a worst depth of short/encoder, long/encoder" in text
    assert "100 queries or more" in text


def test_zero_shot_prints_one_row_an_encoder(folders, loading, tmp_path):
    for colour in ("red", "blue"):
        (tmp_path / f"{colour}_square").mkdir()
        Image.new("RGB", (8, 8), colour).save(tmp_path / f"{colour}_square" / "a.png")
    text = zero_shot(folders, "folder", tmp_path, loading)
    assert "2 classes, each name in 80 prompts" in text
    assert text.count("/encoder") == 2
    with pytest.raises(ValueError, match="--root is missing: name the folder that holds cifar10's unpacked archive by"):
        zero_shot(folders, "cifar10", None, loading)
    with pytest.raises(ValueError, match="no folder at .*nowhere: name the folder that holds one folder of pictures"):
        zero_shot(folders, "folder", tmp_path / "nowhere", loading)
