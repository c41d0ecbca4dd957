import dataclasses
import errno
import io
import json
import os
import re
from pathlib import Path
from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import pytest
from rich.console import Console

import train.reporting.metrics
import train.step
from pallas_kernels.hardware import Hardware
from support import tiny_run
from train.config import DistillConfig
from train.errors import RunError
from train.formats import format_count, format_duration, number_of
from train.reporting.metrics import (
    MetricsWriter,
    Throughput,
    device_memory,
    flops_of_run,
    flops_per_token,
    mfu,
    run_environment,
)
from train.reporting.progress import Progress
from train.step import _mean_context, contexts_of_rows

LLAMA_3_2_1B = SimpleNamespace(
    vocab_size=128_256,
    hidden_size=2048,
    intermediate_size=8192,
    num_hidden_layers=16,
    num_attention_heads=32,
    num_key_value_heads=8,
    head_dim=64,
)


def test_flops_of_llama_3_2_1b_by_hand():
    # One layer: q and o 2048x2048, k and v 2048x512, three 2048x8192; then the tied head. All
    # parameters but the norms (33 of 2048) are in matmuls, and the model has 1,235,814,400.
    matmul_parameters = 1_235_814_400 - 33 * 2048
    assert flops_per_token(LLAMA_3_2_1B, 0.0) == 6 * matmul_parameters == 7_414_480_896
    # In a row of 8192 a token sees 4096 keys on average. In each layer, QK and PV take 2 FLOPs for
    # each of 32 heads x 64 x 4096 in the forward. Training takes three times as much.
    attention = 16 * 2 * (2 * 32 * 64 * 4096)
    assert flops_per_token(LLAMA_3_2_1B, 4096.0) == 6 * matmul_parameters + 3 * attention
    assert flops_per_token(LLAMA_3_2_1B, 4096.0) == 9_025_093_632


@pytest.mark.parametrize("field", vars(LLAMA_3_2_1B))
def test_every_config_field_counts(field):
    larger = SimpleNamespace(**vars(LLAMA_3_2_1B) | {field: 2 * getattr(LLAMA_3_2_1B, field)})
    assert flops_per_token(larger, 512.0) > flops_per_token(LLAMA_3_2_1B, 512.0)


def test_flops_when_the_heads_are_not_as_wide_as_the_model():
    config = SimpleNamespace(
        vocab_size=7,
        hidden_size=5,
        intermediate_size=11,
        num_hidden_layers=2,
        num_attention_heads=6,
        num_key_value_heads=3,
        head_dim=4,
    )
    layer = 5 * 24 + 2 * 5 * 12 + 24 * 5 + 3 * 5 * 11
    assert flops_per_token(config, 6.5) == 6 * (2 * layer + 5 * 7) + 2 * 3 * 2 * 24 * 13


@pytest.mark.parametrize("window", [None, 1, 3, 8, 9])
def test_mean_context(window):
    """The mean number in a mask that has one half for the token itself."""
    lengths = [[8], [5, 3]]
    order = np.arange(8)
    distance = order[:, None] - order
    visible = (distance >= 0) & (distance < (window or 8))
    for rows in (lengths[:1], lengths):
        ids = np.stack([np.repeat(np.arange(len(row)), row) for row in rows])
        masks = visible & (ids[:, :, None] == ids[:, None])
        expected = np.mean(masks.sum(axis=-1) - 0.5)
        positions = np.stack([np.concatenate([np.arange(n) for n in row]) for row in rows])
        batch = {"labels": jnp.asarray(ids), "positions": jnp.asarray(positions)}
        np.testing.assert_allclose(_mean_context(batch, window), expected, rtol=1e-6)
        if rows == lengths[:1]:
            del batch["positions"]
            np.testing.assert_allclose(_mean_context(batch, window), expected, rtol=1e-6)


def test_a_teacher_has_its_own_window(monkeypatch):
    config = dataclasses.replace(
        tiny_run.CONFIG, objective="distill", distill=DistillConfig(teacher=Path("teacher"))
    )
    teacher = dataclasses.replace(config.model, sliding_window=2, num_hidden_layers=1)
    monkeypatch.setattr(train.step, "teacher_model", lambda config: teacher)
    monkeypatch.setattr(train.reporting.metrics, "teacher_model", lambda config: teacher)
    contexts = contexts_of_rows(config)
    # The first of 16 tokens attends to half of itself, and the others to one more.
    assert contexts == {"mean_context": 8.0, "teacher_mean_context": (0.5 + 15 * 1.5) / 16}
    alone = flops_per_token(config.model, 8.0)
    of_teacher = flops_per_token(teacher, contexts["teacher_mean_context"]) / 3
    assert flops_of_run(config)(contexts) == alone + of_teacher


def test_mfu():
    device = Hardware("x", 1000e12, 1e12, 1, 1, 1, "https://")
    assert mfu(500e12, device, 1) == pytest.approx(0.5)
    assert mfu(500e12, device, 4) == pytest.approx(0.125)
    assert mfu(500e12, None, 1) is None
    assert mfu(None, device, 1) is None


def read(path):
    return [json.loads(line, parse_constant=pytest.fail) for line in path.read_text().splitlines()]


def test_rows_are_written_at_once_and_are_valid_json(tmp_path):
    run_dir = tmp_path / "new" / "run"
    with MetricsWriter(run_dir) as writer:
        writer.write({"step": 1, "loss": 2.5, "mfu": None})
        assert read(run_dir / "metrics.jsonl") == [{"step": 1, "loss": 2.5, "mfu": None}]
        writer.write({"step": np.int64(2), "loss": jnp.float32(0.5), "lr": np.float32(0.25)})
        writer.write({"step": 3, "loss": float("nan"), "grad_norm": jnp.inf, "lr": -np.inf})
    assert read(run_dir / "metrics.jsonl")[1:] == [
        {"step": 2, "loss": 0.5, "lr": 0.25},
        {
            "step": 3,
            "loss": None,
            "grad_norm": None,
            "lr": None,
            "nonfinite": {"loss": "nan", "grad_norm": "inf", "lr": "-inf"},
        },
    ]


@pytest.mark.parametrize("cut", ['{"step": 2, "lo', '{"step": 2}'], ids=["half", "no newline"])
def test_a_resumed_run_appends_after_the_last_complete_row(tmp_path, cut):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n' + cut)
    with MetricsWriter(tmp_path) as writer:
        writer.write({"step": 2, "loss": 1.0})
    assert read(path) == [{"step": 1}, {"step": 2, "loss": 1.0}]
    with MetricsWriter(tmp_path) as writer:
        writer.write({"step": 3})
    assert [row["step"] for row in read(path)] == [1, 2, 3]


@pytest.mark.parametrize("bad", [b"{broken", b"5", b'{"loss": 1}', b"\xff\r\xfe", b'{"step": "x"}'])
def test_a_bad_line_in_the_middle_is_named_and_does_not_block(tmp_path, bad):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1}\n' + bad + b'\n{"step": 2}\n{"step": 3}\n{"step": 4, "lo')
    with pytest.warns(UserWarning, match=r"metrics\.jsonl:2 is no row and is left out") as warned:
        MetricsWriter(tmp_path, last_step=2).close()
    assert len(warned) == 1
    assert path.read_bytes() == b'{"step": 1}\n' + bad + b'\n{"step": 2}\n'


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([1, 3], "the rows of 1 of 3 steps are missing, first the row of step 2; the report"),
        ([1], "the rows of 2 of 3 steps are missing, first the row of step 2"),
        ([], "the rows of 3 of 3 steps are missing, first the row of step 1"),
    ],
)
def test_missing_rows_are_told(tmp_path, rows, message):
    held_out = '{"step": 2, "val_loss": 1.0}\n'  # is no row of training
    lines = [f'{{"step": {step}}}\n' for step in rows]
    (tmp_path / "metrics.jsonl").write_text("".join([*lines, held_out]))
    with pytest.warns(UserWarning, match=message):
        MetricsWriter(tmp_path, last_step=3).close()


def test_rows_are_on_the_disk_after_sync_and_close(tmp_path, monkeypatch):
    synced = []
    fsync = os.fsync

    def spy(number):
        synced.append((tmp_path / "metrics.jsonl").read_text().count("\n"))
        fsync(number)

    monkeypatch.setattr(os, "fsync", spy)
    with MetricsWriter(tmp_path) as writer:
        writer.write({"step": 1})
        assert not synced  # each takes milliseconds
        writer.sync()
        assert synced == [1]
        writer.write({"step": 2})
    assert synced == [1, 2]


def test_a_full_disk_names_the_file(tmp_path, monkeypatch):
    class Full:
        def write(self, line):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with MetricsWriter(tmp_path) as writer:
        (tmp_path / "samples.jsonl").symlink_to("/dev/full")
        with pytest.raises(RunError, match=r"samples\.jsonl: No space left on device$"):
            writer.write_sample(1, "heading", "text")
        (tmp_path / "samples.jsonl").unlink()
        with monkeypatch.context() as patch:
            patch.setattr(writer, "_file", Full())
            with pytest.raises(RunError, match=r"metrics\.jsonl: No space left on device$"):
                writer.write({"step": 1})


def test_a_row_of_arrays_is_refused(tmp_path):
    with MetricsWriter(tmp_path) as writer, pytest.raises(ValueError):
        writer.write({"loss": np.zeros(2)})


def test_config(tmp_path):
    @dataclasses.dataclass
    class Settings:
        dtype: object = jnp.bfloat16
        clip: float = float("inf")
        betas: tuple[float, float] = (0.9, 0.95)

    with MetricsWriter(tmp_path) as writer:
        writer.write_config({"train": Settings(), "data": {"num_files": 3, "none": None}})
    text = (tmp_path / "config.json").read_text()
    assert text.endswith("}\n") and "\n  " in text
    config = json.loads(text, parse_constant=pytest.fail)
    environment = config.pop("environment")
    assert config == {
        "train": {"dtype": "bfloat16", "clip": "inf", "betas": [0.9, 0.95]},
        "data": {"num_files": 3, "none": None},
    }
    assert environment.keys() == run_environment().keys()


def test_run_environment(monkeypatch):
    monkeypatch.setattr("sys.orig_argv", ["python", "-m", "train", "--name", "my run"])
    environment = run_environment()
    assert re.fullmatch(r"3\.\d+\.\d+.*", environment["python"])
    assert environment["jax"] == __import__("jax").__version__
    assert environment["num_devices"] >= 1
    assert environment["command"] == "python -m train --name 'my run'"


def test_device_memory_has_both_figures_or_none():
    memory = device_memory()
    assert not memory or 0 < memory["memory_gib"] <= memory["peak_memory_gib"]


class Clock:
    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


def test_throughput_leaves_out_the_first_two_steps_and_pauses():
    clock = Clock()
    throughput = Throughput(window=20, clock=clock)
    assert throughput.tokens_per_s is None and throughput.step_time_s is None
    for _ in range(2):
        clock.now += 300
        throughput.update(1000, 5e6)
        assert throughput.tokens_per_s is None and throughput.step_time_s is None
    for _ in range(5):
        clock.now += 2
        throughput.update(1000, 5e6)
    assert throughput.tokens_per_s == pytest.approx(500)
    assert throughput.flops_per_s == pytest.approx(2.5e6)
    assert throughput.step_time_s == pytest.approx(2)
    with throughput.pause():
        clock.now += 1000
    with pytest.raises(KeyError), throughput.pause():
        clock.now += 1000
        raise KeyError
    clock.now += 2
    throughput.update(1000, 5e6)
    assert throughput.tokens_per_s == pytest.approx(500)


def test_throughput_forgets_times_before_its_window():
    clock = Clock()
    throughput = Throughput(window=3, clock=clock)
    for seconds in (9, 9, 9, 9, 1, 1, 1):
        clock.now += seconds
        throughput.update(60, 120.0)
    assert throughput.tokens_per_s == pytest.approx(60)
    clock.now += 4
    throughput.update(240, 120.0)
    assert throughput.tokens_per_s == pytest.approx(360 / 6)
    assert throughput.flops_per_s == pytest.approx(360 / 6)
    assert throughput.step_time_s == pytest.approx(6 / 3)
    with pytest.raises(ValueError, match="window=0"):
        Throughput(window=0)


def test_throughput_with_a_clock_that_stands_still():
    throughput = Throughput(clock=Clock())
    throughput.update(1, 1.0)
    throughput.update(1, 1.0)
    assert throughput.tokens_per_s is None and throughput.flops_per_s is None


TRAIN_ROW = {
    "loss": 2.1344,
    "lr": 3e-4,
    "grad_norm": 0.8123,
    "tokens": 10_000,
    "tokens_per_s": 12_345.0,
    "mfu": 0.412,
    "memory_gib": 3.14,
    "step_time_s": 0.1,
    "elapsed_s": 10.0,
}


class Terminal(io.StringIO):
    def isatty(self):
        return True


def shown(total_steps, updates, *, width=200, live=None, every=10):
    file = Terminal() if live else io.StringIO()
    console = Console(file=file, width=width, force_terminal=live, color_system=None)
    with Progress(total_steps, every=every, console=console) as progress:
        for step, metrics in updates:
            progress.update(step, metrics)
        progress.print("a [bold]line[/bold]")
    return file.getvalue()


def test_plain_progress_is_one_line_every_n_steps():
    lines = shown(25, [(step, TRAIN_ROW) for step in range(1, 26)], width=20).splitlines()
    assert [line.split()[1] for line in lines[:-1]] == ["1/25", "10/25", "20/25", "25/25"]
    assert re.fullmatch(
        r"step 20/25  loss 2\.134  lr 3\.0e-4  grad 0\.81  12\.3k tok/s  mfu 41\.2%  "
        r"mem 3\.1 GiB  eta 0:00",
        lines[2],
    )
    assert lines[-1] == "a [bold]line[/bold]"


def test_plain_progress_when_metrics_come_every_few_steps():
    updates = [(s, TRAIN_ROW if s % 25 == 0 else {}) for s in range(1, 101)]
    lines = shown(100, updates).splitlines()
    assert [line.split()[1] for line in lines[:-1]] == ["25/100", "50/100", "75/100", "100/100"]


def test_held_out_results_always_get_a_line():
    updates = [(3, TRAIN_ROW), (4, {"val_loss": 2.0, "val_bpb": 2.885}), (5, TRAIN_ROW)]
    lines = shown(1000, updates).splitlines()
    assert lines[1] == "step 4/1000  val loss 2.000  val bpb 2.885"
    assert len(lines) == 3


def test_unknown_values_are_left_out():
    row = {"loss": float("nan"), "mfu": None, "tokens_per_s": None, "memory_gib": None}
    assert shown(9, [(1, row)]).splitlines()[0] == "step 1/9  loss nan"
    both = {"loss": 1.0, "memory_gib": 3.0, "peak_memory_gib": 5.25}
    assert shown(9, [(1, both)]).splitlines()[0] == "step 1/9  loss 1.000  mem 3.0/5.2 GiB"


@pytest.mark.parametrize("width", [40, 80, 200])
def test_live_progress_draws_a_bar(width):
    updates = [(1, TRAIN_ROW), (2, {"val_loss": 2.5}), (30, TRAIN_ROW)]
    output = shown(60, updates, live=True, width=width)
    assert "step 2/60  val loss 2.500" in output
    assert "a [bold]line[/bold]" in output
    bar = output.splitlines()[-2].split("\r")[-1]
    assert "30/60 eta 0:00  loss 2." in bar
    assert width < 80 or "━━━" in bar
    if width == 200:
        assert "loss 2.134  val loss 2.500  12.3k tok/s  mfu 41.2%  mem 3.1 GiB" in bar


def test_number_of():
    texts = [number_of(number, "token") for number in (0, 1, 1024)]
    assert texts == ["0 tokens", "1 token", "1,024 tokens"]


def test_format_count():
    values = [0, 7, 999.4, 999.6, 1000, 12_345, 123_456, 999_499, 999_600, 1.5e6, 12e6, 2.5e9]
    assert [format_count(float(value)) for value in values] == [
        *("0", "7", "999", "1.00k", "1.00k", "12.3k", "123k", "999k"),
        *("1.00M", "1.50M", "12.0M", "2.50G"),
    ]


def test_format_duration():
    seconds = [0.0, 59.6, 83.0, 3599.7, 3723.0, 90_000.0]
    assert [format_duration(value) for value in seconds] == [
        *("0:00", "1:00", "1:23", "1:00:00", "1:02:03", "25:00:00"),
    ]
