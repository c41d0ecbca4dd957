"""Loss statistics of rows of logits, and their gradient written in place, as a Mosaic GPU kernel.

Device memory bounds the kernel: with the gradient it reads and writes each logit once, 4 bytes for
a 16-bit logit. A Llama's row of 128256 columns (250 KB) does not fit registers. So a block, which
has a multiprocessor to itself, walks over rows and makes two passes over each.

The first pass loads the row by TMA through a ring of slots in shared memory. It takes the maximum
and the sum of exponentials as slots arrive. The second pass writes the gradient. The last slots of
the row stay in shared memory for it: the whole row up to 114688 columns of 16 bits. It reads the
other slots again from the cache: at 128256 columns 132 blocks have 3.8 MB in such slots. It stores
the gradient from the same ring, and loads the next row into the slots that it frees.

All arithmetic is float32. The gradient is rounded once, to the dtype of the logits. Its entry for
the label is formed as `p - 1` in float32.

`logits_passes.py` has the body of the kernel, and `logits_ring.py` the ring.
"""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from pallas_kernels.gpu.arrays import at_aligned_addresses
from pallas_kernels.gpu.device import WARPS_PER_WARPGROUP, target_device
from pallas_kernels.gpu.kernel import gpu_kernel
from pallas_kernels.loss.mosaic_gpu.logits_config import (
    LINE,
    Config,
    RowSplit,
    check_fits,
    default_config,
)
from pallas_kernels.loss.mosaic_gpu.logits_passes import Choices, kernel
from pallas_kernels.loss.token_loss import LogitStatistics, LossOptions


def unsupported_reason(dtype: jnp.dtype) -> str | None:
    """Why the kernel cannot run logits of this dtype on the default device, or None if it can."""
    device = target_device()
    if not device.has_tma:
        return f"{device.kind} has no tensor memory accelerator, which came with Hopper"
    if dtype not in (jnp.bfloat16, jnp.float16):
        return (
            f"x and its logits are {dtype}, not bfloat16 or float16; cast x to one of these "
            "dtypes, and the weight may keep its own"
        )
    return None


# A program calls this twice, for the first chunk and for the others. JAX lowers a jitted function
# once, which takes 6 s.
@functools.partial(jax.jit, static_argnames=("options", "num_columns", "vocab_size", "config"))
def loss_of_logits(
    logits: Float[Array, "T Vp"],
    labels: Int[Array, " T"],
    options: LossOptions,
    *,
    num_columns: int,
    coefficients: Float[Array, " T"] | None = None,
    lse: Float[Array, " T"] | None = None,
    vocab_size: int | None = None,
    bias: Float[Array, " V"] | None = None,
    config: Config | None = None,
) -> tuple[LogitStatistics | None, Float[Array, "T Vp"] | None]:
    """Statistics of rows of logits, and `coefficients[t] · d loss[t] / d logits[t, v]`.

    The gradient takes the buffer of the logits. A coefficient of 0 gives a row of zeros, whatever
    the logits are.

    Above 80 lines, because it documents many arguments, and their presence decides the launch.

    Args:
      logits: Logits before bias and softcap; `Vp`, a multiple of 128, is `num_columns` with
        padding. The kernel ignores the padding and gives it a gradient of 0.
      labels: Column of each token. A label outside of `[0, num_columns)` is no column.
      options: Options of the loss.
      num_columns: Number of columns without padding.
      coefficients: Factor of each token's loss; without them there is no gradient.
      lse: Logsumexp over the whole vocabulary, if these columns are a part of it. With it the call
        returns the gradient alone.
      vocab_size: Size of the whole vocabulary, over which label smoothing spreads; `num_columns` if
        None.
      bias: Bias of the logits.
      config: Launch parameters; None takes `default_config`.
    """
    num_tokens, padded_columns = logits.shape
    with_statistics, with_gradient = lse is None, coefficients is not None
    assert with_statistics or with_gradient
    if num_tokens == 0:
        empty = jnp.zeros((0,), jnp.float32)
        found = LogitStatistics(*[empty] * len(LogitStatistics._fields))
        return found if with_statistics else None, logits if with_gradient else None
    device = target_device()
    if config is None:
        config = default_config(device, num_columns, logits.dtype)
    check_fits(config, device, logits.dtype)
    split = RowSplit.make(padded_columns // LINE, config)
    logits = logits.reshape(num_tokens, split.num_lines, LINE)
    arguments: list[Any] = [logits, labels, *(a for a in (coefficients, lse) if a is not None)]
    if bias is not None:
        # Padded to whole slots, because the kernel loads the bias past the end of the row.
        bias = jnp.pad(bias.astype(jnp.float32), (0, split.columns - len(bias)))
        arguments.append(bias.reshape(-1, LINE))
    if with_gradient:
        # XLA fuses a slice with the call that reads it. It then does not know that the call writes
        # to its operand. Where the logits were a slice, because XLA had merged the GEMMs of two
        # chunks, the gradient was never written (JAX 0.11.2 and 0.12).
        arguments = list(jax.lax.optimization_barrier(arguments))
    else:
        arguments = at_aligned_addresses(arguments)
    choices = Choices(
        options=options,
        split=split,
        num_blocks=min(device.num_sms, num_tokens),
        num_columns=num_columns,
        vocab_size=num_columns if vocab_size is None else vocab_size,
        with_statistics=with_statistics,
        with_gradient=with_gradient,
        with_bias=bias is not None,
    )
    outputs = _launch(arguments, choices, config)
    dlogits = None
    if with_gradient:
        *outputs, dlogits = outputs
        dlogits = dlogits.reshape(num_tokens, padded_columns)
    found = LogitStatistics(*at_aligned_addresses(outputs)) if with_statistics else None
    return found, dlogits


def _launch(arguments: Sequence[Array], choices: Choices, config: Config) -> Sequence[Array]:
    """The statistics, float32, and the gradient, in the dtype of the logits; both if asked for."""
    logits, split = arguments[0], choices.split
    num_statistics = len(LogitStatistics._fields) if choices.with_statistics else 0
    ring_shape = (config.slots, config.warpgroups, split.lines, LINE)
    return gpu_kernel(
        functools.partial(kernel, choices=choices),
        out_type=[jax.ShapeDtypeStruct((len(logits),), jnp.float32)] * num_statistics,
        grid=(choices.num_blocks,),
        grid_names=("block",),
        num_threads=config.warpgroups,
        thread_name="warpgroup",
        scratch_types=(
            plgpu.SMEM(ring_shape, logits.dtype),
            plgpu.Barrier(num_arrivals=1, num_barriers=config.slots * config.warpgroups),
            # Two places in turn: a warpgroup that is already at the next row must not overwrite the
            # values that a slower one still reads.
            plgpu.SMEM((2, 4, config.warpgroups, WARPS_PER_WARPGROUP), jnp.float32),
            plgpu.Barrier(num_arrivals=config.warpgroups),
        ),
        # No automatic barriers: `commit_smem` hands shared memory from lanes to TMA, and
        # synchronizes. No scratch memory: sums stay within a warp. approx_math takes the exp2 of
        # the hardware, which is right to 2^-22 and gives 0 below 2^-126. The code for smaller
        # numbers would be half of all instructions.
        compiler_params=plgpu.CompilerParams(
            approx_math=True, unsafe_no_auto_barriers=True, reduction_scratch_bytes=0
        ),
        kernel_name="loss_of_logits",
        in_place=0 if choices.with_gradient else None,
    )(*arguments)
