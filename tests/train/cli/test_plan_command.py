"""`python -m train plan`: its flags, what it prints, and its errors."""

import dataclasses
import pathlib
import re
import subprocess
import sys

import jax
import pytest
from flax import nnx

import train.cli.plan
import train.loop
from models.llama import Llama
from models.llama_hf import save_pretrained
from support import tiny_run
from support.plan_measures import Measures
from train.__main__ import main
from train.planner import aot


@pytest.fixture(autouse=True)
def no_environment(monkeypatch, tmp_path):
    """XLA's defaults, and a cache that the test owns."""
    for name in ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TRAIN_PLAN_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def command(monkeypatch, capsys):
    """`python -m train plan` with the table's measures and CPUs for GPUs."""
    monkeypatch.setattr(aot, "devices", lambda chip, number: jax.devices()[:number])
    monkeypatch.setattr(jax.config, "update", lambda *args: None)
    monkeypatch.setattr(train.cli.plan, "Programs", lambda target: Measures())

    def call(arguments):
        status = 0
        try:
            main(["plan", *arguments.split()])
        except SystemExit as error:
            status = error.code
        output = capsys.readouterr()
        return status, output.out, output.err

    return call


def test_command_plans_batch_and_policy(command):
    status, out, _ = command("--preset llama3.1-8b --device h100 --num-devices 8 --memory-gib 300")
    assert status == 0
    # Memory grows in proportion to the rows. `minimal` fits 8 rows, and 16 would need 232 GiB of
    # 213.
    assert re.search(r"^\* none +1x8x1 +8 ", out, re.MULTILINE)
    assert re.search(r"^  full +1x8x1 +32 ", out, re.MULTILINE)
    assert (
        "python -m train --preset llama3.1-8b --model.remat none --data.batch-size 8 --mesh.fsdp 8"
    ) in out


def test_the_command_keeps_settings_of_the_user(command):
    status, out, _ = command(
        "--preset llama3.2-1b --device h100 --batch-size 4 --sequence-length 2048 "
        "--model.remat attention --model.no-scan-layers --num-devices 2 --mesh.fsdp 1"
    )
    assert status == 0 and "unrolled" in out and "2048 tokens" in out
    assert [line.split()[:4] for line in out.splitlines() if line.startswith("*")] == [
        ["*", "attention", "2x1x1", "4"]
    ]
    assert (
        "python -m train --preset llama3.2-1b --model.remat attention --model.no-scan-layers "
        "--mesh.fsdp 1 --data.batch-size 4 --data.sequence-length 2048"
    ) in out


def test_command_compares_meshes(command):
    flags = "--preset llama3.1-8b --device h100 --num-devices 8"
    # 28.5 GiB are enough for 4 rows and not for 8; a device has one row each.
    status, out, _ = command(f"{flags} --memory-gib 40 --tensor 1 2")
    assert status == 0
    assert re.search(r"^\* full +1x4x2 +4 ", out, re.MULTILINE)
    assert re.search(r"^  full +1x8x1 +8 .* ~no ", out, re.MULTILINE)
    assert "--model.remat full --data.batch-size 4 --mesh.fsdp 4 --mesh.tensor 2" in out
    status, out, _ = command(f"{flags} --mesh.tensor 4 --mesh.data 2 --batch-size 2")
    assert status == 0 and re.search(r"^\* none +2x1x4 +2 ", out, re.MULTILINE)


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        ("--device h10", 2, "--device 'h10' is unknown; did you mean h100 or"),
        ("--device h100 --preset llama3-8b", 2, "no preset 'llama3-8b'; did you mean llama3.1-8b"),
        ("--preset demo", 2, "--device h100"),
        ("--device h100 --num-devices 0", 2, "--num-devices: 0 must lie in"),
        ("--device h100 --memory-gib -1", 2, "--memory-gib: -1 must lie in"),
        ("--device h100 --num-devices 8 --batch-size 4", 2, "multiple of the 8 devices"),
        ("--device h100 --num-devices 8 --tensor 2 --batch-size 2", 2, "multiple of the 4 devices"),
        ("--device h100 --num-devices 8 --tensor 3", 2, "must be the number of devices, 8"),
        ("--device h100 --num-devices 8 --tensor 0", 2, "--tensor: 0 must lie in"),
        ("--device h100 --num-devices 8 --tensor 2 --mesh.tensor 2", 2, "leave out one"),
        ("--device h100 --steps many", 2, "--steps"),
        ("--device h100 --memory-gib 1", 1, "nothing fits"),
        (
            "--preset llama3.2-1b --device h100 --model.head-dim 192",
            2,
            "--model.head-dim 192: JAX traces cuDNN's attention with more than 128 channels only",
        ),
    ],
)
def test_mistakes_in_the_command(command, arguments, status, message):
    got, _, error = command(arguments)
    assert got == status and message in re.sub(r"[\s│]+", " ", error), error


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--tensor 1 2", r"has 1 key/value head, which mesh\.tensor=2 does not divide"),
        ("--data.sequence-length 65", "has 64 positions, fewer than the 65 tokens of a row"),
        ("--model.vocab-size 512", "has a vocabulary of 320 tokens, and the model one of 512"),
    ],
)
def test_a_teacher_that_does_not_fit_is_named(command, tmp_path, arguments, message):
    model = dataclasses.replace(tiny_run.MODEL, num_hidden_layers=1)
    save_pretrained(Llama(model, rngs=nnx.Rngs(0)), tmp_path / "teacher")
    teacher = f"--objective distill --distill.teacher {tmp_path / 'teacher'}"
    flags = f"--device h100 --num-devices 4 {teacher} --data.sequence-length 32 --sample-tokens 0"
    assert command(flags)[0] == 0
    status, out, error = command(f"{flags} {arguments}")
    assert (status, out) == (2, "")
    assert re.search(rf"error: the teacher in \S+/teacher {message}", error), error


def test_help_documents_every_flag(command):
    status, out, _ = command("--help")
    assert status == 0
    for action in train.cli.plan._parser()._actions:
        assert action.help and action.option_strings[-1] in out
    assert "75 %" in out and "--mesh.fsdp" in out


@pytest.mark.full
def test_the_first_word_of_a_command_line_is_a_command():
    command = [sys.executable, "-m", "train", "plan", "--device", "h10"]
    root = pathlib.Path(train.loop.__file__).parents[1]
    process = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
    assert process.returncode == 2 and "did you mean h100" in process.stderr, process.stderr
