import pytest
from accelerate import Accelerator

from debias_diffusion.data.scene_sets import ScenePairs
from debias_diffusion.training import checks
from debias_diffusion.training.loop import open_source
from debias_diffusion.training.sharding import make_accelerator


@pytest.mark.parametrize("other", [12, 16])
def test_processes_that_read_different_data_are_told_apart(other, monkeypatch, pair_folder):
    from debias_diffusion.config import TrainConfig

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
