"""Logits of some columns of the vocabulary: what chunks of tokens and of columns share."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.folding import fold_chunks
from pallas_kernels.gpu.kernel import varying_axes
from pallas_kernels.loss import xla
from pallas_kernels.loss.layout import (
    Embedding,
    OneArray,
    WeightLayout,
    column_axis,
    pad_columns,
    padding,
    sizes,
)
from pallas_kernels.loss.low_rank import TwoParts
from pallas_kernels.loss.mosaic_gpu import linear_launch, statistics
from pallas_kernels.loss.mosaic_gpu import logits as logits_kernel
from pallas_kernels.loss.plan import Settings
from pallas_kernels.loss.token_loss import IGNORED, LogitStatistics, combine


class Gradients(NamedTuple):
    """Gradients of the coefficient-weighted sum of the losses; `dbias` is None without a bias."""

    dx: Float[Array, "T D"]
    dweight: OneArray
    dbias: Float[Array, " V"] | None


class Columns(NamedTuple):
    """Columns of logits: all of this device's, or a chunk.

    Attributes:
      weight: Entries of the embedding in the dtype of x. For the kernels, zeros follow up to a
        multiple of 128 entries.
      layout: Layout of the weight.
      bias: Bias of the columns, if there is one.
      num_columns: Number of columns without the padding.
      logits_dtype: Dtype of the logits in memory.
    """

    weight: Embedding
    layout: WeightLayout
    bias: Float[Array, " _"] | None
    num_columns: int
    logits_dtype: Any

    @classmethod
    def make(cls, settings: Settings, weight, bias) -> "Columns":
        """The columns with these entries of the embedding, which are in the dtype of x."""
        layout = settings.weight_layout
        num_columns, _ = sizes(weight, layout)
        if settings.implementation == "xla":
            return cls(weight, layout, bias, num_columns, jnp.float32)
        # A copy, if the vocabulary is not a multiple of 128: 251 MiB at 32001 x 4096.
        missing = padding(num_columns)
        weight = pad_columns(weight, missing, layout) if missing else weight
        return cls(weight, layout, bias, num_columns, weight.dtype)

    def logits(self, x: Float[Array, "T D"]) -> Float[Array, "T Vp"]:
        """The logits without the bias."""
        return product(f"td,{self.layout}->tv", x, self.weight, self.logits_dtype)

    def without_padding(self, gradient: jax.Array) -> jax.Array:
        """The gradient of the weight or the bias without the entries of the padding."""
        axis = column_axis(self.layout)
        return jax.lax.slice_in_dim(gradient, 0, self.num_columns, axis=axis)

    def finished(self, sums: Any, scale: Float[Array, ""] | None) -> Any:
        """Sums of the gradients of weight and bias: without padding, and `rescaled`."""
        return jax.tree.map(lambda g: rescaled(self.without_padding(g), scale), sums)


def product(subscripts: str, rows, matrix, dtype) -> jax.Array:
    """`einsum` that rounds only its result to `dtype`, of an embedding in one or two parts.

    For a single row XLA for GPUs makes no GEMM: it multiplies in the dtype of the result before it
    adds up in float32 (JAX 0.11.2). So a single row asks for float32, and is rounded afterwards.
    """
    if isinstance(matrix, TwoParts):
        parts = matrix.frozen, matrix.low_rank
        if subscripts.endswith("d"):
            products = [product(subscripts, rows, part, dtype) for part in parts]
            return jnp.concatenate(products, axis=1)
        pairs = zip(matrix.split(rows), parts, strict=True)
        found = [product(subscripts, of_part, part, jnp.float32) for of_part, part in pairs]
        return (found[0] + found[1]).astype(dtype)
    result = jnp.float32 if len(rows) == 1 else dtype
    found = jnp.einsum(subscripts, rows, matrix, preferred_element_type=result)
    return found.astype(dtype)


def weight_product(dz, x, weight: Embedding, layout: WeightLayout, dtype) -> jax.Array:
    """The summand of `dweight` of some tokens; of the low-rank part alone where W is frozen."""
    if isinstance(weight, TwoParts):
        _, x = weight.split(x)
    return jnp.einsum(f"tv,td->{layout}", dz, x, preferred_element_type=dtype)


def statistics_of_linear(
    settings: Settings,
    x: Float[Array, "T D"],
    weight: Embedding,
    bias: Float[Array, " V"] | None,
    labels: Int[Array, " T"],
    chunk_size: int,
) -> LogitStatistics:
    """Statistics of these columns without a gradient: one GEMM.

    The kernel has no logits in memory. Where it cannot run, the logits of `chunk_size` tokens are.
    """
    layout = settings.weight_layout
    is_kernel = settings.implementation == "mosaic_gpu"
    if is_kernel and linear_launch.unsupported_reason(x, weight, layout) is None:
        found, _, _ = statistics.linear_statistics(
            x,
            weight,
            bias,
            labels,
            softcap=settings.options.logit_softcap,
            with_total=settings.options.label_smoothing != 0,
            weight_layout=layout,
            config=settings.config.linear,
        )
        return found

    columns = Columns.make(settings, weight, bias)

    def one_chunk(chunk, _):
        x, labels = chunk
        return None, loss_of_logits(settings, columns, columns.logits(x), labels)[0]

    return fold_chunks(one_chunk, (x, labels), chunk_size)[1]


def loss_of_logits(
    settings: Settings, columns, logits, labels, coefficients=None, lse=None, vocab_size=None
) -> tuple[Any, Any]:
    """`(statistics, dlogits)`, either None if it was not asked for."""
    of_columns: dict[str, Any] = {
        "num_columns": columns.num_columns,
        "coefficients": coefficients,
        "lse": lse,
        "vocab_size": vocab_size,
        "bias": columns.bias,
    }
    if settings.implementation == "xla":
        return xla.loss_of_logits(logits, labels, settings.options, **of_columns)
    return logits_kernel.loss_of_logits(
        logits, labels, settings.options, config=settings.config.logits, **of_columns
    )


def scale_for(dtype: jnp.dtype, *factors: Float[Array, " T"]) -> Float[Array, ""] | None:
    """The number to divide factors of dlogits of this dtype by; None if it is 1.

    The factors of a mean are far below 1, and may take dlogits below the smallest number of
    float16. Divided by their maximum, the factors keep dlogits clear of it. The exponents of the
    other dtypes reach far enough.
    """
    if dtype != jnp.float16:
        return None
    found = jnp.abs(jnp.stack(factors))
    largest = jnp.max(jnp.where(jnp.isfinite(found), found, 0.0), initial=0.0)
    return jnp.where(largest > 0, largest, 1.0)


def scaled_coefficients(x, coefficients, labels, vocab_size):
    """`(coefficients / scale, scale)`; `scale` is None where it would be 1.

    A label that is neither ignored nor a column of the vocabulary makes its coefficient NaN.
    """
    wrong = (labels != IGNORED) & ((labels < 0) | (labels >= vocab_size))
    with_nan = jnp.where(wrong, jnp.nan, coefficients)
    scale = scale_for(x.dtype, coefficients)
    return with_nan if scale is None else with_nan / scale, scale


def rescaled(gradient, scale):
    """The gradient for `coefficients`, from the one for `coefficients / scale`."""
    if scale is None:
        return gradient
    return (gradient.astype(jnp.float32) * scale).astype(gradient.dtype)


def rows_that_count(x, coefficients):
    """`x` with zeros for the tokens whose coefficient is 0.

    Their dlogits are 0, but 0 times NaN is NaN, in all of `dweight`. A GEMM reads its operand from
    memory, so this makes a copy. The copy of a chunk of 2048 x 4096 in 16 bits takes 16 MiB, beside
    501 MiB of logits. Its reads and writes take about 10 us of 8 ms on an H100 (computed). The
    exponentials need no copy: they multiply `x` with factors anyway (`exponentials.scaled`).
    """
    return jnp.where(coefficients[:, None] == 0, 0, x)


def place_in_vocabulary(settings: Settings, weight) -> tuple[Any, int]:
    """`(first column, size of the whole vocabulary)` of this device's weight."""
    axes = settings.vocab_axes
    num_columns, _ = sizes(weight, settings.weight_layout)
    if not axes:
        return 0, num_columns
    return jax.lax.axis_index(axes) * num_columns, num_columns * jax.lax.axis_size(axes)


def over_axes(settings: Settings, found: LogitStatistics) -> LogitStatistics:
    """Statistics of the whole vocabulary from those of each device's part: 20 bytes a token."""
    return combine(of_all_parts(settings, found)) if settings.vocab_axes else found


def of_all_parts[T](settings: Settings, found: T) -> T:
    """Numbers of each token from all devices of a split vocabulary, along a new axis 0."""
    leaves, structure = jax.tree.flatten(found)
    stacked = jnp.stack(leaves)
    # Where types say over which axes an array varies, they say that the result does not.
    to = "invarying" if varying_axes(stacked) else "varying"
    parts = jax.lax.all_gather(stacked, settings.vocab_axes, axis=1, to=to)
    return jax.tree.unflatten(structure, list(parts))
