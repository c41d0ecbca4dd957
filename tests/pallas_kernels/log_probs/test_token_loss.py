"""Scalars made of log-probabilities, values and gradients, against float64."""

import dataclasses
import functools
import itertools
from types import SimpleNamespace
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from pallas_kernels import linear_token_loss
from pallas_kernels.loss import plan as plan_module
from pallas_kernels.loss.mosaic_gpu import in_place
from support.log_prob_formulas import arrays_of, formula, make_cotangents
from support.loss_formulas import BASE_2, BF16, F32, IGNORED, as_jax, full, interpreted
from support.loss_kernels import prefer_in_place, run_and_kernel_names
from support.numerics import assert_as_accurate, quick_jit, rounded

SHAPE, D, V = (4, 6), 24, 56
OPTIONS: dict[str, Any] = {"temperature": 0.7}


def token_fn(log_probs, entropy, data):
    """A function whose cotangents are neither linear in the results nor alike."""
    loss = jnp.sum(data["g"] * jnp.sin(log_probs))
    if entropy is not None:
        loss += jnp.sum(data["h"] * jnp.square(entropy))
    return loss / log_probs.size


def of_single_tokens(num_tokens, log_probs, entropy, data):
    """The summands of `token_fn` for `num_tokens` tokens, of some of them."""
    losses = data["g"] * jnp.sin(log_probs)
    if entropy is not None:
        losses += data["h"] * jnp.square(entropy)
    return losses / num_tokens


def with_aux(log_probs, entropy, data):
    loss = token_fn(log_probs, entropy, data)
    return loss, {"mean": jnp.mean(log_probs), "largest": jnp.max(log_probs, axis=-1)}


def make_data(shape, seed=5):
    g, h = make_cotangents(shape, seed)
    return {"g": g, "h": h}


def loss_of(
    x, weight, labels, data, *, bias=None, fn=token_fn, weight_layout: Any = "vd", **options
):
    weight = weight if weight_layout == "vd" else weight.T
    if options.get("per_token") and fn is token_fn:
        fn = functools.partial(of_single_tokens, labels.size)
    return linear_token_loss(
        x, weight, labels, fn, data, bias=bias, weight_layout=weight_layout, **options
    )


def graded(arrays, data, labels, **options):
    """Value and gradients by name, those of the data among them."""
    fn = lambda arrays, data: loss_of(labels=labels, data=data, **arrays, **options)
    value, (of_arrays, of_data) = jax.value_and_grad(fn, argnums=(0, 1))(arrays, data)
    return {"loss": value} | of_arrays | of_data


def expected(arrays, data, labels, *, with_entropy, compute, **rounding):
    """The value and the gradients in NumPy, through the cotangents of the results."""
    given = {name: a.astype(compute) for name, a in data.items()}
    zero = np.zeros(labels.shape, compute)
    found = formula(arrays, labels, (zero, zero), compute=compute, **OPTIONS)
    log_probs, entropy, size = found["log_probs"], found["entropy"], labels.size
    g = given["g"] * np.cos(log_probs) / size
    h = 2 * given["h"] * entropy / size if with_entropy else zero
    found = formula(arrays, labels, (g, h), compute=compute, **OPTIONS, **rounding)
    loss = np.sum(given["g"] * np.sin(log_probs))
    loss += np.sum(given["h"] * entropy**2) if with_entropy else 0
    return {"loss": loss / size, "g": np.sin(log_probs) / size} | {
        "h": entropy**2 / size if with_entropy else zero,
        **{name: found[name] for name in arrays},
    }


def check(got, arrays, data, labels, *, with_entropy=True, slack=1.2, floor=12.0, **rounding):
    of = functools.partial(expected, arrays, data, labels, with_entropy=with_entropy)
    exact, low = of(compute=np.float64), of(compute=np.float32, **rounding)
    assert set(got) == set(exact)
    pick = lambda values: [values[name] for name in exact]
    low = rounded(pick(low), pick(got))
    assert_as_accurate(pick(got), low, pick(exact), names=list(exact), slack=slack, floor=floor)


@pytest.mark.parametrize(
    "implementation, with_entropy, per_token",
    [
        ("xla", False, False),
        ("xla", True, True),
        ("reference", True, False),
        ("reference", False, True),
        pytest.param("xla", True, False, marks=full),
        pytest.param("xla", False, True, marks=full),
        pytest.param("reference", False, False, marks=full),
        pytest.param("reference", True, True, marks=full),
    ],
)
def test_value_and_gradients(implementation, with_entropy, per_token):
    arrays, labels = arrays_of(SHAPE, D, V, F32)
    data = make_data(SHAPE)
    options = {"implementation": implementation, "with_entropy": with_entropy, **OPTIONS}
    options["per_token"] = per_token
    got = quick_jit(functools.partial(graded, chunk_size=5, **options))(arrays, data, labels)
    check(got, arrays, data, labels, with_entropy=with_entropy)
    alone = quick_jit(functools.partial(loss_of, **options))(labels=labels, data=data, **arrays)
    chex.assert_trees_all_close(alone, got["loss"], rtol=1e-6)


# Specs of the tokens, of the weight and of the data.
LAYOUTS = {
    "sequence": (P("data", "tensor"), P(None, "data"), P("data", "tensor")),
    "vocabulary": (P(("data", "fsdp")), P("tensor", "fsdp"), P()),
}
AUTO, EXPLICIT = AxisType.Auto, AxisType.Explicit
# The normal run has every pair of values.
ON_MESHES = {
    (False, "xla", "sequence", AUTO),
    (True, "xla", "sequence", EXPLICIT),
    (False, "xla", "vocabulary", EXPLICIT),
    (True, "xla", "vocabulary", AUTO),
}


@pytest.mark.parametrize(
    "per_token, implementation, layout, kind",
    [
        pytest.param(*(case := (*which, *where)), marks=() if case in ON_MESHES else full)
        for which in ((False, "xla"), (True, "xla"), (True, "reference"))
        for where in itertools.product(LAYOUTS, (AUTO, EXPLICIT))
    ],
)
def test_the_tokens_of_all_devices(per_token, implementation, layout, kind):
    tokens, of_weight, of_data = LAYOUTS[layout]
    mesh = jax.make_mesh((2, 2, 2), ("data", "fsdp", "tensor"), axis_types=(kind,) * 3)
    arrays, labels = arrays_of(SHAPE, D, V, F32, bias=False)
    data = make_data(SHAPE)
    put = lambda a, spec: jax.device_put(a, NamedSharding(mesh, spec))
    specs = {"x": tokens, "weight": of_weight}
    options = {"implementation": implementation, "per_token": per_token, **OPTIONS}
    fn = functools.partial(graded, with_entropy=True, chunk_size=3, **options)
    with jax.set_mesh(mesh):
        got = quick_jit(fn)(
            {name: put(a, specs[name]) for name, a in arrays.items()},
            {name: put(a, of_data) for name, a in data.items()},
            put(labels, tokens),
        )
        got = jax.tree.map(np.asarray, got)
    check(got, arrays, data, labels)


def in_two_parts(log_probs, entropy, data):
    """`token_fn`, one sequence apart from the others, as losses of pairs part a batch."""
    arrays = log_probs, entropy, data
    parts = [jax.tree.map(lambda a, s=s: a[s], arrays) for s in (slice(1), slice(1, None))]
    return sum(token_fn(*part) * (part[0].size / log_probs.size) for part in parts)


@pytest.mark.parametrize("implementation", ["reference", "xla"])
def test_a_function_may_slice_tokens_that_explicit_axes_split(implementation):
    """JAX refuses slices that the devices do not divide. 2 s a case."""
    mesh = jax.make_mesh((2,), ("data",), axis_types=(EXPLICIT,))
    arrays, labels = arrays_of((2, 6), D, V, F32, bias=False)
    data = make_data((2, 6))
    options = {"implementation": implementation, "fn": in_two_parts, **OPTIONS}
    with jax.set_mesh(mesh):
        split = lambda tree: jax.device_put(tree, NamedSharding(mesh, P("data")))
        x, data_parts, label_parts = split((arrays["x"], data, labels))
        given = {"x": x, "weight": jnp.asarray(arrays["weight"])}
        fn = functools.partial(graded, with_entropy=True, **options)
        got = jax.tree.map(np.asarray, quick_jit(fn)(given, data_parts, label_parts))
    check(got, arrays, data, labels)


@pytest.mark.parametrize(
    "num_counted, per_token",
    [pytest.param(100, False, marks=full), (129, False), (100, True)],
)
def test_fewer_rows(num_counted, per_token):
    """`counted_fraction` changes nothing but the rows: 128 of 300, or all where more count. 4 s."""
    arrays, labels = arrays_of((3, 100), D, V, F32)
    order = np.random.default_rng(7).permutation(300).reshape(3, 100)
    labels = np.where(order < num_counted, np.abs(labels) % V, IGNORED).astype(np.int32)
    data = make_data((3, 100))
    options = {"implementation": "xla", "chunk_size": 50, "with_entropy": True, **OPTIONS}
    options["per_token"] = per_token
    fn = functools.partial(graded, counted_fraction=0.4, **options)
    got = quick_jit(fn)(arrays, data, labels)
    check(got, arrays, data, labels)
    # Nothing in the hidden states of ignored tokens matters.
    spoiled = np.where((labels == IGNORED)[..., None], np.nan, arrays["x"]).astype(F32)
    bad = quick_jit(fn)(arrays | {"x": spoiled}, data, labels)
    chex.assert_trees_all_equal(got, bad)


@pytest.mark.parametrize("counted", [(100, 100), (100, 129)], ids=["all fit", "one does not"])
def test_devices_agree_on_the_rows(counted):
    """300 tokens a device, of which 128 rows are computed if they fit on each. 6 s."""
    mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,))
    arrays, labels = arrays_of((2, 300), D, V, F32, bias=False)
    labels = np.abs(labels) % V
    for row, number in zip(labels, counted, strict=True):
        row[np.random.default_rng(7).permutation(300)[number:]] = IGNORED
    data = make_data((2, 300))
    options = {"implementation": "xla", "chunk_size": 50, "with_entropy": True, **OPTIONS}
    fn = functools.partial(graded, counted_fraction=0.4, **options)
    put = lambda a, spec: jax.device_put(a, NamedSharding(mesh, spec))
    split = P("data")
    with jax.set_mesh(mesh):
        got = quick_jit(fn)(
            {"x": put(arrays["x"], split), "weight": put(arrays["weight"], P())},
            {name: put(a, split) for name, a in data.items()},
            put(labels.astype(np.int32), split),
        )
        got = jax.tree.map(np.asarray, got)
    check(got, arrays, data, labels.astype(np.int32))


def test_other_results_and_factors():
    arrays, labels = as_jax(arrays_of(SHAPE, D, V, F32))
    data = as_jax(make_data(SHAPE))
    of = functools.partial(loss_of, labels=labels, data=data, has_aux=True, fn=with_aux)

    def run(arrays, implementation):
        fn = lambda arrays: of(**arrays, implementation=implementation)
        twice = lambda arrays: jax.tree.map(lambda a: 3 * a, fn(arrays))
        return jax.value_and_grad(twice, has_aux=True)(arrays)

    got, want = (quick_jit(run, static_argnums=1)(arrays, name) for name in ("xla", "reference"))
    chex.assert_trees_all_close(got, want, rtol=2e-5, atol=2e-6)
    assert got[0][1]["largest"].shape == SHAPE[:1]


def test_members_of_a_batch_have_a_function_each():
    arrays, labels = as_jax(arrays_of(SHAPE, D, V, F32, bias=False))
    data = as_jax(make_data(SHAPE))
    one = functools.partial(loss_of, weight=arrays["weight"], implementation="xla")
    of_members = lambda x: jax.vmap(lambda x, labels, data: one(x, labels=labels, data=data))(
        x, labels, data
    )
    got, vjp = jax.vjp(of_members, arrays["x"])
    member = lambda i: jax.tree.map(lambda a: a[i], (arrays["x"], labels, data))
    ones = [one(x, labels=labels, data=data) for x, labels, data in map(member, range(SHAPE[0]))]
    chex.assert_trees_all_close(got, jnp.stack(ones), rtol=1e-6)
    assert vjp(jnp.ones(SHAPE[0]))[0].shape == arrays["x"].shape


# As in `test_loss_in_place.py`: blocks of 128 rows in a band, bands, blocks that are copied.
@interpreted
@pytest.mark.parametrize(
    "num_tokens, vocab, weight_dtype, bands, layout, with_entropy",
    [
        (65, 250, F32, (1, 0, 0), "vd", True),
        pytest.param(65, 250, F32, (1, 0, 0), "vd", False, marks=full),
        pytest.param(300, 512, F32, (1, 2, 2), "vd", True, marks=full),  # 44 beside
        pytest.param(300, 512, F32, (1, 2, 2), "vd", False, marks=full),
        pytest.param(130, 768, BF16, (1, 1, 2), "dv", True, marks=full),  # 2 beside
        pytest.param(130, 768, F32, (1, 2, 1), "dv", False, marks=full),
    ],
)
def test_in_place(monkeypatch, num_tokens, vocab, weight_dtype, bands, layout, with_entropy):
    block = 128 if layout == "vd" else 256
    size, number, copied = bands
    size = block * size if number else vocab + -vocab % 128
    bands = in_place.Bands(size, number, block * copied)
    prefer_in_place(monkeypatch)
    monkeypatch.setattr(plan_module, "_bands", lambda *_: bands)
    arrays, labels = arrays_of(
        (num_tokens,), 128, vocab, BF16, bias=False, weight_dtype=weight_dtype
    )
    data = make_data((num_tokens,))
    options = {"implementation": "mosaic_gpu", "weight_layout": layout, **OPTIONS}
    fn = functools.partial(graded, with_entropy=with_entropy, **options)
    got, names = run_and_kernel_names(fn, *as_jax((arrays, data, labels)))
    assert {"linear_exponentials", "input_gradient"} <= names
    assert "linear_statistics" not in names
    rounding = {"round_exponentials": BF16, "by_pass": with_entropy}
    check(got, arrays, data, labels, with_entropy=with_entropy, slack=BASE_2, **rounding)


@interpreted
@full
@pytest.mark.parametrize("with_entropy", [False, True])
def test_chunks_of_tokens(with_entropy):
    arrays, labels = arrays_of((9,), 64, 250, BF16)
    data = make_data((9,))
    options = {"implementation": "mosaic_gpu", "chunk_size": 8, **OPTIONS}
    fn = functools.partial(graded, with_entropy=with_entropy, **options)
    got, names = run_and_kernel_names(fn, *as_jax((arrays, data, labels)))
    assert "linear_statistics" in names
    rounding = {"round_dlogits": BF16, "sum_rounded": True}
    check(got, arrays, data, labels, with_entropy=with_entropy, slack=BASE_2, **rounding)


# D = 64: the memory of a float32 `dweight` holds 128 tokens. 8 s for each.
@interpreted
@pytest.mark.parametrize(
    "num_tokens, vocab, options",
    [
        (300, 250, {"with_entropy": True}),
        pytest.param(300, 250, {"with_entropy": False}, marks=full),
        pytest.param(130, 128, {"with_entropy": False, "chunk_size": 64}, marks=full),
        pytest.param(130, 128, {"with_entropy": True, "weight_layout": "dv"}, marks=full),
    ],
)
def test_chunks_of_single_tokens(num_tokens, vocab, options):
    """Exponentials of each chunk wait for its cotangents: nothing is computed twice."""
    arrays, labels = arrays_of((num_tokens,), 64, vocab, BF16, bias=False)
    data = make_data((num_tokens,))
    labels[2] = IGNORED
    arrays["x"][2] = np.nan
    options = {"implementation": "mosaic_gpu", "per_token": True, **options, **OPTIONS}
    got, names = run_and_kernel_names(
        functools.partial(graded, **options), *as_jax((arrays, data, labels))
    )
    assert "linear_exponentials" in names and "linear_statistics" not in names
    with_entropy = options["with_entropy"]
    rounding = {"round_exponentials": BF16, "by_pass": with_entropy}
    arrays["x"][2] = 0
    check(got, arrays, data, labels, with_entropy=with_entropy, slack=BASE_2, **rounding)


@interpreted
@full
def test_a_frozen_weight_of_single_tokens():
    arrays, labels = arrays_of((20,), 64, 128, BF16, bias=False)
    data = make_data((20,))
    fn = functools.partial(
        loss_of,
        implementation="mosaic_gpu",
        per_token=True,
        chunk_size=8,
        **OPTIONS,
    )

    def of_x(x, weight, data, labels):
        return jax.grad(lambda x: fn(x, weight, labels=labels, data=data))(x)

    dx, names = run_and_kernel_names(of_x, *as_jax((arrays["x"], arrays["weight"], data, labels)))
    assert "linear_statistics" not in names and not any("gradient" in name for name in names)
    of = functools.partial(expected, arrays, data, labels, with_entropy=False)
    low, exact = of(compute=np.float32, round_exponentials=BF16)["x"], of(compute=np.float64)["x"]
    assert_as_accurate([dx], rounded([low], [dx]), [exact], names=["x"], slack=1.2 * BASE_2)


@interpreted
def test_ignored_tokens_in_place():
    """NaN of a token that does not count reaches nothing, and the kernel runs a second time."""
    arrays, labels = arrays_of((9,), 64, 128, BF16, bias=False)
    data = make_data((9,))
    labels[2] = IGNORED
    fn = functools.partial(graded, with_entropy=True, implementation="mosaic_gpu", **OPTIONS)
    broken = arrays | {"x": np.where(np.arange(9)[:, None] == 2, np.nan, arrays["x"]).astype(BF16)}
    got, _ = run_and_kernel_names(fn, *as_jax((broken, data, labels)))
    clean = arrays | {"x": np.where(np.arange(9)[:, None] == 2, 0, arrays["x"]).astype(BF16)}
    rounding = {"round_exponentials": BF16, "by_pass": True}
    check(got, clean, data, labels, slack=BASE_2, **rounding)
    assert not np.asarray(got["x"], np.float32)[2].any()


def test_other_results_of_single_tokens():
    arrays, labels = as_jax(arrays_of(SHAPE, D, V, F32))
    data = as_jax(make_data(SHAPE))

    def fn(log_probs, entropy, data):
        losses = jnp.sin(log_probs) * data["g"]
        return losses, {"losses": losses + 1, "pair": jnp.stack([log_probs, data["h"]], axis=1)}

    def run(arrays, implementation):
        options = {"implementation": implementation, "per_token": True, "has_aux": True}
        of = lambda arrays: loss_of(labels=labels, data=data, fn=fn, **options, **arrays)
        return jax.value_and_grad(of, has_aux=True)(arrays)

    got, want = (quick_jit(run, static_argnums=1)(arrays, name) for name in ("xla", "reference"))
    chex.assert_trees_all_close(got, want, rtol=2e-5, atol=2e-6)
    (loss, aux), _ = got
    assert aux["pair"].shape == (*SHAPE, 2) and aux["losses"].shape == SHAPE
    is_ignored = np.asarray(labels) == IGNORED
    assert is_ignored.any() and not np.any(aux["pair"][is_ignored])
    number = np.sum(~is_ignored)
    np.testing.assert_allclose(np.sum(np.asarray(aux["losses"])) - number, loss, rtol=1e-4)


def test_errors_of_single_tokens():
    x, weight, labels = jnp.zeros((2, 4)), jnp.zeros((5, 4)), jnp.array([0, 3])
    of = lambda fn, data=None, **options: linear_token_loss(
        x, weight, labels, fn, data, per_token=True, **options
    )
    with pytest.raises(TypeError, match=r"float32 array \(2,\), .* a number for each token"):
        of(lambda log_probs, entropy, data: jnp.sum(log_probs))
    with pytest.raises(
        ValueError, match=r"axes of labels, \(2,\); got \(\); .*constant of token_fn"
    ):
        of(lambda log_probs, entropy, data: log_probs * data, jnp.float32(2))
    with pytest.raises(ValueError, match=r"a row for each of 2 tokens, got \[\(\)\]"):
        of(lambda log_probs, entropy, data: (log_probs, jnp.sum(log_probs)), has_aux=True)
    factor = jnp.float32(2)
    assert of(lambda log_probs, entropy, data: log_probs * factor).shape == ()


def test_errors():
    x, weight, labels = jnp.zeros((2, 4)), jnp.zeros((5, 4)), jnp.array([0, 3])
    of = lambda fn, **options: linear_token_loss(x, weight, labels, fn, **options)
    with pytest.raises(TypeError, match="float32 scalar"):
        of(lambda log_probs, entropy, data: log_probs)
    with pytest.raises(TypeError, match=r"float32 scalar, got .*bfloat16.*; cast it to float32"):
        of(lambda log_probs, entropy, data: jnp.sum(log_probs).astype(BF16))
    with pytest.raises(TypeError, match="has_aux=True"):
        of(lambda log_probs, entropy, data: jnp.sum(log_probs), has_aux=True)
    for fn in (lambda p, entropy, data: p - 0.1 * entropy, lambda p, entropy, data: entropy.sum()):
        with pytest.raises((TypeError, AttributeError), match="entropy=None; pass with_entropy"):
            of(fn)
    with pytest.raises(TypeError, match="pass it in token_data"):
        jax.jit(lambda a: of(lambda log_probs, entropy, data: jnp.sum(log_probs * a)))(jnp.ones(2))
    assert of(lambda log_probs, entropy, data: jnp.sum(log_probs * jnp.ones(2))).shape == ()


@dataclasses.dataclass
class Scaled:
    factor: float

    def of_all(self, log_probs, entropy, data):
        return -self.factor * jnp.sum(log_probs)


class ScaledInside(Scaled):
    """Multiplies with an array inside of a `jax.jit`, whose text does not show the array."""

    def of_all(self, log_probs, entropy, data):
        factor = np.array([self.factor], np.float32)
        return jax.jit(lambda a: -jnp.sum(jnp.asarray(factor)[0] * a))(log_probs)


@pytest.mark.parametrize("kind", [Scaled, ScaledInside])
@pytest.mark.parametrize("implementation", ["reference", "xla"])
def test_a_method_of_an_object_that_changes(implementation, kind):
    """Equal methods may compute other things."""
    arrays, labels = as_jax(arrays_of(SHAPE, D, V, F32, bias=False))
    scaled = kind(1.0)
    of = lambda: loss_of(
        **arrays, labels=labels, data=(), fn=Identical(scaled), implementation=implementation
    )
    once = of()
    scaled.factor = 2.0
    chex.assert_trees_all_close(of(), 2 * once, rtol=1e-6)


@dataclasses.dataclass
class RuleOfVjp:
    """Has the value of a sum, and a gradient of its own."""

    factor: float

    def of_all(self, log_probs, entropy, data):
        double = jax.custom_vjp(lambda a: 2 * a)
        factor = np.array([self.factor], np.float32)
        times_factor = jax.jit(lambda a: jnp.asarray(factor)[0] * a)
        double.defvjp(lambda a: (2 * a, None), lambda _, cotangent: (times_factor(cotangent),))
        return jnp.sum(double(log_probs))


class RuleOfJvp(RuleOfVjp):
    """The same by a rule inside of a loop, beside data that have no gradient."""

    def of_all(self, log_probs, entropy, data):
        double = jax.custom_jvp(lambda a, number: number * a)
        rule = lambda primals, tangents: (double(*primals), self.factor * tangents[0])
        double.defjvp(rule)
        total, _ = jax.lax.scan(lambda c, row: (c + double(row, 2), None), 0 * data, log_probs)
        one = jax.pure_callback(lambda a: a, data, data)  # JAX cannot differentiate it
        return jnp.sum(total) * one[0]


@pytest.mark.parametrize("kind", [RuleOfVjp, RuleOfJvp])
def test_a_rule_of_an_object_that_changes(kind):
    """Programs with equal values may have other gradients; 0.6 s each."""
    arrays, labels = as_jax(arrays_of(SHAPE, D, V, F32, bias=False))
    rule, data = kind(2.0), jnp.ones(SHAPE[-1])
    options = {"labels": labels, "data": data, "implementation": "xla"}
    of = lambda arrays: loss_of(**arrays, fn=Identical(rule), **options)
    value, once = jax.value_and_grad(of)(arrays)
    rule.factor = 4.0
    same, twice = jax.value_and_grad(of)(arrays)
    assert value == same
    chex.assert_trees_all_close(twice, jax.tree.map(lambda a: 2 * a, once), rtol=1e-6)


@pytest.mark.parametrize("per_token", [False, True])
def test_arrays_that_a_rule_reads(per_token):
    """They have no place in a function that partitions itself; 1 s each."""
    arrays, labels = as_jax(arrays_of(SHAPE, D, V, F32, bias=False))
    options = {"data": jnp.ones(SHAPE), "per_token": per_token, "implementation": "xla"}

    def gradients(times):
        total = (lambda a: a) if per_token else jnp.sum
        fn = Identical(SimpleNamespace(of_all=lambda p, _, data: total(data * times(p))))
        return jax.grad(lambda a: loss_of(**a, labels=labels, fn=fn, **options))(arrays)

    def by_rule(numbers):
        times = lambda a: jnp.sum(jnp.asarray(numbers)) * a
        found = jax.custom_vjp(times)
        found.defvjp(lambda a: (times(a), ()), lambda _, cotangent: (times(cotangent),))
        return found

    once = gradients(lambda a: a)
    for factor in (2.0, 4.0):
        got = gradients(by_rule(np.array([1, factor - 1], np.float32)))
        wanted = jax.tree.map(functools.partial(jnp.multiply, factor), once)
        chex.assert_trees_all_close(got, wanted, rtol=1e-6)


class Identical:
    """A function with the equality and the hash of its class."""

    def __init__(self, scaled):
        self.scaled = scaled

    def __call__(self, *args):
        return self.scaled.of_all(*args)

    def __eq__(self, other):
        return isinstance(other, Identical)

    def __hash__(self):
        return 0


def test_no_function(unchecked_shapes):
    arrays, labels = as_jax(arrays_of(SHAPE, D, V, F32, bias=False))
    with pytest.raises(TypeError, match=r"token_fn must be a function, got None; .*_log_probs"):
        loss_of(**arrays, labels=labels, data=(), fn=None)


@pytest.mark.parametrize("implementation", ["reference", "xla"])
def test_functions_that_are_refused(implementation):
    arrays, labels = as_jax(arrays_of(SHAPE, D, V, F32, bias=False))
    of = functools.partial(loss_of, **arrays, labels=labels, data=(), implementation=implementation)

    @dataclasses.dataclass
    class Unhashable:
        def __call__(self, log_probs, entropy, data):
            return -jnp.sum(log_probs)

    with pytest.raises(TypeError, match=r"token_fn must have a hash .*give the class a __hash__"):
        of(fn=Unhashable())
    weights = jnp.ones(labels.size)
    with pytest.raises(
        ValueError, match=r"pass arrays of tokens in token_data\. With one token more"
    ):
        of(fn=lambda log_probs, entropy, data: -weights * log_probs, per_token=True)
