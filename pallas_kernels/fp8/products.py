"""The public product of two FP8 tensors.

Three programs compute it:

- *our kernel* (`product_kernel.py`) on Hopper.
- *XLA*, on other GPUs since Ada. XLA can replace the product of dequantized operands by one of
  cublasLt in FP8, if each has one scale; a pass over the result applies row scales. But whether it
  does so depends on its flags. With `xla_gpu_enable_triton_gemm=false` it does. By default a Triton
  kernel multiplied in bfloat16 on an H100 (JAX 0.11.2): 610 to 757 TFLOP/s, where the bare bfloat16
  product had 774 to 826 and our kernel 1358 to 1547. So our kernel runs on Hopper. On an H200 the
  FP8 product of cublasLt had 1559 to 1589, and 1364 to 1484 with split accumulation.
- *emulation* on other devices, and in place of XLA for results in float16: the values are
  multiplied as float32 numbers. A product of two FP8 numbers is exact in float32, so only the sums
  round.
"""

from typing import Literal

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from pallas_kernels.arguments import check_choice, check_config
from pallas_kernels.choices import record
from pallas_kernels.derivatives import not_differentiable
from pallas_kernels.fp8 import product_kernel
from pallas_kernels.fp8.types import DTYPES, E5M2, Quantized
from pallas_kernels.gpu.device import target_device
from pallas_kernels.gpu.hopper_gemm import Config
from pallas_kernels.implementation import (
    Chosen,
    Implementation,
    check_config_has_name,
    check_implementation,
    choose_implementation,
    symbolic_reason,
)

_NO_GRADIENT = (
    "fp8_matmul has no gradient; use fp8_linear, write a jax.custom_vjp around it, or take "
    "jax.lax.stop_gradient of its operands"
)

# How the products of a sum are added up.
type Accumulation = Literal["fast", "promoted"]

_PRECISION = {"fast": jax.lax.Precision.DEFAULT, "promoted": jax.lax.Precision.HIGHEST}
_K_MAJOR = (((1,), (1,)), ((), ()))


def fp8_matmul(
    a: Quantized,
    b: Quantized,
    *,
    out_dtype: DTypeLike = jnp.bfloat16,
    accumulation: Accumulation = "fast",
    implementation: Implementation | None = None,
    config: Config | None = None,
) -> Float[Array, "M N"]:
    """`a @ b.T` of two FP8 tensors, `out[i, j] = Σ_k a[i, k] · b[j, k]`.

    Here `a` and `b` stand for `values · scale`. `accumulation` sets the precision of the sums. The
    result is rounded once, to `out_dtype`. There is one exception: with `"xla"`, where XLA does not
    take cublasLt's FP8 product, an operand with a single scale is dequantized and rounded to
    `out_dtype` before the product. A NaN in an operand gives NaN. This function has no gradient;
    `fp8_linear` has one.

    Args:
      a: First operand, `[M, K]`, with one scale or one for each row.
      b: Second operand, `[N, K]`, with one scale or one for each row. At most one of the operands
        is `float8_e5m2`.
      out_dtype: Dtype of the result: bfloat16, float16 or float32.
      accumulation: `"fast"` adds up in the tensor cores of Hopper, which keep about 14 bits: over
        K = 16384 the relative error of the result is 3.5e-3. `"promoted"` adds parts of such a sum
        in float32. Its error is no more than that of the rounding to bfloat16, 1.7e-3, and it takes
        7 to 12 % more time. The implementation `"xla"` asks cublasLt for the same accumulation. The
        emulation ignores the choice.
      implementation: Name of the program. `None`, the default, runs the kernel where it takes the
        arguments, and `"xla"` elsewhere. `"mosaic_gpu"` is our kernel for Hopper. `"xla"` is a
        product that XLA may replace by cublasLt's in FP8, on GPUs since Ada. `"reference"`
        multiplies float32 numbers, as `"xla"` does elsewhere and for a result in float16.
        `"require"` runs the kernel, or raises.
      config: Launch parameters of the kernel. They need `implementation="mosaic_gpu"`.

    Raises:
      ValueError: The shapes or scales disagree, both operands are `float8_e5m2`, `out_dtype` is
        another dtype, a name is unknown, or there are launch parameters for plain JAX.
      TypeError: An operand is not of an FP8 dtype, or `config` is no `Config`.
      NotImplementedError: The caller asked for the kernel or requires it, and it does not run; or
        the function is differentiated.
    """
    _check(a, b, out_dtype, accumulation)
    a, b = not_differentiable(_NO_GRADIENT, (a, b))
    chosen, reason = choose_fp8_matmul(a, b, implementation, config)
    record("fp8_matmul", (a.values, b.values), implementation, chosen, reason)
    if chosen == "mosaic_gpu":
        promoted = accumulation == "promoted"
        return product_kernel.product(a, b, out_dtype=out_dtype, promoted=promoted, config=config)
    if chosen == "xla" and _xla_multiplies(out_dtype):
        return _by_xla(a, b, out_dtype, accumulation)
    return _emulated(a, b, out_dtype)


def choose_fp8_matmul(
    a: Quantized,
    b: Quantized,
    implementation: Implementation | None,
    config: Config | None,
) -> tuple[Chosen, str | None]:
    """The implementation that `fp8_matmul` runs, and the reason why it is not the kernel.

    Raises:
      ValueError: The name is unknown, or there are launch parameters for plain JAX.
      TypeError: `config` is no `Config`.
      NotImplementedError: The caller asked for the kernel or requires it, and it does not run.
    """
    check_implementation(implementation)
    check_config(config, Config)
    check_config_has_name(config, implementation)
    unsupported = symbolic_reason(a.values, b.values)
    unsupported = unsupported or product_kernel.unsupported_reason(a, b)
    return choose_implementation(implementation, unsupported, fallback="xla")


def _xla_multiplies(out_dtype: DTypeLike) -> bool:
    """Whether `_by_xla` computes the product.

    cublasLt multiplies FP8 on GPUs since Ada. A scale is often above or below all numbers of
    float16, so no operand in float16 can hold it.
    """
    device = target_device()
    is_f16 = jnp.dtype(out_dtype) == jnp.float16
    return device.capability is not None and device.has_fp8 and not is_f16


def _by_xla(
    a: Quantized, b: Quantized, out_dtype: DTypeLike, accumulation: Accumulation
) -> jax.Array:
    """A product that XLA's `gemm-rewriter` replaces by cublasLt's.

    XLA looks for a product of operands that are converted and multiplied by a scalar. It reads the
    scalar before its cast to 16 bits, so that the scale stays float32. XLA does not replace a
    16-bit product of float32 operands, so the operands have `out_dtype`.
    """

    def operand(q: Quantized) -> jax.Array:
        values = q.values.astype(out_dtype)
        return values if q.scale.ndim else values * q.scale.astype(out_dtype)

    product = jax.lax.dot_general(
        operand(a),
        operand(b),
        _K_MAJOR,
        precision=_PRECISION[accumulation],
        preferred_element_type=jnp.float32 if a.scale.ndim or b.scale.ndim else out_dtype,
    )
    if a.scale.ndim:
        product = product * a.scale
    if b.scale.ndim:
        product = product * b.scale.T
    return product.astype(out_dtype)


def _emulated(a: Quantized, b: Quantized, out_dtype: DTypeLike) -> jax.Array:
    """The product of the values as float32 numbers, scaled after the sums."""
    product = jax.lax.dot_general(
        a.values.astype(jnp.float32),
        b.values.astype(jnp.float32),
        _K_MAJOR,
        precision=jax.lax.Precision.HIGHEST,
        preferred_element_type=jnp.float32,
    )
    return (product * a.scale * b.scale.T).astype(out_dtype)


def _check(a: Quantized, b: Quantized, out_dtype: DTypeLike, accumulation: Accumulation) -> None:
    for name, q in (("a", a), ("b", b)):
        if not isinstance(q, Quantized):
            raise TypeError(
                f"{name} must be a Quantized, got {type(q).__name__}; pass quantize({name})"
            )
        if q.values.dtype not in DTYPES:
            raise TypeError(
                f"{name} has values of dtype {q.values.dtype}; quantize it to float8_e4m3fn or "
                "float8_e5m2"
            )
        shape = q.values.shape
        if len(shape) != 2 or q.scale.shape not in ((), (*shape[:1], 1)):
            raise ValueError(
                f"{name} must be [M, K] with a scale [] or [M, 1], got {shape} and {q.scale.shape}"
            )
    if a.values.dtype == b.values.dtype == E5M2:
        # cublasLt has no such product, and XLA would multiply 16-bit numbers without a word.
        raise ValueError("a and b are both float8_e5m2; quantize one of them to float8_e4m3fn")
    if a.values.shape[1] != b.values.shape[1]:
        raise ValueError(
            f"a and b must have the same last axis, got {a.values.shape} and {b.values.shape}"
        )
    check_choice("accumulation", accumulation, Accumulation)
    if jnp.dtype(out_dtype) not in product_kernel.OUT_DTYPES:
        raise ValueError(f"out_dtype={jnp.dtype(out_dtype).name} must be a float of 16 or 32 bits")
