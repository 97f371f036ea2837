"""One run to a folder: a second is refused, a dead one's lock is taken over."""

import json
import os
import subprocess
import sys

import pytest

from debias_diffusion.training.lock import FolderLock


def test_a_second_run_is_refused_while_the_first_lives(tmp_path):
    with FolderLock(tmp_path):
        with pytest.raises(
            ValueError, match=rf"another run writes to .* \(process {os.getpid()}\); wait for it, or name"
        ):
            FolderLock(tmp_path).__enter__()
        assert (tmp_path / ".lock").exists(), "who was refused must not take the lock away"
    assert not (tmp_path / ".lock").exists()
    with FolderLock(tmp_path):
        pass


def test_the_lock_goes_even_where_the_run_fails(tmp_path):
    with pytest.raises(RuntimeError), FolderLock(tmp_path):
        raise RuntimeError
    assert not (tmp_path / ".lock").exists()


def test_a_dead_run_s_lock_is_taken_over(tmp_path):
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    lock = json.loads(FolderLock(tmp_path)._mine) | {"pid": process.pid}
    (tmp_path / ".lock").write_text(json.dumps(lock))
    with FolderLock(tmp_path):
        assert json.loads((tmp_path / ".lock").read_text())["pid"] == os.getpid()


def test_a_number_that_another_process_has_now_is_a_dead_run_s(tmp_path):
    lock = json.loads(FolderLock(tmp_path)._mine) | {"started": 1.0}
    (tmp_path / ".lock").write_text(json.dumps(lock))
    with FolderLock(tmp_path):
        pass


@pytest.mark.parametrize("text", ["", "{", "[1]"])
def test_a_lock_cut_short_is_taken_over(text, tmp_path):
    (tmp_path / ".lock").write_text(text)
    with FolderLock(tmp_path):
        assert json.loads((tmp_path / ".lock").read_text())["pid"] == os.getpid()


def test_another_machine_s_lock_is_left_to_people(tmp_path):
    lock = json.loads(FolderLock(tmp_path)._mine) | {"host": "elsewhere"}
    (tmp_path / ".lock").write_text(json.dumps(lock))
    with pytest.raises(ValueError, match=r"on elsewhere\).*if it is gone, delete .*\.lock"):
        FolderLock(tmp_path).__enter__()
