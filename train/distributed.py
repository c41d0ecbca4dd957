"""Training over several processes: how they find each other, agree, and end together.

Every process runs the same program with the same settings. Some decisions must be the same
everywhere: process 0 makes them (`of_first`), or all processes vote (`all_say`, `StopVote`).

If one process ended alone, the others would wait for ever in a collective that it never joins. So
every second each process tells process 0 that it is alive, or why it ends, and process 0 tells the
others (`started`).

JAX has heartbeats of its own, which end in an abort with a page of stack traces. They get twice the
time, so they only catch failures that this module misses. Process 0 holds the store for all
messages. When it dies, JAX itself notices at once, and JAX's page comes first.
"""

import contextlib
import dataclasses
import faulthandler
import functools
import itertools
import json
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np
import tyro
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding
from jaxtyping import Array, Int

from train.config import DistributedConfig
from train.errors import RunError, one_line
from train.flag_errors import tyro_errors

_POLL_S = 1.0
_AGAIN = "The same commands go on from the last checkpoint, if there is one"
_PEERS = "train/process/"
_VERDICT = "train/verdict"


_SINGLE = DistributedConfig()


@dataclasses.dataclass(frozen=True)
class _Flags:
    distributed: DistributedConfig = _SINGLE


def flags(arguments: Sequence[str]) -> DistributedConfig:
    """Reads the `--distributed` flags of a command line; the defaults of others need a device.

    Raises:
      FlagError: A flag has a wrong value.
    """
    known = [text for text in arguments if text not in ("-h", "--help")]
    with tyro_errors(_Flags.__name__):
        return tyro.cli(_Flags, args=known, return_unknown_args=True)[0].distributed


@contextlib.contextmanager
def started(config: DistributedConfig) -> Iterator[None]:
    """Runs a block as one of several processes; does nothing if there is only one.

    Enter it before anything asks JAX for its devices. Only process 0 prints to standard output. At
    its end the block waits for the blocks of the other processes.

    An exception in the block ends this process at once, with status 1 or the status of the
    SystemExit. The other processes end within seconds, each with a line that says why. If a process
    dies, the others end in the same way within `heartbeat_timeout_s`.

    Raises:
      RunError: The cluster does not say which processes there are.
    """
    if config.num_processes == 1 and config.cluster is None:
        yield
        return
    _connect(config)
    peers = _Peers(_client(), jax.process_index(), config.heartbeat_timeout_s)
    peers.start()
    try:
        with contextlib.ExitStack() as stack:
            if jax.process_index():
                silence = stack.enter_context(open(os.devnull, "w"))
                stack.enter_context(contextlib.redirect_stdout(silence))
            yield
    except BaseException as error:
        peers.fail(error)
    peers.leave()
    jax.distributed.shutdown()


def _connect(config: DistributedConfig) -> None:
    # JAX's handler of SIGTERM would keep the process alive before the first step.
    jax.config.update("jax_enable_preemption_service", False)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    given: dict[str, Any] = {"cluster_detection_method": config.cluster}
    if config.cluster is None:
        given = {
            "coordinator_address": config.coordinator_address,
            "num_processes": config.num_processes,
            "process_id": config.process_id,
            "cluster_detection_method": "deactivate",
        }
    # JAX's own timeout aborts the process, so the timer comes first.
    timeout_s = config.initialization_timeout_s
    timer = threading.Timer(timeout_s, _nobody_came, (config,))
    timer.daemon = True
    timer.start()
    try:
        jax.distributed.initialize(
            **given,
            initialization_timeout=timeout_s + 10,
            heartbeat_timeout_seconds=2 * config.heartbeat_timeout_s + 10,
        )
    except (ValueError, KeyError) as error:  # a variable of the launcher is missing
        raise RunError(
            f"{config.cluster} does not say which processes there are ({one_line(error)}); start "
            "the processes with its launcher, or name them with "
            "--distributed.coordinator-address, --distributed.num-processes and "
            "--distributed.process-id"
        ) from error
    finally:
        timer.cancel()


def _nobody_came(config: DistributedConfig) -> NoReturn:
    where = config.coordinator_address or f"the address that {config.cluster} gives"
    sys.stderr.write(
        f"error: not all processes met at {where} within {config.initialization_timeout_s} s "
        "(--distributed.initialization-timeout-s); check that all processes were started with the "
        "same address, and that its port is free and can be reached\n"
    )
    sys.stderr.flush()
    os._exit(1)


def _client() -> Any:
    """The store of keys and values at process 0. JAX has no public name for it."""
    from jax._src import distributed

    return distributed.global_state.client


class _Peers(threading.Thread):
    """A thread that reports this process as alive, and ends it when another process is dead."""

    def __init__(self, client: Any, index: int, timeout_s: int):
        super().__init__(name="peers", daemon=True)
        self._client, self._index, self._timeout_s = client, index, timeout_s
        self._poll_s = min(_POLL_S, timeout_s / 4)
        self._left = threading.Event()
        self._ending = threading.Lock()
        self._heard: dict[str, tuple[str, float]] = {}
        self._beats = itertools.count()
        # Process 0 watches the processes that have reported, so this one reports before its block.
        self._tell(next(self._beats), "")

    def run(self) -> None:
        """Reports and listens until `leave`."""
        while not self._left.wait(self._poll_s):
            try:
                self._tell(next(self._beats), "")
                reason = self._judge_all() if self._index == 0 else self._hear_first()
            except jax.errors.JaxRuntimeError as error:
                reason = f"process 0 cannot be reached ({one_line(error)})"
            if reason and not self._left.is_set():
                self._end(f"error: {reason}. {_AGAIN}\n", 1, reason)

    def leave(self) -> None:
        """Ends the thread, at the end of the block."""
        self._left.set()
        self.join()
        self._tell("left", "")

    def fail(self, error: BaseException) -> NoReturn:
        """Ends this process because of an exception, and tells the others."""
        if _may_be_of_a_collective(error):
            # If another process is gone, a collective fails but does not say which process it was.
            # This thread finds out.
            self.join(self._timeout_s + 3 * self._poll_s)
        self._left.set()
        if not isinstance(error, SystemExit):
            text, code, why = "".join(traceback.format_exception(error)), 1, one_line(error)
        elif isinstance(error.code, str):
            text, code, why = f"{error.code}\n", 1, error.code.removeprefix("error: ")
        else:  # the program has printed the reason
            text, code, why = "", error.code or 0, f"exit status {error.code or 0}"
            why = one_line(error.__cause__) if error.__cause__ else why
        self._end(text, code, f"process {self._index} ended: {why}")

    def _end(self, text: str, code: int, reason: str) -> NoReturn:
        self._ending.acquire()  # never released: one reason is enough
        sys.stdout.flush()
        sys.stderr.write(text)
        sys.stderr.flush()
        with contextlib.suppress(jax.errors.JaxRuntimeError):
            self._tell("failed", reason)
            if self._index == 0:
                self._client.key_value_set(_VERDICT, json.dumps(["", reason]), allow_overwrite=True)
                time.sleep(3 * self._poll_s)  # the store ends with this process
        # JAX's shutdown would wait for minutes for the dead processes.
        os._exit(code)

    def _tell(self, beat: Any, reason: str) -> None:
        value = json.dumps([beat, reason])
        self._client.key_value_set(f"{_PEERS}{self._index}", value, allow_overwrite=True)

    def _judge_all(self) -> str | None:
        for key, value in self._client.key_value_dir_get(_PEERS):
            name = f"process {key.rpartition('/')[2]}"
            beat, reason = json.loads(value)
            if reason and key != f"{_PEERS}0":
                return reason
            if beat != "left" and self._is_silent(name, value):
                return self._silence_of(name)
        beat = json.dumps([next(self._beats), ""])
        self._client.key_value_set(_VERDICT, beat, allow_overwrite=True)
        return None

    def _hear_first(self) -> str | None:
        found = dict(self._client.key_value_dir_get(_VERDICT.rpartition("/")[0] + "/"))
        value = found.get(_VERDICT, "")
        reason = json.loads(value)[1] if value else ""
        if reason:
            return reason
        left = json.loads(found.get(f"{_PEERS}0", '["", ""]'))[0] == "left"
        if not left and self._is_silent("process 0", value):
            return self._silence_of("process 0")
        return None

    def _is_silent(self, name: str, value: str) -> bool:
        now = time.monotonic()
        last, since = self._heard.get(name, (None, now))
        if value != last:
            self._heard[name] = value, now
        return value == last and now - since > self._timeout_s

    def _silence_of(self, name: str) -> str:
        return (
            f"{name} gave no sign of life for {self._timeout_s} s: it was killed or stopped, or "
            "its machine cannot be reached"
        )


def _may_be_of_a_collective(error: BaseException | None) -> bool:
    """Whether a collective may have failed, in the step or inside Orbax."""
    while error is not None:
        if isinstance(error, jax.errors.JaxRuntimeError):
            return "RESOURCE_EXHAUSTED" not in str(error)
        error = error.__cause__ or error.__context__
    return False


class Watchdog:
    """Ends the process when a part of its work takes too long; a context manager.

    Standard error gets the stacks of all threads and a line that names the work. The time counts
    from the last call of `begin`.

    Args:
      step_timeout_s: Limit in seconds for a step or its batch; 0 sets no limit.
    """

    def __init__(self, step_timeout_s: float):
        self._limit_s = step_timeout_s
        self.begin_other("the first state")
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def begin(self, what: str, *, times: int = 1) -> None:
        """Names the work that starts now, which may take `times` the limit."""
        self._doing = what, self._limit_s * times, time.monotonic()

    def begin_other(self, what: str) -> None:
        """Names work that takes longer than a step and starts now; it gets ten times the limit."""
        self.begin(what, times=10)

    def __enter__(self) -> "Watchdog":
        if self._limit_s:
            self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._ended.set()
        if self._limit_s:
            self._thread.join()

    def _watch(self) -> None:
        poll_s = min(_POLL_S, self._limit_s / 10)
        before = time.monotonic()
        while not self._ended.wait(poll_s):
            now = time.monotonic()
            what, limit_s, since = self._doing
            if now - before > poll_s + self._limit_s / 2:
                self._doing = what, limit_s, now  # the process was stopped, not stuck
            elif now - since > limit_s:
                self._bark(what, limit_s)
            before = now

    def _bark(self, what: str, limit_s: float) -> NoReturn:
        faulthandler.dump_traceback(all_threads=True)
        who = f"process {jax.process_index()}: " if jax.process_count() > 1 else ""
        sys.stderr.write(
            f"error: {who}{what} was not finished within {limit_s:g} s "
            f"(--distributed.step-timeout-s); the stacks of all threads are above. {_AGAIN}\n"
        )
        sys.stderr.flush()
        if jax.process_count() > 1:
            # The others hang in the same step. They need time to print their stacks before they
            # notice that this process is gone.
            time.sleep((6 if is_first() else 3) * _POLL_S)
        os._exit(1)


def is_first() -> bool:
    """Whether this is process 0, which writes the files of a run."""
    return jax.process_index() == 0


_questions = itertools.count()


def of_first(make: Callable[[], str]) -> str:
    """The result of `make()` in process 0. All processes must call this in the same order."""
    if jax.process_count() == 1:
        return make()
    key = f"train/answer/{next(_questions)}"
    if is_first():
        _client().key_value_set(key, make())
    # Waits for ever, or until `started` ends this process.
    return _client().blocking_key_value_get(key, 2**31 - 1)


def all_say(yes: bool) -> bool:
    """Whether all processes say yes."""
    return bool(np.all(multihost_utils.process_allgather(np.array(yes))))


class StopVote:
    """Whether a process was asked to stop. All processes learn it after the same step.

    A signal reaches one process, at some moment between its steps. If that process stopped alone,
    the others would wait for it. So after every step the devices compute the maximum of one integer
    each, a few bytes, and the host reads it a step later. The maximum is there by then, so the host
    does not wait for it.
    """

    def __init__(self, mesh: Mesh):
        self._alone = jax.process_count() == 1
        if self._alone:
            return
        split = NamedSharding(mesh, PartitionSpec(mesh.axis_names))
        flag = lambda value: jax.make_array_from_callback(
            (mesh.size,), split, lambda _: np.full(1, value, np.int32)
        )
        self._flags = flag(0), flag(1)
        self._largest = jax.jit(jnp.max, out_shardings=NamedSharding(mesh, PartitionSpec()))
        self._pending: Int[Array, ""] | None = None

    def stops(self, asked: bool) -> bool:
        """Whether to stop after this step. Call it once a step, after the step was dispatched.

        Args:
          asked: Whether this process was asked to stop.
        """
        if self._alone:
            return asked
        before, self._pending = self._pending, self._largest(self._flags[asked])
        return before is not None and bool(before)


def to_devices(arrays: Mapping[str, np.ndarray], sharding: Sharding) -> dict[str, Array]:
    """Puts arrays on the devices; every process has the whole arrays."""
    place = functools.partial(jax.make_array_from_process_local_data, sharding)
    return {name: place(array, array.shape) for name, array in arrays.items()}


def rows_to_devices(
    rows_of: Callable[[Int[np.ndarray, " R"]], Mapping[str, np.ndarray]],
    shape: tuple[int, int],
    sharding: Sharding,
) -> dict[str, Array]:
    """A batch `[A, B, S]` on the devices; each process makes only the rows of its own devices.

    Args:
      rows_of: Function from R row numbers below A * B to arrays `[R, S]`.
      shape: The sizes (A, B).
      sharding: Sharding of the batch, which splits B.
    """
    accumulation_steps, batch_size = shape
    indices = sharding.addressable_devices_indices_map((accumulation_steps, batch_size, 1))
    columns = {i for index in indices.values() if index for i in range(batch_size)[index[1]]}
    mine = np.array(sorted(columns))
    rows = rows_of((np.arange(accumulation_steps)[:, None] * batch_size + mine).reshape(-1))

    def place(array: np.ndarray) -> Array:
        array = array.reshape(accumulation_steps, len(mine), -1)
        whole_shape = accumulation_steps, batch_size, array.shape[2]
        return jax.make_array_from_process_local_data(sharding, array, whole_shape)

    return {name: place(array) for name, array in rows.items()}


def gathered(array: Array) -> np.ndarray:
    """The whole array on the host of every process. All processes must call this."""
    if array.is_fully_addressable or array.is_fully_replicated:
        return np.asarray(array)
    return multihost_utils.process_allgather(array, tiled=True)
