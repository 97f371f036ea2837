"""Pictures with their record: the same noise for all encoders, resumed, never half written."""

import copy
import json
import sys
import threading
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch
import tyro
from PIL import Image

from debias_diffusion import __version__
from debias_diffusion.sdxl import generate_command, record, shipped
from debias_diffusion.sdxl.generate import Settings, as_pipeline, compare, draw, generate, token_report
from debias_diffusion.sdxl.prompts import PromptLine, debias_pipeline
from debias_diffusion.sdxl.record import module_hash, read_record, write_contact_sheets, write_png
from debias_diffusion.sdxl.sets import set_names

TWO_STEPS = Settings(steps=2, width=32, height=32)
QUIET: dict[str, Any] = {"settings": TWO_STEPS, "progress": False}


@pytest.fixture(scope="module")
def stock(make_pipe, slots_77) -> Any:
    """A stock pipeline at 77 tokens; not to be changed."""
    return make_pipe(slots_77)


@pytest.fixture(scope="module")
def swapped(stock, slots_248) -> Any:
    """The same with both encoders swapped for long ones."""
    return as_pipeline(slots_248, stock)


def pixels(path: Path) -> bytes:
    with Image.open(path) as image:
        assert image.mode == "RGB"
        return image.tobytes()


# One picture


def test_a_picture_depends_on_prompt_seed_and_settings_alone(stock):
    line = PromptLine("a red cat", negative="bad")
    first = draw(stock, line, 7, TWO_STEPS)
    torch.manual_seed(99)
    draw(stock, PromptLine("another"), 8, TWO_STEPS)
    assert draw(stock, line, 7, TWO_STEPS).tobytes() == first.tobytes()
    others = [
        (line, 8, TWO_STEPS),
        (PromptLine("a red dog", negative="bad"), 7, TWO_STEPS),
        (PromptLine("a red cat", negative="worse"), 7, TWO_STEPS),
        (PromptLine("a red cat", "oil", "bad"), 7, TWO_STEPS),
        (line, 7, Settings(steps=3, width=32, height=32)),
        (line, 7, Settings(steps=2, width=32, height=32, guidance_scale=9.0)),
        (line, 7, Settings(steps=2, width=32, height=32, clip_skip=1)),
        (line, 7, Settings(steps=2, width=32, height=32, max_length=30)),
    ]
    assert all(draw(stock, *other).tobytes() != first.tobytes() for other in others)


def test_a_picture_equals_the_stock_pipelines_from_the_same_seed(stock):
    expected = stock(
        "a cat",
        negative_prompt="bad",
        num_inference_steps=2,
        width=32,
        height=32,
        generator=torch.Generator("cpu").manual_seed(5),
    ).images[0]
    assert draw(stock, PromptLine("a cat", negative="bad"), 5, TWO_STEPS).tobytes() == expected.tobytes()


def test_any_one_of_four_pictures_can_be_drawn_again_from_its_recorded_seed(stock, tmp_path):
    paths = generate(stock, ["a cat"], [3, 1, 4, 15], tmp_path, **QUIET)
    third = read_record(paths[2])
    again = draw(stock, PromptLine(third["prompt"]), third["seed"], TWO_STEPS)
    assert third["seed"] == 4
    assert again.tobytes() == pixels(paths[2])


def test_prompts_are_cleaned_and_weights_parsed_only_where_asked(stock):
    curly, straight = (draw(stock, PromptLine(text), 0, TWO_STEPS) for text in ("a “red” ﬁeld", 'a "red" field'))
    assert curly.tobytes() == straight.tobytes()
    weighted = Settings(steps=2, width=32, height=32, syntax="a1111")
    one, more = (
        draw(stock, PromptLine(text), 0, weighted).tobytes() for text in ("a (red:1.0) cat", "a (red:1.6) cat")
    )
    assert one == draw(stock, PromptLine("a red cat"), 0, TWO_STEPS).tobytes()
    assert one != more
    with pytest.raises(ValueError, match="is weighting, not words"):
        draw(stock, PromptLine("a (red:1.6) cat"), 0, TWO_STEPS)


def test_two_callers_at_once_each_get_their_own_picture(stock, swapped):
    jobs = [
        (pipe, PromptLine(text), seed) for pipe in (stock, swapped) for text in ("a cat", "a dog") for seed in (1, 2)
    ]
    alone = [draw(*job, TWO_STEPS).tobytes() for job in jobs]
    together: dict[int, bytes] = {}
    start = threading.Barrier(len(jobs))

    def work(i: int) -> None:
        start.wait()
        together[i] = draw(*jobs[i], TWO_STEPS).tobytes()

    threads = [threading.Thread(target=work, args=(i,)) for i in range(len(jobs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [together[i] for i in range(len(jobs))] == alone


# A batch on disk


def test_every_picture_carries_its_whole_record(stock, tmp_path, long_prompt):
    lines = [PromptLine("a “cat” 🐈", negative="bad"), PromptLine(long_prompt, seed=9)]
    settings = Settings(steps=2, width=32, height=32, max_length=77)
    paths = generate(stock, lines, [0, 1], tmp_path, settings=settings, progress=False)
    records = [read_record(path) for path in paths]
    assert [(r["prompt"], r["negative"], r["seed"]) for r in records] == [
        ("a “cat” 🐈", "bad", 0),
        ("a “cat” 🐈", "bad", 1),
        (long_prompt, None, 9),
    ]
    assert records[0]["settings"] == {
        "steps": 2,
        "guidance_scale": 5.0,
        "width": 32,
        "height": 32,
        "clip_skip": None,
        "max_length": 77,
        "syntax": "plain",
    }
    assert records[0]["versions"] == {
        "debias-diffusion": __version__,
        **{name: version(name) for name in ("torch", "diffusers", "transformers")},
    }
    assert records[0]["encoders"]["text_encoder"]["sha256"] == module_hash(stock.text_encoder)
    assert records[0]["encoders"]["text_encoder_2"]["class"] == "CLIPTextModelWithProjection"
    assert records[0]["scheduler"]["class"] == "EulerDiscreteScheduler"
    tokens = records[2]["tokens"]
    assert [(t["slot"], t["num_tokens"], t["limit"]) for t in tokens] == [
        ("text_encoder", 153, 77),
        ("text_encoder_2", 153, 77),
    ]
    start, end = tokens[0]["cut"]
    assert len(long_prompt[start:end].split()) == tokens[0]["words_cut"] > 50
    assert {t["negative"] for t in records[0]["tokens"]} == {False, True}
    assert all(t["cut"] is None for t in records[0]["tokens"])


def drawn(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """What is drawn from now on; drawing goes on as it does."""
    calls: list[tuple[str, int]] = []
    module = sys.modules[generate.__module__]
    original = module.draw

    def draw_and_note(pipe: Any, line: PromptLine, seed: int, settings: Settings) -> Image.Image:
        calls.append((line.prompt, seed))
        return original(pipe, line, seed, settings)

    monkeypatch.setattr(module, "draw", draw_and_note)
    return calls


def test_a_stopped_batch_goes_on_where_it_stopped(stock, tmp_path, monkeypatch):
    paths = generate(stock, ["a cat", "a dog"], [0, 1], tmp_path, **QUIET)
    expected = [pixels(path) for path in paths]
    paths[3].unlink()
    whole = paths[2].read_bytes()
    paths[2].write_bytes(whole[: len(whole) // 2])
    paths[1].write_bytes(b"")
    calls = drawn(monkeypatch)
    assert generate(stock, ["a cat", "a dog"], [0, 1], tmp_path, **QUIET) == paths
    assert calls == [("a cat", 1), ("a dog", 0), ("a dog", 1)]
    assert [pixels(path) for path in paths] == expected
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted([*(p.name for p in paths), "contact-sheet.png"])


def test_only_pictures_whose_record_matches_are_kept(stock, swapped, tmp_path, monkeypatch):
    generate(stock, ["a cat"], [0, 1], tmp_path, **QUIET)
    calls = drawn(monkeypatch)
    for pipe, prompts, settings, more in [
        (stock, ["a cat"], TWO_STEPS, []),
        (swapped, ["a cat"], TWO_STEPS, [0, 1]),
        (swapped, ["a cat"], Settings(steps=3, width=32, height=32), [0, 1]),
        (swapped, [PromptLine("a cat", negative="bad")], Settings(steps=3, width=32, height=32), [0, 1]),
        (swapped, [PromptLine("a cat", negative="bad")], Settings(steps=3, width=32, height=32), []),
    ]:
        calls.clear()
        generate(pipe, prompts, [0, 1], tmp_path, settings=settings, progress=False)
        assert [seed for _, seed in calls] == more
    generate(
        swapped, [PromptLine("a cat", negative="bad")], [0], tmp_path, settings=settings, resume=False, progress=False
    )
    assert calls == [("a cat", 0)]


def test_a_picture_of_someone_else_is_never_overwritten(stock, tmp_path):
    path = generate(stock, ["a cat"], [0], tmp_path / "own", **QUIET)[0]
    (tmp_path / "other").mkdir()
    for name in (path.name, "contact-sheet.png"):
        Image.new("RGB", (8, 8), "red").save(tmp_path / "other" / name)
        with pytest.raises(ValueError, match="is a picture without a record.*choose another folder"):
            generate(stock, ["a cat"], [0], tmp_path / "other", **QUIET)
        assert pixels(tmp_path / "other" / name) == Image.new("RGB", (8, 8), "red").tobytes()
        (tmp_path / "other" / name).unlink()


def test_a_picture_that_cannot_be_written_leaves_the_old_one_and_nothing_beside_it(tmp_path, monkeypatch):
    path = tmp_path / "p.png"
    write_png(Image.new("RGB", (8, 8), "red"), path, {"seed": 1})

    def full(*_: Any) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(record.os, "replace", full)
    with pytest.raises(OSError, match="no space left"):
        write_png(Image.new("RGB", (8, 8), "blue"), path, {"seed": 2})
    assert read_record(path) == {"seed": 1}
    assert [p.name for p in tmp_path.iterdir()] == ["p.png"]


def test_a_bad_prompt_shows_before_the_first_picture(stock, tmp_path):
    with pytest.raises(ValueError, match="is weighting"):
        generate(stock, ["a cat", "a (dog:1.3)"], [0], tmp_path / "out", **QUIET)
    assert not (tmp_path / "out").exists()


def test_one_prompt_need_not_be_a_list(stock, tmp_path):
    assert [path.name for path in generate(stock, "a cat", [0], tmp_path, **QUIET)] == ["0000-a-cat-seed0.png"]


@pytest.mark.parametrize(("prompts", "seeds"), [([], [0]), (["a"], [])])
def test_nothing_to_draw_is_an_error(prompts, seeds, stock, tmp_path):
    with pytest.raises(ValueError, match="nothing to draw"):
        generate(stock, prompts, seeds, tmp_path, **QUIET)


WRONG_SETTINGS = {
    "no steps": ({"steps": 0}, "steps is 0; expected 1 or more"),
    "short length": ({"max_length": 2}, "max_length is 2; expected 'auto' or 3 or more"),
    "length in words": ({"max_length": "long"}, "max_length is 'long'"),
    "syntax": ({"syntax": "compel"}, "'compel'; syntaxes: plain, a1111"),
}


@pytest.mark.parametrize(("wrong", "message"), WRONG_SETTINGS.values(), ids=WRONG_SETTINGS)
def test_settings_that_cannot_work_are_refused_before_any_model_is_loaded(wrong, message):
    with pytest.raises(ValueError, match=message):
        Settings(**wrong)


def test_prompts_without_letters_and_very_long_ones_have_file_names(stock, tmp_path):
    names = [p.name for p in generate(stock, ["🐈", "", "Ünï/../cat " * 40], [-1], tmp_path, **QUIET)]
    assert names[:2] == ["0000-prompt-seed-1.png", "0001-prompt-seed-1.png"]
    assert all(len(name) < 70 and "/" not in name for name in names)


# Records


def test_the_hash_of_an_encoder_knows_every_weight_dtype_and_lora(stock):
    pipe, encoder = copy.copy(stock), copy.deepcopy(stock.text_encoder)
    pipe.register_modules(text_encoder=encoder)
    hashes = [module_hash(encoder)]
    with torch.no_grad():
        encoder.get_input_embeddings().weight[30000, 17] += 1e-3
    hashes.append(module_hash(encoder))
    hashes.append(module_hash(encoder.to(torch.bfloat16)))
    shapes = {"lora_down": (2, 64), "lora_up": (64, 2)}
    names = {f"lora_te1_text_model_encoder_layers_0_self_attn_{part}" for part in ("q_proj", "out_proj")}
    parts = {f"{name}.{way}.weight": torch.ones(shape) for name in names for way, shape in shapes.items()}
    pipe.load_lora_weights(parts, adapter_name="style")
    hashes.append(module_hash(encoder))
    pipe.set_adapters("style", 0.5)
    hashes.append(module_hash(encoder))
    assert len(set(hashes)) == len(hashes)
    assert module_hash(encoder) == hashes[-1]


def test_sampled_hashes_tell_two_unets_apart(stock):
    other = copy.deepcopy(stock.unet)
    assert module_hash(other, 64) == module_hash(stock.unet, 64)
    with torch.no_grad():
        other.conv_in.weight.mul_(1.001)
    assert module_hash(other, 64) != module_hash(stock.unet, 64)


# Comparing


def test_all_sets_of_encoders_get_the_same_noise_negative_and_settings(stock, swapped, slots_248, tmp_path):
    sets = {"stock": None, "again": stock, "long": swapped, "second": {"text_encoder_2": slots_248}}
    paths = compare(sets, ["a cat"], [1, 2], tmp_path, base=stock, negative="bad", **QUIET)
    shown = {name: [pixels(path) for path in column] for name, column in paths.items()}
    assert shown["stock"] == shown["again"]
    assert len({shown[name][0] for name in ("stock", "long", "second")}) == 3
    records = {name: [read_record(path) for path in column] for name, column in paths.items()}
    for key in ("seed", "negative", "settings", "unet_sampled_sha256", "scheduler"):
        assert len({json.dumps([r[key] for r in column]) for column in records.values()}) == 1
    assert [r["encoders"]["text_encoder_2"]["context_length"] for r in (records["stock"][0], records["second"][0])] == [
        77,
        248,
    ]
    with Image.open(tmp_path / "contact-sheet.png") as sheet:
        assert sheet.size == (4 * 256 + 3 * 4, 36 + 2 * (256 + 36))


def test_the_noise_is_the_same_whatever_the_encoders_and_however_long_the_prompt(
    stock, swapped, long_prompt, monkeypatch
):
    seen = []
    for pipe in (stock, swapped):
        own = debias_pipeline(pipe)
        original = own.prepare_latents

        def note(*args: Any, original: Any = original) -> Any:
            seen.append(original(*args))
            return seen[-1]

        monkeypatch.setattr(own, "prepare_latents", note)
        for prompt in ("a cat", long_prompt):
            draw(own, PromptLine(prompt), 4, TWO_STEPS)
    assert len(seen) == 4
    assert all(torch.equal(seen[0], latents) for latents in seen)


def test_a_set_may_be_cut_as_the_stock_pipeline_does(stock, swapped, tmp_path, long_prompt):
    sets = {"stock": None, "long": swapped}
    paths = compare(sets, [long_prompt], [0], tmp_path, base=stock, max_lengths={"stock": 77}, **QUIET)
    assert [t["words_cut"] > 0 for t in read_record(paths["stock"][0])["tokens"]] == [True, True]
    assert [t["words_cut"] for t in read_record(paths["long"][0])["tokens"]] == [0, 0]
    expected = stock(
        long_prompt, num_inference_steps=2, width=32, height=32, generator=torch.Generator("cpu").manual_seed(0)
    ).images[0]
    assert pixels(paths["stock"][0]) == expected.tobytes()


def test_an_unfair_comparison_is_refused_with_what_differs(stock, tmp_path):
    other = copy.copy(stock)
    other.register_to_config(force_zeros_for_empty_prompt=False)
    with pytest.raises(ValueError, match="differ in force_zeros_for_empty_prompt"):
        compare({"a": stock, "b": other}, ["a cat"], [0], tmp_path / "out", **QUIET)
    other.register_to_config(force_zeros_for_empty_prompt=True)
    other.scheduler = type(other.scheduler).from_config(other.scheduler.config, beta_end=0.02)
    with pytest.raises(ValueError, match="differ in scheduler"):
        compare({"a": stock, "b": other}, ["a cat"], [0], tmp_path / "out", **QUIET)
    assert not (tmp_path / "out").exists()


WRONG_SETS = {
    "no base": ({"a": {"text_encoder": "x"}}, None, "give base, the pipeline to swap them into"),
    "wrong slot": (
        {"a": {"text_encoder_3": "x"}},
        "base",
        "no slot text_encoder_3; slots: text_encoder, text_encoder_2",
    ),
    "name that is a path": ({"../a": None}, "base", "a set is called '../a'"),
    "none": ({}, "base", "sets: none"),
}


@pytest.mark.parametrize(("sets", "base", "message"), WRONG_SETS.values(), ids=WRONG_SETS)
def test_sets_that_cannot_be_used_are_refused(sets, base, message, stock, tmp_path):
    with pytest.raises(ValueError, match=message):
        compare(sets, ["a cat"], [0], tmp_path, base=stock if base else None, **QUIET)


def test_a_folder_without_slots_and_a_length_for_no_set_are_refused(stock, tmp_path):
    with pytest.raises(FileNotFoundError, match="holds none of text_encoder, text_encoder_2"):
        compare({"a": tmp_path}, ["a cat"], [0], tmp_path, base=stock, **QUIET)
    with pytest.raises(ValueError, match="max_lengths names b; sets: a"):
        compare({"a": None}, ["a cat"], [0], tmp_path, base=stock, max_lengths={"b": 77}, **QUIET)


def test_swapping_both_encoders_for_the_comparison_keeps_the_class_and_the_base(stock, swapped):
    assert type(swapped) is type(debias_pipeline(stock))
    assert swapped.unet is stock.unet
    assert stock.text_encoder.config.max_position_embeddings == 77
    assert [row.limit for row in token_report(swapped, PromptLine("cat " * 100), TWO_STEPS)] == [248, 248]


def test_contact_sheets_hold_a_stated_number_of_rows_each(tmp_path):
    write_png(Image.new("RGB", (64, 32), "red"), tmp_path / "p.png", {})
    rows = [(f"row {i} “wörds” 日本 " * 9, [tmp_path / "p.png"]) for i in range(5)]
    sheets = write_contact_sheets(tmp_path, ["one"], rows, cell=32, most=2)
    assert [path.name for path in sheets] == ["contact-sheet.png", "contact-sheet-2.png", "contact-sheet-3.png"]
    with Image.open(sheets[2]) as last:
        assert last.size == (32, 36 + 32 + 36)
        assert last.getpixel((1, 36 + 36 + 1)) == (255, 0, 0)


# The command


@pytest.fixture(scope="module")
def checkpoint(stock, tmp_path_factory) -> Path:
    """A saved stock pipeline."""
    folder = tmp_path_factory.mktemp("checkpoint")
    stock.save_pretrained(folder)
    return folder


def command(*words: str) -> str:
    return tyro.cli(generate_command.generate, args=[str(word) for word in words])


def test_the_command_draws_with_other_encoders_beside_the_checkpoints_own(
    checkpoint, slots_248, tmp_path, long_prompt, stock
):
    (tmp_path / "p.jsonl").write_text(json.dumps({"prompt": long_prompt, "seed": 3}))
    size = ["--steps", "2", "--width", "32", "--height", "32", "--negative", "bad"]
    encoders = ["--text-encoder", slots_248, "--text-encoder-2", slots_248, "--compare-with-base"]
    said = command(
        checkpoint, tmp_path / "out", "--prompts", tmp_path / "p.jsonl", "--prompt", "a cat", *size, *encoders
    )
    assert said == f"4 pictures in {tmp_path / 'out'}, side by side in contact-sheet.png"
    base, swapped = (sorted((tmp_path / "out" / name).glob("0*.png")) for name in ("base", "swapped"))
    assert [path.name[-9:] for path in base] == ["seed0.png", "seed3.png"]
    assert read_record(base[1])["tokens"][0]["words_cut"] > 0
    assert read_record(swapped[1])["tokens"][0]["words_cut"] == 0
    assert pixels(base[0]) == draw(stock, PromptLine("a cat", negative="bad"), 0, TWO_STEPS).tobytes()


def test_the_command_knows_the_shipped_pipeline_and_encoders_by_name(
    checkpoint, slots_248, tmp_path, long_prompt, monkeypatch
):
    (tmp_path / "slots").mkdir()
    (tmp_path / "sdxl").symlink_to(checkpoint)
    (tmp_path / "slots" / "debias").symlink_to(slots_248)
    monkeypatch.setattr(shipped, "MINIATURE_FOLDER", tmp_path)
    size = ["--prompt", long_prompt, "--steps", "1", "--width", "32", "--height", "32"]
    encoders = ["--text-encoder", "miniature:debias", "--text-encoder-2", "miniature:debias"]
    command("miniature", tmp_path / "out", *size, *encoders)
    record = read_record(next((tmp_path / "out").glob("0*.png")))
    assert {e["context_length"] for e in record["encoders"].values()} == {248}
    with pytest.raises(
        ValueError, match="'miniature:debais'; for SDXL's slots: miniature:stretched, .*miniature:debias"
    ):
        command("miniature", tmp_path / "other", *size, "--text-encoder-2", "miniature:debais")
    assert not (tmp_path / "other").exists()


def test_the_command_says_which_words_were_not_read(checkpoint, tmp_path):
    prompt = "cat " * 76 + "striped tail"
    size = ["--steps", "1", "--width", "32", "--height", "32", "--max-length", "77"]
    said = command(checkpoint, tmp_path, "--prompt", prompt, *size)
    assert "text_encoder did not read: cat striped tail" in said


WRONG_COMMANDS = {
    "no prompt": ([], "no prompt: give --prompt or --prompts FILE"),
    "nothing to compare": (["--prompt", "a", "--compare-with-base"], "needs other encoders"),
    "no length": (["--prompt", "a", "--max-length", "long"], "max_length is 'long'"),
    "config of a folder": (["--prompt", "a", "--config", "x"], "belongs to a one-file checkpoint"),
}


@pytest.mark.parametrize(("words", "message"), WRONG_COMMANDS.values(), ids=WRONG_COMMANDS)
def test_wrong_commands_say_what_is_missing(words, message, checkpoint, tmp_path):
    with pytest.raises(ValueError, match=message):
        command(checkpoint, tmp_path / "out", *words)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -1.0])
def test_guidance_is_a_finite_number_from_zero(value):
    with pytest.raises(ValueError, match=r"guidance_scale is (nan|inf|-1.0); expected a finite number, 0 or more"):
        Settings(guidance_scale=value)


def test_a_seed_that_torch_cannot_take_is_refused_by_its_flag(stock, tmp_path):
    for lines, seeds in ((["a cat"], [2**63]), ([PromptLine("a cat", seed=2**64)], [0])):
        with pytest.raises(ValueError, match=r"--seed \d+, or a prompt's own, is too large"):
            generate(stock, lines, seeds, tmp_path / "none", **QUIET)
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize("name", ["results.json", "contact-sheet.png", "table.md", "Report.html"])
def test_a_set_is_not_called_as_a_file_of_the_report(name, stock, tmp_path):
    with pytest.raises(ValueError, match="as a file of the report is"):
        compare({name: stock}, ["a cat"], [0], tmp_path / "none", **QUIET)
    with pytest.raises(ValueError, match="as a file of the report is"):
        set_names([f"{name}=stock"])
