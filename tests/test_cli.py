import importlib
import inspect
import subprocess
import sys

import pytest

from debias_diffusion.cli import COMMANDS, EXAMPLES, _description, main


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


def test_examples_are_shown_and_hold_flags_that_exist():
    assert EXAMPLES.keys() == COMMANDS.keys()
    for name, examples in EXAMPLES.items():
        assert examples
        module, function = COMMANDS[name][0].split(":")
        command = getattr(importlib.import_module(module), function)
        flags = {parameter.replace("_", "-") for parameter in inspect.signature(command).parameters}
        shown = _description(name, command)
        assert shown.startswith(inspect.getdoc(command).splitlines()[0])
        assert "Args:" not in shown
        for words in examples:
            assert f"debias-diffusion {name} {words}".rstrip() in shown
            assert {word[2:] for word in words.split() if word.startswith("--")} <= flags


def test_a_reader_that_leaves_ends_it_quietly():
    command = [sys.executable, "-m", "debias_diffusion.cli", "--help"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    process.stdout.close()  # long before a Python process can print anything
    assert process.stderr.read() == ""
    assert process.wait() == 0


def test_commands_start_without_loading_what_they_do_not_need():
    code = "import sys; from debias_diffusion import cli; cli.main(['--version']); print({'torch', 'tyro'} & set(sys.modules))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.split() == ["0.1.0", "set()"]
