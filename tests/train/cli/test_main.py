"""`python -m train`: its help, and its last line after an error."""

import functools
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import jax
import pytest

import train
from train import data, loop
from train.__main__ import main
from train.cli import commands
from train.cli.command_line import COMMANDS
from train.config import PRESET_NAMES
from train.errors import RunError


def throw(error, *args, **options):
    raise error


def test_the_module_ends_with_one_line(tmp_path):
    result = subprocess.run(
        [sys.executable, "-m", "train", "sample", str(tmp_path), "--prompt", "a"],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=Path(train.__file__).parents[1],
    )
    assert result.returncode == 2 and not result.stdout
    assert re.fullmatch(r"python -m train sample: error: .*has no config\.json\n", result.stderr)


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_output_that_nobody_reads_ends_the_program_quietly(unbuffered):
    """As of `python -m train --help | head`."""
    reader, writer = os.pipe()
    os.close(reader)
    result = subprocess.run(
        [sys.executable, "-m", "train", "--help"],
        stdout=writer,
        stderr=subprocess.PIPE,
        timeout=120,
        cwd=Path(train.__file__).parents[1],
        env=os.environ | {"PYTHONUNBUFFERED": unbuffered},
    )
    os.close(writer)
    assert (result.returncode, result.stderr) == (128 + signal.SIGPIPE, b"")


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help(command, capsys):
    with pytest.raises(SystemExit) as exit_info:
        main([command, "--help"])
    output = capsys.readouterr().out
    assert not exit_info.value.code
    assert output.startswith(f"usage: python -m train {command}") and "--debug" in output


def test_the_help_of_training_lists_commands_and_presets(capsys):
    with pytest.raises(SystemExit) as exit_info:
        main(["--help"])
    output = capsys.readouterr().out
    assert not exit_info.value.code
    for name, (text, *_) in COMMANDS.items():
        assert re.search(rf"^ +{name} +{text}$", output, re.MULTILINE), name
    assert f"--preset {{{','.join(PRESET_NAMES)}}}" in output and "--debug" in output


@pytest.mark.parametrize("arguments", [["sample", "nowhere", "--prompt", "a"], ["--steps", "0"]])
def test_debug_shows_the_traceback(arguments, capsys):
    with pytest.raises(SystemExit) as exit_info:
        main([*arguments, "--debug"])
    assert exit_info.value.code == 2
    error = capsys.readouterr().err
    assert "Traceback (most recent call last)" in error
    assert "error: " in error.splitlines()[-1] and "--debug" not in error.splitlines()[-1]


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        ("--model.dtype float16", r"--model\.dtype float16 cannot be .* take bfloat16 or float32"),
        (
            "--data.batch-size 12",
            r"--data\.batch-size 12 must be a multiple of the 8 devices .*; take 16",
        ),
        (
            "--mesh.fsdp 3",
            r"--mesh: fsdp=3 times tensor=1 must divide the number of devices, 8; .*",
        ),
    ],
)
def test_devices_that_do_not_fit_are_told_before_the_text_is_read(
    arguments, line, capsys, monkeypatch
):
    monkeypatch.setattr(loop, "open_datasets", pytest.fail)
    with pytest.raises(SystemExit) as exit_info:
        main(arguments.split())
    error = capsys.readouterr().err
    assert exit_info.value.code == 2 and re.fullmatch(f"error: {line}\n", error), error


class Bug(Exception):
    pass


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (ValueError("a\nb"), "python -m train eval: error: a b (--debug shows the traceback)\n"),
        (PermissionError(13, "Permission denied", "x"), "eval: error: .*denied: 'x' .--debug"),
        (FloatingPointError("nan"), "error: nan"),
        (RunError("it is gone"), "python -m train eval: error: it is gone\n"),
        (data.DataError("use --data.path"), "eval: error: use --path\n"),
    ],
)
def test_errors_of_users_and_machines_are_a_line(error, line, capsys, monkeypatch):
    monkeypatch.setattr(commands, "evaluate", functools.partial(throw, error))
    with pytest.raises(SystemExit) as exit_info:
        main(["eval"])
    assert exit_info.value.code == 2
    printed = capsys.readouterr().err
    assert re.search(line.replace("(", r"\(").replace(")", r"\)"), printed), printed
    assert printed.count("\n") == 1


OUT_OF_MEMORY = jax.errors.JaxRuntimeError(
    "RESOURCE_EXHAUSTED: Out of memory while trying to allocate 135296561064 bytes.\n"
    + "allocation of a page\n" * 99
)


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        ([], r"error: .*allocate 135296561064 bytes.*smaller --data\.batch-size, .*accumulation"),
        (["eval"], r"python -m train eval: error: .* take a smaller --batch-size, or --fsdp; "),
    ],
)
def test_a_device_without_memory_is_a_line(arguments, line, monkeypatch):
    for module, name in (commands, "evaluate"), (loop, "run"):
        monkeypatch.setattr(module, name, functools.partial(throw, OUT_OF_MEMORY))
    with pytest.raises(SystemExit) as exit_info:
        main(arguments)
    printed = str(exit_info.value.code)
    assert re.match(line, printed), printed
    assert "\n" not in printed and len(printed) < 700


def test_names_of_flags_may_have_underscores(monkeypatch):
    given = []
    monkeypatch.setattr(commands, "evaluate", given.append)
    main(["eval", "--data.batch_size=3_0", "--batch_size", "a_b"])
    assert given == [["--data.batch-size=3_0", "--batch-size", "a_b"]]


def test_bugs_keep_their_traceback(monkeypatch):
    full = jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: no space left on the disk")
    for error in (Bug("a"), TypeError("b"), AssertionError("c"), full):
        monkeypatch.setattr(commands, "evaluate", functools.partial(throw, error))
        with pytest.raises(type(error)):
            main(["eval"])
