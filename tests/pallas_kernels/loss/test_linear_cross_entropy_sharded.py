"""The linear cross-entropy on eight devices: results as on one device, and collectives."""

import functools
import math
import re
from collections import Counter
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from pallas_kernels import linear_cross_entropy, linear_log_probs
from support.numerics import assert_as_accurate, assert_close, quick_jit

BF16, F32 = jnp.bfloat16, jnp.float32
IGNORED = -100
# No two of these sizes, or of their parts on 2 to 8 devices, are equal, so a size in a compiled
# program says what it is of. Chunks do not divide them.
T, D, V = 40, 24, 56
TOKEN_CHUNKS = {"chunk_size": 3}
COLUMN_CHUNKS = {"vocab_chunk_size": 5}
OPTIONS = {"label_smoothing": 0.1, "z_loss": 1e-2, "logit_softcap": 1.5}

full = pytest.mark.full
each_chunking = pytest.mark.parametrize(
    "chunks", [TOKEN_CHUNKS, COLUMN_CHUNKS], ids=["token_chunks", "column_chunks"]
)
# Tests with the same options share three programs, which take a second each to compile.
each_chunking_and_reduction = pytest.mark.parametrize(
    "chunks, reduction",
    [
        (TOKEN_CHUNKS, "mean"),
        (COLUMN_CHUNKS, "none"),
        pytest.param(TOKEN_CHUNKS, "none", marks=full),
        pytest.param(COLUMN_CHUNKS, "mean", marks=full),
        pytest.param(TOKEN_CHUNKS, "sum", marks=full),
        pytest.param(COLUMN_CHUNKS, "sum", marks=full),
    ],
    ids=str,
)


def mesh_of(**axes: int) -> jax.sharding.Mesh:
    return jax.make_mesh(
        tuple(axes.values()),
        tuple(axes),
        axis_types=(AxisType.Auto,) * len(axes),
        devices=jax.devices()[: math.prod(axes.values())],
    )


def make_arrays(dtype=F32, *, token_weights=False):
    """Numpy arrays by name, and labels of which every fifth is ignored."""
    rng = np.random.default_rng(0)
    arrays = {
        "x": rng.normal(size=(T, D)).astype(dtype),
        "weight": (rng.normal(size=(V, D)) / math.sqrt(D)).astype(dtype),
        "bias": rng.normal(size=V).astype(dtype),
    }
    if token_weights:
        arrays["token_weights"] = rng.uniform(0.5, 2, size=T).astype(np.float32)
    labels = np.where(np.arange(T) % 5 == 3, IGNORED, rng.integers(V, size=T))
    return arrays, labels.astype(np.int32)


def placed(mesh, arrays, specs):
    return {n: jax.device_put(a, NamedSharding(mesh, specs[n])) for n, a in arrays.items()}


def on_one_device(arrays, labels, *, implementation: Any = "xla", **options):
    """The loss, and metrics by name."""
    loss, metrics = linear_cross_entropy(
        labels=labels, implementation=implementation, return_metrics=True, **arrays, **options
    )
    return loss, metrics._asdict()


def on_mesh(mesh, *, tokens=None, vocabulary=None, **options):
    """`on_one_device` with tokens and vocabulary each split over an axis of a mesh.

    Where tokens are split there are no metrics, because each device has those of its own tokens.
    """
    specs = {"x": P(tokens), "token_weights": P(tokens)}
    specs |= {"weight": P(vocabulary), "bias": P(vocabulary)}

    def local(arrays, labels):
        loss, metrics = on_one_device(arrays, labels, vocab_axis=vocabulary, **options)
        if tokens is None:
            return loss, metrics
        return loss.reshape(-1), {}

    def whole(arrays, labels):
        loss, metrics = jax.shard_map(
            local,
            mesh=mesh,
            in_specs=({name: specs[name] for name in arrays}, P(tokens)),
            out_specs=(P() if tokens is None else P(tokens), P()),
            check_vma=False,
        )(arrays, labels)
        return loss if tokens is None or options["reduction"] == "none" else jnp.sum(loss), metrics

    return whole


def graded(fn):
    """Loss, metrics and the gradient of every array, by name, of `(arrays, labels, cotangent)`."""

    def run(arrays, labels, cotangent):
        loss, vjp, metrics = jax.vjp(lambda a: fn(a, labels), arrays, has_aux=True)
        return {"loss": loss} | metrics | vjp(cotangent)[0]

    return quick_jit(run)


@functools.cache
def graded_on_one_device(**options):
    return graded(functools.partial(on_one_device, **options))


@functools.cache
def graded_on_mesh(mesh, **options):
    return graded(on_mesh(mesh, **options))


def make_cotangent(reduction):
    """A cotangent that is no power of 2, as a wrong factor would be."""
    if reduction != "none":
        return np.float32(0.7)
    return np.random.default_rng(1).normal(size=T).astype(np.float32)


def check(run, arrays, labels, *, token_parts=1, column_parts=1, reduction="mean", **options):
    """Compares the errors of a graded function with those of one device."""
    cotangent = make_cotangent(reduction)
    got = run(arrays, labels, cotangent)
    on_one = graded_on_one_device(reduction=reduction, **options)
    low = on_one(arrays, labels, cotangent)
    # Each device rounds the gradient that its tokens give.
    part = np.arange(T) * token_parts // T
    parts = [
        on_one(arrays, np.where(part == i, labels, np.int32(IGNORED)), cotangent)
        for i in range(token_parts)
    ]
    for name in ("weight", "bias"):
        total = np.sum([np.asarray(p[name], np.float32) for p in parts], axis=0)
        low[name] = total.astype(arrays[name].dtype)
    unchunked = {n: v for n, v in options.items() if n not in (*TOKEN_CHUNKS, *COLUMN_CHUNKS)}
    exact = graded_on_one_device(reduction=reduction, implementation="reference", **unchunked)(
        {name: a.astype(F32) for name, a in arrays.items()}, labels, cotangent
    )
    for name, array in arrays.items():
        chex.assert_type(got[name], array.dtype)
    for name in got:
        values = ([tree[name]] for tree in (got, low, exact))
        # Each device rounds the dx of its columns, and the sum is rounded: two errors, not one.
        slack = 1.2 * math.sqrt(2) if name == "x" and column_parts > 1 else 1.2
        assert_as_accurate(*values, names=[name], slack=slack)
    return got


# Tokens are split.


# Here and below the cases have every pair of values of two parameters, and not every triple. The
# normal run has the split with weights below, and the whole model in test_meshes.py.
@pytest.mark.parametrize(
    "axes, chunks, dtype",
    [
        pytest.param({"data": 8}, TOKEN_CHUNKS, F32, marks=full),
        pytest.param({"data": 8}, COLUMN_CHUNKS, BF16, marks=full),
        pytest.param({"data": 4}, COLUMN_CHUNKS, F32, marks=full),
        pytest.param({"data": 2, "fsdp": 4}, TOKEN_CHUNKS, BF16, marks=full),
        pytest.param({"data": 2, "fsdp": 4}, COLUMN_CHUNKS, F32, marks=full),
    ],
    ids=str,
)
def test_split_tokens(axes, chunks, dtype):
    options = {"reduction": "sum", **chunks, **OPTIONS}
    mesh, parts = mesh_of(**axes), math.prod(axes.values())
    arrays, labels = make_arrays(dtype, token_weights=True)
    specs = {"x": P(tuple(axes)), "token_weights": P(tuple(axes)), "weight": P(), "bias": P()}
    run = lambda arrays, *rest: graded_on_one_device(**options)(placed(mesh, arrays, specs), *rest)
    check(run, arrays, labels, token_parts=parts, **options)


# The vocabulary is split.


# The normal run splits the vocabulary with these options beside the tokens, and with metrics in the
# tests of weights.
@pytest.mark.parametrize(
    "parts, reduction, chunks",
    [
        pytest.param(2, "mean", TOKEN_CHUNKS, marks=full),
        pytest.param(2, "mean", COLUMN_CHUNKS, marks=full),
        pytest.param(2, "sum", TOKEN_CHUNKS, marks=full),
        pytest.param(2, "sum", COLUMN_CHUNKS, marks=full),
        pytest.param(4, "sum", TOKEN_CHUNKS, marks=full),
        pytest.param(4, "sum", COLUMN_CHUNKS, marks=full),
        pytest.param(8, "sum", COLUMN_CHUNKS, marks=full),
        pytest.param(8, "mean", TOKEN_CHUNKS, marks=full),
        pytest.param(8, "mean", COLUMN_CHUNKS, marks=full),
        pytest.param(8, "none", TOKEN_CHUNKS, marks=full),
        pytest.param(8, "none", COLUMN_CHUNKS, marks=full),
    ],
    ids=str,
)
def test_split_vocabulary(parts, reduction, chunks):
    options = {"reduction": reduction, **chunks, **OPTIONS}
    run = graded_on_mesh(mesh_of(tensor=parts), vocabulary="tensor", **options)
    got = check(run, *make_arrays(), column_parts=parts, **options)
    assert got["num_tokens"] == T * 4 // 5 and got["nll"] > 0 and got["z_loss"] > 0


@pytest.mark.parametrize(
    "parts, reduction, chunks",
    [
        pytest.param(2, "none", COLUMN_CHUNKS, marks=full),
        pytest.param(2, "none", TOKEN_CHUNKS, marks=full),
        pytest.param(4, "mean", TOKEN_CHUNKS, marks=full),
        pytest.param(4, "mean", COLUMN_CHUNKS, marks=full),
        pytest.param(8, "sum", COLUMN_CHUNKS, marks=full),
    ],
    ids=str,
)
def test_split_vocabulary_in_bfloat16(parts, reduction, chunks):
    options = {"reduction": reduction, **chunks, **OPTIONS}
    run = graded_on_mesh(mesh_of(tensor=parts), vocabulary="tensor", **options)
    check(run, *make_arrays(BF16), column_parts=parts, **options)


@each_chunking_and_reduction
def test_weights_of_tokens_and_split_vocabulary(chunks, reduction):
    # Each device has the gradient of all token weights; their sum must not count it four times.
    options = {"reduction": reduction, **chunks}
    run = graded_on_mesh(mesh_of(tensor=4), vocabulary="tensor", **options)
    check(run, *make_arrays(token_weights=True), column_parts=4, **options)


@pytest.mark.parametrize(
    "dtype, data, tensor, reduction, chunks",
    [
        pytest.param(F32, 2, 4, "sum", TOKEN_CHUNKS, marks=full),
        pytest.param(F32, 2, 4, "sum", COLUMN_CHUNKS, marks=full),
        (BF16, 2, 4, "sum", COLUMN_CHUNKS),
        pytest.param(F32, 4, 2, "none", TOKEN_CHUNKS, marks=full),
        pytest.param(F32, 4, 2, "none", COLUMN_CHUNKS, marks=full),
        pytest.param(BF16, 2, 4, "none", TOKEN_CHUNKS, marks=full),
        pytest.param(BF16, 2, 4, "none", COLUMN_CHUNKS, marks=full),
        pytest.param(BF16, 4, 2, "none", TOKEN_CHUNKS, marks=full),
        pytest.param(BF16, 4, 2, "sum", TOKEN_CHUNKS, marks=full),
        pytest.param(BF16, 4, 2, "sum", COLUMN_CHUNKS, marks=full),
    ],
    ids=str,
)
def test_split_tokens_and_vocabulary(dtype, data, tensor, reduction, chunks):
    options = {"reduction": reduction, **chunks, **OPTIONS}
    mesh = mesh_of(data=data, tensor=tensor)
    run = graded_on_mesh(mesh, tokens="data", vocabulary="tensor", **options)
    check(run, *make_arrays(dtype), token_parts=data, column_parts=tensor, **options)


# Traps of a split vocabulary.


@pytest.mark.parametrize("fn", [linear_cross_entropy, linear_log_probs])
@pytest.mark.parametrize("implementation", ["reference", "xla"])
def test_axes_that_are_left_to_xla_inside_of_a_shard_map(fn, implementation):
    """A gather of the logits of labels made XLA abort the process (JAX 0.11.2 and 0.12)."""
    mesh = mesh_of(stage=2, data=2, tensor=2)
    arrays, labels = make_arrays()
    arrays.pop("bias")
    options = {"chunk_size": 10} if implementation == "xla" else {}

    def of_tokens(arrays, labels):
        options_of_fn = {"reduction": "none"} if fn is linear_cross_entropy else {}
        return fn(
            labels=labels, implementation=implementation, **arrays, **options, **options_of_fn
        )

    split = jax.shard_map(
        of_tokens,
        mesh=mesh,
        in_specs=({"x": P("stage"), "weight": P()}, P("stage")),
        out_specs=P("stage"),
        axis_names={"stage"},
    )
    specs = {"x": P(("stage", "data")), "weight": P("tensor")}
    graded_sum = lambda fn: quick_jit(
        jax.value_and_grad(lambda *args: jnp.sum(jax.tree.leaves(fn(*args))[0]))
    )
    with jax.set_mesh(mesh):
        placed_labels = jax.device_put(labels, NamedSharding(mesh, P(("stage", "data"))))
        got = graded_sum(split)(placed(mesh, arrays, specs), placed_labels)
    assert_close(got, graded_sum(of_tokens)(arrays, labels))


PARTS = 4
PART = V // PARTS


def check_split_vocabulary(arrays, labels, **options):
    chosen: dict[str, Any] = {"reduction": "mean"} | options
    run = graded_on_mesh(mesh_of(tensor=PARTS), vocabulary="tensor", **chosen)
    return check(run, arrays, labels, column_parts=PARTS, **chosen)


@each_chunking_and_reduction
def test_a_label_on_no_device_is_nan(reduction, chunks):
    arrays, labels = make_arrays(token_weights=True)
    for label in (-1, V, V + 1, -PART, -(2**31), 2**31 - 1):
        labels[6] = label
        got = check_split_vocabulary(arrays, labels, reduction=reduction, **chunks)
        nan_losses = np.isnan(np.asarray(got["loss"]))
        assert np.all(nan_losses == (np.arange(T) == 6 if reduction == "none" else True)), label
        assert np.all(np.isnan(got["weight"])) and np.all(np.isnan(got["bias"])), label
        nan_x = np.all(np.isnan(got["x"]), axis=1)
        np.testing.assert_array_equal(nan_x, np.arange(T) == 6, str(label))


@pytest.mark.parametrize("chunks", [pytest.param(TOKEN_CHUNKS, marks=full), COLUMN_CHUNKS], ids=str)
def test_an_ignored_label_that_is_a_column(chunks):
    # The second device has this column. On the others its number is out of range.
    arrays, labels = make_arrays()
    labels[::5] = ignored = PART + 3
    got = check_split_vocabulary(
        arrays, np.where(labels == IGNORED, 0, labels), ignore_index=ignored, **chunks
    )
    assert got["num_tokens"] == np.sum(labels != ignored)
    assert not np.any(got["x"][::5])


def weighted_mean(values, arrays, labels):
    """The mean over the tokens that count, with their weights, as a metric has it."""
    return np.average(values, weights=arrays["token_weights"] * (labels != IGNORED))


@each_chunking_and_reduction
@pytest.mark.parametrize("column", [0, PART, V - 1])
def test_one_device_has_all_the_probability(column, reduction, chunks):
    # Relative to its own maximum each of the other devices sees ordinary logits.
    arrays, labels = make_arrays(token_weights=True)
    arrays["bias"][column] = 300
    labels[::2] = column
    got = check_split_vocabulary(arrays, labels, reduction=reduction, **chunks)
    expected = weighted_mean(labels == column, arrays, labels)
    np.testing.assert_allclose(got["accuracy"], expected, rtol=1e-6)


@each_chunking_and_reduction
@pytest.mark.parametrize("part", [0, 2])
def test_a_device_with_logits_of_minus_infinity(part, reduction, chunks):
    arrays, labels = make_arrays(token_weights=True)
    columns = slice(part * PART, (part + 1) * PART)
    arrays["bias"][columns] = -np.inf
    labels[labels // PART == part] = (columns.stop + 1) % V
    got = check_split_vocabulary(arrays, labels, reduction=reduction, **chunks)
    assert np.all(np.isfinite(got["loss"]))
    assert not np.any(got["weight"][columns]) and not np.any(got["bias"][columns])
    labels[0] = columns.start
    got = check_split_vocabulary(arrays, labels, reduction=reduction, **chunks)
    assert np.sum(got["loss"]) == np.inf


@each_chunking_and_reduction
def test_the_first_of_equal_logits_counts(reduction, chunks):
    arrays, labels = make_arrays(token_weights=True)
    equal = [2, PART + 1, V - 1]
    arrays["weight"][equal] = 0
    arrays["bias"][equal] = 50
    labels[:] = np.resize(equal, T)
    got = check_split_vocabulary(arrays, labels, reduction=reduction, **chunks)
    expected = weighted_mean(labels == 2, arrays, labels)
    np.testing.assert_allclose(got["accuracy"], expected, rtol=1e-6)


# Collectives.

COLLECTIVES = "all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute"


def collectives(fn, *args) -> Counter[tuple[str, tuple[int, ...]]]:
    """How many collectives a compiled function has, by name and shape of the result."""
    program = fn.lower(*args).compile().as_text()
    found = re.findall(rf" = (\(?[^()]+\)?) ({COLLECTIVES})(?:-start)?\(", program)
    assert len(found) == len(re.findall(rf" (?:{COLLECTIVES})(?:-start)?\(", program))
    return Counter(
        (name, tuple(int(size) for size in dims.split(",") if size))
        for results, name in found
        for dims in re.findall(r"\w\[([\d,]*)\]", results)
    )


def statistics_of(tokens: int, parts: int) -> tuple[str, tuple[int, ...]]:
    """The all-gather of five float32 numbers for each token and device."""
    return "all-gather", (5, parts, tokens)


@pytest.mark.parametrize(
    "chunks, reduction",
    [
        (TOKEN_CHUNKS, "mean"),
        pytest.param(TOKEN_CHUNKS, "none", marks=full),
        pytest.param(COLUMN_CHUNKS, "mean", marks=full),
        pytest.param(COLUMN_CHUNKS, "none", marks=full),
    ],
    ids=str,
)
def test_between_devices_with_split_vocabulary(chunks, reduction):
    mesh, options = mesh_of(tensor=4), {"vocabulary": "tensor", "reduction": reduction, **chunks}
    args = make_arrays()
    assert collectives(quick_jit(on_mesh(mesh, **options)), *args) == Counter([statistics_of(T, 4)])

    expected = [("all-reduce", (T, D))]  # dx
    expected += [("all-reduce", () if reduction == "mean" else (T,))]  # the cotangents
    if chunks == COLUMN_CHUNKS or reduction == "none":
        expected += [statistics_of(T, 4)]
    if chunks != COLUMN_CHUNKS:
        # One for the first chunk, and one in the loop over the others.
        expected += [statistics_of(T % 3, 4), statistics_of(3, 4)]
    run = graded_on_mesh(mesh, **options)
    assert collectives(run, *args, make_cotangent(reduction)) == Counter(expected)


@each_chunking
def test_between_devices_with_split_tokens_and_vocabulary(chunks):
    mesh = mesh_of(data=2, tensor=4)
    run = graded_on_mesh(mesh, tokens="data", vocabulary="tensor", reduction="sum", **chunks)
    cotangent = make_cotangent("sum")
    # One axis sums dx, the other dweight and dbias. The loss and its cotangent are sums, too.
    shapes = [(T // 2, D), (V // 4, D), (V // 4,), (), ()]
    expected = [("all-reduce", shape) for shape in shapes]
    if chunks == COLUMN_CHUNKS:
        expected += [statistics_of(T // 2, 4)]
    else:
        expected += [statistics_of(T // 2 % 3, 4), statistics_of(3, 4)]
    assert collectives(run, *make_arrays(), cotangent) == Counter(expected)


# The weight is split along D, and whole while the loss is computed.


@pytest.mark.parametrize("chunks", [TOKEN_CHUNKS, pytest.param(COLUMN_CHUNKS, marks=full)], ids=str)
def test_a_weight_split_along_d_is_gathered_once(chunks):
    mesh = mesh_of(data=2, fsdp=4)
    specs = {"x": P(("data", "fsdp")), "weight": P(None, "fsdp"), "bias": P()}
    options = {"reduction": "sum", **chunks}
    graded_loss = graded_on_one_device(**options)
    run = lambda arrays, *rest: graded_loss(placed(mesh, arrays, specs), *rest)
    arrays, labels = make_arrays()
    check(run, arrays, labels, token_parts=8, **options)
    split = placed(mesh, arrays, specs)
    moved = collectives(graded_loss, split, labels, make_cotangent("sum"))
    # Chunks of columns need the weight in the backward, too.
    assert {key: number for key, number in moved.items() if key[0] != "all-reduce"} == {
        ("all-gather", (4, V, D // 4)): 2 if chunks == COLUMN_CHUNKS else 1,
        ("reduce-scatter", (V, D // 4)): 1,
    }
    # The last sum is over the copies of the weight.
    assert moved["all-reduce", (V, D // 4)] == 1


@pytest.mark.parametrize("fn", [linear_cross_entropy, linear_log_probs], ids=lambda f: f.__name__)
def test_a_vocab_axis_that_does_not_split_the_weight(fn):
    """Each device would count the whole vocabulary again: an error of log 4."""
    mesh = jax.make_mesh((4,), ("tensor",), (AxisType.Auto,))
    x, weight, labels = jnp.ones((8, 16)), jnp.ones((32, 16)), jnp.zeros(8, jnp.int32)
    run = lambda *args: fn(*args, vocab_axis="tensor")
    mapped = jax.shard_map(run, mesh=mesh, in_specs=(P(), P(), P()), out_specs=P())
    message = "vocab_axis='tensor' does not split the weight, which is the same on all 4 devices"
    with pytest.raises(ValueError, match=message):
        jax.eval_shape(mapped, x, weight, labels)
