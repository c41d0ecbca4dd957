"""A command with impossible arguments or files ends with one line and compiles nothing.

The tests run the commands from the arguments to the exit status. `test_data_errors.py` has more
cases of malformed data.
"""

import dataclasses
import json
import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import train.loop
import train.reporting.report
import train.setup
from models.llama_hf import load_pretrained
from support import tiny_run
from train.__main__ import main
from train.config import CheckpointConfig
from train.loop import run

CONFIG = dataclasses.replace(
    tiny_run.CONFIG,
    model=tiny_run.MODEL,
    checkpoint=CheckpointConfig(every=4),
    steps=12,
    save=True,
)
# The same on the command line.
FLAGS = {
    "name": "tiny",
    "steps": "12",
    "eval-every": "0",
    "sample-tokens": "0",
    "checkpoint.every": "4",
    "data.source": "synthetic",
    "data.sequence-length": "16",
    "data.batch-size": "8",
    "optimizer.learning-rate": "1e-2",
    "optimizer.warmup-steps": "1",
    "model.hidden-size": "16",
    "model.intermediate-size": "32",
    "model.num-hidden-layers": "2",
    "model.num-attention-heads": "2",
    "model.num-key-value-heads": "1",
    "model.head-dim": "8",
    "model.max-position-embeddings": "64",
    "model.dtype": "float32",
}

pytestmark = pytest.mark.usefixtures("one_device", "no_plots")


@pytest.fixture(scope="module")
def finished(tmp_path_factory, compile_nothing):
    """A run with checkpoints and a model."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train.loop, "compile_steps", compile_nothing)
        for name in ("loss_png", "details_png"):
            patch.setattr(train.reporting.report, name, lambda *args: b"")
        return run(dataclasses.replace(CONFIG, runs_dir=tmp_path_factory.mktemp("finished")))


@pytest.fixture
def runs(finished, tmp_path):
    """A folder with a copy of the run."""
    shutil.copytree(finished, tmp_path / "runs" / "tiny")
    return tmp_path / "runs"


@pytest.fixture
def error_of(monkeypatch, capsys, unchecked_shapes):
    """Runs `python -m train` and returns its error, which must be all that it prints.

    The type checks that only tests have are off.
    """

    def compile_nothing(*args: Any) -> Any:
        raise AssertionError("the error must come before anything is compiled")

    def command(arguments: list[str]) -> str:
        monkeypatch.setattr(sys, "argv", ["train", *arguments])
        monkeypatch.setattr(train.loop, "compile_steps", compile_nothing)
        with pytest.raises(SystemExit) as exit_info:
            main(arguments)
        printed = capsys.readouterr().err
        if isinstance(exit_info.value.code, str):  # as the interpreter does
            printed += exit_info.value.code
        else:
            assert exit_info.value.code == 2
        assert "Traceback" not in printed
        assert len(printed.splitlines()) == 1, printed
        return printed

    return command


def flags(runs: Path, changes: dict[str, str]) -> list[str]:
    given = FLAGS | {"runs-dir": str(runs)} | changes
    return [part for name, value in given.items() for part in (f"--{name}", value)]


# For a new run: the flags that differ, and the message.
FLAG_CASES = {
    "unknown flag": ({"model.layers": "3"}, r"[Uu]nrecognized .*--model\.layers"),
    "unknown preset": ({"preset": "llama9"}, r"preset.*llama9|invalid choice.*llama9"),
    "not a number": ({"steps": "many"}, r"steps.*many|many.*steps"),
    "no steps": ({"steps": "0"}, r"steps=0"),
    "steps below zero": ({"steps": "-3"}, r"steps=-3"),
    "no rows": ({"data.batch-size": "0"}, r"batch_size=0"),
    "no tokens": ({"data.sequence-length": "0"}, r"sequence_length=0"),
    "no accumulation": ({"data.accumulation-steps": "0"}, r"accumulation_steps=0"),
    "odd heads": ({"model.num-key-value-heads": "3"}, r"num_key_value_heads=3"),
    "odd head": ({"model.head-dim": "7"}, r"head_dim=7"),
    "heads of another model's size": (
        {"model.hidden-size": "50", "model.num-attention-heads": "6", "model.head-dim": "20"},
        r"hidden_size=50 is not a multiple of .*num_attention_heads=6",
    ),
    "no layers": ({"model.num-hidden-layers": "0"}, r"num_hidden_layers=0"),
    "dtype": ({"model.dtype": "float12"}, r"float12"),
    "policy": ({"model.remat": "some"}, r"remat='some'"),
    "rate": ({"optimizer.learning-rate": "-1"}, r"learning_rate=-1"),
    "rate is no number": ({"optimizer.learning-rate": "nan"}, r"learning_rate=nan"),
    "warm-up": ({"optimizer.warmup-steps": "-1"}, r"warmup_steps=-1"),
    "optimizer": ({"optimizer.name": "sgdd"}, r"sgdd"),
    "checkpoints": ({"checkpoint.every": "-1"}, r"every=-1|every -1"),
    "kept checkpoints": ({"checkpoint.keep": "0"}, r"keep=0"),
    "profile": ({"profile-steps": "9:3"}, r"profile_steps='9:3'"),
    "mesh": ({"mesh.fsdp": "0"}, r"fsdp=0"),
    "folder": ({"init-from": "/no/such/folder"}, r"/no/such/folder"),
    "data": ({"data.tokenizer": "t"}, r"tokenizer=t is for text of your own"),
    "two sources": ({"data.path": "/no/such/text"}, r"--data\.source synthetic has no effect"),
    # Flags whose error names them.
    **{
        f"{flag} {value!r}"[:40]: ({flag: value}, rf"error: --{re.escape(flag)}: ")
        for flag, values in {
            "optimizer.b1": ("1.5", "nan", "-1"),
            "optimizer.b2": ("-1", "1"),
            "optimizer.eps": ("-1", "0", "1e-50"),
            "optimizer.weight-decay": ("nan", "-1"),
            "optimizer.learning-rate": ("inf", "1e39"),
            "optimizer.clip-norm": ("nan",),
            "model.rms-norm-eps": ("-1", "nan"),
            "model.initializer-range": ("nan", "-1"),
            "model.head-dim": ("-2",),
            "model.dtype": ("int32", "complex64"),
            "model.rope-parameters.rope-theta": ("inf", "nan", "0"),
            "z-loss": ("nan", "-1"),
            "skip-loss-spikes": ("inf",),
            "name": ("", "a/b", "..", "n" * 300),
            "seed": ("-1", "4294967296", "1" + "0" * 30),
            "steps": ("1" + "0" * 12,),
            "data.text-field": ("",),
            "data.path": ("",),
            "data.sequence-length": ("65",),
            "mesh.data": ("0", "-2"),
            "distributed.num-processes": ("0", "x"),
            "distributed.step-timeout-s": ("nan",),
        }.items()
        for value in values
    },
}


def test_more_devices_than_there_are(error_of, tmp_path, monkeypatch):
    def mesh_of(config):
        raise ValueError("data=3 times fsdp=1 must be the number of devices, 1")

    monkeypatch.setattr(train.setup, "mesh_of", mesh_of)
    error = error_of(flags(tmp_path, {"mesh.data": "3"}))
    assert error == "error: --mesh: data=3 times fsdp=1 must be the number of devices, 1\n"


def test_a_runs_folder_that_cannot_be_written(error_of, tmp_path):
    (tmp_path / "file").touch()
    error = error_of(flags(tmp_path / "file", {"checkpoint.every": "0"}))
    assert f"error: {tmp_path / 'file'}" in error and error.endswith(": Not a directory\n"), error


@pytest.mark.parametrize("name", FLAG_CASES)
def test_flags(name, error_of, tmp_path):
    changes, message = FLAG_CASES[name]
    error = error_of(flags(tmp_path, changes))
    assert re.search(message, error), error
    assert not any(tmp_path.iterdir())


# For a run that goes on: the damage to its folder, the flags that differ, and the message.
RUN_CASES: dict[str, tuple[Callable[[Path], Any], dict[str, str], str]] = {
    "other seed": (lambda folder: None, {"seed": "5"}, r"seed 0, now 5"),
    "other model": (
        lambda folder: None,
        {"model.hidden-size": "32"},
        r"model\.hidden_size 16, now 32",
    ),
    "other data": (lambda folder: None, {"data.source": "stdlib"}, r"source.* now '?stdlib"),
    "no configuration": (
        lambda folder: (folder / "config.json").unlink(),
        {},
        r"config\.json",
    ),
    "configuration cut off": (
        lambda folder: (folder / "config.json").write_text('{"config": {'),
        {},
        r"config\.json",
    ),
    "configuration of something else": (
        lambda folder: (folder / "config.json").write_text("[]"),
        {},
        r"config\.json",
    ),
    "a file in place of the checkpoints": (
        lambda folder: (shutil.rmtree(folder / "checkpoints"), text(folder / "checkpoints")),
        {},
        r"checkpoints",
    ),
    "all checkpoints are empty": (
        lambda folder: [empty(path) for path in (folder / "checkpoints").iterdir()],
        {},
        r"checkpoints",
    ),
}


def text(path: Path) -> None:
    path.write_text("no folder")


def empty(folder: Path) -> None:
    shutil.rmtree(folder)
    folder.mkdir()


@pytest.mark.parametrize("name", RUN_CASES)
def test_runs(name, error_of, runs):
    spoil, changes, message = RUN_CASES[name]
    spoil(runs / "tiny")
    error = error_of(flags(runs, changes))
    assert re.search(message, error), error


def change_config(**changes: Any) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        content = json.loads((folder / "config.json").read_text()) | changes
        content = {name: value for name, value in content.items() if value is not ...}
        (folder / "config.json").write_text(json.dumps(content))

    return write


def weights(change: Callable[[dict[str, Any]], Any]) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        safetensors = pytest.importorskip("safetensors.numpy")
        tensors = safetensors.load_file(folder / "model.safetensors")
        change(tensors)
        safetensors.save_file(tensors, folder / "model.safetensors")

    return write


_EMBEDDINGS = "model.embed_tokens.weight"
# For a folder in Hugging Face's format: the damage to it, and the message.
FOLDER_CASES: dict[str, tuple[Callable[[Path], Any], str]] = {
    "empty": (empty, r"config\.json"),
    "a file": (lambda folder: (shutil.rmtree(folder), text(folder)), r"model"),
    "no configuration": (lambda folder: (folder / "config.json").unlink(), r"config\.json"),
    "configuration cut off": (
        lambda folder: (folder / "config.json").write_text('{"model_type": '),
        r"config\.json",
    ),
    "configuration is a list": (
        lambda folder: (folder / "config.json").write_text("[]"),
        r"config\.json",
    ),
    "another architecture": (change_config(model_type="mamba"), r"mamba"),
    "no hidden size": (change_config(hidden_size=...), r"hidden_size"),
    "hidden size is text": (change_config(hidden_size="large"), r"hidden_size|large"),
    "unknown positions": (
        change_config(rope_parameters={"rope_type": "spiral", "rope_theta": 1e4}),
        r"spiral",
    ),
    "quantized": (change_config(quantization_config={"bits": 4}), r"quantization_config"),
    "weights cut off": (
        lambda folder: cut(folder / "model.safetensors"),
        r"model\.safetensors is damaged",
    ),
    "no weights": (lambda folder: (folder / "model.safetensors").unlink(), r"model\.safetensors"),
    "weights are text": (lambda folder: text(folder / "model.safetensors"), r"model\.safetensors"),
    "a tensor is missing": (weights(lambda t: t.pop(_EMBEDDINGS)), re.escape(_EMBEDDINGS)),
    "a tensor has another shape": (
        weights(lambda t: t.update({_EMBEDDINGS: t[_EMBEDDINGS][:-1].copy()})),
        re.escape(_EMBEDDINGS),
    ),
    "a tensor of integers": (
        weights(lambda t: t.update({_EMBEDDINGS: t[_EMBEDDINGS].astype(np.int32)})),
        re.escape(_EMBEDDINGS),
    ),
}


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1000])


@pytest.mark.parametrize("name", FOLDER_CASES)
def test_folders_to_start_from(name, error_of, runs, tmp_path):
    folder = (runs / "tiny" / "model").rename(tmp_path / "model")
    spoil, message = FOLDER_CASES[name]
    spoil(folder)
    (tmp_path / "text.txt").write_text("some text to train on, " * 99)
    changes = {
        "init-from": str(folder),
        "runs-dir": str(tmp_path / "new"),
        "data.cache-dir": str(tmp_path / "cache"),
        "data.path": str(tmp_path / "text.txt"),
    }
    arguments = flags(runs, changes)
    names = [f"--{name}" for name in FLAGS if name.startswith("model.")]
    for name in [*names, "--data.source"]:  # which the folder and the path say
        position = arguments.index(name)
        del arguments[position : position + 2]
    error = error_of(arguments)
    assert re.search(message, error), error


# For the other commands: the arguments with the names {run} and {tmp}, and the message.
COMMAND_CASES = {
    "export nothing": (["export", "{tmp}/none", "{tmp}/out"], r"/none"),
    "export onto a folder": (["export", "{run}", "{run}"], r"tiny"),
    "export a step that is not there": (["export", "{run}", "{tmp}/out", "--step", "5"], r"5"),
    "evaluate nothing": (["eval", "{tmp}/none", "--path", "{tmp}/a.txt"], r"/none"),
    "sample nothing": (["sample", "{tmp}/none", "--prompt", "a"], r"/none"),
    "sample at a negative temperature": (
        ["sample", "{run}", "--prompt", "a", "--temperature", "-1"],
        r"temperature",
    ),
    "compare no folder": (
        ["compare", "{run}", "{run}", "--output", "{tmp}/none/x.html"],
        r"--output \S+/none/x\.html: there is no folder \S+/none; make it, or name another file",
    ),
    "compare nothing": (["compare", "{run}", "{tmp}/none"], r"/none"),
    "replay nothing": (["replay", "{tmp}/none"], r"/none"),
    "plan for nothing": (["plan", "--device", "h99"], r"h99"),
}


@pytest.mark.parametrize("name", COMMAND_CASES)
def test_commands(name, error_of, runs, tmp_path):
    arguments, message = COMMAND_CASES[name]
    error = error_of([part.format(run=runs / "tiny", tmp=tmp_path) for part in arguments])
    assert re.search(message, error), error


def test_the_models_that_were_not_spoiled_load(finished):
    """Without this any message about it would pass."""
    assert load_pretrained(finished / "model").config.hidden_size == 16
