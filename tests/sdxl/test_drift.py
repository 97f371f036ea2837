"""Drift is nothing for the same tower, what was put in for a moved one, and measured only where both can read."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from debias_diffusion.cli import main
from debias_diffusion.encoders.checkpoint import load_encoder, save_encoder
from debias_diffusion.encoders.encoder import Encoder
from debias_diffusion.sdxl import shipped
from debias_diffusion.sdxl.drift import PROMPTS, drift_table, slot_drift, slot_states
from debias_diffusion.sdxl.slots import SLOTS, slot_from_encoder

BOTH = pytest.mark.parametrize("slot", tuple(SLOTS))


@BOTH
def test_a_tower_does_not_drift_from_itself(slot: str, towers: dict[str, Encoder], slots_77: Path) -> None:
    result = slot_drift(towers[slot], slots_77, slot=slot)
    for part in ("penultimate", "padding", "pooled"):
        assert result[part]["relative_error"] < 1e-6
        assert result[part]["cosine"] == pytest.approx(1, abs=1e-6)
    assert (result["prompts"], result["left_out"], result["length"]) == (len(PROMPTS), 0, 77)
    assert result["penultimate"]["rows"] + result["padding"]["rows"] == 77 * len(PROMPTS)


@BOTH
def test_stretching_alone_moves_nothing_in_the_first_20_positions(slot: str, towers: dict[str, Encoder]) -> None:
    result = slot_drift(towers[slot].stretched(248), towers[slot], ["word " * 60], slot=slot)
    errors = {row["position"]: row["relative_error"] for row in result["penultimate"]["by_position"]}
    assert max(errors[i] for i in range(20)) < 1e-6
    assert min(errors[i] for i in range(30, 60)) > 1e-3


@BOTH
def test_numbers_equal_a_plain_computation(
    slot: str, towers: dict[str, Encoder], make_tower: Callable[..., Encoder]
) -> None:
    other, prompts = make_tower(slot, seed=5), ["a red cube", "two green balls on a table"]
    result = slot_drift(other, towers[slot], prompts, slot=slot, batch_size=1)
    slots = [slot_from_encoder(encoder, slot) for encoder in (other, towers[slot])]
    (a, pooled_a, rows), (b, pooled_b, _) = (slot_states(s, prompts, 77) for s in slots)
    errors, cosines = [], []
    for i in range(2):
        for j in range(77):
            if rows[i, j]:
                errors.append(float((a[i, j] - b[i, j]).norm() / b[i, j].norm()))
                cosines.append(float(torch.dot(a[i, j], b[i, j]) / a[i, j].norm() / b[i, j].norm()))
    assert result["penultimate"]["rows"] == len(errors) == 5 + 8
    assert result["penultimate"]["relative_error"] == pytest.approx(sum(errors) / len(errors), rel=1e-5)
    assert result["penultimate"]["cosine"] == pytest.approx(sum(cosines) / len(cosines), abs=1e-5)
    pooled = [float((pooled_a[i] - pooled_b[i]).norm() / pooled_b[i].norm()) for i in range(2)]
    assert result["pooled"]["relative_error"] == pytest.approx(sum(pooled) / 2, rel=1e-5)


def test_a_bang_in_the_second_slot_is_text_not_padding(towers: dict[str, Encoder]) -> None:
    slot = slot_from_encoder(towers["text_encoder_2"], "text_encoder_2")
    _, _, is_text = slot_states(slot, ["wow! a cat"], 77)
    assert int(is_text.sum()) == 6  # SOT wow ! a cat EOT


def test_prompts_that_do_not_fit_are_left_out_and_counted(towers: dict[str, Encoder], long_prompt: str) -> None:
    tower = towers["text_encoder"]
    result = slot_drift(tower.stretched(248), tower, ["a cat", long_prompt], slot="text_encoder")
    assert (result["prompts"], result["left_out"], result["length"]) == (1, 1, 77)
    with pytest.raises(ValueError, match="none of the 1 prompts fits 77 tokens"):
        slot_drift(tower, tower, [long_prompt], slot="text_encoder")


def test_two_vocabularies_are_not_compared(towers: dict[str, Encoder], tiny_folder: Path) -> None:
    with pytest.raises(ValueError, match="one vocabulary"):
        slot_drift(load_encoder(tiny_folder), towers["text_encoder"], ["a hummingbird"], slot="text_encoder")


def test_the_slot_is_told_where_it_can_be(towers: dict[str, Encoder], slots_77: Path) -> None:
    opened = slot_from_encoder(towers["text_encoder_2"], "text_encoder_2")
    assert slot_drift(opened, slots_77, ["a cat"])["slot"] == "text_encoder_2"
    for source in (slots_77, towers["text_encoder"]):
        with pytest.raises(ValueError, match="tell its slot; say which: text_encoder, text_encoder_2"):
            slot_drift(source, slots_77, ["a cat"])


def test_the_table_gathers_positions(towers: dict[str, Encoder]) -> None:
    table = drift_table(slot_drift(towers["text_encoder"], towers["text_encoder"], ["a cat"], slot="text_encoder"))
    assert "| penultimate, text | 4 | 0.0000 | 1.0000 |" in table
    assert "| penultimate, padding | 73 | 0.0000 | 1.0000 |" in table
    assert "| text, positions 0-9 | 4 |" in table
    assert "positions 10-19" not in table


def test_drift_of_what_is_shipped_by_name(
    slots_248: Path,
    slots_77: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "slots").mkdir()
    (tmp_path / "slots" / "long-clip").symlink_to(slots_248)
    (tmp_path / "sdxl").symlink_to(slots_77)
    monkeypatch.setattr(shipped, "MINIATURE_FOLDER", tmp_path)
    main(["drift", "miniature:long-clip", "miniature"])
    assert capsys.readouterr().out.startswith("text_encoder: 8 prompts of up to 77 tokens")
    with pytest.raises(SystemExit):
        main(["drift", "miniature:longclip", "miniature"])
    assert "miniature:long-clip" in capsys.readouterr().err


def test_drift_by_command(
    towers: dict[str, Encoder], slots_248: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "prompts.txt").write_text("a red cube\n\na blue ball on a green box\n")
    reference = save_encoder(replace(towers["text_encoder_2"], name="base"), tmp_path / "base")
    out = tmp_path / "numbers" / "drift.json"
    main(["drift", str(slots_248), str(reference), "--slot", "text_encoder_2",
          "--prompts", str(tmp_path / "prompts.txt"), "--output", str(out)])  # fmt: skip
    assert "text_encoder_2: 2 prompts of up to 77 tokens" in capsys.readouterr().out
    assert json.loads(out.read_text())["pooled"]["relative_error"] > 0.01
    with pytest.raises(SystemExit):
        main(["drift", str(slots_248), str(reference), "--prompts", str(tmp_path / "nothing.txt")])
    assert "no file of prompts" in capsys.readouterr().err
