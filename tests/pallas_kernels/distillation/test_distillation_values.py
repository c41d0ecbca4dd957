"""Distillation losses and their gradients against the formula in float64."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import linear_distillation_loss
from pallas_kernels.distillation.settings import Chunk, Settings
from support.distillation_formulas import (
    BF16,
    CHUNK,
    DIVERGENCES,
    F16,
    F32,
    D,
    E,
    T,
    V,
    check,
    check_against_formula,
    formula,
    loss_of,
    make_arrays,
    make_cotangent,
    make_top_k,
    run,
)
from support.loss_formulas import as_jax, full, in_turn, put
from support.numerics import quick_jit

EPS32 = float(np.finfo(np.float32).eps)
OF_TOP_K = {name: name for name in ("xla", "reference")}
IMPLEMENTATIONS = OF_TOP_K | {"mosaic_gpu": "mosaic_gpu"}
KV = 64  # columns that the kernels take
REDUCTIONS = {name: name for name in ("mean", "sum", "none")}
TAILS = {"one_bucket": "one_bucket", "ignore": "ignore"}


@pytest.fixture(autouse=True)
def kernels_are_interpreted(request):
    """Interprets the kernels of the tests that ask for them."""
    callspec = getattr(request.node, "callspec", None)
    if callspec is not None and callspec.params.get("implementation") == "mosaic_gpu":
        request.getfixturevalue("interpreted")
    # XLA's products of float32 on a GPU would round their operands to TF32.
    with jax.default_matmul_precision("highest"):
        yield


each_divergence = pytest.mark.parametrize("divergence", DIVERGENCES)


@in_turn(
    "implementation, divergence, reduction, dtype",
    IMPLEMENTATIONS,
    DIVERGENCES,
    REDUCTIONS,
    {"bfloat16": BF16, "float32": F32},
    also=[
        (implementation, name, "mean", "bfloat16")
        for implementation, names in (
            ("xla", ("forward_kl", "reverse_kl")),
            ("mosaic_gpu", ("forward_kl", "reverse_kl", "jensen_shannon_0.9")),
        )
        for name in names
    ],
)
def test_values_and_gradients(implementation, divergence, reduction, dtype):
    arrays, teacher = make_arrays(vocab=KV, dtype=dtype)
    check(
        arrays,
        teacher,
        implementation=implementation,
        reduction=reduction,
        temperature=1.7,
        **divergence,
    )


@pytest.mark.parametrize("divergence", DIVERGENCES.values(), ids=DIVERGENCES)
@pytest.mark.parametrize("teacher_dtype", [BF16, F32], ids=["bfloat16", "float32"])
def test_derivative_reads_the_logits_of_the_loss(divergence, teacher_dtype):
    """The gradients of a token's logits add up to 0, if all readers see the same logits. 2 s.

    XLA fuses small products with their readers. When it dropped the rounding of the logits in the
    sums alone, the ratio below was 0.05 to 0.57. With the roundings of the gradient it is 0.003.
    """
    num_tokens, hidden_size, vocab_size = 64, 3, 300
    rng = np.random.default_rng(0)
    draw = lambda scale, *shape: jnp.asarray(scale * rng.normal(size=shape))
    x = draw(3.0, num_tokens, hidden_size).astype(BF16)
    weight = draw(5.0, vocab_size, hidden_size).astype(F32)
    teacher = draw(1.0, num_tokens, 7), draw(1.0, vocab_size, 7)
    teacher_x, teacher_weight = (a.astype(teacher_dtype) for a in teacher)

    @jax.jit
    @jax.grad
    def gradient(weight):
        return linear_distillation_loss(
            x,
            weight,
            teacher_x,
            teacher_weight,
            reduction="sum",
            implementation="xla",
            **divergence,
        )

    dweight = np.asarray(gradient(weight), np.float64)
    assert np.linalg.norm(dweight.sum(0)) < 2**-6 * np.linalg.norm(dweight)


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("divergence", ["reverse_kl", pytest.param("jensen_shannon", marks=full)])
def test_kernels_on_whole_tiles_and_narrow_parts(divergence):
    """A row of 992 columns has tiles of 512, 256, 128, 64 and 32. 4 s."""
    arrays, teacher = make_arrays((6,), 992, BF16)
    options = {"implementation": "mosaic_gpu", "divergence": divergence, "temperature": 0.6}
    check(arrays, teacher, chunk_size=5, **options)


@pytest.mark.usefixtures("interpreted", "fresh_operations")
@pytest.mark.parametrize(
    "divergence, dtype",
    [
        ("jensen_shannon", BF16),
        pytest.param("forward_kl", F32, marks=full),
        pytest.param("reverse_kl", BF16, marks=full),
    ],
)
def test_kernels_with_the_teacher_by_parts(monkeypatch, divergence, dtype):
    """Chunks of 3, 5 and 5 tokens. The last two have two parts of 4 rows, some of zeros. 5 s."""
    monkeypatch.setattr(Settings, "chunk", lambda *args, **options: Chunk(5, 3))
    arrays, teacher = make_arrays((13,), vocab=KV, dtype=dtype, biases=True)
    options = {"implementation": "mosaic_gpu", "divergence": divergence, "temperature": 0.9}
    check(arrays, teacher, chunk_size=None, logit_softcap=2.0, slack=1.5, **options)


# The capped logits of the tests are between -3 and 3 before the cap, so tanh is curved.
CAPS: dict[str, Any] = {"logit_softcap": 2.0, "teacher_logit_softcap": 3.0}


@in_turn(
    "implementation, divergence, options, dtype",
    IMPLEMENTATIONS,
    DIVERGENCES,
    {
        "biases": {"biases": True},
        "teacher_softcap": {"teacher_logit_softcap": 2.0},
        "all": {"biases": True, **CAPS},
        "softcap": {"logit_softcap": 2.0},
    },
    {"bfloat16": BF16, "float32": F32},
)
def test_biases_and_softcaps(implementation, divergence, options, dtype):
    given: dict[str, Any] = {
        "implementation": implementation,
        "temperature": 1.7,
        **divergence,
        **options,
    }
    biases = given.pop("biases", False)
    arrays, teacher = make_arrays(vocab=KV, dtype=dtype, biases=biases)
    # XLA's tanh errs by up to four units, and NumPy's by one.
    check(arrays, teacher, slack=1.5, **given)


@pytest.mark.usefixtures("interpreted")
def test_kernels_with_biases_on_whole_tiles_and_narrow_parts():
    """A row of 544 columns has tiles of 512 and 32. 3 s."""
    arrays, teacher = make_arrays((6,), 544, BF16, biases=True)
    options: dict[str, Any] = CAPS | {"divergence": "reverse_kl"}
    check(arrays, teacher, chunk_size=6, implementation="mosaic_gpu", **options)


def test_a_bias_has_a_gradient_of_its_own():
    """And no product is made for it."""
    given, teacher = make_arrays(biases=True)
    arrays, of_teacher = as_jax((given, teacher))

    def loss(bias):
        return loss_of(arrays | {"bias": bias}, of_teacher, chunk_size=CHUNK, implementation="xla")

    graded = jax.grad(loss)
    want = formula(given, teacher, 1.0)["bias"]
    got = quick_jit(graded)(arrays["bias"])
    np.testing.assert_allclose(got, want, atol=64 * EPS32 * np.max(np.abs(want)))
    number = lambda fn: str(jax.make_jaxpr(fn)(arrays["bias"])).count("dot_general")
    assert number(graded) == number(loss)


def test_large_logits_with_a_softcap():
    """The bound holds logits of some hundreds and infinities, whose gradients are 0."""
    arrays, teacher = make_arrays(vocab=KV, biases=True)
    arrays["weight"] = 100 * arrays["weight"]
    arrays["bias"] = put(arrays["bias"], 3, -np.inf)
    *others, bias = teacher
    teacher = (*others, put(bias, 5, np.inf))
    options = {"implementation": "xla", "divergence": "reverse_kl", **CAPS}
    # Nearly all that is left of 1 - tanh² is its rounding.
    got = check(arrays, teacher, but=("x", "weight", "bias"), **options)
    assert all(np.all(np.isfinite(a)) for a in got.values())
    assert got["bias"][3] == 0


# Leading axes, vocabulary and tokens of a chunk. Blocks of in-place gradients have 1, 2 or 3 steps.
@pytest.mark.parametrize(
    "shape, vocab, chunk_size",
    [
        ((), 5, 4),
        ((2, 0), 5, None),
        ((1,), 9, 1),
        ((17,), 127, 17),
        ((3, 43), 129, 43),
        ((2, 3, 2, 3), 1, 9),
        pytest.param((128,), 128, 64, marks=full),
    ],
    ids=str,
)
def test_shapes(shape, vocab, chunk_size):
    arrays, teacher = make_arrays(shape, vocab, BF16, weights=False)
    options: dict[str, Any] = {"divergence": "jensen_shannon" if len(shape) > 1 else "forward_kl"}
    # With one token in the vocabulary all is 0 but for rounding.
    but = ("loss", "x", "weight") if vocab == 1 else ()
    got = check(arrays, teacher, implementation="xla", chunk_size=chunk_size, but=but, **options)
    if vocab == 1:
        assert abs(float(got["loss"])) < 4 * EPS32
        assert not np.any(np.asarray(got["x"], np.float32))


@in_turn(
    "dtypes, layouts",
    {"float16": (F16, F16, None), "mixed": (BF16, F32, None), "float32_logits": (BF16, BF16, F32)},
    {"vd_dv": ("vd", "dv"), "dv_vd": ("dv", "vd"), "dv_dv": ("dv", "dv")},
)
def test_dtypes_and_layouts(dtypes, layouts):
    dtype, teacher_dtype, logits_dtype = dtypes
    arrays, teacher = make_arrays(dtype=dtype)
    teacher = [a.astype(teacher_dtype) for a in teacher]
    layout, teacher_layout = layouts
    given, given_teacher = dict(arrays), list(teacher)
    if layout == "dv":
        given["weight"] = given["weight"].T
    if teacher_layout == "dv":
        given_teacher[1] = given_teacher[1].T
    options = {"implementation": "xla", "logits_dtype": logits_dtype}
    got = run(
        given,
        given_teacher,
        weight_layout=layout,
        teacher_weight_layout=teacher_layout,
        **options,
    )
    if layout == "dv":
        got["weight"] = got["weight"].T
    check_against_formula(got, arrays, teacher, **options)


def test_a_weight_in_float32_has_a_gradient_with_its_digits():
    arrays, teacher = make_arrays(dtype=BF16)
    arrays["weight"] = arrays["weight"].astype(F32)
    got = check(arrays, teacher, implementation="xla")
    coarse = np.asarray(got["weight"].astype(BF16).astype(F32))
    assert np.mean(np.asarray(got["weight"]) == coarse) < 0.1


@pytest.mark.parametrize("beta", [0.0, 1.0])
def test_the_ends_of_beta_are_the_divergences_of_kullback_and_leibler(beta):
    arrays, teacher = make_arrays()
    name = ("forward_kl", "reverse_kl")[int(beta)]
    of_beta = run(arrays, teacher, divergence="jensen_shannon", beta=beta)
    assert jax.tree.all(
        jax.tree.map(np.array_equal, of_beta, run(arrays, teacher, divergence=name))
    )


@in_turn("implementation, divergence", IMPLEMENTATIONS, DIVERGENCES)
def test_an_equal_teacher_gives_nothing(implementation, divergence):
    arrays, _ = make_arrays(vocab=KV)
    teacher = arrays["x"], arrays["weight"]
    got = run(arrays, teacher, implementation=implementation, **divergence)
    other = run(*make_arrays(vocab=KV), implementation=implementation, **divergence)
    for name in ("loss", "x", "weight"):
        largest = np.max(np.abs(other[name]))
        assert np.max(np.abs(got[name])) <= 8 * EPS32 * largest, name


@in_turn("implementation, divergence", IMPLEMENTATIONS, DIVERGENCES)
def test_large_logits(implementation, divergence):
    # Integers, so that all logits, up to some hundreds, are exact. Most probabilities are 0.
    rng = np.random.default_rng(0)
    arrays, _ = make_arrays(vocab=KV)
    arrays["x"] = rng.integers(-3, 4, size=(T, D)).astype(np.float32)
    arrays["weight"] = rng.integers(-20, 21, size=(KV, D)).astype(np.float32)
    teacher = (
        rng.integers(-3, 4, size=(T, E)).astype(np.float32),
        rng.integers(-20, 21, size=(KV, E)).astype(np.float32),
    )
    # The reference has the roundings of JAX's derivatives.
    but = ("x", "weight") if implementation == "reference" else ()
    # The kernels round a logit and a logsumexp in base 2, numbers up to 512. Half an ulp of both
    # changes a probability by up to 178 epsilons. In 8 draws gradients erred by 50 to 81.
    floor = 178.0 if implementation == "mosaic_gpu" else 8.0
    got = check(arrays, teacher, implementation=implementation, but=but, floor=floor, **divergence)
    assert all(np.all(np.isfinite(a)) for a in got.values())


@in_turn(
    "implementation, divergence",
    IMPLEMENTATIONS,
    {name: name for name in ("forward_kl", "reverse_kl", "jensen_shannon")},
)
def test_a_teacher_with_probabilities_of_zero(implementation, divergence):
    # One component makes the teacher's logits of some columns -inf.
    arrays, teacher = make_arrays(vocab=KV)
    x, weight = (a.copy() for a in teacher)
    x[:, 0], weight[:, 0] = 1, 0
    weight[10:20] = 0
    weight[10:20, 0] = -np.inf
    got = run(arrays, (x, weight), implementation=implementation, divergence=divergence)
    if divergence == "reverse_kl":
        assert got["loss"] == np.inf
        return
    finite = [np.isfinite(np.asarray(a)).all() for a in got.values()]
    assert all(finite)
    # The columns with a logit of -1e4 have the same probability in float32.
    weight[10:20, 0] = -1e4
    check_against_formula(
        got, arrays, (x, weight), divergence=divergence, implementation=implementation
    )


@in_turn(
    "implementation, divergence, of_teacher",
    IMPLEMENTATIONS,
    DIVERGENCES,
    {"0": 0, "1": 1},
    but=[("xla", "forward_kl", "0")],
)
def test_nan_of_a_token_that_counts_arrives(implementation, divergence, of_teacher):
    arrays, teacher = make_arrays(vocab=KV)
    token = 9
    if of_teacher:
        teacher = put(teacher[0], (token, 3), np.nan), teacher[1]
    else:
        arrays["x"] = put(arrays["x"], (token, 3), np.nan)
    options = {"implementation": implementation, **divergence}
    got = run(arrays, teacher, reduction="none", **options)
    is_nan = np.isnan(np.asarray(got["loss"]))
    np.testing.assert_array_equal(is_nan, np.arange(T) == token)
    assert np.isnan(np.asarray(got["x"])[token]).all()
    assert np.isnan(np.asarray(got["weight"])).all()
    assert np.isnan(run(arrays, teacher, reduction="mean", **options)["loss"])


@in_turn("implementation, divergence", IMPLEMENTATIONS, DIVERGENCES)
def test_tokens_that_do_not_count_may_hold_anything(implementation, divergence):
    arrays, teacher = make_arrays(vocab=KV)
    left_out = arrays["token_weights"] == 0
    assert np.sum(left_out) > 3
    options = {"implementation": implementation, **divergence}
    want = run(arrays, teacher, **options)
    # Copies, because JAX may still read the arrays of the first call.
    arrays["x"] = put(arrays["x"], np.flatnonzero(left_out)[::2], np.nan)
    teacher = put(teacher[0], np.flatnonzero(left_out)[1::2], np.inf), teacher[1]
    got = run(arrays, teacher, **options)
    assert not np.any(np.asarray(got["x"])[left_out])
    for name in ("loss", "x", "weight"):
        np.testing.assert_array_equal(got[name], want[name], name)


def test_without_a_token_that_counts_all_is_zero():
    arrays, teacher = make_arrays()
    arrays["token_weights"][:] = 0
    got = run(arrays, teacher, implementation="xla")
    assert got["loss"] == 0 and not np.any(got["x"]) and not np.any(got["weight"])


def test_a_mask_counts_tokens():
    arrays, teacher = as_jax(make_arrays())
    labels = np.where(np.arange(T) % 3 == 0, -100, 5)
    loss = lambda mask: linear_distillation_loss(
        arrays["x"], arrays["weight"], *teacher, token_weights=mask
    )
    got = loss(jnp.asarray(labels != -100))
    some = np.flatnonzero(labels != -100)
    x, teacher_x = arrays["x"][some], teacher[0][some]
    want = linear_distillation_loss(x, arrays["weight"], teacher_x, teacher[1])
    np.testing.assert_allclose(got, want, rtol=8 * EPS32)
    assert loss(jnp.asarray(labels != -100, jnp.int8)) == got


@pytest.mark.parametrize(
    "num_counted, reduction",
    [
        (100, "mean"),
        (129, "none"),
        pytest.param(100, "none", marks=full),
        pytest.param(129, "mean", marks=full),
    ],
)
def test_fewer_rows(num_counted, reduction):
    """`counted_fraction` changes nothing but the rows: 128 of 300, or all where more count. 2 s."""
    arrays, teacher = make_arrays((300,))
    order = np.random.default_rng(7).permutation(300)
    weights = np.where(order < num_counted, 1.5, 0).astype(F32)
    spoiled = np.where((weights == 0)[:, None], np.nan, arrays["x"]).astype(F32)
    options = {"reduction": reduction, "counted_fraction": 0.4, "divergence": "jensen_shannon"}
    cotangent = jnp.asarray(make_cotangent(reduction, (300,)))

    def graded(x, weight, factors):
        def loss(x, weight):
            return linear_distillation_loss(
                x, weight, *as_jax(teacher), token_weights=factors, chunk_size=50, **options
            )

        value, vjp = jax.vjp(loss, x, weight)
        return dict(zip(("loss", "x", "weight"), (value, *vjp(cotangent)), strict=True))

    got = jax.jit(graded)(spoiled, arrays["weight"], weights)
    del options["counted_fraction"]
    arrays["token_weights"] = weights
    want = run(arrays, teacher, cotangent, chunk_size=50, implementation="xla", **options)
    check_against_formula(
        got | {"token_weights": want["token_weights"]}, arrays, teacher, cotangent, **options
    )


def test_the_gradient_of_token_weights_has_all_losses():
    arrays, teacher = make_arrays((300,))
    arrays["token_weights"][50:] = 0
    options = {"divergence": "reverse_kl", "implementation": "xla"}
    got = run(arrays, teacher, counted_fraction=0.4, chunk_size=50, **options)
    want = run(arrays, teacher, chunk_size=50, **options)
    np.testing.assert_allclose(got["token_weights"], want["token_weights"], rtol=1e-5)
    assert np.all(got["token_weights"][50:] != 0)


def test_small_weights_of_tokens_do_not_underflow_in_float16():
    arrays, teacher = make_arrays(dtype=F16)
    arrays["weight"] = arrays["weight"].astype(F32)
    arrays["token_weights"] = np.ones(T, np.float32)
    want = run(arrays, teacher, implementation="xla", reduction="sum")
    arrays["token_weights"] = 1e-6 * arrays["token_weights"]
    got = run(arrays, teacher, implementation="xla", reduction="sum")
    np.testing.assert_allclose(
        got["weight"], 1e-6 * want["weight"], atol=1e-9 * np.max(np.abs(want["weight"])), rtol=0
    )


def test_the_teacher_is_constant():
    arrays, teacher = as_jax(make_arrays())
    implementations: list[Any] = ["xla", "reference"]
    for implementation in implementations:
        gradients = jax.grad(
            lambda x, w, name=implementation: linear_distillation_loss(
                arrays["x"], arrays["weight"], x, w, implementation=name
            ),
            argnums=(0, 1),
        )(*teacher)
        assert not any(np.any(g) for g in gradients)


def test_members_of_vmap():
    members = [make_arrays(seed=seed) for seed in range(3)]
    x, teacher_x = (jnp.stack(a) for a in zip(*[(m["x"], t[0]) for m, t in members], strict=True))
    weight, teacher_weight = as_jax((members[0][0]["weight"], members[0][1][1]))

    def losses(x, weight, implementation, reduction):
        one = lambda x, teacher_x: linear_distillation_loss(
            x,
            weight,
            teacher_x,
            teacher_weight,
            reduction=reduction,
            chunk_size=16,
            implementation=implementation,
        )
        return jax.vmap(one)(x, teacher_x)

    for reduction in ("mean", "none"):
        graded = jax.jit(
            jax.value_and_grad(lambda *a: jnp.sum(losses(*a) ** 2), argnums=(0, 1)),
            static_argnums=(2, 3),
        )
        got, want = (graded(x, weight, name, reduction) for name in ("xla", "reference"))
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5 * np.max(np.abs(b))), got, want
        )


# Stored log-probabilities.


@in_turn(
    "implementation, tail, reduction, dtype",
    OF_TOP_K,
    TAILS,
    REDUCTIONS,
    {"bfloat16": BF16, "float32": F32},
    but=[("xla", "one_bucket", "mean", "bfloat16")],
)
def test_top_k(implementation, tail, reduction, dtype):
    arrays, _ = make_arrays(dtype=dtype)
    options = {"implementation": implementation, "reduction": reduction, "temperature": 1.7}
    check(arrays, make_top_k(), tail=tail, **options)


@in_turn("implementation, divergence", OF_TOP_K, DIVERGENCES)
def test_top_k_of_each_divergence(implementation, divergence):
    arrays, _ = make_arrays()
    check(arrays, make_top_k(), tail="one_bucket", implementation=implementation, **divergence)


@in_turn(
    "implementation, tail, options",
    OF_TOP_K,
    TAILS,
    {"both": {"biases": True, "logit_softcap": 2.0}, "bias": {"biases": True}},
    also=[("xla", "ignore", "both")],
    but=[("xla", "one_bucket", "both")],
)
def test_top_k_with_bias_and_softcap(implementation, tail, options):
    options = dict(options)
    arrays, _ = make_arrays(biases=options.pop("biases", False))
    check(arrays, make_top_k(), tail=tail, implementation=implementation, **options)


@in_turn(
    "divergence, k",
    DIVERGENCES,
    {"all": V, "most": V - 20, "few": 3},
    but=[("jensen_shannon", "few"), ("jensen_shannon_0.9", "all")],
)
def test_top_k_of_the_whole_vocabulary(divergence, k):
    # With all tokens it is the divergence of the whole distributions.
    arrays, _ = make_arrays()
    log_probs, ids = make_top_k(k=k)
    for implementation in ("xla", "reference"):
        options = {"implementation": implementation, **divergence}
        # The logsumexp of the tail is rounded, and then that of all classes, which a formula that
        # normalizes first does not need.
        got = check(arrays, (log_probs, ids), tail="one_bucket", slack=1.5, **options)
        if k < V:
            continue
        logits = np.zeros((T, V), np.float32)
        np.put_along_axis(logits, ids, log_probs, -1)
        whole = run(arrays, (logits, np.eye(V, dtype=np.float32)), **options)
        for name, a in whole.items():
            largest = np.max(np.abs(a))
            np.testing.assert_allclose(got[name], a, atol=64 * EPS32 * largest, err_msg=name)


def test_the_tail_keeps_its_digits():
    # The student gives the tail 1e-9: 1 minus the sum of the others would be 0 in float32.
    arrays, _ = make_arrays(weights=False)
    log_probs, ids = make_top_k()
    logits = np.full((T, V), -20, np.float32)
    np.put_along_axis(logits, ids, 0, -1)
    arrays = {"x": logits, "weight": np.eye(V, dtype=np.float32)}
    for divergence in ("forward_kl", "reverse_kl", "jensen_shannon"):
        check(
            arrays,
            (log_probs, ids),
            tail="one_bucket",
            implementation="xla",
            divergence=divergence,
        )


@in_turn("implementation, tail", OF_TOP_K, TAILS)
def test_lists_may_be_padded(implementation, tail):
    arrays, _ = make_arrays()
    log_probs, ids = make_top_k()
    options = {"implementation": implementation, "tail": tail, "reduction": "none"}
    want = run(arrays, (log_probs[:, :4], ids[:, :4]), **options)
    log_probs, ids = log_probs.copy(), ids.copy()
    log_probs[:, 4:] = -np.inf
    ids[:, 4], ids[:, 5], ids[:, 6] = ids[:, 0], -1, V + 9
    got = run(arrays, (log_probs, ids), **options)
    for name, a in want.items():
        np.testing.assert_allclose(got[name], a, atol=8 * EPS32 * np.max(np.abs(a)), err_msg=name)


@in_turn(
    "implementation, tail, wrong",
    OF_TOP_K,
    TAILS,
    {
        "negative": lambda log_probs, ids: (log_probs, put(ids, (9, 2), -1)),
        "too_large": lambda log_probs, ids: (log_probs, put(ids, (9, 2), V)),
        "twice": lambda log_probs, ids: (log_probs, put(ids, (9, 2), ids[9, 5])),
        "logits": lambda log_probs, ids: (put(log_probs, 9, log_probs[9] + 3), ids),
        "nan": lambda log_probs, ids: (put(log_probs, (9, 1), np.nan), ids),
    },
)
def test_wrong_entries_make_the_loss_of_their_token_nan(implementation, tail, wrong):
    arrays, _ = make_arrays()
    options = {"implementation": implementation, "tail": tail, "reduction": "none"}
    want = run(arrays, make_top_k(), **options)
    got = run(arrays, wrong(*make_top_k()), **options)
    is_wrong = np.arange(T) == 9
    np.testing.assert_array_equal(np.isnan(np.asarray(got["loss"])), is_wrong)
    np.testing.assert_array_equal(got["loss"][~is_wrong], want["loss"][~is_wrong])
    assert np.isnan(np.asarray(got["x"])[9]).all() and np.isnan(np.asarray(got["weight"])).all()
    np.testing.assert_array_equal(got["x"][~is_wrong], want["x"][~is_wrong])


def test_a_cotangent_of_zero():
    arrays, teacher = make_arrays()
    cotangent = put(make_cotangent("none"), 9, 0)
    arrays["x"] = put(arrays["x"], (9, 3), np.nan)
    got = run(arrays, teacher, cotangent, reduction="none", implementation="xla")
    assert np.isnan(got["loss"][9]) and not np.any(np.asarray(got["x"])[9])
    assert np.all(np.isfinite(np.asarray(got["weight"])))
