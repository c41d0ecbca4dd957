"""Operands and main loop of the GEMM of statistics and exponentials."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels.gpu import hopper_gemm
from pallas_kernels.gpu.device import Device, target_device
from pallas_kernels.gpu.hopper_gemm import Config, MainLoop, Operand, whole_tiles
from pallas_kernels.loss.layout import Embedding, WeightLayout, sizes
from pallas_kernels.loss.low_rank import TwoParts
from pallas_kernels.loss.mosaic_gpu.stored_layouts import PIECE

# An embedding that is padded with zeros where the main loop needs it.
PaddedEmbedding = Float[Array, "some_V some_D"] | Float[Array, "some_D some_V"] | TwoParts


def default_config(num_tokens: int, vocab_size: int, hidden_size: int, device: Device) -> Config:
    """Launch parameters to use: the widest tiles that a warpgroup has registers for."""
    tile_n, stages = (192, 4) if vocab_size > 128 else (128, 6)
    return hopper_gemm.default_config(
        num_tokens, vocab_size, hidden_size, device, tile_n=tile_n, stages=stages
    )


def unsupported_reason(
    x: Operand, weight: Operand | TwoParts, weight_layout: WeightLayout = "vd"
) -> str | None:
    """Why the kernel cannot run these arguments on the default device, or None if it can."""
    operand = jax.ShapeDtypeStruct(weight.shape, weight.dtype)
    reason = hopper_gemm.unsupported_reason(target_device(), x, operand)
    vocab_size, hidden_size = sizes(weight, weight_layout)
    if reason is None and weight_layout == "dv" and (vocab_size % PIECE or hidden_size % 8):
        reason = f"weight [D, V] of shape {weight.shape} has not whole tiles of 8 rows by {PIECE}"
    return reason


def main_loop(
    x: Float[Array, "T D"],
    weight: Embedding,
    weight_layout: WeightLayout,
    config: Config | None,
    vocab_size: int,
    extra_bytes: int = 0,
) -> tuple[MainLoop, Float[Array, "some_T padded_D"], PaddedEmbedding]:
    """The main loop for these operands, and the operands padded by `whole_tiles`.

    Args:
      x: Hidden states.
      weight: Entries of the output embedding, in the dtype of `x`.
      weight_layout: Layout of `weight`.
      config: Launch parameters; chosen if None.
      vocab_size: Number of columns that the loop computes.
      extra_bytes: Bytes of shared memory that the kernel needs beside the loop.

    Raises:
      NotImplementedError: `unsupported_reason` gives a reason.
      ValueError: The configuration does not fit the device.
    """
    if (reason := unsupported_reason(x, weight, weight_layout)) is not None:
        raise NotImplementedError(f"implementation='mosaic_gpu': {reason}")
    num_tokens, hidden_size = x.shape
    device = target_device()
    if config is None:
        config = default_config(num_tokens, vocab_size, hidden_size, device)
    # If D of a `[D, V]` is no multiple of 64, TMA fills the rows that the last step lacks.
    if isinstance(weight, TwoParts):
        # Each part begins with a step in K.
        x = jnp.concatenate([whole_tiles(part) for part in weight.split(x)], axis=1)
    else:
        x = whole_tiles(x)
    weight = jax.tree.map(whole_tiles, weight) if weight_layout == "vd" else weight
    loop = MainLoop(
        config=config,
        num_rows=num_tokens,
        num_columns=vocab_size,
        depth=x.shape[1],
        dtype=x.dtype,
        b_layout="NK" if weight_layout == "vd" else "KN",
        in_turns=True,
    )
    loop.check_fits(device, extra_bytes=extra_bytes)
    return loop, x, weight
