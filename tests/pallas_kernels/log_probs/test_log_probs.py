"""Log-probabilities and entropies in plain JAX, values and gradients, against float64."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import (
    explain,
    linear_cross_entropy,
    linear_log_probs,
    linear_token_loss,
)
from support.log_prob_formulas import (
    NAMES,
    arrays_of,
    arrays_with_ties,
    both,
    check_against_formula,
    check_argmax,
    make_cotangents,
    run,
    with_argmax,
)
from support.loss_formulas import BF16, F16, F32, IGNORED, as_jax, full, in_turn, put
from support.numerics import quick_jit
from support.pairwise import pairwise

SHAPE, D, V = (3, 7), 24, 53
# 21 tokens make chunks of 5 and twice 8.
REFERENCE = {"implementation": "reference"}
XLA = {"implementation": "xla", "chunk_size": 8}
IMPLEMENTATIONS = {"reference": REFERENCE, "xla": XLA}
each = pytest.mark.parametrize("options", IMPLEMENTATIONS.values(), ids=IMPLEMENTATIONS)
TRANSFORMS = {
    "plain": {},
    "temperature": {"temperature": 0.7},
    "softcap": {"logit_softcap": 1.5},
    "both": {"temperature": 2.0, "logit_softcap": 1.5},
}


@pytest.mark.parametrize(
    "implementation, transform, dtype",
    pairwise(
        list(IMPLEMENTATIONS),
        list(TRANSFORMS),
        [F32, BF16, F16],
        but=[
            ("xla", "softcap", F32),
            ("reference", "temperature", BF16),
            ("reference", "softcap", F16),
            ("reference", "both", BF16),
            ("reference", "plain", F16),
        ],
    ),
)
def test_values_and_gradients(implementation, transform, dtype):
    changes = TRANSFORMS[transform]
    arrays, labels = arrays_of(SHAPE, D, V, dtype)
    cotangents = make_cotangents(SHAPE)
    got = run(arrays, labels, cotangents, **IMPLEMENTATIONS[implementation], **changes)
    is_xla = implementation == "xla"
    check_against_formula(got, arrays, labels, cotangents, round_dlogits=is_xla, **changes)


@in_turn(
    "case, options",
    {
        "bfloat16-plain": (BF16, TRANSFORMS["plain"]),
        "float32-both": (F32, TRANSFORMS["both"]),
        "float16-softcap": (F16, TRANSFORMS["softcap"]),
    },
    {"xla": XLA, "reference": REFERENCE},
    but=[("float16-softcap", "xla")],
)
def test_argmax_beside_results_and_gradients(options, case):
    """The argmax is right and has no gradient; the other results keep theirs."""
    dtype, transform = case
    arrays, labels = arrays_of(SHAPE, D, V, dtype)
    cotangents = make_cotangents(SHAPE)
    fn = functools.partial(with_argmax, labels=jnp.asarray(labels), **options, **transform)

    @quick_jit
    def run_all(arrays, cotangents):
        results, vjp, argmax = jax.vjp(lambda a: fn(**a), arrays, has_aux=True)
        of_argmax = jax.grad(lambda a: jnp.sum(fn(**a)[1].log_probs))(arrays)
        return dict(zip(NAMES, results, strict=True)) | vjp(cotangents)[0], argmax, of_argmax

    got, argmax, of_argmax = run_all(as_jax(arrays), tuple(map(jnp.asarray, cotangents)))
    check_argmax(argmax, arrays, labels, **transform)
    chex.assert_trees_all_equal(of_argmax, jax.tree.map(jnp.zeros_like, of_argmax))
    is_xla = options is XLA
    check_against_formula(got, arrays, labels, cotangents, round_dlogits=is_xla, **transform)


@each
@pytest.mark.parametrize("dtype", [F32, BF16])
def test_the_lowest_of_equal_logits(options, dtype):
    """The argmax is the lowest index, and a label out of range does not change it."""
    arrays, labels = arrays_with_ties(SHAPE, D, V, dtype)
    labels = put(put(labels, (0, 1), V), (1, 0), -1)
    fn = functools.partial(with_argmax, temperature=2.0, labels=jnp.asarray(labels), **options)
    _, argmax = quick_jit(lambda a: fn(**a))(as_jax(arrays))
    check_argmax(argmax, arrays, labels, temperature=2.0)


@pytest.mark.parametrize("num_counted", [100, 129])
def test_argmax_in_fewer_rows(num_counted):
    """Ignored tokens have the index -1, computed in few rows or in all."""
    arrays, labels = arrays_with_ties((300,), D, V, F32)
    order = np.random.default_rng(7).permutation(300)
    labels = np.where(order < num_counted, np.abs(labels) % V, IGNORED).astype(np.int32)
    log_probs, argmax = linear_log_probs(
        **as_jax(arrays),
        labels=jnp.asarray(labels),
        return_argmax=True,
        counted_fraction=0.4,
        implementation="xla",
        chunk_size=50,
    )
    check_argmax(argmax, arrays, labels)
    assert not np.asarray(log_probs)[labels == IGNORED].any()


@each
def test_argmax_of_infinite_logits(options):
    """All logits -inf, one of them +inf or NaN."""
    weight, labels = jnp.eye(4), jnp.zeros(4, jnp.int32)
    x = jnp.zeros((4, 4)).at[1, 2].set(jnp.inf).at[2, 3].set(jnp.nan).at[3, 1].set(1.0)
    bias = jnp.full((4,), -jnp.inf)
    of = functools.partial(linear_log_probs, return_argmax=True, **options)
    assert of(x[3:], weight, labels[3:])[1].ids == 1
    _, argmax = of(jnp.zeros((4, 4)), weight, labels, bias=bias)
    np.testing.assert_array_equal(argmax.ids, 0)
    assert np.isnan(argmax.log_probs).all()
    _, argmax = of(x, weight, labels)
    assert (argmax.ids >= 0).all() and (argmax.ids < 4).all()
    assert np.isnan(argmax.log_probs[1:3]).all()


def test_the_argmax_of_a_vocabulary_above_2_to_24():
    shapes = [jax.ShapeDtypeStruct(s, F32) for s in ((2, 1), (2**24 + 1, 1))]
    labels = jax.ShapeDtypeStruct((2,), jnp.int32)
    fn = functools.partial(linear_log_probs, return_argmax=True, implementation="xla")
    with pytest.raises(ValueError, match="at most 16777216 entries, got 16777217"):
        jax.eval_shape(fn, *shapes, labels)


@each
def test_layouts_and_parts(options):
    """A weight [D, V] without a bias, and each result alone."""
    arrays, labels = arrays_of(SHAPE, D, V, F32, bias=False)
    g, h = make_cotangents(SHAPE)
    for cotangents in ((g, h), (g, 0 * h), (0 * g, h)):
        got = run(arrays, labels, cotangents, weight_layout="dv", **options)
        # The errors of log p, which is up to 8, are in the gradient of the entropy.
        check_against_formula(got, arrays, labels, cotangents, floor=12.0)


@pytest.mark.parametrize(
    "options", [pytest.param(REFERENCE, id="reference", marks=full), pytest.param(XLA, id="xla")]
)
def test_the_log_probability_alone_is_minus_the_loss(options):
    arrays, labels = as_jax(arrays_of(SHAPE, D, V, F32))
    g = jnp.asarray(make_cotangents(SHAPE)[0])

    def of(fn):
        return quick_jit(lambda a: jax.vjp(lambda a: fn(labels=labels, **a, **options), a))(arrays)

    log_probs, vjp = of(linear_log_probs)
    losses, vjp_of_loss = of(functools.partial(linear_cross_entropy, reduction="none"))
    chex.assert_trees_all_close(log_probs, -losses, rtol=1e-6, atol=2e-6)
    chex.assert_trees_all_close(vjp(g), vjp_of_loss(-g), rtol=1e-5, atol=1e-5)


@each
def test_tokens_that_do_not_count(options):
    """Ignored labels and cotangents of 0 leave NaN out; the reference leaves ignored labels out."""
    arrays, labels = arrays_of(SHAPE, D, V, F32)
    cotangents = make_cotangents(SHAPE)
    ignored = labels == IGNORED
    assert ignored.any()
    without = ignored if options is REFERENCE else ignored | (cotangents[0] == 0)
    x = np.where(without[..., None], np.nan, arrays["x"])
    good = run(arrays, labels, cotangents, **options)
    got = run(arrays | {"x": x}, labels, cotangents, **options)
    assert not np.asarray(got["log_probs"])[ignored].any()
    assert not np.asarray(got["entropy"])[ignored].any()
    assert not np.asarray(got["x"])[without].any()
    for name in ("x", "weight", "bias"):
        np.testing.assert_array_equal(got[name], good[name], name)
    nothing = run(arrays, np.full_like(labels, IGNORED), cotangents, **options)
    chex.assert_trees_all_equal(nothing, jax.tree.map(jnp.zeros_like, nothing))


@pytest.mark.parametrize("num_counted", [100, 128, 129, 0])
def test_fewer_rows(num_counted):
    """`counted_fraction` changes nothing but the rows: 128 of 300, or all where more count."""
    arrays, labels = arrays_of((3, 100), D, V, F32)
    order = np.random.default_rng(7).permutation(300).reshape(3, 100)
    labels = np.where(order < num_counted, np.abs(labels) % V, IGNORED).astype(np.int32)
    cotangents = make_cotangents((3, 100))
    options = {"implementation": "xla", "chunk_size": 50}
    got = run(arrays, labels, cotangents, counted_fraction=0.4, **options)
    check_against_formula(got, arrays, labels, cotangents, floor=12.0)


def test_few_rows_and_all_rows_may_have_other_plans(on_h100):
    """A 16-bit `dweight` holds 3712 rows of 4096; all 12288 need sums in float32."""
    x, weight = (jax.ShapeDtypeStruct((n, 4096), BF16) for n in (12288, 128256))
    labels = jax.ShapeDtypeStruct((12288,), jnp.int32)
    options = {"implementation": "mosaic_gpu", "counted_fraction": 0.3}
    fn = lambda *args: sum(jnp.sum(a) for a in both(*args, **options))
    dx, dweight = jax.eval_shape(jax.grad(fn, argnums=(0, 1)), x, weight, labels)
    assert (dx.dtype, dweight.dtype) == (BF16, BF16)


@each
def test_labels_out_of_range(options):
    arrays, labels = arrays_of(SHAPE, D, V, F32)
    g, h = make_cotangents(SHAPE)
    token = 0, 1
    assert g[token]
    for label in (V, -1, 2**31 - 1):
        wrong = put(labels, token, label)
        got = run(arrays, wrong, (g, h), **options)
        assert np.isnan(got["log_probs"][token]) and np.isfinite(got["entropy"]).all()
        assert np.isnan(got["x"][token]).all() and np.isnan(got["weight"]).all()
        assert np.isfinite(np.delete(np.asarray(got["x"]).reshape(-1, D), 1, axis=0)).all()
        if options is XLA:
            got = run(arrays, wrong, (put(g, token, 0.0), h), **options)
            assert np.isfinite(got["weight"]).all()


@each
def test_probabilities_of_0_and_1(options):
    """Logits of -inf, and a token whose label has all of the probability."""
    arrays, labels = arrays_of((4,), D, V, F32)
    arrays["bias"] = put(arrays["bias"], slice(3, 9), -np.inf)
    labels = np.array([20, 20, 50, 11], np.int32)
    arrays["x"][1] = 40 * arrays["weight"][20] * D
    cotangents = make_cotangents((4,))
    got = run(arrays, labels, cotangents, **options)
    check_against_formula(got, arrays, labels, cotangents)
    assert got["log_probs"][1] == 0 and 0 <= got["entropy"][1] < 1e-6


def test_uniform_and_no_tokens():
    x, weight = jnp.zeros((0, 4)), jnp.zeros((8, 4))
    found = both(x, weight, jnp.zeros(0, jnp.int32), implementation="xla")
    assert [a.shape for a in found] == [(0,), (0,)]
    x = jnp.ones((2, 4))
    log_probs, entropy = both(x, weight, jnp.array([0, 7]), implementation="xla")
    np.testing.assert_allclose(log_probs, -np.log(8), rtol=1e-6)
    np.testing.assert_allclose(entropy, np.log(8), rtol=1e-6)


def test_batches_have_one_gradient_of_the_weight():
    """`vmap` is one call for all members, and its gradient that of the sum over members."""
    arrays, labels = as_jax(arrays_of(SHAPE, D, V, F32, bias=False))
    cotangents = tuple(map(jnp.asarray, make_cotangents(SHAPE)))

    def by_members(x, weight):
        return jax.vmap(lambda x, labels: both(x, weight, labels, **XLA))(x, labels)

    args = arrays["x"], arrays["weight"]
    whole = quick_jit(lambda *a: jax.vjp(lambda x, w: both(x, w, labels, **XLA), *a)[1](cotangents))
    members = quick_jit(lambda *a: jax.vjp(by_members, *a)[1](cotangents))
    chex.assert_trees_all_close(members(*args), whole(*args), rtol=1e-5, atol=1e-5)


def test_the_reference_has_second_derivatives():
    arrays, labels = as_jax(arrays_of((4,), D, V, F32, bias=False))
    total = lambda x, options: jnp.sum(both(x, arrays["weight"], labels, **options)[1])
    hessian = jax.jvp(jax.grad(lambda x: total(x, REFERENCE)), (arrays["x"],), (arrays["x"],))[1]
    assert np.isfinite(hessian).all() and hessian.any()
    with pytest.raises(NotImplementedError, match="second derivative"):
        jax.jvp(jax.grad(lambda x: total(x, XLA)), (arrays["x"],), (arrays["x"],))


@pytest.mark.parametrize(
    "options, error, match",
    [
        ({"temperature": 0.0}, ValueError, "temperature=0.0 must be above 0"),
        ({"temperature": float("inf")}, ValueError, "finite"),
        ({"temperature": "warm"}, TypeError, "temperature must be a number"),
        ({"logit_softcap": -1.0}, ValueError, "logit_softcap=-1.0 must be above 0"),
        ({"chunk_size": 2, "max_logits_bytes": 1}, ValueError, "give one of them"),
        ({"weight_layout": "dv"}, ValueError, "must agree in D"),
        ({"vocab_axis": "tensor"}, ValueError, "call linear_log_probs inside"),
        ({"implementation": "mosaic_gpu"}, NotImplementedError, "implementation='mosaic_gpu'"),
        ({"implementation": "triton"}, ValueError, "must be None or one of"),
        ({"check_labels": True}, Exception, "linear_log_probs: label 7 at token 1"),
    ],
)
def test_errors(unchecked_shapes, options, error, match):
    x, weight, labels = jnp.zeros((2, 4)), jnp.zeros((5, 4)), jnp.array([0, 7])
    with pytest.raises(error, match=match):
        linear_log_probs(x, weight, labels, **options)


@pytest.mark.usefixtures("on_h100")
@pytest.mark.parametrize(
    "options, products",
    [
        ({}, 3),  # all tokens in the memory of `dweight`
        ({"per_token": True}, 3),
        ({"chunk_size": 128}, 4),
        ({"chunk_size": 128, "per_token": True}, 3),
        ({"logit_softcap": 30.0}, 4),
        ({"bias": jnp.zeros(512)}, 4),
    ],
    ids=str,
)
def test_explain_counts_the_products_of_a_token_loss(options, products):
    x, weight = jnp.zeros((256, 128), BF16), jnp.zeros((512, 128), F32)
    sum_of = (lambda a, *_: -a) if options.get("per_token") else (lambda a, *_: -a.sum())
    fn = lambda x, weight: linear_token_loss(x, weight, jnp.zeros(256, int), sum_of, (), **options)
    (choice,) = explain(fn, x, weight).choices
    assert f"{products} matrix products with all gradients, 1 without gradients" in str(choice.plan)


def test_explain_names_the_operation():
    x, weight, labels = jnp.zeros((2, 4)), jnp.zeros((5, 4)), jnp.array([0, 3])
    (choice,) = explain(linear_log_probs, x, weight, labels).choices
    assert (choice.operation, choice.implementation) == ("linear_log_probs", "xla")
    assert (
        choice.plan is not None
        and "4 matrix products with all gradients, 1 without gradients" in choice.plan
    )


@pytest.mark.parametrize(
    "options, shown",
    [
        ({"bias": jnp.zeros(V)}, "a bias"),
        ({"logit_softcap": 2.0}, "logit_softcap=2.0"),
        ({"return_argmax": True}, "return_argmax=True"),
        ({"counted_fraction": 0.5}, "counted_fraction=0.5"),
        ({"chunk_size": 8}, "chunk_size=8"),
        ({"max_logits_bytes": 2**20}, "max_logits_bytes=1048576"),
        ({"vocab_axis": "tensor"}, "vocab_axis=tensor"),
    ],
)
def test_kept_exponentials_go_with_few_options(options, shown):
    x, weight, labels = jnp.zeros((3, D)), jnp.zeros((V, D)), jnp.zeros(3, jnp.int32)
    with pytest.raises(ValueError, match=f"keep_exponentials=True does not go with {shown}"):
        linear_log_probs(x, weight, labels, keep_exponentials=True, **options)


@pytest.mark.usefixtures("on_h100")
def test_kept_exponentials_take_three_products():
    x, weight, labels = jnp.zeros((8, 64), BF16), jnp.zeros((256, 64), BF16), jnp.zeros(8, int)
    for keeps, products in ((True, 3), (False, 4)):
        fn = functools.partial(linear_log_probs, keep_exponentials=keeps)
        (choice,) = explain(fn, x, weight, labels).choices
        assert f"{products} matrix products with all gradients" in str(choice.plan)
        assert ("why: The caller asks for keep_exponentials=True." in str(choice.plan)) == keeps


@each
def test_kept_exponentials_have_no_effect_without_kernels(options, caplog):
    arrays, labels = as_jax(arrays_of(SHAPE, D, V, F32, bias=False))
    options = {"implementation": options["implementation"]}
    got = linear_log_probs(labels=labels, **arrays, keep_exponentials=True, **options)
    np.testing.assert_array_equal(got, linear_log_probs(labels=labels, **arrays, **options))
    assert "keep_exponentials=True has no effect: the kernels do not run" in caplog.text
