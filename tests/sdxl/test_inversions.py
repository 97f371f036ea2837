"""A textual inversion is read by both encoders, or changes neither."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from debias_diffusion.sdxl.inversions import load_inversion
from debias_diffusion.sdxl.prompts import debias_pipeline
from debias_diffusion.sdxl.swap import swap_text_encoders

WIDTH = 64
KEYS = ("clip_l", "clip_g")


def inversion(folder: Path, **changes: torch.Tensor | None) -> Path:
    generator = torch.Generator().manual_seed(2)
    state = {key: torch.randn(2, WIDTH, generator=generator) for key in KEYS} | changes
    save_file({key: value for key, value in state.items() if value is not None}, folder / "geese.safetensors")
    return folder / "geese.safetensors"


def encode(pipe: Any, prompt: str) -> tuple[torch.Tensor, ...]:
    with torch.no_grad():
        return tuple(pipe.encode_prompt(prompt, negative_prompt="x", device="cpu"))


def test_one_call_loads_both_encoders(pipe: Any, slots_248: Path, tmp_path: Path) -> None:
    new = swap_text_encoders(pipe, text_encoder=slots_248, text_encoder_2=slots_248)
    before = encode(new, "a flock of birds")
    assert load_inversion(new, inversion(tmp_path), "<geese>") == "<geese>"
    loaded, plain = encode(new, "a flock of <geese>"), encode(new, "a flock of")
    for half in (slice(0, WIDTH), slice(WIDTH, None)):
        assert not torch.allclose(loaded[0][..., half], plain[0][..., half], atol=1e-3)
    assert all(torch.equal(a, b) for a, b in zip(before, encode(new, "a flock of birds"), strict=True))
    report = debias_pipeline(new).prompt_report("a flock of <geese>")
    assert [row.num_tokens for row in report] == [7, 7]  # three words, two vectors, BOS and EOS
    assert len(pipe.tokenizer) == 49408


def test_the_token_is_the_files_name_where_none_is_given(pipe: Any, tmp_path: Path) -> None:
    path = inversion(tmp_path).rename(tmp_path / "geese-v2.safetensors")
    assert load_inversion(pipe, path) == "geese-v2"
    assert {len(pipe.tokenizer), len(pipe.tokenizer_2)} == {49410}


def test_one_vector_without_its_axis_is_one_token(pipe: Any, tmp_path: Path) -> None:
    load_inversion(pipe, inversion(tmp_path, **{key: torch.ones(WIDTH) for key in KEYS}), "<geese>")
    assert torch.equal(pipe.text_encoder_2.get_input_embeddings().weight[49408], torch.ones(WIDTH))


WRONG: dict[str, tuple[dict[str, torch.Tensor | None], str]] = {
    "for an older model": (
        {"clip_g": None, "emb_params": torch.zeros(2, 64)},
        "holds clip_l, emb_params and no clip_g",
    ),
    "another width": ({"clip_g": torch.zeros(2, 48)}, r"has shape \(2, 48\); text_encoder_2 takes \(vectors, 64\)"),
    "not finite": ({"clip_g": torch.full((2, 64), torch.nan)}, "clip_g of '<geese>' is not finite"),
}


@pytest.mark.parametrize(("changes", "message"), WRONG.values(), ids=WRONG)
def test_what_one_encoder_cannot_take_changes_neither(
    changes: dict[str, torch.Tensor | None], message: str, pipe: Any, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=message):
        load_inversion(pipe, inversion(tmp_path, **changes), "<geese>")
    assert {len(pipe.tokenizer), len(pipe.tokenizer_2)} == {49408}
    assert pipe.text_encoder.get_input_embeddings().weight.shape[0] == 49408


def test_a_token_in_use_a_missing_file_and_a_broken_one_are_refused(pipe: Any, tmp_path: Path) -> None:
    path = inversion(tmp_path)
    load_inversion(pipe, path, "<geese>")
    for token in ("<geese>", "cat"):
        with pytest.raises(ValueError, match=f"tokenizer knows '{token}' already; give another token="):
            load_inversion(pipe, path, token)
    with pytest.raises(FileNotFoundError, match="no textual inversion at .*nowhere"):
        load_inversion(pipe, tmp_path / "nowhere.safetensors")
    path.write_bytes(path.read_bytes()[:-10])
    with pytest.raises(ValueError, match="not a whole safetensors file"):
        load_inversion(pipe, path, "<ducks>")
    pipe.text_encoder = None
    with pytest.raises(ValueError, match="has no text_encoder with tokenizer"):
        load_inversion(pipe, inversion(tmp_path), "<ducks>")
