"""A Flax model that `patch` has changed runs the kernels on eight H100s."""

import functools

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

from aot.harness import Case
from benchmarks.training.schedule import Schedule
from pallas_kernels import patch

pytestmark = pytest.mark.oldest
D, F, V = 128, 256, 1024
BATCH, S = 8, 2048


class MLP(nnx.Module):
    def __init__(self, rngs):
        linear = functools.partial(nnx.Linear, use_bias=False, dtype=jnp.bfloat16, rngs=rngs)
        self.gate, self.up, self.down = linear(D, F), linear(D, F), linear(F, D)

    def __call__(self, x):
        return self.down(nnx.silu(self.gate(x)) * self.up(x))


class Model(nnx.Module):
    def __init__(self, rngs):
        self.embed = nnx.Embed(V, D, dtype=jnp.bfloat16, rngs=rngs)
        self.first_norm = nnx.RMSNorm(D, dtype=jnp.bfloat16, rngs=rngs)
        self.mlp = MLP(rngs)
        self.norm = nnx.RMSNorm(D, dtype=jnp.bfloat16, rngs=rngs)
        self.head = nnx.Linear(D, V, use_bias=False, dtype=jnp.bfloat16, rngs=rngs)

    def __call__(self, tokens):
        x = self.embed(tokens)
        x = x + self.mlp(self.first_norm(x))
        return self.head(self.norm(x))


def abstract_model() -> Model:
    return nnx.eval_shape(lambda: Model(nnx.Rngs(0)))


def gradients(params, tokens, labels):
    model = abstract_model()
    patched = patch(model)
    graphdef = nnx.graphdef(model)
    loss_of = lambda params: patched.loss(nnx.merge(graphdef, params), labels, tokens)
    return jax.value_and_grad(loss_of)(params)


TOKENS = jax.ShapeDtypeStruct((BATCH, S), jnp.int32)
CASES = {
    "patched": Case(
        gradients,
        (nnx.state(abstract_model()), TOKENS, TOKENS),
        mesh={"data": 8},
        specs=(P(), P("data"), P("data")),
    )
}


@pytest.mark.parametrize("chip, case", [("h100", "patched")])
def test_a_patched_model_runs_the_kernels(compiled, chip, case):
    program = compiled(chip, case)
    names = {kernel.name for kernel in program.kernels}
    found = " ".join(names)
    for name in ("rms_norm_fwd", "rms_norm_bwd", "gated_matmul", "linear_exponentials"):
        assert name in found, (name, names)
    # The only exchange is the sum of the gradients and of the loss.
    kinds = {collective.kind for collective in Schedule(program.hlo).collectives()}
    assert kinds == {"all-reduce"}
