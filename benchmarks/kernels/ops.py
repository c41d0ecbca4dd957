"""What is measured of each operation: inputs, formula, implementations and the limit."""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

import pallas_kernels
from benchmarks import timing
from benchmarks.kernels import shapes
from benchmarks.kernels.shapes import Shape

EPS = 1e-6

type Arrays = dict[str, jax.Array]
type Direction = Literal["forward", "backward", "forward+backward"]


@dataclasses.dataclass(frozen=True)
class Formula:
    """The mathematics that several implementations share, to check them against.

    The cotangent of an output `y` and the gradient of an input `x` are called `dy` and `dx`.

    Attributes:
      fn: in float32, of the inputs; returns one array, or a tuple.
      inputs: names of its arguments.
      outputs: names of its results.
      gradients: the inputs whose gradients a backward in JAX returns. Not the residual's in the
        addition: it is the same array as that of `x`, and XLA copies what a program returns twice.
    """

    fn: Callable[..., Any]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    gradients: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Contender:
    """One column of a table: an implementation in JAX or PyTorch.

    Attributes:
      name: of the column.
      formula: what it computes.
      fn: of the formula's inputs.
    """

    name: str
    formula: Formula
    fn: Callable[..., Any]


@dataclasses.dataclass(frozen=True)
class Prepared:
    """A contender that is ready to run in one direction.

    Attributes:
      calls: one per set of inputs; they return outputs or gradients by name.
      num_bytes: the memory that a call takes beyond its inputs, at its peak.
    """

    calls: list[Callable[[], dict[str, Any]]]
    num_bytes: Callable[[], int]


@dataclasses.dataclass(frozen=True)
class Limit:
    """What the card does at most, measured in the same rounds.

    Attributes:
      name: what runs.
      amount: bytes, or floating-point operations, of a call.
      unit: of the rate, such as GB/s.
      scale: of that unit, such as 1e9.
      calls: to time.
    """

    name: str
    amount: float
    unit: str
    scale: float
    calls: list[Callable[[], Any]]


@dataclasses.dataclass(frozen=True)
class Op:
    """An operation and how it is measured.

    Attributes:
      name: of the public function.
      shapes: that are measured if none are named.
      inputs: a set of inputs and cotangents from a shape and a random key.
      limit: the limit from a shape and a direction.
      contenders: the implementations in JAX, ours first.
      directions: what is timed alone.
    """

    name: str
    shapes: tuple[Shape, ...]
    inputs: Callable[[Shape, jax.Array], Arrays]
    limit: Callable[[Shape, Direction], Limit]
    contenders: tuple[Contender, ...]
    directions: tuple[Direction, ...]


# Formulas


def _rms_norm(x, weight):
    return x * jax.lax.rsqrt(jnp.mean(jnp.square(x), axis=-1, keepdims=True) + EPS) * weight


def _add_rms_norm(x, residual, weight):
    # Rounded as the residual stream is stored; the gradient passes through.
    total = x + residual
    stored = total + jax.lax.stop_gradient(total.astype(jnp.bfloat16).astype(jnp.float32) - total)
    return _rms_norm(stored, weight), stored


def _layer_norm(x, weight, bias):
    centered = x - jnp.mean(x, axis=-1, keepdims=True)
    variance = jnp.mean(jnp.square(centered), axis=-1, keepdims=True)
    return centered * jax.lax.rsqrt(variance + EPS) * weight + bias


def _swiglu(gate, up):
    return jax.nn.silu(gate) * up


def _linear_cross_entropy(x, weight, labels):
    logits = x @ weight.T
    picked = jnp.take_along_axis(logits, labels[:, None], axis=-1)[:, 0]
    return jnp.mean(jax.nn.logsumexp(logits, axis=-1) - picked)


RMS_NORM = Formula(_rms_norm, ("x", "weight"), ("y",), ("x", "weight"))
ADD_RMS_NORM = Formula(
    _add_rms_norm, ("x", "residual", "weight"), ("y", "residual_out"), ("x", "weight")
)
LAYER_NORM = Formula(_layer_norm, ("x", "weight", "bias"), ("y",), ("x", "weight", "bias"))
SWIGLU = Formula(_swiglu, ("gate", "up"), ("y",), ("gate", "up"))
LINEAR_CROSS_ENTROPY = Formula(
    _linear_cross_entropy, ("x", "weight", "labels"), ("loss",), ("x", "weight")
)


def exact(formula: Formula, arrays: Mapping[str, jax.Array]) -> Arrays:
    """Every output and every gradient by the formula in float32, by name."""
    inputs = {name: arrays[name] for name in formula.inputs}
    floating = {k: v for k, v in inputs.items() if jnp.issubdtype(v.dtype, jnp.floating)}
    cotangents = [arrays[f"d{k}"] for k in formula.outputs if f"d{k}" in arrays]

    @jax.jit
    def run(floating, inputs, cotangents):
        floating, cotangents = jax.tree.map(lambda a: a.astype(jnp.float32), (floating, cotangents))

        def outputs_of(floating):
            merged = inputs | floating
            return _as_tuple(formula.fn(*(merged[name] for name in formula.inputs)))

        outputs, vjp = jax.vjp(outputs_of, floating)
        # A loss has no cotangent among the arrays: it is where the backward starts.
        (gradients,) = vjp(tuple(cotangents) or tuple(map(jnp.ones_like, outputs)))
        named = {f"d{name}": gradient for name, gradient in gradients.items()}
        return dict(zip(formula.outputs, outputs, strict=True)) | named

    return run(floating, inputs, cotangents)


def wrong_result(got: Mapping[str, jax.Array], expected: Mapping[str, jax.Array]) -> str | None:
    """Why `got` is not `expected` within a relative Frobenius error of 2 %, or None."""
    for name, array in got.items():
        error = float(_relative_error(array, expected[name]))
        if not error < 2e-2:  # also NaN
            return f"wrong result: relative error {error:.1e} of {name}"
    return None


@jax.jit
def _relative_error(got, expected):
    got, expected = got.astype(jnp.float32), expected.astype(jnp.float32)
    return jnp.linalg.norm((got - expected).ravel()) / jnp.linalg.norm(expected.ravel())


def _as_tuple(outputs) -> tuple[jax.Array, ...]:
    return tuple(outputs) if isinstance(outputs, tuple | list) else (outputs,)


# Running a contender in JAX


def prepare(
    contender: Contender,
    sets: list[Arrays],
    direction: Direction,
    *,
    kept: list[list[jax.Array]] | None = None,
) -> Prepared:
    """Compiles a JAX contender.

    Args:
      contender: what to compile.
      sets: the inputs.
      direction: what to compile of it.
      kept: for the backward, from `keep`, of this contender or of one that keeps the same; computed
        if None.
    """
    formula = contender.formula
    arguments: list[Any] = [[arrays[name] for name in formula.inputs] for arrays in sets]

    def backward(vjp, cotangents):
        gradients = dict(zip(formula.inputs, vjp(cotangents), strict=True))
        return {f"d{name}": gradients[name] for name in formula.gradients}

    def both(*inputs):
        outputs, vjp = _forward_keeping(contender, *inputs)
        return outputs | backward(vjp, {name: jnp.ones_like(a) for name, a in outputs.items()})

    match direction:
        case "forward":
            run = functools.partial(_forward, contender)
        case "backward":
            run = backward
            kept = keep(contender, sets) if kept is None else kept
            of_inputs = functools.partial(_forward_keeping, contender)
            leaves, tree = jax.tree.flatten(jax.eval_shape(of_inputs, *arguments[0])[1])
            expected, given = (
                [(leaf.shape, leaf.dtype) for leaf in some] for some in (leaves, kept[0])
            )
            if expected != given:
                raise ValueError(f"the backward takes {expected}, the forward kept {given}")
            vjps = [jax.tree.unflatten(tree, leaves) for leaves in kept]
            cotangents = [{name: arrays[f"d{name}"] for name in formula.outputs} for arrays in sets]
            arguments = list(zip(vjps, cotangents, strict=True))
        case "forward+backward":
            run = both

    compiled = jax.jit(run).lower(*arguments[0]).compile()

    def num_bytes() -> int:
        analysis = compiled.memory_analysis()
        assert analysis is not None
        return analysis.temp_size_in_bytes + analysis.output_size_in_bytes

    return Prepared([functools.partial(compiled, *inputs) for inputs in arguments], num_bytes)


def keep(contender: Contender, sets: list[Arrays]) -> list[list[jax.Array]]:
    """Runs the forward on each set; what it keeps for the backward, as a flat list of arrays."""
    forward = jax.jit(functools.partial(_forward_keeping, contender))
    kept = []
    for arrays in sets:
        inputs = [arrays[name] for name in contender.formula.inputs]
        leaves = jax.tree.leaves(forward(*inputs)[1])
        # A program returns a copy of an input that it keeps: without copies more of them fit.
        kept.append([next((i for i in inputs if _equal(i, leaf)), leaf) for leaf in leaves])
    return kept


def _forward(contender, *inputs):
    return dict(zip(contender.formula.outputs, _as_tuple(contender.fn(*inputs)), strict=True))


def _forward_keeping(contender, *inputs):
    # The second of the results is a pytree of what is kept.
    return jax.vjp(functools.partial(_forward, contender), *inputs)


def _equal(a, b) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype and bool(jnp.array_equal(a, b))


def input_sets(inputs: Callable[[Shape, jax.Array], Arrays], shape: Shape) -> list[Arrays]:
    """Different inputs, as many as it takes to find none of them in the cache."""
    make = jax.jit(functools.partial(inputs, shape))
    first = make(jax.random.key(0))
    num_bytes = sum(array.nbytes for array in first.values())
    return [first] + [make(jax.random.key(1 + i)) for i in range(timing.rotation(num_bytes) - 1)]


# The limits


def copy(num_bytes: int) -> Limit:
    """A kernel that reads half of `num_bytes` and writes the other half."""
    size = num_bytes // 8
    sources = [
        jax.random.bits(jax.random.key(i), (size,), jnp.uint32)
        for i in range(timing.rotation(num_bytes))
    ]
    # Not `jnp.copy`: that is a memcpy, which the timing does not count.
    kernel = jax.jit(lambda source: source ^ jnp.uint32(1))
    calls = [functools.partial(kernel, source) for source in sources]
    return Limit("copy", num_bytes, "GB/s", 1e9, calls)


def copy_of_passes(op: str) -> Callable[[Shape, Direction], Limit]:
    """The copy of as many bytes as an operation moves, in bfloat16."""
    return lambda shape, direction: copy(PASSES[op][direction] * 2 * math.prod(shape))


def _three_gemms(shape: Shape, direction: Direction) -> Limit:
    """Logits and both gradients, 2048 tokens at a time: all logits need not fit."""
    del direction
    tokens, hidden_size, vocab_size = shape
    part = math.gcd(tokens, 2048)
    keys = jax.random.split(jax.random.key(0), 3)
    x = jax.random.normal(keys[0], (part, hidden_size), jnp.bfloat16)
    weight = jax.random.normal(keys[1], (vocab_size, hidden_size), jnp.bfloat16)
    dlogits = jax.random.normal(keys[2], (part, vocab_size), jnp.bfloat16)
    gemms = [
        functools.partial(jax.jit(lambda a, b: a @ b.T), x, weight),
        functools.partial(jax.jit(lambda a, b: a @ b), dlogits, weight),
        functools.partial(jax.jit(lambda a, b: a.T @ b), dlogits, x),
    ]

    def call():
        return [[gemm() for gemm in gemms] for _ in range(tokens // part)][-1]

    return Limit("three GEMMs", 6.0 * math.prod(shape), "TFLOP/s", 1e12, [call])


# The operations


def _norm_inputs(shape: Shape, key: jax.Array, *, add: bool = False) -> Arrays:
    keys = iter(jax.random.split(key, 6))
    names = ("x", "dy", "residual", "dresidual_out") if add else ("x", "dy")
    arrays = {name: jax.random.normal(next(keys), shape, jnp.bfloat16) for name in names}
    vector = functools.partial(jax.random.normal, shape=shape[-1:], dtype=jnp.bfloat16)
    return arrays | {"weight": 1 + vector(next(keys)) / 8, "bias": vector(next(keys)) / 8}


def _swiglu_inputs(shape: Shape, key: jax.Array) -> Arrays:
    keys = jax.random.split(key, 3)
    names = ("gate", "up", "dy")
    return {
        name: jax.random.normal(key, shape, jnp.bfloat16)
        for name, key in zip(names, keys, strict=True)
    }


def _loss_inputs(shape: Shape, key: jax.Array) -> Arrays:
    tokens, hidden_size, vocab_size = shape
    keys = jax.random.split(key, 3)
    weight = jax.random.normal(keys[1], (vocab_size, hidden_size), jnp.bfloat16)
    return {
        "x": jax.random.normal(keys[0], (tokens, hidden_size), jnp.bfloat16),
        # Logits of about unit variance, as of a model early in training.
        "weight": weight / hidden_size**0.5,
        "labels": jax.random.randint(keys[2], (tokens,), 0, vocab_size),
    }


def _layer_norm_xla(x, weight, bias):
    x_f32 = x.astype(jnp.float32)
    mean = checkpoint_name(jnp.mean(x_f32, axis=-1, keepdims=True), "mean")
    centered = x_f32 - mean
    variance = jnp.mean(jnp.square(centered), axis=-1, keepdims=True)
    y = centered * checkpoint_name(jax.lax.rsqrt(variance + EPS), "rstd")
    return (y * weight.astype(jnp.float32) + bias.astype(jnp.float32)).astype(x.dtype)


def _keeping_inputs(fn: Callable[..., Any]) -> Callable[..., Any]:
    """`fn` with the residuals of a model under a remat policy: no float32 copies of the inputs.

    `prevent_cse` is off because forward and backward are compiled apart, so there is nothing to
    eliminate, and the barriers that it puts up would hinder fusion.
    """
    policy = jax.checkpoint_policies.save_only_these_names("rstd", "mean", "residual")
    return jax.checkpoint(fn, policy=policy, prevent_cse=False)


def _contenders(
    formula: Formula, fn: Callable[..., Any], implementations: tuple[str, ...], **options: Any
) -> tuple[Contender, ...]:
    """The named implementations, and `default`, which is what None picks."""
    columns = []
    for name in (*implementations, "default"):
        implementation = None if name == "default" else name
        bound = functools.partial(fn, implementation=implementation, **options)
        # A kernel's own rule says what it keeps; what XLA keeps is left to a policy.
        if name in ("reference", "default"):
            bound = _keeping_inputs(bound)
        columns.append(Contender(name, formula, bound))
    return tuple(columns)


_KERNEL_AND_XLA = ("mosaic_gpu", "reference")

# How often an operation must pass over an array of the size of its input; weights and statistics of
# the rows are neglected. A norm reads x and writes y, and backward reads x and dy and writes dx.
# With the addition it also reads the residual and writes the sum, and backward reads the sum
# instead of x, and the sum's cotangent.
PASSES: dict[str, dict[Direction, int]] = {
    "rms_norm": {"forward": 2, "backward": 3},
    "add_rms_norm": {"forward": 4, "backward": 4},
    "swiglu": {"forward": 3, "backward": 5},
}

OPS: dict[str, Op] = {
    op.name: op
    for op in (
        Op(
            name="rms_norm",
            shapes=shapes.NORM,
            inputs=_norm_inputs,
            limit=copy_of_passes("rms_norm"),
            contenders=(
                *_contenders(RMS_NORM, pallas_kernels.rms_norm, _KERNEL_AND_XLA, eps=EPS),
                Contender("LayerNorm (XLA)", LAYER_NORM, _keeping_inputs(_layer_norm_xla)),
            ),
            directions=("forward", "backward"),
        ),
        Op(
            name="add_rms_norm",
            shapes=shapes.NORM,
            inputs=functools.partial(_norm_inputs, add=True),
            limit=copy_of_passes("add_rms_norm"),
            contenders=_contenders(
                ADD_RMS_NORM, pallas_kernels.add_rms_norm, _KERNEL_AND_XLA, eps=EPS
            ),
            directions=("forward", "backward"),
        ),
        Op(
            name="swiglu",
            shapes=shapes.SWIGLU,
            inputs=_swiglu_inputs,
            limit=copy_of_passes("swiglu"),
            contenders=_contenders(SWIGLU, pallas_kernels.swiglu, _KERNEL_AND_XLA),
            directions=("forward", "backward"),
        ),
        Op(
            name="linear_cross_entropy",
            shapes=shapes.LOSS,
            inputs=_loss_inputs,
            limit=_three_gemms,
            contenders=tuple(
                Contender(
                    name,
                    LINEAR_CROSS_ENTROPY,
                    functools.partial(pallas_kernels.linear_cross_entropy, implementation=name),
                )
                for name in ("mosaic_gpu", "xla")
            ),
            directions=("forward+backward",),
        ),
    )
}
