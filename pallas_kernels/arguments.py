"""Checks of arguments that the operations share. Each error names the argument and the remedy."""

import math
import numbers
import operator
from typing import Any, TypeAliasType, get_args

import jax
import jax.numpy as jnp
from jax.core import Tracer
from jax.typing import DTypeLike

# Operands of matrix products have at least this many bits. Gradients are rounded to the operands'
# dtype before they are multiplied, and 8 bits have too few exponents: the gradients of a mean over
# 8192 tokens would all be 0.
BITS_OF_PRODUCTS = 16


def floating_arrays(*, least_bits: int = 0, **arrays: Any) -> list[jax.Array]:
    """The arguments as JAX arrays, all of floating dtypes.

    An operation rounds its results to the dtype of an argument. An integer dtype would cut off the
    fraction, and bool would keep only whether it is 0.

    Args:
      least_bits: Fewest bits that a dtype may have. Elementwise operations take any number of bits,
        because they compute in float32.
      **arrays: Arrays of NumPy or JAX, by the names of the arguments.

    Raises:
      TypeError: An argument is no array, or its dtype is not floating or has fewer bits.
    """
    found = [as_array(name, a) for name, a in arrays.items()]
    for name, a in zip(arrays, found, strict=True):
        check_floating(f"{name} is {a.dtype}", a.dtype, f"cast {name}", least_bits=least_bits)
    return found


def layer_input(name: str, a: Any, dtype: DTypeLike | None) -> jax.Array:
    """An argument `[..., D]` of a layer as a JAX array, cast to `dtype` if that is not None.

    Flax's layers also cast integers and complex numbers. Here they are errors, because hidden
    states are neither: integers are often token ids, and a cast drops the imaginary part.

    Raises:
      TypeError: The argument is no array, or its dtype is not floating.
      ValueError: The argument has no axes.
    """
    (found,) = floating_arrays(**{name: a})
    if found.ndim == 0:
        raise ValueError(f"{name} must be [..., D], got a scalar; give it an axis of D numbers")
    # From the given array, so that a float64 array of NumPy is rounded to float16 only once.
    return found if dtype is None else jnp.asarray(a, dtype)


def as_array(name: str, a: Any) -> jax.Array:
    """The argument as a JAX array, with 32 bits in place of 64 unless `jax_enable_x64` is set.

    Raises:
      TypeError: The argument is no array.
    """
    if isinstance(a, jax.ShapeDtypeStruct):
        raise TypeError(f"{name} is a ShapeDtypeStruct, without values; pass it to jax.eval_shape")
    if not (hasattr(a, "shape") and hasattr(a, "dtype")):
        raise TypeError(f"{name} must be an array, got a {type(a).__name__}; make it a jax.Array")
    return jnp.asarray(a)


def check_floating(what: str, dtype: DTypeLike, remedy: str, *, least_bits: int) -> None:
    """Raises a TypeError if `dtype` is not floating or has fewer than `least_bits` bits.

    The message begins with `what` and ends with the remedy.
    """
    if not jnp.issubdtype(dtype, jnp.floating):
        raise TypeError(f"{what}, not a floating dtype; {remedy} to float32 or bfloat16")
    if jnp.finfo(dtype).bits < least_bits:
        raise TypeError(f"{what}, of less than {least_bits} bits; {remedy} to bfloat16 or float16")


def checked_dtype(name: str, dtype: Any) -> jnp.dtype:
    """The value as a dtype of operands or results of matrix products.

    Raises:
      TypeError: The value is no dtype, or one that is not floating or has fewer than 16 bits.
      ValueError: JAX has this dtype only with `jax_enable_x64`.
    """
    try:
        # NumPy takes None for float64.
        found = jnp.dtype("None" if dtype is None else dtype)
    except TypeError:
        raise TypeError(f"{name}={dtype!r} must be a dtype, such as jnp.float32") from None
    check_floating(f"{name}={found}", found, "change it", least_bits=BITS_OF_PRODUCTS)
    if jax.dtypes.canonicalize_dtype(found) != found:
        raise ValueError(f"{name}={found} needs jax_enable_x64; change it to float32")
    return found


def check_choice(name: str, value: Any, choices: TypeAliasType) -> None:
    """Raises a ValueError unless the value is one of the literals of the type `choices`."""
    values = get_args(choices.__value__)
    if value not in values:
        raise ValueError(f"{name}={value!r} must be one of {values}")


def number(name: str, value: Any, *, remedy: str) -> float:
    """The value, a real number of Python or of an array without axes, as a float.

    Raises:
      TypeError: The value is no such number, or JAX traces it.
      ValueError: The value is finite and not 0, and its magnitude is no normal number of float32,
        in which operations compute.
    """
    # Python makes a float of texts, bools and bytes, too, and NumPy of complex numbers, and of an
    # array of one element, whatever its axes are.
    if (dtype := getattr(value, "dtype", None)) is None:
        is_real = isinstance(value, numbers.Real) and not isinstance(value, bool)
    else:
        is_real = jnp.issubdtype(dtype, jnp.integer) or jnp.issubdtype(dtype, jnp.floating)
        is_real = is_real and not getattr(value, "ndim", 0)
    found = None
    if is_real:
        try:
            found = float(value)
        except OverflowError:  # of an integer
            found = math.inf
        except TypeError:  # of a tracer, a ShapeDtypeStruct or a dtype
            pass
    if found is None:
        raise TypeError(f"{name} must be a number, got {_got(value)}; {remedy}")
    limits = jnp.finfo(jnp.float32)
    least, most = float(limits.tiny), float(limits.max)
    if found and math.isfinite(found) and not least <= abs(found) <= most:
        raise ValueError(
            f"{name}={value!r} must be 0 or have a magnitude from {least:.3g} to {most:.3g}, "
            f"because it becomes a float32; {remedy}"
        )
    return found


def _got(value: Any) -> str:
    """The value for an error message."""
    if isinstance(value, Tracer):
        return "a traced array, where it must be a static argument of jax.jit"
    return repr(value)


def check_number(name: str, value: Any, *, least: float = -math.inf, remedy: str) -> None:
    """Raises unless the value is a finite number of at least `least`.

    Raises:
      TypeError: The value is no number, or JAX traces it.
      ValueError: The value is NaN, infinite or too small, or `number` does not take it.
    """
    found = number(name, value, remedy=remedy)
    if not (math.isfinite(found) and found >= least):
        bound = "" if least == -math.inf else f" of at least {least:g}"
        raise ValueError(f"{name}={value!r} must be a finite number{bound}; {remedy}")


def positive_number(name: str, value: Any, *, remedy: str) -> float:
    """The value as a float.

    Raises:
      TypeError: The value is no number, or JAX traces it.
      ValueError: The value is not finite and above 0, or `number` does not take it.
    """
    found = number(name, value, remedy=remedy)
    if not found > 0:
        raise ValueError(f"{name}={value!r} must be above 0; {remedy}")
    check_number(name, value, remedy=remedy)
    return found


def check_integer(name: str, value: Any, *, remedy: str) -> None:
    """Raises a TypeError unless the value is an integer, and no bool."""
    try:
        operator.index(value)
        is_integer = not isinstance(value, bool)
    except TypeError:  # a tracer's error is one
        is_integer = False
    if not is_integer:
        raise TypeError(f"{name} must be an integer, got {_got(value)}; {remedy}")


def check_sizes(**sizes: Any) -> None:
    """Checks the sizes of the axes that the parameters of a layer have.

    Raises:
      TypeError: A size is no integer.
      ValueError: A size is below 0.
    """
    for name, size in sizes.items():
        check_integer(name, size, remedy="give the number of entries of the axis")
        if size < 0:
            raise ValueError(f"{name}={size} must not be below 0; give the size of the axis")


def common_dtype(a: DTypeLike, b: DTypeLike) -> Any:
    """The common dtype, also where the caller has set `jax_numpy_dtype_promotion` to "strict"."""
    with jax.numpy_dtype_promotion("standard"):
        return jnp.promote_types(a, b)


def check_unused(kind: str, **options: tuple[Any, Any]) -> None:
    """Raises a ValueError if an option that only another kind of layer has is not at its default.

    Args:
      kind: Layers that have the options, in the plural.
      **options: Value and default of each option.
    """
    for name, (value, default) in options.items():
        if value != default:
            raise ValueError(f"{name}={value!r} is for {kind}; leave it at {default!r}")


def check_config(config: Any, *classes: type, name: str = "config") -> None:
    """Raises a TypeError unless the launch parameters are None or of one of the classes."""
    if config is not None and not isinstance(config, classes):
        names = " or ".join(f"{c.__module__}.{c.__qualname__}" for c in classes)
        raise TypeError(f"{name}={config!r} must be a {names}, or None for the default")
