"""A picture's record names the weights it was drawn with, and the sheets show every picture large enough."""

import copy
import struct
import zlib
from typing import Any

import pytest
import torch
from PIL import Image, PngImagePlugin

from debias_diffusion.sdxl import record
from debias_diffusion.sdxl.record import (
    known_hash,
    module_hash,
    pipeline_record,
    read_record,
    write_contact_sheets,
    write_png,
)


@pytest.fixture
def encoder(mini_slots, make_pipe) -> Any:
    """A small text encoder, for a test to change."""
    return make_pipe(mini_slots).text_encoder


@pytest.fixture
def hashed(monkeypatch) -> list[Any]:
    """The modules that were hashed whole, in order."""
    seen: list[Any] = []
    whole = record.module_hash

    def note(module: Any, samples: int = 0) -> str:
        if not samples:
            seen.append(module)
        return whole(module, samples)

    monkeypatch.setattr(record, "module_hash", note)
    return seen


def test_what_did_not_change_is_hashed_once(encoder, hashed):
    first = known_hash(encoder)
    assert [known_hash(encoder) for _ in range(3)] == [first] * 3
    assert hashed == [encoder]
    assert known_hash(copy.deepcopy(encoder)) == first  # by what it holds, not by where
    assert len(hashed) == 2


def _in_place(weight: Any) -> None:
    with torch.no_grad():
        weight[30, 17] += 1e-3


def _through_data(weight: Any) -> None:
    weight.data[30, 17] += 1e-3  # leaves the version as it was


def _rows_swapped(weight: Any) -> None:
    with torch.no_grad():
        weight[[3, 4]] = weight[[4, 3]]  # leaves every sum as it was


def _loaded(weight: Any) -> None:
    with torch.no_grad():
        weight.copy_(weight * 1.01)


def _shared_with_numpy(weight: Any) -> None:
    weight.detach().numpy()[30, 17] += 1e-3


@pytest.mark.parametrize("change", [_in_place, _through_data, _rows_swapped, _loaded, _shared_with_numpy])
def test_a_weight_changed_in_place_changes_the_hash(encoder, change):
    before = known_hash(encoder)
    change(encoder.get_input_embeddings().weight)
    assert known_hash(encoder) == module_hash(encoder) != before


def test_other_weights_dtypes_and_settings_of_a_module_change_the_hash(encoder):
    hashes = [known_hash(encoder)]
    encoder.get_input_embeddings().weight = torch.nn.Parameter(encoder.get_input_embeddings().weight + 1)
    hashes.append(known_hash(encoder))
    encoder.to(torch.bfloat16)
    hashes.append(known_hash(encoder))
    assert hashes[-1] == module_hash(encoder)
    assert len(set(hashes)) == 3


def test_a_fused_lora_changes_the_hash_and_so_does_taking_it_out(slots_77, make_pipe):
    pipe = make_pipe(slots_77)
    hashes = [known_hash(pipe.text_encoder)]
    names = [f"lora_te1_text_model_encoder_layers_0_self_attn_{part}" for part in ("q_proj", "out_proj")]
    shapes = {"lora_down": (2, 64), "lora_up": (64, 2)}
    lora = {f"{name}.{way}.weight": torch.ones(shape) for name in names for way, shape in shapes.items()}
    pipe.load_lora_weights(lora)
    hashes.append(known_hash(pipe.text_encoder))
    pipe.fuse_lora(components=["text_encoder"])
    hashes.append(known_hash(pipe.text_encoder))
    pipe.unload_lora_weights()
    hashes.append(known_hash(pipe.text_encoder))
    assert len(set(hashes)) == 4
    assert hashes[-1] == module_hash(pipe.text_encoder)


def test_the_record_of_a_pipeline_follows_its_weights_and_hashes_them_once(mini_slots, make_pipe, hashed):
    pipe = make_pipe(mini_slots)
    first = pipeline_record(pipe)
    assert pipeline_record(pipe) == first
    assert hashed == [pipe.text_encoder, pipe.text_encoder_2]
    pipe.text_encoder_2.text_projection.weight.data += 1e-3
    second = pipeline_record(pipe)
    assert second["encoders"]["text_encoder"] == first["encoders"]["text_encoder"]
    assert second["encoders"]["text_encoder_2"]["sha256"] != first["encoders"]["text_encoder_2"]["sha256"]


# Sheets


@pytest.mark.parametrize(
    ("size", "shown"),
    [
        ((64, 64), (256, 256)),
        ((72, 56), (288, 224)),
        ((8, 8), (256, 256)),
        ((200, 100), (400, 200)),
        ((256, 128), (256, 128)),
        ((1024, 512), (256, 128)),
    ],
)
def test_a_sheet_enlarges_small_pictures_by_a_whole_factor_unsmoothed(size, shown, tmp_path):
    image = Image.new("RGB", size, "red")
    image.paste("blue", (0, 0, size[0] // 2, size[1]))
    write_png(image, tmp_path / "p.png", {})
    [path] = write_contact_sheets(tmp_path, ["one", "two"], [("a prompt", [tmp_path / "p.png"] * 2)])
    cell, top = max(shown), 2 * 36
    with Image.open(path) as sheet:
        assert sheet.size == (2 * cell + 4, top + cell)
        second = sheet.crop((cell + 4, top, cell + 4 + shown[0], top + shown[1]))
        assert sheet.getpixel((cell + 1, top)) == (255, 255, 255)
        assert second.getpixel((0, 0)) == second.getpixel((0, shown[1] - 1)) == (0, 0, 255)
        assert second.getpixel((shown[0] - 1, shown[1] - 1)) == (255, 0, 0)
        assert (len(second.getcolors(1 << 16)) == 2) or max(size) > 256  # two colours, and none between them
    assert read_record(path) == {"contact_sheet": [["p.png", "p.png"]]}


@pytest.mark.parametrize("damage", ["no JSON", "no object", "size", "length"])
def test_a_picture_with_a_broken_record_or_header_counts_as_not_there(damage, tmp_path):
    path = tmp_path / "a.png"
    write_png(Image.new("RGB", (8, 8)), path, {"seed": 1})
    assert read_record(path) == {"seed": 1}
    if damage.startswith("no"):
        text = PngImagePlugin.PngInfo()
        text.add_itxt(record.KEY, "{" if damage == "no JSON" else "[1]")
        Image.new("RGB", (8, 8)).save(path, pnginfo=text)
    else:
        header = {"size": struct.pack(">I", 13) + b"IHDR" + b"\xff" * 8, "length": struct.pack(">I", 2) + b"IHDR"}[
            damage
        ]
        content = path.read_bytes()
        body = header[4:] + content[8 + len(header) : 29]
        whole = header + content[8 + len(header) : 29] + struct.pack(">I", zlib.crc32(body))
        path.write_bytes(content[:8] + whole + content[33:])
    assert read_record(path) is None
