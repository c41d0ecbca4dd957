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
runs agree bit by bit. A lane adds up at most `backward_kernel._ROWS_PER_PARTIAL` rows for a partial
row, so the rounding error does not grow with the number of tokens.

Arithmetic is float32. Rounded: `residual_out` and `y` to the dtype of `x`, with
`casting="llama"` also `x · rstd`; `dx` once, after `dresidual_out` was added; `dweight` once.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float

from pallas_kernels.gpu.arrays import apart_from_stacks, unsupported_dtype
from pallas_kernels.gpu.device import BYTES_PER_ACCESS, WARPS_PER_WARPGROUP, target_device
from pallas_kernels.gpu.kernel import vary, varying_axes
from pallas_kernels.layout import GradientOf, Place, Roles, Tokens, Weight
from pallas_kernels.mapping import Mask
from pallas_kernels.norm import reference
from pallas_kernels.norm.backward_kernel import backward
from pallas_kernels.norm.config import Config, config_of, smem_for_rows
from pallas_kernels.norm.forward_kernel import forward
from pallas_kernels.norm.reference import Options
from pallas_kernels.norm.rows import RowSplit, column_parts, ring_bytes, splits, widest_itemsize
from pallas_kernels.operation import call, follows
from pallas_kernels.partition import partitioned
from pallas_kernels.protocol import Arrays, Cotangents, Operation, with_members

_MIN_HIDDEN_SIZE = 64


def unsupported_reason(
    x: jax.Array, weight: jax.Array, residual: jax.Array | None = None
) -> str | None:
    """Why the kernels do not take these arguments, or None if they do."""
    hidden_size = x.shape[-1]
    for name, array in (("x", x), ("weight", weight), ("residual", residual)):
        if array is not None and (reason := unsupported_dtype(name, array.dtype)) is not None:
            return reason
    if hidden_size < _MIN_HIDDEN_SIZE:
        return (
            f"{hidden_size=} is below {_MIN_HIDDEN_SIZE}, two elements for each lane of a warp; "
            "such rows are for XLA"
        )
    if not _forward_splits(x, residual) or not _backward_splits(x):
        return (
            f"no number of warps divides {hidden_size=} into parts that fit registers; take a "
            "multiple of 64"
        )
    return None


def norm(
    x: Float[Array, "*T D"],
    residual: Float[Array, "*T D"] | None,
    weight: Float[Array, " D"],
    options: Options,
    config: Config | None,
    *,
    has_tangent: bool,
) -> tuple[Float[Array, "*T D"], Float[Array, "*T D"] | None]:
    """`(y, residual_out)` of `pallas_kernels.add_rms_norm`, or `(y, None)` without a residual.

    The caller has asked `unsupported_reason`, which is None for the arguments. With `has_tangent`
    plain JAX computes forward mode and second derivatives.

    Raises:
      ValueError: The configuration does not fit the hidden size or the device.
      NotImplementedError: The result is differentiated in forward mode, or twice, without
        `has_tangent`.
    """
    if config is None:
        config = config_of(x, residual)
    check_config(config, x, residual)
    if x.size == 0:
        # There is nothing to launch. The gradients of these results are zeros.
        return reference.norm(x, residual, weight, options)
    kind = _NormWithTangent if has_tangent else _Norm
    operation = kind(options, config, residual is not None)
    if residual is None:
        (y,) = call(operation, x, weight)
        return y, None
    y, residual_out = call(operation, x, residual, weight)
    return y, residual_out


_TOKENS, _ROWS, _WEIGHT = Tokens(("d",)), Tokens(), Weight(("d",))


@dataclasses.dataclass(frozen=True, slots=True)
class _Norm:
    """RMSNorm of `(x, weight)`, or of `(x, residual, weight)` after their addition.

    Attributes:
      options: Options of the norm.
      config: Launch parameters.
      has_residual: Whether there is a residual.
    """

    options: Options
    config: Config
    has_residual: bool

    @property
    def name(self) -> str:
        return "add_rms_norm" if self.has_residual else "rms_norm"

    def forward(self, wanted: Mask | None, *args: jax.Array) -> tuple[jax.Array, ...]:
        of_args = (*(_TOKENS,) * (len(args) - 1), _WEIGHT)
        of_results = (*(_TOKENS,) * (len(args) - 1), _ROWS)
        out = partitioned(_forward_of, self, Roles(of_args, of_results), *args)
        return out[:-1] if wanted is None else out

    def num_residuals(self, wanted: Mask) -> int:
        return 1

    def saved(
        self, wanted: Mask, args: Arrays, results: Arrays, residuals: Arrays
    ) -> tuple[Arrays, Arrays]:
        # The names are here because a `jax.checkpoint` policy must see what the backward reads.
        names = ("normed", "residual")[: len(results)]
        results = [
            checkpoint_name(a, n) for a, n in zip(apart_from_stacks(results), names, strict=True)
        ]
        source = results[1] if self.has_residual else args[0]
        rstd = checkpoint_name(residuals[0], "rstd")
        if self.has_residual:
            # `y` is the norm of the rounded sum. So a checkpoint that keeps the sum norms it, and
            # need not add again, for which it would compute the product before the addition again.
            # The last bits may differ, because the kernel without a residual adds the squares in
            # another order.
            operation = type(self)(self.options, config_of(source, None), has_residual=False)
            named = {"name": "normed", "where_kept": {"residual": source, "rstd": rstd}}
            results[0] = follows(results[0], operation, source, args[-1], **named)
        return results, (source, args[-1], rstd)

    def backward(self, wanted: Mask, saved: Arrays, cotangents: Cotangents) -> Arrays:
        source, weight, rstd = saved
        dy, *rest = cotangents
        dresidual_out = rest[0] if rest else None
        if dy is None:
            assert dresidual_out is not None  # JAX asks for no gradient of a result without one
            dx, dweight = dresidual_out, jnp.zeros_like(weight)
        else:
            # Without a cotangent of the sum there is one array less to read.
            given = (dy,) if dresidual_out is None else (dy, dresidual_out)
            of_args = *(_TOKENS,) * (len(given) + 1), _WEIGHT, _ROWS
            roles = Roles(of_args, (_TOKENS, GradientOf(len(given) + 1)))
            arrays = *given, source, weight, rstd
            dx, dweight = partitioned(_backward_of, self, roles, *arrays)
        gradients = (dx, dx, dweight) if self.has_residual else (dx, dweight)
        return [g for g, is_wanted in zip(gradients, wanted, strict=True) if is_wanted]

    def fold(
        self, wanted: Mask | None, args: Arrays, is_batched: Mask
    ) -> tuple[Operation, Arrays] | None:
        if is_batched[-1]:
            return None
        return self, with_members(args, is_batched, weights=[len(args) - 1])


@dataclasses.dataclass(frozen=True, slots=True)
class _NormWithTangent(_Norm):
    """RMSNorm with forward mode and second derivatives, which are those of the reference."""

    def tangent(self, wanted: Mask, saved: Arrays, tangents: Arrays) -> Arrays:
        source, weight, _ = saved
        rest = iter(tangents)
        *of_tokens, dweight = (next(rest) if is_wanted else None for is_wanted in wanted)
        # In float32, as the sum of `x` and the residual is.
        parts = [t.astype(jnp.float32) for t in of_tokens if t is not None]
        dsource = sum(parts[1:], parts[0]) if parts else jnp.zeros_like(source)
        dweight = jnp.zeros_like(weight) if dweight is None else dweight
        dsource, dweight = dsource.astype(source.dtype), dweight.astype(weight.dtype)
        # The arrays vary over devices as their tangents do. For a weight that is the same on all
        # devices, each device has a gradient of its own, and JAX adds them up later.
        source = vary(source, varying_axes(dsource))
        weight = vary(weight, varying_axes(dweight))
        norm = lambda source, weight: reference.norm(source, None, weight, self.options)[0]
        _, dy = jax.jvp(norm, (source, weight), (dsource, dweight))
        return (dy, dsource) if self.has_residual else (dy,)


def _forward_of(key: _Norm, place: Place) -> Callable[..., tuple[jax.Array, ...]]:
    """The forward of a device's arrays: `(y, rstd)` or `(y, residual_out, rstd)`."""

    def run(*args: jax.Array) -> tuple[jax.Array, ...]:
        x, *residual, weight = args
        tokens = _TokensAsRows.of(x, key.config)
        added = tokens.rows(residual[0]) if residual else None
        y, residual_out, rstd = forward(key.options, key.config, tokens.rows(x), added, weight)
        out = (y, rstd) if residual_out is None else (y, residual_out, rstd)
        return tuple(map(tokens.of_rows, out))

    return run


def _backward_of(key: _Norm, place: Place) -> Callable[..., tuple[jax.Array, jax.Array]]:
    """The backward of a device's arrays: `(dx, dweight)`."""

    def run(*args: jax.Array) -> tuple[jax.Array, jax.Array]:
        *given, source, weight, rstd = args
        tokens = _TokensAsRows.of(source, key.config)
        # Rows of padding add zeros to `dweight`.
        dy, *rest = (tokens.rows(a, fill=0) for a in given)
        dresidual_out = rest[0] if rest else None
        rstds = tokens.rows(rstd[..., None])[:, 0]
        dx, dweight = backward(
            key.options, key.config, dy, dresidual_out, tokens.rows(source), weight, rstds
        )
        return tokens.of_rows(dx), dweight

    return run


class _TokensAsRows(NamedTuple):
    """How a device's tokens become rows of a kernel.

    Attributes:
      leading: Sizes of the axes of tokens.
      num_missing: Number of rows of padding.
    """

    leading: tuple[int, ...]
    num_missing: int

    @classmethod
    def of(cls, x: jax.Array, config: Config) -> "_TokensAsRows":
        """For an array `[*T, D]`."""
        # With one warp a row a tile has four rows, so fewer than four tokens are padded.
        has_tiles = 1 in (config.fwd_warps, config.bwd_warps)
        num_tokens = math.prod(x.shape[:-1])
        return cls(x.shape[:-1], max(0, WARPS_PER_WARPGROUP - num_tokens) if has_tiles else 0)

    def rows(self, a: jax.Array, fill: int = 1) -> jax.Array:
        """`[*T, n]` as `[rows, n]`. Padding is 1, because a row of 0 has no norm if eps is 0."""
        rows = a.reshape(math.prod(self.leading), a.shape[-1])
        if not self.num_missing:
            return rows
        return jnp.pad(rows, ((0, self.num_missing), (0, 0)), constant_values=fill)

    def of_rows(self, rows: jax.Array) -> jax.Array:
        """`[rows, ...]` as `[*T, ...]`, without the padding."""
        return rows[: math.prod(self.leading)].reshape(*self.leading, *rows.shape[1:])


def _forward_splits(x: jax.Array, residual: jax.Array | None) -> list[RowSplit]:
    """The ways to deal a row in the forward."""
    return splits(x.shape[-1], widest_itemsize(x, residual))


def _backward_splits(x: jax.Array) -> list[RowSplit]:
    """The ways to deal a row in the backward: those with sums of `dweight` that fit registers."""
    return [split for split in splits(x.shape[-1], x.dtype.itemsize) if column_parts(split)]


def check_config(config: Config, x: jax.Array, residual: jax.Array | None) -> None:
    """Raises ValueError if the launch parameters do not fit the rows or the device."""
    hidden_size = x.shape[-1]
    fwd = [split.warps for split in _forward_splits(x, residual)]
    bwd_of = {split.warps: split for split in _backward_splits(x)}
    if config.fwd_warps not in fwd or config.bwd_warps not in bwd_of:
        raise ValueError(
            f"{config}: {hidden_size=} can be dealt to {fwd} warps in the forward and to "
            f"{list(bwd_of)} in the backward; take one of these numbers"
        )
    bwd = bwd_of[config.bwd_warps]
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
    num_bytes = ring_bytes(bwd, config.bwd_stages, num_operands, config.bwd_rows, x.dtype.itemsize)
    available = smem_for_rows(device, bwd, num_operands, 1)
    if num_bytes > available:
        raise ValueError(
            f"{config.bwd_stages=} times {config.bwd_rows=} rows of {hidden_size=} take "
            f"{num_bytes} bytes of shared memory, a block of {device.kind} can have {available} "
            "for rows; use fewer stages or rows"
        )
