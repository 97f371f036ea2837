import dataclasses
import re

import pytest
from accelerate import Accelerator
from hypothesis import given, settings
from hypothesis import strategies as st

from debias_diffusion.config import TrainConfig
from debias_diffusion.data.scene_sets import ScenePairs
from debias_diffusion.training import checks
from debias_diffusion.training.loop import open_source
from debias_diffusion.training.sharding import make_accelerator


@pytest.mark.parametrize("other", [12, 16])
def test_processes_that_read_different_data_are_told_apart(other, monkeypatch, pair_folder):
    pairs = open_source(TrainConfig(data=str(pair_folder)))
    theirs = (other, checks.keys_digest(ScenePairs(other)))
    monkeypatch.setattr(checks, "gather_object", lambda mine: [*mine, *mine])
    accelerator = make_accelerator("fp32")
    checks.check_same_data(pairs, accelerator)
    monkeypatch.setattr(checks, "gather_object", lambda mine: [*mine, theirs])
    checks.check_same_data(pairs, accelerator)  # alone there is nobody to differ from
    monkeypatch.setattr(Accelerator, "num_processes", property(lambda _: 2))
    with pytest.raises(ValueError, match=r"process 0 reads 16 pairs, but 1 of 2 processes read others \(process 1\)"):
        checks.check_same_data(pairs, accelerator)


def test_a_dry_run_needs_no_folder_but_to_resume():
    config = TrainConfig(data="scenes", encoder="miniature:base")
    checks.check_config(config, rehearsing=True)
    with pytest.raises(ValueError, match="--output is missing"):
        checks.check_config(config)
    with pytest.raises(ValueError, match="--output is missing"):
        checks.check_config(dataclasses.replace(config, resume=True), rehearsing=True)


@settings(max_examples=300)
@given(batch=st.integers(2, 600), pca_batch=st.integers(0, 200), dim=st.integers(1, 64))
def test_what_is_said_to_fit_too_few_pictures_does_fit(batch, pca_batch, dim):
    config = TrainConfig(output="x", data="scenes", batch_size=batch, pca_batch=pca_batch, pca_dim=dim)
    for problem in config.problems():
        for flag, value in re.findall(r"\(--(pca-dim|pca-batch) (\d+) fits\)", problem):
            assert not dataclasses.replace(config, **{flag.replace("-", "_"): int(value)}).problems(), problem
        assert ("--batch-size is the limit" in problem) == (batch <= dim + 1)


@pytest.mark.parametrize(
    ("batch", "pca_batch", "advice"),
    [
        (8, 64, "--batch-size is the limit: lower --pca-dim (--pca-dim 4 fits), or raise --batch-size above 33"),
        (
            8,
            4,
            "--batch-size is the limit: lower --pca-dim (--pca-dim 2 fits), or raise --batch-size and --pca-batch above",
        ),
        (256, 16, "--pca-batch is the limit: raise it (--pca-batch 64 fits), or lower --pca-dim (--pca-dim 8 fits)"),
    ],
)
def test_too_few_pictures_for_the_components_are_told_with_their_limit(batch, pca_batch, advice):
    (problem,) = TrainConfig(output="x", data="scenes", batch_size=batch, pca_batch=pca_batch).problems()
    assert advice in problem
