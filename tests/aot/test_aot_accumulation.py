"""Sums of gradients over microbatches, with `jax.checkpoint`, compiled for eight H100s. 8 s a case.

Tokens are split over all devices, and FSDP splits the weight. In the loop over microbatches a
device may gather the weight, and nothing of the size of the tokens.
"""

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
from pallas_kernels import (
    linear_cross_entropy,
    linear_distillation_loss,
    linear_log_probs,
    linear_token_loss,
)

pytestmark = pytest.mark.oldest
AXES = {"data": 2, "fsdp": 4}
# A device has 512 tokens of a microbatch, and the memory of `dweight` holds as many.
N, T, D, V = 2, 4096, 256, 768
BF16 = jnp.bfloat16
kernels: dict[str, Any] = {"implementation": "mosaic_gpu"}
# Fewer bytes than a chunk has, so that the exponentials are in the memory of `dweight`.
in_place: dict[str, Any] = kernels | {"max_logits_bytes": 2**16}


def loss(x, weight, labels, g):
    return linear_cross_entropy(x, weight, labels, **in_place)


def log_probs(x, weight, labels, g):
    return jnp.sum(g * jnp.exp(linear_log_probs(x, weight, labels, **in_place)))


def all_tokens(x, weight, labels, g):
    fn = lambda log_probs, entropy, g: jnp.sum(g * jnp.exp(log_probs))
    return linear_token_loss(x, weight, labels, fn, g, **in_place)


def single_tokens(x, weight, labels, g):
    fn = lambda log_probs, entropy, g: g * jnp.exp(log_probs)
    return linear_token_loss(x, weight, labels, fn, g, per_token=True, **in_place)


def distillation(x, weight, labels, g):
    return linear_distillation_loss(x, weight, 2 * x, weight, token_weights=g, **kernels)


def accumulated(fn, weight, *of_tokens):
    """The sum of the losses and of the gradients of the weight over microbatches, and each `dx`."""

    @jax.checkpoint
    def one(weight, x, *others):
        return fn(jnp.tanh(x), weight, *others)

    def step(sums, tokens):
        value, (dweight, dx) = jax.value_and_grad(one, argnums=(0, 1))(weight, *tokens)
        return jax.tree.map(jnp.add, sums, (value, dweight)), dx

    return jax.lax.scan(step, (jnp.float32(0), jnp.zeros_like(weight)), of_tokens)


def make_case(fn, is_explicit: bool) -> Case:
    tokens = P(None, ("data", "fsdp"))
    return Case(
        lambda *args: accumulated(fn, *args),
        (
            floats(V, D),
            floats(N, T, D, dtype=BF16),
            jax.ShapeDtypeStruct((N, T), jnp.int32),
            floats(N, T),
        ),
        mesh=AXES,
        specs=(P("fsdp"), tokens, tokens, tokens),
        is_explicit=is_explicit,
    )


CASES = {
    "loss, auto": make_case(loss, False),
    "loss, explicit": make_case(loss, True),
    "log_probs, explicit": make_case(log_probs, True),
    "all_tokens, auto": make_case(all_tokens, False),
    "single_tokens, explicit": make_case(single_tokens, True),
    "distillation, auto": make_case(distillation, False),
}


IN_PLACE = {"linear_exponentials", "input_gradient", "weight_gradient_rows"}
# The forward of log-probabilities is a kernel of its own.
KERNELS = {
    "loss": IN_PLACE | {"linear_exponentials_again"},
    "log_probs": IN_PLACE | {"linear_statistics"},
    "all_tokens": IN_PLACE | {"linear_exponentials_again"},
    "single_tokens": IN_PLACE | {"linear_exponentials_again"},
    "distillation": {"distillation_sums", "distillation_dlogits"},
}


# The normal run has an operation for each kind of mesh. Both have the same kernels.
FULL = CASES.keys() - {"loss, explicit", "all_tokens, auto"}


@pytest.mark.parametrize("chip", ["h100"])
@pytest.mark.parametrize(
    "case", [pytest.param(c, marks=pytest.mark.full if c in FULL else ()) for c in CASES]
)
def test_kernels_and_collectives(compiled, chip, case):
    program = compiled(chip, case)
    found: dict[str, Counter[int]] = {}
    for collective in Schedule(program.hlo).collectives():
        for size in map(math.prod, collective.results):
            if size > 8:  # sums of losses
                found.setdefault(collective.kind, Counter())[size] += collective.times
    name = case.split(", ")[0]
    assert {kernel.name for kernel in program.kernels} == KERNELS[name]
    weight, part = V * D, V * D // AXES["fsdp"]
    # The forward and its repetition gather the weight, and the function of all tokens its data.
    gathered = found["all-gather"]
    assert gathered[weight] <= 2 * N
    assert gathered.keys() - {weight} == ({T} if name == "all_tokens" else set())
    # Each part of a gradient is added up over the other axis, in the loop or after it.
    assert found["reduce-scatter"] == {part: N}
    assert found["all-reduce"].keys() == {part} and found["all-reduce"][part] <= N
    assert found.keys() == {"all-gather", "reduce-scatter", "all-reduce"}
