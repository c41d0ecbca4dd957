"""Kernels that read and write parts of arrays in place, and kernels in a scan over layers.

XLA gives a kernel a part in place if the part's size is a multiple of 256 bytes. It does not ask
whether the part begins at such a multiple, without which the kernel fails when it runs. All parts
here have such sizes. They begin at such multiples only where a row has 128 elements of two bytes.
"""

import dataclasses
import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from aot.harness import Case, Program
from pallas_kernels import (
    add_rms_norm,
    document_attention,
    linear_cross_entropy,
    rms_norm,
    swiglu,
    swiglu_mlp,
)
from pallas_kernels.fp8 import RECIPES, fp8_linear, fp8_swiglu_mlp

KERNEL: Any = {"implementation": "mosaic_gpu"}
ROWWISE = dataclasses.replace(RECIPES["rowwise"], least_size=0)


def norm(x, weight):
    return rms_norm(x[:, 1:101], weight, **KERNEL)


def norm_with_a_part_of_a_weight(x, weights):
    return rms_norm(x, weights[1 : 1 + x.shape[-1]], **KERNEL)


def product(gate, up):
    return swiglu(gate[1:101], up[1:101], **KERNEL)


def norms_in_a_loop(x, weight):
    def step(i, normed):
        rows = jax.lax.dynamic_slice_in_dim(x, 1 + 100 * i, 100)
        rows = rms_norm(rows, weight, **KERNEL)
        return jax.lax.dynamic_update_slice_in_dim(normed, rows, 1 + 100 * i, 0)

    return jax.lax.fori_loop(0, 5, step, jnp.zeros_like(x))


def layers_in_a_scan(x, scales, weights):
    """The gradients of layers whose stacks for the backward hold results that a layer reads."""

    def layer(x, of_layer):
        scale, gate, up, down = of_layer
        normed = rms_norm(x, scale, **KERNEL)
        q, k, v = (normed @ w for w in (gate, up, down))
        q, k, v = (a.reshape(1, len(a), 1, -1) for a in (q, k, v))
        out = document_attention(q, k, v, None, **KERNEL).reshape(x.shape)
        normed, x = add_rms_norm(out @ up, x, scale, **KERNEL)
        x = x + swiglu(normed @ gate, normed @ up, **KERNEL) @ down
        return x + swiglu_mlp(x, gate, up, down, save="all", **KERNEL), None

    def total(x, scales, *weights):
        return jnp.sum(jax.lax.scan(layer, x, (scales, *weights))[0].astype(jnp.float32) ** 2)

    return jax.grad(total, argnums=range(5))(x, scales, *weights)


def products_in_a_scan(x, weights):
    """The gradients of layers that read, in the forward and the backward, products in FP8."""

    def layer(x, weights):
        x = x + jax.nn.silu(fp8_linear(x, weights[0], recipe=ROWWISE))
        return x + jax.nn.silu(fp8_swiglu_mlp(x, *weights, recipe=ROWWISE)), None

    def total(x, weights):
        return jnp.sum(jax.lax.scan(layer, x, weights)[0].astype(jnp.float32) ** 2)

    return jax.grad(total, argnums=(0, 1))(x, weights)


def loss(x, weight, bias, labels, *, options):
    bias = bias if "vocab_chunk_size" in options else None
    loss = functools.partial(linear_cross_entropy, bias=bias, **options, **KERNEL)
    return jax.value_and_grad(loss, argnums=(0, 1))(x, weight, labels[0, 1:])


def _array(*shape, dtype=jnp.bfloat16):
    return jax.ShapeDtypeStruct(shape, dtype)


def _cases() -> dict[str, Case]:
    cases = {}
    for size in (64, 128):
        weight = _array(size, dtype=jnp.float32)
        cases |= {
            f"norm-{size}": Case(norm, (_array(1, 999, size), weight)),
            f"product-{size}": Case(product, (_array(999, size),) * 2),
            f"loop-{size}": Case(norms_in_a_loop, (_array(999, size), weight)),
        }
        labels = _array(1, 513, dtype=jnp.int32)
        arguments = (_array(512, size), _array(5000, size), _array(5000, dtype=jnp.float32), labels)
        for name, options in (
            ("tokens", {"chunk_size": 128}),
            ("columns", {"vocab_chunk_size": 1024}),
        ):
            case = Case(functools.partial(loss, options=options), arguments)
            cases[f"loss-by-{name}-{size}"] = case
    weights = _array(1000, dtype=jnp.float32)
    cases["weight-128"] = Case(norm_with_a_part_of_a_weight, (_array(100, 128), weights))
    return cases


def _scan() -> Case:
    squares = [_array(3, 128, 128)] * 3
    scales = _array(3, 128, dtype=jnp.float32)
    return Case(layers_in_a_scan, (_array(1024, 128), scales, squares))


PARTS = _cases()
_FP8 = [_array(3, 256, 256)] * 3
CASES = PARTS | {
    "scan": _scan(),
    "fp8-scan": Case(products_in_a_scan, (_array(1024, 256), _FP8)),
}
# The cases with aligned rows and an array that XLA does not make for the kernel; number of parts.
IN_PLACE = {"norm-128": 1, "product-128": 1, "loop-128": 1, "loss-by-columns-128": 3}
# Parts of aligned rows do no harm where XLA makes the array, and "loss-by-columns-128" has others.
FULL = {"loss-by-tokens-128"}


@pytest.mark.parametrize("chip", ["h100"])
@pytest.mark.parametrize(
    "case", [pytest.param(c, marks=pytest.mark.full if c in FULL else ()) for c in PARTS]
)
def test_kernels_are_given_parts_only_where_rows_are_aligned(compiled, chip, case):
    program: Program = compiled(chip, case)
    assert program.kernels
    fused = re.findall(r"^%dynamic-slice-fusion\S* .*?^}", program.hlo, re.M | re.S)
    fused = [body for body in fused if "mosaic_gpu" in body]
    assert len(fused) == IN_PLACE.get(case, 0)
    if case == "loop-128":
        assert " dynamic-slice(" in fused[0] and " dynamic-update-slice(" in fused[0]


@pytest.mark.parametrize("chip, case", [("h100", "scan")])
def test_a_kernel_runs_once_for_the_layer_and_for_the_stack(compiled, chip, case):
    program: Program = compiled(chip, case)
    of_norms = "rms_norm_fwd", "add_rms_norm_fwd"
    forward = *of_norms, "attention_forward", "swiglu_fwd", "gated_matmul"
    assert {k: n for k, n in program.calls.items() if k in forward} == dict.fromkeys(forward, 1)


@pytest.mark.parametrize("chip, case", [("h100", "fp8-scan")])
def test_a_product_in_fp8_runs_once_for_the_layer_and_for_the_stack(compiled, chip, case):
    program: Program = compiled(chip, case)
    # One product of each weight in the forward, and two in the backward. The MLP has two weights
    # more, which a kernel of their own multiplies in the forward.
    assert program.calls["fp8_matmul"] == 3 * 2 + 2 * 2
