"""Checks of arguments that the operations share: each error names the argument and the remedy."""

import math
import operator
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike


def floating_arrays(*, least_bits: int = 8, **arrays: Any) -> list[Any]:
    """The arrays, by name, as JAX arrays; None is no array.

    An operation rounds its results to the dtype of an argument, which for integers and bools would
    cut off what is behind the point.

    Args:
      least_bits: of a dtype. Elementwise operations compute in float32 and take 8 bits. Matrix
        products round gradients to the dtype of an operand before they multiply them, for which 8
        bits have too few exponents.
      **arrays: NumPy's or JAX's.

    Raises:
      TypeError: one is no array, or not of such a dtype.
    """
    found = []
    for name, a in arrays.items():
        if a is not None:
            a = as_array(name, a)
            check_floating(f"{name} is {a.dtype}", a.dtype, f"cast {name}", least_bits=least_bits)
        found.append(a)
    return found


def as_array(name: str, a: Any) -> jax.Array:
    """The array as JAX has it: with 32 bits instead of 64, unless `jax_enable_x64`.

    Raises:
      TypeError: it is no array.
    """
    if not (hasattr(a, "shape") and hasattr(a, "dtype")):
        raise TypeError(f"{name} must be an array, got {type(a).__name__}; use jnp.asarray")
    return jnp.asarray(a)


def check_floating(what: str, dtype: DTypeLike, remedy: str, *, least_bits: int) -> None:
    """Raises a TypeError that begins with `what` and ends with the remedy, if `dtype` won't do."""
    if not jnp.issubdtype(dtype, jnp.floating):
        raise TypeError(f"{what}, not a floating dtype; {remedy} to float32 or bfloat16")
    if jnp.finfo(dtype).bits < least_bits:
        raise TypeError(f"{what}, of less than {least_bits} bits; {remedy} to bfloat16 or float16")


def check_number(name: str, value: Any, *, least: float = -math.inf, remedy: str) -> None:
    """Raises unless the value is a finite number of at least `least`.

    Raises:
      TypeError: it is no number, or not known while JAX traces.
      ValueError: it is NaN, infinite or too small.
    """
    try:
        number = float(value)
    except (TypeError, ValueError) as error:  # tracers' errors are TypeErrors
        raise TypeError(
            f"{name} must be a number that is known while JAX traces, got "
            f"{type(value).__name__}; {remedy}"
        ) from error
    if not (math.isfinite(number) and number >= least):
        bound = "" if least == -math.inf else f" of at least {least:g}"
        raise ValueError(f"{name}={value!r} must be a finite number{bound}; {remedy}")


def check_integer(name: str, value: Any, *, remedy: str) -> None:
    """Raises a TypeError unless the value is an integer, and no bool."""
    try:
        operator.index(value)
    except TypeError:
        value = None
    if value is None or isinstance(value, bool):
        raise TypeError(f"{name} must be an integer; {remedy}")
