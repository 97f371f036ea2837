import importlib
import inspect
import subprocess
import sys

import pytest

from debias_diffusion.cli import COMMANDS, main


def test_help_lists_every_command(capsys):
    main(["--help"])
    shown = capsys.readouterr().out
    assert all(name in shown for name in COMMANDS)


def test_a_wrong_command_lists_the_right_ones(capsys):
    with pytest.raises(SystemExit) as stop:
        main(["evaluat"])
    assert stop.value.code == 2
    assert "commands: demo, evaluate" in capsys.readouterr().err


def test_a_wrong_source_is_one_line(capsys):
    with pytest.raises(SystemExit) as stop:
        main(["demo", "--base", "no/such/folder"])
    assert stop.value.code == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "expected a folder, a checkpoint file, or ROW:PRETRAINED" in error


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_exists_and_says_what_it_does(name):
    module, function = COMMANDS[name][0].split(":")
    command = getattr(importlib.import_module(module), function)
    assert len(inspect.getdoc(command) or "") > 60


def test_commands_start_without_loading_what_they_do_not_need():
    code = "import sys; from debias_diffusion import cli; cli.main(['--version']); print({'torch', 'tyro'} & set(sys.modules))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.split() == ["0.1.0", "set()"]
