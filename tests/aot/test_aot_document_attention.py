"""Attention of documents by our kernels, compiled for eight H100s. A program takes 3 s."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

from aot.harness import Case, Program
from benchmarks.training.schedule import Schedule
from pallas_kernels.attention.api import document_attention
from pallas_kernels.attention.bounds import bounds_of

B, S, N, K, H = 8, 1024, 8, 4, 64
ARGS = (
    *(jax.ShapeDtypeStruct((B, S, heads, H), jnp.bfloat16) for heads in (N, K, K, N)),
    jax.ShapeDtypeStruct((B, S), jnp.int32),
)
MESH = {"data": 2, "fsdp": 4}
ROWS, HEADS = P(("data", "fsdp")), P("fsdp", None, "data")


def value_and_gradients(q, k, v, dout, segment_ids):
    bounds = bounds_of(segment_ids)
    out, vjp = jax.vjp(lambda q, k, v: document_attention(q, k, v, bounds), q, k, v)
    return out, *vjp(dout)


CASES = {
    "rows": Case(value_and_gradients, ARGS, mesh=MESH, specs=(ROWS,) * 5),
    "heads": Case(value_and_gradients, ARGS, mesh=MESH, specs=(*(HEADS,) * 4, P("fsdp"))),
}


@pytest.mark.oldest
@pytest.mark.parametrize("chip", ["h100"])
@pytest.mark.parametrize("case", CASES)
def test_each_device_computes_its_own_rows_and_heads(compiled, chip, case):
    program: Program = compiled(chip, case)
    assert len(program.kernels) == 3, program.kernels
    assert not Schedule(program.hlo).collectives()
    rows, heads = (1, N) if case == "rows" else (2, N // 2)
    shape = ("bf16", (rows, S, heads, H))
    of_queries = [a for a in program.instructions.values() if shape in a.outputs]
    assert len(of_queries) >= 2, "out and dq are of a device's rows and heads"
