"""The loss with a weight `[D, V]`, against the formula in float64 and its counterpart `[V, D]`."""

import functools
import logging
from typing import Any

import chex
import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from pallas_kernels import explain, linear_cross_entropy, linear_cross_entropy_plan
from support.loss_formulas import (
    BF16,
    F32,
    STRATEGIES,
    as_jax,
    check,
    check_against_formula,
    full,
    in_turn,
    interpreted,
    make_arrays,
    make_cotangent,
)
from support.loss_kernels import (
    ALL_OPTIONS,
    ONE_WARPGROUP,
    kernel_names,
    names_in,
    prefer_in_place,
)
from support.numerics import quick_jit

DV: dict[str, Any] = {"weight_layout": "dv"}
COLUMNS_AND_OPTIONS = {"vocab_chunk_size": 100, **ALL_OPTIONS}


@in_turn(
    "strategy, case",
    STRATEGIES,
    {
        "bfloat16_mean": (BF16, BF16, "mean", {}),
        "float32_none": (F32, F32, "none", ALL_OPTIONS),
        "bfloat16_float32_sum": (BF16, F32, "sum", {}),
    },
)
def test_without_kernels(strategy, case):
    dtype, weight_dtype, reduction, options = case
    arrays, labels = make_arrays()
    arrays["x"] = arrays["x"].astype(dtype)
    # The products round the weight to the dtype of x, so these weights lose nothing.
    arrays["weight"] = arrays["weight"].astype(dtype).astype(weight_dtype)
    check(arrays, labels, reduction=reduction, **strategy, **options, **DV)


# 640 columns are two tiles and a half. 72 values of a token are a step and 8 values of another.
@interpreted
@pytest.mark.parametrize(
    "num_tokens, hidden, vocab, names, options",
    [
        (9, 72, 640, ["x", "weight"], {"chunk_size": 16}),
        pytest.param(9, 72, 640, ["x", "weight"], {"chunk_size": 4}, marks=full),
        pytest.param(9, 24, 256, ["x", "weight", "bias"], {"chunk_size": 8}, marks=full),
        pytest.param(9, 100, 256, ["x", "weight"], {"chunk_size": 8}, marks=full),
        pytest.param(9, 128, 384, ["x", "weight"], {"vocab_chunk_size": 128}, marks=full),
        pytest.param(70, 72, 640, ["x", "weight"], {"vocab_chunk_size": 100}, marks=full),
        pytest.param(9, 24, 384, ["x", "weight", "bias"], COLUMNS_AND_OPTIONS, marks=full),
        pytest.param(200, 64, 640, ["x", "weight"], {"reduction": "none"}, marks=full),
    ],
    ids=str,
)
def test_kernels(num_tokens, hidden, vocab, names, options):
    arrays, labels = make_arrays((num_tokens,), hidden, vocab, BF16, only=names)
    ours = {"implementation": "mosaic_gpu", "config": ONE_WARPGROUP, "chunk_size": None}
    check(arrays, labels, **(ours | options), **DV)


@full
@interpreted
@pytest.mark.parametrize("hidden", [72, 128])
def test_the_loss_alone(hidden):
    arrays, labels = as_jax(make_arrays((9,), hidden, 640, BF16, only=["x", "weight"]))
    fn = functools.partial(linear_cross_entropy, implementation="mosaic_gpu", **DV)
    args = arrays["x"], arrays["weight"].T, labels
    assert "linear_statistics" in kernel_names(fn, *args)
    exact = linear_cross_entropy(arrays["x"], arrays["weight"], labels, implementation="reference")
    # Both add up float32 products of the same operands.
    chex.assert_trees_all_close(quick_jit(fn)(*args), exact, rtol=1e-6)


@pytest.mark.parametrize(
    "kind, spec, tokens",
    [
        (AxisType.Auto, P(None, "model"), "data"),
        (AxisType.Explicit, P("data", "model"), "data"),
        pytest.param(AxisType.Explicit, P(None, "model"), "data", marks=full),
        pytest.param(AxisType.Auto, P("data", "model"), "data", marks=full),
        pytest.param(AxisType.Auto, P(("data", "model"), None), ("data", "model"), marks=full),
        pytest.param(AxisType.Explicit, P(None, ("data", "model")), None, marks=full),
    ],
    ids=str,
)
def test_meshes(kind, spec, tokens):
    """The weight `[D, V]`, and its gradient, may be split by D and by V."""
    arrays, labels = make_arrays((32,), 24, 56, only=["x", "weight"])
    mesh = jax.make_mesh((2, 4), ("data", "model"), (kind, kind))
    place = lambda a, spec: jax.device_put(a, NamedSharding(mesh, spec))

    def run(x, weight, labels):
        loss = functools.partial(
            linear_cross_entropy, labels=labels, chunk_size=3, implementation="xla", **DV
        )
        return jax.value_and_grad(loss, argnums=(0, 1))(x, weight)

    with jax.set_mesh(mesh):
        args = place(arrays["x"], P(tokens)), place(arrays["weight"].T, spec)
        loss, (dx, dweight) = quick_jit(run)(*args, place(labels, P(tokens)))
    assert dweight.shape == (24, 56)
    if kind == AxisType.Explicit:
        assert jax.typeof(dweight).sharding.spec == spec
    got = jax.device_get({"loss": loss, "x": dx, "weight": dweight.T})
    check_against_formula(got, arrays, labels)


@pytest.mark.parametrize(
    "chunks", [pytest.param({"chunk_size": 3}, marks=full), {"vocab_chunk_size": 5}], ids=str
)
def test_a_vocabulary_split_inside_of_shard_map(chunks):
    arrays, labels = make_arrays((16,), 24, 56, only=["x", "weight"])
    mesh = jax.make_mesh((4,), ("model",), (AxisType.Auto,), devices=jax.devices()[:4])
    loss = functools.partial(
        linear_cross_entropy, vocab_axis="model", implementation="xla", **chunks, **DV
    )
    split = jax.shard_map(loss, mesh=mesh, in_specs=(P(), P(None, "model"), P()), out_specs=P())
    grad = quick_jit(jax.value_and_grad(split, argnums=(0, 1)))
    total, (dx, dweight) = grad(arrays["x"], arrays["weight"].T, labels)
    got = jax.device_get({"loss": total, "x": dx, "weight": dweight.T})
    check_against_formula(got, arrays, labels, vocab_chunk_size=chunks.get("vocab_chunk_size"))


def test_vmap_makes_one_gradient_of_the_weight():
    arrays, labels = make_arrays((3, 8), 24, 53, only=["x", "weight"])
    loss = functools.partial(
        linear_cross_entropy, reduction="sum", implementation="xla", chunk_size=5, **DV
    )

    def total(x, weight):
        return jnp.sum(jax.vmap(loss, in_axes=(0, None, 0))(x, weight, labels))

    grad = jax.value_and_grad(total, argnums=(0, 1))
    args: Any = arrays["x"], arrays["weight"].T
    assert "f32[3,24,53]" not in str(jax.make_jaxpr(grad)(*args))
    value, (dx, dweight) = quick_jit(grad)(*args)
    got = {"loss": value, "x": dx, "weight": dweight.T}
    check_against_formula(got, arrays, labels, make_cotangent("sum"), reduction="sum")


@interpreted
def test_the_plan_in_place_with_numbers_of_64_bits(monkeypatch):
    prefer_in_place(monkeypatch)
    shape = jax.ShapeDtypeStruct
    args = shape((300, 128), BF16), shape((128, 1024), F32), shape((300,), jnp.int32)
    loss = functools.partial(
        linear_cross_entropy, implementation="mosaic_gpu", max_logits_bytes=2**20, **DV
    )
    with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):
        grad = jax.grad(loss, argnums=(0, 1))
        program: Any = jax.make_jaxpr(grad)(*args)
    assert "weight_gradient_columns" in names_in(program)
    assert [a.dtype for a in program.out_avals] == [BF16, F32]


def test_wrong_layouts(unchecked_shapes):
    x, weight, labels = jnp.ones((6, 4)), jnp.ones((5, 4)), jnp.ones(6, jnp.int32)
    with pytest.raises(ValueError, match=r"weight_layout='nk' must be one of \('vd', 'dv'\)"):
        linear_cross_entropy(x, weight, labels, weight_layout="nk")  # pyright: ignore
    with pytest.raises(ValueError, match=r"\(6, 4\) and weight \(5, 4\) must agree in D.*\[D, V\]"):
        linear_cross_entropy(x, weight, labels, **DV)
    with pytest.raises(ValueError, match=r"weight must be \[D, V\].* got \(4,\)"):
        linear_cross_entropy(x, weight[0], labels, **DV)
    with pytest.raises(ValueError, match=r"bias must have shape \(5,\), got \(4,\)"):
        linear_cross_entropy(x, weight.T, labels, bias=jnp.ones(4), **DV)


SHAPE = jax.ShapeDtypeStruct


@interpreted
def test_the_remedy_for_rows_of_a_length_that_no_kernel_reads():
    x, labels = SHAPE((16, 128), BF16), SHAPE((16,), jnp.int32)
    weight = SHAPE((128, 32001), BF16)
    remedy = "pad the vocabulary, so that a device has 32128 columns, or give a weight"
    assert remedy in str(explain(functools.partial(linear_cross_entropy, **DV), x, weight, labels))
    assert remedy in str(linear_cross_entropy_plan(x, weight, labels, **DV))
    with pytest.raises(NotImplementedError, match=remedy):
        linear_cross_entropy_plan(x, weight, labels, implementation="mosaic_gpu", **DV)


def test_the_copy_of_a_part_is_logged(on_h100, caplog):
    """The plan is made before the operation knows a device's part of the vocabulary."""
    x, labels = SHAPE((16, 128), BF16), SHAPE((16,), jnp.int32)
    mesh = jax.make_mesh((4,), ("model",), (AxisType.Explicit,), devices=jax.devices()[:4])
    fn = functools.partial(linear_cross_entropy, implementation="mosaic_gpu", **DV)
    with jax.set_mesh(mesh), caplog.at_level(logging.WARNING):
        whole = lambda a: SHAPE(a.shape, a.dtype, sharding=NamedSharding(mesh, P()))
        split = SHAPE((128, 256), BF16, sharding=NamedSharding(mesh, P(None, "model")))
        jax.eval_shape(fn, whole(x), split, whole(labels))
    assert "each device copies its part; weight is [D, V], and its rows of V = 64" in caplog.text
