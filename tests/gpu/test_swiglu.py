"""The elementwise SwiGLU kernels on a GPU, at real sizes."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import swiglu
from pallas_kernels.mlp import config as swiglu_config
from support.numerics import assert_as_accurate, value_and_grads
from support.on_gpu import as_float64, graded, large, same_bits
from support.swiglu_formulas import formula as swiglu_formula

pytestmark = pytest.mark.gpu

BF16, F16, F32 = jnp.bfloat16, jnp.float16, jnp.float32
swiglu_kernel = functools.partial(swiglu, implementation="mosaic_gpu")
swiglu_reference = functools.partial(swiglu, implementation="reference")
SWIGLU_NAMES = ("y", "dgate", "dup")
each_swiglu_shape = pytest.mark.parametrize(
    "shape, dtype",
    [
        ((16384, 14336), BF16),
        ((16384, 8192), BF16),
        ((4096, 14336), F32),
        ((8191, 11008), F16),  # no tile divides it
        ((1009, 1001), BF16),  # no access of 16 bytes does
        ((7, 143), BF16),
        ((3, 5), F32),
    ],
    ids=str,
)


def swiglu_args(shape, dtype):
    """`(gate, up)` and the cotangent of the product."""
    keys = jax.random.split(jax.random.key(0), 3)
    gate, up, dy = (2 * jax.random.normal(key, shape, dtype) for key in keys)
    return (gate, up), dy


@each_swiglu_shape
def test_swiglu_at_real_sizes(shape, dtype):
    args, dy = swiglu_args(shape, dtype)
    got = graded(swiglu_kernel)(args, dy)
    low_precision = graded(swiglu_reference)(args, dy)
    # Some rows are compared with float64, all rows with XLA.
    part = lambda a: a[np.r_[: a.shape[0] : 61, a.shape[0] - 1]]
    gate, up = args
    exact = swiglu_formula(part(gate), part(up), part(dy))
    some, some_low_precision = (as_float64([part(a) for a in t]) for t in (got, low_precision))
    assert_as_accurate(some, some_low_precision, exact, names=SWIGLU_NAMES)
    for name, a, b in zip(SWIGLU_NAMES, got, low_precision, strict=True):
        # Before rounding, the two differ in the last bits of float32. Where a product of a few
        # hundred meets a derivative of silu near 0, they differ by more than the last bits.
        a, b = a.astype(F32), b.astype(F32)
        distance = jnp.abs(a - b) / (1 + jnp.abs(b))
        assert float(jnp.max(distance)) <= max(2 * float(jnp.finfo(dtype).eps), 1e-4), name


@each_swiglu_shape
def test_repeated_swiglu_has_the_same_bits(shape, dtype):
    args, dy = swiglu_args(shape, dtype)
    run = graded(swiglu_kernel)
    first = run(args, dy)
    for _ in range(20):
        assert np.all(same_bits(run(args, dy), first))


@pytest.mark.parametrize("dtype", [BF16, F32], ids=jnp.dtype)
def test_all_launch_parameters_give_the_same_swiglu(dtype):
    args, dy = swiglu_args((1001, 2880), dtype)
    want = graded(swiglu_kernel)(args, dy)
    for config in (
        *swiglu_config.forward_candidates(dtype),
        *swiglu_config.backward_candidates(dtype),
    ):
        chex.assert_trees_all_equal(graded(swiglu_kernel, config=config)(args, dy), want)


# Tiles divide the first width; the second is padded.
@large
@pytest.mark.parametrize("width", [1024, 1025])
def test_swiglu_of_more_elements_than_int32_can_count(width):
    # The rows repeat, so that every row can be compared with one of the first period.
    num_tokens, period = 2**21 + 4097, 4097
    (gate_rows, up_rows), dy_rows = swiglu_args((period, width), BF16)
    num_periods, num_left = divmod(num_tokens, period)
    repeat = jax.jit(lambda a: jnp.concatenate([jnp.tile(a, (num_periods, 1)), a[:num_left]]))
    gate, up = repeat(gate_rows), repeat(up_rows)
    assert gate.size > 2**31
    pairs = [(jax.jit(swiglu_kernel)(gate, up), jax.jit(swiglu_kernel)(gate_rows, up_rows))]
    if width == 1024:
        backward = jax.jit(lambda *args: jax.vjp(swiglu_kernel, *args[:2])[1](args[2]))
        of_all = backward(gate, up, repeat(dy_rows))
        pairs += zip(of_all, backward(gate_rows, up_rows, dy_rows), strict=True)
    for got, want in pairs:
        for start in (0, (num_periods // 2) * period, (num_periods - 1) * period):
            np.testing.assert_array_equal(got[start : start + period], want)
        np.testing.assert_array_equal(got[num_tokens - num_left :], want[:num_left])


def test_swiglu_of_finite_numbers_is_no_nan():
    for dtype in (BF16, F16, F32):
        values = jnp.array([0, 1, 10, 89, 103, 1e4, float(jnp.finfo(dtype).max)], F32)
        values = jnp.concatenate([values, -values]).astype(dtype)
        gate, up, dy = (a.ravel() for a in jnp.meshgrid(values, values, values))
        got = graded(swiglu_kernel)((gate, up), dy)
        assert not any(bool(jnp.any(jnp.isnan(a))) for a in got)


def test_swiglu_under_transformations():
    # The arrays have an odd number of elements, so some in a batch start off 16-byte boundaries.
    (gate, up), dy = swiglu_args((5, 33, 1001), BF16)
    both = lambda fn: jax.jit(jax.vmap(lambda g, u, dy: value_and_grads(fn, (g, u), dy)))
    for size in (1001, 1000, 64):
        args = [a[..., :size] for a in (gate, up, dy)]
        got, want = (as_float64(both(fn)(*args)) for fn in (swiglu_kernel, swiglu_reference))
        exact = swiglu_formula(*args)
        assert_as_accurate(got, want, exact, names=SWIGLU_NAMES)

    # Rematerialization in a scan over layers, which the interpreter cannot run.
    (x, _), _ = swiglu_args((512, 1024), F32)
    scales = jnp.array([1.0, 0.5, 2.0])
    policy = jax.checkpoint_policies.save_only_these_names("gate", "up")

    def gradients(fn):
        @functools.partial(jax.checkpoint, policy=policy)
        def layer(carry, scale):
            return carry + jnp.sin(fn(scale * carry, jnp.cos(carry))), None

        loss = lambda x, scales: jnp.sum(jnp.sin(jax.lax.scan(layer, x, scales)[0]))
        return jax.jit(jax.grad(loss, argnums=(0, 1)))(x, scales)

    chex.assert_trees_all_close(
        gradients(swiglu_kernel), gradients(swiglu_reference), rtol=1e-3, atol=1e-2
    )
