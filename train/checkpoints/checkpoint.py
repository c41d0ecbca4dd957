"""Checkpoints of a run: written by Orbax while training goes on, checked when they are read.

A checkpoint is a folder named by its step. Orbax copies the arrays to the host, writes them from
there under another name, and renames the folder when all is written: one killed while it saves
leaves no half checkpoint. The disk may still change the files later. So each array is stored with a
checksum of its values, taken on the devices before the copy and compared after reading. Values have
no layout: a checkpoint can be read on another mesh.

A checkpoint with a wrong checksum or a malformed file is damaged: it is renamed, and the one before
is used. Other errors, of the disk, the network, permissions or memory, may pass, so they end the
run and change nothing.
"""

import contextlib
import itertools
import json
import math
import os
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import absl.logging
import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp
from flax import nnx
from jaxtyping import Array, Shaped, UInt32
from orbax.checkpoint import checkpoint_managers

from train.checkpoints.files import (
    check_step,
    locked,
    not_damage,
    one_line,
    steps_in,
    stored_val_loss,
)
from train.config import TrainConfig
from train.distributed import all_say, is_first
from train.errors import RunError
from train.reporting.metrics import jsonable
from train.step import TrainState

# What a run may be gone on with: it changes what is shown or kept, or where it runs, but not what
# is trained. Another mesh or policy changes the rounding of the steps that follow.
MAY_CHANGE = (
    "name",
    "runs_dir",
    "mesh",
    "checkpoint",
    "distributed",
    "model.remat",
    "model.mlp_chunk_size",
    "data.cache_dir",
    "max_skipped_steps",
    "log_every",
    "sample_prompt",
    "sample_tokens",
    "save",
    "tensorboard",
    "wandb",
    "profile_steps",
    "dump_hlo",
    "xla_options",
)


def check_config(run_dir: Path, config: TrainConfig, data: Mapping[str, Any]) -> None:
    """Whether `config` and `data` may go on with the run in `run_dir`; an empty folder may.

    A run binds its settings with its first checkpoint: without one there is nothing to go on with,
    and the next run of that name starts anew with its own.

    Args:
      run_dir: of the run; need not exist.
      config: of the run to be started.
      data: what identifies its corpus.

    Raises:
      RunError: a run there has rows and was not to have checkpoints, or it has checkpoints and no
        config.json that can be read, or differs in more than `MAY_CHANGE`.
    """
    path = run_dir / "config.json"
    has_checkpoints = bool(steps_in(run_dir / "checkpoints"))
    if not path.exists():
        if has_checkpoints:
            raise RunError(
                f"{run_dir} has checkpoints but no config.json; put it back, or choose another "
                "--name"
            )
        return
    try:
        content = json.loads(path.read_text())
        every, corpus = content["config"]["checkpoint"]["every"], content["data"]
    except (ValueError, KeyError, TypeError) as error:
        raise RunError(
            f"{path} is not the configuration of a run ({one_line(error)}); put it back, or "
            "choose another --name"
        ) from error
    rows = run_dir / "metrics.jsonl"
    if not every and rows.exists() and rows.stat().st_size:
        raise RunError(f"{run_dir} is a run without checkpoints; choose another --name")
    if not has_checkpoints:
        return
    old = _flat(content["config"] | {"corpus": corpus})
    new = _flat(jsonable(config) | {"corpus": jsonable(data)})
    differences = [
        f"{name} {old.get(name)!r}, now {new.get(name)!r}"
        for name in sorted(old | new)
        if old.get(name) != new.get(name)
        and not any(f"{name}.".startswith(f"{exempt}.") for exempt in MAY_CHANGE)
    ]
    if differences:
        raise RunError(
            f"{run_dir} was started with {'; '.join(differences)}. Go on with the old values, "
            f"choose another --name, or, to go on with the new ones, write them into {path}"
        )


def _flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat = {}
    for name, value in tree.items():
        flat |= (
            _flat(value, f"{prefix}{name}.") if isinstance(value, dict) else {prefix + name: value}
        )
    return flat


class Checkpoints:
    """The checkpoints in a folder; a context manager, which waits for the save under way.

    Of several processes each saves and reads what is on its devices, in a folder that all share:
    they make the same calls in the same order.

    Raises:
      RunError: another process has the folder open, or it cannot be made or read.
    """

    def __init__(self, folder: Path, *, keep: int):
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except (FileExistsError, NotADirectoryError) as error:
            raise RunError(f"{folder} cannot be made: a file is in its place") from error
        except OSError as error:
            raise RunError(f"{folder} cannot be made: {error.strerror}") from error
        self._folder = folder.absolute()
        self._lock = locked(folder) if is_first() else None
        try:
            self._manager, self._malformed = self._opened(keep)
        except BaseException:
            self._unlock()
            raise
        self._failed = False

    def _opened(self, keep: int) -> tuple[ocp.CheckpointManager, dict[int, Exception]]:
        """Orbax's manager, and what is wrong with metrics that it could not read."""
        # Orbax logs the traceback of a save that failed, besides raising it.
        absl.logging.set_verbosity(absl.logging.FATAL)
        loss_of = lambda metrics: (metrics or {}).get("val_loss", math.inf)
        policies = [
            checkpoint_managers.LatestN(keep),
            checkpoint_managers.BestN(
                get_metric_fn=loss_of, reverse=True, n=1, keep_checkpoints_without_metrics=False
            ),
        ]
        manager = ocp.CheckpointManager(
            self._folder,
            options=ocp.CheckpointManagerOptions(
                cleanup_tmp_directories=True,  # left by a run that was killed while it saved
                best_fn=loss_of,  # without it metrics are not written; the policy decides
                preservation_policy=checkpoint_managers.AnyPreservationPolicy(policies),
                lightweight_initialize=True,  # one malformed file of metrics would end it
            ),
        )
        malformed: dict[int, Exception] = {}
        for step in manager.all_steps():
            try:
                stored_val_loss(self._folder / str(step))
            except ValueError as error:
                malformed[step] = error
        if not malformed:
            manager.reload()  # with the metrics
        return manager, malformed

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, *exception: object) -> None:
        try:
            if not self._failed:
                self.wait()
                self._manager.close()
        finally:
            self._unlock()

    def _unlock(self) -> None:
        if self._lock is not None:
            os.close(self._lock)

    def restore(self, like: TrainState) -> tuple[int, TrainState] | None:
        """The newest checkpoint that is whole, and its step; None where there is none at all.

        A damaged one is renamed, `10` to `10.damaged`, with a warning.

        Args:
          like: shapes, dtypes and shardings to read it with.

        Raises:
          RunError: there are checkpoints and all are damaged, a file cannot be read, or the folder
            of a checkpoint has the name of another step.
        """
        steps = self._manager.all_steps()
        another = RunError("another process cannot read its part")
        damaged: dict[int, Exception] = {
            step: self._malformed.get(step, another)
            for step in steps
            if not all_say(step not in self._malformed)
        }
        for step in sorted(set(steps) - set(damaged), reverse=True):
            state, error = self._read(step, like)
            if error is None:
                self._set_aside(damaged, step)
                return step, state
            damaged[step] = error
        if damaged:
            step = max(damaged)
            raise RunError(
                f"no checkpoint in {self._folder} can be read; of step {step}: "
                f"{one_line(damaged[step])}. To start anew, delete that folder"
            )
        return None

    def _set_aside(self, damaged: Mapping[int, Exception], step: int) -> None:
        """Renames the checkpoints that are damaged; the run goes on from `step`."""
        for bad, error in damaged.items() if is_first() else ():
            folder = self._folder / str(bad)
            numbers = ("" if number == 1 else f"-{number}" for number in itertools.count(1))
            names = (folder.with_name(f"{bad}.damaged{number}") for number in numbers)
            name = next(name for name in names if not name.exists())
            try:
                folder.rename(name)
            except OSError as failure:
                raise RunError(
                    f"{folder} is damaged ({one_line(error)}) and cannot be renamed: "
                    f"{failure.strerror}"
                ) from error
            warnings.warn(
                f"{folder} is damaged and was renamed to {name.name}; going on from step {step} "
                f"({one_line(error)})",
                stacklevel=3,
            )
        if damaged:
            all_say(True)  # none lists the folder before it is renamed
            self._manager.reload()
            self._malformed.clear()

    def _read(self, step: int, like: TrainState) -> tuple[Any, Exception | None]:
        """The state, or what is damaged: for all processes, if something is for one.

        Raises:
          RunError: something cannot be read, or is of another step.
        """
        read: Any = None
        error: Exception | None = None
        folder = self._folder / str(step)
        try:
            read = self._manager.restore(
                step,
                args=ocp.args.Composite(
                    state=ocp.args.StandardRestore(_by_name(like)), checksums=ocp.args.JsonRestore()
                ),
            )
        except Exception as found:  # damage comes as errors of many kinds
            error = found
        # The checksums are of all processes' parts, so none may be missing.
        if not all_say(error is None):
            reason = None if error is None else not_damage(error, folder)
            if not all_say(reason is None):
                raise RunError(
                    f"{folder} cannot be read, which may pass: "
                    f"{reason or 'an error of another process'}. Nothing was changed; try again, "
                    "or move that folder away to go on from the one before"
                ) from error
            return None, error or RunError("another process cannot read its part")
        try:
            _compare(read["state"], read["checksums"])
            names = list(_by_name(like))
            leaves = [read["state"][name] for name in names]
        except (ValueError, KeyError, TypeError) as found:
            return None, found
        check_step(folder, read["state"])
        return jax.tree.unflatten(jax.tree.structure(like), leaves), None

    def save(self, step: int, state: TrainState, *, val_loss: float | None) -> None:
        """Starts to save a state; returns when its memory may be overwritten.

        Args:
          step: of the state.
          state: what to save.
          val_loss: the held-out loss at this step, where it was measured.

        Raises:
          RunError: this save or the one before failed.
        """
        arrays = _by_name(state)
        checksums = {name: int(a) for name, a in jax.device_get(_checksums(arrays)).items()}
        measured = val_loss is not None and math.isfinite(val_loss)
        with self._saving():
            self._manager.save(
                step,
                args=ocp.args.Composite(
                    state=ocp.args.StandardSave(arrays), checksums=ocp.args.JsonSave(checksums)
                ),
                metrics={"val_loss": val_loss} if measured else None,
                force=True,
            )

    def check(self) -> None:
        """Raises RunError if the save in the background has failed; does not wait for it."""
        if not self._manager.is_saving_in_progress():
            self.wait()

    def wait(self) -> None:
        """Waits for the save in the background. Raises RunError if it failed."""
        with self._saving():
            self._manager.wait_until_finished()

    @contextlib.contextmanager
    def _saving(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            self._failed = True
            good = max(steps_in(self._folder), default=None)
            left = (
                "there is no earlier one" if good is None else f"the last good one is step {good}"
            )
            raise RunError(f"a checkpoint was not saved, {left}: {one_line(error)}") from error


def saved_steps(folder: Path) -> dict[int, float | None]:
    """The checkpoints in a folder by step, with the held-out losses of those that have one.

    One with a malformed file of metrics counts as not measured, with a warning.
    """
    losses: dict[int, float | None] = {}
    for step in steps_in(folder):
        losses[step] = None
        try:
            losses[step] = stored_val_loss(folder / str(step))
        except ValueError as error:
            warnings.warn(f"step {step} counts as not measured: {error}", stacklevel=2)
    return losses


def read_params(folder: Path, step: int, like: nnx.State) -> nnx.State:
    """The parameters of a checkpoint, and nothing else of it; a run may be writing others.

    Args:
      folder: of the checkpoints.
      step: which.
      like: shapes, dtypes and shardings to read it with.

    Raises:
      RunError: it is damaged, cannot be read, is of another step, or has other parameters.
    """
    names = [f"params.{name}" for name in _by_name(like)]
    arrays = dict(zip(names, jax.tree.leaves(like), strict=True))
    arrays["step"] = jax.ShapeDtypeStruct((), jnp.int32)
    try:
        with _reader(folder) as manager:
            state = ocp.args.PyTreeRestore(
                arrays,
                restore_args=ocp.checkpoint_utils.construct_restore_args(arrays),
                partial_restore=True,
            )
            read = manager.restore(
                step, args=ocp.args.Composite(state=state, checksums=ocp.args.JsonRestore())
            )
        _compare(read["state"], read["checksums"])
    except Exception as error:  # damage comes as errors of many kinds
        raise RunError(f"{folder / str(step)} cannot be read: {one_line(error)}") from error
    check_step(folder / str(step), read["state"])
    return jax.tree.unflatten(jax.tree.structure(like), [read["state"][name] for name in names])


@contextlib.contextmanager
def _reader(folder: Path) -> Iterator[ocp.CheckpointManager]:
    # Orbax warns that a folder to be read is read only, and of what is not read.
    absl.logging.set_verbosity(absl.logging.FATAL)
    options = ocp.CheckpointManagerOptions(read_only=True, lightweight_initialize=True)
    with contextlib.closing(ocp.CheckpointManager(folder.absolute(), options=options)) as manager:
        yield manager


def _compare(arrays: dict[str, Any], checksums: Mapping[str, int]) -> None:
    got = jax.device_get(_checksums(arrays))
    wrong = [name for name, value in got.items() if checksums[name] != value]
    if wrong:
        raise ValueError(f"{len(wrong)} arrays differ from their checksums, first {wrong[0]}")


def _by_name(tree: Any) -> dict[str, Any]:
    """Leaves by path, so that a checkpoint does not depend on the classes that hold them."""
    leaves = jax.tree.leaves_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in leaves}


@jax.jit
def _checksums(arrays: dict[str, Shaped[Array, "..."]]) -> dict[str, UInt32[Array, ""]]:
    return {name: checksum(array) for name, array in arrays.items()}


def checksum(array: Shaped[Array, "..."]) -> UInt32[Array, ""]:
    """Sum of the bits of each value times an odd number that depends on its index, modulo 2**32.

    Integers can be summed in any order, so the sum is the same on every mesh. Multiplying by an odd
    number loses no bit, hence a single wrong value always shows, and several do with a probability
    of 1 - 2**-32, also if they are exchanged.
    """
    bits = jax.lax.bitcast_convert_type(array, jnp.dtype(f"uint{8 * array.dtype.itemsize}"))
    index = jnp.zeros(array.shape, jnp.uint32)
    for axis, size in enumerate(array.shape):
        index = index * jnp.uint32(size) + jax.lax.broadcasted_iota(jnp.uint32, array.shape, axis)
    # The finalizer of MurmurHash3 (public domain), which spreads each bit of the index over all.
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        index = (index ^ (index >> jnp.uint32(shift))) * jnp.uint32(factor)
    index = index ^ (index >> jnp.uint32(16))
    return jnp.sum(bits.astype(jnp.uint32) * (index | jnp.uint32(1)), dtype=jnp.uint32)
