"""What a folder's second run may change, and what it is told otherwise."""

from pathlib import Path

import pytest

from debias_diffusion.evaluation.kept_run import keep_flags, refuse_other_run

FLAGS = {"steps": 8, "judge": None, "short": False}
GROWING = {"sets": {"stock": "stock", "mine": "slots"}, "seeds": 2, "prompts": {"0": {"prompt": "A cat."}}}


@pytest.fixture
def begun(tmp_path: Path) -> Path:
    """A run that was stopped: there are no results yet."""
    keep_flags(tmp_path, FLAGS, GROWING)
    return tmp_path


@pytest.fixture
def done(begun: Path) -> Path:
    (begun / "results.json").write_text("{}")
    return begun


def test_the_same_and_more_go_on(done, tmp_path):
    refuse_other_run(tmp_path / "new", FLAGS, GROWING)
    refuse_other_run(done, FLAGS, GROWING)
    more = {"sets": {"debias": "miniature:debias", **GROWING["sets"]}, "seeds": 3}
    refuse_other_run(done, FLAGS, GROWING | more | {"prompts": GROWING["prompts"] | {"1": {"prompt": "A dog."}}})


@pytest.mark.parametrize(
    ("flags", "growing", "said"),
    [
        ({"steps": 9}, {}, "(--steps 8 -> 9)"),
        ({"steps": 9, "judge": "x"}, {}, "(--steps 8 -> 9, --judge None -> x)"),
        ({}, {"sets": {"stock": "stock", "mine": "other"}}, "(--sets mine: slots -> other)"),
        ({}, {"prompts": {"0": {"prompt": "A dog."}}}, "(--prompts 0: {'prompt': 'A cat.'} -> {'prompt': 'A dog.'})"),
        ({}, {"seeds": None}, "(--seeds 2 -> None)"),
    ],
)
def test_other_flags_are_named_with_what_to_do(begun, flags, growing, said):
    with pytest.raises(ValueError, match="name another OUTPUT, or add --fresh") as stop:
        refuse_other_run(begun, FLAGS | flags, GROWING | growing)
    assert said in str(stop.value)
    assert str(begun) in str(stop.value)


@pytest.mark.parametrize("less", [{"seeds": 1}, {"sets": {"stock": "stock"}}, {"prompts": {}}])
def test_less_is_refused_once_there_are_results_to_lose(less, begun):
    refuse_other_run(begun, FLAGS, GROWING | less)
    (begun / "results.json").write_text("{}")
    with pytest.raises(ValueError, match="other flags"):
        refuse_other_run(begun, FLAGS, GROWING | less)


def test_results_of_who_knows_what_are_not_replaced(done):
    (done / "settings.json").write_text("[]")
    with pytest.raises(ValueError, match=r"settings.json cannot be read .*--fresh"):
        refuse_other_run(done, FLAGS, GROWING)
    (done / "settings.json").unlink()
    with pytest.raises(ValueError, match="results that do not say how they were made; name another OUTPUT"):
        refuse_other_run(done, FLAGS, GROWING)
