"""Rows that go to TensorBoard and Weights & Biases, and errors of both."""

import dataclasses
import sys
import types

import pytest

from support.tiny_run import CONFIG
from train.errors import RunError
from train.loop import run
from train.reporting import tracking
from train.reporting.metrics import MetricsWriter

ROWS = [{"step": 1, "loss": 2.0, "mfu": None}, {"step": 2, "val_loss": 1.5}]


def tracked(config, run_dir, *, last_step=0):
    run_dir.mkdir(exist_ok=True)
    with tracking.trackers(config, run_dir, last_step=last_step) as trackers:
        with MetricsWriter(run_dir, trackers=trackers) as writer:
            for row in ROWS:
                writer.write(row)


def test_tensorboard(tmp_path, monkeypatch):
    calls = []

    class SummaryWriter:
        def __init__(self, folder, purge_step):
            calls.append((folder, purge_step))

        def add_scalar(self, name, value, step):
            calls.append((name, value, step))

        def close(self):
            calls.append("closed")

    module = types.SimpleNamespace(SummaryWriter=SummaryWriter)
    monkeypatch.setitem(sys.modules, "tensorboardX", module)
    tracked(dataclasses.replace(CONFIG, tensorboard=True), tmp_path, last_step=6)
    rows = [("loss", 2.0, 1), ("val_loss", 1.5, 2)]
    assert calls == [(str(tmp_path / "tensorboard"), 7), *rows, "closed"]


def test_tensorboard_itself(tmp_path):
    pytest.importorskip("tensorboardX")
    tracked(dataclasses.replace(CONFIG, tensorboard=True), tmp_path)
    (events,) = (tmp_path / "tensorboard").iterdir()
    assert b"val_loss" in events.read_bytes()


def test_weights_and_biases(tmp_path, monkeypatch):
    calls = []

    class Run:
        def define_metric(self, name, step_metric):
            calls.append((name, step_metric))

        def log(self, row):  # with a step, W&B drops rows that do not rise
            calls.append(row)

        def finish(self):
            calls.append("finished")

    def init(**options):
        calls.append(options)
        return Run()

    monkeypatch.setitem(sys.modules, "wandb", types.SimpleNamespace(init=init))
    config = dataclasses.replace(CONFIG, wandb="llamas")
    for _ in range(2):
        tracked(config, tmp_path / "tiny")
    first, axis, *rows, end = calls[:5]
    assert (first["project"], first["name"], first["resume"]) == ("llamas", "tiny", "allow")
    assert first["config"]["steps"] == CONFIG.steps
    assert axis == ("*", "step") and end == "finished"
    assert rows == [{"step": 1, "loss": 2.0}, {"step": 2, "val_loss": 1.5}]
    assert calls[5]["id"] == first["id"]  # the same run, which goes on
    assert calls[6:] == [axis, *rows, end]

    def refuse(**options):
        raise OSError("no\nnetwork")

    monkeypatch.setitem(sys.modules, "wandb", types.SimpleNamespace(init=refuse))
    with pytest.raises(
        RunError, match=r"^--wandb: no network; repair this, or leave the flag out$"
    ):
        tracked(config, tmp_path)


@pytest.mark.parametrize(
    ("changes", "name"), [({"tensorboard": True}, "tensorboardX"), ({"wandb": "a"}, "wandb")]
)
def test_a_tracker_that_is_not_installed_is_said_before_anything_is_made(
    changes, name, tmp_path, monkeypatch
):
    monkeypatch.setitem(sys.modules, name, None)
    config = dataclasses.replace(CONFIG, runs_dir=tmp_path, **changes)
    with pytest.raises(RunError, match=f"needs {name}, .*: python -m pip install {name}$"):
        run(config)
    assert not any(tmp_path.iterdir())
