"""Runs that end early go on to the same bits. Settings and text that differ are refused."""

import dataclasses
import json
import os
import resource
import shutil
import signal
import time
from pathlib import Path

import chex
import jax
import numpy as np
import pytest

import train.checkpoints.checkpoint
import train.loop
import train.setup
from models.sharding import make_mesh
from support.checkpoint_runs import CANCELLED, CONFIG, like, restore
from support.faults import timeless
from support.tiny_run import ON_LIBRARY
from support.tokenizer_files import write_byte_level
from train.__main__ import main
from train.checkpoints.checkpoint import (
    Checkpoints,
    check_config,
)
from train.config import (
    CheckpointConfig,
    DistributedConfig,
    MeshConfig,
    preset,
)
from train.errors import RunError
from train.loop import run
from train.outputs import new_run_dir
from train.reporting.metrics import MetricsWriter

pytestmark = pytest.mark.usefixtures("one_device", "programs_once", "no_plots")


def rows_of(folder):
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [timeless(json.loads(line)) for line in lines]


def saved(folder):
    """Step and state of the newest checkpoint, on the host."""
    with Checkpoints(folder / "checkpoints", keep=9) as checkpoints:
        step, state = restore(checkpoints, like())
    return step, jax.device_get(state)


def steps_in(folder):
    return sorted(int(path.name) for path in (folder / "checkpoints").iterdir())


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The folder of an undisturbed run."""
    return run(dataclasses.replace(CONFIG, runs_dir=tmp_path_factory.mktemp("whole")))


@pytest.fixture
def at_step(monkeypatch):
    """Calls a function once, before the row of a step is written."""
    write = MetricsWriter.write

    def install(step, fn):
        def spy(self, row):
            if row["step"] == step:
                monkeypatch.setattr(MetricsWriter, "write", write)
                fn()
            write(self, row)

        monkeypatch.setattr(MetricsWriter, "write", spy)

    return install


class KilledError(Exception):
    pass


def kill():
    raise KilledError


# Going on


@pytest.mark.parametrize(
    ("step", "from_step"),
    [
        (2, None),
        pytest.param(3, None, marks=pytest.mark.full),
        (5, 3),
        pytest.param(8, 6, marks=pytest.mark.full),
    ],
)
def test_a_run_that_died_goes_on_to_the_same_end(step, from_step, tmp_path, at_step, whole, capsys):
    config = dataclasses.replace(CONFIG, runs_dir=tmp_path)
    at_step(step, kill)
    with pytest.raises(KilledError):
        run(config)
    with (tmp_path / "tiny" / "metrics.jsonl").open("a") as file:
        file.write('{"step": 7, "loss": 1}\n{"step": 8, "lo')  # as if the run had gone further
    capsys.readouterr()
    folder = run(config)
    assert folder == tmp_path / "tiny"
    printed = capsys.readouterr().out
    assert ("going on" in printed) == (from_step is not None)
    assert from_step is None or f"going on after step {from_step} of 8" in printed
    chex.assert_trees_all_equal(saved(folder), saved(whole))
    assert rows_of(folder) == rows_of(whole)
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    elapsed = [json.loads(line)["elapsed_s"] for line in lines]
    assert elapsed == sorted(elapsed)


@pytest.mark.parametrize(
    "number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.full)]
)
def test_a_signal_saves_the_step_and_ends_the_run(number, tmp_path, at_step, whole, capsys):
    config = dataclasses.replace(CONFIG, runs_dir=tmp_path)
    handler = signal.getsignal(number)
    at_step(4, lambda: os.kill(os.getpid(), number))
    folder = run(config)
    assert signal.getsignal(number) == handler
    assert "stopped after step 5; the same command goes on" in capsys.readouterr().out
    assert steps_in(folder) == [3, 5]
    assert rows_of(folder) == rows_of(whole)[:5]
    assert not (folder / "report.html").exists()
    run(config)
    chex.assert_trees_all_equal(saved(folder), saved(whole))
    assert rows_of(folder) == rows_of(whole)


def test_the_second_sigint_does_not_wait(tmp_path, at_step):
    def twice():
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)

    at_step(4, twice)
    with pytest.raises(KeyboardInterrupt):
        run(dataclasses.replace(CONFIG, runs_dir=tmp_path))
    assert steps_in(tmp_path / "tiny") == [3]


def test_a_run_with_all_steps_only_writes_its_report_again(tmp_path, whole, monkeypatch):
    shutil.copytree(whole, tmp_path / "tiny")
    (tmp_path / "tiny" / "report.html").unlink()

    def fail(*args):
        raise AssertionError("no step is left")

    monkeypatch.setattr(train.loop, "compile_steps", fail)
    folder = run(dataclasses.replace(CONFIG, runs_dir=tmp_path))
    assert (folder / "report.html").exists()
    assert (folder / "metrics.jsonl").read_text() == (whole / "metrics.jsonl").read_text()
    assert steps_in(folder) == [6, 8]


@pytest.mark.parametrize(
    ("stops", "sizes"),
    [
        ((3, None), ((1, 1), (1, 2))),
        pytest.param((3, 6, None), ((1, 1), (1, 4), (2, 1)), marks=pytest.mark.full),
    ],
)
def test_other_numbers_of_devices(stops, sizes, tmp_path, at_step, whole, monkeypatch):
    """One device, then several that share parameters or batch: the losses differ by rounding."""
    config = dataclasses.replace(CONFIG, runs_dir=tmp_path)
    meshes = [
        make_mesh(data=data, fsdp=fsdp, devices=jax.devices()[: data * fsdp])
        for data, fsdp in sizes
    ]
    states = []
    for stop, mesh in zip(stops, meshes, strict=True):
        monkeypatch.setattr(train.loop, "mesh_of", lambda _, mesh=mesh: mesh)
        if stop:
            at_step(stop + 1, kill)
            with pytest.raises(KilledError):
                run(config)
        else:
            run(config)
        folder = tmp_path / "tiny" / "checkpoints"
        with Checkpoints(folder, keep=9) as checkpoints:
            read = [
                restore(checkpoints, train.loop.abstract_state(config, mesh)) for mesh in meshes
            ]
        states.append(read[0])
        for _, other in read:
            chex.assert_trees_all_equal(*map(jax.device_get, (other, read[0][1])))
        assert (
            len(read[1][1].params["embed_tokens"]["embedding"][...].sharding.device_set)
            == sizes[1][1]
        )
    assert [step for step, _ in states] == [*stops[:-1], 8]
    got, expected = rows_of(tmp_path / "tiny"), rows_of(whole)
    assert [row["step"] for row in got] == [row["step"] for row in expected]
    np.testing.assert_allclose(
        [row["loss"] for row in got], [row["loss"] for row in expected], rtol=1e-5
    )


# Configurations


def test_a_run_with_other_settings_is_refused(whole):
    config = dataclasses.replace(CONFIG, runs_dir=whole.parent)
    other = dataclasses.replace(
        config,
        seed=1,
        optimizer=dataclasses.replace(config.optimizer, learning_rate=0.5),
        log_every=1,
    )
    before = (whole / "metrics.jsonl").read_bytes()
    with pytest.raises(RunError) as caught:
        run(other)
    message = str(caught.value)
    assert "with optimizer.learning_rate 0.01, now 0.5; seed 0, now 1. Go on" in message
    assert "log_every" not in message and "\n" not in message
    assert (whole / "metrics.jsonl").read_bytes() == before


def test_settings_that_may_change(whole):
    check_config(
        whole,
        dataclasses.replace(
            CONFIG,
            runs_dir=whole.parent,
            name="other",
            mesh=MeshConfig(fsdp=4),
            model=dataclasses.replace(CONFIG.model, remat="full", mlp_chunk_size=4),
            checkpoint=CheckpointConfig(every=1, keep=5),
            distributed=DistributedConfig(num_processes=2, coordinator_address="host:1"),
            max_skipped_steps=3,
            log_every=3,
            sample_prompt="x",
            sample_tokens=3,
            save=True,
            xla_options=("none",),
        ),
        {},
    )


def test_other_text_and_runs_without_checkpoints_are_refused(whole, tmp_path):
    with pytest.raises(RunError, match=r"with corpus.sha256 None, now 'abc'.* is its field 'data'"):
        check_config(whole, CONFIG, {"sha256": "abc"})
    plain = dataclasses.replace(CONFIG, checkpoint=CheckpointConfig(), runs_dir=tmp_path)
    with MetricsWriter(tmp_path / "tiny") as writer:
        writer.write_config({"config": plain, "data": {}})
        check_config(tmp_path / "tiny", CONFIG, {})  # the run had no row yet
        writer.write({"step": 1})
    with pytest.raises(RunError, match="tiny is a run without checkpoints; choose another --name"):
        run(dataclasses.replace(CONFIG, runs_dir=tmp_path))


def test_a_number_after_the_name_is_told(tmp_path, capsys):
    assert new_run_dir(tmp_path, "a") == tmp_path / "a"
    assert not capsys.readouterr().out
    assert new_run_dir(tmp_path, "a") == tmp_path / "a-2"
    line = f"{tmp_path / 'a'} exists, so this run is {tmp_path / 'a-'}"
    assert capsys.readouterr().out == f"{line}2\n"
    (tmp_path / "a" / "checkpoints" / "6").mkdir(parents=True)
    new_run_dir(tmp_path, "a")
    remedy = f"starts at step 0; --checkpoint.every N resumes {tmp_path / 'a'} after step 6"
    assert capsys.readouterr().out == f"{line}3 and {remedy}\n"


TEXT = {"a": "one text of two\n" * 40, "b": "and the other\n" * 40}


def check_text(run_dir, config, *paths, **changes):
    """Checks that a run may go on with other paths of its text."""
    of_text = dataclasses.replace(config.data, path=paths, **changes)
    datasets = train.setup.open_datasets(dataclasses.replace(config, data=of_text, eval_every=0))
    check_config(run_dir, dataclasses.replace(config, data=of_text), datasets.fingerprint)


def test_text_may_move_but_not_change(whole, tmp_path, monkeypatch, capsys):
    for name, content in TEXT.items():
        (tmp_path / f"{name}.txt").write_text(content)
    write_byte_level(tmp_path / "tokenizer.json")
    monkeypatch.chdir(tmp_path)
    data = dataclasses.replace(
        CONFIG.data,
        path=(Path("a.txt"), Path("b.txt")),
        weights=(1.0, 2.0),
        tokenizer=Path("tokenizer.json"),
        held_out_fraction=0.0,
        cache_dir=tmp_path / "cache",
        batch_size=1,
    )
    config = dataclasses.replace(CONFIG, model=ON_LIBRARY.model, data=data)
    run_dir = tmp_path / "run"
    shutil.copytree(whole / "checkpoints", run_dir / "checkpoints")
    with MetricsWriter(run_dir) as writer:
        opened = train.setup.open_datasets(dataclasses.replace(config, eval_every=0))
        writer.write_config({"config": config, "data": opened.fingerprint})
    capsys.readouterr()
    check_text(run_dir, config, *data.path)
    assert "same content" not in capsys.readouterr().out

    (tmp_path / "a.txt").rename(tmp_path / "moved.txt")
    moved, b = tmp_path / "moved.txt", tmp_path / "b.txt"
    check_text(run_dir, config, moved, b, tokenizer=tmp_path)
    assert capsys.readouterr().out.splitlines()[-1] == (
        f"{run_dir}: data.path ['a.txt', 'b.txt'], now ['{moved}', '{b}']; data.tokenizer "
        f"'tokenizer.json', now '{tmp_path}', with the same content, so the run goes on"
    )
    old, new = "['a.txt', 'b.txt']", [str(b), str(moved)]
    with pytest.raises(RunError) as caught:  # weights of the other
        check_text(run_dir, config, b, moved)
    assert str(caught.value) == (
        f"{run_dir} was started with other text in data.path; data.path {old}, now {new}. Go on "
        "with the old values, or choose another --name"
    )
    weights = (
        r"with data\.weights \[1\.0, 2\.0\], now \[2\.0, 1\.0\]\. Go on .* into \S+/config\.json$"
    )
    with pytest.raises(RunError, match=weights):
        check_text(run_dir, config, moved, b, weights=(2.0, 1.0))
    with b.open("a") as file:
        file.write("more\n")
    with pytest.raises(RunError, match=r"with other text in data\.path; data\.path .*"):
        check_text(run_dir, config, moved, b)


@pytest.mark.parametrize("at", [pytest.param("compilation", marks=pytest.mark.full), "step 2"])
def test_settings_bind_with_the_first_checkpoint(at, tmp_path, at_step, whole, monkeypatch):
    """A run that failed before its first checkpoint leaves its name free."""
    other = dataclasses.replace(CONFIG, seed=5, runs_dir=tmp_path)
    with monkeypatch.context() as patch:
        if at == "compilation":
            patch.setattr(train.loop, "compile_steps", lambda *args: kill())
        else:
            at_step(2, kill)
        with pytest.raises(KilledError):
            run(other)
    assert (tmp_path / "tiny" / "config.json").exists() == (at == "step 2")
    folder = run(dataclasses.replace(CONFIG, runs_dir=tmp_path))
    assert json.loads((folder / "config.json").read_text())["config"]["seed"] == CONFIG.seed
    assert rows_of(folder) == rows_of(whole)
    with pytest.raises(RunError, match="seed 0, now 5"):
        run(other)


# A full disk


def wait_for_writers(folder):
    """Waits until the threads of a save that failed in this process write no more.

    Orbax does not wait for them, and the next run removes the folder that they write into.
    """
    before, now = None, set(folder.rglob("*"))
    while now != before:
        time.sleep(0.3)
        before, now = now, set(folder.rglob("*"))


@CANCELLED
@pytest.mark.usefixtures("collected")
def test_a_full_disk_ends_the_run_in_one_line_and_leaves_the_last_checkpoint(
    tmp_path, at_step, whole
):
    """A limit of 4 kB a file, enough for metrics.jsonl, gives an error like that of a full disk."""
    config = dataclasses.replace(CONFIG, runs_dir=tmp_path)
    at_step(4, lambda: os.kill(os.getpid(), signal.SIGTERM))
    folder = run(config)
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    at_step(6, lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (4000, limit[1])))
    try:
        with pytest.raises(RunError) as caught:
            run(config)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    message = str(caught.value)
    assert message.startswith("a checkpoint was not saved; the last good one is step 5: ")
    assert "too large" in message and "\n" not in message
    assert message.endswith(". Repair this, and start the same command again")
    wait_for_writers(folder)
    run(config)
    chex.assert_trees_all_equal(saved(folder), saved(whole))
    assert rows_of(folder) == rows_of(whole)


def test_the_command_line_shows_one_line(tmp_path):
    config = dataclasses.replace(preset("demo"), runs_dir=tmp_path)
    with MetricsWriter(tmp_path / "demo") as writer:
        writer.write_config({"config": config, "data": {}})
        writer.write({"step": 1})
    flags = ["--checkpoint.every=1", f"--runs-dir={tmp_path}"]
    with pytest.raises(SystemExit, match=r"^error: .*demo is a run without checkpoints; .*name$"):
        main(flags)
