"""Members of `jax.vmap` with weights or gradients of their own, compiled for eight H100s.

Each device has a loop over its own members, and devices exchange only gradients of weights that
they share. The six programs take 40 s of one core, and JAX 0.12 compiles two.
"""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

from aot.harness import Case
from benchmarks.training.schedule import Schedule
from pallas_kernels import linear_cross_entropy, rms_norm, swiglu_mlp
from pallas_kernels.fp8 import fp8_swiglu_mlp, quantize_weight
from pallas_kernels.fp8.recipes import RECIPES

E, C, D, F, V = 16, 4096, 512, 1024, 2048  # experts, tokens of one, and sizes
RECIPE = dataclasses.replace(RECIPES["rowwise"], least_size=0)
BF16, F32 = jnp.bfloat16, jnp.float32
array = jax.ShapeDtypeStruct
X = array((E, C, D), BF16)
WEIGHTS = array((E, D, F), F32), array((E, D, F), F32), array((E, F, D), F32)


EXPERTS = P("expert")


def total(y, dy):
    return jnp.sum((y * dy).astype(F32))


def experts(x, w_gate, w_up, w_down, dy):
    def loss(*args):
        return total(jax.vmap(swiglu_mlp)(*args), dy)

    return jax.grad(loss, (0, 1, 2, 3))(x, w_gate, w_up, w_down)


def fp8_experts(x, w_gate, w_up, w_down, dy):
    # The kernels of `quantize_weight` are split by `jax.shard_map` alone.
    quantize = jax.shard_map(
        jax.vmap(functools.partial(quantize_weight, recipe=RECIPE)),
        in_specs=EXPERTS,
        out_specs=EXPERTS,
        check_vma=False,
    )
    mlp = jax.vmap(functools.partial(fp8_swiglu_mlp, recipe=RECIPE))

    def loss(x, *weights):
        return total(mlp(x, *map(quantize, weights)), dy)

    return jax.grad(loss, (0, 1, 2, 3))(x, w_gate, w_up, w_down)


def norms(x, scales, dy):
    return jax.grad(lambda *args: total(jax.vmap(rms_norm)(*args), dy), (0, 1))(x, scales)


def gradients_of_examples(x, weight, labels):
    of_one = jax.grad(lambda x, w, labels: linear_cross_entropy(x, w, labels), (0, 1))
    return jax.vmap(of_one, (0, None, 0))(x, weight, labels)


ALL = {"expert": 8}
BOTH = {"expert": 4, "data": 2}
TOKENS = P("expert", "data")
FSDP = TOKENS, TOKENS, P("expert", None, "data")
ARGS = X, *WEIGHTS, X
CASES = {
    "experts": Case(experts, ARGS, mesh=ALL, specs=(EXPERTS,) * 5),
    "tokens": Case(experts, ARGS, mesh=BOTH, specs=(TOKENS, *(EXPERTS,) * 3, TOKENS)),
    "fsdp": Case(experts, ARGS, mesh=BOTH, specs=(TOKENS, *FSDP, TOKENS)),
    "fp8": Case(fp8_experts, ARGS, mesh=ALL, specs=(EXPERTS,) * 5),
    "norms": Case(norms, (X, array((E, D), F32), X), mesh=BOTH, specs=(TOKENS, EXPERTS, TOKENS)),
    "examples": Case(
        gradients_of_examples,
        (X, array((V, D), BF16), array((E, C), jnp.int32)),
        mesh=ALL,
        specs=(EXPERTS, P(), EXPERTS),
    ),
}
OF_MLP = {"gated_matmul", "gated_matmul_backward"}
KERNELS = {
    "experts": OF_MLP,
    "tokens": OF_MLP,
    "fsdp": OF_MLP,
    "fp8": {"fp8_gated_matmul", "fp8_matmul", "fp8_swiglu_bwd_amax", "fp8_swiglu_bwd_quantize"},
    "norms": {"rms_norm_fwd", "rms_norm_bwd"},
    "examples": {"linear_exponentials", "linear_exponentials_again"},
}
# The elements of each kind of collective. A device has four members where `data` splits tokens.
COLLECTIVES = {
    "tokens": {"all-reduce": 4 * 3 * D * F},
    # The forward need not multiply by `w_down`, because no program asks for the results.
    "fsdp": {"all-gather": 4 * 5 * D * F, "reduce-scatter": 4 * 3 * D * F // 2},
    "norms": {"all-reduce": 4 * D},
}


# On both versions of JAX, "norms" has the loop and a collective, and "fp8" the products whose rows
# have scales. Other modules have the kernels of the other cases there, and
# tests/pallas_kernels/test_members.py has their numbers on the newest JAX.
BOTH_VERSIONS = ("norms", "fp8")


@pytest.mark.parametrize("chip", ["h100"])
@pytest.mark.parametrize(
    "case",
    [pytest.param(c, marks=() if c in BOTH_VERSIONS else pytest.mark.oldest) for c in CASES],
)
def test_each_device_computes_its_own_members(compiled, chip, case):
    program = compiled(chip, case)
    assert KERNELS[case] <= program.calls.keys(), program.calls
    # XLA may take a step of a loop out of it.
    steps = list(map(int, re.findall(r'known_trip_count"?:\{"n":"(\d+)"', program.hlo)))
    own = E // CASES[case].mesh["expert"]
    assert steps and set(steps) <= {own - 1, own}
    assert not re.findall(rf"\w+\[{E},\d+,[\d,]*\]", program.hlo)
    assert Schedule(program.hlo).exchanged() == COLLECTIVES.get(case, {})
