"""Members of `jax.vmap` with weights or gradients of their own, compiled for eight H100s.

Each device has a loop over its own members, and devices exchange only gradients of weights that
they share. `make test-aot` compiles six programs, which take two minutes of one core.
"""

import dataclasses
import re
from collections import Counter

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

from aot.harness import Case
from benchmarks.training.schedule import Schedule
from pallas_kernels import linear_cross_entropy, rms_norm, swiglu_mlp
from pallas_kernels.fp8 import fp8_swiglu_mlp
from pallas_kernels.fp8.recipes import RECIPES

E, C, D, F, V = 16, 4096, 512, 1024, 2048  # experts, tokens of one, and sizes
RECIPE = dataclasses.replace(RECIPES["rowwise"], least_size=0)
BF16, F32 = jnp.bfloat16, jnp.float32
array = jax.ShapeDtypeStruct
X = array((E, C, D), BF16)
WEIGHTS = array((E, D, F), F32), array((E, D, F), F32), array((E, F, D), F32)


def total(y, dy):
    return jnp.sum((y * dy).astype(F32))


def experts(x, w_gate, w_up, w_down, dy):
    def loss(*args):
        return total(jax.vmap(swiglu_mlp)(*args), dy)

    return jax.grad(loss, (0, 1, 2, 3))(x, w_gate, w_up, w_down)


def fp8_experts(x, *weights):
    def loss(*args):
        mlp = jax.vmap(lambda *args: fp8_swiglu_mlp(*args, recipe=RECIPE))
        return total(mlp(*args[:4]), args[4])

    return jax.grad(loss, (0, 1, 2, 3))(x, *weights)


def norms(x, scales, dy):
    return jax.grad(lambda *args: total(jax.vmap(rms_norm)(*args), dy), (0, 1))(x, scales)


def gradients_of_examples(x, weight, labels):
    of_one = jax.grad(lambda x, w, labels: linear_cross_entropy(x, w, labels), (0, 1))
    return jax.vmap(of_one, (0, None, 0))(x, weight, labels)


EXPERTS, BOTH = P("expert"), P("expert", "data")
MESHES = {"experts": {"expert": 8}, "experts and tokens": {"expert": 4, "data": 2}}
FSDP = P("expert", "data"), P("expert", "data"), P("expert", None, "data")
ARGS = X, *WEIGHTS, X
CASES = {
    "experts": Case(experts, ARGS, mesh=MESHES["experts"], specs=(EXPERTS,) * 5),
    "experts and tokens": Case(
        experts,
        ARGS,
        mesh=MESHES["experts and tokens"],
        specs=(BOTH, *(EXPERTS,) * 3, BOTH),
    ),
    "fsdp": Case(experts, ARGS, mesh=MESHES["experts and tokens"], specs=(BOTH, *FSDP, BOTH)),
    "fp8": Case(fp8_experts, ARGS, mesh=MESHES["experts"], specs=(EXPERTS,) * 5),
    "norms": Case(
        norms,
        (X, array((E, D), F32), X),
        mesh=MESHES["experts and tokens"],
        specs=(BOTH, EXPERTS, BOTH),
    ),
    "examples": Case(
        gradients_of_examples,
        (X, array((V, D), BF16), array((E, C), jnp.int32)),
        mesh=MESHES["experts"],
        specs=(EXPERTS, P(), EXPERTS),
    ),
}


@pytest.mark.parametrize("chip", ["h100"])
@pytest.mark.parametrize("case", CASES)
def test_look(compiled, chip, case):
    p = compiled(chip, case)
    print(case, "%.0fs" % p.seconds, p.calls, p.temp_bytes / 2**20)
    print("trips", re.findall(r'known_trip_count"?:\{"n":"(\d+)"', p.hlo))
    print("16s", Counter(re.findall(r"\w+\[16,[\d,]*\]", p.hlo)))
    for c in Schedule(p.hlo).collectives():
        print("  ", c.kind, c.results, c.times, c.computation[:40])
