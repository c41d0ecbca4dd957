"""Log-probabilities compiled for eight H100s: kernels on each device's tokens, and collectives."""

import math
from collections import Counter
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

from aot.harness import Case
from aot.loss_shapes import floats
from benchmarks.training.schedule import Schedule
from pallas_kernels import linear_log_probs, linear_token_loss

pytestmark = pytest.mark.oldest
AXES = {"data": 2, "fsdp": 2, "tensor": 2}
B, S, D, V = 16, 2048, 512, 2048
BF16 = jnp.bfloat16
# Specs of the tokens and of the weight [V, D], and the number of parts of each.
LAYOUTS = {
    "sequence": (P(("data", "fsdp"), "tensor"), P(), 8, 1),
    "fsdp": (P(("data", "fsdp", "tensor")), P(None, "fsdp"), 8, 1),
    "tensor": (P(("data", "fsdp")), P("tensor"), 4, 2),
}


def log_probs(x, weight, labels, g, h):
    fn = lambda x, weight: linear_log_probs(
        x, weight, labels, return_entropy=True, implementation="mosaic_gpu"
    )
    results, vjp = jax.vjp(fn, x, weight)
    return results, vjp((g, h))


def kept(x, weight, labels, g, h):
    fn = lambda x, weight: linear_log_probs(
        x, weight, labels, keep_exponentials=True, implementation="mosaic_gpu"
    )
    results, vjp = jax.vjp(fn, x, weight)
    return results, vjp(g)


def with_argmax(x, weight, labels, g, h):
    fn = lambda x, weight: linear_log_probs(
        x, weight, labels, return_argmax=True, implementation="mosaic_gpu"
    )
    results, vjp, argmax = jax.vjp(fn, x, weight, has_aux=True)
    return results, argmax, vjp(g)


def token_loss(x, weight, labels, g, h):
    def token_fn(log_probs, entropy, data):
        return jnp.sum(data[0] * jnp.exp(log_probs)) + jnp.sum(data[1] * entropy)

    fn = lambda x, weight: linear_token_loss(
        x, weight, labels, token_fn, (g, h), with_entropy=True, implementation="mosaic_gpu"
    )
    return jax.value_and_grad(fn, argnums=(0, 1))(x, weight)


def single_tokens(x, weight, labels, g, h):
    def token_fn(log_probs, entropy, data):
        return data[0] * jnp.exp(log_probs) + data[1] * entropy

    def fn(x, weight):
        options = {"with_entropy": True, "per_token": True, "implementation": "mosaic_gpu"}
        return linear_token_loss(x, weight, labels, token_fn, (g, h), **options)

    return jax.value_and_grad(fn, argnums=(0, 1))(x, weight)


def make_case(function: Any, layout: str, is_explicit: bool) -> Case:
    tokens, of_weight, _, _ = LAYOUTS[layout]
    return Case(
        function,
        (
            floats(B, S, D, dtype=BF16),
            floats(V, D),
            jax.ShapeDtypeStruct((B, S), jnp.int32),
            floats(B, S),
            floats(B, S),
        ),
        mesh=AXES,
        specs=(tokens, of_weight, tokens, tokens, tokens),
        is_explicit=is_explicit,
    )


CASES = {
    f"{function.__name__}, {layout}": make_case(function, layout, layout == "fsdp")
    for function in (log_probs, token_loss, single_tokens)
    for layout in LAYOUTS
}
CASES["with_argmax, tensor"] = make_case(with_argmax, "tensor", False)
# 4 s each.
CASES["kept, sequence"] = make_case(kept, "sequence", False)
CASES["kept, fsdp"] = make_case(kept, "fsdp", True)


# The normal run has one layout for each function, two for `log_probs`, and each layout.
NORMAL = {
    "with_argmax, tensor",
    "log_probs, fsdp",
    "log_probs, tensor",
    "token_loss, sequence",
    "single_tokens, sequence",
    "kept, fsdp",
}


@pytest.mark.parametrize("chip", ["h100"])
@pytest.mark.parametrize(
    "case", [pytest.param(c, marks=() if c in NORMAL else pytest.mark.full) for c in CASES]
)
def test_kernels_and_collectives(compiled, chip, case):
    program = compiled(chip, case)
    name, layout = case.split(", ")
    _, of_weight, token_parts, column_parts = LAYOUTS[layout]
    in_place = name != "log_probs" and column_parts == 1
    # A device has more than 2 D = 1024 tokens, so dlogits of some come in a chunk or lie beside.
    names = {kernel.name for kernel in program.kernels}
    assert "linear_exponentials" in names
    assert ("linear_statistics" in names) != in_place
    tokens, weight = B * S // token_parts, V * D // column_parts
    found: Counter[str] = Counter()
    for collective in Schedule(program.hlo).collectives():
        for shape in collective.results:
            found[collective.kind] += collective.times * math.prod(shape)
    assert not found.keys() - {"all-reduce", "all-gather", "reduce-scatter"}
    gathered = summed = scattered = 0
    if name == "token_loss":
        # Results of all tokens, and the numbers of the function's last argument: each is gathered
        # an axis at a time.
        gathered += 4 * 2 * B * S
    if column_parts > 1:
        # Statistics: 3 numbers, or 4 with the argmax and without the entropy.
        gathered += (3 + (name == "with_argmax")) * column_parts * tokens
        summed += tokens * D  # dx
    if any(of_weight) and column_parts == 1:
        gathered += 2 * weight
        scattered = weight // 2
        summed += weight // 2
    else:
        summed += weight
    assert found["all-gather"] <= gathered, found
    assert summed <= found["all-reduce"] <= summed + 8, found
    assert found["reduce-scatter"] == scattered, found
