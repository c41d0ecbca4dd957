"""The distillation losses compile for an H100: memory, passes over the logits, and collectives.

The kernels compile for other GPUs, too. Each program takes two to five seconds to compile. Nothing
runs.
"""

import math
import re
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

from aot.harness import ARCHS, Case
from benchmarks.training.schedule import Schedule
from pallas_kernels import linear_distillation_loss, linear_distillation_loss_top_k

BF16, F32 = jnp.bfloat16, jnp.float32
MIB = 2**20
T, D, E, V, K = 8192, 2048, 4096, 128256, 64
MESH_T, MESH_D, MESH_E, MESH_V = 8192, 512, 1024, 16384
CUBLAS = {"xla_gpu_enable_triton_gemm": False}  # as on a GPU, where XLA measures products


def struct(*shape: int, dtype: Any = BF16) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def graded(loss: Any, *, implementation: Any = "xla", **options: Any) -> Any:
    """The loss with gradients, of which that of the bfloat16 weight is float32."""

    def run(x, weight, *teacher):
        fn = lambda x, weight: loss(x, weight, *teacher, implementation=implementation, **options)
        return jax.value_and_grad(fn, argnums=(0, 1))(x, weight.astype(F32))

    return run


def on_one_device(divergence: str, vocab: int = V, **options: Any) -> Case:
    args = struct(T, D), struct(vocab, D), struct(T, E), struct(vocab, E)
    run = graded(linear_distillation_loss, divergence=divergence, **options)
    return Case(run, args, compiler_options=CUBLAS)


def of_top_k() -> Case:
    args = struct(T, D), struct(V, D), struct(T, K), struct(T, K, dtype=jnp.int32)
    return Case(graded(linear_distillation_loss_top_k), args, compiler_options=CUBLAS)


def on_eight_devices(is_explicit: bool) -> Case:
    tokens, weights = P(("data", "fsdp")), P(None, "fsdp")
    return Case(
        # Two parts of the 1024 tokens of a device.
        graded(linear_distillation_loss, implementation="mosaic_gpu", max_logits_bytes=48 * MIB),
        (
            struct(MESH_T, MESH_D),
            struct(MESH_V, MESH_D),
            struct(MESH_T, MESH_E),
            struct(MESH_V, MESH_E),
        ),
        mesh={"data": 4, "fsdp": 2},
        specs=(tokens, weights, tokens, weights),
        is_explicit=is_explicit,
        compiler_options=CUBLAS,
    )


def of_parts_of_the_vocabulary(is_manual: bool) -> Case:
    """Two devices share a vocabulary, as XLA or the caller splits it."""
    tokens, weights = P("data"), P("tensor")
    specs = (tokens, weights, tokens, weights, weights)

    def graded(x, weight, *others):
        def loss(x, weight, bias, teacher_x, teacher_weight):
            found = linear_distillation_loss(
                x,
                weight,
                teacher_x,
                teacher_weight,
                divergence="jensen_shannon",
                bias=bias,
                logit_softcap=30.0,
                implementation="mosaic_gpu",
                max_logits_bytes=40 * MIB,  # four parts of the 2048 tokens of a device
                vocab_axis="tensor" if is_manual else None,
            )
            return jax.lax.pmean(found, "data") if is_manual else found

        if is_manual:
            in_specs = tokens, weights, weights, tokens, weights
            loss = jax.shard_map(loss, in_specs=in_specs, out_specs=P())
        teacher_x, teacher_weight, bias = others
        value_and_grad = jax.value_and_grad(loss, argnums=(0, 1, 2))
        return value_and_grad(x, weight.astype(F32), bias, teacher_x, teacher_weight)

    return Case(
        graded,
        (
            struct(MESH_T, MESH_D),
            struct(MESH_V, MESH_D),
            struct(MESH_T, MESH_E),
            struct(MESH_V, MESH_E),
            struct(MESH_V, dtype=F32),
        ),
        mesh={"data": 4, "tensor": 2},
        specs=specs,
        compiler_options=CUBLAS,
    )


ON_ONE = ("forward_kl", "reverse_kl", "jensen_shannon", "top_k")
CASES = {name: on_one_device(name) for name in ON_ONE[:-1]} | {
    "top_k": of_top_k(),
    "auto": on_eight_devices(False),
    "explicit": on_eight_devices(True),
    "vocabulary": of_parts_of_the_vocabulary(False),
    "vocab_axis": of_parts_of_the_vocabulary(True),
}
KERNELS = {
    f"{name}, kernels": on_one_device(name, implementation="mosaic_gpu") for name in ON_ONE[:-1]
} | {
    # Qwen's vocabulary, 128 columns of 1187, and float32 logits.
    "narrow parts": on_one_device(
        "jensen_shannon", 151936, implementation="mosaic_gpu", logits_dtype=F32
    ),
}


def capped(divergence: Any, **options: Any) -> Case:
    """Biases with gradients, and bounds of both logits, as in Gemma 2."""

    def run(x, weight, teacher_x, teacher_weight, bias, teacher_bias):
        def loss(x, weight, bias):
            return linear_distillation_loss(
                x,
                weight,
                teacher_x,
                teacher_weight,
                divergence=divergence,
                bias=bias,
                teacher_bias=teacher_bias,
                logit_softcap=30.0,
                teacher_logit_softcap=30.0,
                **options,
            )

        return jax.value_and_grad(loss, argnums=(0, 1, 2))(x, weight.astype(F32), bias)

    weights = struct(V, D), struct(T, E), struct(V, E)
    args = struct(T, D), *weights, struct(V, dtype=F32), struct(V)
    return Case(run, args, compiler_options=CUBLAS)


KERNELS |= {
    f"{name}, capped": capped(name, implementation="mosaic_gpu")
    for name in ("forward_kl", "jensen_shannon")
}
CASES |= KERNELS


def half_of_the_rows(x, weight, teacher_x, teacher_weight, mask):
    """Loss and gradients of at most half of the tokens."""
    options = {"token_weights": mask, "counted_fraction": 0.5}
    run = graded(linear_distillation_loss, implementation="mosaic_gpu", **options)
    return run(x, weight, teacher_x, teacher_weight)


CASES["half of the rows"] = Case(
    half_of_the_rows,
    (struct(T, D), struct(V, D), struct(T, E), struct(V, E), struct(T, dtype=F32)),
    compiler_options=CUBLAS,
)


@pytest.mark.oldest
@pytest.mark.parametrize("case", ON_ONE)
@pytest.mark.parametrize("chip", ["h100"])
def test_memory_and_passes(compiled, chip, case):
    program = compiled(chip, case)
    # 1024 tokens have 251 MiB of bfloat16 logits. With a teacher's logits there are two such
    # arrays, and without them chunks of 2048 tokens. The gradient takes the student's.
    assert program.temp_bytes < 560 * MIB
    made = [
        i
        for i in program.instructions.values()
        if i.opcode not in ("parameter", "tuple", "get-tuple-element", "bitcast", "while")
        and any(dims[1:] == (V,) for _, dims in i.outputs)
    ]
    # No logits are copied, nor stored in float32, nor is a condition for each of them stored.
    for instruction in made:
        wide = [dtype for dtype, dims in instruction.outputs if dims[1:] == (V,)]
        assert wide == ["bf16"], instruction
        assert instruction.opcode == "fusion", instruction
    # The first chunk is a place of its own in the program. In each of the two places the logits
    # come out of one or two products, and one fusion overwrites them. A top-k teacher has two
    # scatters: the tokens leave, and their derivatives come back.
    assert len(made) == 2 * (4 if case == "top_k" else 3), made
    # Each product of `dweight` after the first adds to it in place.
    assert re.search(r"f32\[128256,2048\].*cublas.*output_to_operand_aliasing", program.hlo)


@pytest.mark.parametrize(
    "case",
    # "jensen_shannon, capped" has its conditions, and one more kernel.
    [pytest.param(c, marks=pytest.mark.full if c == "forward_kl, capped" else ()) for c in KERNELS],
)
@pytest.mark.parametrize("chip", ["h100"])
def test_kernels_make_all_passes(compiled, chip, case):
    """5 s each."""
    program = compiled(chip, case)
    is_narrow = case == "narrow parts"
    passes = {"distillation_sums", "distillation_dlogits"}
    passes |= {"distillation_mixture"} if is_narrow or "jensen" in case else set()
    # The first chunk is a place of its own in the program.
    assert program.calls == dict.fromkeys(passes, 2)
    if not is_narrow:
        assert program.temp_bytes < 560 * MIB
        # The teacher's logits of a third of a chunk, in the loop.
        assert "bf16[1536,128256]" in program.hlo and "bf16[512,128256]" in program.hlo
    columns = 151936 if is_narrow else V
    for name, i in program.instructions.items():
        if any(dims[1:] == (columns,) for _, dims in i.outputs):
            # Such a fusion is a product or a kernel, in the loop, with its parts of larger arrays.
            is_call = "dynamic_slice_fusion" in name
            assert is_call or i.opcode not in ("fusion", "copy", "convert"), (name, i)
    for kernel in program.kernels:
        assert kernel.spill_bytes == 0 and kernel.early_conversions == 0, kernel
        # Two accesses of 16 bytes to each array; narrow parts have smaller ones.
        assert max(kernel.loads) == 16, kernel
        print(kernel.name, kernel.registers, kernel.loads, kernel.stores)


@pytest.mark.oldest
@pytest.mark.parametrize("case", ["jensen_shannon, kernels"])
@pytest.mark.parametrize("chip", ["a100", "l4", "b200"])
def test_kernels_compile_for_other_gpus(compiled, chip, case):
    """4 s each."""
    program = compiled(chip, case)
    names = {"distillation_sums", "distillation_mixture", "distillation_dlogits"}
    assert program.calls.keys() == names
    for kernel in program.kernels:
        assert kernel.arch == ARCHS[chip]
        assert kernel.spill_bytes == 0 and not kernel.warnings, kernel
        assert max(kernel.loads) == 16, kernel


@pytest.mark.oldest
@pytest.mark.parametrize("case", ["half of the rows"])
@pytest.mark.parametrize("chip", ["h100"])
def test_few_rows_and_all_rows_share_memory(compiled, chip, case):
    """5 s."""
    program = compiled(chip, case)
    assert program.calls == {"distillation_sums": 4, "distillation_dlogits": 4}
    # The gathered hidden states of student and teacher have 48 MiB.
    assert program.temp_bytes < (560 + 80) * MIB, program.temp_bytes / MIB


@pytest.mark.oldest
@pytest.mark.parametrize("case", ["auto", "explicit"])
@pytest.mark.parametrize("chip", ["h100"])
def test_devices_exchange_weights_and_no_tokens(compiled, chip, case):
    names = {
        kernel.name.removesuffix("_mosaic_gpu_kernel") for kernel in compiled(chip, case).kernels
    }
    assert names == {"distillation_sums", "distillation_dlogits"}
    found: dict[str, set[int]] = {}
    for collective in Schedule(compiled(chip, case).hlo).collectives():
        sizes = {math.prod(shape) for shape in collective.results}
        found.setdefault(collective.kind, set()).update(sizes)
    of_student, of_teacher = MESH_V * MESH_D, MESH_V * MESH_E
    assert found.pop("all-gather") == {of_student, of_teacher}
    assert found.pop("reduce-scatter") == {of_student // 2}
    # The halves of dweight over the copies, and the loss.
    assert {size for size in found.pop("all-reduce") if size > 8} == {of_student // 2}
    assert not found


@pytest.mark.oldest
@pytest.mark.parametrize("case", ["vocabulary", "vocab_axis"])
@pytest.mark.parametrize("chip", ["h100"])
def test_devices_that_share_a_vocabulary_exchange_sums(compiled, chip, case):
    """10 s each."""
    program = compiled(chip, case)
    names = {kernel.name.removesuffix("_mosaic_gpu_kernel") for kernel in program.kernels}
    assert names == {"distillation_sums", "distillation_mixture", "distillation_dlogits"}
    found: dict[str, int] = {}
    for collective in Schedule(program.hlo).collectives():
        sizes = sum(math.prod(shape) for shape in collective.results)
        found[collective.kind] = found.get(collective.kind, 0) + collective.times * sizes
    tokens, columns = MESH_T // 4, MESH_V // 2
    # Two maxima, four sums and a row of dx for each token; dweight, dbias and the loss.
    expected = tokens * (6 + MESH_D) + columns * (MESH_D + 1)
    assert found.keys() == {"all-reduce"}
    assert expected <= found["all-reduce"] <= expected + 8, (found, expected)
