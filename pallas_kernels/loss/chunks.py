"""Linear cross-entropy with a part of the logits in memory at a time, and its gradients.

Why this exists. `x @ weight.T` for a 128k vocabulary is the largest buffer of a training step: 8192
tokens need 2.1 GB in bfloat16, 4.2 GB in float32, again for its gradient, and automatic
differentiation computes it a second time or keeps it.

*Token chunks.* A loop walks over chunks of tokens; while a chunk's logits exist, its loss,
its `dx` and its share of `dweight` are formed from them (with `mosaic_gpu`, in bfloat16 and without
bias, label smoothing and softcap, from their exponentials: `exponentials.py`). A loss with its
gradients takes three GEMMs, and the backward multiplies by the cotangent, which is 1 for a loss.
(Liger-Kernel's fused linear cross-entropy, https://arxiv.org/abs/2410.10989, introduced gradients
in the forward.) The first chunk's product starts the sum of `dweight`, the others are added in
place by their GEMM: each reads and writes `dweight` once, which is why chunks should be large.
Losses that are not added up (`reduction="none"`) have a cotangent each, which the forward does not
know. So the forward makes the losses alone, and the loop runs in the backward: four GEMMs.

*In place.* The first chunk does not have to be small: as long as nothing is in `dweight`, it has
the memory for the exponentials of `2D` tokens (`in_place.py`). If these are all tokens, or all but
a chunk, nothing is added up at all: three GEMMs, and the least memory of them.

*Vocabulary chunks.* The forward keeps the logsumexp of each token; the backward computes the logits
of a slice of the vocabulary again, for all tokens. Four GEMMs, any cotangent, and each row of
`dweight` is written once, as it is stored, with `mosaic_gpu` by a GEMM whose result XLA has put in
its place (`products.py`). `dx` is the sum over the chunks, in float32.

*Both.* Losses and `dx` by token chunks, then `dweight` by vocabulary chunks, with the logsumexp
that is known by then. Four GEMMs, but nothing is added up over chunks, which takes the least
memory: before `dweight` begins, XLA has the logits of a token chunk in its place, and after that
there are those of a vocabulary chunk, which can be small.

*Loss alone.* One GEMM; with `mosaic_gpu` on Hopper no logits in memory at all
(`linear_statistics.py`).

Numerics. The GEMMs take operands of `x.dtype` (a weight of another dtype is rounded to it once) and
accumulate in float32. Logits are float32 with `xla`. With `mosaic_gpu` those in memory are rounded
to `x.dtype`, as in PyTorch; those of a loss alone, and those whose exponentials are stored, are
float32 that never are in memory. Softmax and losses are float32. Coefficients, with them a mean's
1/N, are multiplied in float32 before dlogits are rounded once, to `x.dtype`, as the operand of two
GEMMs (`exponentials.py` has its own order); with `mosaic_gpu`, `dbias` sums what was rounded.
`dweight` accumulates in `accum_dtype` and is rounded once, and `dx` is rounded once. A cotangent
other than 1 multiplies them in float32, and they are rounded again.
"""

import dataclasses
import functools
import math
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.derivatives import not_differentiable
from pallas_kernels.folding import fold_chunks, zeros
from pallas_kernels.gpu.arrays import at_aligned_addresses, uninitialized
from pallas_kernels.loss import xla
from pallas_kernels.loss.config import Config
from pallas_kernels.loss.mosaic_gpu import exponentials, in_place, products
from pallas_kernels.loss.mosaic_gpu import logits as logits_kernel
from pallas_kernels.loss.mosaic_gpu import statistics as linear_statistics
from pallas_kernels.loss.token_loss import (
    LogitStatistics,
    LossOptions,
    TokenLosses,
    combine,
    finite_where_not_counted,
    losses_of,
)

_COLUMNS_AGAIN = 512  # 4 MiB of a weight with D = 4096
_WIDTH = 128  # the least that our GEMM of dweight takes


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """All that is static.

    Attributes:
      options: of the loss.
      implementation: what makes losses and gradients of logits.
      chunk_size: tokens whose logits exist at a time; None: vocabulary chunks alone.
      vocab_chunk_size: columns whose logits exist at a time; None: token chunks alone. Not both
        sizes are None.
      accum_dtype: dtype in which token chunks add up `dweight`.
      vocab_axis: axis of the mesh, inside of `jax.shard_map`, over which the vocabulary is split.
      config: launch parameters.
    """

    options: LossOptions
    implementation: Literal["xla", "mosaic_gpu"]
    chunk_size: int | None
    vocab_chunk_size: int | None
    in_place: in_place.Extent | None
    accum_dtype: jnp.dtype
    vocab_axis: str | None
    config: Config

    def by_tokens(self, num_tokens: int) -> bool:
        """Whether gradients are made with the losses, of some tokens after the others."""
        all_in_place = self.in_place is not None and self.in_place.num_tokens == num_tokens
        return all_in_place or self.chunk_size is not None

    def for_gradients(self, *, of_weight: bool) -> "Plan":
        """Without `dweight` its memory would be taken for nothing."""
        return self if of_weight else dataclasses.replace(self, in_place=None)


class Gradients(NamedTuple):
    """Of the coefficient-weighted sum of the losses; `dbias` is None without a bias."""

    dx: Float[Array, "T D"]
    dweight: Float[Array, "V D"]
    dbias: Float[Array, " V"] | None


# Two differentiable functions. Only the losses carry a gradient; the other fields of `TokenLosses`
# are metrics, which the caller must not differentiate.


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def weighted_loss_sum(
    plan: Plan,
    x: Float[Array, "T D"],
    weight: Float[Array, "V D"],
    bias: Float[Array, " V"] | None,
    coefficients: Float[Array, " T"],
    labels: Int[Array, " T"],
) -> tuple[Float[Array, ""], TokenLosses]:
    """`sum(coefficients · loss)`, float32, and the losses.

    A token whose coefficient is 0 adds nothing to sum and gradients, whatever its `x` holds. The
    coefficients of ignored tokens must be 0.
    """
    losses = token_losses(plan, x, weight, bias, labels)
    losses = finite_where_not_counted(losses, coefficients)
    return jnp.sum(coefficients * losses.loss), losses


def _weighted_loss_sum_fwd(plan, *primals):
    x, weight, bias, coefficients, labels = jax.tree.map(lambda a: a.value, primals)
    plan = plan.for_gradients(of_weight=primals[1].perturbed)
    if plan.by_tokens(len(labels)):
        losses, gradients = _by_token_chunks(plan, x, weight, bias, coefficients, labels)
        losses = finite_where_not_counted(losses, coefficients)
        # Empty arrays carry the dtypes of the gradients.
        like = jax.tree.map(lambda a: a[:0], (x, weight, bias))
        saved = losses.loss, (gradients, like), None
    else:
        losses = _losses(plan, x, weight, bias, labels)
        losses = finite_where_not_counted(losses, coefficients)
        saved = losses.loss, None, (x, weight, bias, coefficients, labels, losses.lse)
    return (jnp.sum(coefficients * losses.loss), losses), saved


def _weighted_loss_sum_bwd(plan, saved, cotangents):
    of_loss = _array(cotangents[0])
    cotangent = _whole_cotangent(plan, of_loss)
    loss, made, to_make = saved
    if made is not None:
        gradients, (x, weight, bias) = made
        gradients = jax.tree.map(lambda g: g.astype(jnp.float32) * cotangent, gradients)
        gradients = _cast(gradients, x, weight, bias)
    else:
        x, weight, bias, coefficients, labels, lse = to_make
        coefficients *= cotangent
        gradients = _by_vocab_chunks(plan, x, weight, bias, coefficients, labels, lse)
    # Unlike the others this is no sum over parts of the vocabulary: the share is what is wanted.
    return *gradients, of_loss * loss, None


# Symbolic zeros, here and below, say whether the gradient of the weight is asked for.
weighted_loss_sum.defvjp(_weighted_loss_sum_fwd, _weighted_loss_sum_bwd, symbolic_zeros=True)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def token_losses(
    plan: Plan,
    x: Float[Array, "T D"],
    weight: Float[Array, "V D"],
    bias: Float[Array, " V"] | None,
    labels: Int[Array, " T"],
) -> TokenLosses:
    """The loss of every token, for any cotangent; the backward computes the logits again."""
    return _losses(plan, x, weight, bias, labels)


def _token_losses_fwd(plan, *primals):
    x, weight, bias, labels = jax.tree.map(lambda a: a.value, primals)
    losses = _losses(plan, x, weight, bias, labels)
    of_weight = () if primals[1].perturbed else None  # as the structure of what is saved
    return losses, (x, weight, bias, labels, losses.lse, of_weight)


def _token_losses_bwd(plan, saved, cotangents):
    x, weight, bias, labels, lse, of_weight = saved
    plan = plan.for_gradients(of_weight=of_weight is not None)
    coefficients = _whole_cotangent(plan, _array(cotangents.loss))
    coefficients = jnp.where(labels == plan.options.ignore_index, 0.0, coefficients)
    if plan.by_tokens(len(labels)):
        _, gradients = _by_token_chunks(plan, x, weight, bias, coefficients, labels)
        gradients = _cast(gradients, x, weight, bias)
    else:
        gradients = _by_vocab_chunks(plan, x, weight, bias, coefficients, labels, lse)
    return *gradients, None


token_losses.defvjp(_token_losses_fwd, _token_losses_bwd, symbolic_zeros=True)


def _array(cotangent: Any) -> jax.Array:
    """Of losses, which are float32; also what a symbolic zero stands for."""
    if isinstance(cotangent, jax.custom_derivatives.SymbolicZero):
        return jnp.zeros(cotangent.shape, jnp.float32)
    return cotangent


def _whole_cotangent(plan: Plan, cotangent: jax.Array) -> jax.Array:
    """Each device of the axis has a loss that is the same, and a share of its cotangent."""
    return cotangent if plan.vocab_axis is None else jax.lax.psum(cotangent, plan.vocab_axis)


def _cast(gradients: Gradients, x, weight, bias) -> Gradients:
    dbias = None if gradients.dbias is None else gradients.dbias.astype(bias.dtype)
    return Gradients(gradients.dx.astype(x.dtype), gradients.dweight.astype(weight.dtype), dbias)


def _losses(
    plan: Plan,
    x: Float[Array, "T D"],
    weight: Float[Array, "V D"],
    bias: Float[Array, " V"] | None,
    labels: Int[Array, " T"],
) -> TokenLosses:
    """One GEMM."""
    x, weight, bias = _once(plan, (x, weight, bias))
    first_column, vocab_size = _place_in_vocabulary(plan, weight)
    local_labels = labels - first_column

    def statistics(part, start):
        weight, bias = part
        return None, _statistics(plan, x, weight.astype(x.dtype), bias, local_labels - start)

    if plan.chunk_size is not None:
        found = statistics((weight, bias), 0)[1]
    else:
        assert plan.vocab_chunk_size is not None
        parts = fold_chunks(statistics, (weight, bias), plan.vocab_chunk_size, stack=True)[1]
        found = combine(parts)
    return losses_of(_over_axis(plan, found), labels, plan.options, vocab_size)


def _statistics(plan: Plan, x, weight, bias, labels) -> LogitStatistics:
    """Of these columns, without a gradient."""
    if (
        plan.implementation == "mosaic_gpu"
        and linear_statistics.unsupported_reason(x, weight) is None
    ):
        return linear_statistics.linear_statistics(
            x,
            weight,
            bias,
            labels,
            softcap=plan.options.logit_softcap,
            with_total=plan.options.label_smoothing != 0,
            config=plan.config.linear,
        )

    columns = _Columns.make(plan, weight, bias)

    def one_chunk(chunk, _):
        x, labels = chunk
        return None, _loss_of_logits(plan, columns, columns.logits(x), labels)[0]

    return fold_chunks(one_chunk, (x, labels), plan.chunk_size or max(1, len(x)))[1]


def _by_token_chunks(
    plan: Plan,
    x: Float[Array, "T D"],
    weight: Float[Array, "V D"],
    bias: Float[Array, " V"] | None,
    coefficients: Float[Array, " T"],
    labels: Int[Array, " T"],
) -> tuple[TokenLosses, Gradients]:
    """Losses and gradients of `sum(coefficients · loss)`: three GEMMs, or four for both chunks."""
    x, weight, bias, coefficients = _once(plan, (x, weight, bias, coefficients))
    first_column, vocab_size = _place_in_vocabulary(plan, weight)
    columns = _Columns.make(plan, weight.astype(x.dtype), bias)
    with_dweight = plan.in_place is not None or plan.vocab_chunk_size is None
    given = coefficients
    coefficients, scale = _kernel_coefficients(plan, x, coefficients, labels, vocab_size)
    arrays = x, labels, coefficients

    def one_chunk(chunk, _):
        x, labels, coefficients = chunk
        logits = columns.logits(x)
        local = labels - first_column
        if plan.vocab_axis is None:
            found, dlogits = _loss_of_logits(plan, columns, logits, local, coefficients)
        else:
            found, _ = _loss_of_logits(plan, columns, logits, local)
            found = _over_axis(plan, found)
            _, dlogits = _loss_of_logits(
                plan, columns, logits, local, coefficients, found.lse, vocab_size
            )
        losses = losses_of(found, labels, plan.options, vocab_size)
        dz = dlogits.astype(x.dtype)
        dx = _product("tv,vd->td", dz, columns.weight, dx_dtype)
        if not with_dweight:
            return None, (losses, dx)
        dbias = None if bias is None else jnp.sum(dlogits.astype(jnp.float32), axis=0)
        counted = _rows_that_count(x, coefficients)
        dweight = jnp.einsum("tv,td->vd", dz, counted, preferred_element_type=plan.accum_dtype)
        return (dweight, dbias), (losses, dx)

    dx_dtype = x.dtype if scale is None else jnp.float32
    if plan.vocab_axis is None and _has_exponentials(plan, x, columns):
        one_chunk = functools.partial(_one_chunk_by_exponentials, plan, columns, with_dweight)
    chunk_size, first = plan.chunk_size, None
    if plan.in_place is not None:
        first_body = functools.partial(_first_in_place, plan, plan.in_place, columns)
        first = plan.in_place.num_tokens, first_body
        chunk_size = plan.in_place.chunk_size or len(x)
    assert chunk_size is not None
    sums, (losses, dx) = fold_chunks(one_chunk, arrays, chunk_size, first=first)
    dx = _rescaled(dx, scale)
    if with_dweight:
        dweight, dbias = jax.tree.map(lambda g: _rescaled(g[: columns.num_columns], scale), sums)
    else:
        _, dweight, dbias = _by_vocab_chunks(
            plan, x, weight, bias, given, labels, losses.lse, with_dx=False
        )
    return losses, Gradients(dx, dweight, dbias)


def _has_exponentials(plan: Plan, x, columns: "_Columns") -> bool:
    return (
        plan.implementation == "mosaic_gpu"
        and columns.bias is None
        and exponentials.unsupported_reason(x, columns.weight, plan.options) is None
    )


def _first_in_place(plan: Plan, extent: in_place.Extent, columns: "_Columns", chunk):
    """As `_by_token_chunks`, of the first tokens."""
    x, labels, coefficients = chunk
    found, dx, dweight = in_place.loss_and_gradients(
        x,
        columns.weight,
        labels,
        coefficients,
        extent=extent,
        z_loss=plan.options.z_loss,
        config=plan.config,
    )
    losses = losses_of(found, labels, plan.options, columns.num_columns)
    return (dweight, None), (losses, dx)


def _one_chunk_by_exponentials(plan: Plan, columns: "_Columns", with_dweight: bool, chunk, _):
    """As in `_by_token_chunks`, for all of the vocabulary and without a bias."""
    x, labels, coefficients = chunk
    found, dz, factor = exponentials.loss_of_linear(
        x,
        columns.weight,
        labels,
        coefficients,
        num_columns=columns.num_columns,
        z_loss=plan.options.z_loss,
        config=plan.config.linear,
    )
    losses = losses_of(found, labels, plan.options, columns.num_columns)
    dx = jnp.einsum("tv,vd->td", dz, columns.weight, preferred_element_type=jnp.float32)
    dx = (dx * factor[:, None]).astype(x.dtype)
    if not with_dweight:
        return None, (losses, dx)
    scaled_x = exponentials.scaled(x, factor)
    dweight = jnp.einsum("tv,td->vd", dz, scaled_x, preferred_element_type=plan.accum_dtype)
    return (dweight, None), (losses, dx)


def _by_vocab_chunks(
    plan: Plan,
    x: Float[Array, "T D"],
    weight: Float[Array, "V D"],
    bias: Float[Array, " V"] | None,
    coefficients: Float[Array, " T"],
    labels: Int[Array, " T"],
    lse: Float[Array, " T"],
    *,
    with_dx: bool = True,
) -> tuple[Any, Any, Any]:
    """`(dx, dweight, dbias)` of `sum(coefficients · loss)`, in the dtypes of the arguments.

    Three GEMMs; without `dx`, which is None then, two.
    """
    x, weight, bias, coefficients = _once(plan, (x, weight, bias, coefficients))
    first_column, vocab_size = _place_in_vocabulary(plan, weight)
    coefficients, scale = _kernel_coefficients(plan, x, coefficients, labels, vocab_size)
    local_labels = labels - first_column
    known = exponentials.KnownSum.make(lse, coefficients, plan.options.z_loss)
    weight_dtype = weight.dtype
    if not with_dx:
        weight = weight.astype(x.dtype)  # as a whole, which is there: what made dx has used it

    def dlogits_of(part, start):
        weight, bias = part
        columns = _Columns.make(plan, weight.astype(x.dtype), bias)
        labels = local_labels - start
        if _has_exponentials(plan, x, columns):
            dlogits = exponentials.dlogits_of_linear(
                x,
                columns.weight,
                labels,
                coefficients,
                known,
                num_columns=columns.num_columns,
                config=plan.config.linear,
            )
        else:
            _, dlogits = _loss_of_logits(
                plan, columns, columns.logits(x), labels, coefficients, lse, vocab_size
            )
        return columns, dlogits

    def dweight_of(columns, dz, x):
        dtype = weight_dtype if scale is None else jnp.float32
        dweight = _rescaled(_weight_gradient(plan, dz, x, dtype), scale)
        return dweight[: columns.num_columns].astype(weight_dtype)

    def one_chunk(part, start):
        columns, dlogits = dlogits_of(part, start)
        dbias = None
        if bias is not None:
            dbias = _rescaled(jnp.sum(dlogits.astype(jnp.float32), axis=0), scale)
            dbias = dbias[: columns.num_columns].astype(bias.dtype)
        dz = dlogits.astype(x.dtype)
        dx = None
        if with_dx:
            dx = jnp.einsum("tv,vd->td", dz, columns.weight, preferred_element_type=jnp.float32)
        return dx, (dweight_of(columns, dz, x), dbias)

    assert plan.vocab_chunk_size is not None
    # Zeros are another write of dweight: 0.64 ms of 47 at 8192 x 4096 x 128256 on an H100. Without
    # them XLA would round a float32 weight as a whole instead of by chunks (1002 MiB), which has
    # been done if there is no dx to make.
    buffer = uninitialized if plan.implementation == "mosaic_gpu" and not with_dx else zeros
    dx, (dweight, dbias) = fold_chunks(
        one_chunk, (weight, bias), plan.vocab_chunk_size, buffer=buffer
    )

    # `_rows_that_count` would copy all tokens here: 64 MiB beside 43 at 8192 x 4096 x 128256 in 16
    # bits. So a loop makes `dweight` again, a few columns of x at a time, if a row that does not
    # count is not finite, and else it has no iteration. XLA copies the slices of the weight in such
    # a loop, so they are small.
    size = min(plan.vocab_chunk_size, len(weight), _COLUMNS_AGAIN)
    width = _WIDTH if x.shape[1] % _WIDTH == 0 else x.shape[1]

    def again(i, dweight):
        start = jnp.minimum(i * size, len(weight) - size)
        part = (weight, bias)
        part = jax.tree.map(lambda a: jax.lax.dynamic_slice_in_dim(a, start, size), part)
        columns, dlogits = dlogits_of(at_aligned_addresses(part), start)
        dz = dlogits.astype(x.dtype)

        def some_columns(j, dweight):
            some_x = jax.lax.dynamic_slice_in_dim(x, j * width, width, axis=1)
            found = dweight_of(columns, dz, _rows_that_count(some_x, coefficients))
            return jax.lax.dynamic_update_slice(dweight, found, (start, j * width))

        return jax.lax.fori_loop(0, x.shape[1] // width, some_columns, dweight)

    is_broken = (coefficients == 0) & ~jnp.all(jnp.isfinite(x), axis=1)
    times = jnp.where(jnp.any(is_broken), math.ceil(len(weight) / size), 0)
    dweight = jax.lax.fori_loop(0, times, again, dweight)
    return _rescaled(dx, scale).astype(x.dtype) if with_dx else None, dweight, dbias


def _weight_gradient(plan: Plan, dz, x, dtype) -> jax.Array:
    """`dz.T @ x`, rounded once."""
    if plan.implementation == "mosaic_gpu" and products.unsupported_reason(dz, x, dtype) is None:
        return products.product(
            dz,
            x,
            a_layout="KM",
            dtype=dtype,
            kernel_name="weight_gradient",
            config=plan.config.dweight,
        )
    product = jnp.einsum("tv,td->vd", dz, x, preferred_element_type=jnp.float32)
    return product.astype(dtype)


def _once(plan: Plan, arrays: Any) -> Any:
    return not_differentiable(
        f"implementation={plan.implementation!r} of linear_cross_entropy has no forward-mode and "
        "no second derivative; use implementation='reference'",
        arrays,
    )


class _Columns(NamedTuple):
    """Columns of logits: all of this device's, or a chunk.

    Attributes:
      weight: in the dtype of x, with rows of zeros where the kernel wants whole lines.
      bias: of the columns.
      num_columns: without the padding.
      logits_dtype: of the logits in memory.
    """

    weight: Float[Array, "Vp D"]
    bias: Float[Array, " V"] | None
    num_columns: int
    logits_dtype: Any

    @classmethod
    def make(cls, plan: Plan, weight, bias) -> "_Columns":
        num_columns = len(weight)
        if plan.implementation == "xla":
            return cls(weight, bias, num_columns, jnp.float32)
        # A copy, if the vocabulary is not a multiple of 128.
        padding = -num_columns % logits_kernel.LINE
        weight = jnp.pad(weight, ((0, padding), (0, 0))) if padding else weight
        return cls(weight, bias, num_columns, weight.dtype)

    def logits(self, x: Float[Array, "T D"]) -> Float[Array, "T Vp"]:
        """Without the bias."""
        return _product("td,vd->tv", x, self.weight, self.logits_dtype)


def _product(subscripts: str, rows, matrix, dtype) -> jax.Array:
    """`einsum` that rounds only its result to `dtype`.

    Of a single row XLA for GPUs makes no GEMM, but multiplies in this dtype before it adds up in
    float32 (JAX 0.11.2).
    """
    result = jnp.float32 if len(rows) == 1 else dtype
    found = jnp.einsum(subscripts, rows, matrix, preferred_element_type=result)
    return found.astype(dtype)


def _loss_of_logits(
    plan: Plan, columns, logits, labels, coefficients=None, lse=None, vocab_size=None
) -> tuple[Any, Any]:
    """`(statistics, dlogits)`, either None if it was not asked for."""
    of_columns: dict[str, Any] = {
        "num_columns": columns.num_columns,
        "coefficients": coefficients,
        "lse": lse,
        "vocab_size": vocab_size,
        "bias": columns.bias,
    }
    if plan.implementation == "xla":
        return xla.loss_of_logits(logits, labels, plan.options, **of_columns)
    return logits_kernel.loss_of_logits(
        logits, labels, plan.options, config=plan.config.logits, **of_columns
    )


def _kernel_coefficients(plan: Plan, x, coefficients, labels, vocab_size):
    """`(coefficients / scale, scale)`; `scale` is None where it would be 1.

    NaN for a label that is neither ignored nor a column of the vocabulary. Coefficients are powers
    of ten apart from 1 in a mean; divided by their maximum, the dlogits of a float16 model stay
    clear of its smallest number. The exponents of the other dtypes reach far enough.
    """
    wrong = (labels != plan.options.ignore_index) & ((labels < 0) | (labels >= vocab_size))
    with_nan = jnp.where(wrong, jnp.nan, coefficients)
    if x.dtype != jnp.float16:
        return with_nan, None
    finite = jnp.where(jnp.isfinite(coefficients), jnp.abs(coefficients), 0.0)
    largest = jnp.max(finite, initial=0.0)
    scale = jnp.where(largest > 0, largest, 1.0)
    return with_nan / scale, scale


def _rows_that_count(x, coefficients):
    """`x` with zeros for the tokens whose coefficient is 0.

    Their dlogits are 0, but 0 times NaN is NaN, in all of `dweight`. A GEMM reads its operand from
    memory, so this makes a copy. That of a chunk of 2048 x 4096 in 16 bits takes 16 MiB, beside 501
    MiB of logits. To read and write it takes about 10 us of 8 ms on an H100 (computed). The
    exponentials need no copy: they multiply `x` with factors anyway (`exponentials.scaled`).
    """
    return jnp.where(coefficients[:, None] == 0, 0, x)


def _rescaled(gradient, scale):
    """Of `coefficients`, from that of `coefficients / scale`, see `_kernel_coefficients`."""
    if scale is None:
        return gradient
    return (gradient.astype(jnp.float32) * scale).astype(gradient.dtype)


def _place_in_vocabulary(plan: Plan, weight) -> tuple[Any, int]:
    """`(first column, size of the whole vocabulary)` of this device's weight."""
    if plan.vocab_axis is None:
        return 0, len(weight)
    return jax.lax.axis_index(plan.vocab_axis) * len(weight), len(weight) * jax.lax.axis_size(
        plan.vocab_axis
    )


def _over_axis(plan: Plan, found: LogitStatistics) -> LogitStatistics:
    """Statistics of the whole vocabulary from those of each device's part: 20 bytes a token."""
    if plan.vocab_axis is None:
        return found
    parts = jax.lax.all_gather(jnp.stack(found), plan.vocab_axis, axis=1)
    return combine(LogitStatistics(*parts))
