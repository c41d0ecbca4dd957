"""Compares a module with the formula of an operation, on random numbers.

An error is the root mean square over one token, relative to the root mean square of the exact
result. The module may err by a few roundings of the dtype of its result, or by twice the error of
our operation in the same dtypes.
"""

import dataclasses
from concurrent.futures import ThreadPoolExecutor

import jax.numpy as jnp
import numpy as np
from flax import nnx

from pallas_kernels.patching import candidates
from pallas_kernels.patching.original import Failed, Original, Refused, plain_numbers
from pallas_kernels.patching.rules import MLPRule, NormRule, Rule

# One rounding to nearest errs by 0.29 epsilons in the root mean square.
_NORM_EPSILONS = 2.0
_MLP_EPSILONS = 4.0
# Our operation may excuse an error of up to this multiple of the allowed epsilons, because long
# float32 sums err by more than a few roundings. It excuses no larger error.
_MOST = 8.0
_DTYPES = (np.dtype(np.float32), np.dtype(jnp.bfloat16))
# Sizes of the tokens. Small ones show epsilon, large ones a bound of the activations.
_NORM_SIZES = (1e-5, 1e-3, 0.03, 1.0, 1.0, 30.0)
_MLP_SIZES = (0.03, 0.3, 1.0, 1.0, 3.0, 30.0)
_USUAL_EPSILONS = (1e-6, 1e-5, 1e-8, 1e-7, 1e-12, 0.0)


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
            # A thread of its own has no mesh in context, and nothing is traced in it.
            with ThreadPoolExecutor(1) as thread:
                return thread.submit(_compare, module, axis, readings).result()
        except Refused:
            # Any matrix could be many stacked norms. Only a success says something.
            if axis is None or readings:
                raise
    if candidates.looks_like_a_norm(shapes):
        raise Refused(f"an RMSNorm has one vector, and this has {candidates.describe(shapes)}")
    if candidates.looks_like_an_mlp(shapes):
        raise Refused(f"a gated MLP has three matrices, and this has {candidates.describe(shapes)}")
    return None


def _compare(module: nnx.Module, axis: int | None, readings: list[candidates.Matrices]) -> Rule:
    with plain_numbers():
        original = Original(module, axis)
        if readings:
            return _compare_mlp(original, readings)
        return _compare_norm(original, module)


@dataclasses.dataclass(frozen=True)
class _Sample:
    """Inputs of one dtype, and the results of the module."""

    x: np.ndarray
    y: np.ndarray


def _samples(original: Original, size: int, scales: tuple[float, ...]) -> list[_Sample]:
    """Results for float32 and bfloat16, of those that the module takes.

    Raises:
      Refused: The module takes neither.
    """
    rng = np.random.default_rng(1)
    x = rng.standard_normal((len(scales), size)) * np.array(scales)[:, None]
    x = x.reshape(2, len(scales) // 2, size)
    found, reasons = [], []
    for dtype in _DTYPES:
        try:
            found.append(_Sample(x.astype(dtype), original.result(x.astype(dtype))))
        except Refused as e:
            reasons.append(e)
    if not found:
        raise reasons[0]
    return found


def _errors(y: np.ndarray, exact: np.ndarray) -> np.ndarray:
    """The relative error of each token; infinite where the result is not finite."""
    rms = lambda a: np.sqrt(np.mean(np.square(a), axis=-1))
    with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
        errors = rms(y.astype(np.float64) - exact) / rms(exact)
    return np.where(np.isfinite(errors), errors, np.inf)


def _excess(
    rule: NormRule | MLPRule, original: Original, samples: list[_Sample], epsilons: float
) -> tuple[float, float]:
    """The largest ratio of an error to the allowed one, and the largest error.

    Args:
      rule: Operation and arguments to compare with.
      original: Module.
      samples: Results of the module.
      epsilons: Error that is always allowed, in epsilons of the dtype of the result.
    """
    ratio = error = 0.0
    for sample in samples:
        exact = rule.exact(original.arrays, sample.x.astype(np.float64))
        errors = _errors(sample.y, exact)
        always = epsilons * float(jnp.finfo(sample.y.dtype).eps)
        allowed = np.full_like(errors, always)
        if always < np.max(errors) <= _MOST * always:
            (ours,) = original.ours([rule], sample.x, sample.y.dtype)
            allowed = np.maximum(allowed, 2 * _errors(ours, exact))
        ratio = max(ratio, float(np.max(errors / allowed)))
        error = max(error, float(np.max(errors)))
    return ratio, error


def _rule(run: NormRule | MLPRule, original: Original, samples: list[_Sample]) -> Rule:
    return Rule(
        run=run,
        dtypes=tuple((np.dtype(s.x.dtype), np.dtype(s.y.dtype)) for s in samples),
        ranks=original.ranks,
        ignored=original.ignored(samples[0].x),
    )


def _compare_norm(original: Original, module: nnx.Module) -> Rule:
    (path,) = original.arrays
    samples = _samples(original, len(original.arrays[path]), _NORM_SIZES)
    closest = np.inf
    for offset in (0.0, 1.0):
        for eps in _epsilons(module, original.arrays[path] + offset, samples[0]):
            rule = NormRule(path, eps, offset)
            ratio, error = _excess(rule, original, samples, _NORM_EPSILONS)
            if ratio <= 1:
                return _rule(_with_casting(rule, original, samples), original, samples)
            closest = min(closest, error)
    raise Refused(f"its result differs from RMSNorm by {closest:.2g} of its size")


def _epsilons(module: nnx.Module, scale: np.ndarray, sample: _Sample) -> list[float]:
    """Numbers that may be the epsilon: attributes, what the result says, and usual ones."""
    attributes = [v for v in vars(module).values() if isinstance(v, float) and 0 <= v < 0.1]
    x, y = (a.reshape(-1, a.shape[-1])[0].astype(np.float64) for a in (sample.x, sample.y))
    rstd = np.sum(y * x * scale) / np.sum(np.square(x * scale))
    solved = 1 / rstd**2 - np.mean(np.square(x)) if rstd > 0 else 0.0
    solved = [float(f"{solved:.1e}")] if 0 < solved < 0.1 else []
    return list(dict.fromkeys([*attributes, *solved, *_USUAL_EPSILONS]))


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


def _compare_mlp(original: Original, readings: list[candidates.Matrices]) -> Rule:
    closest, reasons = np.inf, []
    samples: dict[int, list[_Sample]] = {}
    for reading in readings:
        if reading.size not in samples:
            samples[reading.size] = []
            try:
                samples[reading.size] = _samples(original, reading.size, _MLP_SIZES)
            except Refused as e:
                reasons.append(e)
        if not samples[reading.size]:
            continue
        save = "x" if original.has_checkpoint(samples[reading.size][0].x) else "gate_up"
        rule = MLPRule(reading.gate, reading.up, reading.down, save)
        ratio, error = _excess(rule, original, samples[reading.size], _MLP_EPSILONS)
        if ratio <= 1:
            return _rule(rule, original, samples[reading.size])
        closest = min(closest, error)
    if np.isinf(closest):
        # D may have two sizes, and the call fails for the wrong one.
        raise min(reasons, key=lambda reason: isinstance(reason, Failed))
    raise Refused(f"its result differs from a gated MLP with silu by {closest:.2g} of its size")
