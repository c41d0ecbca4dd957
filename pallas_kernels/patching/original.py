"""A module's own call, traced and run on random numbers.

The module is copied and the copy gets random parameters, so that a scale of ones or a matrix of
zeros hides nothing, and so that the parameters may be `jax.ShapeDtypeStruct`.
"""

import contextlib
import functools
import inspect
import math
import re
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from pallas_kernels.fp8.layers import Fp8DotGeneral, Fp8Einsum
from pallas_kernels.patching import candidates
from pallas_kernels.patching.programs import CHECKPOINT, JIT, Program, variables
from pallas_kernels.patching.rules import MLPRule, NormRule, Path, name_of

# Quick to compile, and every rounding is kept that the module writes.
_jit = functools.partial(
    jax.jit,
    compiler_options={"xla_backend_optimization_level": 0, "xla_allow_excess_precision": False},
)
# A result of smooth operations is a smooth function, and its values determine its derivatives.
_SMOOTH = {
    "add",
    "add_any",
    "broadcast_in_dim",
    "concatenate",
    "convert_element_type",
    "copy",
    "div",
    "dot_general",
    "dynamic_slice",
    "exp",
    "expand_dims",
    "gather",
    "integer_pow",
    "logistic",
    "mul",
    "name",
    "neg",
    "pow",
    "reduce_sum",
    "reshape",
    "reshard",
    "rsqrt",
    "sharding_constraint",
    "slice",
    "split",
    "sqrt",
    "square",
    "squeeze",
    "sub",
    "tanh",
    "transpose",
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
      dtype: Dtype to which the parameters are cast; None if they stay.

    Attributes:
      shapes: Path and shape of each parameter.

    Raises:
      Refused: A layer of the module multiplies in FP8, or the module's call needs another number
        of arguments than one.
    """

    def __init__(self, module: nnx.Module, axis: int | None, dtype: Any = None):
        for path, m in nnx.iter_modules(module):
            for name in ("dot_general", "einsum_op"):
                if isinstance(op := getattr(m, name, None), Fp8DotGeneral | Fp8Einsum):
                    raise Refused(
                        f"`{name_of((*path, name))}` is an {type(op).__name__}; call patch before "
                        "you set it"
                    )
        self._graphdef, state = nnx.split(module)
        self._variables: dict[Path, Any] = dict(nnx.to_flat_state(state))
        parameters = candidates.parameters(module)

        def of_layer(path: Path, v: Any) -> jax.ShapeDtypeStruct:
            if path in parameters:
                shape = candidates.without_axis(tuple(v.shape), axis)
                return jax.ShapeDtypeStruct(shape, np.dtype(dtype or v.dtype))
            # Counters and keys of stacked layers have the layers as their only axis.
            shape = v.shape if axis is None else v.shape[1:]
            is_key = jnp.issubdtype(v.dtype, jax.dtypes.prng_key)
            own_dtype = v.dtype if is_key else jax.dtypes.canonicalize_dtype(v.dtype)
            return jax.ShapeDtypeStruct(shape, own_dtype)

        self._avals = {path: of_layer(path, v) for path, v in self._variables.items()}
        self.shapes = {path: self._avals[path].shape for path in parameters}
        self._call: Any = type(module).__call__
        self._bools = _names_of_bools(self._call)
        self._has_modes = any(
            hasattr(m, "deterministic") or hasattr(m, "use_running_average")
            for _, m in nnx.iter_modules(module)
        )
        self._traces: dict[Any, Any] = {}

    @property
    def dtypes(self) -> tuple[np.dtype, ...]:
        """The dtypes of the parameters, in the order of `shapes`."""
        return tuple(self._avals[path].dtype for path in self.shapes)

    @functools.cached_property
    def arrays(self) -> dict[Path, np.ndarray]:
        """The parameters, as float64."""
        rng = np.random.default_rng(0)
        return {
            path: _random(rng, shape).astype(self._avals[path].dtype).astype(np.float64)
            for path, shape in self.shapes.items()
        }

    def results(self, xs: Sequence[np.ndarray]) -> list[np.ndarray]:
        """The results of the module's own call, compiled as one program.

        Raises:
          Failed: The program does not compile or run, for example on this platform.
        """
        compiled = _jit(lambda leaves, xs: [self._called(leaves, x)[0] for x in xs])
        leaves = self._leaves
        try:
            return [np.asarray(y) for y in compiled(leaves, [jnp.asarray(x) for x in xs])]
        except Exception as e:
            raise Failed(f"its call on random numbers raises {_shortened(e)}") from e

    def check(self, x: np.ndarray) -> None:
        """Checks that the result of the call is a function of the input and the parameters.

        Raises:
          Refused: The call fails, changes the module, depends on its mode or on a variable that is
            no parameter, or returns something else than an array like `x`.
        """
        text = self.text(x)
        if re.search(r"precision=\S*HIGH", text):
            raise Refused("its products have a precision of their own")
        if self._has_modes:
            for trains in (True, False):
                if self.text(x, trains=trains) != text:
                    mode = "training" if trains else "evaluation"
                    raise Refused(f"its call is another one in {mode} mode, for example by dropout")
        program = self._program(x)
        y, *after = program.outputs
        if any(a is not b for a, b in zip(after, program.inputs[:-1], strict=True)):
            raise Refused("its call changes variables, for example a stream of random numbers")
        _, needed = program.needed([y])
        for path, variable in zip(self._variables, program.inputs[:-1], strict=True):
            if variable in needed and path not in self.shapes:
                # The variable may change later, and an abstract one has no value.
                raise Refused(
                    f"its result depends on the variable `{name_of(path)}`, which is no parameter"
                )

    def check_derivatives(self, x: np.ndarray) -> None:
        """Checks that equal results on random numbers mean equal functions and derivatives.

        Raises:
          Refused: The call has an operation that is not smooth, such as a bound, or that has a
            derivative of its own.
        """
        program = self._program(x)
        equations, _ = program.needed(program.outputs[:1])
        data = {*program.inputs}
        for equation in equations:
            if not data & variables(equation.invars):
                continue
            name = equation.primitive.name
            if name not in _SMOOTH or not all(map(_is_floating, equation.outvars)):
                raise Refused(
                    f"its call contains `{name}`, and only smooth operations with their usual "
                    "derivatives can be compared"
                )
            data.update(equation.outvars)

    def scalars(self, x: np.ndarray) -> list[float]:
        """The floating numbers in the traced call, with the fewest digits that float32 needs."""
        return [float(str(np.float32(a))) for a in self._program(x).scalars()]

    def ignored(self, xs: Sequence[np.ndarray]) -> frozenset[str]:
        """Names of arguments that change nothing for any input, whether they are True or False."""
        found = set()
        for name in self._bools:
            with contextlib.suppress(Refused):
                if all(
                    self.text(x, **{name: b}) == self.text(x) for x in xs for b in (True, False)
                ):
                    found.add(name)
        return frozenset(found)

    def has_checkpoint(self, x: np.ndarray) -> bool:
        """Whether the call is under `jax.checkpoint`, so that the backward finds its input only."""
        return f"{CHECKPOINT}[" in self.text(x)

    def ours(self, rules: list[NormRule | MLPRule], x: np.ndarray, dtype: Any) -> list[np.ndarray]:
        """The results of our operations in plain JAX for an input and a dtype of the result."""

        def run(leaves: Any, x: jax.Array) -> list[jax.Array]:
            return [rule.run(self._merged(leaves), x, dtype) for rule in rules]

        return [np.asarray(y) for y in _jit(run)(self._leaves, jnp.asarray(x))]

    def text(self, x: np.ndarray, **options: Any) -> str:
        """The text of the traced call, with its constants.

        Raises:
          Refused: The call fails, changes attributes, or has effects.
        """
        return self._traced(x, **options)[0]

    @functools.cached_property
    def _leaves(self) -> list[jax.Array]:
        """Random parameters. No result depends on the other variables, so they are zeros."""
        leaves = []
        for path, aval in self._avals.items():
            if path in self.shapes:
                leaves.append(jnp.asarray(self.arrays[path].astype(aval.dtype)))
            elif jnp.issubdtype(aval.dtype, jax.dtypes.prng_key):
                leaves.append(jnp.broadcast_to(jax.random.key(0), aval.shape))
            else:
                leaves.append(jnp.zeros(aval.shape, aval.dtype))
        return leaves

    def _merged(self, leaves: Sequence[Any]) -> Any:
        flat = [
            (path, v.replace(leaf) if isinstance(v, nnx.Variable) else leaf)
            for (path, v), leaf in zip(self._variables.items(), leaves, strict=True)
        ]
        return nnx.merge(self._graphdef, nnx.from_flat_state(flat))

    def _called(self, leaves: Any, x: jax.Array, trains: bool | None = None, **options: Any) -> Any:
        """The result, and all variables after the call."""
        module = self._merged(leaves)
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
        values = dict(nnx.to_flat_state(state))
        return y, [jax.tree.leaves(values[path])[0] for path in self._variables]

    def _traced(self, x: np.ndarray, **options: Any) -> tuple[str, Any]:
        """The text of the traced call and its jaxpr, from one trace for each kind of input."""
        key = x.shape, x.dtype, *options.items()
        if key not in self._traces:
            try:
                self._traces[key] = self._trace(x, options)
            except Refused as e:
                self._traces[key] = e
        found = self._traces[key]
        if isinstance(found, Refused):
            raise found
        return found

    def _trace(self, x: np.ndarray, options: dict[str, Any]) -> tuple[str, Any]:
        call = lambda leaves, x: self._called(leaves, x, **options)
        shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
        try:
            with jax.default_matmul_precision(None):  # so that the text has the module's own
                jaxpr = jax.make_jaxpr(call)(list(self._avals.values()), shape)
        except Refused:
            raise
        except Exception as e:
            raise Failed(f"its call on {x.dtype} {list(x.shape)} raises {_shortened(e)}") from e
        if jaxpr.effects:
            raise Refused(f"its call has effects: {', '.join(map(str, jaxpr.effects))}")
        constants = [_data(jnp.asarray(c)).tobytes() for c in jaxpr.consts]
        return re.sub(r"0x[0-9a-f]+", "", f"{jaxpr} {constants}"), jaxpr

    def _program(self, x: np.ndarray) -> Program:
        return Program(self._traced(x)[1], opens=(JIT, CHECKPOINT))


def _data(a: jax.Array) -> np.ndarray:
    """The numbers of an array, which may be a key."""
    return np.asarray(jax.random.key_data(a) if jnp.issubdtype(a.dtype, jax.dtypes.prng_key) else a)


def _shortened(error: Exception) -> str:
    text = " ".join(str(error).split())
    return text if len(text) <= 160 else text[:160] + "..."


def _is_floating(a: Any) -> bool:
    return jnp.issubdtype(getattr(a, "aval", a).dtype, jnp.floating)


def _random(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """A scale around 1 or -1, or a matrix with products of order one."""
    if len(shape) == 1:
        return rng.uniform(0.5, 1.5, shape) * rng.choice([-1, 1], shape)
    return rng.standard_normal(shape, np.float32) * np.float32(math.prod(shape[-2:]) ** -0.25)


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
