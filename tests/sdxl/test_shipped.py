"""What is shipped is found by name, and the pipeline file from a checkout and from an installed package alike."""

import shutil
import subprocess
import sys
import zipfile
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import pytest

from debias_diffusion.encoders.encoder import MINIATURE_FOLDER
from debias_diffusion.sdxl import prompts
from debias_diffusion.sdxl.prompts import pipeline_class, pipeline_file
from debias_diffusion.sdxl.shipped import SLOT_SETS, checkpoint_source, slots_source
from debias_diffusion.sdxl.slot_folder import check_slot
from debias_diffusion.sdxl.slots import SLOTS

ROOT = Path(__file__).parents[2]
FILE = "pipeline_debias_sdxl.py"


def test_the_shipped_pipeline_is_called_miniature() -> None:
    assert checkpoint_source("miniature") == str(MINIATURE_FOLDER / "sdxl")
    for other in ("./miniature", "miniature:debias", "miniature/sdxl", "/models/sdxl.safetensors", ""):
        assert checkpoint_source(other) == other


@pytest.mark.parametrize("kind", ["stretched", "long-clip", "debias"])
def test_shipped_encoders_are_called_by_their_recipe(kind: str) -> None:
    assert slots_source(f"miniature:{kind}") == str(MINIATURE_FOLDER / "slots" / kind)


@pytest.mark.parametrize(
    "source",
    ["miniature:base", "miniature:random", "ViT-L-14:openai", "miniature", "debias", "runs/slots", "C:\\slots", ""],
)
def test_other_sources_stay_as_they_are(source: str) -> None:
    assert slots_source(source) == source


def test_a_weight_file_named_for_the_miniatures_row_stays_too(tmp_path: Path) -> None:
    (tmp_path / "w.safetensors").touch()
    assert slots_source(f"miniature:{tmp_path}/w.safetensors") == f"miniature:{tmp_path}/w.safetensors"


@pytest.mark.parametrize("kind", ["", "debais", "Debias", "sdxl", "../slots/debias"])
def test_a_wrong_name_lists_the_right_ones(kind: str) -> None:
    with pytest.raises(
        ValueError,
        match="miniature:stretched, miniature:long-clip, miniature:debias; encoders: miniature:base, miniature:random",
    ):
        slots_source(f"miniature:{kind}")


@pytest.mark.skipif(not (MINIATURE_FOLDER / "slots").is_dir(), reason="this checkout ships no miniature encoders yet")
@pytest.mark.parametrize(
    "source", [checkpoint_source("miniature"), *(slots_source(f"miniature:{k}") for k in SLOT_SETS)]
)
def test_every_name_stands_for_two_whole_slots(source: str) -> None:
    for slot in SLOTS:
        check_slot(Path(source), slot)


def test_a_checkout_uses_the_pipeline_file_it_shows() -> None:
    assert pipeline_file() == ROOT / "pipelines" / FILE
    assert Path(sys.modules[pipeline_class().__module__].__file__ or "") == ROOT / "pipelines" / FILE


def built(kind: str, folder: Path) -> Path:
    """The unpacked wheel: what an installation puts into site-packages."""
    for needed in ("hatchling", *(["editables"] if kind == "editable" else [])):
        pytest.importorskip(needed)
    code = f"from hatchling.build import build_{kind}; print(build_{kind}({str(folder)!r}))"
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    with zipfile.ZipFile(folder / run.stdout.split()[-1]) as wheel:
        wheel.extractall(folder / "site")
    return folder / "site"


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An installed package, as a folder of site-packages; not to be changed."""
    return built("wheel", tmp_path_factory.mktemp("wheel"))


def test_an_installed_package_finds_the_pipeline_file_beside_its_modules(
    site: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed = site / "debias_diffusion" / "sdxl"
    assert (installed / FILE).read_bytes() == (ROOT / "pipelines" / FILE).read_bytes()
    spec = spec_from_file_location("installed_prompts", installed / "prompts.py")
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)
    monkeypatch.setitem(sys.modules, "pipeline_debias_sdxl", prompts)  # put back afterwards, whatever it was
    spec.loader.exec_module(module)
    assert module.pipeline_file() == installed / FILE
    assert module.pipeline_class().__name__ == "DebiasStableDiffusionXLPipeline"
    assert Path(sys.modules["pipeline_debias_sdxl"].__file__ or "") == installed / FILE


def test_a_package_without_the_pipeline_file_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "debias_diffusion" / "sdxl").mkdir(parents=True)
    here = shutil.copy(prompts.__file__, tmp_path / "debias_diffusion" / "sdxl" / "prompts.py")
    monkeypatch.setattr(prompts, "__file__", str(here))
    with pytest.raises(
        FileNotFoundError, match="pipeline_debias_sdxl.py is in neither .*pipelines nor .*sdxl; install"
    ):
        pipeline_file()


def test_an_installed_package_carries_the_miniature(site: Path) -> None:
    shipped = {path.relative_to(MINIATURE_FOLDER) for path in MINIATURE_FOLDER.rglob("*") if path.is_file()}
    assert all((site / "debias_diffusion" / "miniature" / path).is_file() for path in shipped)


def test_an_editable_install_goes_on_using_the_checkout(tmp_path: Path) -> None:
    code = (
        f"import site; site.addsitedir({str(built('editable', tmp_path))!r}); import importlib.util as u; "
        "print(u.find_spec('debias_diffusion').origin)"
    )
    run = subprocess.run([sys.executable, "-S", "-c", code], capture_output=True, text=True, check=True, cwd=tmp_path)
    assert Path(run.stdout.strip()) == ROOT / "debias_diffusion" / "__init__.py"
