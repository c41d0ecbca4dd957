"""The newest and best checkpoints stay; damaged and unreadable ones are found."""

import dataclasses
import errno
import fcntl
import json
import shutil
import warnings
from pathlib import Path

import chex
import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import train.checkpoints.checkpoint
import train.loop
from models.sharding import make_mesh
from support.checkpoint_runs import CANCELLED, CONFIG, like, restore
from train.checkpoints.checkpoint import (
    Checkpoints,
    checksum,
    read_params,
)
from train.checkpoints.files import not_damage, saved_steps
from train.errors import RunError
from train.step import init_state

pytestmark = pytest.mark.usefixtures("one_device", "programs_once", "no_plots")


def names_in(folder):
    return sorted(path.name for path in folder.iterdir())


def at(step, state):
    """A state as it is after a step."""
    return dataclasses.replace(state, step=jnp.full_like(state.step, step))


# Old checkpoints are removed


def test_the_newest_and_the_best_are_kept(tmp_path):
    state = init_state(CONFIG, train.loop.mesh_of(CONFIG))
    with Checkpoints(tmp_path, keep=2) as checkpoints:
        losses = {1: 3.0, 2: 1.0, 3: None, 4: 2.0, 5: float("nan")}
        for step, val_loss in losses.items():
            checkpoints.save(step, state, val_loss=val_loss)
    assert names_in(tmp_path) == ["2", "4", "5"]
    # The next process knows the losses, and does not count damaged checkpoints.
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
    files = [path.relative_to(folder) for path in (folder / "2").rglob("*") if path.is_file()]
    # The largest file may hold metadata. The speed of writing decides how many files hold the
    # arrays.
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
            step, state = restore(checkpoints, like())
            chex.assert_trees_all_equal(state, {1: first, 2: second}[step])
            if step == 1:
                fell_back.append(file)
                kept = sorted((path, path.read_bytes()) for path in files_in(copy / "2.damaged"))
                assert [content for _, content in kept] == [content for _, content in damaged]
                # Orbax does not await some coroutines after an error. Each is a RuntimeWarning when
                # it is collected.
                said = [str(w.message) for w in warned if w.category is UserWarning]
                assert "2 is damaged and was renamed to 2.damaged; going on from step 1" in said[0]
                checkpoints.save(2, second, val_loss=None)
                checkpoints.wait()
                chex.assert_trees_all_equal(checkpoints.restore(like()), (2, second))
    assert big in fell_back
    assert (Path("2/metrics/metrics") in fell_back) == (damage is not Path.unlink)


def files_in(folder):
    return [path for path in folder.rglob("*") if path.is_file()]


def test_a_wrong_value_is_found_where_the_files_are_right(two_checkpoints, tmp_path, monkeypatch):
    """Memory may be overwritten between the device and the disk."""
    _, first, second = two_checkpoints
    with Checkpoints(tmp_path, keep=2) as checkpoints:
        checkpoints.save(1, first, val_loss=None)
        real = train.checkpoints.checkpoint._checksums
        monkeypatch.setattr(
            "train.checkpoints.checkpoint._checksums", lambda _: real(by_name(first))
        )
        checkpoints.save(2, second, val_loss=None)
        checkpoints.wait()
        monkeypatch.setattr("train.checkpoints.checkpoint._checksums", real)
        with pytest.warns(match=r"damaged .* checksum is wrong in \d+ arrays, first in params"):
            step, _ = restore(checkpoints, like())
    assert step == 1


def by_name(state):
    return train.checkpoints.checkpoint._by_name(state)


def test_a_name_that_is_taken_is_not_overwritten(copied):
    for name in ("2.damaged", "2.damaged-2"):
        (copied / name).mkdir()
    (copied / "2" / "metrics" / "metrics").write_bytes(b"\xff" * 31)
    with Checkpoints(copied, keep=2) as checkpoints:
        with pytest.warns(match=r"2 is damaged and was renamed to 2\.damaged-3; .*metrics is mal"):
            step, _ = restore(checkpoints, like())
    assert step == 1
    assert names_in(copied) == ["1", "2.damaged", "2.damaged-2", "2.damaged-3"]


@pytest.mark.parametrize("content", ["[]", "{}", '{"val_loss": "low"}', '{"val_loss": NaN}', "{"])
def test_a_reader_is_told_about_malformed_metrics(content, copied):
    (copied / "1" / "metrics" / "metrics").write_text(content)
    with pytest.warns(match=r"step 1 counts as not measured: .*metrics is malformed"):
        assert saved_steps(copied) == {1: None, 2: 1.0}


@CANCELLED
@pytest.mark.usefixtures("collected")
@pytest.mark.parametrize("kind", ["arrays", "checksums", "metrics"])
def test_an_error_of_the_disk_is_told_and_changes_nothing(kind, copied):
    """A read of /proc/self/mem gives EIO, also for root."""
    of_arrays = [path for path in files_in(copied / "2" / "state" / "d")]
    names = {"checksums": "checksums/metadata", "metrics": "metrics/metrics"}
    file = of_arrays[0] if kind == "arrays" else copied / "2" / names[kind]
    content = file.read_bytes()
    file.unlink()
    file.symlink_to("/proc/self/mem")
    for _ in range(2):  # the lock is not kept
        with pytest.raises(RunError, match=r"cannot be read.*othing was changed") as caught:
            with Checkpoints(copied, keep=2) as checkpoints:
                checkpoints.restore(like())
        assert "Input/output error" in str(caught.value) and "\n" not in str(caught.value)
        assert str(file) in str(caught.value) or kind == "checksums"
        assert names_in(copied) == ["1", "2"]
    file.unlink()
    file.write_bytes(content)
    with Checkpoints(copied, keep=2) as checkpoints:
        assert restore(checkpoints, like())[0] == 2


def test_a_folder_of_checkpoints_that_cannot_be_made_is_named(tmp_path, monkeypatch):
    (tmp_path / "file").write_bytes(b"")
    for folder in (tmp_path / "file", tmp_path / "file" / "checkpoints"):
        with pytest.raises(RunError, match=r"a file is in its place; .* choose another --name"):
            Checkpoints(folder, keep=2)

    def refuse(*args, **options):
        raise OSError(errno.EROFS, "Read-only file system")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "mkdir", refuse)
        with pytest.raises(RunError, match=r"Read-only file system; .* another --runs-dir"):
            Checkpoints(tmp_path / "checkpoints", keep=2)
    (tmp_path / "checkpoints.lock").mkdir()
    with pytest.raises(RunError, match=r"checkpoints\.lock cannot be made: .* another --runs-dir"):
        Checkpoints(tmp_path / "checkpoints", keep=2)
    monkeypatch.setattr(fcntl, "flock", refuse)
    with pytest.raises(RunError, match=r"cannot be locked: Read-only .*; choose a --runs-dir"):
        Checkpoints(tmp_path / "other", keep=2)


def test_a_damaged_checkpoint_that_cannot_be_renamed_is_named(copied, monkeypatch):
    def refuse(*args, **options):
        raise PermissionError(errno.EACCES, "Permission denied")

    with Checkpoints(copied, keep=2) as checkpoints:
        monkeypatch.setattr(Path, "rename", refuse)
        with pytest.raises(RunError, match=r"cannot be renamed: Permission denied; move it away"):
            checkpoints._set_aside({2: ValueError("short")}, 1)


def test_no_permission_is_told_and_changes_nothing(copied, monkeypatch):
    def refuse(*args, **options):
        raise PermissionError(errno.EACCES, "Permission denied", "manifest.ocdbt")

    monkeypatch.setattr(ocp.CheckpointManager, "restore", refuse)
    with Checkpoints(copied, keep=2) as checkpoints:
        with pytest.raises(RunError, match=r"2 cannot be read.*Permission denied: 'manifest"):
            checkpoints.restore(like())
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
def test_which_errors_are_damage(error, is_damage, tmp_path):
    (tmp_path / "file").write_text("content")
    assert (not_damage(error, tmp_path) is None) == is_damage


@pytest.mark.parametrize("read", ["run", "model"])
def test_a_renamed_checkpoint_is_not_another_step(read, copied):
    (copied / "2").rename(copied / "20")
    message = r"20 is the checkpoint of step 2 under another name; rename it to 2"
    with pytest.raises(RunError, match=message):
        if read == "model":
            read_params(copied, 20, like().params)
        with Checkpoints(copied, keep=2) as checkpoints:
            checkpoints.restore(like())
    assert names_in(copied) == ["1", "20"]


@CANCELLED
@pytest.mark.usefixtures("collected")
def test_where_nothing_can_be_read_nothing_is_renamed(copied):
    shutil.rmtree(copied / "1" / "state" / "d")
    (copied / "2" / "metrics" / "metrics").write_text("")
    with (
        Checkpoints(copied, keep=2) as checkpoints,
        pytest.raises(
            RunError, match=r"no checkpoint .* can be read; the error of step 2: .*delete"
        ),
    ):
        checkpoints.restore(like())
    assert names_in(copied) == ["1", "2"]


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
