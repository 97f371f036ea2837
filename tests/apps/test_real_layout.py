"""The app on SDXL in the layouts it is handed around in: on a user's own checkpoint only the weights are others."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from gradio_client import Client
from PIL import Image

from apps.compare import load_studio
from apps.comparing import run_comparison
from apps.request import Request
from debias_diffusion.sdxl.generate import Settings, compare
from debias_diffusion.sdxl.record import read_record

ROOT = Path(__file__).parents[2]
ASKED = {"steps": 2, "guidance_scale": 3.0, "width": 64, "height": 64}


def arguments(layout: Any, kind: str) -> list[str]:
    """What a user writes after --checkpoint."""
    return [str(layout.folder)] if kind == "folder" else [str(layout.file), "--config", str(layout.config)]


def pixels(path: Path | str) -> bytes:
    with Image.open(path) as image:
        return image.tobytes()


@pytest.fixture(scope="module")
def expected(real_layout, long_prompt, tmp_path_factory) -> dict[str, list[Path]]:
    """The library's pictures of the same models, which no file has held."""
    pipe = real_layout.parts.pipeline()
    return compare(
        {"stock": None, "debias": real_layout.slots},
        [long_prompt],
        [4],
        tmp_path_factory.mktemp("expected"),
        base=pipe,
        settings=Settings(**ASKED),
        max_lengths={"stock": 77},
        progress=False,
    )


@pytest.mark.parametrize("kind", ["folder", "file"])
def test_a_checkpoint_in_sdxls_own_layout_draws_what_its_models_draw(
    kind, real_layout, expected, long_prompt, tmp_path
):
    checkpoint, *more = arguments(real_layout, kind)
    studio, notes = load_studio(
        checkpoint, (f"debias={real_layout.slots}",), config=Path(more[1]) if more else None, device="cpu"
    )
    assert notes == []
    assert (studio.own_size, studio.stock_length, studio.is_miniature) == (64, 77, False)
    done = run_comparison(studio, Request(long_prompt, ("stock", "debias"), seed=4, **ASKED), tmp_path / "done")
    assert {name: [pixels(path) for path in paths] for name, paths in done.pictures.items()} == {
        name: [pixels(path) for path in paths] for name, paths in expected.items()
    }
    records = [read_record(paths[0]) for drawn in (done.pictures, expected) for paths in drawn.values()]
    assert [r["encoders"]["text_encoder"]["context_length"] for r in records] == [77, 248, 77, 248]
    for key in ("unet_sampled_sha256", "vae_sampled_sha256", "force_zeros_for_empty_prompt"):
        assert len({record[key] for record in records}) == 1
    assert [r["encoders"]["text_encoder_2"]["sha256"] for r in records[:2]] == [
        r["encoders"]["text_encoder_2"]["sha256"] for r in records[2:]
    ]


def test_what_a_user_types_serves_a_single_file(start_app, real_layout, expected, long_prompt, tmp_path):
    words = ["--checkpoint", *arguments(real_layout, "file"), "--set", f"debias={real_layout.slots}"]
    with start_app(*words) as app:
        client = Client(app.url, verbose=False, download_files=tmp_path)
        files, about, _ = client.predict(
            prompt=long_prompt, sets=["stock", "debias"], negative="", seed=4, num_seeds=1, steps=2, guidance=3.0,
            size="64 x 64", length="auto", syntax="plain", blend=1.0, api_name="/compare",
        )  # fmt: skip
        client.close()
    assert about["sets"] == ["stock", "debias"]
    assert [pixels(file) for file in files] == [pixels(paths[0]) for paths in expected.values()]


def test_a_single_file_without_configuration_or_network_says_what_to_place_where(real_layout, tmp_path):
    command = [sys.executable, "-m", "apps.compare", "--checkpoint", str(real_layout.file), "--device", "cpu"]
    env = os.environ | {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path)}
    result = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    assert result.returncode == 2
    assert "name a folder with it in --config" in result.stderr
    assert "Traceback" not in result.stderr
