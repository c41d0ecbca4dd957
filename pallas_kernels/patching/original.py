"""A module's own call, traced and run on random numbers.

The module is copied and the copy gets random parameters, so that a scale of ones or a matrix of
zeros hides nothing, and so that the parameters may be `jax.ShapeDtypeStruct`.
"""

import contextlib
import inspect
import re
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from pallas_kernels.patching import candidates
from pallas_kernels.patching.rules import MLPRule, NormRule, Path, name_of

# Quick to compile, and every rounding is kept that the module writes.
_COMPILER_OPTIONS: dict[str, Any] = {
    "xla_backend_optimization_level": 0,
    "xla_allow_excess_precision": False,
}
_VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


class Refused(Exception):
    """The module is not replaced, and why."""


class Failed(Refused):
    """The module's own call raises on random numbers."""


@contextlib.contextmanager
def plain_numbers() -> Iterator[None]:
    """Exact products, JAX's usual rules for dtypes, and the CPU where there is one."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(jax.default_matmul_precision("highest"))
        stack.enter_context(jax.numpy_dtype_promotion("standard"))
        with contextlib.suppress(RuntimeError):  # a process whose only platform is a GPU
            stack.enter_context(jax.default_device(jax.local_devices(backend="cpu")[0]))
        yield


class Original:
    """A copy of the module with random parameters, which are those of one layer.

    Args:
      module: Module to copy.
      axis: Axis along which the parameters of several layers are stacked; None for one layer.

    Attributes:
      arrays: Parameters, as float64.
      ranks: Path and rank of each parameter.

    Raises:
      Refused: The module's call needs another number of arguments than one, or may read a floating
        variable that is no parameter.
    """

    def __init__(self, module: nnx.Module, axis: int | None):
        self._graphdef, state = nnx.split(module)
        floating = candidates.parameters(module).keys()
        rng = np.random.default_rng(0)
        self.arrays: dict[Path, np.ndarray] = {}
        flat = []
        for path, v in nnx.to_flat_state(state):
            if path in floating:
                value = _random(rng, candidates.without_axis(tuple(v.shape), axis), v.dtype)
                self.arrays[path] = value.astype(np.float64)
            elif jnp.issubdtype(v.dtype, jnp.floating):
                # The variable may change later, and an abstract one has no value.
                raise Refused(
                    f"its result may depend on the variable `{name_of(path)}`, which is no "
                    "parameter"
                )
            else:
                value = _first_layer(v.get_value(), axis)
            flat.append((path, v.replace(jnp.asarray(value))))
        self._state = nnx.from_flat_state(flat)
        self._call: Any = type(module).__call__
        self._bools = _names_of_bools(self._call)
        self.ranks = tuple((path, a.ndim) for path, a in self.arrays.items())
        self._has_modes = any(
            hasattr(m, "deterministic") or hasattr(m, "use_running_average")
            for _, m in nnx.iter_modules(module)
        )

    def result(self, x: np.ndarray) -> np.ndarray:
        """The result of the module's own call, which must have no effect.

        Raises:
          Refused: The call fails, changes the module, depends on its mode, or returns something
            else than an array like `x`.
        """
        text = self._traced(x)
        if re.search(r"precision=\S*HIGH", text):
            raise Refused("its products have a precision of their own")
        if self._has_modes:
            for trains in (True, False):
                if self._traced(x, trains=trains) != text:
                    mode = "training" if trains else "evaluation"
                    raise Refused(f"its call is another one in {mode} mode, for example by dropout")
        y, after = self._compiled(self._called)(self._state, jnp.asarray(x))
        before, after = jax.tree.leaves(self._state), jax.tree.leaves(after)
        if not all(np.array_equal(_data(a), _data(b)) for a, b in zip(before, after, strict=True)):
            raise Refused("its call changes variables, for example a stream of random numbers")
        return np.asarray(y)

    def ignored(self, x: np.ndarray) -> frozenset[str]:
        """Names of arguments that change nothing, whether they are True or False."""
        text, found = self._traced(x), set()
        for name in self._bools:
            with contextlib.suppress(Refused):
                if all(self._traced(x, **{name: b}) == text for b in (True, False)):
                    found.add(name)
        return frozenset(found)

    def has_checkpoint(self, x: np.ndarray) -> bool:
        """Whether the call is under `jax.checkpoint`, so that the backward finds its input only."""
        return re.search(r"\b(checkpoint|remat2?)\[", self._traced(x)) is not None

    def ours(self, rules: list[NormRule | MLPRule], x: np.ndarray, dtype: Any) -> list[np.ndarray]:
        """The results of our operations in plain JAX for an input and a dtype of the result."""

        def run(state: Any, x: jax.Array) -> list[jax.Array]:
            module = nnx.merge(self._graphdef, state)
            return [rule.run(module, x, dtype) for rule in rules]

        return [np.asarray(y) for y in self._compiled(run)(self._state, jnp.asarray(x))]

    def _compiled(self, fn: Any) -> Any:
        return jax.jit(fn, compiler_options=_COMPILER_OPTIONS)

    def _called(self, state: Any, x: jax.Array, trains: bool | None = None, **options: Any) -> Any:
        module = nnx.merge(self._graphdef, state)
        if trains is not None:
            module.set_attributes(
                deterministic=not trains,
                use_running_average=not trains,
                raise_if_not_found=False,
            )
        before = nnx.split(module)[0]
        y = self._call(module, x, **options)
        after, state = nnx.split(module)
        if after != before:
            raise Refused("its call changes its attributes")
        if not isinstance(y, jax.Array) or y.shape != x.shape or not _is_floating(y):
            raise Refused(f"it does not return one floating array of the shape {list(x.shape)}")
        return y, state

    def _traced(self, x: np.ndarray, **options: Any) -> str:
        """The text of the traced call.

        Raises:
          Refused: The call fails, changes attributes, or has effects.
        """
        call = lambda state, x: self._called(state, x, **options)
        shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
        try:
            with jax.default_matmul_precision(None):  # so that the text has the module's own
                jaxpr = jax.make_jaxpr(call)(self._state, shape)
        except Refused:
            raise
        except Exception as e:
            text = " ".join(str(e).split())
            text = text if len(text) <= 160 else text[:160] + "..."
            raise Failed(f"its call on {x.dtype} {list(x.shape)} raises {text}") from e
        if jaxpr.effects:
            raise Refused(f"its call has effects: {', '.join(map(str, jaxpr.effects))}")
        constants = [_data(jnp.asarray(c)).tobytes() for c in jaxpr.consts]
        return re.sub(r"0x[0-9a-f]+", "", f"{jaxpr} {constants}")


def _data(a: jax.Array) -> np.ndarray:
    """The numbers of an array, which may be a key."""
    return np.asarray(jax.random.key_data(a) if jnp.issubdtype(a.dtype, jax.dtypes.prng_key) else a)


def _is_floating(a: jax.Array) -> bool:
    return jnp.issubdtype(a.dtype, jnp.floating)


def _random(rng: np.random.Generator, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    """A scale around 1, or a matrix with products of order one."""
    if len(shape) == 1:
        return rng.uniform(0.5, 1.5, shape).astype(dtype)
    numbers = rng.standard_normal(shape, np.float32)
    return (numbers * np.float32(candidates.standard_deviation(shape))).astype(dtype)


def _first_layer(value: Any, axis: int | None) -> jax.Array:
    """The value of a variable that is no parameter, or zeros in the place of an abstract one."""
    if isinstance(value, jax.ShapeDtypeStruct):
        if jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
            value = jnp.broadcast_to(jax.random.key(0), value.shape)
        else:
            value = jnp.zeros(value.shape, value.dtype)
    # Counters and keys of stacked layers have the layers as their only axis.
    return value[0] if axis is not None and value.ndim else value


def _names_of_bools(call: Any) -> list[str]:
    """The names of the arguments behind the first that may be bools.

    Raises:
      Refused: The call needs another number of arguments than one.
    """
    _, *others = inspect.signature(call).parameters.values()
    needed = [p.name for p in others if p.default is p.empty and p.kind not in _VARIADIC]
    if not others or needed != [others[0].name]:
        raise Refused(f"its call takes ({', '.join(p.name for p in others)}), and not one array")
    return [p.name for p in others[1:] if isinstance(p.default, bool | None)]
