"""Compares a module with the formula of an operation, on random numbers.

The module is copied and the copy gets random parameters, so that a scale of ones or a matrix of
zeros hides nothing, and so that the parameters may be `jax.ShapeDtypeStruct`. It runs on the CPU, in
a thread of its own, where no mesh is in context.

An error is the root mean square over one token, relative to the root mean square of the exact
result. The module may err by twice the error of our operation in the same dtypes, or by a few
roundings of the dtype of its result.
"""

import contextlib
import dataclasses
import inspect
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from pallas_kernels.patching import candidates
from pallas_kernels.patching.rules import MLPRule, NormRule, Path, Rule

# A rounding to nearest errs by 0.29 epsilons in the root mean square.
_NORM_EPSILONS = 2.0
_MLP_EPSILONS = 4.0
_DTYPES = (np.dtype(np.float32), np.dtype(jnp.bfloat16))
# Sizes of the tokens. Small ones show epsilon, large ones a bound of the activations.
_NORM_SIZES = (1e-5, 1e-3, 0.03, 1.0, 1.0, 30.0)
_MLP_SIZES = (0.03, 0.3, 1.0, 1.0, 3.0, 30.0)
_USUAL_EPSILONS = (1e-6, 1e-5, 1e-8, 1e-7, 1e-12, 0.0)


class Refused(Exception):
    """The module is not replaced, and why."""


def rule_for(module: nnx.Module) -> Rule | None:
    """The operation that computes what the module does, or None if its parameters are others.

    Raises:
      Refused: The parameters are those of a norm or of a gated MLP, and the module computes
        something else, or has effects.
    """
    shapes = {path: tuple(v.shape) for path, v in candidates.parameters(module).items()}
    for axis in candidates.STACK_AXES:
        layer = candidates.unstacked(shapes, axis)
        if layer is None:
            continue
        is_norm = len(layer) == 1 and len(next(iter(layer.values()))) == 1
        readings = candidates.readings_as_mlp(layer)
        if not is_norm and not readings:
            continue
        try:
            # A thread has no mesh in context, and nothing is traced in it.
            with ThreadPoolExecutor(1) as thread:
                return thread.submit(_compare, module, axis, readings).result()
        except Refused:
            # A matrix could be many stacked norms, so only its failure says nothing.
            if axis is None or readings:
                raise
    if candidates.looks_like_a_norm(shapes):
        raise Refused(f"an RMSNorm has one vector, and this has {candidates.describe(shapes)}")
    if candidates.looks_like_an_mlp(shapes):
        raise Refused(f"a gated MLP has no biases, and this has {candidates.describe(shapes)}")
    return None


def _compare(module: nnx.Module, axis: int | None, readings: list[candidates.Matrices]) -> Rule:
    with _quiet_numbers():
        original = _Original(module, axis)
        if readings:
            return _compare_mlp(original, readings)
        return _compare_norm(original, module)


@contextlib.contextmanager
def _quiet_numbers() -> Iterator[None]:
    """Exact products, JAX's usual rules for dtypes, and the CPU where there is one."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(jax.default_matmul_precision("highest"))
        stack.enter_context(jax.numpy_dtype_promotion("standard"))
        with contextlib.suppress(RuntimeError):  # a process whose only platform is a GPU
            stack.enter_context(jax.default_device(jax.local_devices(backend="cpu")[0]))
        yield


class _Original:
    """A copy of the module with random parameters, which are those of one layer.

    Attributes:
      arrays: The parameters, as float64.
      ignored: Names of arguments that may be any bool.
      name_of_x: Name of the first argument.
    """

    def __init__(self, module: nnx.Module, axis: int | None):
        self._graphdef, state = nnx.split(module)
        floating = candidates.parameters(module).keys()
        rng = np.random.default_rng(0)
        self.arrays: dict[Path, np.ndarray] = {}
        self._flat = []
        for path, v in nnx.to_flat_state(state):
            if path in floating:
                value = _random(rng, candidates.without_axis(tuple(v.shape), axis), v.dtype)
                self.arrays[path] = value.astype(np.float64)
            else:
                value = _first_layer(v, axis)
            self._flat.append((path, v.replace(jnp.asarray(value))))
        self._call = type(module).__call__
        self.name_of_x, self._bools = _arguments(self._call)
        self.ranks = tuple((path, a.ndim) for path, a in self.arrays.items())

    def __call__(self, x: np.ndarray, *, trains: bool | None = None, **options: Any) -> np.ndarray:
        """The result of the module's own call, which must have no effect.

        Raises:
          Refused: The call fails, changes the module, or returns something else than an array.
        """
        module = nnx.merge(self._graphdef, nnx.from_flat_state(self._flat))
        if trains is not None:
            module.set_attributes(
                deterministic=not trains,
                use_running_average=not trains,
                raise_if_not_found=False,
            )
        graphdef, before = nnx.split(module)
        before = jax.tree.leaves(before)
        try:
            y = self._call(module, jnp.asarray(x), **options)
            y = y if isinstance(y, jax.Array) else None
        except Exception as e:
            text = " ".join(str(e).split())
            raise Refused(f"its call on {x.dtype} {list(x.shape)} raises {_cut(text)}") from e
        after_graphdef, after = nnx.split(module)
        after = jax.tree.leaves(after)
        is_same = after_graphdef == graphdef and all(
            a is b or np.array_equal(_data(a), _data(b)) for a, b in zip(before, after, strict=True)
        )
        if not is_same:
            raise Refused("its call changes its state, for example that of a random number stream")
        if y is None or y.shape != x.shape or not jnp.issubdtype(y.dtype, jnp.floating):
            raise Refused(f"it does not return one floating array of the shape {list(x.shape)}")
        return np.asarray(y)

    def ignored(self, x: np.ndarray, y: np.ndarray) -> frozenset[str]:
        """Names of arguments that change nothing, whether they are True or False."""
        found = set()
        for name in self._bools:
            with contextlib.suppress(Refused):
                if all(np.array_equal(y, self(x, **{name: b})) for b in (True, False)):
                    found.add(name)
        return frozenset(found)


def _cut(text: str) -> str:
    return text if len(text) <= 160 else text[:160] + "..."


def _data(a: Any) -> np.ndarray:
    """The numbers of an array, which may be a key."""
    return np.asarray(jax.random.key_data(a) if jnp.issubdtype(a.dtype, jax.dtypes.prng_key) else a)


def _random(rng: np.random.Generator, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    """A scale around 1, or a matrix with products of order one."""
    if len(shape) == 1:
        return rng.uniform(0.5, 1.5, shape).astype(dtype)
    numbers = rng.standard_normal(shape, np.float32)
    return (numbers * np.float32(candidates.standard_deviation(shape))).astype(dtype)


def _first_layer(variable: Any, axis: int | None) -> jax.Array:
    """The value of a variable that is no parameter, or zeros in the place of an abstract one."""
    value = variable.get_value()
    if isinstance(value, jax.ShapeDtypeStruct):
        if jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
            value = jnp.broadcast_to(jax.random.key(0), value.shape)
        else:
            value = jnp.zeros(value.shape, value.dtype)
    # Counters and keys of stacked layers have the layers as their only axis.
    return value[0] if axis is not None and value.ndim else value


def _arguments(call: Any) -> tuple[str, list[str]]:
    """The name of the input, and the names of the arguments that may be bools.

    Raises:
      Refused: The call needs another number of arguments.
    """
    _, *others = inspect.signature(call).parameters.values()
    takes = [p for p in others if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    needed = [p.name for p in others if p.default is p.empty and p.kind not in _VARIADIC]
    if (
        not takes
        or needed not in ([], [takes[0].name])
        or (not needed and takes[0].default is None)
    ):
        raise Refused(f"its call takes {', '.join(needed) or 'nothing'}, and not one input")
    bools = [p.name for p in others if p is not takes[0] and isinstance(p.default, bool | None)]
    return takes[0].name, bools


_VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


@dataclasses.dataclass(frozen=True)
class _Sample:
    """What the module returns for inputs of one dtype."""

    x: np.ndarray
    y: np.ndarray

    @property
    def exact_input(self) -> np.ndarray:
        return self.x.astype(np.float64)


def _samples(original: _Original, size: int, scales: tuple[float, ...]) -> list[_Sample]:
    """Results for float32 and bfloat16, of those that the module takes.

    Raises:
      Refused: The module takes neither, is not deterministic, or differs between its modes.
    """
    rng = np.random.default_rng(1)
    x = rng.standard_normal((len(scales), size)) * np.array(scales)[:, None]
    x = x.reshape(2, len(scales) // 2, size)
    found, reason = [], ""
    for dtype in _DTYPES:
        try:
            sample = _Sample(x.astype(dtype), original(x.astype(dtype)))
        except Refused as e:
            reason = reason or str(e)
            continue
        for trains in (True, False):
            y = original(sample.x, trains=trains)
            if not np.array_equal(y, sample.y):
                mode = "training" if trains else "evaluation"
                raise Refused(f"its result is another one in {mode} mode, for example by dropout")
        found.append(sample)
    if not found:
        raise Refused(reason)
    return found


def _errors(y: np.ndarray, exact: np.ndarray) -> np.ndarray:
    """The relative error of each token; infinite where the result is not finite."""
    rms = lambda a: np.sqrt(np.mean(np.square(a), axis=-1))
    with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
        errors = rms(y.astype(np.float64) - exact) / rms(exact)
    return np.where(np.isfinite(errors), errors, np.inf)


def _excess(rule: NormRule | MLPRule, original: _Original, samples: list[_Sample], least: float):
    """The largest ratio of an error to the allowed one, and that error.

    Args:
      rule: Operation and arguments to compare with.
      original: Module and its parameters.
      samples: Results of the module.
      least: Error that is always allowed, in epsilons of the dtype of the result.
    """
    worst = 0.0, 0.0
    for sample in samples:
        exact = rule.exact(original.arrays, sample.exact_input)
        errors = _errors(sample.y, exact)
        allowed = least * float(jnp.finfo(sample.y.dtype).eps)
        if np.max(errors) > allowed:
            ours = _errors(_ours(rule, original, sample), exact)
            allowed = np.maximum(allowed, 2 * ours)
        ratios = errors / allowed
        worst = max(worst, (float(np.max(ratios)), float(np.max(errors))))
    return worst


def _ours(rule: NormRule | MLPRule, original: _Original, sample: _Sample) -> np.ndarray:
    """The result of our operation in plain JAX, in the dtypes of the module."""
    module = nnx.merge(original._graphdef, nnx.from_flat_state(original._flat))
    return np.asarray(rule.run(module, jnp.asarray(sample.x), sample.y.dtype))


def _finished(rule: NormRule | MLPRule, original: _Original, samples: list[_Sample]) -> Rule:
    return Rule(
        run=rule,
        dtypes=tuple((np.dtype(s.x.dtype), np.dtype(s.y.dtype)) for s in samples),
        ranks=original.ranks,
        ignored=original.ignored(samples[0].x, samples[0].y),
    )


def _compare_norm(original: _Original, module: nnx.Module) -> Rule:
    (path,) = original.arrays
    samples = _samples(original, len(original.arrays[path]), _NORM_SIZES)
    closest = np.inf, 0.0, NormRule(path, 0.0)
    for offset in (0.0, 1.0):
        for eps in _epsilons(module, original.arrays[path] + offset, samples[0]):
            rule = NormRule(path, eps, offset)
            closest = min(
                closest, (*_excess(rule, original, samples, _NORM_EPSILONS), rule), key=_first
            )
            if closest[0] <= 1:
                return _finished(_with_casting(closest[2], original, samples), original, samples)
    raise Refused(f"its result differs from RMSNorm by {closest[1]:.2g} of its size")


def _first(pair: tuple[Any, ...]) -> Any:
    return pair[0]


def _epsilons(module: nnx.Module, scale: np.ndarray, sample: _Sample) -> list[float]:
    """Numbers that may be the epsilon: attributes, usual ones, and what the result says."""
    attributes = [v for v in vars(module).values() if isinstance(v, float) and 0 <= v < 0.1]
    x, y = (
        a.reshape(-1, a.shape[-1])[0].astype(np.float64) for a in (sample.exact_input, sample.y)
    )
    rstd = np.sum(y * x * scale) / np.sum(np.square(x * scale))
    solved = 1 / rstd**2 - np.mean(np.square(x)) if rstd > 0 else 0.0
    solved = float(f"{solved:.1e}") if 0 < solved < 0.1 else 0.0
    return list(dict.fromkeys([*attributes, *_USUAL_EPSILONS, solved]))


def _with_casting(rule: NormRule, original: _Original, samples: list[_Sample]) -> NormRule:
    """The rule with the place of rounding that comes closest to the module."""
    llama = dataclasses.replace(rule, casting="llama")
    distances = [
        sum(
            float(np.max(_errors(sample.y, _ours(r, original, sample).astype(np.float64))))
            for sample in samples
        )
        for r in (rule, llama)
    ]
    return llama if distances[1] < distances[0] else rule


def _compare_mlp(original: _Original, readings: list[candidates.Matrices]) -> Rule:
    closest, reason = (np.inf, 0.0), ""
    samples: dict[int, list[_Sample]] = {}
    for reading in readings:
        if reading.size not in samples:
            try:
                samples[reading.size] = _samples(original, reading.size, _MLP_SIZES)
            except Refused as e:
                samples[reading.size], reason = [], reason or str(e)
        if not samples[reading.size]:
            continue
        rule = MLPRule(reading.gate, reading.up, reading.down)
        found = _excess(rule, original, samples[reading.size], _MLP_EPSILONS)
        closest = min(closest, found)
        if closest[0] <= 1:
            return _finished(rule, original, samples[reading.size])
    if closest[0] == np.inf and reason:
        raise Refused(reason)
    raise Refused(f"its result differs from silu(gate) * up by {closest[1]:.2g} of its size")
