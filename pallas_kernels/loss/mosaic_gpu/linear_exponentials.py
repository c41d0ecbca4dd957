"""Exponentials of `x @ weight.T`, stored relative to an offset, with statistics; for Hopper.

`linear_kernel.py` describes the kernel. `exponentials.py` makes dlogits from its result.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.gpu.hopper_gemm import Config
from pallas_kernels.loss.layout import Embedding, WeightLayout, sizes
from pallas_kernels.loss.mosaic_gpu import linear_kernel
from pallas_kernels.loss.mosaic_gpu.linear_kernel import Storing, bytes_to_store
from pallas_kernels.loss.mosaic_gpu.linear_launch import main_loop
from pallas_kernels.loss.mosaic_gpu.running_statistics import Running, lowest_to_inf
from pallas_kernels.loss.mosaic_gpu.stored_layouts import Stored


class Exponentials(NamedTuple):
    """Exponentials and statistics of the logits of each token, relative to the token's offset.

    Attributes:
      values: Exponentials `2^(logit · log2(e) - offset)`, times the scale if there is one, in the
        dtype of `x`; 0 in the padding of the columns. `[T, V]`, or as `Stored` says.
      sum_exp: Sum of the exponentials before scale and rounding.
      of_label: Exponential of the label before scale and rounding; 0 if the label is no column.
      label_logit: Logit of the label, as in `LogitStatistics`.
      largest: Largest logit, as in `LogitStatistics`.
      largest_before: Largest logit before the label's column, as in `LogitStatistics`.
      weighted: Sum of the exponentials times their exponents, before scale and rounding; None if it
        was not asked for.
    """

    values: Float[Array, "rows columns"]
    sum_exp: Float[Array, " T"]
    of_label: Float[Array, " T"]
    label_logit: Float[Array, " T"]
    largest: Float[Array, " T"]
    largest_before: Float[Array, " T"]
    weighted: Float[Array, " T"] | None


class Repetition(NamedTuple):
    """Second call of `linear_exponentials` for the same operands.

    Attributes:
      found: Result of the first call; the second writes over its `values`.
      is_needed: Whether the second call is needed. If not, its kernel ends at once, and the result
        is `found`.
    """

    found: Exponentials
    is_needed: Bool[Array, ""]


def linear_exponentials(
    x: Float[Array, "T D"],
    weight: Embedding,
    labels: Int[Array, " T"],
    offset: Float[Array, " T"],
    *,
    num_columns: int,
    bias: Float[Array, " _"] | None = None,
    softcap: float | None = None,
    temperature: float = 1.0,
    scale: Float[Array, " T"] | None = None,
    slope: Float[Array, " T"] | None = None,
    with_weighted: bool = False,
    repetition: Repetition | None = None,
    stored: Stored | None = None,
    weight_layout: WeightLayout = "vd",
    config: Config | None = None,
) -> Exponentials:
    """Exponentials of `x @ weight.T` relative to an offset, and statistics of the logits.

    The GEMM stores exponentials instead of logits, through shared memory, 64 columns at a time.

    Above 80 lines, because it documents many arguments.

    Args:
      x: Hidden states, bfloat16 or float16.
      weight: Entries of the output embedding, in the dtype of `x`; V, a multiple of 128, is
        `num_columns` with padding.
      labels: Column of each token; may be any number.
      offset: Offset of each token's exponents, in units of log 2.
      num_columns: Number of columns without padding.
      bias: Bias of the logits without padding, added in float32.
      softcap: Bound c of `c · tanh(z / c)`. With it `values` are also multiplied by the derivative
        of the bounded logit, `1 - tanh²(z / c)`, if there is a scale.
      temperature: Divisor of the logits after the softcap. Exponents and statistics are of the
        result.
      scale: Factor of each token's `values` before rounding. A factor of 0 makes them 0, whatever
        the logits are.
      slope: Factor of each exponent, in units of log 2, which is added to the scale. Both factors
        must be 0 to make `values` 0, whatever the logits are. Needs a scale.
      with_weighted: Whether to compute `weighted`.
      repetition: Result of a first call, and whether a second is needed; None for a first call.
      stored: Layout of `values`, with padding of the columns; None for `[T, V]`.
      weight_layout: Layout of `weight`.
      config: Launch parameters; chosen if None.

    Raises:
      NotImplementedError: `linear_launch.unsupported_reason` gives a reason.
      ValueError: The configuration does not fit the device.
    """
    padded_columns, _ = sizes(weight, weight_layout)
    loop, x, weight = main_loop(
        x, weight, weight_layout, config, padded_columns, bytes_to_store(x.dtype)
    )
    storing = Storing(offset, scale, slope, stored)
    if repetition is not None:
        storing = storing._replace(values=repetition.found.values, is_needed=repetition.is_needed)
    running, values = linear_kernel.run(
        loop,
        x,
        weight,
        labels,
        start=Running.start(with_weighted=with_weighted, with_of_label=True),
        num_columns=num_columns,
        bias=bias,
        softcap=softcap,
        temperature=temperature,
        storing=storing,
    )
    # The order is that of `Running`. One reduction takes the place of four. The maximum of the
    # weighted sums is not used.
    largest, label_logit, largest_before, *_, of_label = jnp.max(running[1:], axis=1)
    found = Exponentials(
        values=values if stored is not None else values[: loop.num_rows],
        sum_exp=jnp.sum(running[0], axis=0),
        of_label=of_label,
        label_logit=lowest_to_inf(label_logit),
        largest=lowest_to_inf(largest),
        largest_before=lowest_to_inf(largest_before),
        weighted=jnp.sum(running[4], axis=0) if with_weighted else None,
    )
    if repetition is None:
        return found
    select = lambda new, old: jnp.where(repetition.is_needed, new, old)
    return Exponentials(found.values, *jax.tree.map(select, found[1:], repetition.found[1:]))
