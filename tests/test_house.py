"""The architecture as tests: what a file may weigh, and what an import may pull in."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
LIBRARY = sorted((ROOT / "debias_diffusion").rglob("*.py"))
OWN = [*LIBRARY, *(p for d in ("train", "pipelines", "apps") for p in sorted((ROOT / d).rglob("*.py")))]


@pytest.mark.parametrize("path", OWN, ids=lambda p: str(p.relative_to(ROOT)))
def test_one_idea_a_file(path):
    assert len(path.read_text().splitlines()) <= 260


@pytest.mark.parametrize("name", ["utils", "helpers", "common", "misc", "base", "factory", "manager"])
def test_no_file_is_named_for_nothing(name):
    assert not [p for p in OWN if p.stem == name]


def test_the_package_opens_at_once_without_torch():
    code = (
        "import sys, time; t = time.process_time(); import debias_diffusion, debias_diffusion.config; "
        "heavy = {'torch', 'open_clip', 'transformers', 'diffusers', 'gradio', 'numpy'} & set(sys.modules); "
        "print(time.process_time() - t, sorted(heavy))"  # wall time would tell of the machine's other work
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    seconds, heavy = result.stdout.split(maxsplit=1)
    assert heavy.strip() == "[]"
    assert float(seconds) < 0.3


def test_the_package_offers_what_it_lists():
    import debias_diffusion

    assert all(getattr(debias_diffusion, name) for name in debias_diffusion.__all__)
    with pytest.raises(AttributeError, match="offers"):
        _ = debias_diffusion.nonsense
