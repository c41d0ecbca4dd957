"""The public residual-add RMSNorm of tensor parallelism."""

import functools
import math

import jax
from jaxtyping import Array, Float

from pallas_kernels.arguments import check_config, floating_arrays
from pallas_kernels.choices import record
from pallas_kernels.implementation import (
    Chosen,
    Implementation,
    by_name,
    check_implementation,
    choose_implementation,
)
from pallas_kernels.norm import Casting, Config, add_rms_norm
from pallas_kernels.norm.api import checked_options, log_rounding_of_residual
from pallas_kernels.sharded_norm import mosaic_gpu, reference, xla


def sharded_add_rms_norm(
    partial: Float[Array, "*B T D"],
    residual: Float[Array, "*B shard D"],
    weight: Float[Array, " D"],
    *,
    axis_name: str,
    eps: float = 1e-6,
    weight_offset: float = 0.0,
    casting: Casting = "float32",
    gather: bool = True,
    implementation: Implementation | None = None,
    config: Config | None = None,
) -> tuple[Float[Array, "*B tokens D"], Float[Array, "*B shard D"]]:
    """Sum over devices, residual addition and RMSNorm, for a residual stream split by tokens.

    With n devices along `axis_name`, device i returns

        residual_out = (Σ_devices partial)[i·T/n : (i+1)·T/n] + residual
        y            = all_gather(rms_norm(residual_out))

    With `gather=False`, `y` is not gathered. In tensor parallelism, this function replaces an
    all-reduce followed by an `add_rms_norm` of a whole residual stream on every device (LMDeploy's
    AllreduceResidualRMSnorm). Here each device has 1/n of the work of the norm and of the memory of
    the residual, as in Megatron's sequence parallelism (https://arxiv.org/abs/2205.05198).

    Call it inside of `jax.shard_map(check_vma=False)`: with the check, JAX cannot infer that all
    devices have the same gathered `y`. The tokens are split along the second-last axis. Leading
    axes stay whole, so a `[B, S, D]` residual stream is split along S. With B above 1, XLA for GPUs
    copies `partial` and `y`, because a collective needs the split axis first. Tokens are
    independent, so the arrays may also be `[B·S, D]`, which needs no copies.

    **Dtypes and rounding.** The collective adds up `partial` in its dtype. In 16 bits on GPUs, the
    ring of NCCL rounds after each of the n - 1 additions. XLA for CPUs adds in float32 and rounds
    once. For a float32 sum make `partial` float32, which doubles the bytes between devices. The
    rounded sum goes through `add_rms_norm`, which adds in float32, rounds `residual_out`, and
    normalizes the rounded sum. `y` and `residual_out` have the dtype of `partial`.

    **Gradients.** The operation is differentiable in all three arrays, and each gradient has the
    dtype of its argument. The backward mirrors the forward in three steps:

    1. A reduce-scatter of `dy` in the dtype of `y`, if `y` was gathered. It adds up the gradients
       that the devices computed from their own copies of `y`.
    2. The backward of the norm, in one pass over the device's tokens.
    3. An all-gather of the gradient. The `partial` of every device has the same gradient.

    Each device returns the gradient of `weight` for its own tokens, rounded to the dtype of
    `weight`. The operation does not add up the gradients of the devices. If you differentiate
    outside of `jax.shard_map`, its transpose adds them up over every axis of the mesh that is not
    in the weight's `in_specs`. So pass the whole weight, with `PartitionSpec()`. If you
    differentiate inside, add the gradients up with `jax.lax.psum`.

    For policies of `jax.checkpoint`, `residual_out` of a device's tokens has the name `residual`,
    `rstd` the name `rstd`, and the norm before it is gathered the name `normed`. A policy that
    keeps these names takes 1/n of the memory, and the backward gathers `y` again. With
    `"mosaic_gpu"`, `normed` is `y` as it is returned.

    Args:
      partial: This device's partial sum of a sublayer's output for all tokens, `[..., T, D]`, such
        as the product with its rows of a weight. All three arrays may have any floating dtype.
      residual: Residual stream of this device's tokens, `[..., T/n, D]`.
      weight: Scale of the norm, `[D]`, the same on all devices.
      axis_name: Mesh axis over which `partial` is summed and the tokens are split.
      eps: Number added to the mean square, as in `rms_norm`.
      weight_offset: Number added to the weight, as in `rms_norm`.
      casting: Place where the result is rounded, as in `rms_norm`.
      gather: Whether `y` has all tokens. With False it has the tokens of this device, for a caller
        that gathers them in its GEMM.
      implementation: Name of the program. `None`, the default, is `"xla"`: XLA's collectives, and
        between them `add_rms_norm`, with its kernel where that runs. `"require"` also runs `"xla"`,
        and raises where `add_rms_norm` would not run its kernel. `"reference"` sums and normalizes
        all tokens on every device and slices. `"mosaic_gpu"` is one kernel that reads the memory of
        the other devices over NVLink, for the devices of one host in one process. It sums in
        float32, and does not round before it adds the residual. On four H200s it takes 0.85 to 0.95
        of the time of `"xla"`, but all of its blocks must run at once on all devices. XLA does not
        know this: if it runs another collective beside the kernel, the two could wait for each
        other for ever.
      config: Launch parameters of `add_rms_norm`, for `None`, `"xla"` and `"require"`.

    Returns:
      `(y, residual_out)`. `y` is `[..., T, D]`, the same on all devices of the axis. With
      `gather=False` it is `[..., T/n, D]`. `residual_out` is `[..., T/n, D]`.

    Raises:
      ValueError: The shapes disagree, the devices do not divide T, `axis_name` is not bound, a name
        is unknown, a number is out of range, or there is no kernel for `config`.
      TypeError: The same as in `rms_norm`, or `axis_name` is no name of one axis. JAX also raises
        it for forward mode of `"mosaic_gpu"`.
      NotImplementedError: The caller asked for `"mosaic_gpu"`, and it takes neither these arrays
        nor these devices, or it is differentiated twice. For the norm of `"xla"`, as in `rms_norm`.
    """
    # Above 80 lines, because most of them are documentation.
    partial, residual, weight = floating_arrays(partial=partial, residual=residual, weight=weight)
    log_rounding_of_residual("sharded_add_rms_norm", "partial", partial, residual)
    options = checked_options(eps, weight_offset, casting)
    _check_shapes(partial, residual, weight, axis_name)
    check_implementation(implementation)
    check_config(config, Config)
    if config is not None and implementation in ("reference", "mosaic_gpu"):
        raise ValueError(
            f"{config=} is for the norm between XLA's collectives; leave config=None, or ask for "
            "implementation='xla'"
        )
    if partial.size == 0:
        # XLA has no collectives over an axis of size 0, and a kernel no grid of 0 blocks. There is
        # nothing to compute, and all gradients are 0.
        residual_out = residual.astype(partial.dtype)
        return partial if gather else residual_out, residual_out
    chosen, reason = choose_sharded_norm(partial, residual, weight, implementation)
    arrays = partial, residual, weight
    record("sharded_add_rms_norm", arrays, chosen, chosen, reason)
    if chosen == "mosaic_gpu":
        return mosaic_gpu.sharded_add_rms_norm(*arrays, options, axis_name, gather=gather)
    norm = functools.partial(add_rms_norm, eps=eps, weight_offset=weight_offset, casting=casting)
    if chosen == "reference":
        norm = functools.partial(norm, implementation="reference")
        return reference.sharded_add_rms_norm(*arrays, norm, axis_name, gather=gather)
    of_norm = implementation if implementation == "require" else None
    norm = functools.partial(norm, implementation=of_norm, config=config)
    return xla.sharded_add_rms_norm(*arrays, norm, axis_name, gather=gather)


def choose_sharded_norm(
    partial: Array, residual: Array, weight: Array, implementation: Implementation | None
) -> tuple[Chosen, str | None]:
    """The implementation that runs, and the reason why it is not the kernel over peer memory.

    Raises:
      NotImplementedError: The caller asked for the kernel, which does not take the arguments or the
        devices.
    """
    if implementation == "mosaic_gpu":
        unsupported = mosaic_gpu.unsupported_reason(partial, residual, weight)
        return choose_implementation(implementation, unsupported, fallback="xla")
    if implementation == "reference" or implementation == "xla":
        return implementation, by_name(implementation, "'mosaic_gpu' takes the kernel")
    return "xla", (
        "the kernel over peer memory could wait for ever if XLA runs another collective beside it, "
        "so it runs only with implementation='mosaic_gpu'"
    )


def _check_shapes(partial: Array, residual: Array, weight: Array, axis_name: str) -> None:
    """Raises if the shapes do not fit each other and the axis."""
    if not isinstance(axis_name, str):
        raise TypeError(
            f"{axis_name=} must be the name of one mesh axis; give the devices one axis in the mesh"
        )
    try:
        num_devices = jax.lax.axis_size(axis_name)
    except NameError:
        raise ValueError(
            f"{axis_name=} is not bound; call sharded_add_rms_norm inside of jax.shard_map over a "
            "mesh with this axis"
        ) from None
    if partial.ndim < 2:
        raise ValueError(f"partial must be [..., T, D], got {partial.shape}")
    if weight.shape != partial.shape[-1:]:
        raise ValueError(
            f"weight must have shape {partial.shape[-1:]} (partial is {partial.shape}), "
            f"got {weight.shape}"
        )
    *batch, num_tokens, hidden_size = partial.shape
    if num_tokens % num_devices:
        padded = math.ceil(num_tokens / num_devices) * num_devices
        raise ValueError(
            f"{num_tokens=} (axis -2 of partial, {partial.shape}) must be divisible by the "
            f"{num_devices} devices of {axis_name=}; pad to {padded} tokens"
        )
    expected = (*batch, num_tokens // num_devices, hidden_size)
    if residual.shape != expected:
        raise ValueError(
            f"residual must be the token shard of one of {num_devices} devices, {expected} for "
            f"partial {partial.shape}, got {residual.shape}; split axis -2 by {axis_name!r} in "
            "the in_specs of jax.shard_map"
        )
