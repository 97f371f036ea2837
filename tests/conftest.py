"""Fixtures shared by all tests: real data where it is present, and small real models built offline."""

from pathlib import Path

import pytest

SHARED = Path(__file__).resolve().parents[2] / "shared"

collect_ignore_glob = [
    "*_worker.py",
    "*/*_worker.py",
]  # programs that tests start; with doctests on, pytest would import them


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder of real captions, pictures and golden numbers beside the checkout; skips where it is absent."""
    if not SHARED.is_dir():
        pytest.skip("the shared data folder is not beside this checkout")
    return SHARED


TINY_CONFIG = {
    "embed_dim": 32,
    "quick_gelu": True,
    "vision_cfg": {"image_size": 32, "patch_size": 16, "width": 32, "layers": 1, "head_width": 16},
    "text_cfg": {"context_length": 77, "vocab_size": 851, "width": 32, "heads": 2, "layers": 2},
}


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A saved encoder folder: real towers at 77 tokens, random weights, the miniature's vocabulary."""
    import torch

    from debias_diffusion.encoders.checkpoint import BPE_FILE, save_encoder
    from debias_diffusion.encoders.encoder import MINIATURE_FOLDER, build

    torch.manual_seed(0)
    encoder = build("tiny", TINY_CONFIG, bpe_file=MINIATURE_FOLDER / BPE_FILE)
    for parameter in encoder.model.parameters():
        # Fresh norms are ones and biases zeros: a swapped or dropped one would not show.
        parameter.data += 0.02 * torch.randn_like(parameter)
    return save_encoder(encoder, tmp_path_factory.mktemp("encoders") / "tiny")


@pytest.fixture
def tiny(tiny_folder: Path):
    """The tiny encoder, fresh for each test."""
    from debias_diffusion import load_encoder

    return load_encoder(tiny_folder)


@pytest.fixture(scope="session")
def pair_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Sixteen pictures of the miniature world with their long captions beside them."""
    from debias_diffusion.data.scene_sets import ScenePairs

    folder, pairs = tmp_path_factory.mktemp("pairs"), ScenePairs(16)
    for i in range(len(pairs)):
        pairs.open(i).save(folder / f"{i:02}.png")
        (folder / f"{i:02}.txt").write_text(pairs.captions[i])
    return folder
