"""The app as programs meet it: named endpoints, many at once, and what is not served."""

import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest
from gradio_client import Client
from gradio_client.exceptions import AppError
from PIL import Image

from apps.compare import main
from debias_diffusion.sdxl.generate import Settings, compare
from debias_diffusion.sdxl.record import read_record

ASKED = {
    "prompt": "a red cat",
    "sets": ["stock", "debias"],
    "negative": "",
    "seed": 0,
    "num_seeds": 1,
    "steps": 2,
    "guidance": 3.0,
    "size": "32 x 32",
    "length": "auto",
    "syntax": "plain",
    "blend": 1.0,
}
BEFORE_WORK = ("STARTING", "JOINING_QUEUE", "IN_QUEUE", "SENDING_DATA")


@pytest.fixture(scope="module")
def client(served, tmp_path_factory):
    return Client(served.url, verbose=False, download_files=tmp_path_factory.mktemp("downloads"))


def pixels(path) -> bytes:
    with Image.open(path) as image:
        assert image.format == "PNG"
        return image.tobytes()


def test_the_endpoint_gives_the_pixels_and_records_of_compare(client, served, tmp_path, long_prompt):
    asked = ASKED | {"prompt": long_prompt, "seed": 3, "num_seeds": 2}
    files, about, archive = client.predict(**asked, api_name="/compare")
    settings = Settings(steps=2, guidance_scale=3.0, width=32, height=32)
    pipes = {name: served.studio.pipes[name] for name in about["sets"]}
    alone = compare(
        pipes, [long_prompt], [3, 4], tmp_path, settings=settings, max_lengths={"stock": 77}, progress=False
    )
    paths = [path for name in about["sets"] for path in alone[name]]
    assert about["sets"] == ["stock", "debias"]
    assert [pixels(file) for file in files] == [pixels(path) for path in paths]
    named = [read_record(path) | {"set": name} for name in about["sets"] for path in alone[name]]
    assert [read_record(file) for file in files] == named
    assert len({Path(file).name for file in files}) == 4  # they can lie in one folder
    assert [row["limit"] for row in about["tokens"]["stock"]] == [77, 77]
    assert Path(archive).suffix == ".zip"


def test_programs_can_ask_what_there_is_and_what_is_read(client, long_prompt):
    assert client.predict(api_name="/sets") == ["stock", "long-clip", "debias"]
    tokens = client.predict(prompt=long_prompt, sets=["debias"], length="77", syntax="plain", api_name="/tokens")
    assert [row["limit"] for row in tokens["debias"]] == [77, 77]
    assert tokens["debias"][0]["cut"]
    alone = client.predict(prompt=long_prompt, sets="debias", length="77", syntax="plain", api_name="/tokens")
    assert alone == tokens
    for change, message in (
        ({"prompt": "x" * 40_001}, "at most 40,000 are taken"),
        ({"prompt": " "}, "The prompt is empty"),
        ({"sets": []}, "expected one or more of: stock"),
        ({"length": "100"}, "lengths: auto, 77, 248"),
    ):
        asked = {"prompt": "a cat", "sets": ["debias"], "length": "77", "syntax": "plain"} | change
        with pytest.raises(AppError, match=message):
            client.predict(**asked, api_name="/tokens")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"prompt": "   "}, "The prompt is empty"),
        ({"sets": ["nothing"]}, "sets: stock, long-clip, debias"),
        ({"size": "1000 x 1000"}, "at most 64"),
        ({"sets": "nothing"}, "called 'nothing'; sets: stock, long-clip, debias"),
        ({"seed": None}, "seed is None"),
        ({"seed": -1}, "The seed is -1; expected 0 to"),
        ({"steps": 0}, "The number of steps is 0; expected 1 to 150"),
        ({"guidance": 99}, "The guidance is 99.0; expected 0 to 50"),
        ({"length": "100"}, "lengths: auto, 77, 248"),
        ({"steps": 10_000}, "10000"),
        ({"prompt": "a (cat:1.3)"}, "is weighting, not words"),
    ],
)
def test_a_request_that_cannot_be_drawn_says_why(client, change, message, capfd):
    with pytest.raises(AppError, match=message):
        client.predict(**(ASKED | change), api_name="/compare")
    assert "Traceback" not in capfd.readouterr().err  # what a visitor gets wrong is no fault of the app


def test_an_app_that_is_ended_leaves_no_files(start_app, folders, tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    with start_app("--checkpoint", str(folders["checkpoint"])):  # ended by SIGTERM
        assert list(tmp_path.glob("debias-compare-*"))
    assert not list(tmp_path.glob("debias-compare-*"))


def test_three_thousand_words_are_drawn_and_what_was_cut_is_said(client):
    _, about, _ = client.predict(**(ASKED | {"prompt": "word " * 3000}), api_name="/compare")
    assert [len(row["cut"]) for row in about["tokens"]["stock"]] == [3000 - 75] * 2
    assert about["tokens"]["debias"][0]["chunks"] == 4


def _draw_many(url: str, count: int, at_once: int) -> dict[tuple[str, int], list[bytes]]:
    def work(number: int) -> tuple[tuple[str, int], list[bytes]]:
        prompt, seed = f"a cat number {number % 5} on a chair", number
        with tempfile.TemporaryDirectory() as folder:
            own = Client(url, verbose=False, download_files=folder)
            files, _, _ = own.predict(**(ASKED | {"prompt": prompt, "seed": seed}), api_name="/compare")
            drawn = [pixels(file) for file in files]
            assert all(read_record(file)["seed"] == seed for file in files)
            own.close()
        return (prompt, seed), drawn

    with ThreadPoolExecutor(at_once) as pool:
        return dict(pool.map(work, range(count)))


def test_visitors_at_once_each_get_their_own_pictures(served, client):
    together = _draw_many(served.url, 6, 3)
    for (prompt, seed), drawn in together.items():
        files, _, _ = client.predict(**(ASKED | {"prompt": prompt, "seed": seed}), api_name="/compare")
        assert [pixels(file) for file in files] == drawn
    assert len({drawn[0] for drawn in together.values()}) == 6


@pytest.mark.slow
def test_fifty_requests_eight_at_a_time_mix_nothing_up_and_keep_no_memory(start_app, folders):
    # In a process of its own: what fifty clients of this test keep is not the app's.
    words = ["--checkpoint", str(folders["checkpoint"]), "--set", f"debias={folders['debias']}"]
    with start_app(*words) as app, tempfile.TemporaryDirectory() as downloads:
        memory = psutil.Process(app.pid)
        _draw_many(app.url, 16, 8)  # what is loaded once is loaded
        before = memory.memory_info().rss
        together = _draw_many(app.url, 50, 8)
        grown = memory.memory_info().rss / before - 1
        client = Client(app.url, verbose=False, download_files=downloads)
        for (prompt, seed), drawn in together.items():
            files, _, _ = client.predict(**(ASKED | {"prompt": prompt, "seed": seed}), api_name="/compare")
            assert [pixels(file) for file in files] == drawn
        client.close()
    assert len({drawn[0] for drawn in together.values()}) == 50
    assert grown < 0.05, f"memory grew by {grown:.1%}"


def test_a_second_visitor_waits_with_a_position(served, client):
    other = Client(served.url, verbose=False)
    first = client.submit(**(ASKED | {"steps": 150, "num_seeds": 9}), api_name="/compare")
    while first.status().code.value in BEFORE_WORK:  # else the others may come to the device before it
        time.sleep(0.05)
    second = other.submit(**ASKED, api_name="/compare")
    third = other.submit(**ASKED, api_name="/compare")
    ranks = set()
    while not first.done():
        ranks |= {job.status().rank for job in (second, third)}
        if {0, 1} <= ranks:
            break
    assert {0, 1} <= ranks
    for job in (third, second, first):
        job.cancel()


@pytest.mark.parametrize("path", ["/etc/passwd", "pyproject.toml", "../pyproject.toml"])
def test_no_file_is_served_but_those_made_for_a_visitor(served, path):
    for route in ("gradio_api/file=", "file="):
        with pytest.raises(urllib.error.HTTPError) as caught:
            urllib.request.urlopen(served.url + route + path)
        assert caught.value.code in (403, 404)


def test_the_page_names_no_address_outside(served):
    page = urllib.request.urlopen(served.url).read().decode()
    assert "fonts.googleapis" not in page
    assert "google-analytics" not in page
    assert served.url.startswith("http://127.0.0.1:")


def test_the_command_line_names_a_wrong_folder_and_a_wrong_set(capsys, folders, tmp_path):
    for arguments, message in (
        (["--checkpoint", str(folders["checkpoint"]), "--set", f"new={tmp_path}"], "holds none of text_encoder"),
        (["--checkpoint", str(tmp_path)], "model_index.json"),
        (["--set", "a b=c"], "names no set"),
    ):
        with pytest.raises(SystemExit) as caught:
            main(arguments)
        assert caught.value.code == 2
        assert message in capsys.readouterr().err


def test_help_opens_no_model():
    code = (
        "import sys; from apps.compare import main\n"
        "try: main(['--help'])\n"
        "finally: print(sorted({'torch', 'gradio', 'diffusers'} & set(sys.modules)))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "--checkpoint" in result.stdout
    assert result.stdout.strip().endswith("[]")
