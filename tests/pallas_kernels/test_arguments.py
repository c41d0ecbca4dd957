"""Arguments that the operations refuse, and values of tokens that do not count."""

import dataclasses
import functools
import math
from decimal import Decimal
from enum import IntEnum
from fractions import Fraction
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from pallas_kernels import (
    add_rms_norm,
    linear_cross_entropy,
    linear_cross_entropy_plan,
    rms_norm,
    sharded_add_rms_norm,
    swiglu,
    swiglu_mlp,
)
from pallas_kernels.fp8 import RECIPES
from pallas_kernels.gpu import device as gpu_device
from pallas_kernels.gpu import kernel as gpu_kernel_module
from pallas_kernels.gpu.device import Device
from pallas_kernels.loss import arguments
from support.numerics import quick_jit

BF16, F32 = jnp.bfloat16, jnp.float32


def on_mesh(partial, residual, weight, **options):
    """`sharded_add_rms_norm` on a mesh of one device."""
    mesh = jax.make_mesh((1,), ("tensor",), axis_types=(jax.sharding.AxisType.Auto,))
    fn = functools.partial(sharded_add_rms_norm, axis_name="tensor", **options)
    specs = {"in_specs": (P(), P("tensor"), P()), "out_specs": (P(), P("tensor"))}
    mapped = jax.shard_map(fn, mesh=mesh, check_vma=False, **specs)
    return mapped(partial, residual, weight)


# The operations, each with its arrays by name. All arrays are floats, except for `labels`.
OPERATIONS: dict[str, tuple[Any, dict[str, Any]]] = {
    "rms_norm": (rms_norm, {"x": (4, 128), "weight": (128,)}),
    "add_rms_norm": (add_rms_norm, {"x": (4, 128), "residual": (4, 128), "weight": (128,)}),
    "sharded_add_rms_norm": (
        on_mesh,
        {"partial": (4, 128), "residual": (4, 128), "weight": (128,)},
    ),
    "swiglu": (swiglu, {"gate": (4, 128), "up": (4, 128)}),
    "swiglu_mlp": (
        swiglu_mlp,
        {"x": (4, 128), "w_gate": (128, 128), "w_up": (128, 128), "w_down": (128, 128)},
    ),
    "linear_cross_entropy": (
        linear_cross_entropy,
        {"x": (4, 128), "weight": (128, 128), "bias": (128,), "labels": (4,)},
    ),
}
PRODUCTS = ("swiglu_mlp", "linear_cross_entropy")
each_operation = pytest.mark.parametrize("operation", OPERATIONS)
FLOATING = [(op, name) for op, (_, of) in OPERATIONS.items() for name in of if name != "labels"]


def call(operation, changed=None, dtype=F32, **options):
    fn, shapes = OPERATIONS[operation]
    arrays = {name: jnp.ones(shape, dtype) for name, shape in shapes.items()}
    if "labels" in arrays:
        arrays["labels"] = jnp.ones(4, jnp.int32)
    arrays |= changed or {}
    if operation == "sharded_add_rms_norm":
        return fn(*arrays.values(), **options)
    return fn(**arrays, **options)


@pytest.mark.parametrize("operation, name", FLOATING)
def test_arrays_that_are_not_floating(unchecked_shapes, operation, name):
    shape = OPERATIONS[operation][1][name]
    dtypes = [jnp.int32, jnp.uint8, jnp.bool, jnp.complex64]
    for dtype in dtypes + [jnp.float8_e4m3fn] * (operation in PRODUCTS):
        want = rf"^{name} is {jnp.dtype(dtype)}, .*; cast {name} to "
        with pytest.raises(TypeError, match=want):
            call(operation, {name: jnp.ones(shape, dtype)})


@pytest.mark.parametrize("operation, name", [*FLOATING, ("linear_cross_entropy", "labels")])
def test_what_is_no_array(unchecked_shapes, operation, name):
    if operation == "sharded_add_rms_norm":
        with pytest.raises(TypeError):  # jax.shard_map's
            call(operation, {name: "x"})
        return
    for value in ([[1.0] * 128] * 4, 1.0, "x"):
        with pytest.raises(TypeError, match=rf"^{name} must be an array, got a \w+; make it"):
            call(operation, {name: value})
    shape = jax.ShapeDtypeStruct(OPERATIONS[operation][1][name], F32)
    with pytest.raises(TypeError, match=rf"^{name} is a ShapeDtypeStruct, .* jax.eval_shape"):
        call(operation, {name: shape})


@pytest.mark.parametrize("operation", ["rms_norm", "add_rms_norm", "swiglu"])
def test_eight_bits_are_rounded_once(operation):
    arrays = {
        name: jnp.linspace(-2, 2, math.prod(shape)).reshape(shape).astype(jnp.float8_e4m3fn)
        for name, shape in OPERATIONS[operation][1].items()
    }
    wide = call(operation, jax.tree.map(lambda a: a.astype(F32), arrays))
    narrow = call(operation, arrays)
    if operation == "swiglu":
        chex.assert_trees_all_equal(narrow, wide.astype(jnp.float8_e4m3fn))
    assert all(a.dtype == jnp.float8_e4m3fn for a in jax.tree.leaves(narrow))


NAN, INF = math.nan, math.inf
NORMS = ("rms_norm", "add_rms_norm", "sharded_add_rms_norm")
LOSS = ("linear_cross_entropy",)
# An operation, an option with its value, the error, and the beginning of its message.
OPTIONS = [
    *((NORMS, "eps", value, ValueError, rf"eps={value} must be a finite number of at least 0")
      for value in (NAN, INF, -1.0)),
    (NORMS, "eps", "1", TypeError, "eps must be a number, got '1'"),
    *((NORMS, "eps", value, TypeError, "eps must be a number, got ")
      for value in (None, True, np.True_, b"1", np.complex64(1), Decimal("1"), jnp.float32)),
    *((NORMS, "eps", value, ValueError, r"eps=.* magnitude from 1.18e-38 to 3.4e\+38, because it")
      for value in (1e-50, 1e300)),
    (NORMS, "weight_offset", -1e-50, ValueError, r".*-50 must be 0 or have a magnitude"),
    (NORMS, "weight_offset", NAN, ValueError, "weight_offset=nan must be a finite number;"),
    (NORMS, "weight_offset", -INF, ValueError, "weight_offset=-inf must be a finite number;"),
    (NORMS, "casting", "fp8", ValueError, "casting='fp8' must be one of"),
    (("swiglu_mlp",), "chunk_size", 2.0, TypeError, "chunk_size must be an integer, got 2.0"),
    *((LOSS, name, 2.5, TypeError, f"{name} must be an integer, got 2.5; None chooses")
      for name in ("chunk_size", "vocab_chunk_size", "max_logits_bytes")),
    (LOSS, "chunk_size", True, TypeError, "chunk_size must be an integer, got True"),
    (LOSS, "ignore_index", -100.0, TypeError, "ignore_index must be an integer, got -100.0"),
    (LOSS, "ignore_index", None, TypeError, "ignore_index must be an integer, got None"),
    *((LOSS, "z_loss", value, ValueError, f"z_loss={value} must be a finite number of at least 0")
      for value in (NAN, INF, -0.1)),
    (LOSS, "z_loss", None, TypeError, "z_loss must be a number, got None; 0.0 is none"),
    (LOSS, "z_loss", 1e-50, ValueError, "z_loss=1e-50 must be .* a float32; 0.0 is none"),
    (LOSS, "z_loss", 10**400, ValueError, "z_loss=10+ must be a finite number of at least 0"),
    (LOSS, "label_smoothing", 1e-50, ValueError, "label_smoothing=1e-50 must be .* a float32"),
    (LOSS, "label_smoothing", "a", TypeError, "label_smoothing must be a number, got 'a'"),
    (LOSS, "logit_softcap", INF, ValueError, "logit_softcap=inf .*; None turns the cap off"),
    (LOSS, "logit_softcap", 1e39, ValueError, r"logit_softcap=1e\+39 must be .* float32; None"),
    (LOSS, "logit_softcap", "30", TypeError, "logit_softcap must be a number, got '30'; None"),
    (LOSS, "accum_dtype", jnp.int32, TypeError, "accum_dtype=int32, not a floating dtype;"),
    (LOSS, "accum_dtype", jnp.bool, TypeError, "accum_dtype=bool, not a floating dtype;"),
    (LOSS, "accum_dtype", jnp.complex64, TypeError, "accum_dtype=complex64, not a floating"),
    (LOSS, "accum_dtype", jnp.float8_e5m2, TypeError, "accum_dtype=float8_e5m2, of less than 16"),
    (LOSS, "accum_dtype", jnp.float64, ValueError, "accum_dtype=float64 needs jax_enable_x64;"),
    (LOSS, "accum_dtype", None, TypeError, "accum_dtype=None must be a dtype"),
    (LOSS, "accum_dtype", "fp8", TypeError, "accum_dtype='fp8' must be a dtype"),
    (LOSS, "vocab_axis", "tensor", ValueError, "vocab_axis='tensor' is not bound; call"),
    (LOSS, "vocab_axis", 3, TypeError, "vocab_axis=3 must be the name of a mesh axis"),
]  # fmt: skip


@pytest.mark.parametrize(
    "operations, name, value, error, message",
    OPTIONS,
    ids=[f"{name}={value}" for _, name, value, *_ in OPTIONS],
)
def test_options(unchecked_shapes, operations, name, value, error, message):
    for operation in operations:
        with pytest.raises(error, match=f"^{message}"):
            call(operation, **{name: value})


@pytest.mark.parametrize("operation", [name for name in OPERATIONS if name[:7] != "sharded"])
def test_launch_parameters_of_another_type(unchecked_shapes, operation):
    with pytest.raises(TypeError, match=r"config=\{\} must be a pallas_kernels\..*, or None"):
        call(operation, dtype=BF16, implementation="mosaic_gpu", config={})


@pytest.mark.parametrize(
    "name, value, error",
    [
        ("forward", "slow", ValueError),
        ("dgrad", None, ValueError),
        ("wgrad", "slow", ValueError),
        ("least_size", "0", TypeError),
        ("least_size", 1.5, TypeError),
    ],
)
def test_recipes_that_are_refused_when_they_are_made(unchecked_shapes, name, value, error):
    with pytest.raises(error, match=rf"^{name}.* must be "):
        dataclasses.replace(RECIPES["rowwise"], **{name: value})


class _Float(float):
    """As the numbers of a YAML file that keeps their text."""


def test_numbers_of_other_classes(unchecked_shapes):
    values = [1, IntEnum("Number", {"ONE": 1}).ONE, Fraction(1), _Float(1.0), np.float16(1)]
    values += [np.int8(1), jnp.bfloat16(1), jnp.float32(1)]
    outs = [call("rms_norm", eps=value) for value in values]
    for out in outs[1:]:
        chex.assert_trees_all_equal(out, outs[0])


def test_an_option_that_is_traced(unchecked_shapes):
    with pytest.raises(TypeError, match=r"eps must be a number, got a traced .* static argument"):
        jax.jit(lambda eps: call("rms_norm", eps=eps))(1e-5)


def test_an_integer_of_jax_as_the_chunk_size(unchecked_shapes):
    outs = [call("swiglu_mlp", save="x", chunk_size=size) for size in (jnp.int32(3), 3)]
    chex.assert_trees_all_equal(*outs)


def test_integers_and_bools_as_token_weights():
    mask, labels = np.array([1, 0, 1, 1]), np.zeros(4, np.int32)
    for dtype in (jnp.bool, jnp.int32, jnp.uint8):
        token_weights = mask.astype(dtype)
        jax.eval_shape(lambda a: call("linear_cross_entropy", token_weights=a), token_weights)
        weights = arguments.labels_and_weights(
            jnp.ones((4, 2)), labels, token_weights, 5, -100, False, "f"
        )[2]
        assert weights.dtype == F32 and list(weights) == [1, 0, 1, 1]


def test_token_weights_that_are_no_numbers(unchecked_shapes):
    with pytest.raises(TypeError, match=r"token_weights is complex64, .* cast token_weights to"):
        call("linear_cross_entropy", token_weights=jnp.ones(4, jnp.complex64))
    with pytest.raises(TypeError, match="token_weights must be an array, got a list"):
        call("linear_cross_entropy", token_weights=[1.0] * 4)


# Kernels where there is no GPU.


@each_operation
@pytest.mark.parametrize("how", [lambda fn: fn, jax.jit, jax.grad], ids=["", "jit", "grad"])
def test_kernels_are_refused_on_a_cpu(operation, how):
    shapes = OPERATIONS[operation][1]
    first = next(iter(shapes))

    def fn(a):
        out = call(operation, {first: a}, BF16, implementation="mosaic_gpu")
        return sum(jnp.sum(a.astype(F32)) for a in jax.tree.leaves(out))

    with pytest.raises(NotImplementedError, match=r"'mosaic_gpu': .*'cpu'"):
        how(fn)(jnp.ones(shapes[first], BF16))


def test_kernels_in_vmap_are_refused_on_a_cpu():
    norm = functools.partial(rms_norm, weight=jnp.ones(128), implementation="mosaic_gpu")
    with pytest.raises(NotImplementedError, match=r"'rms_norm_fwd' is for NVIDIA GPUs, .*'cpu';"):
        jax.vmap(norm)(jnp.ones((2, 4, 128)))


def test_an_old_gpu_is_refused(monkeypatch, fresh_operations):
    device = Device("NVIDIA T4", (7, 5), 40)
    for module in (gpu_device, gpu_kernel_module):
        monkeypatch.setattr(module, "target_device", lambda: device)
    for operation in ("rms_norm", "swiglu"):
        with pytest.raises(NotImplementedError, match=r"\(7, 5\) is below \(8, 0\)"):
            call(operation, dtype=BF16, implementation="mosaic_gpu")


@pytest.mark.parametrize("operation", [name for name in OPERATIONS if name[:7] != "sharded"])
def test_kernels_are_exported_from_a_cpu(operation):
    fn = functools.partial(call, operation, None, BF16, implementation="mosaic_gpu")
    exported = jax.export.export(jax.jit(fn), platforms=["cuda"])()
    assert "mosaic_gpu" in exported.mlir_module()


# Tokens that do not count.

T, D, V = 6, 4, 7
STRATEGIES: dict[str, dict[str, Any]] = {
    "reference": {"implementation": "reference"},
    "tokens": {"implementation": "xla", "chunk_size": 2},
    "columns": {"implementation": "xla", "vocab_chunk_size": 3},
}


def loss_arrays(dtype=F32):
    rng = np.random.default_rng(0)
    normal = lambda *shape: rng.normal(size=shape).astype(dtype)
    arrays = {"x": normal(T, D), "weight": normal(V, D), "bias": normal(V)}
    arrays["token_weights"] = rng.uniform(0.5, 2, size=T).astype(np.float32)
    return arrays, rng.integers(V, size=T).astype(np.int32)


def loss_program(**options):
    """Loss, metrics and gradients, of `(arrays, labels)`."""

    def loss(arrays, labels):
        loss, metrics = linear_cross_entropy(
            labels=labels, return_metrics=True, z_loss=0.01, **arrays, **options
        )
        return jnp.sum(loss), (loss, metrics)

    def run(arrays, labels):
        gradients, out = jax.grad(loss, has_aux=True)(arrays, labels)
        return gradients, out

    return quick_jit(run)


def put(a, place, value):
    a = a.copy()
    a[place] = value
    return a


NO_NUMBERS = np.nan, np.inf
# `dweight` may be made again, by another part of the program.
assert_close = functools.partial(chex.assert_trees_all_close, rtol=1e-6, atol=1e-7)


def check_ignored(run, arrays, labels):
    """The token 2 is ignored, so its values, NaN included, change no result."""
    x, weights = arrays["x"], arrays["token_weights"]
    ignored = put(labels, 2, -100)
    want = run(arrays | {"x": put(x, 2, 1)}, ignored)
    assert np.all(np.asarray(want[0]["x"])[2] == 0) and want[0]["token_weights"][2] == 0
    for value in NO_NUMBERS:
        broken = {"x": put(x, (2, 1), value), "token_weights": put(weights, 2, value)}
        assert_close(run(arrays | broken, ignored), want)


def check_without_weight(run, arrays, labels, values=NO_NUMBERS):
    """The token 2 has a weight of 0, so its values, NaN included, change no result."""
    x, weights = arrays["x"], put(arrays["token_weights"], 2, 0)

    def run_with(x, label):
        changed = {"x": x, "token_weights": weights}
        gradients, out = run(arrays | changed, put(labels, 2, label))
        # The gradient of the token's weight is its loss, and may change.
        of_weights = gradients.pop("token_weights")
        assert np.isfinite(of_weights).all()
        return gradients, np.delete(of_weights, 2), out

    want = run_with(x, labels[2])
    assert np.all(np.asarray(want[0]["x"])[2] == 0)
    assert_close(run_with(x, V), want)
    for value in values:
        assert_close(run_with(put(x, (2, 1), value), labels[2]), want)


@pytest.mark.parametrize(
    "strategy, reduction",
    [
        ("reference", "mean"),
        ("tokens", "none"),
        ("columns", "mean"),
        *(
            pytest.param(*case, marks=pytest.mark.full)
            for case in [("reference", "none"), ("tokens", "mean"), ("columns", "none")]
        ),
    ],
)
def test_tokens_that_do_not_count(strategy, reduction):
    arrays, labels = loss_arrays()
    run = loss_program(reduction=reduction, **STRATEGIES[strategy])
    check_ignored(run, arrays, labels)
    check_without_weight(run, arrays, labels)
    # A token that counts shows its NaN.
    gradients, (loss, metrics) = run(
        arrays | {"token_weights": put(arrays["token_weights"], 2, np.nan)}, labels
    )
    assert np.isnan(np.asarray(loss)).any() and np.isnan(metrics.nll)
    assert np.isnan(np.asarray(gradients["weight"])).any()


# The normal run has it in loss/test_loss_kernels_at_the_ends.py.
@pytest.mark.full
@pytest.mark.usefixtures("interpreted")
@pytest.mark.filterwarnings("ignore:invalid value encountered in matmul:RuntimeWarning")
def test_tokens_without_weight_in_the_kernels():
    arrays, labels = loss_arrays(BF16)
    del arrays["bias"]
    run = loss_program(implementation="mosaic_gpu", chunk_size=None)
    check_without_weight(run, arrays, labels, values=[np.nan])


# Labels.

# The dtype, ignore_index, and the meaning of labels: a column, "ignored" or "outside".
LABELS: list[tuple[Any, int, dict[int, Any]]] = [
    (np.int64, -100, {1: 1, 2**32 + 1: "outside", 2**62: "outside", -100: "ignored"}),
    (np.int64, -100, {-(2**32) + 1: "outside", 2**32 - 100: "outside", -1: "outside", 6: 6}),
    (np.int64, 2**40, {1: 1, 2**40: "ignored", 0: 0, V: "outside"}),
    (np.uint64, -100, {6: 6, 2**64 - 100: "outside", 2**32 + 1: "outside", 0: 0}),
    (np.uint32, -100, {6: 6, 2**32 - 100: "outside", V: "outside", 0: 0}),
    (np.uint32, 2**32 - 100, {6: 6, 2**32 - 100: "ignored", V: "outside", 0: 0}),
    (np.int32, 3, {3: "ignored", -100: "outside", 2: 2, -1: "outside"}),
    (np.int8, -100, {-100: "ignored", 127: "outside", -1: "outside", 5: 5}),
    (np.uint8, -100, {156: "outside", 5: 5, 255: "outside", 0: 0}),
]


@pytest.mark.parametrize("x64", [False, True])
def test_labels_are_what_they_are(x64):
    codes = {"ignored": arguments.IGNORED, "outside": arguments.OUT_OF_RANGE}
    with jax.enable_x64(x64):
        for dtype, ignore_index, cases in LABELS:
            labels = np.array(list(cases), dtype)
            # JAX's arrays have 32 bits without it.
            given = [labels] if labels.itemsize == 8 and not x64 else [labels, jnp.asarray(labels)]
            for form in given:
                got, counts, weights = arguments.labels_and_weights(
                    jnp.ones((*form.shape, 2)), form, None, V, ignore_index, False, "f"
                )
                assert got.dtype == jnp.int32
                want = list(cases.values())
                assert np.asarray(got).tolist() == [codes.get(a, a) for a in want], dtype
                assert np.asarray(counts).tolist() == [a != "ignored" for a in want]
                assert np.asarray(weights).tolist() == [float(a != "ignored") for a in want]


@pytest.mark.parametrize("implementation", ["reference", "xla"])
def test_labels_of_many_bits_make_nan(unchecked_shapes, implementation):
    arrays, labels = loss_arrays()
    wrong = [labels.astype(np.int64), labels.astype(np.uint32)]
    wrong = [put(wrong[0], 2, 2**32 + 1), put(wrong[1], 2, 2**32 - 100)]
    loss = functools.partial(linear_cross_entropy, **arrays, implementation=implementation)
    losses = quick_jit(lambda: [loss(labels=a) for a in (labels, *wrong)])()
    assert [bool(np.isnan(a)) for a in losses] == [False, True, True]


# `reduction="none"`.


def test_losses_without_a_reduction_go_by_chunks_of_tokens():
    args = [((8192, 64), BF16), ((128256, 64), BF16), ((8192,), jnp.int32)]
    args = [jax.ShapeDtypeStruct(*arg) for arg in args]
    plan = functools.partial(
        linear_cross_entropy_plan, *args, reduction="none", implementation="xla"
    )
    assert (plan().name, plan().num_products) == ("token chunks", 4)
    small = plan(max_logits_bytes=2**20)
    assert (small.name, small.chunk_size) == ("token chunks", 128)
    assert plan(vocab_chunk_size=256).name == "column chunks"
