"""The check that implementations compute the same before they are timed."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import timing

# The largest relative error that is accepted, for sums of products of 16-bit numbers.
LIMIT = 2e-2


class Rejected(Exception):
    """Work is not timed; the message is the reason."""


@jax.jit
def _relative_error(got: jax.Array, expected: jax.Array) -> jax.Array:
    got, expected = got.astype(jnp.float32), expected.astype(jnp.float32)
    return jnp.linalg.norm(got - expected) / jnp.linalg.norm(expected)


def relative_error(got: Sequence[Any], expected: Sequence[Any]) -> float:
    """The largest relative error of the arrays that both sequences have; NaN if one has a NaN.

    The error of an array is the Frobenius norm of the difference over that of `expected`.
    """
    return float(np.max([_relative_error(*pair) for pair in zip(got, expected, strict=False)]))


def reason(got: Sequence[Any], expected: Sequence[Any], limit: float = LIMIT) -> str | None:
    """That the relative error exceeds the limit, in words; None if it does not."""
    error = relative_error(got, expected)
    if error < limit:  # not NaN
        return None
    return f"wrong result: relative error {error:.1e}"


def checked(
    name: str,
    prepare: Callable[[], Sequence[Any]],
    wrong: Callable[[Any], str | None],
    num_bytes: Callable[[Sequence[Any]], int | None] = lambda calls: None,
) -> timing.Case:
    """Work as a case, which has an error if it does not run or has a wrong result.

    Args:
      name: Name of the case.
      prepare: Function that compiles and returns the calls.
      wrong: Function that says what is wrong with the result of the first call, or None.
      num_bytes: Function that returns the temporary bytes of one of the calls.
    """
    try:
        calls = prepare()
        if error := wrong(jax.block_until_ready(calls[0]())):
            return timing.Case(name, error=error)
        return timing.Case(name, calls, None, num_bytes(calls))
    except Rejected as rejected:
        return timing.Case(name, error=str(rejected))
    except Exception as raised:  # that it does not compile or fit is a result
        return timing.Case(name, error=timing.first_line(raised))


def compiled(
    name: str,
    fn: Callable[..., Any],
    args: Sequence[Any],
    expected: Callable[[list[Any]], Sequence[Any]],
    *,
    leaves: Callable[[Any], list[Any]] = jax.tree.leaves,
    limit: float = LIMIT,
) -> timing.Case:
    """A function of JAX arrays as a case with its temporary bytes, compiled and checked.

    Args:
      name: Name of the case.
      fn: Function to compile.
      args: Arguments.
      expected: Function that returns the arrays that it should return. Its argument is the arrays
        that it did return, which are right if nothing else is known.
      leaves: Function that makes a list of arrays of the result.
      limit: Largest relative error.
    """

    def prepare() -> list[Callable[[], Any]]:
        return [functools.partial(jax.jit(fn).lower(*args).compile(), *args)]

    def wrong(result: Any) -> str | None:
        got = leaves(result)
        return reason(got, expected(got), limit)

    return checked(name, prepare, wrong, bytes_of_first)


def of_first() -> Callable[[list[Any]], list[Any]]:
    """A function of arrays that returns those of its first call, to which others must be equal."""
    first: list[Any] = []

    def expected(got: list[Any]) -> list[Any]:
        first[:] = first or got
        return first

    return expected


def bytes_of_first(calls: Sequence[Any]) -> int:
    """Temporary bytes of the program of the first call, which `functools.partial` made."""
    return temporary_bytes(calls[0].func)


def temporary_bytes(program: jax.stages.Compiled) -> int:
    """Bytes of a program beside its arguments and results, by XLA."""
    analysis = program.memory_analysis()
    assert analysis is not None
    return analysis.temp_size_in_bytes
