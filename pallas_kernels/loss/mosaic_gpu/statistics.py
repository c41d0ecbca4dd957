"""Statistics of `x @ weight.T` over the vocabulary, without the logits in memory; for Hopper.

`linear_kernel.py` describes the kernel, which gives the statistics of parts of each row. XLA
combines the parts here.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.gpu.hopper_gemm import Config
from pallas_kernels.gpu.math import LN_2, LOG2_E
from pallas_kernels.loss.layout import Embedding, WeightLayout, sizes
from pallas_kernels.loss.mosaic_gpu import linear_kernel
from pallas_kernels.loss.mosaic_gpu.linear_launch import main_loop
from pallas_kernels.loss.mosaic_gpu.running_statistics import Running, lowest_to_inf
from pallas_kernels.loss.token_loss import LogitStatistics


def linear_statistics(
    x: Float[Array, "T D"],
    weight: Embedding,
    bias: Float[Array, " _"] | None,
    labels: Int[Array, " T"],
    *,
    softcap: float | None,
    num_columns: int | None = None,
    temperature: float = 1.0,
    with_total: bool = False,
    with_entropy: bool = False,
    with_argmax: bool = False,
    weight_layout: WeightLayout = "vd",
    config: Config | None = None,
) -> tuple[LogitStatistics, Float[Array, " T"] | None, Float[Array, " T"] | None]:
    """`(statistics, entropy, argmax)` of the logits, in float32; None for what is not asked for.

    The logits are `z = (x @ weight.T + bias) / temperature`, with the softcap before the division.

    Let m be the largest logit, `S = Σ e^(z - m)` and `W = Σ e^(z - m) · (z - m)`. Then the entropy
    of the softmax is `log S - W / S` nats. The kernel adds up W beside S. If m grows by d, W
    becomes `e^-d · (W - d · S)`. Where all logits are -inf, the entropy is 0.

    The argmax is the lowest column with the largest logit, and 0 where all logits are -inf. As a
    float32 number it is exact up to 2^24.

    Args:
      x: Hidden states, bfloat16 or float16.
      weight: Entries of the output embedding, in the dtype of `x`, with or without padding.
      bias: Bias of the logits without padding, added in float32.
      labels: Column of each token. A number that is no entry of `weight` is no column.
      softcap: Bound c of `c · tanh(z / c)`, applied before the temperature.
      num_columns: Number of columns without padding; None if `weight` has no padding.
      temperature: Divisor of the logits.
      with_total: Whether to compute the sum of the logits. Otherwise it is 0.
      with_entropy: Whether to compute the entropy.
      with_argmax: Whether to compute the argmax.
      weight_layout: Layout of `weight`.
      config: Launch parameters; chosen if None.

    Raises:
      NotImplementedError: `linear_launch.unsupported_reason` gives a reason.
      ValueError: The configuration does not fit the device.
    """
    if num_columns is None:
        num_columns, _ = sizes(weight, weight_layout)
    loop, x, weight = main_loop(x, weight, weight_layout, config, num_columns)
    start = Running.start(
        with_total=with_total, with_weighted=with_entropy, with_argmax=with_argmax
    )
    found, _ = linear_kernel.run(
        loop,
        x,
        weight,
        labels,
        start=start,
        num_columns=num_columns,
        bias=bias,
        softcap=softcap,
        temperature=temperature,
        storing=None,
    )
    running: Running = jax.tree.unflatten(jax.tree.structure(start), found)
    # Where every logit is -inf, the maximum is -1e30 and the sum is 0.
    top = jnp.max(running.largest, axis=0)
    factor = jnp.exp(running.largest - top[None])
    sums = jnp.sum(running.sum_exp * factor, axis=0)
    lse = top + jnp.log(sums)
    statistics = LogitStatistics(
        lse=lse,
        label_logit=lowest_to_inf(jnp.max(running.label_logit, axis=0)),
        largest=lowest_to_inf(top),
        largest_before=lowest_to_inf(jnp.max(running.largest_before, axis=0)),
        total=jnp.sum(running.total, axis=0) if with_total else jnp.zeros_like(lse),
    )
    entropy = argmax = None
    if with_entropy:
        change = (running.largest - top[None]) * LOG2_E
        weighted = running.weighted + running.sum_exp * change
        entropy = entropy_of(sums, jnp.sum(weighted * factor, axis=0))
    if with_argmax:
        argmax = lowest_of_largest(running.largest, running.argmax)
    return statistics, entropy, argmax


def lowest_of_largest(
    largest: Float[Array, "parts *T"], argmax: Float[Array, "parts *T"]
) -> Float[Array, "*T"]:
    """The lowest argmax of the parts of a row that have its largest logit; of all parts for NaN."""
    is_less = largest < jnp.max(largest, axis=0, keepdims=True)
    return jnp.min(jnp.where(is_less, jnp.inf, argmax), axis=0)


def entropy_of(sum_exp: Float[Array, " T"], weighted: Float[Array, " T"]) -> Float[Array, " T"]:
    """The entropy of `2^u / Σ 2^u` from `Σ 2^u` and `Σ 2^u · u`; 0 where all `2^u` are 0."""
    entropy = jnp.log(sum_exp) - weighted / sum_exp * LN_2
    # Rounding of large logits may leave -1e-6 where one of them has all of the probability.
    return jnp.where(sum_exp == 0, 0.0, jnp.maximum(entropy, 0.0))
