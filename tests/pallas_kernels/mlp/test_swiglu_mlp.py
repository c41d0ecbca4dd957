"""The gated MLP: values, gradients, what it keeps and what it computes again."""

import functools
import re
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from pallas_kernels import swiglu_mlp
from pallas_kernels.mlp import MLPConfig
from support.mlp_formulas import NAMES, check, exact, graded, graded_plain, make_args
from support.numerics import assert_as_accurate, quick_jit, value_and_grads

BF16, F16, F32 = jnp.bfloat16, jnp.float16, jnp.float32

SAVES = ("all", "gate_up", "x")


# Values and gradients.


# The reference keeps everything.
WAYS = [("reference", "all"), *(("xla", save) for save in SAVES)]
SHAPES = [
    ((2, 13, 24), 40, F32, F32),
    ((5, 64), 129, BF16, F32),
    ((31, 17), 7, BF16, BF16),
    ((13, 3, 20), 33, F16, F16),
    ((24,), 40, F32, F32),
]


# The normal run has all ways for the first shape, and one way for each other shape.
@pytest.mark.parametrize(
    "shape, intermediate_size, dtype, weight_dtype, implementation, save",
    [
        pytest.param(*shape, *way, marks=() if i == 0 or i % 4 == j else pytest.mark.full)
        for i, shape in enumerate(SHAPES)
        for j, way in enumerate(WAYS)
    ],
    ids=str,
)
def test_xla(implementation, save, shape, intermediate_size, dtype, weight_dtype):
    args = make_args(shape, intermediate_size, dtype, weight_dtype)
    check(args, implementation=implementation, save=save)


@pytest.mark.parametrize("implementation", ["reference", "xla", "mosaic_gpu"])
def test_no_tokens(implementation):
    args = make_args((0, 128), 128, BF16)
    y, dx, *dweights = graded(implementation=implementation)(*args)
    assert y.shape == dx.shape == (0, 128)
    assert not any(np.any(a) for a in dweights)


def test_float32_weights_get_unrounded_gradients():
    """The gradient of a float32 weight is a float32 sum over tokens, not a rounded one."""
    args = make_args((64, 32), 16, BF16, F32)
    got = graded(implementation="xla")(*args)
    weights = (a.astype(BF16) for a in args[1:-1])
    rounded_weights = graded(implementation="xla")(args[0], *weights, args[-1])
    for name, wide, narrow in zip(NAMES[2:], got[2:], rounded_weights[2:], strict=True):
        assert wide.dtype == F32
        # The narrow gradient is the wide one, rounded once.
        assert_as_accurate([narrow], [wide.astype(BF16)], [wide], names=[name])
        assert np.any(wide != narrow.astype(F32))


# The chunks leave a rest, have one position, leave no rest, and are longer than the sequence.
@pytest.mark.parametrize(
    "shape, chunk_size, dtype, weight_dtype",
    [
        pytest.param(*chunks, *dtypes, marks=() if i == j % 3 else pytest.mark.full)
        for j, chunks in enumerate([((2, 13, 24), 5), ((7, 16), 1), ((2, 6, 8), 3), ((7, 16), 9)])
        for i, dtypes in enumerate([(F32, F32), (BF16, F32), (F16, F16)])
    ],
    ids=str,
)
def test_chunks(shape, chunk_size, dtype, weight_dtype):
    args = make_args(shape, 40, dtype, weight_dtype)
    check(args, implementation="xla", save="x", chunk_size=chunk_size)


def test_the_error_does_not_grow_with_the_number_of_chunks():
    args = make_args((512, 16), 24, BF16, F32)
    wanted = exact(*args)[2:]

    def errors(chunk_size):
        got = graded(implementation="xla", save="x", chunk_size=chunk_size)(*args)[2:]
        return [np.linalg.norm(np.asarray(g) - w) for g, w in zip(got, wanted, strict=True)]

    few, many = errors(256), errors(2)
    assert all(b < 1.1 * a for a, b in zip(few, many, strict=True)), (few, many)


def test_chunks_have_no_array_of_all_positions():
    shape, intermediate_size = (3, 32, 8), 40
    args = make_args(shape, intermediate_size, F32)[:-1]
    options = dict(save="x", chunk_size=8, implementation="xla")
    grad = jax.grad(lambda *args: jnp.sum(swiglu_mlp(*args, **options)), argnums=(0, 1, 2, 3))
    text = str(quick_jit(grad).lower(*args).compile().as_text())
    assert "[3,8,40]" in text or "[24,40]" in text
    assert not re.search(r"\[3,32,40\]|\[96,40\]|\[4,3,8,40\]", text)


# Arrays that are kept, and GEMMs that run again.


def gemms(fn, *args):
    """How many matrix products the compiled program has."""
    text = str(quick_jit(fn).lower(*args).compile().as_text())
    return len(re.findall(r"(?m)^\s*(?:ROOT )?%?[\w.-]+ = \S+ (?:dot|custom-call)\(", text))


@pytest.mark.parametrize("save, kept", [("all", 3), ("gate_up", 2), ("x", 0)])
def test_residuals(save, kept):
    """The backward keeps the arguments, the arrays that `save` names, and no others."""
    tokens, hidden_size, intermediate_size = 13, 24, 40
    args = make_args((tokens, hidden_size), intermediate_size, F32)[:-1]
    fn = functools.partial(swiglu_mlp, save=save, implementation="xla")
    vjp = jax.eval_shape(lambda *args: jax.vjp(fn, *args)[1], *args)
    shapes = sorted(leaf.shape for leaf in jax.tree.leaves(vjp) if leaf.shape)
    assert shapes == sorted([*(a.shape for a in args), *[(tokens, intermediate_size)] * kept])


def test_gemms():
    """With `save="x"` the gate and up GEMMs run again, and XLA does not remove the repetition."""
    args = make_args((13, 24), 40, F32)
    count = lambda **options: gemms(
        lambda *args: value_and_grads(
            functools.partial(swiglu_mlp, **options), args[:-1], args[-1]
        ),
        *args,
    )
    assert gemms(functools.partial(swiglu_mlp, implementation="xla"), *args[:-1]) == 3
    assert count(save="all", implementation="xla") == 9
    assert count(save="gate_up", implementation="xla") == 9
    assert count(save="x", implementation="xla") == 11


@pytest.mark.parametrize(
    "names, expected",
    [(("gate", "up"), 9), (("gate", "up", "mlp_product"), 9), (("gate",), 10), ((), 11)],
)
def test_checkpoint_policies_know_the_names(names, expected):
    args = make_args((13, 24), 40, F32)
    policy = jax.checkpoint_policies.save_only_these_names(*names)
    fn = jax.checkpoint(functools.partial(swiglu_mlp, implementation="xla"), policy=policy)
    assert gemms(lambda *args: value_and_grads(fn, args[:-1], args[-1]), *args) == expected


# Transformations.


@pytest.mark.parametrize(
    "save", [*(pytest.param(save, marks=pytest.mark.full) for save in ("all", "gate_up")), "x"]
)
def test_vmap_scan_and_checkpoint(save):
    args = make_args((4, 13, 24), 40, F32)
    fn = functools.partial(swiglu_mlp, save=save, implementation="xla")
    want = graded(implementation="xla", save=save)(*args)
    mapped = jax.vmap(fn, in_axes=(0, None, None, None))

    def scanned(x, *weights):
        return jax.lax.scan(lambda c, x: (c, fn(x, *weights)), None, x)[1]

    for other in (mapped, scanned, jax.checkpoint(fn)):
        got = quick_jit(lambda *args, f=other: value_and_grads(f, args[:-1], args[-1]))(*args)
        chex.assert_trees_all_close(got, want, rtol=2e-5, atol=2e-5)


def test_weights_that_the_caller_transposes():
    """Equinox and PyTorch store them so. XLA for CPUs could not run the gradients' products."""
    x, *weights, dy = args = make_args((2, 13, 24), 40, BF16, F32)
    fn = lambda x, *weights: swiglu_mlp(x, *(w.T for w in weights), implementation="xla")
    y, dx, *dw = quick_jit(lambda *args: value_and_grads(fn, args[:-1], args[-1]))(
        x, *(w.T for w in weights), dy
    )
    got = [y, dx, *(g.T for g in dw)]
    assert_as_accurate(got, graded_plain(*args), exact(*args), names=NAMES)


def test_on_a_mesh_xla_splits_it():
    """Tokens are split over one axis and F over the other; only GEMMs need sums over devices."""
    args = make_args((16, 24), 40, F32)
    want = graded(implementation="xla")(*args)
    mesh = jax.make_mesh((2, 4), ("data", "tensor"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    columns = P(None, "tensor")
    specs = (P("data"), columns, columns, P("tensor"), P("data"))
    put = lambda a, spec: jax.device_put(a, NamedSharding(mesh, spec))
    compiled = graded().lower(*(put(a, s) for a, s in zip(args, specs, strict=True))).compile()
    got = compiled(*(put(a, s) for a, s in zip(args, specs, strict=True)))
    chex.assert_trees_all_close(got, want, rtol=2e-5, atol=2e-5)
    assert not re.search(r"all-gather|all-to-all|collective-permute", str(compiled.as_text()))


def test_second_derivatives():
    args = make_args((3, 8), 8, F32)[:-1]
    loss = lambda implementation: (
        lambda x: jnp.sum(swiglu_mlp(x, *args[1:], implementation=implementation) ** 2)
    )
    hessian = quick_jit(jax.hessian(loss("reference")))(args[0])
    eps = 1e-2
    step = jnp.zeros_like(args[0]).at[1, 2].set(eps)
    gradient = quick_jit(jax.grad(loss("reference")))
    slope = (gradient(args[0] + step) - gradient(args[0] - step)) / (2 * eps)
    np.testing.assert_allclose(hessian[..., 1, 2], slope, rtol=0.02, atol=2e-3)
    with pytest.raises(NotImplementedError, match="swiglu_mlp has a gradient rule of its own"):
        jax.hessian(loss("xla"))(args[0])


# What is refused.


@pytest.mark.parametrize(
    "change, message",
    [
        (dict(w_gate=jnp.zeros((40, 24))), r"w_gate must be \[D, F\], got \(40, 24\) for x"),
        (
            dict(w_up=jnp.zeros((24, 41))),
            r"w_up must be \(24, 40\), like w_gate, .* got \(24, 41\)",
        ),
        (dict(w_down=jnp.zeros((24, 40))), r"w_down \(40, 24\), got .* \(24, 40\)"),
        (dict(save="gate"), "save='gate' must be one of"),
        (dict(chunk_size=4), "chunk_size=4 must .* needs save='x' .* got save='gate_up'"),
        (dict(chunk_size=0, save="x"), "chunk_size=0 must be at least 1"),
        (dict(x=jnp.zeros(24), chunk_size=4, save="x"), r"x \[..., S, D\].* x \(24,\)"),
        (dict(implementation="triton"), "implementation='triton' must be None or one of"),
        (dict(config=MLPConfig()), "'mosaic_gpu' by name, got implementation=None"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_wrong_arguments(unchecked_shapes, change, message):
    args = dict(zip(("x", "w_gate", "w_up", "w_down"), make_args((13, 24), 40, F32), strict=False))
    with pytest.raises(ValueError, match=message):
        swiglu_mlp(**args | change)
    wrong: Any = 1
    with pytest.raises(TypeError, match=r"config=1 must be a .*, or None for the default"):
        swiglu_mlp(**args, config=wrong)
