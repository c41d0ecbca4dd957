"""Checkpoints of a run: Orbax writes them while training goes on, and every read checks them.

A checkpoint is a folder named by its step. Orbax copies the arrays to the host, writes them to a
folder with another name, and renames that folder at the end. So a process that is killed during a
save leaves no half checkpoint. The disk may still change the files later. So each array has a
checksum of its values, which is computed on the devices before the copy and compared after reading.
The checksum does not depend on the layout, so a checkpoint can be read on another mesh.

A checkpoint with a wrong checksum or a malformed file is damaged: it is renamed, and the run
continues from the one before. Other errors, of the disk, the network, permissions or memory, may be
gone on the next try, so they end the run and change nothing.
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
from flax.traverse_util import flatten_dict
from jaxtyping import Array, Shaped, UInt32
from orbax.checkpoint import checkpoint_managers

from train.checkpoints.files import (
    check_step,
    locked,
    not_damage,
    steps_in,
    stored_val_loss,
)
from train.config import TrainConfig
from train.distributed import all_say, is_first
from train.errors import RunError, one_line
from train.formats import number_of
from train.reporting.metrics import jsonable
from train.step import TrainState

# The settings that may differ when a run resumes. They change the output or the place of the run,
# but not the training. Another mesh or policy changes the rounding of the steps that follow.
MAY_CHANGE = (
    "name",
    "runs_dir",
    "mesh",
    "checkpoint",
    "distributed",
    "model.remat",
    "model.mlp_chunk_size",
    "model.bos_token_id",
    "model.eos_token_id",
    "data.cache_dir",
    "max_skipped_steps",
    "log_every",
    "sample_prompt",
    "sample_tokens",
    "save",
    "tensorboard",
    "wandb",
    "pgle",
    "profile_steps",
    "dump_hlo",
    "xla_options",
)
# Settings that name files, and the hash of what they held when the run started. With the same hash
# such a setting may differ: the files have moved, or their path is spelt in another way.
_BY_CONTENT = {
    "data.path": "corpus.path",
    "data.held_out_path": "corpus.held_out_path",
    "data.tokenizer": "corpus.tokenizer",
}

# Hashes of text, which are too long to show.
_TEXTS = {
    "corpus.path": "other text in data.path",
    "corpus.held_out_path": "other text in data.held_out_path",
}


def check_config(run_dir: Path, config: TrainConfig, data: Mapping[str, Any]) -> None:
    """Checks that a run with `config` and `data` may start or resume in `run_dir`.

    The first checkpoint fixes the settings of a run. Without a checkpoint there is nothing to
    resume, and the next run of that name starts anew with its own settings. A line tells of moved
    files.

    Args:
      run_dir: Folder of the run; it need not exist.
      config: Configuration of the run to start.
      data: JSON that identifies its corpus, and its teacher if it has one.

    Raises:
      RunError: The folder has checkpoints but no config.json, or a config.json of no run. Or it has
        a run without checkpoints, or a run whose settings differ in more than `MAY_CHANGE`.
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
    old = flatten_dict(content["config"] | {"corpus": corpus}, sep=".")
    new = flatten_dict(jsonable(config) | {"corpus": jsonable(data)}, sep=".")
    differences = {
        name: _TEXTS.get(name) or f"{name} {old.get(name)!r}, now {new.get(name)!r}"
        for name in sorted(old | new)
        if old.get(name) != new.get(name)
        and not any(f"{name}.".startswith(f"{exempt}.") for exempt in MAY_CHANGE)
    }
    moved = [
        differences.pop(name)
        for name, content in _BY_CONTENT.items()
        if name in differences and old.get(content) == new.get(content) is not None
    ]
    if differences:
        remedy = "Go on with the old values, or choose another --name"
        if not differences.keys() & _TEXTS.keys():
            where = ""
            if any(name.startswith("corpus.") for name in differences):
                where = " (corpus is its field 'data')"
            remedy += f"; to go on with the new values, write them into {path}{where}"
        raise RunError(f"{run_dir} was started with {'; '.join(differences.values())}. {remedy}")
    if moved and is_first():
        print(f"{run_dir}: {'; '.join(moved)}, with the same content, so the run goes on")


class Checkpoints:
    """The checkpoints in a folder; a context manager that waits for a running save at its end.

    If there are several processes, each saves and reads the arrays of its devices, in a folder that
    all share. All must make the same calls in the same order.

    Raises:
      RunError: Another process has the folder open, or the folder cannot be made or read.
    """

    def __init__(self, folder: Path, *, keep: int):
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except (FileExistsError, NotADirectoryError) as error:
            raise RunError(
                f"{folder} cannot be made: a file is in its place; move it away, or choose another "
                "--name"
            ) from error
        except OSError as error:
            raise RunError(
                f"{folder} cannot be made: {error.strerror}; repair this, or choose another "
                "--runs-dir"
            ) from error
        self._folder = folder.absolute()
        self._lock = locked(folder) if is_first() else None
        try:
            self._manager, self._malformed = self._opened(keep)
        except BaseException:
            self._unlock()
            raise
        self._failed = False

    def _opened(self, keep: int) -> tuple[ocp.CheckpointManager, dict[int, Exception]]:
        """Orbax's manager, and the errors of files of metrics that are malformed, by step."""
        # Orbax logs the traceback of a failed save and raises the error as well.
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
                cleanup_tmp_directories=True,  # from a run that was killed during a save
                best_fn=loss_of,  # makes Orbax write metrics; the policy decides what to keep
                preservation_policy=checkpoint_managers.AnyPreservationPolicy(policies),
                lightweight_initialize=True,  # reads no metrics: a malformed file would raise
            ),
        )
        malformed: dict[int, Exception] = {}
        for step in manager.all_steps():
            try:
                stored_val_loss(self._folder / str(step))
            except ValueError as error:
                malformed[step] = error
        if not malformed:
            manager.reload()  # reads the metrics
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
        """The step and the state of the newest undamaged checkpoint; None if there are none at all.

        Damaged checkpoints are renamed, `10` to `10.damaged`, with a warning.

        Args:
          like: Shapes, dtypes and shardings of the state.

        Raises:
          RunError: All checkpoints are damaged, a file cannot be read, or the folder of a
            checkpoint has the name of another step.
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
                f"no checkpoint in {self._folder} can be read; the error of step {step}: "
                f"{one_line(damaged[step])}. To start anew, delete that folder"
            )
        return None

    def _set_aside(self, damaged: Mapping[int, Exception], step: int) -> None:
        """Renames damaged checkpoints; the run goes on from `step`."""
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
                    f"{failure.strerror}; move it away"
                ) from error
            warnings.warn(
                f"{folder} is damaged and was renamed to {name.name}; going on from step {step} "
                f"({one_line(error)})",
                stacklevel=3,
            )
        if damaged:
            all_say(True)  # the other processes wait for the renaming before they list the folder
            self._manager.reload()
            self._malformed.clear()

    def _read(self, step: int, like: TrainState) -> tuple[Any, Exception | None]:
        """The state, or the error if the checkpoint is damaged.

        If one process has an error, all processes get one.

        Raises:
          RunError: A file cannot be read, or the checkpoint is of another step.
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
        except Exception as found:  # damage causes errors of many kinds
            error = found
        # The checksums cover the parts of all processes, so no part may be missing.
        if not all_say(error is None):
            reason = None if error is None else not_damage(error, folder)
            if not all_say(reason is None):
                raise RunError(
                    f"{folder} cannot be read at the moment: "
                    f"{reason or 'an error of another process'}. Nothing was changed; try again, "
                    "or move that folder away to go on from the checkpoint before"
                ) from error
            return None, error or RunError("another process cannot read its part")
        try:
            _compare(read["state"], read["checksums"])
            leaves = [read["state"][name] for name in _by_name(like)]
        except (ValueError, KeyError, TypeError) as found:
            return None, found
        check_step(folder, read["state"])
        return jax.tree.unflatten(jax.tree.structure(like), leaves), None

    def save(self, step: int, state: TrainState, *, val_loss: float | None) -> None:
        """Starts to save a state, and returns when its memory may be overwritten.

        Args:
          step: Step of the state.
          state: State to save.
          val_loss: Held-out loss at this step; None if it was not measured.

        Raises:
          RunError: This save or the one before failed.
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
        """Raises RunError if the save in the background has failed. It does not wait."""
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
            raise RunError(
                f"a checkpoint was not saved; {left}: {one_line(error)}. Repair this, and start "
                "the same command again"
            ) from error


def read_params(folder: Path, step: int, like: nnx.State) -> nnx.State:
    """Reads only the parameters of a checkpoint. A run may write other checkpoints meanwhile.

    Args:
      folder: Folder of the checkpoints.
      step: Step of the checkpoint.
      like: Shapes, dtypes and shardings of the parameters.

    Raises:
      RunError: The checkpoint is damaged, cannot be read, is of another step, or has other
        parameters.
    """
    params = {f"params.{name}": leaf for name, leaf in _by_name(like).items()}
    arrays = params | {"step": jax.ShapeDtypeStruct((), jnp.int32)}
    try:
        # Orbax warns that the folder is open for reading only, and about parts that are not read.
        absl.logging.set_verbosity(absl.logging.FATAL)
        options = ocp.CheckpointManagerOptions(read_only=True, lightweight_initialize=True)
        with ocp.CheckpointManager(folder.absolute(), options=options) as manager:
            state = ocp.args.PyTreeRestore(
                arrays,
                restore_args=ocp.checkpoint_utils.construct_restore_args(arrays),
                partial_restore=True,
            )
            read = manager.restore(
                step, args=ocp.args.Composite(state=state, checksums=ocp.args.JsonRestore())
            )
        _compare(read["state"], read["checksums"])
    except Exception as error:  # damage causes errors of many kinds
        raise RunError(
            f"{folder / str(step)} cannot be read: {one_line(error)}; choose another step of "
            f"{folder.parent} with --step"
        ) from error
    check_step(folder / str(step), read["state"])
    return jax.tree.unflatten(jax.tree.structure(like), [read["state"][name] for name in params])


def _compare(arrays: dict[str, Any], checksums: Mapping[str, int]) -> None:
    got = jax.device_get(_checksums(arrays))
    wrong = [name for name, value in got.items() if checksums[name] != value]
    if wrong:
        number = number_of(len(wrong), "array")
        raise ValueError(f"the checksum is wrong in {number}, first in {wrong[0]}")


def _by_name(tree: Any) -> dict[str, Any]:
    """The leaves by path, so that a checkpoint does not depend on the classes of the tree."""
    leaves = jax.tree.leaves_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in leaves}


@jax.jit
def _checksums(arrays: dict[str, Shaped[Array, "..."]]) -> dict[str, UInt32[Array, ""]]:
    return {name: checksum(array) for name, array in arrays.items()}


def checksum(array: Shaped[Array, "..."]) -> UInt32[Array, ""]:
    """`sum(bits[i] * odd[i]) mod 2**32`, where `odd[i]` is an odd number that depends on index i.

    Integers can be added in any order, so the sum is the same on every mesh. The product with an
    odd number loses no bit. So a single wrong value always changes the sum, and several wrong or
    exchanged values do with a probability of 1 - 2**-32. Dtypes of 64 bits are not for it: only the
    lower half of their bits would count.
    """
    bits = jax.lax.bitcast_convert_type(array, jnp.dtype(f"uint{8 * array.dtype.itemsize}"))
    index = jnp.zeros(array.shape, jnp.uint32)
    for axis, size in enumerate(array.shape):
        index = index * jnp.uint32(size) + jax.lax.broadcasted_iota(jnp.uint32, array.shape, axis)
    # The finalizer of MurmurHash3 (public domain) lets each bit of the index change all bits.
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        index = (index ^ (index >> jnp.uint32(shift))) * jnp.uint32(factor)
    index = index ^ (index >> jnp.uint32(16))
    return jnp.sum(bits.astype(jnp.uint32) * (index | jnp.uint32(1)), dtype=jnp.uint32)
