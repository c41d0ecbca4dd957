"""Models in FP8 with FSDP and tensor parallelism on Auto axes, compiled for eight H100s.

The transformer constrains only the heads of the attention. Its program takes 18 s of one core, and
that of layers with sequence parallelism 12 s.
`test_aot_mesh_transformer.py` has FP8 on Explicit axes, and `test_tensor_parallel.py` the numbers.
"""

import math
import re
from collections import Counter

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

from aot.harness import Case, Program
from benchmarks.training.schedule import Schedule
from pallas_kernels import add_rms_norm, document_attention, rms_norm
from pallas_kernels.attention import document_bounds
from pallas_kernels.fp8 import fp8_linear, fp8_linears, fp8_swiglu_mlp

pytestmark = pytest.mark.oldest
FSDP, TENSOR = 4, 2
B, S, D, F, L, H = 16, 2048, 2048, 4096, 2, 64
COLUMNS, ROWS = P(None, "fsdp", "tensor"), P(None, "tensor", "fsdp")
WEIGHTS = {
    "query": ((L, D, D), COLUMNS),
    "key": ((L, D, D), COLUMNS),
    "value": ((L, D, D), COLUMNS),
    "out": ((L, D, D), ROWS),
    "gate": ((L, D, F), COLUMNS),
    "up": ((L, D, F), COLUMNS),
    "down": ((L, F, D), ROWS),
    "scale": ((L, 2, D), P()),
}


def by_heads(a):
    return jax.lax.with_sharding_constraint(a, P("fsdp", None, "tensor"))


def transformer(x, weights):
    def layer(carry, w):
        normed, x = carry
        in_heads = fp8_linears(normed, (w["query"], w["key"], w["value"]), recipe="rowwise")
        q, k, v = (by_heads(a.reshape(B, S, D // H, H)) for a in in_heads)
        heads = document_attention(q, k, v, document_bounds(jnp.zeros((B, S), jnp.int32)))
        out = fp8_linear(heads.reshape(B, S, D), w["out"], recipe="rowwise")
        normed, x = add_rms_norm(out, x, w["scale"][0])
        out = fp8_swiglu_mlp(normed, w["gate"], w["up"], w["down"], recipe="rowwise")
        return add_rms_norm(out, x, w["scale"][1]), None

    first = rms_norm(x, jnp.ones(D)), x
    return jnp.sum(jnp.square(jax.lax.scan(layer, first, weights)[0][0]), dtype=jnp.float32)


def gradients(x, *weights):
    named = dict(zip(WEIGHTS, weights, strict=True))
    return jax.value_and_grad(transformer, (0, 1))(x, named)


def gather(a):
    return jax.lax.with_sharding_constraint(by_sequence(a), P("fsdp"))


def scatter(a):
    return by_sequence(jax.lax.with_sharding_constraint(a, P("fsdp")))


def by_sequence(a):
    return jax.lax.with_sharding_constraint(a, P("fsdp", "tensor"))


def layers_of_sequences(x, *weights):
    """Gradients of a loss of layers between which the axis `tensor` splits the sequences."""

    def loss(x, query, out, gate, up, down):
        hidden = fp8_linear(gather(x), query, recipe="rowwise")
        x += scatter(fp8_linear(hidden, out, recipe="rowwise"))
        x += scatter(fp8_swiglu_mlp(gather(x), gate, up, down, recipe="rowwise"))
        return jnp.sum(jnp.square(x), dtype=jnp.float32)

    return jax.grad(loss, tuple(range(6)))(x, *weights)


OF_LAYERS = [WEIGHTS[name] for name in ("query", "out", "gate", "up", "down")]
CASES = {
    "sequences": Case(
        layers_of_sequences,
        (
            jax.ShapeDtypeStruct((B, S, D), jnp.bfloat16),
            *(jax.ShapeDtypeStruct(shape[1:], jnp.float32) for shape, _ in OF_LAYERS),
        ),
        mesh={"fsdp": FSDP, "tensor": TENSOR},
        specs=(P("fsdp", "tensor"), *(P(*spec[1:]) for _, spec in OF_LAYERS)),
    ),
    "auto": Case(
        gradients,
        (
            jax.ShapeDtypeStruct((B, S, D), jnp.bfloat16),
            *(jax.ShapeDtypeStruct(shape, jnp.float32) for shape, _ in WEIGHTS.values()),
        ),
        mesh={"fsdp": FSDP, "tensor": TENSOR},
        specs=(P("fsdp"), *(spec for _, spec in WEIGHTS.values())),
    ),
}


KERNELS = {
    "rms_norm_fwd",
    "rms_norm_bwd",
    "attention_forward",
    "attention_backward_dq",
    "attention_backward_dkdv",
    "add_rms_norm_fwd",
    "add_rms_norm_bwd",
    "fp8_amax",
    "fp8_gated_matmul",
    "fp8_matmul",
    "fp8_quantize",
    "fp8_quantize_rows",
    "fp8_swiglu_bwd_amax",
    "fp8_swiglu_bwd_quantize",
}


@pytest.mark.parametrize("chip, case", [("h100", "auto")])
def test_every_kernel_runs(compiled, chip, case):
    program: Program = compiled(chip, case)
    assert {kernel.name for kernel in program.kernels} == KERNELS


@pytest.mark.parametrize("chip, case", [("h100", "auto")])
def test_devices_exchange_only_what_the_layout_needs(compiled, chip, case):
    """The elements of the results of all collectives, on one device."""
    program: Program = compiled(chip, case)
    found = Schedule(program.hlo).exchanged()
    of_layer = (4 * D * D + 3 * D * F) // TENSOR
    of_tokens = B * S // FSDP * D
    maxima = found["all-reduce"] - 4 * L * of_tokens
    assert 0 < maxima < of_tokens // 100  # of columns of activations, and of weights
    assert found == {
        # The weights, in the forward and in the backward. The scales of the axis that `fsdp` splits
        # in a copy: that of two weights in the forward, and of five in the backward.
        "all-gather": 2 * L * of_layer + 7 * L * D,
        "reduce-scatter": L * of_layer // FSDP,
        # The results of the attention and of the MLP, and the gradients of their inputs.
        "all-reduce": 4 * L * of_tokens + maxima,
    }
    gathers = " ".join(re.findall(r"= (.*) all-gather(?:-start)?\(", program.hlo))
    assert set(re.findall(r"(\w+)\[\d+,", gathers)) == {"f8e4m3fn"}


@pytest.mark.parametrize("chip, case", [("h100", "sequences")])
def test_split_sequences_are_gathered_and_scattered(compiled, chip, case):
    """An all-reduce would send twice as much."""
    program: Program = compiled(chip, case)
    found: Counter[tuple[str, int]] = Counter()
    for collective in Schedule(program.hlo).collectives():
        for result in collective.results:
            found[collective.kind, math.prod(result)] += collective.times
    of_tokens = B * S // FSDP * D
    # An input and a result of each of the two layers, in the forward and in the backward.
    assert found["all-gather", of_tokens] == found["reduce-scatter", of_tokens // TENSOR] == 4
    assert max(size for kind, size in found if kind == "all-reduce") < of_tokens // 100
    assert "all-to-all" not in {kind for kind, _ in found}
