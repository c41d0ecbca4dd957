"""Log-probabilities and entropies by the Mosaic GPU kernels, interpreted, against float64."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import linear_log_probs
from pallas_kernels.gpu import hopper_gemm
from pallas_kernels.loss import plan as plan_module
from pallas_kernels.loss.config import Config
from pallas_kernels.loss.mosaic_gpu import in_place
from support.log_prob_formulas import (
    NAMES,
    arrays_of,
    arrays_with_ties,
    both,
    check_against_formula,
    check_argmax,
    formula,
    make_cotangents,
    with_gradients,
)
from support.loss_formulas import BASE_2, BF16, F16, F32, IGNORED, as_jax, full, interpreted, put
from support.loss_kernels import names_in, prefer_in_place, run_and_kernel_names
from support.numerics import assert_as_accurate, quick_jit, rounded

KERNEL: dict[str, Any] = {"implementation": "mosaic_gpu"}
TRANSFORM: dict[str, Any] = {"temperature": 0.7, "logit_softcap": 2.0}


def check(arrays, labels, cotangents, **options):
    """Compares with float64; returns results, gradients and the names of the kernels."""
    fn = functools.partial(both, labels=jnp.asarray(labels), **KERNEL, **options)
    args = as_jax((arrays, tuple(cotangents)))
    got, names = run_and_kernel_names(functools.partial(with_gradients, fn), *args)
    of_formula = {k: v for k, v in options.items() if k in (*TRANSFORM, "ignore_index")}
    check_against_formula(
        got, arrays, labels, cotangents, sum_rounded=True, slack=BASE_2, **of_formula
    )
    return got, names


# Chunks of tokens: ragged numbers of tokens, columns and hidden units; bias, and a dtype whose
# dlogits are scaled.
@interpreted
@pytest.mark.parametrize(
    "num_tokens, hidden, vocab, dtype, options",
    [
        (9, 72, 250, BF16, TRANSFORM),
        pytest.param(9, 24, 53, F16, {}, marks=full),
        pytest.param(1, 64, 128, BF16, {}, marks=full),
        pytest.param(130, 64, 300, F16, TRANSFORM, marks=full),
    ],
)
def test_chunks_of_tokens(num_tokens, hidden, vocab, dtype, options):
    arrays, labels = arrays_of((num_tokens,), hidden, vocab, dtype)
    cotangents = make_cotangents((num_tokens,))
    _, names = check(arrays, labels, cotangents, chunk_size=8 if num_tokens < 10 else 64, **options)
    assert {"linear_statistics", "linear_exponentials"} <= names
    assert "input_gradient" not in names


# As in `test_loss_in_place.py`: blocks of 128 rows in a band, bands, blocks that are copied.
@interpreted
@pytest.mark.parametrize(
    "num_tokens, hidden, vocab, weight_dtype, bands, options",
    [
        (65, 192, 250, F32, (1, 0, 0), TRANSFORM),
        pytest.param(129, 128, 384, BF16, (1, 2, 1), {}, marks=full),  # one beside
        pytest.param(300, 128, 512, F32, (1, 2, 2), TRANSFORM, marks=full),  # 44 beside
        pytest.param(400, 128, 384, F32, (1, 2, 1), {}, marks=full),  # 144 and twice 128
    ],
)
def test_in_place(monkeypatch, num_tokens, hidden, vocab, weight_dtype, bands, options):
    check_in_place(monkeypatch, (num_tokens, hidden, vocab), weight_dtype, bands, 128, options)


@interpreted
@pytest.mark.parametrize(
    "num_tokens, weight_dtype, bands, options",
    [
        pytest.param(130, F32, (1, 2, 1), {}, marks=full),
        pytest.param(129, BF16, (1, 1, 2), TRANSFORM, marks=full),  # one beside
        pytest.param(400, F32, (1, 2, 1), TRANSFORM, marks=full),  # 144 and twice 128
    ],
)
def test_in_place_by_columns(monkeypatch, num_tokens, weight_dtype, bands, options):
    sizes = num_tokens, 128, 768
    options = options | {"weight_layout": "dv"}
    check_in_place(monkeypatch, sizes, weight_dtype, bands, 256, options)


def check_in_place(monkeypatch, sizes, weight_dtype, bands, block, options):
    num_tokens, hidden, vocab = sizes
    arrays, labels = arrays_of(
        (num_tokens,), hidden, vocab, BF16, bias=False, weight_dtype=weight_dtype
    )
    # The number of tokens that a chunk may have.
    most = 128 if num_tokens == 400 else 256
    prefer_in_place(monkeypatch)
    size, number, copied = bands
    bands = in_place.Bands(block * size if number else vocab + -vocab % 128, number, block * copied)
    monkeypatch.setattr(plan_module, "_bands", lambda *_: bands)
    cotangents = make_cotangents((num_tokens,))
    _, names = check(arrays, labels, cotangents, max_logits_bytes=2 * vocab * most, **options)
    by_columns = options.get("weight_layout") == "dv"
    of_weight = "weight_gradient_columns" if by_columns else "weight_gradient_rows"
    assert {"linear_statistics", "linear_exponentials", "input_gradient", of_weight} <= names


# Two products after the forward: no kernel computes logits again.
@interpreted
@pytest.mark.parametrize(
    "num_tokens, vocab, with_entropy, layout",
    [
        pytest.param(9, 250, True, "vd", marks=full),
        pytest.param(130, 256, False, "dv", marks=full),
        pytest.param(130, 250, False, "vd", marks=full),
        (9, 256, True, "dv"),
    ],
)
def test_kept_exponentials(num_tokens, vocab, with_entropy, layout):
    """One token is ignored and holds NaN. 2 s each."""
    arrays, labels = arrays_of((num_tokens,), 64, vocab, BF16, bias=False, weight_dtype=F32)
    labels[2], arrays["x"][2] = IGNORED, np.nan
    g, h = make_cotangents((num_tokens,))
    h = h if with_entropy else np.zeros_like(h)

    def run(arrays, labels, g, h):
        def fn(x, weight):
            weight = weight if layout == "vd" else weight.T
            options = {"weight_layout": layout, "temperature": 0.7, "keep_exponentials": True}
            found = linear_log_probs(
                x, weight, labels, return_entropy=with_entropy, **KERNEL, **options
            )
            return dict(zip(NAMES, found if with_entropy else (found,), strict=False))

        results, vjp = jax.vjp(fn, arrays["x"], arrays["weight"])
        cotangents = {"log_probs": g} | ({"entropy": h} if with_entropy else {})
        return results | dict(zip(("x", "weight"), vjp(cotangents), strict=True))

    got, names = run_and_kernel_names(run, *as_jax((arrays, labels, g, h)))
    assert "linear_exponentials" in names
    assert not names & {"linear_statistics", "input_gradient", "weight_gradient_rows"}
    arrays["x"][2] = 0
    of = functools.partial(formula, arrays, labels, (g, h), temperature=0.7)
    exact, low = of(), of(compute=np.float32, round_exponentials=BF16, by_pass=with_entropy)
    pick = lambda values: [values[name] for name in got]
    low = rounded(pick(low), pick(got))
    options = {"names": list(got), "slack": BASE_2, "floor": 12.0}
    assert_as_accurate(pick(got), low, pick(exact), **options)


@interpreted
def test_kept_exponentials_of_a_frozen_weight():
    """One product after the forward, and a forward alone keeps nothing. 1 s."""
    arrays, labels = as_jax(arrays_of((9,), 64, 128, BF16, bias=False))
    total = lambda x: jnp.sum(
        linear_log_probs(x, arrays["weight"], labels, keep_exponentials=True, **KERNEL)
    )
    alone = names_in(jax.make_jaxpr(total)(arrays["x"]))
    assert "linear_statistics" in alone and "linear_exponentials" not in alone
    dx, names = run_and_kernel_names(jax.grad(total), arrays["x"])
    assert "linear_exponentials" in names and "linear_statistics" not in names
    cotangents = np.ones(9), np.zeros(9)
    of = functools.partial(formula, jax.device_get(arrays), np.asarray(labels), cotangents)
    low = of(compute=np.float32, round_exponentials=BF16)["x"]
    assert_as_accurate([dx], rounded([low], [dx]), [of()["x"]], names=["x"], slack=1.2 * BASE_2)


@interpreted
def test_kept_exponentials_of_a_batch():
    """The gradients of two sequences in one call. 2 s."""
    arrays, labels = arrays_of((2, 9), 64, 128, BF16, bias=False)
    g, _ = make_cotangents((2, 9))
    fn = functools.partial(linear_log_probs, keep_exponentials=True, **KERNEL)

    def loss(arrays, labels, g):
        return jnp.sum(g * jax.vmap(fn, (0, None, 0))(arrays["x"], arrays["weight"], labels))

    got, names = run_and_kernel_names(jax.grad(loss), *as_jax((arrays, labels, g)))
    assert "linear_exponentials" in names
    of = functools.partial(formula, arrays, labels, (g, np.zeros_like(g)))
    exact, low = of(), of(compute=np.float32, round_exponentials=BF16)
    pick = lambda values: [values[name] for name in ("x", "weight")]
    low = rounded(pick(low), pick(got))
    options = {"names": ["x", "weight"], "slack": BASE_2, "floor": 12.0}
    assert_as_accurate(pick(got), low, pick(exact), **options)


# Three groups of rows and ragged tiles of columns. With bands of one group each, the second group
# goes through the columns backwards. Two blocks share the tiles of a row, so that clusters tie.
@interpreted
@pytest.mark.parametrize(
    "dtype, linear, options",
    [
        (BF16, {"tile_n": 64, "band": 1, "blocks": 2}, {"return_entropy": True}),
        pytest.param(
            BF16, {"tile_n": 128, "band": 3, "blocks": 3}, {"weight_layout": "dv"}, marks=full
        ),
        pytest.param(F16, {"tile_n": 192, "band": 3, "blocks": 1}, {}, marks=full),
    ],
)
def test_argmax(dtype, linear, options):
    vocab = 384 if "weight_layout" in options else 330
    arrays, labels = arrays_with_ties((300,), 64, vocab, dtype)
    labels = put(labels, 7, vocab)  # out of range
    config = Config(linear=hopper_gemm.Config(stages=2, cluster=1, **linear))
    weight = arrays["weight"].T if "weight_layout" in options else arrays["weight"]
    fn = functools.partial(
        linear_log_probs, return_argmax=True, temperature=2.0, config=config, **KERNEL, **options
    )
    got, names = run_and_kernel_names(fn, *as_jax((arrays["x"], weight, labels)))
    assert "linear_statistics" in names
    check_argmax(got[-1], arrays, labels, temperature=2.0, slack=BASE_2)


@interpreted
def test_argmax_of_any_logits():
    """Bias and softcap, all logits of a token -inf, and a token with NaN."""
    arrays, labels = arrays_of((9,), 64, 250, BF16)
    labels = np.abs(labels)
    options: dict[str, Any] = TRANSFORM | {"return_argmax": True} | KERNEL
    fn = quick_jit(lambda a, labels: linear_log_probs(labels=labels, **a, **options)[1])
    argmax = fn(*as_jax((arrays, labels)))
    check_argmax(argmax, arrays, labels, slack=BASE_2, **TRANSFORM)
    arrays["x"] = put(arrays["x"], (2, 5), np.nan)
    with_nan = fn(*as_jax((arrays, labels)))
    others = np.arange(9) != 2
    np.testing.assert_array_equal(with_nan.ids[others], argmax.ids[others])
    assert 0 <= with_nan.ids[2] < 250 and np.isnan(with_nan.log_probs[2])
    arrays["x"], arrays["bias"] = put(arrays["x"], 2, 0), put(arrays["bias"], ..., -np.inf)
    options.pop("logit_softcap")
    nothing = linear_log_probs(**as_jax(arrays), labels=jnp.asarray(labels), **options)[1]
    np.testing.assert_array_equal(nothing.ids, 0)
    assert np.isnan(nothing.log_probs).all()


@interpreted
def test_what_is_not_asked_for_is_not_computed(monkeypatch):
    """A gradient of x alone keeps nothing in the memory of `dweight`; without one, one kernel."""
    prefer_in_place(monkeypatch)
    arrays, labels = as_jax(arrays_of((4,), 128, 256, BF16, bias=False))
    args = arrays["x"], arrays["weight"]
    total = lambda x, weight: jnp.sum(linear_log_probs(x, weight, labels, **KERNEL))
    of = lambda fn: names_in(jax.make_jaxpr(fn)(*args))
    kernels = {"linear_statistics", "linear_exponentials", "input_gradient", "weight_gradient_rows"}
    assert of(total) & kernels == {"linear_statistics"}
    assert of(jax.grad(total)) & kernels == {"linear_statistics", "linear_exponentials"}
    assert of(jax.grad(total, argnums=1)) & kernels == kernels


@interpreted
def test_traps():
    """NaN where nothing counts, logits of -inf, and a token that is certain."""
    arrays, labels = arrays_of((9,), 64, 250, BF16)
    cotangents = make_cotangents((9,))
    arrays["bias"] = put(arrays["bias"], slice(30, 190), -np.inf)
    labels = np.where((labels >= 30) & (labels < 190), 200, labels)
    labels[0], labels[1] = 20, 20
    arrays["x"][1] = (8 * 64 * arrays["weight"][20].astype(np.float32)).astype(BF16)
    arrays["x"][2] = np.nan
    labels[2] = -100
    assert cotangents[0][5] == cotangents[1][5] == 0
    finite = arrays | {"x": put(arrays["x"], 2, 0)}
    fn = functools.partial(both, labels=jnp.asarray(labels), **KERNEL)
    args = as_jax((arrays, tuple(cotangents)))
    got, _ = run_and_kernel_names(functools.partial(with_gradients, fn), *args)
    check_against_formula(got, finite, labels, cotangents, sum_rounded=True, slack=BASE_2)
    assert got["log_probs"][1] == 0 and 0 <= got["entropy"][1] < 1e-6
