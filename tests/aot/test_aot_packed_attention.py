"""cuDNN's attention of rows of several documents, compiled for one H100 and for eight.

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
from models.documents import ROOM, buckets, documents_of
from models.packed_attention import packed_attention

B, S, N, K, H = 8, 2048, 6, 2, 128
MEMBERS = 3
array = jax.ShapeDtypeStruct
ARRAYS = [array((B, S, heads, H), jnp.bfloat16) for heads in (N, K, K, N)]
ARGS = (*ARRAYS, array((B, S), jnp.int32))


def attention(q, k, v, segment_ids):
    return packed_attention(q, k, v, documents_of(segment_ids))


def value_and_gradients(q, k, v, dout, segment_ids, fn=attention):
    out, vjp = jax.vjp(lambda *arrays: fn(*arrays, segment_ids), q, k, v)
    return out, *vjp(dout)


def of_each_device(*args):
    return jax.shard_map(value_and_gradients, in_specs=ROWS, out_specs=ROWS)(*args)


MESH = {"data": 2, "fsdp": 4}
ROWS = P(("data", "fsdp"))
HEADS = P("fsdp", None, "data")
CASES = {
    "one": Case(value_and_gradients, ARGS),
    "rows": Case(value_and_gradients, ARGS, mesh=MESH, specs=(ROWS,) * 5),
    # XLA splits the documents as the queries.
    "whole ids": Case(value_and_gradients, ARGS, mesh=MESH, specs=(*(ROWS,) * 4, P())),
    "heads": Case(value_and_gradients, ARGS, mesh=MESH, specs=(*(HEADS,) * 4, P("fsdp"))),
    "shard_map": Case(of_each_device, ARGS, mesh=MESH, specs=(ROWS,) * 5),
    "members": Case(
        functools.partial(value_and_gradients, fn=jax.vmap(attention)),
        tuple(array((MEMBERS, *a.shape), a.dtype) for a in ARGS),
    ),
}
# "whole ids" has their conditions, and XLA must split one more array.
OLDEST = ("rows", "shard_map")
ROWS_OF_A_DEVICE = {"one": B, "heads": 2, "members": MEMBERS * B}  # 1 in the others
HEADS_OF_A_DEVICE = {"heads": (N // 2, K // 2)}  # N and K in the others


def each(names: Iterable[str]) -> pytest.MarkDecorator:
    """The mark of a test of these cases."""
    return pytest.mark.parametrize(
        "case", [pytest.param(n, marks=pytest.mark.oldest if n in OLDEST else ()) for n in names]
    )


def calls(hlo: str) -> list[tuple[bool, str, str]]:
    """cuDNN's calls: whether in the entry, the target and the line."""
    found, in_entry = [], False
    for line in hlo.splitlines():
        if line.endswith("{") and not line.startswith(" "):
            in_entry = line.startswith("ENTRY")
        if match := re.search(r'custom_call_target="__cudnn\$(\w+)"', line):
            found.append((in_entry, match[1], line))
    return found


@pytest.mark.parametrize("chip", ["h100"])
@each(CASES)
def test_cudnn_computes_each_bucket_and_more_documents_in_a_loop(compiled, chip, case):
    program: Program = compiled(chip, case)
    found = calls(program.hlo)
    for target in ("fmhaSoftmax", "fmhaSoftmaxBackward"):
        in_entry = [where for where, name, _ in found if name == target]
        assert sorted(in_entry) == [False, *[True] * len(buckets(S))]
    num_tokens = ROWS_OF_A_DEVICE.get(case, 1) * S
    num_heads, num_kv_heads = HEADS_OF_A_DEVICE.get(case, (N, K))
    all_shapes = []
    for _, target, line in found:
        assert re.search(r'"mask_type":\s*"PADDING_CAUSAL"', line)
        # JAX does not see to it that all operands have the tokens of a device.
        operands = line.partition("operand_layout_constraints={")[2].partition("}}")[0]
        all_shapes.append((target, re.findall(r"(\w+\[[\d,]*\])", operands)))
    expected = []
    for largest in (*buckets(S), buckets(S)[-1]):
        rows = num_tokens // largest
        q, k = (f"bf16[{rows},{largest},{heads},{H}]" for heads in (num_heads, num_kv_heads))
        of_documents = [f"s32[{rows},{ROOM}]"] * 2 + [f"s32[{rows},{ROOM + 1}]"] * 2
        stats = f"f32[{rows * ROOM},{num_heads},{largest}]"
        expected.append(("fmhaSoftmax", [q, k, k, *of_documents]))
        expected.append(("fmhaSoftmaxBackward", [q, k, k, stats, q, q, *of_documents]))
    assert sorted(all_shapes) == sorted(expected)


@pytest.mark.parametrize("chip", ["h100"])
@each(CASES)
def test_no_scores_and_no_copies(compiled, chip, case):
    program: Program = compiled(chip, case)
    assert not re.findall(rf"\w+\[[\d,]*\b{S},(?:\d+,)*{S}\b[\d,]*\]", program.hlo)
    for name, instruction in program.instructions.items():
        # XLA copies the integers that `documents_of` sorts, once for all layers.
        is_of_integers = all(dtype == "s32" for dtype, _ in instruction.outputs)
        if instruction.opcode.startswith(("copy", "transpose")) and not is_of_integers:
            assert instruction.largest_size < S, f"{name}: {instruction}"


@pytest.mark.parametrize("chip", ["h100"])
@each(name for name, case in CASES.items() if case.mesh)
def test_devices_exchange_nothing(compiled, chip, case):
    """No device waits for another."""
    program: Program = compiled(chip, case)
    assert not Schedule(program.hlo).collectives()
