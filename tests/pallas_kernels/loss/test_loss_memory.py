"""The matrix products and the memory of the compiled program and of its plan."""

import functools
import math
import re
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels import linear_cross_entropy, linear_cross_entropy_plan
from support.loss_formulas import (
    F32,
    D,
    V,
    as_jax,
    make_arrays,
)

# The compiled program. Tokens x vocabulary, chunk x vocabulary, tokens x hidden and vocabulary x
# hidden are different numbers, and the first is by far the largest.
BIG_T, BIG_D, BIG_V, BIG_CHUNK = 4096, 32, 1009, 256
BIG_COLUMNS = 128  # of a vocabulary chunk; the first has 113
LOGITS, DX, DWEIGHT = (BIG_CHUNK, BIG_V), (BIG_D, BIG_CHUNK), (BIG_D, BIG_V)
BY_COLUMNS = (("vocab_chunk_size", BIG_COLUMNS),)


@functools.cache
def program(
    implementation: Any = "xla",
    reduction: Any = "sum",
    argnums=(0, 1),
    return_metrics=False,
    chunks=(("chunk_size", BIG_CHUNK),),
) -> Any:
    """The compiled loss (argnums None), or loss and gradients."""

    def loss(x, weight, labels):
        out = linear_cross_entropy(
            x,
            weight,
            labels,
            reduction=reduction,
            implementation=implementation,
            return_metrics=return_metrics,
            **dict(chunks),
        )
        out, metrics = out if return_metrics else (out, None)
        # With unequal cotangents the gradients cannot be scaled afterwards.
        return jnp.vdot(out, jnp.arange(1.0, 1 + out.size).reshape(out.shape)), metrics

    fn = loss if argnums is None else jax.value_and_grad(loss, argnums=argnums, has_aux=True)
    x = jax.ShapeDtypeStruct((BIG_T, BIG_D), F32)
    weight = jax.ShapeDtypeStruct((BIG_V, BIG_D), F32)
    labels = jax.ShapeDtypeStruct((BIG_T,), jnp.int32)
    return jax.jit(fn).lower(x, weight, labels).compile()


def shape_of(dims):
    return tuple(int(d) for d in dims.split(",") if d)


def largest_buffer(compiled):
    """Elements of the largest array in the optimized program, inside of fusions as well."""
    shapes = re.findall(r"\b(?:pred|[a-z]+\d+\w*)\[([\d,]*)\]", compiled.as_text())
    return max(math.prod(shape_of(dims)) for dims in shapes)


def gemms(compiled):
    """Shapes (axes sorted) of the dots in the optimized program, with each loop body once."""
    results = re.findall(r"= \w+\[([\d,]*)\]\S* dot\(", compiled.as_text())
    return sorted(tuple(sorted(shape_of(dims))) for dims in results)


@pytest.mark.parametrize("reduction", ["sum", pytest.param("none", marks=pytest.mark.full)])
def test_no_buffer_has_the_size_of_all_logits(reduction):
    assert largest_buffer(program("xla", reduction)) == BIG_CHUNK * BIG_V
    by_columns = program("xla", reduction, chunks=BY_COLUMNS)
    assert largest_buffer(by_columns) == BIG_T * BIG_COLUMNS
    assert largest_buffer(program("reference")) == BIG_T * BIG_V


def test_the_limit_decides_the_chunks():
    limited = lambda num_bytes: program(chunks=(("max_logits_bytes", num_bytes),))
    assert largest_buffer(limited(4 * 768 * BIG_V)) == 768 * BIG_V
    assert largest_buffer(limited(4 * 256 * BIG_V)) == max(256 * BIG_V, BIG_V * BIG_D)


def test_peak_memory_is_that_of_a_chunk():
    temporary = lambda compiled: compiled.memory_analysis().temp_size_in_bytes
    # The memory of logits and dlogits of a chunk, dx and dweight in float32, dweight once more
    # around the loop, and a dozen numbers for each token.
    bound = 4 * (2 * BIG_CHUNK * BIG_V + BIG_T * BIG_D + 2 * BIG_V * BIG_D + 12 * BIG_T)
    for reduction in ("sum", "none"):
        assert temporary(program("xla", reduction)) <= bound
    assert temporary(program("reference")) > 4 * BIG_T * BIG_V > 4 * bound


# The first chunk and the loop over the others are two places in the program. Where a backward
# computes logits again, XLA takes those of the first chunk from the forward.
def test_gemms_of_the_compiled_program():
    assert gemms(program(argnums=None)) == 2 * [LOGITS]
    assert gemms(program()) == sorted(2 * [LOGITS, DX, DWEIGHT])
    assert gemms(program(reduction="none")) == sorted([LOGITS] + 2 * [LOGITS, DX, DWEIGHT])
    all_tokens = (BIG_V, BIG_T), (BIG_D, BIG_T), DWEIGHT
    assert gemms(program(chunks=(("chunk_size", BIG_T),))) == sorted(all_tokens)


# Products of the loop that makes `dweight` again if an ignored row of `x` is not finite.
REPAIR = [(BIG_COLUMNS, BIG_T), (BIG_D, BIG_COLUMNS)]


@pytest.mark.parametrize("reduction", ["sum", "none"])
def test_gemms_by_vocabulary_chunks(reduction):
    first, others = (
        [(n, BIG_T), (BIG_D, BIG_T), (BIG_D, n)] for n in (BIG_V % BIG_COLUMNS, BIG_COLUMNS)
    )
    expected = sorted(first + others + [(BIG_COLUMNS, BIG_T)] + REPAIR)
    assert gemms(program(reduction=reduction, chunks=BY_COLUMNS)) == expected


def test_a_gradient_that_nobody_asks_for_takes_no_gemm():
    for reduction, again in (("sum", []), ("none", [LOGITS])):
        of = lambda argnum, reduction=reduction: program(argnums=(argnum,), reduction=reduction)
        assert gemms(of(0)) == sorted(again + 2 * [LOGITS, DX])
        assert gemms(of(1)) == sorted(again + 2 * [LOGITS, DWEIGHT])


def test_a_loss_alone_makes_nothing_of_the_size_of_dweight():
    # The test looks at arrays that are computed, and not at arguments in the loop.
    made = rf"= f32\[(?:{BIG_V},{BIG_D}|{BIG_D},{BIG_V})\]\S* (?!parameter|get-tuple-element)(\w+)"
    moves = {"copy", "bitcast", "transpose"}
    assert set(re.findall(made, program(argnums=None).as_text())) <= moves
    assert set(re.findall(made, program().as_text())) - moves


def maxima(compiled):
    """How many reductions by maximum the optimized program has; a loop body once."""
    text = compiled.as_text()
    functions = re.findall(r"^%?([\w.\-]+) \([^\n]*\{\n(.*?)^\}", text, re.DOTALL | re.MULTILINE)
    is_maximum = {name: bool(re.search(r"ROOT .* maximum\(", body)) for name, body in functions}
    return sum(is_maximum[name] for name in re.findall(r" reduce\(.*to_apply=%?([\w.\-]+)", text))


def test_accuracy_costs_nothing_unless_asked_for():
    # The logsumexp needs the maximum of a row, and the accuracy that of the columns before the
    # label.
    for argnums in (None, (0, 1)):
        plain = program(argnums=argnums)
        with_metrics = program(argnums=argnums, return_metrics=True)
        assert (maxima(plain), maxima(with_metrics)) == (2, 4)
        assert gemms(plain) == gemms(with_metrics)


def executed_flops(jaxpr):
    """FLOPs of the matrix products of a jaxpr, loops multiplied out."""
    total = 0
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "dot_general":
            (contracted, _), _ = eqn.params["dimension_numbers"]
            lhs, out = eqn.invars[0].aval.shape, eqn.outvars[0].aval.shape
            total += 2 * math.prod(out) * math.prod(lhs[axis] for axis in contracted)
            continue
        if eqn.primitive.name == "while":
            # The branch makes `dweight` again if an ignored row of `x` is not finite.
            continue
        assert eqn.primitive.name != "cond", "of unknown count"
        count = eqn.params["length"] if eqn.primitive.name == "scan" else 1
        for parameter in eqn.params.values():
            inner = getattr(parameter, "jaxpr", parameter)
            if hasattr(inner, "eqns"):
                total += count * executed_flops(inner)
    return total


@pytest.mark.parametrize(
    "reduction, differentiated, num_gemms",
    [
        ("mean", False, 1),
        ("none", False, 1),
        ("mean", True, 3),
        ("sum", True, 3),
        ("none", True, 4),
    ],
)
@pytest.mark.parametrize(
    "chunks",
    [
        {"chunk_size": 16},
        {"chunk_size": 7},
        {"chunk_size": 64},
        {},
        {"vocab_chunk_size": 16},
        {"vocab_chunk_size": 53},
        {"vocab_chunk_size": 100},
    ],
    ids=str,
)
def test_executed_gemms(reduction, differentiated, num_gemms, chunks):
    # No chunk size divides 37 tokens or 53 columns. Still nothing is computed twice or as padding.
    if differentiated and "vocab_chunk_size" in chunks:
        num_gemms = 4
    arrays, labels = as_jax(make_arrays((37,), only=["x", "weight"]))
    loss = lambda x, weight: jnp.sum(
        linear_cross_entropy(x, weight, labels, reduction=reduction, implementation="xla", **chunks)
    )
    fn = jax.value_and_grad(loss, argnums=(0, 1)) if differentiated else loss
    jaxpr = jax.make_jaxpr(fn)(arrays["x"], arrays["weight"])
    plan = linear_cross_entropy_plan(
        arrays["x"], arrays["weight"], labels, reduction=reduction, implementation="xla", **chunks
    )
    assert num_gemms == (plan.num_products if differentiated else plan.num_products_alone)
    assert executed_flops(jaxpr.jaxpr) == num_gemms * 2 * 37 * D * V


@pytest.mark.parametrize(
    "implementation, chunks",
    [
        ("reference", ()),
        ("xla", (("chunk_size", BIG_CHUNK),)),
        ("xla", BY_COLUMNS),
    ],
    ids=str,
)
def test_the_plan_says_how_many_bytes_logits_take(implementation, chunks):
    x = jax.ShapeDtypeStruct((BIG_T, BIG_D), F32)
    weight = jax.ShapeDtypeStruct((BIG_V, BIG_D), F32)
    labels = jax.ShapeDtypeStruct((BIG_T,), jnp.int32)
    options = {"implementation": implementation, **dict(chunks)}
    plan = linear_cross_entropy_plan(x, weight, labels, **options)
    default = (("chunk_size", BIG_CHUNK),)
    compiled = program(implementation, chunks=chunks or default)
    assert plan.logits_bytes == 4 * largest_buffer(compiled)
