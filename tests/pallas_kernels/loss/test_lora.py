"""A low-rank update of a frozen output embedding, in each function of its logits, in float64."""

import functools
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from pallas_kernels import (
    LoRA,
    explain,
    linear_cross_entropy,
    linear_cross_entropy_plan,
    linear_distillation_loss,
    linear_distillation_loss_top_k,
    linear_log_probs,
    linear_token_loss,
)
from support.loss_formulas import BASE_2, BF16, F16, F32, as_jax, full, interpreted, put
from support.loss_kernels import run_and_kernel_names
from support.numerics import assert_as_accurate, quick_jit

KERNEL: dict[str, Any] = {"implementation": "mosaic_gpu"}
SCALE = 0.5
NAMES = ("value", "x", "a", "b")
LOSSES = "cross_entropy", "options", "log_probs", "token_loss", "distillation"
IN_MEMORY = "options", "distillation"  # whose kernels have logits in memory
each_loss = pytest.mark.parametrize("loss", LOSSES)


def arrays_of(sizes, dtype, *, seed=0):
    """Arrays by name, in NumPy: an `x` of two axes, and float32 factors."""
    num_tokens, hidden, vocab, rank = sizes
    rng = np.random.default_rng(seed)
    normal = lambda *shape, size=1.0: np.asarray(size * rng.normal(size=shape), np.float32)
    arrays = {
        "x": normal(num_tokens, hidden).astype(dtype),
        "a": normal(vocab, rank, size=0.5),
        "b": normal(rank, hidden, size=hidden**-0.5),
        "weight": normal(vocab, hidden, size=hidden**-0.5).astype(dtype),
        "teacher_x": normal(num_tokens, 16).astype(dtype),
        "teacher_weight": normal(vocab, 16, size=0.25).astype(dtype),
        "bias": normal(vocab),
        "g": normal(num_tokens),
        "h": normal(num_tokens),
    }
    # The factors are exact in the dtype, so that to round them costs nothing.
    arrays |= {name: arrays[name].astype(dtype).astype(np.float32) for name in "ab"}
    labels = rng.integers(0, vocab, num_tokens)
    labels[2::5] = -100
    return arrays, labels.astype(np.int32)


# Losses of logits in plain JAX, and by our functions.


def of_logits(loss, z, teacher_z, labels, g, h):
    counts = labels >= 0
    if loss in ("log_probs", "options"):
        z = 2 * jnp.tanh(z / 2) / (0.7 if loss == "log_probs" else 1)
    log_p = jax.nn.log_softmax(z, axis=-1)
    picked = jnp.take_along_axis(log_p, jnp.where(counts, labels, 0)[:, None], axis=-1)[:, 0]
    entropy = -jnp.sum(jnp.exp(log_p) * log_p, axis=-1)
    match loss:
        case "cross_entropy":
            lse = jax.nn.logsumexp(z, axis=-1)
            return jnp.sum(jnp.where(counts, 0.01 * lse**2 - picked, 0)) / float(np.sum(counts))
        case "options":
            smoothed = 0.9 * picked + 0.1 * jnp.mean(log_p, axis=-1)
            return jnp.sum(jnp.where(counts, -smoothed, 0))
        case "log_probs":
            return jnp.sum(jnp.where(counts, g * picked + h * entropy, 0))
        case "token_loss":
            return jnp.sum(jnp.where(counts, g * jnp.sin(picked), 0))
    log_q = jax.nn.log_softmax(teacher_z, axis=-1)
    return jnp.sum(jnp.exp(log_q) * (log_q - log_p), axis=-1)


def ours(loss, x, weight, others, labels, **options):
    match loss:
        case "cross_entropy":
            return linear_cross_entropy(x, weight, labels, z_loss=0.01, **options)
        case "options":
            options |= {"label_smoothing": 0.1, "logit_softcap": 2.0, "reduction": "sum"}
            return linear_cross_entropy(x, weight, labels, bias=others["bias"], **options)
        case "log_probs":
            options |= {"temperature": 0.7, "logit_softcap": 2.0, "return_entropy": True}
            log_probs, entropy = linear_log_probs(x, weight, labels, **options)
            return jnp.sum(others["g"] * log_probs + others["h"] * entropy)
        case "token_loss":
            token_fn = lambda log_probs, entropy, g: jnp.sum(g * jnp.sin(log_probs))
            return linear_token_loss(x, weight, labels, token_fn, others["g"], **options)
    teacher = others["teacher_x"], others["teacher_weight"]
    return linear_distillation_loss(x, weight, *teacher, reduction="none", **options)


def graded(fn, arrays):
    """The values, and the gradients of their sum in x, a and b."""
    given = jax.tree.map(jnp.asarray, arrays)
    others = {name: a for name, a in given.items() if name not in NAMES}
    # Rounded logits make errors of one sign or the other, so a scalar's own error says little.
    loss = lambda x, a, b: (lambda values: (jnp.sum(values), values))(fn(x, a, b, others))
    of_arrays = jax.value_and_grad(loss, argnums=(0, 1, 2), has_aux=True)
    (_, values), gradients = of_arrays(*(given[n] for n in NAMES[1:]))
    return [values, *gradients]


def exact(loss, arrays, labels):
    """With the updated embedding formed, in float64."""

    def fn(x, a, b, others):
        z = x @ (others["weight"] + SCALE * a @ b).T
        z += others["bias"] if loss == "options" else 0
        teacher_z = others["teacher_x"] @ others["teacher_weight"].T
        return of_logits(loss, z, teacher_z, labels, others["g"], others["h"])

    with jax.enable_x64(True):
        wide = {name: np.asarray(a, np.float64) for name, a in arrays.items()}
        return jax.tree.map(np.asarray, graded(fn, wide))


def plain(loss, arrays, labels, dtype):
    """Two products in the dtype, with float32 logits and their gradient rounded to the dtype."""
    bits = jnp.finfo(dtype)

    @jax.custom_jvp
    def rounded_backward(z):
        return z

    @rounded_backward.defjvp
    def _(primals, tangents):
        return primals[0], jax.lax.reduce_precision(tangents[0], bits.nexp, bits.nmant)

    def product(x, matrix):
        return jnp.matmul(x, matrix, preferred_element_type=jnp.float32)

    def fn(x, a, b, others):
        a, b = a.astype(dtype), b.astype(dtype)
        u = (SCALE * product(x, b.T)).astype(dtype)
        z = rounded_backward(product(x, others["weight"].T) + product(u, a.T))
        teacher_z = product(others["teacher_x"], others["teacher_weight"].T)
        if loss in IN_MEMORY:
            in_memory = lambda z: jax.lax.reduce_precision(z, bits.nexp, bits.nmant)
            z, teacher_z = in_memory(z), in_memory(teacher_z)
        z += others["bias"] if loss == "options" else 0
        return of_logits(loss, z, teacher_z, labels, others["g"], others["h"])

    return quick_jit(lambda arrays: graded(fn, arrays))(arrays)


def with_update(loss, labels, **options):
    def fn(x, a, b, others):
        weight = others["weight"]
        weight = weight if options.get("weight_layout") != "dv" else weight.T
        return ours(loss, x, LoRA(weight, a, b, SCALE), others, jnp.asarray(labels), **options)

    return functools.partial(graded, fn)


def check(got, loss, arrays, labels, *, slack=1.2, floor=16.0):
    want = exact(loss, arrays, labels)
    low = plain(loss, arrays, labels, arrays["x"].dtype)
    for name, a in zip(NAMES[1:], got[1:], strict=True):
        assert a.dtype == arrays[name].dtype
    assert_as_accurate(got, low, want, names=NAMES, slack=slack, floor=floor)


# The losses that have these options in the normal run. Each of them is there.
IN_PLAIN_JAX = [
    (F32, {"implementation": "reference"}, ("cross_entropy", "token_loss")),
    (F32, {"implementation": "xla", "chunk_size": 4}, ("log_probs", "distillation")),
    (
        BF16,
        {"implementation": "xla", "chunk_size": 4, "weight_layout": "dv"},
        ("options", "token_loss"),
    ),
    (F16, {"implementation": "xla"}, ()),
]


# Chunks of 8 and 3 tokens; D and V that are no multiples of a tile.
@pytest.mark.parametrize(
    "dtype, options, loss",
    [
        pytest.param(dtype, options, loss, marks=() if loss in losses else full)
        for dtype, options, losses in IN_PLAIN_JAX
        for loss in LOSSES
    ],
    ids=str,
)
def test_in_plain_jax(dtype, options, loss):
    arrays, labels = arrays_of((11, 24, 53, 3), dtype)
    got = quick_jit(with_update(loss, labels, **options))(arrays)
    # A few roundings to float16 decide: of 24 draws the factors' gradients err 0.4 to 1.7 times as
    # much as plain JAX's.
    check(got, loss, arrays, labels, slack=2.0 if dtype == F16 else 1.2)


# Two steps in K of the weight and one or two of the update, the last ones ragged.
@interpreted
@pytest.mark.parametrize(
    "loss, dtype, sizes, options",
    [
        pytest.param("cross_entropy", BF16, (9, 72, 250, 5), {"chunk_size": 8}, marks=full),
        ("cross_entropy", BF16, (9, 128, 384, 70), {"weight_layout": "dv"}),
        ("log_probs", BF16, (9, 72, 250, 70), {"counted_fraction": 0.5}),
        pytest.param("token_loss", BF16, (9, 72, 250, 5), {}, marks=full),
        pytest.param("log_probs", F16, (9, 128, 384, 5), {"weight_layout": "dv"}, marks=full),
        pytest.param("token_loss", BF16, (130, 64, 300, 64), {"chunk_size": 64}, marks=full),
    ],
)
def test_kernels(loss, dtype, sizes, options):
    arrays, labels = arrays_of(sizes, dtype)
    fn = with_update(loss, labels, **KERNEL, **options)
    got, names = run_and_kernel_names(fn, arrays)
    assert "linear_exponentials" in names
    assert not names & {"input_gradient", "weight_gradient_rows", "weight_gradient_columns"}
    check(got, loss, arrays, labels, slack=BASE_2)


@interpreted
@pytest.mark.parametrize(
    "loss, kernel", [("options", "loss_of_logits"), ("distillation", "distillation_dlogits")]
)
def test_kernels_over_logits_in_memory(loss, kernel):
    arrays, labels = arrays_of((9, 72, 256, 5), BF16)
    got, names = run_and_kernel_names(with_update(loss, labels, **KERNEL), arrays)
    assert kernel in names
    check(got, loss, arrays, labels, slack=BASE_2)


def test_one_sum_of_distillation_losses():
    """The forward makes its gradients; they are those of losses that are added up outside."""
    arrays, _ = map(as_jax, arrays_of((9, 24, 53, 3), F32))
    teacher = arrays["teacher_x"], arrays["teacher_weight"]

    def loss(x, a, b, reduction):
        lora = LoRA(arrays["weight"], a, b, SCALE)
        options = {"reduction": reduction, "implementation": "xla", "chunk_size": 4}
        return jnp.sum(linear_distillation_loss(x, lora, *teacher, **options))

    args = arrays["x"], arrays["a"], arrays["b"]
    one, each = (
        quick_jit(jax.grad(functools.partial(loss, reduction=reduction), (0, 1, 2)))(*args)
        for reduction in ("sum", "none")
    )
    chex.assert_trees_all_close(one, each, rtol=1e-5, atol=1e-5)


def test_the_frozen_weight_has_no_gradient():
    """The gradients in a `LoRA`, its scale among them."""
    arrays, labels = map(as_jax, arrays_of((4, 8, 12, 2), F32))
    lora = LoRA(arrays["weight"], arrays["a"], arrays["b"], jnp.float32(0.5))
    loss = lambda lora: linear_cross_entropy(arrays["x"], lora, labels, implementation="xla")
    found = quick_jit(jax.grad(loss))(lora)
    assert not found.weight.any() and found.a.any() and found.b.any()
    step = 1e-2
    of_scale = [loss(lora._replace(scale=0.5 + sign * step)) for sign in (1, -1)]
    np.testing.assert_allclose(found.scale, (of_scale[0] - of_scale[1]) / (2 * step), rtol=1e-2)


@pytest.mark.parametrize("loss", ["cross_entropy", "log_probs", "token_loss"])
@pytest.mark.parametrize("implementation", ["reference", "xla"])
def test_tokens_that_do_not_count(loss, implementation):
    """NaN where the label is ignored changes nothing, and elsewhere it is in every gradient."""
    arrays, labels = arrays_of((6, 8, 12, 2), F32)
    fn = quick_jit(with_update(loss, labels, implementation=implementation))
    good = fn(arrays)
    (token,) = np.flatnonzero(labels < 0)[:1]
    chex.assert_trees_all_equal(fn(arrays | {"x": put(arrays["x"], token, np.nan)}), good)
    bad = fn(arrays | {"x": put(arrays["x"], token + 1, np.nan)})
    assert all(np.isnan(a).any() for a in bad)


@each_loss
def test_batches(loss):
    """`vmap` over tokens is the same as a loop over its members."""
    arrays, labels = arrays_of((6, 8, 12, 2), F32)
    per_token = {"x", "teacher_x", "g", "h"}
    members = {
        name: jnp.asarray(a).reshape(2, 3, *a.shape[1:]) if name in per_token else jnp.asarray(a)
        for name, a in arrays.items()
    }
    labels = jnp.asarray(labels).reshape(2, 3)

    def one(of_tokens, labels):
        given = members | of_tokens
        lora = LoRA(given["weight"], given["a"], given["b"], SCALE)
        return ours(loss, given["x"], lora, given, labels, implementation="xla")

    of_tokens = {name: members[name] for name in per_token}
    batched = quick_jit(jax.vmap(one))(of_tokens, labels)
    alone = [one({name: a[i] for name, a in of_tokens.items()}, labels[i]) for i in range(2)]
    chex.assert_trees_all_close(batched, jnp.stack(alone), rtol=1e-5)


def test_stored_log_probabilities():
    arrays, _ = arrays_of((6, 8, 12, 2), F32)
    x, weight, a, b = (jnp.asarray(arrays[name]) for name in ("x", "weight", "a", "b"))
    ids = jnp.tile(jnp.arange(3), (6, 1))
    loss = lambda x, weight: linear_distillation_loss_top_k(x, weight, jnp.log(ids / 6 + 0.1), ids)
    got = jax.grad(lambda x: loss(x, LoRA(weight, a, b, SCALE)))(x)
    want = jax.grad(lambda x: loss(x, weight + SCALE * a @ b))(x)
    chex.assert_trees_all_close(got, want, rtol=1e-4, atol=1e-5)


AXES = {"data": 2, "fsdp": 2, "tensor": 2}
LAYOUTS: dict[str, Any] = {
    "fsdp": (P(("data", "fsdp")), P(None, "fsdp"), P(), P()),
    "tensor": (P(("data", "fsdp")), P("tensor"), P("tensor"), P("data")),
    "weight alone": (P("data"), P("tensor", "fsdp"), P(), P(None, "fsdp")),
}


@pytest.mark.parametrize(
    "loss, layout, kind",
    [
        ("cross_entropy", "fsdp", AxisType.Auto),
        ("log_probs", "tensor", AxisType.Explicit),
        ("token_loss", "weight alone", AxisType.Explicit),
        ("distillation", "tensor", AxisType.Auto),
        pytest.param("cross_entropy", "fsdp", AxisType.Explicit, marks=full),
        pytest.param("log_probs", "tensor", AxisType.Auto, marks=full),
        pytest.param("token_loss", "weight alone", AxisType.Auto, marks=full),
        pytest.param("distillation", "tensor", AxisType.Explicit, marks=full),
    ],
)
def test_meshes(loss, layout, kind):
    arrays, labels = arrays_of((24, 8, 16, 2), F32)
    tokens, of_weight, of_a, of_b = LAYOUTS[layout]
    mesh = jax.make_mesh(tuple(AXES.values()), tuple(AXES), axis_types=(kind,) * len(AXES))
    specs = {"weight": of_weight, "a": of_a, "b": of_b, "teacher_weight": P()}
    place = lambda a, spec: jax.device_put(a, NamedSharding(mesh, spec))
    with jax.set_mesh(mesh):
        placed = {name: place(a, specs.get(name, tokens)) for name, a in arrays.items()}
        placed_labels = place(labels, tokens)
        run = lambda arrays, labels: with_update(loss, labels, implementation="xla")(arrays)
        got = jax.tree.map(np.asarray, quick_jit(run)(placed, placed_labels))
    check(got, loss, arrays, labels)


@pytest.mark.parametrize(
    "check_vma, loss",
    [
        (True, "token_loss"),
        (False, "cross_entropy"),
        pytest.param(False, "token_loss", marks=full),
        pytest.param(True, "cross_entropy", marks=full),
        pytest.param(False, "distillation", marks=full),
        pytest.param(True, "distillation", marks=full),
    ],
)
def test_a_vocabulary_that_the_caller_splits(loss, check_vma):
    arrays, labels = arrays_of((24, 8, 16, 2), F32)
    specs = {"weight": P("tensor"), "a": P("tensor"), "teacher_weight": P("tensor")}
    others = {name: a for name, a in arrays.items() if name not in NAMES}

    def local(x, a, b, others, labels):
        lora = LoRA(others["weight"], a, b, SCALE)
        return ours(loss, x, lora, others, labels, implementation="xla", vocab_axis="tensor")

    fn = jax.shard_map(
        local,
        mesh=jax.make_mesh(tuple(AXES.values()), tuple(AXES), axis_types=(AxisType.Auto,) * 3),
        in_specs=(P(), specs["a"], P(), {name: specs.get(name, P()) for name in others}, P()),
        out_specs=P(),
        check_vma=check_vma,
    )
    of_arrays = lambda x, a, b, others: fn(x, a, b, others, jnp.asarray(labels))
    run = lambda arrays: graded(of_arrays, arrays)
    check(quick_jit(run)(arrays), loss, arrays, labels)


def test_plan_and_explain():
    arrays, labels = map(as_jax, arrays_of((4, 8, 12, 2), F32))
    lora = LoRA(arrays["weight"], arrays["a"], arrays["b"])
    plan = linear_cross_entropy_plan(arrays["x"], lora, labels)
    assert (plan.num_products, plan.num_products_alone) == (2, 1)
    (choice,) = explain(linear_cross_entropy, arrays["x"], lora, labels).choices
    assert choice.implementation == "xla"


@pytest.mark.parametrize(
    "a, b, options, match",
    [
        ((12, 2), (3, 8), {}, r"weight.a must be \[V, r\] and weight.b .*\(12, 2\) and \(3, 8\)"),
        ((8, 2), (2, 8), {}, "with V = 12, D = 8"),
        ((12, 0), (0, 8), {}, "r >= 1"),
        ((12, 2), (2, 8), {"vocab_chunk_size": 4}, "vocab_chunk_size=4 takes no LoRA"),
    ],
)
def test_errors(a, b, options, match):
    lora = LoRA(jnp.zeros((12, 8)), jnp.zeros(a), jnp.zeros(b))
    with pytest.raises(ValueError, match=match):
        linear_cross_entropy(jnp.zeros((3, 8)), lora, jnp.zeros(3, jnp.int32), **options)


def test_errors_of_the_update():
    x, weight, a, b = jnp.ones((3, 8)), jnp.ones((12, 8)), jnp.ones((12, 2)), jnp.ones((2, 8))
    of = lambda weight: linear_cross_entropy(x, weight, jnp.zeros(3, jnp.int32))
    for scale in ("a", None, jnp.ones(2)):
        with pytest.raises(TypeError, match=r"weight\.scale must be a number or a scalar array"):
            of(LoRA(weight, a, b, scale))
    with pytest.raises(TypeError, match=r"weight\.weight is a LoRA; it must be an array"):
        nested: Any = LoRA(weight, a, b)
        of(LoRA(nested, a, b))
