"""The gradient of some rows of the weight, `dlogits.T @ x`, as a Mosaic GPU kernel; for Hopper.

XLA's GEMM is as fast, but as a rule does not write its result into a part of a larger array: while
Triton and cuBLAS compete for a product (`xla_gpu_enable_triton_gemm`, on by default), it is a
float32 array of its own, which is then copied, or cast, to its place (JAX 0.11.2). In the loop of
the loss, 2048 rows of 4096 with 8192 tokens on an H100, that takes 182 us and 20 for the copy. The
result of a Mosaic kernel XLA has written where it belongs, in the dtype that it has there; this one
takes 178.

Both operands have the tokens for rows, so wgmma reads both transposed from shared memory, which for
types of 16 bits costs nothing. The loop is that of `pallas_kernels/hopper_gemm.py`; results leave a
warpgroup by way of shared memory, 128 bytes of each row at a time, one part while the next is made.

Not for sums over chunks of tokens. With TMA, which can add what it stores, they take 1.10 times a
product that only stores at 2048 x 128256 x 4096, and 1.8 at 1024 x 256000 x 2304; cuBLAS' 1.02 to
1.09, and 1.47.
"""

import math

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from pallas_kernels import hopper_gemm
from pallas_kernels.hopper_gemm import BLOCK_M, TILE_K, TILE_M, WARPGROUPS, Config, MainLoop
from pallas_kernels.mosaic_gpu import Device, at_aligned_addresses, target_device

_LINE_BYTES = 128  # of a row, that go through shared memory at a time
_TILES = (256, 192, 128)  # columns, of which one must divide x: TMA does not cut a tile there
_STAGES = {256: 4, 192: 4, 128: 6}
_RESULTS = tuple(map(jnp.dtype, (jnp.float32, jnp.bfloat16, jnp.float16)))


def default_config(num_tokens: int, num_rows: int, hidden_size: int, device: Device) -> Config:
    """The launch parameters to use: derived, but for clusters.

    Two blocks that share `x` are as fast as one by one if nothing runs before and after, and take
    195 us for 178 in the loop of the loss (8192 x 2048 x 4096, H100).
    """
    tile_n = next(n for n in _TILES if hidden_size % n == 0)
    return hopper_gemm.default_config(
        num_rows,
        hidden_size,
        num_tokens,
        device,
        tile_n=tile_n,
        stages=_STAGES[tile_n],
        max_cluster=1,
    )


def unsupported_reason(dlogits: jax.Array, x: jax.Array, dtype: DTypeLike) -> str | None:
    """Why the kernel cannot run these arguments on the default device, or None if it can."""
    reason = hopper_gemm.unsupported_reason(target_device(), dlogits, x)
    if reason is None and all(x.shape[1] % n for n in _TILES):
        reason = f"x of shape {x.shape}: its rows are a multiple of none of {_TILES}"
    if reason is None and dlogits.shape[1] % BLOCK_M:
        reason = f"dlogits of shape {dlogits.shape}: their rows are no multiple of {BLOCK_M}"
    if reason is None and jnp.dtype(dtype) not in _RESULTS:
        reason = f"the result is {jnp.dtype(dtype)}, not {' or '.join(map(str, _RESULTS))}"
    return reason


def weight_gradient(
    dlogits: Float[Array, "T V"],
    x: Float[Array, "T D"],
    *,
    dtype: DTypeLike,
    config: Config | None = None,
) -> Float[Array, "V D"]:
    """`dlogits.T @ x`, added up in float32 and rounded once.

    Args:
      dlogits: bfloat16 or float16; V is a multiple of 128.
      x: of the dtype of `dlogits`; D is a multiple of 128 or 192.
      dtype: of the result, float32, bfloat16 or float16.
      config: launch parameters; chosen if None.

    Raises:
      NotImplementedError: `unsupported_reason` has one.
      ValueError: the configuration does not fit the device or the sizes.
    """
    if (reason := unsupported_reason(dlogits, x, dtype)) is not None:
        raise NotImplementedError(f"implementation='mosaic_gpu': {reason}")
    (num_tokens, num_rows), hidden_size, dtype = dlogits.shape, x.shape[1], jnp.dtype(dtype)
    device = target_device()
    if config is None:
        config = default_config(num_tokens, num_rows, hidden_size, device)
    if num_rows % (BLOCK_M * config.cluster) or hidden_size % config.tile_n:
        raise ValueError(
            f"{config}: clusters have {BLOCK_M * config.cluster} of {num_rows} rows and "
            f"{config.tile_n} of {hidden_size} columns, which must divide them"
        )
    # A copy, if the tokens are not a multiple of 64.
    padding = (0, -num_tokens % TILE_K), (0, 0)
    operands = at_aligned_addresses((jnp.pad(dlogits, padding), jnp.pad(x, padding)))
    loop = MainLoop(
        config=config,
        num_rows=num_rows,
        num_columns=hidden_size,
        depth=len(operands[0]),
        dtype=x.dtype,
        a_layout="KM",
        b_layout="KN",
    )
    width = _LINE_BYTES // dtype.itemsize
    num_pieces = config.tile_n // width
    pieces = WARPGROUPS, 2, TILE_M, width
    loop.check_fits(device, extra_bytes=dtype.itemsize * math.prod(pieces))

    def kernel(dlogits_gmem, x_gmem, dweight_gmem, pieces_smem, *scratch):
        def tile(row, column, multiply):
            (dweight,) = multiply()
            for i in range(num_pieces):
                smem = pieces_smem.at[jax.lax.axis_index("warpgroup"), i % 2]
                # Until only the store from the other slot may still be reading. With an odd number
                # a tile, the next starts with the slot that this one ends with.
                plgpu.wait_smem_to_gmem(1 - num_pieces % 2, wait_read_only=True)
                smem[...] = dweight[:, i * width : (i + 1) * width].astype(dtype)
                plgpu.commit_smem()
                place = pl.ds(row, TILE_M), pl.ds(column + i * width, width)
                plgpu.copy_smem_to_gmem(smem, dweight_gmem.at[place])

        loop.run(
            dlogits_gmem,
            [x_gmem],
            scratch,
            tile=tile,
            end=lambda: plgpu.wait_smem_to_gmem(0, wait_read_only=True),
        )

    return plgpu.kernel(
        kernel,
        out_type=jax.ShapeDtypeStruct((num_rows, hidden_size), dtype),
        **loop.launch,
        scratch_types=[plgpu.SMEM(pieces, dtype), *loop.scratch_types],
        kernel_name="weight_gradient",
    )(*operands)
