"""Runs that are refused, interrupted or short of disk, and the order of work in the loop."""

import dataclasses
import errno
import json
import math
import os
import signal
import threading
import time

import numpy as np
import pytest
from flax import nnx
from safetensors import SafetensorError

import models.fp8
import train.loop
import train.outputs
import train.reporting.profiling
import train.reporting.report
import train.setup
from models.sharding import make_mesh
from pallas_kernels.gpu.device import Device
from support import tiny_run
from support.tokenizer_files import write_byte_level
from train import data
from train.__main__ import main
from train.config import DataConfig
from train.errors import RunError
from train.evaluate import held_out_metrics
from train.faults import stop_signals
from train.guard import initial_guard
from train.loop import run
from train.reporting.profiling import Profile
from train.reporting.results import load_metrics
from train.step import TrainState

CONFIG = tiny_run.ON_LIBRARY

pytestmark = pytest.mark.usefixtures("no_plots")


@pytest.fixture(scope="module", autouse=True)
def corpus():
    """Takes the place of the standard library."""
    found = data.Corpus({f"{i}.py": b"def f(x):\n    return x\n" * 9 for i in range(60)})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(data, "stdlib_corpus", lambda: found)
        yield


def rows_of(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture
def no_compilation(monkeypatch):
    def fail(*args):
        raise AssertionError("the error must come before anything is made or compiled")

    monkeypatch.setattr(train.setup, "init_state", fail)


@pytest.mark.parametrize(
    ("part", "changes", "message"),
    [
        ("model", {"vocab_size": 257}, "vocab_size=257 .* 258"),
        ("data", {"batch_size": 12}, "-size 12 .* 8 devices"),
        ("mesh", {"fsdp": 3}, "fsdp=3 times tensor=1 must divide .* 8"),
        ("mesh", {"fsdp": 16}, "fsdp=16"),
        ("model", {"hidden_size": 63, "num_attention_heads": 3}, "fsdp=2 does not divide 63"),
        ("mesh", {"tensor": 2}, "tensor=2 does not divide num_key_value_heads=1"),
        ("mesh", {"tensor": 3}, "fsdp=2 times tensor=3 must divide .* 8"),
    ],
)
def test_impossible_runs_are_refused_and_leave_nothing(
    part, changes, message, tmp_path, no_compilation
):
    changed = dataclasses.replace(getattr(CONFIG, part), **changes)
    config = dataclasses.replace(CONFIG, runs_dir=tmp_path, **{part: changed})
    with pytest.raises(ValueError, match=message):
        run(config)
    assert not any(tmp_path.iterdir())


def test_a_gpu_without_fp8_is_refused_before_the_text_is_read(tmp_path, monkeypatch):
    a100 = Device("NVIDIA A100-SXM4-40GB", (8, 0), 108)
    monkeypatch.setattr(models.fp8, "target_device", lambda: a100)
    monkeypatch.setattr(train.loop, "open_datasets", pytest.fail)
    model = dataclasses.replace(CONFIG.model, fp8="tensorwise")
    with pytest.raises(ValueError, match="fp8='tensorwise' needs a GPU with FP8"):
        run(dataclasses.replace(CONFIG, runs_dir=tmp_path, model=model))


@pytest.fixture
def fake_steps(monkeypatch):
    """Replaces model and steps by `train_step(step number) -> loss`."""

    def install(train_step, num_tokens=1):
        steps = iter(range(1, 10**6))
        values = lambda loss: {
            "loss": np.float32(loss),
            "lr": np.float32(1),
            "nll": np.float32(loss),
            "accuracy": np.float32(0.5),
            "grad_norm": np.float32(loss),
            "skipped_steps": np.int32(0),
            "skipped_in_a_row": np.int32(0),
            "num_tokens": np.int32(num_tokens),
            "mean_context": np.float32(1),
        }

        def compile_nothing(*args):
            take = lambda state, batch: (state, values(train_step(next(steps))))
            return train.setup.CompiledSteps(take, None)

        state = TrainState(0, nnx.State({}), (), initial_guard())
        monkeypatch.setattr(train.setup, "init_state", lambda *args: state)
        monkeypatch.setattr(train.loop, "compile_steps", compile_nothing)
        monkeypatch.setattr(train.loop, "finish", lambda *args: None)

    return install


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("save", [True, False])
def test_a_signal_without_checkpoints_leaves_model_and_report(
    number, save, tmp_path, fake_steps, monkeypatch, capsys
):
    def train_step(step):
        if step == 4:
            os.kill(os.getpid(), number)
        return step

    fake_steps(train_step)
    finished = []
    monkeypatch.setattr(train.loop, "finish", lambda *args: finished.append(args[1]))
    handler = signal.getsignal(number)
    folder = run(dataclasses.replace(CONFIG, runs_dir=tmp_path, steps=100, save=save))
    assert finished == [folder]  # it writes the model if `save` says so
    assert [row["step"] for row in load_metrics(folder).train] == [1, 2, 3, 4]
    assert signal.getsignal(number) == handler
    printed = capsys.readouterr().out
    assert "stopped after step 4 of 100; without --checkpoint.every no run can go on" in printed
    assert ("the parameters are not saved (--no-save)" in printed) == (not save)


def test_only_sigint_gives_sigint_back():
    """After SIGTERM, Ctrl-C still lets the run save."""
    for number, is_default in ((signal.SIGTERM, False), (signal.SIGINT, True)):
        with stop_signals() as stop:
            os.kill(os.getpid(), number)
            assert stop.wait(timeout=5)
            assert (signal.getsignal(signal.SIGINT) == signal.default_int_handler) == is_default


def test_a_trace_names_the_last_step_that_it_has(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(train.reporting.profiling.jax.profiler, "start_trace", lambda folder: None)
    monkeypatch.setattr(train.reporting.profiling.jax.profiler, "stop_trace", lambda: None)
    for end in (10, 30):
        with Profile(tmp_path, (5, 20)) as profile:
            for step in range(1, end + 1):
                profile.begin(step)
                profile.end(step, ())
        assert f"trace of the steps up to {min(end, 20)}: " in capsys.readouterr().out


def test_a_sample_without_a_prompt_is_refused_before_the_first_step(tmp_path, no_compilation):
    write_byte_level(tmp_path / "tokenizer.json")
    (tmp_path / "a.txt").write_text("some text " * 500)
    config = DataConfig(
        source="stdlib",
        path=(tmp_path / "a.txt",),
        tokenizer=tmp_path / "tokenizer.json",
        bos_token="",
        cache_dir=tmp_path / "cache",
        sequence_length=16,
        batch_size=8,
    )
    config = dataclasses.replace(
        CONFIG, data=config, runs_dir=tmp_path / "runs", sample_prompt="", sample_tokens=4
    )
    with pytest.raises(
        data.DataError, match=r"the prompt has no tokens; .*--sample-prompt, or set"
    ):
        run(config)
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("fraction, times", [(1.0, 0), (1 / 512, 0), (0.001, 1)])
def test_the_first_batch_with_too_many_labels_is_reported(
    fraction, times, tmp_path, fake_steps, capsys
):
    fake_steps(float)  # each step has one label, of 512 tokens
    folder = run(dataclasses.replace(CONFIG, runs_dir=tmp_path, counted_fraction=fraction))
    assert {row["labeled_share"] for row in load_metrics(folder).train} == {1 / 512}
    printed = capsys.readouterr().out
    assert printed.count("more than counted_fraction=0.001") == times
    assert ("step 1: 0.002 of the tokens of its batches have a label" in printed) == bool(times)


@pytest.mark.parametrize("num_tokens, times", [(0, 1), (1, 0)])
def test_the_first_batch_without_a_label_is_reported(
    num_tokens, times, tmp_path, fake_steps, capsys
):
    fake_steps(float, num_tokens)
    run(dataclasses.replace(CONFIG, runs_dir=tmp_path))
    printed = capsys.readouterr().out
    assert printed.count("no token of its batches has a label, so its loss") == times
    assert ("step 1: no token" in printed) == bool(times)


def test_a_run_that_fails_before_its_first_step_leaves_nothing(tmp_path, fake_steps, monkeypatch):
    def fail(*args):
        raise ValueError("too long")

    fake_steps(float)
    monkeypatch.setattr(train.loop, "compile_steps", fail)
    with pytest.raises(ValueError, match="too long"):
        run(dataclasses.replace(CONFIG, runs_dir=tmp_path))
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize(
    "error", [OSError(errno.ENOSPC, "No space left on device"), SafetensorError("I/O error")]
)
def test_a_full_disk_at_the_model_keeps_the_metrics(error, tmp_path, fake_steps, monkeypatch):
    finish = train.loop.finish
    fake_steps(float)
    monkeypatch.setattr(train.loop, "finish", finish)
    monkeypatch.setattr(train.outputs, "model_graph", lambda *args: None)  # which is cached
    monkeypatch.setattr(train.outputs.nnx, "merge", lambda *args: None)

    def full(model, folder):
        raise error

    monkeypatch.setattr(train.outputs, "save_pretrained", full)
    with pytest.raises(RunError, match=r"tiny/model: (No space left|I/O error)"):
        run(dataclasses.replace(CONFIG, runs_dir=tmp_path, save=True))
    assert len(load_metrics(tmp_path / "tiny").train) == CONFIG.steps


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_an_interrupted_run_leaves_its_rows_and_no_thread(error, tmp_path, fake_steps):
    def train_step(step):
        if step == 4:
            raise error
        return step

    fake_steps(train_step)
    config = dataclasses.replace(CONFIG, runs_dir=tmp_path, steps=100)
    raised = []

    def interrupted():
        try:
            run(config)
        except BaseException as caught:
            raised.append(type(caught))

    # It runs on a thread, so that a run that waits for ever for its prefetcher fails the test.
    thread = threading.Thread(target=interrupted, daemon=True)
    thread.start()
    thread.join(timeout=60)
    assert not thread.is_alive()
    assert raised == [error]
    assert not [t for t in threading.enumerate() if t.name.startswith("prefetch")]
    # The loop asks for the values of the third step after it sends the fourth, which raised.
    assert [row["step"] for row in load_metrics(tmp_path / "tiny").train] == [1, 2]


def test_held_out_rows_of_prompts_alone_are_an_error(tmp_path):
    text = tmp_path / "text.jsonl"
    text.write_text(json.dumps({"prompt": "long " * 500, "completion": "x"}) + "\n")
    options = {"source": "stdlib", "path": (text,), "cache_dir": tmp_path / "cache"}
    other = tmp_path / "other.jsonl"
    other.write_text(text.read_text())
    config = DataConfig(**options, held_out_path=(other,), sequence_length=32, batch_size=8)
    _, held_out, _ = data.open_files(config, vocab_size=320, evaluates=True)
    assert held_out is not None
    config = dataclasses.replace(CONFIG, data=config, eval_batches=1)
    with pytest.raises(data.DataError, match="the 1 held-out batches have no text to predict"):
        held_out_metrics(
            config, make_mesh(data=4, fsdp=2), lambda *args: {}, nnx.State({}), held_out
        )


def test_a_loss_that_is_not_finite_is_recorded(tmp_path, fake_steps):
    fake_steps(lambda step: math.nan if step == 2 else 1.0)
    folder = run(dataclasses.replace(CONFIG, runs_dir=tmp_path))
    losses = [row["loss"] for row in load_metrics(folder).train]
    np.testing.assert_array_equal(losses, [1, math.nan, 1, 1, 1])


def test_waiting_for_a_batch_is_told(tmp_path, fake_steps, monkeypatch):
    fake_steps(float)
    batch = data.PackedDataset.batch

    def slow(self, step, **options):
        time.sleep(0.3 if step == 3 else 0)
        return batch(self, step, **options)

    monkeypatch.setattr(data.PackedDataset, "batch", slow)
    waits = [
        row["data_wait_s"] for row in rows_of(run(dataclasses.replace(CONFIG, runs_dir=tmp_path)))
    ]
    assert len(waits) == 5
    assert max(waits[:3] + waits[4:]) < 0.2 < waits[3] < 5


def test_a_step_is_logged_after_the_next_is_dispatched(tmp_path, fake_steps, monkeypatch):
    """The device then has work while the host waits for the numbers of a step."""
    events = []
    fake_steps(lambda step: events.append(f"step {step}") or 1.0)
    write = train.loop.metrics.MetricsWriter.write

    def spy(self, row):
        events.append(f"log {row['step']}")
        write(self, row)

    monkeypatch.setattr(train.loop.metrics.MetricsWriter, "write", spy)
    run(dataclasses.replace(CONFIG, runs_dir=tmp_path, steps=3))
    assert events == ["step 1", "step 2", "log 1", "step 3", "log 2", "log 3"]


def test_folders_are_numbered(tmp_path, fake_steps):
    fake_steps(float)
    (tmp_path / "runs" / "tiny-3").mkdir(parents=True)
    config = dataclasses.replace(CONFIG, runs_dir=tmp_path / "runs")
    assert [run(config).name for _ in range(3)] == ["tiny", "tiny-2", "tiny-4"]
    assert not any((tmp_path / "runs" / "tiny-3").iterdir())


def test_help_of_the_module(capsys):
    with pytest.raises(SystemExit) as caught:
        main(["--help"])
    assert not caught.value.code
    printed = capsys.readouterr().out
    assert "usage: python -m train" in printed
    assert "--preset" in printed
