"""The operations of `bench`: the inputs, implementations and limit of each."""

import dataclasses
import functools
import importlib
import math
import sys
from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

import pallas_kernels
from benchmarks import timing
from benchmarks.kernels import shapes
from benchmarks.kernels.formulas import (
    ADD_RMS_NORM,
    EPS,
    LAYER_NORM,
    RMS_NORM,
    SWIGLU,
    Arrays,
    Formula,
    as_tuple,
)
from benchmarks.kernels.shapes import Shape

type Direction = Literal["forward", "backward"]
# Returns outputs or gradients by name.
type Call = Callable[[], dict[str, Any]]


@dataclasses.dataclass(frozen=True)
class Contender:
    """An implementation in JAX: one column of a table.

    Attributes:
      name: Name of the column.
      formula: Formula that it computes.
      fn: Function of the formula's inputs.
    """

    name: str
    formula: Formula
    fn: Callable[..., Any]


@dataclasses.dataclass(frozen=True)
class Op:
    """An operation and how it is measured.

    Attributes:
      name: Name of the public function.
      shapes: Shapes that are measured unless the command line names others.
      inputs: Function that makes inputs and cotangents from a shape and a random key.
      passes: Arrays of the size of the input that it must at least read or write, by direction.
        Weights and the statistics of the rows are neglected.
      contenders: Implementations in JAX, ours first.
    """

    name: str
    shapes: tuple[Shape, ...]
    inputs: Callable[[Shape, jax.Array], Arrays]
    passes: dict[Direction, int]
    contenders: tuple[Contender, ...]

    def num_bytes(self, shape: Shape, direction: Direction) -> int:
        """Bytes of the passes, in 16 bits."""
        return self.passes[direction] * 2 * math.prod(shape)


# Running a contender in JAX


def prepare(
    contender: Contender,
    sets: list[Arrays],
    direction: Direction,
    *,
    kept: list[list[jax.Array]] | None = None,
    compile_program: Callable[[jax.stages.Lowered], jax.stages.Compiled] = (
        jax.stages.Lowered.compile
    ),
) -> list[Call]:
    """Compiles a JAX contender; returns a call for each set.

    Args:
      contender: Implementation to compile.
      sets: Sets of inputs and cotangents.
      direction: Direction to compile.
      kept: For the backward, the result of `keep` for this contender or for one that keeps the same
        arrays. None runs the forward to get them.
      compile_program: Function that compiles the lowered program.

    Raises:
      ValueError: `kept` has other shapes or dtypes than this contender keeps.
    """
    formula = contender.formula
    arguments: list[Any] = [[arrays[name] for name in formula.inputs] for arrays in sets]

    def backward(vjp, cotangents):
        gradients = dict(zip(formula.inputs, vjp(cotangents), strict=True))
        return {f"d{name}": gradients[name] for name in formula.gradients}

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
    compiled = compile_program(jax.jit(run).lower(*arguments[0]))
    return [functools.partial(compiled, *inputs) for inputs in arguments]


def keep(contender: Contender, sets: list[Arrays]) -> list[list[jax.Array]]:
    """Runs the forward on each set and returns what it keeps for the backward, as flat lists."""
    forward = jax.jit(functools.partial(_forward_keeping, contender))
    kept = []
    for arrays in sets:
        inputs = [arrays[name] for name in contender.formula.inputs]
        leaves = jax.tree.leaves(forward(*inputs)[1])
        # A program returns a copy of an input that it keeps. The input itself replaces the copy, so
        # that larger sets fit.
        kept.append([next((i for i in inputs if _equal(i, leaf)), leaf) for leaf in leaves])
    return kept


def _forward(contender, *inputs):
    return dict(zip(contender.formula.outputs, as_tuple(contender.fn(*inputs)), strict=True))


def _forward_keeping(contender, *inputs):
    # The second result is a pytree whose leaves are the kept arrays.
    return jax.vjp(functools.partial(_forward, contender), *inputs)


def _equal(a, b) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype and bool(jnp.array_equal(a, b))


def input_sets(inputs: Callable[[Shape, jax.Array], Arrays], shape: Shape) -> list[Arrays]:
    """Different sets of inputs: so many that the L2 cache holds none when its turn comes."""
    make = jax.jit(functools.partial(inputs, shape))
    first = make(jax.random.key(0))
    num_bytes = sum(array.nbytes for array in first.values())
    return [first] + [make(jax.random.key(1 + i)) for i in range(timing.rotation(num_bytes) - 1)]


# The limit


def copy(num_bytes: int) -> timing.Case:
    """A kernel that reads half of `num_bytes` and writes the other half."""
    size = num_bytes // 8
    sources = [
        jax.random.bits(jax.random.key(i), (size,), jnp.uint32)
        for i in range(timing.rotation(num_bytes))
    ]
    # `jnp.copy` would be a memcpy, which the timing does not count.
    kernel = jax.jit(lambda source: source ^ jnp.uint32(1))
    return timing.Case("copy", [functools.partial(kernel, source) for source in sources])


def compare_with_copy(
    copy: timing.Case, cases: Sequence[timing.Case], rounds: int
) -> tuple[dict[str, timing.Timing], timing.Timing]:
    """Times the cases and the copy in turns, and ends the program if the copy fails."""
    timings = timing.compare([copy, *cases], rounds=rounds)
    limit = timings.pop(copy.name)
    if limit.error is not None:
        sys.exit(f"the copy failed, so there is no limit: {limit.error}")
    return timings, limit


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


def _layer_norm_xla(x, weight, bias):
    x_f32 = x.astype(jnp.float32)
    mean = checkpoint_name(jnp.mean(x_f32, axis=-1, keepdims=True), "mean")
    centered = x_f32 - mean
    variance = jnp.mean(jnp.square(centered), axis=-1, keepdims=True)
    y = centered * checkpoint_name(jax.lax.rsqrt(variance + EPS), "rstd")
    return (y * weight.astype(jnp.float32) + bias.astype(jnp.float32)).astype(x.dtype)


def _tokamax_rms_norm(x, weight):
    tokamax = importlib.import_module("tokamax")
    # Its public function takes a kernel with options, but does not export it.
    module = importlib.import_module("tokamax._src.ops.normalization.api")
    # By default a forward without a backward overwrites `x`. XLA then copies `x` first, and the
    # timing does not count a memcpy.
    kernel = module.IMPLEMENTATIONS["triton"].replace(input_output_alias=False)
    return tokamax.layer_norm(
        x, weight, None, epsilon=EPS, subtract_mean=False, implementation=(kernel,)
    )


def _te_rms_norm(x, weight):
    layernorm = importlib.import_module("transformer_engine.jax.layernorm").layernorm
    return layernorm(x, weight, None, norm_type="rmsnorm", epsilon=EPS)


def _keeping_inputs(fn: Callable[..., Any]) -> Callable[..., Any]:
    """`fn` that keeps what a model under a remat policy keeps: no float32 copies of the inputs.

    `prevent_cse` is off: forward and backward are separate programs here, so there is no common
    subexpression to protect, and its barriers would hinder fusion.
    """
    policy = jax.checkpoint_policies.save_only_these_names("rstd", "mean", "residual")
    return jax.checkpoint(fn, policy=policy, prevent_cse=False)


def _contenders(formula: Formula, fn: Callable[..., Any], **options: Any) -> tuple[Contender, ...]:
    """Our kernel, plain JAX, and `default`, which passes `implementation=None`."""
    columns = []
    for name in ("mosaic_gpu", "reference", "default"):
        implementation = None if name == "default" else name
        bound = functools.partial(fn, implementation=implementation, **options)
        # A kernel's derivative rule says what it keeps. For XLA a remat policy says it.
        if name != "mosaic_gpu":
            bound = _keeping_inputs(bound)
        columns.append(Contender(name, formula, bound))
    return tuple(columns)


# A norm reads x and writes y; its backward reads x and dy and writes dx. With the addition the
# forward also reads the residual and writes the sum; the backward reads the sum instead of x, and
# the sum's cotangent as well.
_OPS = (
    Op(
        name="rms_norm",
        shapes=shapes.NORM,
        inputs=_norm_inputs,
        passes={"forward": 2, "backward": 3},
        contenders=(
            *_contenders(RMS_NORM, pallas_kernels.rms_norm, eps=EPS),
            Contender("LayerNorm (XLA)", LAYER_NORM, _keeping_inputs(_layer_norm_xla)),
        ),
    ),
    Op(
        name="add_rms_norm",
        shapes=shapes.NORM,
        inputs=functools.partial(_norm_inputs, add=True),
        passes={"forward": 4, "backward": 4},
        contenders=_contenders(ADD_RMS_NORM, pallas_kernels.add_rms_norm, eps=EPS),
    ),
    Op(
        name="swiglu",
        shapes=shapes.SWIGLU,
        inputs=_swiglu_inputs,
        passes={"forward": 3, "backward": 5},
        contenders=_contenders(SWIGLU, pallas_kernels.swiglu),
    ),
)
OPS = {op.name: op for op in _OPS}

# Peers that run in JAX, by operation and package: `bench` adds them with `--peers`.
JAX_PEERS: dict[str, dict[str, Contender]] = {
    "rms_norm": {
        "tokamax": Contender("tokamax", RMS_NORM, _tokamax_rms_norm),
        "transformer-engine": Contender("TransformerEngine", RMS_NORM, _te_rms_norm),
    }
}
