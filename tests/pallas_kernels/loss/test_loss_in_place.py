"""Exponentials in the memory of `dweight`, at sizes where the loss keeps them by default."""

import chex
import jax
import jax.numpy as jnp
import pytest

from pallas_kernels import linear_cross_entropy_plan
from pallas_kernels.loss import plan as plan_module
from pallas_kernels.loss.mosaic_gpu import in_place
from support.loss_formulas import (
    BF16,
    F16,
    F32,
    as_jax,
    check_against_formula,
    full,
    interpreted,
    make_arrays,
    make_cotangent,
)
from support.loss_kernels import (
    in_place_loss,
    kernel_names,
    prefer_in_place,
    run_and_kernel_names,
)
from support.numerics import quick_jit


# The memory of a float32 dweight holds the exponentials of 2 · hidden tokens, and a dweight of 16
# bits those of half as many. Those of other tokens lie in memory of their own, "beside", or the
# tokens come in chunks. Bands: blocks of 128 rows in a band, bands, blocks that are copied.
@interpreted
@pytest.mark.parametrize(
    "num_tokens, hidden, vocab, weight_dtype, reduction, bands",
    [
        pytest.param(1, 128, 384, BF16, "mean", (1, 2, 1), marks=full),
        pytest.param(63, 128, 128, F32, "sum", (1, 0, 0), marks=full),
        pytest.param(64, 128, 512, BF16, "none", (1, 3, 1), marks=full),
        pytest.param(65, 192, 640, F16, "mean", (1, 3, 2), marks=full),
        pytest.param(65, 192, 640, F32, "mean", (1, 3, 2), marks=full),
        pytest.param(128, 128, 256, BF16, "mean", (2, 0, 0), marks=full),
        # One beside, half a tile of hidden, and rows after the vocabulary.
        pytest.param(193, 192, 250, BF16, "none", (1, 1, 1), marks=full),
        pytest.param(500, 192, 300, F32, "mean", (1, 2, 1), marks=full),
        # The same with gradients of one block of columns, which is half a tile.
        pytest.param(65, 64, 250, BF16, "none", (1, 1, 1), marks=full),
        pytest.param(300, 64, 300, F32, "mean", (1, 2, 1), marks=full),
        pytest.param(129, 128, 256, BF16, "none", (1, 1, 1), marks=full),  # one beside
        pytest.param(321, 320, 384, BF16, "sum", (1, 2, 1), marks=full),  # one beside
        pytest.param(129, 128, 384, BF16, "none", (1, 2, 1), marks=full),
        pytest.param(129, 128, 384, BF16, "sum", (1, 2, 1), marks=full),
        pytest.param(256, 128, 384, F32, "mean", (1, 2, 1), marks=full),
        pytest.param(200, 128, 640, F16, "mean", (1, 2, 3), marks=full),
        pytest.param(300, 128, 896, F32, "mean", (2, 2, 3), marks=full),  # 44 beside
        pytest.param(511, 128, 512, BF16, "none", (1, 2, 2), marks=full),  # 255 beside
        (400, 128, 384, F32, "mean", (1, 2, 1)),  # 144 and twice 128
        pytest.param(800, 192, 384, F32, "mean", (1, 2, 1), marks=full),  # 288 and twice 256
        pytest.param(900, 256, 384, F32, "mean", (1, 2, 1), marks=full),  # 388 and twice 256
        pytest.param(900, 256, 384, BF16, "sum", (3, 0, 0), marks=full),
    ],
    ids=str,
)
def test_in_place(monkeypatch, num_tokens, hidden, vocab, weight_dtype, reduction, bands):
    check_in_place(monkeypatch, (num_tokens, hidden, vocab), weight_dtype, reduction, bands, 128)


# A weight [D, V] has blocks of 256 columns.
@interpreted
@pytest.mark.parametrize(
    "num_tokens, hidden, vocab, weight_dtype, reduction, bands",
    [
        pytest.param(1, 128, 256, BF16, "mean", (1, 0, 0), marks=full),
        pytest.param(100, 128, 768, BF16, "none", (1, 2, 1), marks=full),
        pytest.param(129, 128, 768, BF16, "sum", (1, 1, 2), marks=full),  # one beside
        (130, 128, 768, F32, "mean", (1, 2, 1)),
        pytest.param(300, 128, 1280, F32, "mean", (1, 3, 2), marks=full),  # 44 beside
        pytest.param(400, 128, 768, F32, "mean", (1, 2, 1), marks=full),  # 144 and twice 128
        pytest.param(600, 256, 768, F32, "none", (1, 2, 1), marks=full),  # 88 beside
        pytest.param(900, 256, 512, F16, "sum", (2, 0, 0), marks=full),
    ],
    ids=str,
)
def test_in_place_by_columns(
    monkeypatch, num_tokens, hidden, vocab, weight_dtype, reduction, bands
):
    sizes = num_tokens, hidden, vocab
    layout = {"weight_layout": "dv"}
    check_in_place(monkeypatch, sizes, weight_dtype, reduction, bands, 256, **layout)


def check_in_place(monkeypatch, sizes, weight_dtype, reduction, bands, block, **layout):
    num_tokens, hidden, vocab = sizes
    arrays, labels = make_arrays((num_tokens,), hidden, vocab, F32, only=["x", "weight"])
    arrays["x"] = arrays["x"].astype(BF16)
    # The GEMMs round to bfloat16, so these weights lose nothing.
    arrays["weight"] = arrays["weight"].astype(BF16).astype(weight_dtype)
    if num_tokens > 1:
        labels[:2] = 0, vocab - 1
    # The number of tokens that a chunk may have.
    most = 128 if num_tokens == 400 else 256
    prefer_in_place(monkeypatch)
    limit = 2 * vocab * most
    bands = in_place.Bands(block * bands[0], bands[1], block * bands[2])
    assert bands.size * max(1, bands.number) + bands.num_copied == vocab + -vocab % 128
    monkeypatch.setattr(plan_module, "_bands", lambda *_: bands)
    loss = in_place_loss(limit, reduction, **layout)
    cotangent = make_cotangent(reduction, labels.shape)

    def with_gradients(arrays, labels, cotangent):
        value, vjp = jax.vjp(lambda arrays: loss(labels=labels, **arrays), arrays)
        return {"loss": value} | vjp(cotangent)[0]

    args = as_jax((arrays, labels, cotangent))
    of_weight = "weight_gradient_columns" if layout else "weight_gradient_rows"
    got, names = run_and_kernel_names(with_gradients, *args)
    assert {"input_gradient", of_weight} <= names
    check_against_formula(
        got, arrays, labels, cotangent, implementation="mosaic_gpu", reduction=reduction
    )


@interpreted
def test_in_place_of_nothing_else(monkeypatch):
    """A bias, another dtype or width, or chunks that the caller asks for have another plan."""
    prefer_in_place(monkeypatch)
    arrays, labels = as_jax(make_arrays((4,), 128, 256, BF16))
    x, weight = arrays["x"], arrays["weight"]

    def is_in_place(x, weight, **options):
        plan = linear_cross_entropy_plan(x, weight, labels, implementation="mosaic_gpu", **options)
        return plan.name == "in place"

    assert is_in_place(x, weight)
    assert is_in_place(x, weight[:250])
    for other in (
        {"bias": arrays["bias"]},
        {"chunk_size": 4},
        {"vocab_chunk_size": 128},
        {"label_smoothing": 0.1},
        {"logit_softcap": 30.0},
    ):
        assert not is_in_place(x, weight, **other), other
    assert not is_in_place(x.astype(F16), weight)
    assert not is_in_place(x[:, :120], weight[:, :120])


@interpreted
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_nothing_is_in_place_of_a_gradient_that_is_not_made(monkeypatch, reduction):
    prefer_in_place(monkeypatch)
    arrays, labels = as_jax(make_arrays((4,), 128, 256, BF16, only=["x", "weight"]))
    loss = in_place_loss(None, reduction)
    total = lambda x, weight: jnp.sum(loss(x, weight, labels))
    args = arrays["x"], arrays["weight"]
    of = lambda argnums: kernel_names(jax.grad(total, argnums=argnums), *args)
    assert "input_gradient" not in of(0)
    assert "input_gradient" in of(1)


@interpreted
@pytest.mark.full
@pytest.mark.parametrize("limit", [2**15, None])
def test_in_place_again_with_the_same_bits(monkeypatch, limit):
    prefer_in_place(monkeypatch)
    arrays, labels = as_jax(make_arrays((70,), 128, 384, BF16, only=["x", "weight"]))
    loss = in_place_loss(limit, "mean")
    fn = quick_jit(jax.grad(lambda arrays: loss(labels=labels, **arrays)))
    chex.assert_trees_all_equal(fn(arrays), fn(arrays))


@interpreted
@full
def test_in_place_in_a_scan_and_again_with_the_same_bits(monkeypatch):
    prefer_in_place(monkeypatch)
    arrays, labels = as_jax(make_arrays((70,), 128, 384, BF16, only=["x", "weight"]))
    loss = in_place_loss(2**15, "mean")

    def scanned(x, weight):
        add = lambda total, x: (total + loss(x, weight, labels), None)
        return jax.lax.scan(add, 0.0, x)[0]

    fn = quick_jit(jax.value_and_grad(scanned, argnums=(0, 1)))
    args = jnp.stack([arrays["x"]] * 2), arrays["weight"]
    total, (dx, dweight) = first = fn(*args)
    chex.assert_trees_all_equal(first, fn(*args))
    chex.assert_trees_all_equal(dx[0], dx[1])
    # The sum of two equal numbers, halved, is exact.
    got = {"loss": total / 2, "x": dx[0], "weight": dweight / 2}
    check_against_formula(got, arrays, labels, implementation="mosaic_gpu")
