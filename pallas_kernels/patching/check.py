"""Compares a module with the formula of an operation, on random numbers.

An error is the root mean square over one token, relative to the root mean square of the exact
result. The module may err by a few roundings of the dtype of its result, or by twice the error of
our operation in the same dtypes.
"""

import dataclasses
import itertools
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import nnx

from pallas_kernels.patching import candidates
from pallas_kernels.patching.original import Failed, Original, Refused, plain_numbers
from pallas_kernels.patching.rules import Call, MLPRule, NormRule, Rule

# Errors that are always allowed, in epsilons of the dtype of the result. One rounding to nearest
# errs by 0.29 epsilons in the root mean square.
_NORM_EPSILONS = 2.0
_MLP_EPSILONS = 4.0
# Our operation may excuse an error of up to this multiple of the allowed epsilons, because long
# float32 sums err by more than a few roundings. It excuses no larger error.
_MOST = 8.0
_DTYPES = (np.dtype(np.float32), np.dtype(jnp.bfloat16))
# Sizes of the tokens. Small ones show epsilon. Zeros show whether there is one.
_NORM_SIZES = (1e-5, 1e-3, 0.03, 0.0, 1.0, 1.0, 30.0, 1e3)
_MLP_SIZES = (0.03, 0.3, 0.0, 1.0, 1.0, 3.0, 30.0, 1e3)
# Shapes of the tokens. A call of another rank is not covered.
_SHAPES = ((8,), (2, 4), (2, 2, 2))


@dataclasses.dataclass(frozen=True)
class _Sample:
    """An input, and the result of the module."""

    x: np.ndarray
    y: np.ndarray


@dataclasses.dataclass(frozen=True)
class Comparison:
    """A module that computes what an operation does.

    Attributes:
      rule: Operation, and when it runs.
      axis: Axis along which its parameters are stacked; None for one layer.
      samples: Inputs of rank 3.
      texts: Traced call for each of the inputs.
    """

    rule: Rule
    axis: int | None
    samples: tuple[np.ndarray, ...]
    texts: tuple[str, ...]

    def holds_for(self, module: nnx.Module) -> bool:
        """Whether the traced calls of a module with an equal graph definition are the same."""
        try:
            return _alone(_texts, Original(module, self.axis), self.samples) == self.texts
        except Refused:
            return False


def comparison_of(module: nnx.Module) -> Comparison | None:
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
            return _alone(_compare, module, axis, readings)
        except Refused:
            # Any matrix could be many stacked norms. Only a success says something.
            if axis is None or readings:
                raise
    if candidates.looks_like_a_norm(shapes):
        raise Refused(f"an RMSNorm has one vector, and this has {candidates.describe(shapes)}")
    if candidates.looks_like_an_mlp(shapes):
        raise Refused(f"a gated MLP has three matrices, and this has {candidates.describe(shapes)}")
    return None


def _alone(fn: Any, *args: Any) -> Any:
    """The result of a function that runs without a mesh in context and outside of any trace."""

    def run() -> Any:
        with plain_numbers():
            return fn(*args)

    with ThreadPoolExecutor(1) as thread:
        return thread.submit(run).result()


def _texts(original: Original, samples: Sequence[np.ndarray]) -> tuple[str, ...]:
    return tuple(original.text(x) for x in samples)


def _compare(
    module: nnx.Module, axis: int | None, readings: list[tuple[int, MLPRule]]
) -> Comparison:
    original = Original(module, axis)
    rule, samples = _compare_mlp(original, readings) if readings else _compare_norm(original)
    usual = tuple(s.x for s in samples if s.x.ndim == 3)
    texts = _texts(original, usual)
    # A training step may cast the parameters to the dtype of its products.
    if {*original.dtypes} != {np.dtype(jnp.bfloat16)}:
        original = Original(module, axis, jnp.bfloat16)  # in the place of the other, which is large
        rule = dataclasses.replace(
            rule, calls=rule.calls + _calls_after_cast(original, rule, samples)
        )
    return Comparison(rule, axis, usual, texts)


def _calls_after_cast(
    original: Original, rule: Rule, samples: list[_Sample]
) -> tuple[tuple[Call, np.dtype], ...]:
    """The calls in which the module with cast parameters computes what the operation does."""
    try:
        found = _results(original, [s.x for s in samples])
        for sample in found:
            original.check_derivatives(sample.x)
    except Refused:
        return ()
    return _calls(original, [s for s in found if _excess(rule.operation, original, [s])[0] <= 1])


def _samples(original: Original, size: int, scales: tuple[float, ...]) -> list[_Sample]:
    """Results for all dtypes and ranks that the module takes.

    Raises:
      Refused: The module takes none.
    """
    rng = np.random.default_rng(1)
    x = rng.standard_normal((len(scales), size)) * np.array(scales)[:, None]
    return _results(
        original, [x.reshape(*s, size).astype(dtype) for dtype in _DTYPES for s in _SHAPES]
    )


def _results(original: Original, xs: list[np.ndarray]) -> list[_Sample]:
    """The inputs that the module takes, with its results.

    Raises:
      Refused: The module takes none.
    """
    taken, reasons = [], []
    for x in xs:
        try:
            original.check(x)
            taken.append(x)
        except Refused as e:
            reasons.append(e)
    if not taken:
        raise reasons[0]
    return [_Sample(*pair) for pair in zip(taken, original.results(taken), strict=True)]


def _errors(y: np.ndarray, exact: np.ndarray) -> np.ndarray:
    """The relative error of each token; infinite where only one result is not finite."""
    rms = lambda a: np.sqrt(np.mean(np.square(a), axis=-1))
    y = y.astype(np.float64)
    is_equal = np.all((y == exact) | (np.isnan(y) & np.isnan(exact)), axis=-1)
    with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
        errors = rms(y - exact) / rms(exact)
    return np.where(is_equal, 0.0, np.where(np.isfinite(errors), errors, np.inf))


def _excess(
    rule: NormRule | MLPRule, original: Original, samples: list[_Sample]
) -> tuple[float, float]:
    """The largest ratio of an error of the module to the allowed one, and the largest error."""
    epsilons = _NORM_EPSILONS if isinstance(rule, NormRule) else _MLP_EPSILONS
    ratio = error = 0.0
    exact: dict[np.dtype, np.ndarray] = {}
    for sample in samples:
        dtype, size = sample.x.dtype, sample.x.shape[-1]
        if dtype not in exact:
            exact[dtype] = rule.exact(
                original.arrays, sample.x.reshape(-1, size).astype(np.float64)
            )
        errors = _errors(sample.y.reshape(-1, size), exact[dtype])
        always = epsilons * float(jnp.finfo(sample.y.dtype).eps)
        allowed = np.full_like(errors, always)
        if always < np.max(errors) <= _MOST * always:
            (ours,) = original.ours([rule], sample.x, sample.y.dtype)
            ours = ours.reshape(-1, size)
            allowed = np.maximum(allowed, 2 * _errors(ours, exact[dtype]))
        ratio = max(ratio, float(np.max(errors / allowed)))
        error = max(error, float(np.max(errors)))
    return ratio, error


def _rule(operation: NormRule | MLPRule, original: Original, samples: list[_Sample]) -> Rule:
    """The rule for a module whose results are equal.

    Raises:
      Refused: Equal results do not mean equal functions.
    """
    for sample in samples:
        original.check_derivatives(sample.x)
    return Rule(
        operation=operation,
        calls=_calls(original, samples),
        ranks=tuple((path, len(shape)) for path, shape in original.shapes.items()),
        ignored=original.ignored([s.x for s in samples]),
    )


def _calls(original: Original, samples: list[_Sample]) -> tuple[tuple[Call, np.dtype], ...]:
    """The kind of call of each sample, with the dtype of its result."""
    kind = lambda s: Call(np.dtype(s.x.dtype), s.x.ndim, original.dtypes)
    return tuple((kind(s), np.dtype(s.y.dtype)) for s in samples)


def _compare_norm(original: Original) -> tuple[Rule, list[_Sample]]:
    (path,) = original.shapes
    samples = _samples(original, original.shapes[path][0], _NORM_SIZES)
    closest = np.inf
    numbers = sorted(a for a in {0.0, *original.scalars(samples[0].x)} if a >= 0)
    for offset, eps in itertools.product((0.0, 1.0), numbers):
        rule = NormRule(path, eps, offset)
        ratio, error = _excess(rule, original, samples)
        if ratio <= 1:
            rule = _with_casting(rule, original, samples)
            return _rule(rule, original, samples), samples
        closest = min(closest, error)
    raise Refused(f"its result differs from RMSNorm by {closest:.2g} of its size")


def _with_casting(rule: NormRule, original: Original, samples: list[_Sample]) -> NormRule:
    """The rule with the place of rounding that comes closest to the module.

    A module may round at other places than either. Then both distances are alike, and the rule
    stays as it is.
    """
    rules = [rule, dataclasses.replace(rule, casting="llama")]
    distances = np.zeros(2)
    for sample in samples:
        if jnp.finfo(sample.y.dtype).bits < 32:
            results = original.ours([*rules], sample.x, sample.y.dtype)
            distances += [np.mean(_errors(sample.y, y.astype(np.float64))) for y in results]
    return rules[1] if distances[1] < 0.75 * distances[0] else rules[0]


def _compare_mlp(
    original: Original, readings: list[tuple[int, MLPRule]]
) -> tuple[Rule, list[_Sample]]:
    closest, reasons = np.inf, []
    samples: dict[int, list[_Sample]] = {}
    for size, rule in readings:
        if size not in samples:
            samples[size] = []
            try:
                samples[size] = _samples(original, size, _MLP_SIZES)
            except Refused as e:
                reasons.append(e)
        found = samples[size]
        if not found:
            continue
        if original.has_checkpoint(found[0].x):
            rule = dataclasses.replace(rule, save="x")
        ratio, error = _excess(rule, original, found)
        if ratio <= 1:
            return _rule(rule, original, found), found
        closest = min(closest, error)
    if np.isinf(closest):
        # D may have two sizes, and the call fails for the wrong one.
        raise min(reasons, key=lambda reason: isinstance(reason, Failed))
    raise Refused(f"its result differs from a gated MLP with silu by {closest:.2g} of its size")
