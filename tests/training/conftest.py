"""Fixtures of the tests of training."""

import pytest

from debias_diffusion.config import TrainConfig


@pytest.fixture
def config(tiny_folder, pair_folder, tmp_path):
    """A run of four steps of a tiny encoder, saved at every second."""
    return TrainConfig(
        output=str(tmp_path / "run"), data=str(pair_folder), encoder=str(tiny_folder), batch_size=8, pca_dim=3, pca_batch=8,
        max_steps=4, learning_rate=1e-3, warmup_steps=1, workers=0, log_every=1, save_every=2,
    )  # fmt: skip
