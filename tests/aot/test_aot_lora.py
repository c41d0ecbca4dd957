"""Losses with a low-rank update of a frozen output embedding, compiled for H100s."""

import functools
import math
import re
from collections import Counter
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

from aot.harness import Case
from aot.loss_shapes import MIB, assert_runs_well, floats, labels_of
from aot.test_aot_linear_cross_entropy import full, oldest
from benchmarks.training.schedule import Schedule
from pallas_kernels import (
    LoRA,
    linear_cross_entropy,
    linear_distillation_loss,
    linear_log_probs,
    linear_token_loss,
)

BF16 = jnp.bfloat16
T, D, V = 8192, 4096, 128256
KERNEL: dict[str, Any] = {"implementation": "mosaic_gpu"}


def graded(loss: Any) -> Any:
    """Loss and gradients in x, a and b."""

    def run(x, a, b, weight, labels):
        of = lambda x, a, b: loss(x, LoRA(weight, a, b, 0.5), labels)
        return jax.value_and_grad(of, argnums=(0, 1, 2))(x, a, b)

    return run


def cross_entropy(**options: Any) -> Any:
    return graded(lambda *args: linear_cross_entropy(*args, **KERNEL, **options))


def of_log_probs(x, weight, labels):
    return jnp.sum(jnp.sin(linear_log_probs(x, weight, labels, **KERNEL)))


def of_tokens(x, weight, labels):
    token_fn = lambda log_probs, entropy, data: jnp.sum(jnp.sin(log_probs))
    return linear_token_loss(x, weight, labels, token_fn, **KERNEL)


def distillation(x, a, b, weight, labels):
    # The student's own layer without the update is the teacher.
    of = lambda x, weight, _: linear_distillation_loss(x, weight, x, weight.weight, **KERNEL)
    return graded(of)(x, a, b, weight, labels)


def arguments(rank: int, layout: str = "vd") -> tuple[Any, ...]:
    weight = (V, D) if layout == "vd" else (D, V)
    return (
        floats(T, D, dtype=BF16),
        floats(V, rank, dtype=jnp.float32),
        floats(rank, D, dtype=jnp.float32),
        floats(*weight, dtype=BF16),
        labels_of(T),
    )


CUBLAS = {"xla_gpu_enable_triton_gemm": False}
CASES = {
    "loss, r=16": Case(cross_entropy(), arguments(16), compiler_options=CUBLAS),
    "loss, r=100": Case(cross_entropy(), arguments(100), compiler_options=CUBLAS),
    "loss, dv": Case(
        cross_entropy(weight_layout="dv"), arguments(16, "dv"), compiler_options=CUBLAS
    ),
    "log_probs": Case(graded(of_log_probs), arguments(16), compiler_options=CUBLAS),
    "token_loss": Case(graded(of_tokens), arguments(16), compiler_options=CUBLAS),
    "distillation": Case(distillation, arguments(16), compiler_options=CUBLAS),
}


# On a mesh: specs of the tokens, the weight and a, and the parts of each.
AXES = {"data": 2, "fsdp": 2, "tensor": 2}
B, S, MESH_D, MESH_V = 16, 2048, 512, 2048
LAYOUTS = {
    "fsdp": (P(("data", "fsdp", "tensor")), P(None, "fsdp"), P(), 8, 1),
    "tensor": (P(("data", "fsdp")), P("tensor"), P("tensor"), 4, 2),
}


def formed(x, a, b, weight, labels):
    loss = functools.partial(linear_cross_entropy, implementation="xla")  # compiles in 4 s
    of = lambda x, a, b: loss(x, weight + (0.5 * a @ b).astype(BF16), labels)
    return jax.value_and_grad(of, argnums=(0, 1, 2))(x, a, b)


CASES["formed"] = Case(formed, arguments(16), compiler_options=CUBLAS)
CASES |= {
    f"mesh, {layout}": Case(
        graded(of_log_probs),
        (
            floats(B, S, MESH_D, dtype=BF16),
            floats(MESH_V, 16),
            floats(16, MESH_D),
            floats(MESH_V, MESH_D, dtype=BF16),
            jax.ShapeDtypeStruct((B, S), jnp.int32),
        ),
        mesh=AXES,
        specs=(tokens, of_a, P(), of_weight, tokens),
    )
    for layout, (tokens, of_weight, of_a, _, _) in LAYOUTS.items()
}


def made(program: Any, num_entries: int) -> list[str]:
    """Instructions that make an array of at least so many numbers."""
    found = re.findall(r"^ *(?:ROOT )?%\S+ = (.*?) ([\w-]+)\(", program.hlo, re.MULTILINE)
    passed_on = "parameter", "get-tuple-element", "tuple", "while", "bitcast", "call"
    shapes = lambda types: [
        math.prod(map(int, dims.split(","))) for dims in re.findall(r"\w\[([\d,]+)\]", types)
    ]
    return [
        f"{opcode} {types}"
        for types, opcode in found
        if opcode not in passed_on and max(shapes(types), default=0) >= num_entries
    ]


# A chunk has 512 MiB of dlogits; x and dx with 64 columns more take 65 MiB each, and a in float32
# and its gradient 31 MiB each. The distillation has at least 768 tokens in a chunk: logits of
# student and teacher in 16 bits, and the student's sum of two products in float32, 752 MiB.
# "log_probs" has the kernels of "token_loss". A rank of 100 is wider, and is nothing else.
@pytest.mark.parametrize("chip", ["h100"])
@pytest.mark.parametrize(
    "case",
    [
        "loss, r=16",
        oldest("loss, r=100", pytest.mark.full),
        full("loss, dv"),
        oldest("log_probs"),
        full("token_loss"),
        "distillation",
    ],
)
def test_the_weight_is_neither_copied_nor_has_a_gradient(compiled, chip, case):
    program = compiled(chip, case)
    for kernel in program.kernels:
        assert_runs_well(kernel)
    most = 960 if case == "distillation" else 760
    assert program.temp_bytes <= most * MIB, program.temp_bytes / MIB
    assert not made(program, V * D)
    of_products = {
        "log_probs": {"linear_statistics", "linear_exponentials"},
        "token_loss": {"linear_statistics", "linear_exponentials"},
        "distillation": {"distillation_sums", "distillation_dlogits"},
    }
    kernels = {"linear_exponentials", "linear_exponentials_again"}
    assert set(program.calls) == of_products.get(case, kernels)


@pytest.mark.oldest
@pytest.mark.parametrize("chip, case", [("h100", "formed")])
def test_a_copy_would_be_found(compiled, chip, case):
    assert made(compiled(chip, case), V * D)


@pytest.mark.oldest
@pytest.mark.parametrize("chip", ["h100"])
@pytest.mark.parametrize("case", [f"mesh, {layout}" for layout in LAYOUTS])
def test_collectives(compiled, chip, case):
    """The frozen weight is gathered where it is split by hidden units, and nothing adds it up."""
    program = compiled(chip, case)
    *_, token_parts, column_parts = LAYOUTS[case.removeprefix("mesh, ")]
    names = {kernel.name for kernel in program.kernels}
    assert names == {"linear_statistics", "linear_exponentials"}
    for kernel in program.kernels:
        assert_runs_well(kernel)
    tokens, low_rank = B * S // token_parts, MESH_V * 64 // column_parts
    found: Counter[str] = Counter()
    for collective in Schedule(program.hlo).collectives():
        for shape in collective.results:
            found[collective.kind] += collective.times * math.prod(shape)
    assert not found.keys() - {"all-reduce", "all-gather"}, found
    summed = low_rank + 16 * MESH_D
    if column_parts > 1:
        assert found["all-gather"] <= 2 * column_parts * tokens, found
        summed += tokens * (MESH_D + 64)
    else:
        assert found["all-gather"] == 2 * MESH_V * MESH_D, found
    assert found["all-reduce"] <= summed + 8, found
