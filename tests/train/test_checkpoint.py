"""Runs that end early and go on, to the bit; and checkpoints that are damaged or do not fit."""

import dataclasses
import gc
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
import warnings
from pathlib import Path

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.compilation_cache import compilation_cache
from jax.sharding import NamedSharding, PartitionSpec

import tiny_run
import train.checkpoint
import train.loop
from benchmarks.faults import timeless
from models.sharding import make_mesh
from train.checkpoint import Checkpoints, check_config, checksum
from train.config import (
    CheckpointConfig,
    DistributedConfig,
    MeshConfig,
    preset,
)
from train.faults import RunError
from train.loop import run
from train.metrics import MetricsWriter
from train.step import abstract_state, init_state

pytestmark = pytest.mark.usefixtures("no_plots")
ROOT = Path(train.loop.__file__).parents[1]
CONFIG = dataclasses.replace(
    tiny_run.CONFIG, mesh=MeshConfig(fsdp=2), checkpoint=CheckpointConfig(every=3)
)


@pytest.fixture(scope="module", autouse=True)
def fast_compilation(tmp_path_factory):
    """These programs run for milliseconds, compile for seconds, and are the same in every test."""
    programs = str(tmp_path_factory.mktemp("programs"))
    set_compilation(no_optimizations=True, cache=programs, cache_from_s=0.0)
    yield
    set_compilation(no_optimizations=False, cache=None, cache_from_s=1.0)


def set_compilation(*, no_optimizations, cache, cache_from_s):
    jax.config.update("jax_disable_most_optimizations", no_optimizations)
    jax.config.update("jax_compilation_cache_dir", cache)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", cache_from_s)
    compilation_cache.reset_cache()


@pytest.fixture(scope="module", autouse=True)
def one_device():
    """The eight devices of the tests are for the one about meshes.

    A CPU program for several devices can hang when it comes from the cache.
    """
    mesh = make_mesh(data=1, fsdp=1, devices=jax.devices()[:1])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train.loop, "mesh_of", lambda config: mesh)
        yield mesh


def rows_of(folder):
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [timeless(json.loads(line)) for line in lines]


def saved(folder, config=CONFIG):
    """Step and state of the newest checkpoint, on the host."""
    mesh = train.loop.mesh_of(config)
    with Checkpoints(folder / "checkpoints", keep=9) as checkpoints:
        step, state = restore(checkpoints, abstract_state(config, mesh))
    return step, jax.device_get(state)


def restore(checkpoints, like):
    restored = checkpoints.restore(like)
    assert restored is not None
    return restored


def steps_in(folder):
    return sorted(int(path.name) for path in (folder / "checkpoints").iterdir())


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The folder of a run that nothing happened to."""
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


# What Orbax was reading or writing when something else failed reports to an event loop that it has
# closed, some of it only when it is collected.
CANCELLED = pytest.mark.filterwarnings(
    "ignore:Exception ignored in:pytest.PytestUnraisableExceptionWarning"
)


@pytest.fixture
def collected():
    yield
    gc.collect()
    time.sleep(0.2)


class KilledError(Exception):
    pass


def kill():
    raise KilledError


# Going on


@pytest.mark.parametrize(("step", "from_step"), [(2, None), (3, None), (5, 3), (8, 6)])
def test_a_run_that_died_goes_on_to_the_same_end(step, from_step, tmp_path, at_step, whole, capsys):
    config = dataclasses.replace(CONFIG, runs_dir=tmp_path)
    at_step(step, kill)
    with pytest.raises(KilledError):
        run(config)
    with (tmp_path / "tiny" / "metrics.jsonl").open("a") as file:
        file.write('{"step": 7, "loss": 1}\n{"step": 8, "lo')  # as a run that got on further
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


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
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


def test_a_run_with_all_steps_only_writes_its_report_again(tmp_path, whole, capsys):
    shutil.copytree(whole, tmp_path / "tiny")
    (tmp_path / "tiny" / "report.html").unlink()
    folder = run(dataclasses.replace(CONFIG, runs_dir=tmp_path))
    assert "compiled" not in capsys.readouterr().out
    assert (folder / "report.html").exists()
    assert (folder / "metrics.jsonl").read_text() == (whole / "metrics.jsonl").read_text()
    assert steps_in(folder) == [6, 8]


def test_other_numbers_of_devices(tmp_path, at_step, whole, monkeypatch):
    """One device, then four that share the parameters, then two: the losses differ by rounding."""
    config = dataclasses.replace(CONFIG, runs_dir=tmp_path)
    meshes = [
        make_mesh(data=1, fsdp=1, devices=jax.devices()[:1]),
        make_mesh(data=1, fsdp=4, devices=jax.devices()[:4]),
        make_mesh(data=2, fsdp=1, devices=jax.devices()[:2]),
    ]
    states = []
    for stop, mesh in zip((3, 6, None), meshes, strict=True):
        monkeypatch.setattr(train.loop, "mesh_of", lambda _, mesh=mesh: mesh)
        if stop:
            at_step(stop + 1, kill)
            with pytest.raises(KilledError):
                run(config)
        else:
            run(config)
        folder = tmp_path / "tiny" / "checkpoints"
        with Checkpoints(folder, keep=9) as checkpoints:
            read = [restore(checkpoints, abstract_state(config, mesh)) for mesh in meshes]
        states.append(read[0])
        for _, other in read:
            chex.assert_trees_all_equal(*map(jax.device_get, (other, read[0][1])))
        assert len(read[1][1].params["embed_tokens"]["embedding"][...].sharding.device_set) == 4
    assert [step for step, _ in states] == [3, 6, 8]
    got, expected = rows_of(tmp_path / "tiny"), rows_of(whole)
    assert [row["step"] for row in got] == [row["step"] for row in expected]
    np.testing.assert_allclose(
        [row["loss"] for row in got], [row["loss"] for row in expected], rtol=1e-5
    )


# What is kept


def test_the_newest_and_the_best_are_kept(tmp_path):
    state = init_state(CONFIG, train.loop.mesh_of(CONFIG))
    with Checkpoints(tmp_path, keep=2) as checkpoints:
        losses = {1: 3.0, 2: 1.0, 3: None, 4: 2.0, 5: float("nan")}
        for step, val_loss in losses.items():
            checkpoints.save(step, state, val_loss=val_loss)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["2", "4", "5"]
    # What was measured is known to the next process.
    with Checkpoints(tmp_path, keep=1) as checkpoints:
        checkpoints.save(6, state, val_loss=1.5)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["2", "6"]


def test_one_process_at_a_time(tmp_path):
    with (
        Checkpoints(tmp_path / "run" / "checkpoints", keep=1),
        pytest.raises(RunError, match=r"another process is training in .*run$"),
    ):
        Checkpoints(tmp_path / "run" / "checkpoints", keep=1)
    with Checkpoints(tmp_path / "run" / "checkpoints", keep=1):
        pass


# Damage


@pytest.fixture(scope="module")
def two_checkpoints(tmp_path_factory):
    folder = tmp_path_factory.mktemp("two")
    mesh = train.loop.mesh_of(CONFIG)
    first = init_state(CONFIG, mesh)
    second = init_state(dataclasses.replace(CONFIG, seed=1), mesh)
    with Checkpoints(folder, keep=2) as checkpoints:
        checkpoints.save(1, first, val_loss=None)
        checkpoints.save(2, second, val_loss=None)
    return folder, first, second


def truncate(path):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def flip_a_bit(path):
    content = bytearray(path.read_bytes())
    if content:
        content[len(content) * 2 // 3] ^= 4
    path.write_bytes(content)


@CANCELLED
@pytest.mark.usefixtures("collected")
@pytest.mark.parametrize("damage", [truncate, flip_a_bit, Path.unlink])
def test_damage_to_any_file_is_found(damage, two_checkpoints, tmp_path):
    """Either the newest state is read as it was saved, or the one before it, with a warning."""
    folder, first, second = two_checkpoints
    like = abstract_state(CONFIG, train.loop.mesh_of(CONFIG))
    files = [path.relative_to(folder) for path in (folder / "2").rglob("*") if path.is_file()]
    # Metadata may be the largest file: in how many the arrays are depends on how fast they were
    # written.
    of_arrays = [path for path in files if path.parent.name == "d"]
    big = max(of_arrays, key=lambda path: (folder / path).stat().st_size)
    fell_back = []
    for number, file in enumerate(files):
        copy = tmp_path / str(number)
        shutil.copytree(folder, copy)
        damage(copy / file)
        with (
            Checkpoints(copy, keep=2) as checkpoints,
            warnings.catch_warnings(record=True, action="always") as warned,
        ):
            step, state = restore(checkpoints, like)
            chex.assert_trees_all_equal(state, {1: first, 2: second}[step])
            if step == 1:
                fell_back.append(file)
                # A folder without Orbax's mark is none, whatever is in it. (Coroutines that Orbax
                # does not await after an error are RuntimeWarnings, whenever they are collected.)
                said = [str(w.message) for w in warned if w.category is UserWarning]
                assert not said or "2 is damaged and was deleted; going on from step 1" in said[0]
                checkpoints.save(2, second, val_loss=None)
                checkpoints.wait()
                chex.assert_trees_all_equal(checkpoints.restore(like), (2, second))
    assert big in fell_back


def test_a_wrong_value_is_found_where_the_files_are_right(two_checkpoints, tmp_path, monkeypatch):
    """As if memory had been overwritten between the device and the disk."""
    _, first, second = two_checkpoints
    like = abstract_state(CONFIG, train.loop.mesh_of(CONFIG))
    with Checkpoints(tmp_path, keep=2) as checkpoints:
        checkpoints.save(1, first, val_loss=None)
        real = train.checkpoint._checksums
        monkeypatch.setattr("train.checkpoint._checksums", lambda _: real(by_name(first)))
        checkpoints.save(2, second, val_loss=None)
        checkpoints.wait()
        monkeypatch.setattr("train.checkpoint._checksums", real)
        with pytest.warns(match=r"damaged .* differ from their checksums, first params"):
            step, _ = restore(checkpoints, like)
    assert step == 1


def by_name(state):
    return train.checkpoint._by_name(state)


@CANCELLED
@pytest.mark.usefixtures("collected")
def test_where_nothing_can_be_read_nothing_is_deleted(two_checkpoints, tmp_path):
    shutil.copytree(two_checkpoints[0], tmp_path / "checkpoints")
    for step in (1, 2):
        shutil.rmtree(tmp_path / "checkpoints" / str(step) / "state" / "d")
    with (
        Checkpoints(tmp_path / "checkpoints", keep=2) as checkpoints,
        pytest.raises(RunError, match=r"no checkpoint .* can be read; of step 2: .*delete"),
    ):
        checkpoints.restore(abstract_state(CONFIG, train.loop.mesh_of(CONFIG)))
    assert steps_in(tmp_path) == [1, 2]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int32", "uint8"])
def test_checksums(dtype):
    values = np.random.default_rng(0).integers(0, 100, (8, 24)).astype(jnp.dtype(dtype))
    mesh = make_mesh(data=2, fsdp=4)
    on = lambda *axes: jax.device_put(values, NamedSharding(mesh, PartitionSpec(*axes)))
    one = jax.jit(checksum)
    sums = {int(one(a)) for a in (values, on(), on("data"), on("fsdp", "data"), on(None, "fsdp"))}
    assert len(sums) == 1
    raw = values.view(f"uint{8 * values.itemsize}").copy()
    others = [values[::-1], values.T.reshape(values.shape), np.roll(values, 1)]
    for bit in (0, 8 * values.itemsize - 1):
        raw[3, 5] ^= raw.dtype.type(1 << bit)
        others.append(raw.view(values.dtype).copy())
        raw[3, 5] ^= raw.dtype.type(1 << bit)
    assert len(sums | {int(one(other)) for other in others}) == 1 + len(others)


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
    with pytest.raises(RunError, match=r"with corpus.sha256 None, now 'abc'"):
        check_config(whole, CONFIG, {"sha256": "abc"})
    plain = dataclasses.replace(CONFIG, checkpoint=CheckpointConfig(), runs_dir=tmp_path)
    folder = run(dataclasses.replace(plain, steps=2))
    assert not (folder / "checkpoints").exists()
    with pytest.raises(RunError, match="tiny is a run without checkpoints; choose another --name"):
        run(dataclasses.replace(CONFIG, runs_dir=tmp_path))


# A full disk


@CANCELLED
@pytest.mark.usefixtures("collected")
def test_a_full_disk_ends_the_run_in_one_line_and_leaves_the_last_checkpoint(
    tmp_path, at_step, whole
):
    """Files can grow to 4 kB, enough for metrics.jsonl, which Linux tells in the same way."""
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
    assert message.startswith("a checkpoint was not saved, the last good one is step 5: ")
    assert "too large" in message and "\n" not in message
    run(config)
    chex.assert_trees_all_equal(saved(folder), saved(whole))
    assert rows_of(folder) == rows_of(whole)


def test_the_command_line_shows_one_line(tmp_path):
    (tmp_path / "demo").mkdir()
    config = dataclasses.replace(preset("demo"), runs_dir=tmp_path)
    with MetricsWriter(tmp_path / "demo") as writer:
        writer.write_config({"config": config, "data": {}})
    result = subprocess.run(
        [sys.executable, "-m", "train", "--checkpoint.every=1", f"--runs-dir={tmp_path}"],
        cwd=ROOT,
        env=os.environ | {"JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert result.returncode == 1
    assert result.stderr.strip().splitlines()[-1].startswith("error: ")
    assert "Traceback" not in result.stderr
