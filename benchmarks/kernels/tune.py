"""Finds the launch parameters of the kernels for this card, by the length of their rows.

    python -m benchmarks.kernels.tune rms_norm add_rms_norm --hidden-sizes 4096 --output tuned.json
    python -m benchmarks.kernels.tune linear_cross_entropy --vocab-sizes 128256 --output tuned.json
    PALLAS_KERNELS_TUNED=tuned.json python -m train ...

Sweeps the candidates of the operation's `config.py`, forward, then backward; of the linear
cross-entropy those of the kernel over a chunk of logits (`logits_config.py`), whose statistics and
gradient are one call. One that does not compile, spills registers, or errs more against float32
than plain JAX does, is listed and not timed. The others take turns beside a copy of as many bytes.
Prints the tables and the rows to paste into the file of the candidates; `--output` puts the rows
into a JSON file that the kernels read instead.
"""

import argparse
import contextlib
import dataclasses
import functools
import importlib.metadata
import json
import os
import re
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any

import jax
import jax.numpy as jnp
import numpy as np

import pallas_kernels
from benchmarks import timing
from benchmarks.kernels import ops, shapes
from benchmarks.kernels.ops import Arrays, Contender, Direction, Formula
from benchmarks.kernels.shapes import Shape
from pallas_kernels import tuning
from pallas_kernels.loss import xla
from pallas_kernels.loss.mosaic_gpu import logits as logits_kernel
from pallas_kernels.loss.mosaic_gpu import logits_config
from pallas_kernels.loss.token_loss import LossOptions
from pallas_kernels.mlp import config as swiglu_config
from pallas_kernels.norm import config as norm_config

_CHECKED_ELEMENTS = 2**23
# There can be hundreds of candidates: all of them run a few rounds, the fastest run all of them.
_SCREENING_ROUNDS = 3
_FINALISTS = 8

_SHORT = {"forward": "fwd", "backward": "bwd"}

# A frozen dataclass, whose fields begin with "fwd_" or "bwd_" if both directions are swept.
type Config = Any


@dataclasses.dataclass(frozen=True)
class Tunable:
    """An operation whose kernels have launch parameters.

    Attributes:
      fn: of the formula's inputs, `implementation` and `config`.
      formula: what it computes.
      inputs: a set of inputs and cotangents from a shape and a random key.
      passes: how often it must pass over an array of the size of an input.
      candidates: for each direction that is swept, from the last axis of an input, and its dtype.
      sizes: the flag that says how long this axis is.
      num_elements: of an input, unless a flag says how many.
      variant: what follows device, dtype and last axis in the keys of its table of tuned rows.
    """

    fn: Callable[..., Any]
    formula: Formula
    inputs: Callable[[Shape, jax.Array], Arrays]
    passes: dict[Direction, int]
    candidates: dict[Direction, Callable[[int, str], list[Config]]]
    sizes: str = "hidden_sizes"
    num_elements: int = 2**26
    variant: tuple[bool, ...] = ()


def _of_bench(
    op: str,
    fn: Callable[..., Any],
    forward_candidates: Callable[[int, str], list[Config]],
    backward_candidates: Callable[[int, str], list[Config]],
    variant: tuple[bool, ...] = (),
) -> Tunable:
    """An operation of `bench` with a kernel for each direction."""
    return Tunable(
        fn=fn,
        formula=ops.OPS[op].contenders[0].formula,
        inputs=ops.OPS[op].inputs,
        passes=ops.PASSES[op],
        candidates={"forward": forward_candidates, "backward": backward_candidates},
        variant=variant,
    )


def _norm(op: str, fn: Callable[..., Any], *, add: bool) -> Tunable:
    return _of_bench(
        op,
        functools.partial(fn, eps=ops.EPS),
        functools.partial(norm_config.forward_candidates, add=add),
        functools.partial(norm_config.backward_candidates, add=add),
        variant=(add,),
    )


def _logits_inputs(shape: Shape, key: jax.Array) -> Arrays:
    num_tokens, vocab_size = shape
    keys = jax.random.split(key)
    # In whole lines, as the loss pads its logits.
    num_columns = vocab_size + -vocab_size % logits_config.LINE
    return {
        "logits": jax.random.normal(keys[0], (num_tokens, num_columns), jnp.bfloat16),
        # Before the first column there is no largest logit, only -inf.
        "labels": jax.random.randint(keys[1], (num_tokens,), 1, vocab_size),
    }


def _loss_of_logits(logits, labels, *, implementation, config):
    """Statistics and gradient of a chunk of logits, as a training step makes them.

    XLA copies the logits, in whose place the gradient is written; the timing does not count that.
    """
    plain = LossOptions(ignore_index=-100, label_smoothing=0.0, z_loss=0.0, logit_softcap=None)
    # Not all of them equal, or XLA would make them with a kernel. With powers of two the label's
    # entry, by far the largest, has next to no rounding error, so that those of the others count.
    coefficients = jnp.asarray(np.resize([1, 0.5], labels.shape).astype(np.float32))
    options: dict[str, Any] = {"num_columns": logits.shape[1], "coefficients": coefficients}
    if implementation == "reference":
        found, dlogits = xla.loss_of_logits(logits, labels, plain, **options)
    elif (reason := logits_kernel.unsupported_reason(logits.dtype)) is not None:
        raise NotImplementedError(reason)
    else:
        options["config"] = config
        found, dlogits = logits_kernel.loss_of_logits(logits, labels, plain, **options)
    assert found is not None and dlogits is not None
    dlogits = dlogits.astype(logits.dtype)
    return found.lse, found.label_logit, found.largest, found.largest_before, dlogits


_TUNABLES: dict[str, Tunable] = {
    "rms_norm": _norm("rms_norm", pallas_kernels.rms_norm, add=False),
    "add_rms_norm": _norm("add_rms_norm", pallas_kernels.add_rms_norm, add=True),
    "swiglu": _of_bench(
        "swiglu",
        pallas_kernels.swiglu,
        lambda _, dtype: swiglu_config.forward_candidates(dtype),
        lambda _, dtype: swiglu_config.backward_candidates(dtype),
    ),
    "linear_cross_entropy": Tunable(
        fn=_loss_of_logits,
        formula=Formula(
            functools.partial(_loss_of_logits, implementation="reference", config=None),
            inputs=("logits", "labels"),
            outputs=("lse", "label_logit", "largest", "largest_before", "dlogits"),
            gradients=(),
        ),
        inputs=_logits_inputs,
        passes={"forward": 2},
        candidates={"forward": logits_config.candidates},
        sizes="vocab_sizes",
        num_elements=2**28,  # the 512 MiB that a chunk has
    ),
}


@dataclasses.dataclass(frozen=True)
class Sweep:
    """The candidates of one kernel.

    Attributes:
      timings: of every candidate, or why it has none.
      copy: the timing of the copy beside them.
    """

    timings: dict[Config, timing.Timing]
    copy: timing.Timing

    def best(self) -> Config | None:
        """The fastest candidate, None if all failed."""
        return next(iter(fastest(self.timings)), None)

    def fraction(self, config: Config) -> float:
        """Speed of a candidate, over that of the copy."""
        return self.copy.median_ms / self.timings[config].median_ms


def contender(op: str, config: Config | None) -> Contender:
    """The kernel with launch parameters, or plain JAX without any."""
    fn = functools.partial(
        _TUNABLES[op].fn,
        implementation="reference" if config is None else "mosaic_gpu",
        config=config,
    )
    return Contender(str(config), _TUNABLES[op].formula, fn)


def checked(prepared: ops.Prepared) -> dict[str, np.ndarray]:
    """What the first call gives, by name: vectors whole, of arrays some rows and the last."""
    got = {}
    for name, array in prepared.calls[0]().items():
        if array.ndim == 2:
            array = array[:: -max(array.size // _CHECKED_ELEMENTS, 1)]
        got[name] = np.asarray(array, np.float64)
    return got


def inaccuracy(
    got: dict[str, np.ndarray], plain: dict[str, np.ndarray], exact: dict[str, np.ndarray]
) -> str | None:
    """Where `got` errs over 1.2 times as much as plain JAX in the same dtype does, or None.

    Errors below 64 float32 epsilons of the value do not count: sums may be in any order.
    """
    for name, value in exact.items():
        allowed = max(1.2 * _rms(plain[name] - value), 64 * 2.0**-23 * _rms(value))
        error = _rms(got[name] - value)
        if not error <= allowed:  # also NaN
            return f"{name} errs by {error:.1e}, allowed {allowed:.1e}"
    return None


@contextlib.contextmanager
def captured_stdout() -> Iterator[IO[bytes]]:
    """Yields a file that gets what the process prints meanwhile, its C++ included.

    Mosaic GPU prints there what ptxas says. It can write it into a folder too, but then it writes
    its layout constraints as well, and making text of those takes longer than compiling.
    """
    sys.stdout.flush()
    kept = os.dup(1)
    with tempfile.TemporaryFile() as file:
        os.dup2(file.fileno(), 1)
        try:
            yield file
        finally:
            sys.stdout.flush()
            os.dup2(kept, 1)
            os.close(kept)


def spills(ptxas: str) -> str | None:
    """What ptxas says of spilled registers, or None."""
    found = [int(size) for size in re.findall(r"(\d+) bytes spill stores", ptxas)]
    if not found:
        return "no output of ptxas to look for spills in"
    return f"spills {max(found)} bytes" if max(found) else None


def sweep(
    op: str,
    shape: tuple[int, int],
    dtype: np.dtype,
    direction: Direction,
    candidates: Sequence[Config],
    *,
    rounds: int,
) -> Sweep:
    """Compiles, checks and times the candidates of one direction.

    Those of the backward must have one forward, and one that works.
    """
    tunable = _TUNABLES[op]
    sets = [_cast(arrays, dtype) for arrays in ops.input_sets(tunable.inputs, shape)]
    plain = checked(ops.prepare(contender(op, None), sets[:1], direction))
    in_float32 = _cast(sets[0], np.dtype(np.float32))
    exact = checked(ops.prepare(contender(op, None), [in_float32], direction))
    del in_float32

    kept = None
    if direction == "backward":
        # All of them keep the same, so it is computed and stored once.
        kept = ops.keep(contender(op, candidates[0]), sets)
    cases, timings = {}, {}
    for config in candidates:
        try:
            with captured_stdout() as file:
                prepared = ops.prepare(contender(op, config), sets, direction, kept=kept)
                got = checked(prepared)
                file.seek(0)
                ptxas = file.read().decode(errors="replace")
        except Exception as error:  # that a candidate does not compile is a result
            timings[config] = timing.Timing(error=timing.first_line(error))
            continue
        if reason := spills(ptxas) or inaccuracy(got, plain, exact):
            timings[config] = timing.Timing(error=reason)
        else:
            cases[config] = timing.Case(str(config), prepared.calls)

    copy = ops.copy(tunable.passes[direction] * dtype.itemsize * shape[0] * shape[1])
    beside = timing.Case(copy.name, copy.calls)
    screened = timing.compare([beside, *cases.values()], rounds=_SCREENING_ROUNDS)
    timings |= {config: screened[case.name] for config, case in cases.items()}
    finalists = fastest(timings)[:_FINALISTS]
    final = timing.compare([beside, *(cases[config] for config in finalists)], rounds=rounds)
    timings |= {config: final[cases[config].name] for config in finalists}
    if final[copy.name].error is not None:
        sys.exit(f"the copy, beside which all is measured, failed: {final[copy.name].error}")
    return Sweep(timings, final[copy.name])


def fastest(timings: dict[Config, timing.Timing]) -> list[Config]:
    """Those that have a time, the fastest first."""
    timed = [config for config, found in timings.items() if found.error is None]
    return sorted(timed, key=lambda config: timings[config].median_ms)


def merged(forward: Config, backward: Config) -> Config:
    """The forward's parameters of one and the backward's of the other."""
    names = [field.name for field in dataclasses.fields(forward) if field.name.startswith("bwd_")]
    return dataclasses.replace(forward, **{name: getattr(backward, name) for name in names})


def table(found: Sweep) -> str:
    """Markdown, the fastest first, the failed last."""
    lines = ["| config | of the copy | µs | min - max |", "|---|---|---|---|"]
    for config in fastest(found.timings):
        times = [time_ms * 1e3 for time_ms in found.timings[config].times_ms]
        cells = [
            f"{found.fraction(config):.3f}",
            f"{found.timings[config].median_ms * 1e3:.1f}",
            f"{min(times):.1f} - {max(times):.1f}",
        ]
        lines.append(f"| {_fields(config)} | {' | '.join(cells)} |")
    for config, failed in found.timings.items():
        if failed.error is not None:
            lines.append(f"| {_fields(config)} | {failed.error} | | |")
    return "\n".join(lines)


def tune(
    op: str, shape: tuple[int, int], dtype: str, run: Callable[[Direction, list[Config]], Sweep]
) -> tuple[Config, str] | None:
    """The best configuration and its speed in words; None if no candidate is left.

    Prints the table of each sweep.
    """
    best, speeds = None, []
    for direction, candidates in _TUNABLES[op].candidates.items():
        configs = candidates(shape[1], dtype)
        if best is not None:
            configs = [merged(best, config) for config in configs]
        found = run(direction, configs)
        print(f"\n{op} {direction}, {shapes.label(shape)} {dtype}\n\n{table(found)}", flush=True)
        if (best := found.best()) is None:
            return None
        speeds.append(f"{_SHORT[direction]} {found.fraction(best):.2f}")
    return best, f"{', '.join(speeds)} of a copy"


def paste(op: str, device_kind: str, dtype: str, size: int, config: Config, measured: str) -> str:
    """A row of the table beside the operation's candidates."""
    key = ", ".join(map(str, (f'"{device_kind}", "{dtype}"', size, *_TUNABLES[op].variant)))
    if not isinstance(config, norm_config.Config):
        return f"({key}): {config!r},  # {measured}"
    fields = ", ".join(str(value) for value in dataclasses.astuple(config))
    return f"({key}): _config({fields}),  # {measured}"


def merge_entries(
    old: Sequence[dict[str, Any]], new: Sequence[dict[str, Any]]
) -> list[dict[str, Any]]:
    """The entries of both; of two for the same case, the new one, in the place of the old."""
    entries = {tuning.row_key(entry): entry for entry in old}
    return list((entries | {tuning.row_key(entry): entry for entry in new}).values())


def _fields(config: Config) -> str:
    return ", ".join(f"{name}={value}" for name, value in dataclasses.asdict(config).items())


def _rms(array: np.ndarray) -> float:
    return float(np.sqrt(np.mean(np.square(array))))


def _cast(arrays: Arrays, dtype: np.dtype) -> Arrays:
    """All but integers in another dtype."""
    return {
        name: array.astype(dtype) if jnp.issubdtype(array.dtype, jnp.floating) else array
        for name, array in arrays.items()
    }


def main(argv: Sequence[str] | None = None) -> None:
    """Parses the command line, sweeps, prints and writes what is best."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.kernels.tune",
        description=__doc__,
        formatter_class=argparse.RawTextHelpFormatter,
    )
    parser.add_argument("ops", nargs="+", choices=_TUNABLES)
    parser.add_argument(
        "--hidden-sizes", type=int, nargs="+", help="of norms; of swiglu: intermediate sizes"
    )
    parser.add_argument("--vocab-sizes", type=int, nargs="+", help="of linear_cross_entropy")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float16", "float32"))
    parser.add_argument("--num-elements", type=int, help="of an input; rows follow")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--output", type=Path, help="JSON file, made or added to")
    args = parser.parse_args(argv)
    for op in args.ops:
        if getattr(args, sizes := _TUNABLES[op].sizes) is None:
            parser.error(f"{op} needs --{sizes.replace('_', '-')}")

    device_kind = timing.require_gpu()
    os.environ["MOSAIC_GPU_DUMP_PTXAS"] = "1"  # Mosaic GPU reads it when it compiles
    # A program from the cache would not pass through ptxas.
    jax.config.update("jax_enable_compilation_cache", False)

    rows, failed = [], []
    for op in args.ops:
        for size in getattr(args, _TUNABLES[op].sizes):
            num_elements = args.num_elements or _TUNABLES[op].num_elements
            shape = (max(num_elements // size, 1), size)
            run = functools.partial(sweep, op, shape, jnp.dtype(args.dtype), rounds=args.rounds)
            found = tune(op, shape, args.dtype, run)
            if found is None:
                failed.append(f"{op} {size}")
                continue
            config, speed = found
            measured = (
                f"{time.strftime('%Y-%m-%d')} jax {importlib.metadata.version('jax')}: {speed}"
            )
            key = (device_kind, tuning.dtype_name(args.dtype), size)
            rows.append(paste(op, *key, config, measured))
            entry = dict(zip(tuning.KEYS, (op, *key), strict=True))
            entry |= {"config": dataclasses.asdict(config), "measured": measured}
            if args.output is not None:  # after each, for a sweep can take minutes
                old = json.loads(args.output.read_text()) if args.output.exists() else []
                args.output.write_text(json.dumps(merge_entries(old, [entry]), indent=1) + "\n")
    print("\n" + "\n".join(rows))
    if failed:
        sys.exit(f"no candidate is left for {', '.join(failed)}")


if __name__ == "__main__":
    main()
