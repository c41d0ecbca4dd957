"""`counted_fraction`: the tokens that count are computed in fewer rows. 20 s."""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from pallas_kernels import linear_cross_entropy, linear_cross_entropy_plan
from pallas_kernels.loss.counted import num_rows
from support.jaxprs import equations
from support.loss_formulas import (
    BF16,
    F32,
    IGNORED,
    REDUCTIONS,
    as_jax,
    check,
    check_against_formula,
    in_turn,
    loss_of,
    make_arrays,
    make_cotangent,
    put,
    run,
)
from support.loss_kernels import BY_KERNEL_STRATEGY
from support.numerics import quick_jit

# 128 rows for the tokens that count, of 300.
T, FRACTION = 300, 0.4
STRATEGIES = {
    "tokens": {"implementation": "xla", "chunk_size": 50},
    "columns": {"implementation": "xla", "chunk_size": None, "vocab_chunk_size": 20},
}


def arrays_and_labels(num_counted=100, dtype=F32, shape=(T,), **options):
    """Arrays, and labels of which this number, at random positions, is not ignored."""
    arrays, labels = make_arrays(shape, dtype=dtype, **options)
    labels = np.where(labels == IGNORED, np.int32(1), labels)
    order = np.random.default_rng(7).permutation(labels.size).reshape(shape)
    return arrays, np.where(order < num_counted, labels, np.int32(IGNORED))


@in_turn(
    "strategy, reduction, num_counted, dtype",
    STRATEGIES,
    {reduction: reduction for reduction in REDUCTIONS},
    {"few": 100, "as many as rows": 128, "too many": 129, "none": 0},
    {"float32": F32, "bfloat16": BF16},
    # Each strategy has both dtypes.
    also=[("tokens", "mean", "few", "bfloat16"), ("columns", "sum", "as many as rows", "float32")],
    but=[("tokens", "mean", "few", "float32"), ("columns", "sum", "as many as rows", "bfloat16")],
)
def test_values_and_gradients(strategy, reduction, num_counted, dtype):
    arrays, labels = arrays_and_labels(num_counted, dtype)
    check(arrays, labels, reduction=reduction, counted_fraction=FRACTION, **strategy)


@pytest.mark.parametrize("num_counted", [100, 129], ids=["few", "too many"])
def test_gradients_are_rounded_once(num_counted):
    """A cotangent multiplies sums in float32, as accurate as those of all tokens; 0.7 s each."""
    arrays, labels = as_jax(arrays_and_labels(num_counted, BF16, only=("x", "weight")))

    def dweight(fraction):
        options = STRATEGIES["tokens"] | {"counted_fraction": fraction}
        loss = lambda weight: 1.3 * loss_of(arrays["x"], weight, labels, **options)
        return np.asarray(quick_jit(jax.grad(loss))(arrays["weight"]), F32)

    of_all, got = dweight(1.0), dweight(FRACTION)
    # A sum in another order may be rounded to a neighbour. A second rounding changes a third.
    assert np.mean(got != of_all) < 0.01


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_tokens_without_weight_keep_the_gradient_of_their_weight(reduction):
    """It is the loss of the token, whose row is computed although the weight is 0."""
    arrays, labels = arrays_and_labels()
    weights = put(arrays["token_weights"], slice(0, None, 2), 0)
    arrays |= {"token_weights": weights}
    got = check(
        arrays, labels, reduction=reduction, counted_fraction=FRACTION, **STRATEGIES["tokens"]
    )
    counted = labels != IGNORED
    assert np.all(np.asarray(got["token_weights"])[counted & (weights == 0)] != 0)


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_nothing_in_tokens_that_do_not_count_matters(reduction):
    arrays, labels = arrays_and_labels()
    options = {"reduction": reduction, "counted_fraction": FRACTION, **STRATEGIES["tokens"]}
    good = run(arrays, labels, **options)
    spoiled = np.where((labels == IGNORED)[:, None], np.nan, arrays["x"]).astype(F32)
    bad = run(arrays | {"x": spoiled}, labels, **options)
    for name, value in good.items():
        np.testing.assert_array_equal(bad[name], value, name)


def test_weights_of_zero_do_not_count():
    """Without a gradient of the weights, such tokens are left out: the few rows hold the rest."""
    arrays, labels = make_arrays((T,), only=("x", "weight"))
    mask = np.arange(T) % 3 == 0
    labels = np.where(labels == IGNORED, np.int32(1), labels)
    got = run(
        arrays | {"token_weights": mask.astype(F32)},
        labels,
        counted_fraction=FRACTION,
        **STRATEGIES["tokens"],
    )
    ignored = np.where(mask, labels, np.int32(IGNORED))
    check(arrays, ignored, counted_fraction=FRACTION, **STRATEGIES["tokens"])
    expected = run(arrays, ignored, **STRATEGIES["tokens"])
    for name in ("loss", "x", "weight"):
        np.testing.assert_allclose(got[name], expected[name], rtol=1e-5, atol=1e-6, err_msg=name)


@pytest.mark.parametrize("name", [pytest.param("columns", marks=pytest.mark.full), "in place"])
@pytest.mark.usefixtures("interpreted")
def test_kernels(name):
    """150 tokens of which 9 count, so that the interpreter computes one tile in place of two."""
    arrays, labels = arrays_and_labels(9, BF16, (150,), vocab=250)
    options: dict[str, Any] = BY_KERNEL_STRATEGY[name] | {"counted_fraction": 0.5}
    check(arrays, labels, slack=1.4, **options)


# Which program runs.


def products(fn, *args):
    """Rows of the left operands of all matrix products in the program of `fn`."""
    jaxpr = jax.make_jaxpr(fn)(*args)
    found: list[Any] = [
        e.invars for e in equations(jaxpr.jaxpr) if e.primitive.name == "dot_general"
    ]
    return {v.aval.shape for operands in found for v in operands}


def test_both_programs_are_compiled_and_the_default_has_one():
    arrays, labels = arrays_and_labels(only=("x", "weight"))
    x, weight, labels = (jnp.asarray(a) for a in (arrays["x"], arrays["weight"], labels))

    def rows(**options):
        loss = lambda x, weight: linear_cross_entropy(
            x, weight, labels, implementation="xla", chunk_size=T, **options
        )
        return {shape[0] for shape in products(loss, x, weight)} - {len(weight)}

    assert rows() == {T}
    assert rows(counted_fraction=FRACTION) == {128, T}
    assert rows(counted_fraction=0.9) == {T}


@pytest.mark.parametrize(
    "num_tokens, fraction, expected",
    [(1000, 0.5, 512), (1024, 0.5, 512), (1025, 0.5, 640), (100, 0.1, 100), (0, 0.5, 0)],
)
def test_rows(num_tokens, fraction, expected):
    assert num_rows(num_tokens, fraction) == expected


def test_the_plan_is_that_of_the_rows():
    x, weight = jnp.zeros((4096, 64)), jnp.zeros((1000, 64))
    labels = jnp.zeros(4096, jnp.int32)
    plan = linear_cross_entropy_plan(x, weight, labels, counted_fraction=0.25)
    assert plan.chunk_size == 1024
    assert "1024 rows for the tokens that count, of 4096" in plan.reason
    assert "rows" not in linear_cross_entropy_plan(x, weight, labels).reason


@pytest.mark.parametrize("fraction", [0.0, -0.5, 1.5, math.nan])
def test_a_wrong_fraction_is_refused(fraction):
    arrays, labels = arrays_and_labels(only=("x", "weight"))
    with pytest.raises(ValueError, match="counted_fraction"):
        linear_cross_entropy(
            **as_jax(arrays), labels=jnp.asarray(labels), counted_fraction=fraction
        )


# Meshes and vmap.


@in_turn(
    "kind, reduction",
    {str(kind): kind for kind in (AxisType.Auto, AxisType.Explicit, AxisType.Manual)},
    {"mean": "mean", "none": "none"},
)
def test_devices_with_different_numbers_of_tokens_that_count(kind, reduction):
    """Of 4 devices two compute few rows and two all of them."""
    arrays, labels = make_arrays((4, T), only=("x", "weight"))
    labels[:2, 100:] = IGNORED
    cotangent = make_cotangent(reduction, labels.shape)
    is_manual = kind == AxisType.Manual
    mesh = jax.make_mesh(
        (4,), ("data",), axis_types=(AxisType.Auto if is_manual else kind,),
        devices=jax.devices()[:4],
    )  # fmt: skip
    options = {"reduction": reduction, "implementation": "xla", "chunk_size": 50}

    def loss(x, weight, labels):
        if not is_manual:
            return loss_of(x, weight, labels, counted_fraction=FRACTION, **options)
        options["reduction"] = "none" if reduction == "none" else "sum"

        def local(x, weight, labels):
            loss = loss_of(x, weight, labels, counted_fraction=FRACTION, **options)
            return loss if reduction == "none" else jax.lax.psum(loss, "data")

        specs = P("data"), P(), P("data")
        out = P("data") if reduction == "none" else P()
        total = jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=out)(x, weight, labels)
        return total if reduction == "none" else total / jnp.sum(labels != IGNORED, dtype=F32)

    def graded(x, weight, labels, cotangent):
        value, vjp = jax.vjp(lambda x, weight: loss(x, weight, labels), x, weight)
        return value, vjp(cotangent)

    split = NamedSharding(mesh, P("data"))
    with jax.set_mesh(mesh):
        x, labels_ = (jax.device_put(a, split) for a in (arrays["x"], labels))
        weight = jax.device_put(arrays["weight"], NamedSharding(mesh, P()))
        of_tokens = jax.device_put(cotangent, split) if reduction == "none" else cotangent
        value, (dx, dweight) = quick_jit(graded)(x, weight, labels_, of_tokens)
    got = {"loss": np.asarray(value), "x": np.asarray(dx), "weight": np.asarray(dweight)}
    check_against_formula(
        got, arrays, labels, cotangent, reduction=reduction, implementation="xla", chunk_size=50
    )


def test_a_split_vocabulary_says_that_all_tokens_are_computed(caplog):
    arrays, labels = arrays_and_labels(only=("x", "weight"), vocab=56)
    mesh = jax.make_mesh((2,), ("v",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])
    options = {"implementation": "xla", "chunk_size": 50}

    def loss(x, weight):
        local = lambda x, weight: linear_cross_entropy(
            x, weight, jnp.asarray(labels), vocab_axis="v", counted_fraction=FRACTION, **options
        )
        specs = P(), P("v")
        return jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=P())(x, weight)

    with caplog.at_level("WARNING"):
        value, grads = quick_jit(jax.value_and_grad(loss, (0, 1)))(arrays["x"], arrays["weight"])
    assert "counted_fraction=0.4 has no effect" in caplog.text
    got = {"loss": value, "x": grads[0], "weight": grads[1]}
    got = {name: np.asarray(a) for name, a in got.items()}
    check_against_formula(got, arrays, labels, **options)


def test_vmap_over_sequences():
    arrays, labels = arrays_and_labels(60, shape=(3, 100), only=("x", "weight"))

    def total(x, weight):
        loss = functools.partial(
            loss_of, reduction="sum", implementation="xla", chunk_size=50, counted_fraction=0.4
        )
        return jnp.sum(jax.vmap(loss, (0, None, 0))(x, weight, labels))

    value, (dx, dweight) = quick_jit(jax.value_and_grad(total, (0, 1)))(*arrays.values())
    got = {"loss": value, "x": dx, "weight": dweight}
    check_against_formula(got, arrays, labels, np.float32(1), reduction="sum", chunk_size=50)


@pytest.mark.parametrize("reduction", ["mean", pytest.param("none", marks=pytest.mark.full)])
def test_few_rows_and_all_rows_may_have_other_plans(on_h100, reduction):
    """A 16-bit `dweight` holds 3712 rows of 4096; all 12288 need sums in float32."""
    x, weight = (jax.ShapeDtypeStruct((n, 4096), BF16) for n in (12288, 128256))
    labels = jax.ShapeDtypeStruct((12288,), jnp.int32)
    options = {"implementation": "mosaic_gpu", "reduction": reduction}
    fn = lambda *args: jnp.sum(linear_cross_entropy(*args, counted_fraction=0.3, **options))
    dx, dweight = jax.eval_shape(jax.grad(fn, argnums=(0, 1)), x, weight, labels)
    assert (dx.dtype, dweight.dtype) == (BF16, BF16)
