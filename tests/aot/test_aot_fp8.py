"""FP8 products compile for an H100: our kernel, and the patterns that XLA must recognize."""

import dataclasses
import functools
import math
import re
from collections import Counter
from typing import get_args

import jax
import jax.numpy as jnp
import pytest

from aot.harness import Case, Program
from benchmarks.training.schedule import Schedule
from pallas_kernels.fp8 import (
    Quantized,
    RecipeName,
    fp8_linear,
    fp8_matmul,
    fp8_swiglu_mlp,
    quantize_weight,
)

BF16, F32, E4M3, E5M2 = jnp.bfloat16, jnp.float32, jnp.float8_e4m3fn, jnp.float8_e5m2
SWIGLU_BACKWARD = "fp8_swiglu_bwd_amax", "fp8_swiglu_bwd_quantize"
CUBLAS = '"__cublas$lt$matmul$f8"'
SHAPE = (16384, 2048, 8192)  # rows, columns, depth: the down projection of a 1B Llama
ODD = (1009, 200, 1000)


def quantized(rows, depth, dtype, scaling):
    scale = jax.ShapeDtypeStruct(() if scaling == "tensor" else (rows, 1), F32)
    return Quantized(jax.ShapeDtypeStruct((rows, depth), dtype), scale)


def product(accumulation, out_dtype, implementation):
    options = {"accumulation": accumulation, "out_dtype": out_dtype}
    return lambda a, b: fp8_matmul(a, b, implementation=implementation, **options)


T, D, F = 16384, 2048, 8192  # of a 1B Llama


def _loss(layer, x, weights, dy):
    return (layer(x, *weights) * dy).astype(F32).sum()


def gradients(layer, recipe, x, weights, dy):
    """Gradients of x and the weights, whose FP8 copies are made outside of `jax.checkpoint`."""

    def loss(x, weights):
        prepared = [quantize_weight(w, recipe) for w in weights]
        return _loss(jax.checkpoint(layer), x, prepared, dy)

    return jax.grad(loss, (0, 1))(x, weights)


def scanned(recipe, x, w_in, w_out):
    """Gradients of stacked weights, through a loop over layers whose bodies run again."""

    def loss(w_in, w_out):
        prepared = jax.vmap(lambda *ws: [quantize_weight(w, recipe) for w in ws])(w_in, w_out)

        @jax.checkpoint
        def body(x, weights):
            up = jax.nn.silu(fp8_linear(x, weights[0], recipe=recipe))
            return x + fp8_linear(up, weights[1], recipe=recipe), None

        return jax.lax.scan(body, x, prepared)[0].astype(F32).sum()

    return jax.grad(loss, (0, 1))(w_in, w_out)


def _cases() -> dict[str, Case]:
    # Products are then custom calls, and fusions are what is elementwise.
    case = functools.partial(Case, compiler_options={"xla_gpu_enable_triton_gemm": False})
    array = jax.ShapeDtypeStruct
    cases = {}
    for name, (m, n, k) in {"1b": SHAPE, "odd": ODD}.items():
        for scaling, implementation in (("tensor", None), ("row", None), ("tensor", "xla")):
            for accumulation in ("fast", "promoted"):
                for a_dtype, label in ((E4M3, "e4m3"), (E5M2, "e5m2")):
                    for out_dtype, wide in ((BF16, "bfloat16"), (F32, "float32")):
                        program = "cublas" if implementation else scaling
                        cases[f"product-{name}-{program}-{accumulation}-{label}-{wide}"] = case(
                            product(accumulation, out_dtype, implementation),
                            (quantized(m, k, a_dtype, scaling), quantized(n, k, E4M3, scaling)),
                        )
    x, across, down = array((T, D), BF16), array((D, F), F32), array((F, D), F32)
    for recipe in get_args(RecipeName.__value__):
        linear = functools.partial(fp8_linear, recipe=recipe)
        mlp = functools.partial(fp8_swiglu_mlp, recipe=recipe)
        cases[f"linear-{recipe}"] = case(
            lambda x, w, dy, linear=linear, recipe=recipe: gradients(linear, recipe, x, [w], dy),
            (x, across, array((T, F), BF16)),
        )
        cases[f"mlp-{recipe}"] = case(
            lambda x, *args, mlp=mlp, recipe=recipe: gradients(mlp, recipe, x, args[:3], args[3]),
            (x, across, across, down, x),
        )
        stack = lambda a: array((2, *a.shape), a.dtype)
        cases[f"scan-{recipe}"] = case(
            functools.partial(scanned, recipe),
            (x, stack(across), stack(down)),
        )
        batch = jax.sharding.PartitionSpec("data")
        whole = jax.sharding.PartitionSpec()
        # A device has the tokens of "mlp", and so its kernels.
        tokens = array((8 * T, D), BF16)
        cases[f"mesh-{recipe}"] = dataclasses.replace(
            cases[f"mlp-{recipe}"],
            args=(tokens, across, across, down, tokens),
            mesh={"data": 8},
            specs=(batch, whole, whole, whole, batch),
        )
    # A weight that the devices of the tokens split, on Auto and on Explicit axes.
    for recipe, is_explicit in (("tensorwise", False), ("rowwise", True)):
        cases[f"fsdp-{recipe}"] = dataclasses.replace(
            cases[f"linear-{recipe}"],
            args=(array((8 * T, D), BF16), across, array((8 * T, F), BF16)),
            mesh={"fsdp": 8},
            specs=(jax.sharding.PartitionSpec("fsdp"),) * 3,
            is_explicit=is_explicit,
        )
    return cases


CASES = _cases()
on_h100 = pytest.mark.parametrize("chip", ["h100"])


@on_h100
@pytest.mark.parametrize(
    "case",
    [
        "product-1b-row-promoted-e5m2-bfloat16",
        "product-1b-tensor-promoted-e5m2-float32",
        "product-1b-row-fast-e4m3-float32",
        "product-odd-row-fast-e4m3-bfloat16",
    ],
)
def test_kernel(compiled, chip, case):
    program: Program = compiled(chip, case)
    (kernel,) = program.kernels
    print(f"{program.seconds:.1f} s", kernel)
    assert kernel.arch == "sm_90a"
    assert kernel.spill_bytes == 0 and not any("serialized" in w for w in kernel.warnings)
    assert kernel.early_conversions == 0
    assert kernel.tma_loads > 0 and kernel.tma_stores > 0 and not kernel.stores
    if "1b" in case:
        # No padding and no copy, except for the scales of the columns of a tile that ends outside.
        passes = {"fusion", "copy", "transpose", "convert", "pad", "concatenate"}
        made = [part for part in program.instructions.values() if part.opcode in passes]
        assert all(part.largest_size < 4096 for part in made)


@on_h100
@pytest.mark.parametrize(
    "case",
    ["product-1b-cublas-fast-e4m3-bfloat16", "product-1b-cublas-promoted-e5m2-float32"],
)
def test_cublas(compiled, chip, case):
    program: Program = compiled(chip, case)
    assert program.hlo.count(CUBLAS) == 1 and not program.kernels
    # The scales stay float32, and nothing goes through a pass of its own.
    opcodes = {part.opcode for part in program.instructions.values()}
    assert not opcodes & {"fusion", "copy", "transpose", "convert", "pad", "multiply"}
    precision = "HIGHEST" if "promoted" in case else "DEFAULT"
    assert f'"operand_precision":["{precision}","{precision}"]' in program.hlo


def products_of(program: Program) -> tuple[int, int]:
    """How many products run in FP8, and how many do not."""
    print(f"{program.seconds:.1f} s", program.calls, program.temp_bytes / 2**20)
    in_fp8 = program.calls["fp8_matmul"] + 2 * program.calls["fp8_gated_matmul"]
    return in_fp8, program.hlo.count('"__cublas$lt$matmul"')


def casts_back(hlo: str) -> list[str]:
    """Instructions that cast an FP8 array to a wider type."""
    of_fp8 = set(re.findall(r"%(\S+) = f8e\w+\[\d[\d,]*\]", hlo))
    casts = re.findall(r"%\S+ = (?:bf16|f16|f32)\[\d[\d,]*\]\S* convert\(%([\w.-]+)\)", hlo)
    return [name for name in casts if name in of_fp8]


# Under `jax.checkpoint` the forward runs twice, except for a product whose result nothing needs.
@on_h100
@pytest.mark.parametrize(
    "case, in_fp8, wide",
    [
        pytest.param("linear-tensorwise", 2, 0, marks=pytest.mark.oldest),
        # The kernel of gate and up has two of them.
        ("mlp-tensorwise", 8, 0),
        # test_aot_fp8_llama.py has such a loop.
        pytest.param("scan-tensorwise", 7, 0, marks=(pytest.mark.oldest, pytest.mark.full)),
        pytest.param("scan-rowwise_with_gw_hp", 5, 2, marks=pytest.mark.oldest),
    ],
)
def test_gradients(compiled, chip, case, in_fp8, wide):
    program: Program = compiled(chip, case)
    assert products_of(program) == (in_fp8, wide)
    assert not casts_back(program.hlo)
    for kernel in program.kernels:
        assert kernel.spill_bytes <= 16 and kernel.early_conversions == 0, kernel
        # The maxima of a tile's rows are two numbers of a lane.
        assert kernel.lone_roundings <= 2, kernel


# Recipes with one scale a tensor exchange scalars, and those with scales of columns a row of each.
@on_h100
@pytest.mark.oldest
@pytest.mark.parametrize(
    "case", ["mesh-rowwise", pytest.param("mesh-tensorwise", marks=pytest.mark.full)]
)
def test_on_a_mesh_devices_exchange_maxima_and_gradients(compiled, chip, case):
    program: Program = compiled(chip, case)
    print(f"{program.seconds:.1f} s", program.calls)
    assert '"__cublas$lt$matmul"' not in program.hlo
    names = {kernel.name.removesuffix("_mosaic_gpu_kernel") for kernel in program.kernels}
    kernels = {"fp8_gated_matmul", "fp8_matmul", "fp8_quantize", *SWIGLU_BACKWARD}
    # One kernel finds the maxima of a device's rows and columns.
    assert names >= kernels | ({"fp8_amax"} if case == "mesh-rowwise" else set()), names
    found: Counter[str] = Counter()
    for collective in Schedule(program.hlo).collectives():
        found[collective.kind] += sum(collective.times * math.prod(s) for s in collective.results)
    print(found)
    assert set(found) == {"all-reduce"}
    # Columns of x, dy, the product, dgate and dup: the operands that are summed over the tokens.
    gradients, maxima = 3 * D * F, 0 if case == "mesh-tensorwise" else 2 * D + 3 * F
    assert gradients + maxima <= found["all-reduce"] <= gradients + maxima + 32


@on_h100
@pytest.mark.oldest
@pytest.mark.parametrize("case", ["fsdp-tensorwise", "fsdp-rowwise"])
def test_fsdp_gathers_weights_in_fp8(compiled, chip, case):
    """Once, for dgrad: nothing needs the product. Scales are rows. A case takes 8 s."""
    program: Program = compiled(chip, case)
    dtypes, found = set(), Counter()
    for line in program.hlo.splitlines():
        if gather := re.search(r"= (.*) all-gather(?:-start)?\(", line):
            dtypes |= set(re.findall(r"(\w+)\[\d+,\d\d+\]", gather[1]))
    for collective in Schedule(program.hlo).collectives():
        found[collective.kind] += sum(collective.times * math.prod(s) for s in collective.results)
    print(f"{program.seconds:.1f} s", dtypes, found)
    assert dtypes == {"f8e4m3fn"}
    assert D * F <= found["all-gather"] <= D * F + D
    assert found["reduce-scatter"] == D * F // 8
    assert found["all-reduce"] <= 3 * (D + F)
