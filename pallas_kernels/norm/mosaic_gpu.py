"""RMSNorm and residual-add RMSNorm as Mosaic GPU kernels, forward and backward.

Device memory bounds both, so each array goes through it once. Bytes moved, in units of one array
`[T, D]`:

| | forward | backward |
|---|---|---|
| `rms_norm` | 2: x; y | 3: dy, x; dx |
| `add_rms_norm` | 4: x, residual; y, residual_out | 4: dy, dresidual_out, residual_out; dx |

`dx` of `add_rms_norm` is the gradient of `x` and of `residual`. The kernels also move the weight, 4
bytes a token for `rstd`, and the partial sums of `dweight`.

Kept for the backward: the array that was normalized (`x`, or `residual_out`) and `rstd`. The
backward computes `x · rstd` again.

The gradient of the weight is a sum over all tokens, taken in two levels. Each block of a grid that
fills the GPU once walks over rows and keeps a float32 row of partial sums in registers; then XLA
adds up the few partial rows. There are no atomics: the order of the additions is fixed, so repeated
runs agree bit by bit. A partial row covers at most `backward_kernel._ROWS_PER_PARTIAL` rows, so the
rounding error does not grow with the number of tokens.

Arithmetic is float32. Rounded: `residual_out` and `y` to the dtype of `x`, with
`casting="llama"` also `x · rstd`; `dx` once, after `dresidual_out` was added; `dweight` once.
"""

import functools
import math

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.custom_derivatives import SymbolicZero
from jaxtyping import Array, Float

from pallas_kernels.gpu.device import BYTES_PER_ACCESS, WARPS_PER_WARPGROUP, target_device
from pallas_kernels.norm.backward_kernel import backward
from pallas_kernels.norm.config import Config, Options, default_config
from pallas_kernels.norm.forward_kernel import forward
from pallas_kernels.norm.rows import column_parts, ring_shape, split_row, splits, widest_itemsize

_MIN_HIDDEN_SIZE = 64
_DTYPES = (jnp.bfloat16, jnp.float16, jnp.float32)


def unsupported_reason(
    x: jax.Array, weight: jax.Array, residual: jax.Array | None = None
) -> str | None:
    """Why the kernels do not take these arguments, or None if they do."""
    hidden_size = x.shape[-1]
    for name, array in (("x", x), ("weight", weight), ("residual", residual)):
        if array is not None and array.dtype not in _DTYPES:
            return (
                f"{name} is {array.dtype}, not bfloat16, float16 or float32; cast {name} to one of "
                "these dtypes"
            )
    if hidden_size < _MIN_HIDDEN_SIZE:
        return (
            f"{hidden_size=} is below {_MIN_HIDDEN_SIZE}, two elements for each lane of a warp; "
            "such rows are for XLA"
        )
    if not splits(hidden_size, widest_itemsize(x, residual)) or not any(
        column_parts(split) for split in splits(hidden_size, x.dtype.itemsize)
    ):
        return (
            f"no number of warps divides {hidden_size=} into parts that fit registers; take a "
            "multiple of 64"
        )
    return None


def norm(
    x: Float[Array, "*T D"],
    residual: Float[Array, "*T D"] | None,
    weight: Float[Array, " D"],
    *,
    eps: float,
    weight_offset: float,
    casting: str,
    config: Config | None,
) -> tuple[Float[Array, "*T D"], Float[Array, "*T D"] | None]:
    """`(y, residual_out)` of `pallas_kernels.add_rms_norm`, or `(y, None)` without a residual.

    The caller has asked `unsupported_reason`, which is None for the arguments.

    Raises:
      ValueError: The configuration does not fit the hidden size or the device.
    """
    if config is None:
        config = default_config(target_device(), x.shape[-1], x.dtype, add=residual is not None)
    check_config(config, x, residual)
    options = Options(float(eps), float(weight_offset), casting, config)
    if x.size == 0:
        # There is nothing to launch. The gradients of these results are zeros.
        total = x if residual is None else x + residual.astype(x.dtype)
        return total * weight.astype(x.dtype), None if residual is None else total
    num_tokens = x.size // x.shape[-1]
    # Where a warp has a row for itself, a tile has four rows, and fewer are padded.
    num_missing = 0
    if 1 in (options.config.fwd_warps, options.config.bwd_warps):
        num_missing = max(0, WARPS_PER_WARPGROUP - num_tokens)

    def to_rows(a):
        # With ones, because a row of zeros has no norm if eps is 0.
        rows = a.reshape(num_tokens, -1)
        return jnp.pad(rows, ((0, num_missing), (0, 0)), constant_values=1)

    def from_rows(rows):
        return rows[:num_tokens].reshape(x.shape)

    if residual is None:
        return from_rows(_norm(options, to_rows(x), None, weight)[0]), None
    y, residual_out = _norm(options, to_rows(x), to_rows(residual), weight)
    return from_rows(y), from_rows(residual_out)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _norm(options, x, residual, weight):
    y, residual_out, _ = _forward(options, x, residual, weight)
    return y, residual_out


def _norm_fwd(options, x, residual, weight):
    residual = None if residual is None else residual.value
    y, residual_out, rstd = _forward(options, x.value, residual, weight.value)
    # The names are here because a `jax.checkpoint` policy must see what the backward reads.
    rstd = checkpoint_name(rstd, "rstd")
    y = checkpoint_name(y, "normed")
    source = x.value
    if residual_out is not None:
        source = residual_out = checkpoint_name(residual_out, "residual")
    # The backward needs only the dtype of the residual, which an empty array carries.
    like_residual = None if residual is None else jnp.empty((0,), residual.dtype)
    return (y, residual_out), (source, weight.value, rstd, like_residual)


def _norm_bwd(options, saved, cotangents):
    source, weight, rstd, like_residual = saved
    dy, dresidual_out = cotangents
    if isinstance(dresidual_out, SymbolicZero):
        dresidual_out = None  # one array less to read
    if isinstance(dy, SymbolicZero):
        dx = jnp.zeros_like(source) if dresidual_out is None else dresidual_out
        dweight = jnp.zeros_like(weight)
    else:
        dx, dweight = _backward(options, dy, dresidual_out, source, weight, rstd)
    dresidual = None if like_residual is None else dx.astype(like_residual.dtype)
    return dx, dresidual, dweight.astype(weight.dtype)


_norm.defvjp(_norm_fwd, _norm_bwd, symbolic_zeros=True)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _forward(options, x, residual, weight):
    return forward(options, x, residual, weight)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _backward(options, dy, dresidual_out, source, weight, rstd):
    return backward(options, dy, dresidual_out, source, weight, rstd)


@_forward.defjvp
@_backward.defjvp
def _no_second_derivative(options, primals, tangents):
    raise NotImplementedError(
        "implementation='mosaic_gpu' of RMSNorm has no second derivative; differentiate "
        "implementation='reference' twice"
    )


def check_config(config: Config, x: jax.Array, residual: jax.Array | None) -> None:
    """Raises ValueError if the launch parameters do not fit the rows or the device."""
    hidden_size = x.shape[-1]
    fwd = split_row(hidden_size, config.fwd_warps, widest_itemsize(x, residual))
    bwd = split_row(hidden_size, config.bwd_warps, x.dtype.itemsize)
    if fwd is None or bwd is None or not column_parts(bwd):
        forward_warps = [split.warps for split in splits(hidden_size, widest_itemsize(x, residual))]
        backward_warps = [
            split.warps for split in splits(hidden_size, x.dtype.itemsize) if column_parts(split)
        ]
        raise ValueError(
            f"{config}: {hidden_size=} can be dealt to {forward_warps} warps in the forward and to "
            f"{backward_warps} in the backward; take one of these numbers"
        )
    if not config.bwd_stages or column_parts(bwd) != 1:
        return
    device = target_device()
    if not device.has_tma:
        raise ValueError(
            f"{config.bwd_stages=} needs the tensor memory accelerator of Hopper and later, "
            f"{device.kind} has capability {device.capability}; use bwd_stages=0"
        )
    if bwd.segment * x.dtype.itemsize % BYTES_PER_ACCESS:
        raise ValueError(
            f"{config.bwd_stages=} needs parts of rows of a multiple of {BYTES_PER_ACCESS} bytes, "
            f"got {bwd.segment} elements of {x.dtype}; use bwd_stages=0"
        )
    num_operands = 2 if residual is None else 3
    num_bytes = math.prod(ring_shape(bwd, config.bwd_stages, num_operands)) * x.dtype.itemsize
    if num_bytes > device.smem_bytes:
        raise ValueError(
            f"{config.bwd_stages=} rows of {hidden_size=} take {num_bytes} bytes of shared memory, "
            f"a block of {device.kind} can have {device.smem_bytes}; use fewer stages"
        )
