"""Linear layers and the gated MLP in FP8: values, gradients, what is kept, what is done once."""

import dataclasses
import functools
import re
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from pallas_kernels import explain, require_kernels
from pallas_kernels.fp8 import (
    RECIPES,
    QuantizedWeight,
    fp8_linear,
    fp8_linears,
    fp8_swiglu_mlp,
    quantize,
    quantize_weight,
)
from pallas_kernels.fp8.reference import blockwise_int8
from support.fp8_formulas import (
    SMALL,
    exact_mlp,
    exact_of_quantized,
    make_args,
    mlp_args,
)
from support.numerics import assert_as_accurate, quick_jit, rms, rounded, value_and_grads

BF16, F32 = jnp.bfloat16, jnp.float32
every_recipe = pytest.mark.parametrize("recipe", list(SMALL.values()), ids=list(SMALL))


def mostly(*names):
    """A test of every recipe, of which the normal run has the named ones."""
    marks = {name: () if name in names else pytest.mark.full for name in SMALL}
    recipes = [pytest.param(r, marks=marks[name], id=name) for name, r in SMALL.items()]
    return pytest.mark.parametrize("recipe", recipes)


@functools.cache
def _graded(recipe):
    fn = lambda x, *weights: fp8_linears(x, weights, recipe=recipe)
    return quick_jit(lambda dys, *args: value_and_grads(fn, args, dys))


def run(recipe, x, weights, dys):
    """Results and gradients."""
    return _graded(recipe)(dys, x, *weights)


SHAPES = [
    ((5, 7, 33), (17, 8), F32),
    ((6, 16), (8,), BF16),
    ((1, 16), (3,), F32),
    ((16,), (24,), F32),
]
NORMAL = {("rowwise", 0), ("tensorwise", 1), ("rowwise_with_gw_hp", 1)}


# Sizes that divide no tile, and one token.
@pytest.mark.parametrize(
    "recipe, shape, sizes, weight_dtype",
    [
        pytest.param(r, *shape, marks=() if (name, i) in NORMAL else pytest.mark.full)
        for name, r in SMALL.items()
        for i, shape in enumerate(SHAPES)
    ],
    ids=lambda a: a.name if hasattr(a, "wgrad") else str(a),
)
def test_linear(recipe, shape, sizes, weight_dtype):
    x, weights, dys = make_args(shape, sizes, weight_dtype=weight_dtype)
    got = run(recipe, x, weights, dys)
    assert [(a.shape, a.dtype) for a in got] == [(a.shape, a.dtype) for a in (*dys, x, *weights)]
    exact = exact_of_quantized(recipe, x, weights, dys)
    exact = [e.reshape(g.shape) for e, g in zip(exact, got, strict=True)]
    # Several products that make up dx round one by one.
    n = len(sizes)
    best = rounded(exact, got)
    names = [*(f"y{i}" for i in range(n)), "dx", *(f"dw{i}" for i in range(n))]
    slack = 1.2 if n == 1 else 2.0
    for name, arrays in zip(names, zip(got, best, exact, strict=True), strict=True):
        part = [[a] for a in arrays]
        assert_as_accurate(*part, names=[name], slack=slack if name == "dx" else 1.2)


# Errors relative to the unquantized result, of normal numbers: docs/fp8.md shows them.
ERRORS = {
    "tensorwise": (0.038, 0.059, 0.059),
    "rowwise": (0.037, 0.037, 0.037),
    "rowwise_with_gw_hp": (0.037, 0.037, 0.0),
}


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=pytest.mark.full if n == "rowwise_with_gw_hp" else ()) for n in RECIPES],
)
def test_error_of_quantization(name):
    x, (w,), (dy,) = make_args((256, 192), (160,))
    got = run(SMALL[name], x, [w], (dy,))
    x, w, dy = (np.asarray(a, np.float64) for a in (x, w, dy))
    for g, exact, error in zip(got, (x @ w, dy @ w.T, x.T @ dy), ERRORS[name], strict=True):
        found = rms(np.asarray(g, np.float64) - exact) / rms(exact)
        # An error of 0 is that of rounding the result, at most 2^-9 in bfloat16.
        assert found <= 1.1 * error + 2**-9, f"{found:.4f} for {error}"
        assert found >= 0.9 * error


@functools.cache
def graded_mlp(recipe):
    fn = functools.partial(fp8_swiglu_mlp, recipe=recipe)
    return quick_jit(lambda *args: value_and_grads(fn, args[:-1], args[-1]))


@jax.custom_vjp
def product_from_int8(gate, up):
    """`silu(gate) · up`, whose backward reads gate and up in int8."""
    return (jax.nn.silu(gate.astype(F32)) * up.astype(F32)).astype(gate.dtype)


def _backward_from_int8(kept, dproduct):
    gate, up = (a.dequantize().reshape(dproduct.shape) for a in kept)
    sigmoid, dproduct32 = jax.nn.sigmoid(gate), dproduct.astype(F32)
    dgate = dproduct32 * up * sigmoid * (1 + gate * (1 - sigmoid))
    return dgate.astype(dproduct.dtype), (dproduct32 * gate * sigmoid).astype(dproduct.dtype)


product_from_int8.defvjp(
    lambda *pair: (
        product_from_int8(*pair),
        tuple(blockwise_int8(a.reshape(-1, a.shape[-1])) for a in pair),
    ),
    _backward_from_int8,
)


@mostly("rowwise_with_gw_hp")
@pytest.mark.parametrize(
    "shape, intermediate_size",
    [((2, 13, 24), 40), pytest.param((24,), 33, marks=pytest.mark.full)],
    ids=str,
)
def test_mlp_is_its_pieces(recipe, shape, intermediate_size):
    """The MLP errs as the same products and the same elementwise work, one after the other."""
    args = mlp_args(shape, intermediate_size)

    def pieces(x, w_gate, w_up, w_down):
        gate, up = fp8_linears(x, (w_gate, w_up), recipe=recipe)
        return fp8_linear(product_from_int8(gate, up), w_down, recipe=recipe)

    got = graded_mlp(recipe)(*args)
    plain = quick_jit(lambda *args: value_and_grads(pieces, args[:-1], args[-1]))(*args)
    assert [(a.shape, a.dtype) for a in got] == [(a.shape, a.dtype) for a in (args[0], *args[:-1])]
    exact = exact_mlp(*args)
    exact = [e.reshape(g.shape) for e, g in zip(exact, got, strict=True)]
    assert_as_accurate(got, plain, exact, names=("y", "dx", "dw_gate", "dw_up", "dw_down"))


@every_recipe
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_nan_and_infinity_are_not_lost(recipe, bad):
    """They arrive as NaN, or as themselves where wgrad is not in FP8."""
    x, weights, dys = make_args((6, 16), (8,))
    lost = lambda a: np.isfinite(np.asarray(a, F32)).any()
    graded = functools.partial(run, recipe)
    y, dx, dw = graded(x.at[2, 3].set(bad), weights, dys)
    assert np.isnan(y[2]).all() and not lost(dw[3]) and np.isfinite(dx).all()
    y, dx, dw = graded(x, weights, (dys[0].at[2, 3].set(bad),))
    assert np.isnan(dx[2]).all() and not lost(dw[:, 3]) and np.isfinite(y).all()
    y, dx, dw = graded(x, [weights[0].at[3, 2].set(bad)], dys)
    assert np.isnan(y[:, 2]).all() and np.isnan(dx[:, 3]).all() and np.isfinite(dw).all()


@every_recipe
def test_zeros(recipe):
    x, weights, dys = make_args((4, 16), (8,))
    for a in run(recipe, 0 * x, weights, (0 * dys[0],)):
        assert not np.any(np.asarray(a, F32))


# Weights.


def quantizations(fn, *args):
    """How many arrays of the compiled program's functions are cast to FP8, by dtype and shape."""
    text = str(jax.make_jaxpr(fn)(*args))
    return re.findall(r"convert_element_type\[\s*new_dtype=float8_(\w+)", text)


@mostly("tensorwise")
def test_weights_are_quantized_once(recipe):
    x, (w,), (dy,) = make_args((8, 32), (32,))

    def loss(w, x, prepared):
        w = quantize_weight(w, recipe) if prepared else w
        layer = jax.checkpoint(lambda x, w: jax.nn.tanh(fp8_linear(x, w, recipe=recipe)))
        return (layer(x, w).astype(F32) * dy.astype(F32)).sum()

    grad = lambda prepared: jax.grad(functools.partial(loss, prepared=prepared), (0, 1))
    once, again = (len(quantizations(grad(p), w, x)) for p in (True, False))
    # Under `jax.checkpoint` the forward runs twice, with the two copies of the weight unless they
    # come from outside.
    assert again == once + 2
    a, b = quick_jit(grad(True))(w, x), quick_jit(grad(False))(w, x)
    assert all(g.dtype == p.dtype for g, p in zip(a, (w, x), strict=True))
    jax.tree.map(np.testing.assert_array_equal, a, b)


@mostly("rowwise")
def test_scan_over_quantized_layers(recipe):
    """Stacked weights, quantized at once outside of the loop, give each layer's gradients."""
    x, _, _ = make_args((8, 32), (32,))
    w = jnp.stack([make_args((8, 32), (32,), seed=s)[1][0] for s in (1, 2)])

    def scanned(w, x):
        prepared = jax.vmap(functools.partial(quantize_weight, recipe=recipe))(w)
        body = jax.checkpoint(lambda x, w: (fp8_linear(x, w, recipe=recipe), None))
        return jax.lax.scan(body, x, prepared)[0].astype(F32).sum()

    def unrolled(w, x):
        for weight in w:
            x = fp8_linear(x, weight, recipe=recipe)
        return x.astype(F32).sum()

    a, b = (quick_jit(jax.grad(fn, (0, 1)))(w, x) for fn in (scanned, unrolled))
    jax.tree.map(np.testing.assert_array_equal, a, b)


def test_weights_of_another_recipe_are_an_error():
    x, (w,), _ = make_args((4, 16), (16,))
    prepared = quantize_weight(w, SMALL["tensorwise"])
    with pytest.raises(ValueError, match=r"with scaling='tensor', and the recipe 'rowwise' has"):
        fp8_linear(x, prepared, recipe=SMALL["rowwise"])
    with pytest.raises(ValueError, match="give quantize_weight the same recipe"):
        fp8_swiglu_mlp(x, w, prepared, w, recipe=SMALL["rowwise"])


def test_small_weights_stay_in_their_dtype(caplog):
    x, (w,), _ = make_args((4, 2048), (512,))
    prepared = quantize_weight(w, "tensorwise")
    assert prepared.forward is None and prepared.dgrad is None
    y = fp8_linear(x, prepared, recipe="tensorwise")
    assert caplog.messages == [
        "fp8_linear: a weight (2048, 512) is multiplied in bfloat16, because its K·N / (K + N), "
        "409, is below the least_size of the recipe that quantized it, from which FP8 saves time; "
        "least_size=0 in that recipe takes FP8"
    ]
    np.testing.assert_array_equal(y, x @ w.astype(BF16))
    (choice,) = explain(functools.partial(fp8_linear, recipe="tensorwise"), x, prepared).choices
    assert caplog.messages == [f"fp8_linear: {choice.reason}"]
    assert (choice.operation, choice.implementation) == ("fp8_linear", "reference")
    with require_kernels():
        fp8_linear(x, prepared, recipe="tensorwise")
    assert RECIPES["tensorwise"].gains((2048, 2048))
    assert not RECIPES["tensorwise"].gains((2048, 1024))


def test_a_small_mlp_is_named_in_errors():
    x, (w,), _ = make_args((4, 16), (16,))
    mlp = lambda x: fp8_swiglu_mlp(x, w, w, w, recipe="tensorwise")
    with pytest.raises(NotImplementedError, match=r"^fp8_swiglu_mlp has a gradient rule"):
        jax.jvp(mlp, (x,), (x,))
    message = "^fp8_swiglu_mlp, in swiglu_mlp: kernels are required"
    with require_kernels(), pytest.raises(NotImplementedError, match=message):
        mlp(x)


def test_kernels_are_required_of_a_call_that_was_traced_before():
    x, (gate, up), _ = make_args((4, 16), (16, 16))
    recipe = SMALL["rowwise"]
    weights = [quantize_weight(w, recipe) for w in (gate, up, gate)]
    linear = lambda x: fp8_linear(x, weights[0], recipe=recipe)
    mlp = lambda x: fp8_swiglu_mlp(x, *weights, recipe=recipe)
    calls = {"fp8_linear, in quantize": linear, "fp8_swiglu_mlp, in quantize": mlp}
    for name, call in calls.items():
        jax.eval_shape(call, x)
        message = f"^{name}: kernels are required by require_kernels"
        with require_kernels(), pytest.raises(NotImplementedError, match=message):
            jax.eval_shape(functools.partial(call), x)
    message = "^quantize_weight, in quantize_both: kernels are required"
    with require_kernels(), pytest.raises(NotImplementedError, match=message):
        quantize_weight(gate, recipe)


def test_gradients_that_are_asked_for():
    recipe = SMALL["tensorwise"]
    x, weights, dys = make_args((6, 16), (8, 12))
    fn = lambda *args: fp8_linears(args[0], args[1:], recipe=recipe)[1]
    args = x, *weights
    _, dx, dw0, dw1 = value_and_grads(fn, args, dys[1])
    assert not np.any(dw0) and np.any(dw1)
    for i, want in enumerate((dx, dw0, dw1)):
        alone = jax.vjp(lambda a, i=i: fn(*args[:i], a, *args[i + 1 :]), args[i])[1](dys[1])[0]
        np.testing.assert_array_equal(alone, want)
    prepared = quantize_weight(weights[0], recipe)
    loss = lambda p: fp8_linear(x, p, recipe=recipe).astype(F32).sum()
    grads = jax.grad(loss)(prepared)
    assert isinstance(grads, QuantizedWeight) and np.any(grads.weight)
    assert not any(np.any(np.asarray(a, F32)) for a in jax.tree.leaves(grads.forward))


def test_what_is_kept():
    """The backward keeps FP8 numbers of x, and none of it in 16 bits."""
    recipe = SMALL["tensorwise"]
    x, (w,), _ = make_args((64, 32), (16,))
    prepared = quantize_weight(w, recipe)
    _, vjp = jax.vjp(
        lambda x, w: fp8_linear(x, dataclasses.replace(prepared, weight=w), recipe=recipe), x, w
    )
    kept = {(a.dtype.name, a.shape) for a in jax.tree.leaves(vjp) if hasattr(a, "dtype")}
    assert ("float8_e4m3fn", (32, 64)) in kept
    assert not any(dtype == "bfloat16" for dtype, _ in kept)


MESHED = [
    pytest.param("tensorwise", True),
    pytest.param("rowwise", False),
    pytest.param("tensorwise", False, marks=pytest.mark.full),
    pytest.param("rowwise", True, marks=pytest.mark.full),
    pytest.param("rowwise_with_gw_hp", True, marks=pytest.mark.full),
]


@pytest.mark.parametrize("name, is_explicit", MESHED)
def test_mesh(name, is_explicit):
    """Tokens and weights that are split give the layer's numbers: the scales are of all tokens."""
    recipe = SMALL[name]
    x, weights, dys = make_args((4, 6, 32), (16,))
    fn = lambda x, w, dy: value_and_grads(
        lambda x, w: fp8_linear(x, quantize_weight(w, recipe), recipe=recipe), (x, w), dy
    )
    kind = AxisType.Explicit if is_explicit else AxisType.Auto
    mesh = jax.make_mesh((2, 2), ("data", "seq"), axis_types=(kind,) * 2)
    specs = P("data", "seq"), P("data"), P("data", "seq")
    args = x, weights[0], dys[0]
    with jax.set_mesh(mesh):
        placed = [
            jax.device_put(a, NamedSharding(mesh, s)) for a, s in zip(args, specs, strict=True)
        ]
        got = quick_jit(fn)(*placed)
    exact = exact_of_quantized(recipe, x, weights, dys)
    exact = [e.reshape(g.shape) for e, g in zip(exact, got, strict=True)]
    assert_as_accurate(got, rounded(exact, got), exact, names=("y", "dx", "dw"))


# 1 s each. Before, the gradients of weights were of other tokens: they erred by their own size.
@pytest.mark.parametrize("fn", [fp8_linear, fp8_swiglu_mlp])
def test_gradients_of_results_are_split_otherwise_than_the_input(fn):
    """The backward reads what the forward kept of each token, whatever splits the tokens."""
    if fn is fp8_linear:
        x, weights, (dy,) = make_args((4, 6, 32), (16,))
        exact = exact_of_quantized(SMALL["rowwise"], x, weights, [dy])
    else:
        x, *weights, dy = mlp_args((4, 6, 32), 128)
        exact = exact_mlp(x, *weights, dy)
    fn = functools.partial(fn, recipe=SMALL["rowwise"])
    graded = lambda *args: value_and_grads(fn, args[:-1], args[-1])
    mesh = jax.make_mesh((2,), ("seq",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])
    whole = NamedSharding(mesh, P())
    by_sequence = jax.device_put(x, NamedSharding(mesh, P(None, "seq")))
    with jax.set_mesh(mesh):
        got = quick_jit(graded)(by_sequence, *jax.device_put((*weights, dy), whole))
    names = "y", "dx", *(f"dw{i}" for i in range(len(weights)))
    exact = [e.reshape(g.shape) for e, g in zip(exact, got, strict=True)]
    assert_as_accurate(got, quick_jit(graded)(x, *weights, dy), exact, names=names)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_a_weight_on_a_mesh_is_quantized_in_parts(on_h100, kind):
    """XLA cannot split a kernel: it would gather a float32 weight, or raise on Explicit axes."""
    mesh = jax.make_mesh((2,), ("fsdp",), axis_types=(kind,))
    weight = jax.ShapeDtypeStruct((2048, 2048), F32, sharding=NamedSharding(mesh, P("fsdp")))
    quantized = jax.jit(lambda w: quantize_weight(w, "rowwise"))
    with jax.set_mesh(mesh):
        (choice,) = explain(quantized, weight).choices
        assert choice.implementation == "reference" and "Auto and Explicit" in str(choice.reason)
        with require_kernels():
            jax.eval_shape(lambda w: quantize_weight(w, "tensorwise"), weight)
        if kind == AxisType.Explicit:
            with pytest.raises(NotImplementedError, match=r"Explicit axes split it as .*'fsdp'"):
                jax.eval_shape(lambda w: quantize(w, implementation="mosaic_gpu"), weight)


@pytest.mark.usefixtures("unchecked_shapes")
def test_errors():
    x, (w,), _ = make_args((4, 16), (8,))
    with pytest.raises(ValueError, match="recipe='fast' must be"):
        fp8_linear(x, w, recipe=cast(Any, "fast"))
    with pytest.raises(ValueError, match=r"weight must be \[K, N\]"):
        fp8_linear(x, w.T, recipe="tensorwise")
    with pytest.raises(ValueError, match="w_down"):
        fp8_swiglu_mlp(x, w, w, w, recipe="tensorwise")
    with pytest.raises(NotImplementedError, match="forward mode"):
        recipe = SMALL["rowwise"]
        jax.jvp(lambda x: fp8_linear(x, w, recipe=recipe), (x,), (x,))


@mostly("rowwise")
@pytest.mark.parametrize("shape", [(0, 16), (2, 0, 16)])
def test_no_tokens(recipe, shape):
    x = jnp.zeros(shape, BF16)
    weights = jnp.ones((16, 8)), jnp.ones((16, 8)), jnp.ones((8, 16))
    of = lambda x, gate, up, down: jnp.sum(
        fp8_linear(fp8_swiglu_mlp(x, gate, up, down, recipe=recipe), gate, recipe=recipe)
    )
    value, gradients = quick_jit(jax.value_and_grad(of, argnums=(0, 1, 2, 3)))(x, *weights)
    assert value == 0 and not any(np.any(g) for g in gradients)
    assert [g.shape for g in gradients] == [a.shape for a in (x, *weights)]


def test_float64_is_refused():
    with jax.enable_x64(True):
        x, weight = jnp.ones((4, 16), jnp.float64), jnp.ones((16, 8), jnp.float64)
        for args in ((x, weight.astype(F32)), (x.astype(F32), weight)):
            with pytest.raises(TypeError, match="is float64, which no product in FP8 returns"):
                fp8_linear(*args, recipe=SMALL["rowwise"])
