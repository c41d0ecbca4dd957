"""The sharded norm on meshes of CPU devices, and comparisons with one device."""

import functools
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from pallas_kernels import add_rms_norm, sharded_add_rms_norm
from support.norm_formulas import add_formula
from support.numerics import assert_as_accurate, quick_jit, value_and_grads
from support.pairwise import pairwise

BF16, F16, F32 = jnp.bfloat16, jnp.float16, jnp.float32
D = 64  # the least that the kernel takes
NAMES = ("y", "residual_out", "dpartial", "dresidual", "dweight")
GATHER, DTYPES = (True, False), (BF16, F32)
each_gather = pytest.mark.parametrize("gather", GATHER, ids=["gather", "shard"])

IMPLEMENTATIONS = ("reference", "xla", "xla_kernel")
NORMS = ("xla", "xla_kernel")
each_implementation = pytest.mark.parametrize("implementation", IMPLEMENTATIONS, indirect=True)
each_norm = pytest.mark.parametrize("implementation", NORMS, indirect=True)


def in_pairs(names, *axes):
    """A test of a cross of parameters, of which `implementation` is the first."""
    return _of_implementations(names, pairwise(*axes))


def some_of(names, *axes, normal):
    """A test of a cross of parameters, `implementation` the first. The normal run has `normal`."""
    cases = [
        pytest.param(*case, marks=() if case in normal else pytest.mark.full)
        for case in itertools.product(*axes)
    ]
    return _of_implementations(names, cases)


def _of_implementations(names, cases):
    ids = lambda value: value if isinstance(value, str) else getattr(value, "__name__", str(value))
    return pytest.mark.parametrize(
        f"implementation, {names}", cases, indirect=["implementation"], ids=ids
    )


def mesh_of(**axes: int) -> jax.sharding.Mesh:
    return jax.make_mesh(
        tuple(axes.values()),
        tuple(axes),
        axis_types=(AxisType.Auto,) * len(axes),
        devices=jax.devices()[: math.prod(axes.values())],
    )


def make_args(n, shape, dtypes=(F32, F32, F32), *, gather=True):
    """`(partials, residual, weight)` and cotangents of `(y, residual_out)`, as numpy arrays.

    Axis 0 of the partials counts the devices, as does axis 0 of the cotangent of a gathered `y`.
    """
    rng = np.random.default_rng(0)
    normal = lambda *shape: rng.normal(size=shape)
    args = normal(n, *shape), normal(*shape), 1 + normal(shape[-1]) / 8
    args = tuple(a.astype(dtype) for a, dtype in zip(args, dtypes, strict=True))
    dy = normal(n, *shape) if gather else normal(*shape)
    return args, (dy.astype(dtypes[0]), normal(*shape).astype(dtypes[0]))


def on_mesh(mesh, leading=(), *, gather=True, fn=sharded_add_rms_norm, **options):
    """A function of global arrays, as `make_args` makes them, that runs `fn` on each device.

    Args:
      mesh: Mesh with an axis `tensor`.
      leading: Mesh axis over which each axis in front of the tokens is split, or None.
      gather: Whether `y` has a copy from each device.
      fn: Function that runs on each device.
      **options: Options of `fn`.
    """
    parts, tokens = P("tensor", *leading), P(*leading, "tensor")

    def local(partials, residual, weight):
        y, residual_out = fn(
            partials[0], residual, weight, axis_name="tensor", gather=gather, **options
        )
        return y[None] if gather else y, residual_out

    return jax.shard_map(
        local,
        mesh=mesh,
        in_specs=(parts, tokens, P()),
        out_specs=(parts if gather else tokens, tokens),
        check_vma=False,
    )


def graded(fn):
    return quick_jit(lambda args, cotangents: value_and_grads(fn, args, cotangents))


@functools.cache
def on_one_device(**options):
    """The norm on one device of each token shard (axis 0) by itself, with one weight."""
    norm = functools.partial(add_rms_norm, implementation="reference", **options)
    graded = lambda x, residual, weight, *dy: value_and_grads(norm, (x, residual, weight), dy)
    return quick_jit(jax.vmap(graded, in_axes=(0, 0, None, 0, 0)))


def check(mesh, shape, dtypes, leading=None, *, gather=True, implementation, **options):
    """Compares the errors with those of `add_rms_norm` on one device."""
    n, leading = mesh.shape["tensor"], leading or (None,) * (len(shape) - 2)
    args, cotangents = make_args(n, shape, dtypes, gather=gather)
    run = on_mesh(mesh, leading, gather=gather, implementation=implementation, **options)
    compare(
        graded(run)(args, cotangents),
        args,
        cotangents,
        num_parts=mesh.shape.get(leading[0], 1) if leading else 1,
        gather=gather,
        # In the reference each device rounds the gradients from its share of dy; their sum is
        # rounded, too.
        slack=1.2 * math.sqrt(2) if implementation == "reference" else 1.2,
        **options,
    )


def sum_over_devices(a):
    """The sum as XLA for CPUs makes it: of float16 in float16, of bfloat16 in float32."""
    a = np.asarray(a)
    compute = F32 if a.dtype == BF16 else a.dtype
    return functools.reduce(np.add, a.astype(compute)).astype(a.dtype)


def compare(results, args, cotangents, *, num_parts=1, gather=True, slack=1.2, **options):
    """Compares results of n devices for each of `num_parts` parts of axis 0 of the tokens."""
    (partials, residual, weight), (dy, dresidual_out) = args, cotangents
    y, residual_out, dpartials, dresidual, dweight = map(np.asarray, results)
    dtype, n, dy_low = partials.dtype, len(partials), dy
    assert {y.dtype, residual_out.dtype, dpartials.dtype} == {dtype}
    assert (dresidual.dtype, dweight.dtype) == (residual.dtype, weight.dtype)
    assert dpartials.shape == partials.shape and y.shape == dy.shape
    if gather:
        np.testing.assert_array_equal(y, np.broadcast_to(y[:1], y.shape))
        y, dy_low, dy = y[0], sum_over_devices(dy), np.sum(dy, axis=0, dtype=np.float64)
    np.testing.assert_array_equal(dpartials, np.broadcast_to(dpartials[:1], dpartials.shape))

    def shards(a):
        parts = np.split(a, num_parts)
        return np.stack([shard for part in parts for shard in np.split(part, n, axis=-2)])

    got = [*map(shards, (y, residual_out, dpartials[0], dresidual)), dweight]
    # The sums over devices are rounded. The rest is the program of one device.
    low = on_one_device(**options)(
        *map(shards, (sum_over_devices(partials), residual)),
        weight,
        *map(shards, (dy_low, dresidual_out)),
    )
    low[-1] = sum_over_devices(low[-1])
    numbers = {k: v for k, v in options.items() if k in ("eps", "weight_offset")}
    exact = add_formula(
        (None, None, weight), (shards(dy), shards(dresidual_out)), got[1], **numbers
    )
    exact[1] = shards(np.sum(partials, axis=0, dtype=np.float64) + residual.astype(np.float64))
    assert_as_accurate(got, low, exact, names=NAMES, slack=slack)
