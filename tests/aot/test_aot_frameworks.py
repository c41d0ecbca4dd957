"""A model in each framework, compiled for an H100: all layers run kernels. 30 s on one core."""

import jax
import jax.numpy as jnp
import pytest

from aot.harness import Case
from support.framework_models import LOSSES

B, S, D, F, V = 8, 256, 128, 256, 512
TOKENS = jax.ShapeDtypeStruct((B, S), jnp.int32)


def make_case(framework: str) -> Case:
    params, loss = LOSSES[framework]((V, D, F), jnp.bfloat16)
    return Case(jax.value_and_grad(loss), (params, TOKENS, TOKENS))


CASES = {framework: make_case(framework) for framework in LOSSES}


@pytest.mark.parametrize("chip, case", [("h100", framework) for framework in CASES])
def test_every_layer_runs_its_kernels_once(compiled, chip, case):
    program = compiled(chip, case)
    print([k.name for k in program.kernels])
    print(sum(i.is_kernel for i in program.instructions.values()))
    print([(n, i) for n, i in program.instructions.items()])
    assert 0
