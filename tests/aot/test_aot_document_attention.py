"""Attention of documents by our kernels, compiled for one H100 and for eight.

A program takes 3 s.
"""

import functools
import re
from collections.abc import Iterable

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

from aot.harness import Case, Program
from benchmarks.training.schedule import Schedule
from pallas_kernels import document_attention, document_bounds

B, S, N, K, H = 8, 2048, 6, 2, 128
MEMBERS = 3
NUM_SMS = 132
array = jax.ShapeDtypeStruct


def args_of(*leading: int, head_size: int = H) -> tuple[jax.ShapeDtypeStruct, ...]:
    shapes = ((*leading, B, S, heads, head_size) for heads in (N, K, K, N))
    arrays = (array(shape, jnp.bfloat16) for shape in shapes)
    return *arrays, array((*leading, B, S), jnp.int32)


def attention(q, k, v, segment_ids):
    return document_attention(q, k, v, document_bounds(segment_ids))


def of_whole_rows(q, k, v, segment_ids):
    del segment_ids
    return document_attention(q, k, v, None)


def within_a_window(q, k, v, segment_ids):
    bounds = document_bounds(jnp.zeros_like(segment_ids), window=300)  # as the Llama has them
    return document_attention(q, k, v, bounds)


def value_and_gradients(q, k, v, dout, segment_ids, fn=attention):
    out, vjp = jax.vjp(lambda *arrays: fn(*arrays, segment_ids), q, k, v)
    return out, *vjp(dout)


def of_each_device(*args):
    return jax.shard_map(value_and_gradients, in_specs=ROWS, out_specs=ROWS)(*args)


MESH = {"data": 2, "fsdp": 4}
ROWS = P(("data", "fsdp"))
HEADS = P("fsdp", None, "data")
of_rows = functools.partial(Case, mesh=MESH, specs=(ROWS,) * 5)
CASES = {
    "one": Case(value_and_gradients, args_of()),
    "rows": of_rows(value_and_gradients, args_of()),
    "explicit rows": of_rows(value_and_gradients, args_of(), is_explicit=True),
    # XLA splits the bounds as the queries.
    "whole ids": Case(value_and_gradients, args_of(), mesh=MESH, specs=(*(ROWS,) * 4, P())),
    "heads": Case(value_and_gradients, args_of(), mesh=MESH, specs=(*(HEADS,) * 4, P("fsdp"))),
    "shard_map": of_rows(of_each_device, args_of()),
    "members": Case(
        functools.partial(value_and_gradients, fn=jax.vmap(attention)), args_of(MEMBERS)
    ),
    "96": Case(value_and_gradients, args_of(head_size=96)),
    "window": of_rows(functools.partial(value_and_gradients, fn=within_a_window), args_of()),
    "one document": of_rows(
        functools.partial(value_and_gradients, fn=of_whole_rows), args_of(), is_explicit=True
    ),
}
# Others have kernels of one of these, or split one array less.
LATEST = ("one", "whole ids", "heads")
ROWS_OF_A_DEVICE = {"one": B, "96": B, "heads": 2, "members": MEMBERS * B}  # 1 in the others
HEADS_OF_A_DEVICE = {"heads": (N // 2, K // 2)}  # N and K in the others


def each(names: Iterable[str]) -> pytest.MarkDecorator:
    """The mark of a test of these cases."""
    oldest = pytest.mark.oldest
    return pytest.mark.parametrize(
        "case", [pytest.param(n, marks=() if n in LATEST else oldest) for n in names]
    )


@pytest.mark.parametrize("chip", ["h100"])
@each(CASES)
def test_three_kernels_compute_the_tokens_of_a_device(compiled, chip, case):
    program: Program = compiled(chip, case)
    rows = ROWS_OF_A_DEVICE.get(case, 1)
    num_heads, num_kv_heads = HEADS_OF_A_DEVICE.get(case, (N, K))
    q, k = (("bf16", (rows, S, heads, H)) for heads in (num_heads, num_kv_heads))
    sums, bounds = ("f32", (rows, num_heads, S)), ("s32", (rows, S))
    # A device has few keys, so the heads of queries that share a head of keys have blocks apart.
    parts = min(num_heads // num_kv_heads, 2 * NUM_SMS // (rows * num_kv_heads * S // 128))
    of_keys = ("f32", (parts, *k[1])) if parts > 1 else k
    of_backward = [q, k, k, q, sums, sums, bounds]
    expected = [([q, k, k, bounds], (q, sums)), (of_backward, (q,)), (of_backward, (of_keys,) * 2)]
    array_of = lambda name: program.instructions[name].outputs[0]
    found = [
        ([*map(array_of, part.operands)], part.outputs)
        for part in program.instructions.values()
        if part.is_kernel
    ]
    assert sorted(found) == sorted(expected)


@pytest.mark.parametrize("chip", ["h100"])
@each(CASES)
def test_no_scores_and_no_copies(compiled, chip, case):
    program: Program = compiled(chip, case)
    assert not re.findall(rf"\w+\[[\d,]*\b{S},(?:\d+,)*{S}\b[\d,]*\]", program.hlo)
    for name, instruction in program.instructions.items():
        if instruction.opcode.startswith(("copy", "transpose")):
            assert instruction.largest_size < S, f"{name}: {instruction}"
    pads = re.findall(r"= bf16\[\S+ pad\(", program.hlo)
    assert bool(pads) == (case == "96")  # other heads are computed as they are


@pytest.mark.parametrize("chip", ["h100"])
@each(name for name, case in CASES.items() if case.mesh)
def test_devices_exchange_nothing(compiled, chip, case):
    """No device waits for another."""
    program: Program = compiled(chip, case)
    assert not Schedule(program.hlo).collectives()
