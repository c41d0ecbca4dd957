"""The products of plain JAX that `explain` finds. Nothing is compiled; 5 s."""

import dataclasses
import functools
import inspect

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from jax.experimental import pallas as pl
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from pallas_kernels import (
    document_attention,
    explain,
    linear_cross_entropy,
    linear_distillation_loss,
    linear_log_probs,
    linear_token_loss,
    patch,
    swiglu_mlp,
)
from pallas_kernels.fp8 import RECIPES, Fp8DotGeneral, fp8_linear, fp8_linears, fp8_swiglu_mlp
from pallas_kernels.layers import LinearCrossEntropy

BF16, F32 = jnp.bfloat16, jnp.float32
T, D, F = 64, 128, 256


def of(dtype, *shape):
    return jax.ShapeDtypeStruct(shape, dtype)


X, SQUARE = of(BF16, T, D), of(BF16, D, D)
WEIGHTS = of(F32, D, F), of(F32, D, F), of(F32, F, D)
HEAD, LABELS = of(BF16, 512, D), of(jnp.int32, T)
OF_ONE = 2 * T * D * D  # the FLOPs of X times SQUARE


def times(x, w):
    return x @ w


# The text of this file that names the line of `times`.
LINE = f"pallas_kernels/{__name__.split('.')[-1]}.py:{inspect.getsourcelines(times)[1] + 1} (times)"


def products(fn, *args):
    return explain(fn, *args).products


def gradient(fn, *args):
    floating = [i for i, a in enumerate(args) if jnp.issubdtype(a.dtype, jnp.floating)]

    def loss(*args):
        return sum(jnp.sum(y.astype(F32) ** 2) for y in jax.tree.leaves(fn(*args)))

    return jax.grad(loss, floating)


def test_a_product_has_dtypes_shapes_flops_and_the_users_line():
    with jax.numpy_dtype_promotion("standard"):
        (found,) = products(times, of(F32, T, D), SQUARE)
    assert found.primitive == "dot_general"
    assert found.operands == ("float32[64,128]", "bfloat16[128,128]")
    assert found.result == "float32[64,128]"
    assert (found.times, found.flops, found.note) == (1, OF_ONE, "")
    assert found.line == LINE


def test_the_table_has_the_largest_product_first_and_merges_equal_ones_of_a_line():
    def two_sizes(x, w, wide):
        return times(times(x, w), w) @ wide

    found = products(two_sizes, X, SQUARE, of(BF16, D, 6 * D))
    assert [(p.times, p.flops) for p in found] == [(1, 6 * OF_ONE), (2, 2 * OF_ONE)]
    head, first, second = str(found).splitlines()
    assert head.split() == ["share", "FLOPs", "times", "product"]
    assert first.startswith(" 75.0%  1.26e+07       1  dot_general(bfloat16[64,128], bfloat16[128,")
    assert second.startswith(" 25.0%  4.19e+06       2  ") and second.endswith(LINE)
    assert str(products(jnp.sin, X)) == "no product of plain JAX"


def scanned(body):
    return lambda x, w: jax.lax.scan(lambda x, _: (body(x, w), None), x, length=5)[0]


@jax.custom_vjp
def with_rule(x, w):
    return times(x, w)


with_rule.defvjp(
    lambda x, w: (times(x, w), (x, w)),
    lambda kept, dy: (times(dy, kept[1].T), times(kept[0].T, dy)),
)


@pytest.mark.parametrize(
    "fn, forward, with_gradients",
    [
        (jax.jit(jax.jit(times)), 1, 3),
        (scanned(times), 5, 15),
        (scanned(scanned(times)), 25, 75),
        (with_rule, 1, 3),
        # The backward computes the first product again, and does not need the second one.
        (jax.checkpoint(lambda x, w: times(jnp.sin(times(x, w)), w)), 2, 7),
        (scanned(jax.checkpoint(lambda x, w: jnp.sin(times(x, w)))), 5, 20),
        (lambda x, w: jax.lax.fori_loop(0, 3, lambda _, x: times(x, w), x), 3, 9),
        (jax.vmap(lambda row, w: times(row[None], w)[0], (0, None)), 1, 3),
    ],
    ids=["jit", "scan", "scans", "custom_vjp", "remat", "remat_scan", "fori_loop", "vmap"],
)
def test_each_transformation_counts_and_keeps_the_line(fn, forward, with_gradients):
    for run, number in ((fn, forward), (gradient(fn, X, SQUARE), with_gradients)):
        found = products(run, X, SQUARE)
        assert sum(p.times for p in found) == number
        assert sum(p.flops or 0 for p in found) == number * OF_ONE
        assert {p.note for p in found} == {""}
    # The two products of a rule for the backward have the line of the function with the rule.
    assert LINE in {p.line for p in found}


def test_products_that_nothing_reads_are_not_listed():
    loss = lambda x, w: jnp.sum(times(x, w).astype(F32))
    (found,) = products(jax.grad(loss), X, SQUARE)
    assert found.times == 1  # the result is traced, and no gradient depends on it


def test_functions_that_jax_jits_itself_have_the_line_of_each_call():
    def twice(w):
        a = jnp.linalg.matrix_power(w, 2)
        b = jnp.linalg.matrix_power(w, 2)
        return a + b

    first = inspect.getsourcelines(twice)[1] + 1
    lines = [p.line.split(":")[1].split()[0] for p in products(twice, of(F32, D, D))]
    assert lines == [str(first), str(first + 1)]


def test_times_that_no_trace_knows_are_said():
    def loop(x, w):
        return jax.lax.while_loop(lambda x: x[0, 0] > 0, lambda x: times(x, w), x)

    def branch(x, w):
        return jax.lax.cond(x[0, 0] > 0, times, lambda x, w: x, x, w)

    def solve(x, w):
        apply = lambda x: times(x, w)
        return jax.lax.custom_linear_solve(apply, x, lambda _, x: x, symmetric=True)

    cases = (loop, "counted once"), (branch, "counted as if it runs"), (solve, "linear solve")
    for fn, note in cases:
        (found,) = products(scanned(fn), X, SQUARE)
        assert found.times % 5 == 0 and note in found.note and str(found).endswith(found.note)


def test_shard_map_counts_each_device():
    mesh = jax.sharding.AbstractMesh((4, 2), ("data", "other"), (AxisType.Auto,) * 2)
    run = jax.shard_map(
        times, mesh=mesh, in_specs=(P("data"), P()), out_specs=P("data"), axis_names={"data"}
    )
    (found,) = products(run, X, SQUARE)
    assert found.operands[0].startswith("bfloat16[16,128]")
    assert (found.times, found.flops) == (4, OF_ONE) and "4 devices" in found.note


def test_other_kinds_of_products():
    def convolve(x, w):
        return jax.lax.conv_general_dilated(x, w, (2, 2), "VALID", feature_group_count=2)

    (found,) = products(convolve, of(F32, 3, 8, 9, 9), of(F32, 6, 4, 3, 3))
    assert (found.primitive, found.result) == ("conv_general_dilated", "float32[3,6,4,4]")
    assert found.flops == 2 * (3 * 6 * 4 * 4) * (4 * 3 * 3)
    # The gradient of the input puts zeros between the numbers of its operand.
    images, kernels = of(F32, 3, 8, 8, 8), of(F32, 6, 4, 2, 2)
    backward = products(gradient(convolve, images, kernels), images, kernels)
    assert sum(p.flops or 0 for p in backward) == 3 * 2 * (3 * 6 * 4 * 4) * (4 * 2 * 2)
    (found,) = products(jax.lax.ragged_dot, X, of(BF16, 4, D, F), of(jnp.int32, 4))
    assert (found.primitive, found.flops) == ("ragged_dot_general", 2 * T * D * F)
    (found,) = products(
        functools.partial(jnp.einsum, "bij,bjk->bik"), of(F32, 3, 4, 5), of(F32, 3, 5, 7)
    )
    assert found.flops == 2 * 3 * 4 * 5 * 7


def test_a_symbolic_size_has_no_flops():
    (size,) = jax.export.symbolic_shape("t")
    found = products(lambda x, w: (times(x, w), times(w, w)), of(BF16, size, D), SQUARE)
    assert [p.flops for p in found] == [None, 2 * D**3]
    assert str(found).splitlines()[1].split()[:3] == ["?", "?", "1"]

    def loop(xs, w):
        return jax.lax.scan(
            lambda total, x: (total + times(x, w), None), jnp.zeros((T, D), BF16), xs
        )

    (found,) = products(loop, of(BF16, size, T, D), SQUARE)
    assert (found.times, found.flops) == (1, OF_ONE) and "symbolic: counted once" in found.note


def test_kernels_of_others_are_not_searched():
    def kernel(x_ref, w_ref, y_ref):
        y_ref[...] = times(x_ref[...], w_ref[...])

    run = pl.pallas_call(kernel, out_shape=X, interpret=True)
    assert not products(run, X, SQUARE)


SMALL = dataclasses.replace(RECIPES["rowwise"], least_size=0)
Q = of(BF16, 1, T, 4, 64)


def token_loss(x, weight, labels, **options):
    return linear_token_loss(x, weight, labels, lambda lp, *_: lp.sum(), **options)


def distillation_loss(x, weight, **options):
    return linear_distillation_loss(x, weight, x, weight, **options)


CALLS = {
    "fp8_linear": (functools.partial(fp8_linear, recipe=SMALL), X, WEIGHTS[0]),
    # The weights are too small for FP8.
    "fp8_linear_in_16_bits": (functools.partial(fp8_linear, recipe="rowwise"), X, WEIGHTS[0]),
    "fp8_linears_in_16_bits": (
        lambda x, *weights: fp8_linears(x, weights, recipe="rowwise"),
        *(X, WEIGHTS[0], WEIGHTS[1]),
    ),
    "fp8_swiglu_mlp": (functools.partial(fp8_swiglu_mlp, recipe=SMALL), X, *WEIGHTS),
    "fp8_swiglu_mlp_in_16_bits": (
        functools.partial(fp8_swiglu_mlp, recipe="rowwise"),
        *(X, *WEIGHTS),
    ),
    "document_attention": (lambda q, k, v: document_attention(q, k, v, None), Q, Q, Q),
    "document_attention_jitted": (
        jax.jit(jax.checkpoint(lambda q, k, v: document_attention(q, k, v, None))),
        *(Q, Q, Q),
    ),
}
for _name in (None, "xla", "reference"):
    _plain = functools.partial(functools.partial, implementation=_name)
    CALLS |= {
        f"swiglu_mlp_{_name}": (_plain(swiglu_mlp), X, *WEIGHTS),
        f"linear_cross_entropy_{_name}": (_plain(linear_cross_entropy), X, HEAD, LABELS),
        f"linear_log_probs_{_name}": (_plain(linear_log_probs), X, HEAD, LABELS),
        f"linear_token_loss_{_name}": (_plain(token_loss), X, HEAD, LABELS),
        f"linear_distillation_loss_{_name}": (_plain(distillation_loss), X, HEAD),
    }


@pytest.mark.parametrize("call", CALLS)
def test_the_products_of_operations_are_not_listed(call):
    fn, *args = CALLS[call]
    for run in (fn, gradient(fn, *args)):
        found = explain(lambda *args, run=run: (run(*args), times(args[0], args[0].mT)), *args)
        assert found.choices
        assert [p.line for p in found.products] == [LINE]


def test_the_logits_of_a_layer_are_no_operation():
    head = LinearCrossEntropy(D, 512, rngs=nnx.Rngs(0))
    (found,) = products(lambda head, x: head.logits(x), head, X)
    assert found.result == "float32[64,512]" and "test_plain_products.py" in found.line


class MLP(nnx.Module):
    def __init__(self, rngs):
        options = {"use_bias": False, "dtype": BF16, "rngs": rngs}
        self.gate, self.up = nnx.Linear(D, F, **options), nnx.Linear(D, F, **options)
        self.down = nnx.Linear(F, D, **options)

    def __call__(self, x):
        return self.down(nnx.silu(self.gate(x)) * self.up(x))


class Model(nnx.Module):
    def __init__(self, rngs):
        self.mix = nnx.Linear(D, D, dtype=BF16, rngs=rngs)
        self.mlp = MLP(rngs)
        self.head = nnx.Linear(D, 512, rngs=rngs)  # float32, by an accident

    def __call__(self, x):
        hidden = self.mlp(self.mix(x))
        return self.head(hidden)


@jax.numpy_dtype_promotion("standard")
def test_a_model_in_fp8_has_the_head_left():
    model = Model(nnx.Rngs(0))
    assert len(products(lambda model, x: model(x), model, X)) == 4
    patch(model, fp8=SMALL)
    model.mix.dot_general = Fp8DotGeneral(SMALL)
    line = inspect.getsourcelines(Model.__call__)[1] + 2
    (forward,) = products(lambda model, x: model(x), model, X)
    assert forward.operands == ("float32[64,128]", "float32[128,512]")
    assert forward.line.endswith(f"test_plain_products.py:{line} (Model.__call__)")
    graph, state = nnx.split(model)
    loss = lambda state, x: jnp.sum(jnp.sin(nnx.merge(graph, state)(x)))
    found = products(jax.grad(loss), state, X)
    assert len(found) == 3 and {p.line for p in found} == {forward.line}
    assert {p.result for p in found} == {
        *("float32[64,512]", "float32[64,128]"),
        *("float32[512,128]",),
    }
