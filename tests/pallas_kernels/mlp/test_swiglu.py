"""SwiGLU, each implementation, against the formula in float64 numpy."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import swiglu
from pallas_kernels.mlp.config import Config
from support.numerics import assert_as_accurate, quick_jit, rounded, value_and_grads
from support.pairwise import pairwise
from support.swiglu_formulas import NAMES, formula, make_args

IMPLEMENTATIONS = ["reference", "mosaic_gpu"]
BF16, F16, F32 = jnp.bfloat16, jnp.float16, jnp.float32
BF16_MAX = float(jnp.finfo(BF16).max)

each_implementation = pytest.mark.parametrize("implementation", IMPLEMENTATIONS, indirect=True)


@pytest.fixture
def implementation(request):
    if request.param == "mosaic_gpu":
        request.getfixturevalue("interpreted")
    return request.param


def compiled(implementation):
    fn = functools.partial(swiglu, implementation=implementation)
    return quick_jit(lambda gate, up, dy: value_and_grads(fn, (gate, up), dy))


def check(gate, up, dy, implementation):
    got = compiled(implementation)(gate, up, dy)
    assert [a.dtype for a in got] == [gate.dtype, gate.dtype, up.dtype]
    exact = formula(gate, up, dy)
    assert_as_accurate(got, rounded(exact, got), exact, names=NAMES)
    return got


@pytest.mark.parametrize(
    "implementation, dtype, shape",
    pairwise(
        IMPLEMENTATIONS,
        [BF16, F16, F32],
        [(64,), (7, 1), (0, 64), (2, 0, 64), (1, 130), (127, 96), (129, 64), (2, 3, 5, 130)],
    ),
    indirect=["implementation"],
    ids=str,
)
def test_every_shape_is_exact_up_to_one_rounding(implementation, shape, dtype):
    check(*make_args(shape, dtype), implementation)


@each_implementation
@pytest.mark.parametrize("gate_dtype, up_dtype", [(BF16, F32), (F32, BF16)])
def test_mixed_dtypes(implementation, gate_dtype, up_dtype):
    gate, up, dy = make_args((37, 96), F32)
    gate, up, dy = gate.astype(gate_dtype), up.astype(up_dtype), dy.astype(gate_dtype)
    if implementation == "mosaic_gpu":
        message = f"'mosaic_gpu': gate is {gate.dtype} and up is {up.dtype}; .* one dtype"
        with pytest.raises(NotImplementedError, match=message):
            swiglu(gate, up, implementation=implementation)
        return
    check(gate, up, dy, implementation)


@each_implementation
@pytest.mark.parametrize("dtype", [BF16, F32], ids=jnp.dtype)
def test_huge_gates(implementation, dtype):
    # sigmoid(-100) is 4e-44, below the smallest normal float32, and exp(100) would overflow.
    gate = jnp.array([0, 20, -20, 80, -80, 100, -100, 1e4, -1e4, 1e38, -1e38, BF16_MAX, -BF16_MAX])
    _, up, dy = make_args(gate.shape, dtype)
    # The values are at most 1, so that a finite result does not overflow.
    up, dy = jnp.tanh(up), jnp.tanh(dy)
    got = compiled(implementation)(gate.astype(dtype), up, dy)
    exact = formula(gate.astype(dtype), up, dy)
    # Relative to each element: beside 1e38 all others would vanish in a mean over the array. What
    # is raised to a power in exp(-gate) is off by up to |gate|·eps/2 where it does not overflow.
    f32 = jnp.finfo(F32)
    relative = float(jnp.finfo(dtype).eps) + float(f32.eps) * np.minimum(np.abs(gate), 100)
    for name, g, e in zip(NAMES, got, exact, strict=True):
        error = np.abs(np.asarray(g, np.float64) - e)
        assert np.all(error <= relative * np.abs(e) + 100 * float(f32.tiny)), name


@each_implementation
def test_zero_up_and_zero_gate(implementation):
    gate, up, dy = make_args((4, 64), BF16)
    y, dgate, _ = check(gate, up.at[1].set(0), dy, implementation)
    assert np.all(np.asarray(y)[1] == 0) and np.all(np.asarray(dgate)[1] == 0)
    y, dgate, dup = check(gate.at[1].set(0), up, dy, implementation)
    assert np.all(np.asarray(y)[1] == 0) and np.all(np.asarray(dup)[1] == 0)


@each_implementation
@pytest.mark.parametrize("argument", [0, 1], ids=["gate", "up"])
def test_nan_stays_in_its_element(implementation, argument):
    args = list(make_args((4, 64), BF16))
    good = compiled(implementation)(*args)
    args[argument] = args[argument].at[1, 2].set(np.nan)
    bad = compiled(implementation)(*args)
    at = np.zeros((4, 64), bool)
    at[1, 2] = True
    for name, g, b in zip(NAMES, good, bad, strict=True):
        np.testing.assert_array_equal(np.asarray(b)[~at], np.asarray(g)[~at], err_msg=name)
        # dup = dy·silu(gate) does not read up.
        assert np.isnan(np.asarray(b)[1, 2]) == (name != "dup" or argument == 0), name


@each_implementation
def test_infinite_gates(implementation):
    gate = jnp.array([jnp.inf, -jnp.inf])
    y = swiglu(gate, jnp.array([2.0, 2.0]), implementation=implementation)
    assert y[0] == jnp.inf and jnp.isnan(y[1])


@each_implementation
def test_repeated_calls_have_the_same_bits(implementation):
    gate, up, dy = make_args((129, 96), BF16)
    fn = functools.partial(swiglu, implementation=implementation)
    (out, vjp), (again, _) = (jax.vjp(fn, gate, up) for _ in range(2))
    chex.assert_trees_all_equal(vjp(dy), vjp(dy))
    chex.assert_trees_all_equal(out, again)


@each_implementation
def test_gate_and_up_may_be_one_array(implementation):
    z, _, dy = make_args((16, 64), F32)
    fn = lambda z: swiglu(z, z, implementation=implementation)
    got = quick_jit(lambda z, dy: value_and_grads(fn, (z,), dy))(z, dy)
    y, dgate, dup = formula(z, z, dy)
    exact = [y, dgate + dup]
    assert_as_accurate(got, rounded(exact, got), exact, names=("y", "dz"))


@each_implementation
def test_vmap_is_the_batch(implementation):
    gate, up, dy = make_args((3, 5, 64), F32)
    got = jax.vmap(compiled(implementation), in_axes=1, out_axes=1)(gate, up, dy)
    exact = formula(gate, up, dy)
    assert_as_accurate(got, rounded(exact, got), exact, names=NAMES)


def test_no_name_and_xla_are_the_reference():
    gate, up, _ = make_args((4, 100), BF16)
    want = swiglu(gate, up, implementation="reference")
    chex.assert_trees_all_equal(swiglu(gate, up), want)
    chex.assert_trees_all_equal(swiglu(gate, up, implementation="xla"), want)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"up": np.ones((3, 7), np.float32)}, r"one shape, got \(3, 8\) and \(3, 7\)"),
        ({"up": np.ones(8, np.float32)}, r"one shape, got \(3, 8\) and \(8,\)"),
        ({"implementation": "triton"}, "implementation='triton' must be None or one of"),
        (
            {"config": Config(fwd_accesses=1, bwd_accesses=1)},
            "for implementation='mosaic_gpu' by name, got implementation=None",
        ),
    ],
)
def test_wrong_arguments(unchecked_shapes, change, message):
    ones = np.ones((3, 8), np.float32)
    with pytest.raises(ValueError, match=message):
        swiglu(**({"gate": ones, "up": ones} | change))
