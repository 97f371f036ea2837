import pytest

from debias_diffusion.training.launch import asked_processes, processes_in_command


@pytest.mark.parametrize(
    ("command", "count"),
    [
        (["python", "/x/bin/accelerate", "launch", "--cpu", "--num_processes=3", "train.py"], 3),
        (["accelerate", "launch", "--num-processes", "2", "train.py"], 2),
        (["accelerate", "launch", "train.py"], 1),
        (["python", "train.py", "--num_processes", "9"], 1),
    ],
)
def test_counts_in_command_lines(command, count):
    assert processes_in_command(command) == count


def test_config_files_count_too(tmp_path):
    config = tmp_path / "two.yaml"
    config.write_text("use_cpu: true\nnum_processes: 2\n")
    assert processes_in_command(["accelerate", "launch", "--config_file", str(config), "train.py"]) == 2


def test_the_launcher_s_own_count_wins(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert asked_processes() == 4
