"""Runs that end early and go on, to the bit; and checkpoints that are damaged or do not fit."""

import dataclasses
import errno
import gc
import json
import os
import resource
import shutil
import signal
import time
import warnings
from pathlib import Path

import chex
import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from jax.experimental.compilation_cache import compilation_cache
from jax.sharding import NamedSharding, PartitionSpec

import train.checkpoints.checkpoint
import train.loop
from models.sharding import make_mesh
from support import tiny_run
from support.faults import timeless
from train.__main__ import main
from train.checkpoints.checkpoint import (
    Checkpoints,
    check_config,
    checksum,
    read_params,
    saved_steps,
)
from train.checkpoints.files import not_damage
from train.config import (
    CheckpointConfig,
    DistributedConfig,
    MeshConfig,
    preset,
)
from train.errors import RunError
from train.loop import run
from train.reporting.metrics import MetricsWriter
from train.step import abstract_state, init_state

pytestmark = pytest.mark.usefixtures("no_plots")
CONFIG = dataclasses.replace(
    tiny_run.CONFIG, mesh=MeshConfig(fsdp=2), checkpoint=CheckpointConfig(every=3)
)


@pytest.fixture(scope="module", autouse=True)
def programs_in_a_cache(tmp_path_factory):
    """These programs run for milliseconds, compile for seconds, and are the same in every test."""
    programs = str(tmp_path_factory.mktemp("programs"))
    set_compilation(cache=programs, cache_from_s=0.0)
    yield
    set_compilation(cache=None, cache_from_s=1.0)


def set_compilation(*, cache, cache_from_s):
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


def names_in(folder):
    return sorted(path.name for path in folder.iterdir())


def at(step, state):
    """A state as it is after a step."""
    return dataclasses.replace(state, step=jnp.full_like(state.step, step))


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


def test_a_run_with_all_steps_only_writes_its_report_again(tmp_path, whole, capsys):
    shutil.copytree(whole, tmp_path / "tiny")
    (tmp_path / "tiny" / "report.html").unlink()
    folder = run(dataclasses.replace(CONFIG, runs_dir=tmp_path))
    assert "compiled" not in capsys.readouterr().out
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
            read = [restore(checkpoints, abstract_state(config, mesh)) for mesh in meshes]
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


# What is kept


def test_the_newest_and_the_best_are_kept(tmp_path):
    state = init_state(CONFIG, train.loop.mesh_of(CONFIG))
    with Checkpoints(tmp_path, keep=2) as checkpoints:
        losses = {1: 3.0, 2: 1.0, 3: None, 4: 2.0, 5: float("nan")}
        for step, val_loss in losses.items():
            checkpoints.save(step, state, val_loss=val_loss)
    assert names_in(tmp_path) == ["2", "4", "5"]
    # What was measured is known to the next process, and what is damaged is none of them.
    (tmp_path / "3.damaged").mkdir()
    with Checkpoints(tmp_path, keep=1) as checkpoints:
        checkpoints.save(6, state, val_loss=1.5)
    assert names_in(tmp_path) == ["2", "3.damaged", "6"]
    assert saved_steps(tmp_path) == {2: 1.0, 6: 1.5}


def test_one_process_at_a_time(tmp_path):
    with (
        Checkpoints(tmp_path / "run" / "checkpoints", keep=1),
        pytest.raises(RunError, match=r"another process is training in .*run; end it, or"),
    ):
        Checkpoints(tmp_path / "run" / "checkpoints", keep=1)
    with Checkpoints(tmp_path / "run" / "checkpoints", keep=1):
        pass


# Damage


@pytest.fixture(scope="module")
def two_checkpoints(tmp_path_factory):
    folder = tmp_path_factory.mktemp("two")
    mesh = train.loop.mesh_of(CONFIG)
    first = at(1, init_state(CONFIG, mesh))
    second = at(2, init_state(dataclasses.replace(CONFIG, seed=1), mesh))
    with Checkpoints(folder, keep=2) as checkpoints:
        checkpoints.save(1, first, val_loss=2.0)
        checkpoints.save(2, second, val_loss=1.0)
    return folder, first, second


@pytest.fixture
def copied(two_checkpoints, tmp_path):
    shutil.copytree(two_checkpoints[0], tmp_path / "checkpoints")
    return tmp_path / "checkpoints"


def truncate(path):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def flip_a_bit(path):
    content = bytearray(path.read_bytes())
    if content:
        content[len(content) * 2 // 3] ^= 4
    path.write_bytes(content)


@CANCELLED
@pytest.mark.usefixtures("collected")
@pytest.mark.parametrize(
    "damage", [pytest.param(truncate, marks=pytest.mark.full), flip_a_bit, Path.unlink]
)
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
            damaged = sorted((path, path.read_bytes()) for path in files_in(copy / "2"))
            step, state = restore(checkpoints, like)
            chex.assert_trees_all_equal(state, {1: first, 2: second}[step])
            if step == 1:
                fell_back.append(file)
                kept = sorted((path, path.read_bytes()) for path in files_in(copy / "2.damaged"))
                assert [content for _, content in kept] == [content for _, content in damaged]
                # Coroutines that Orbax does not await after an error are RuntimeWarnings, whenever
                # they are collected.
                said = [str(w.message) for w in warned if w.category is UserWarning]
                assert "2 is damaged and was renamed to 2.damaged; going on from step 1" in said[0]
                checkpoints.save(2, second, val_loss=None)
                checkpoints.wait()
                chex.assert_trees_all_equal(checkpoints.restore(like), (2, second))
    assert big in fell_back
    assert (Path("2/metrics/metrics") in fell_back) == (damage is not Path.unlink)


def files_in(folder):
    return [path for path in folder.rglob("*") if path.is_file()]


def test_a_wrong_value_is_found_where_the_files_are_right(two_checkpoints, tmp_path, monkeypatch):
    """As if memory had been overwritten between the device and the disk."""
    _, first, second = two_checkpoints
    like = abstract_state(CONFIG, train.loop.mesh_of(CONFIG))
    with Checkpoints(tmp_path, keep=2) as checkpoints:
        checkpoints.save(1, first, val_loss=None)
        real = train.checkpoints.checkpoint._checksums
        monkeypatch.setattr(
            "train.checkpoints.checkpoint._checksums", lambda _: real(by_name(first))
        )
        checkpoints.save(2, second, val_loss=None)
        checkpoints.wait()
        monkeypatch.setattr("train.checkpoints.checkpoint._checksums", real)
        with pytest.warns(match=r"damaged .* differ from their checksums, first params"):
            step, _ = restore(checkpoints, like)
    assert step == 1


def by_name(state):
    return train.checkpoints.checkpoint._by_name(state)


def test_a_name_that_is_taken_is_not_overwritten(copied):
    for name in ("2.damaged", "2.damaged-2"):
        (copied / name).mkdir()
    (copied / "2" / "metrics" / "metrics").write_bytes(b"\xff" * 31)
    with Checkpoints(copied, keep=2) as checkpoints:
        with pytest.warns(match=r"2 is damaged and was renamed to 2\.damaged-3; .*metrics is mal"):
            step, _ = restore(checkpoints, abstract_state(CONFIG, train.loop.mesh_of(CONFIG)))
    assert step == 1
    assert names_in(copied) == ["1", "2.damaged", "2.damaged-2", "2.damaged-3"]


@pytest.mark.parametrize("content", ["[]", "{}", '{"val_loss": "low"}', '{"val_loss": NaN}', "{"])
def test_malformed_metrics_are_told_to_those_who_read(content, copied):
    (copied / "1" / "metrics" / "metrics").write_text(content)
    with pytest.warns(match=r"step 1 counts as not measured: .*metrics is malformed"):
        assert saved_steps(copied) == {1: None, 2: 1.0}


@CANCELLED
@pytest.mark.usefixtures("collected")
@pytest.mark.parametrize("kind", ["arrays", "checksums", "metrics"])
def test_an_error_of_the_disk_is_told_and_changes_nothing(kind, copied):
    """Reading what cannot be read of this process is an EIO, also for root."""
    of_arrays = [path for path in files_in(copied / "2" / "state" / "d")]
    names = {"checksums": "checksums/metadata", "metrics": "metrics/metrics"}
    file = of_arrays[0] if kind == "arrays" else copied / "2" / names[kind]
    content = file.read_bytes()
    file.unlink()
    file.symlink_to("/proc/self/mem")
    like = abstract_state(CONFIG, train.loop.mesh_of(CONFIG))
    for _ in range(2):  # the lock is not kept
        with pytest.raises(RunError, match=r"cannot be read.*othing was changed") as caught:
            with Checkpoints(copied, keep=2) as checkpoints:
                checkpoints.restore(like)
        assert "Input/output error" in str(caught.value) and "\n" not in str(caught.value)
        assert str(file) in str(caught.value) or kind == "checksums"
        assert names_in(copied) == ["1", "2"]
    file.unlink()
    file.write_bytes(content)
    with Checkpoints(copied, keep=2) as checkpoints:
        assert restore(checkpoints, like)[0] == 2


def test_no_permission_is_told_and_changes_nothing(copied, monkeypatch):
    def refuse(*args, **options):
        raise PermissionError(errno.EACCES, "Permission denied", "manifest.ocdbt")

    monkeypatch.setattr(ocp.CheckpointManager, "restore", refuse)
    with Checkpoints(copied, keep=2) as checkpoints:
        with pytest.raises(RunError, match=r"2 cannot be read.*Permission denied: 'manifest"):
            checkpoints.restore(abstract_state(CONFIG, train.loop.mesh_of(CONFIG)))
    assert names_in(copied) == ["1", "2"]


def chained(error, cause):
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    ("error", "is_damage"),
    [
        (PermissionError(errno.EACCES, "Permission denied"), False),
        (OSError(errno.EIO, "Input/output error"), False),
        (OSError(errno.ESTALE, "Stale file handle"), False),
        (OSError(errno.EMFILE, "Too many open files"), False),
        (MemoryError(), False),
        (jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory"), False),
        (chained(Exception("while reading array"), ValueError("UNKNOWN: Failed to read")), False),
        (ValueError('PERMISSION_DENIED: Error opening "zarr" driver'), False),
        (ValueError('DATA_LOSS: Error opening "zarr" driver'), True),
        (ValueError("NOT_FOUND: Error"), True),
        (chained(Exception("while reading array"), ValueError("OUT_OF_RANGE: short")), True),
        (FileNotFoundError("File metadata not found."), True),
        (FileNotFoundError(errno.ENOENT, "No such file"), True),
        (IsADirectoryError(errno.EISDIR, "Is a directory"), True),
        (json.JSONDecodeError("Expecting value", "", 0), True),
        (KeyError("params"), True),
    ],
)
def test_what_is_damage(error, is_damage, tmp_path):
    (tmp_path / "file").write_text("content")
    assert (not_damage(error, tmp_path) is None) == is_damage


@pytest.mark.parametrize("read", ["run", "model"])
def test_a_renamed_checkpoint_is_not_another_step(read, copied):
    (copied / "2").rename(copied / "20")
    like = abstract_state(CONFIG, train.loop.mesh_of(CONFIG))
    message = r"20 is the checkpoint of step 2 under another name; rename it to 2"
    with pytest.raises(RunError, match=message):
        if read == "model":
            read_params(copied, 20, like.params)
        with Checkpoints(copied, keep=2) as checkpoints:
            checkpoints.restore(like)
    assert names_in(copied) == ["1", "20"]


@CANCELLED
@pytest.mark.usefixtures("collected")
def test_where_nothing_can_be_read_nothing_is_renamed(copied, tmp_path):
    shutil.rmtree(copied / "1" / "state" / "d")
    (copied / "2" / "metrics" / "metrics").write_text("")
    with (
        Checkpoints(copied, keep=2) as checkpoints,
        pytest.raises(
            RunError, match=r"no checkpoint .* can be read; the error of step 2: .*delete"
        ),
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
    with MetricsWriter(tmp_path / "tiny") as writer:
        writer.write_config({"config": plain, "data": {}})
        check_config(tmp_path / "tiny", CONFIG, {})  # it did not come to its first row
        writer.write({"step": 1})
    with pytest.raises(RunError, match="tiny is a run without checkpoints; choose another --name"):
        run(dataclasses.replace(CONFIG, runs_dir=tmp_path))


@pytest.mark.parametrize("at", ["compilation", "step 2"])
def test_settings_bind_with_the_first_checkpoint(at, tmp_path, at_step, whole, monkeypatch):
    """A run that failed before it takes no part of its name with it."""
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
    assert message.startswith("a checkpoint was not saved; the last good one is step 5: ")
    assert "too large" in message and "\n" not in message
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
