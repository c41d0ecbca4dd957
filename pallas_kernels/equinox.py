"""Equinox modules that call the operations, for use in any Equinox model.

A module takes a sequence of tokens or a single token, so `jax.vmap(model)(batch)` works. The
operations compute all sequences of a `jax.vmap` in one call. So `grad(vmap(f))` makes one gradient
of a weight, and not one for each sequence. Weights have the names and shapes that Equinox's own
layers give them. The modules run on any mesh, as their operations do.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Integer, PRNGKeyArray

from pallas_kernels.arguments import check_sizes
from pallas_kernels.head import checked_options, logits_of_head
from pallas_kernels.implementation import Implementation
from pallas_kernels.loss import LossMetrics, linear_cross_entropy
from pallas_kernels.mlp import Save, swiglu_mlp
from pallas_kernels.norm import Casting, add_rms_norm, norm_options, rms_norm

try:
    import equinox as eqx
except ModuleNotFoundError as error:
    if error.name != "equinox":
        raise
    raise ImportError(
        "pallas_kernels.equinox needs Equinox; run: pip install 'pallas-kernels[equinox]'"
    ) from error


class _Norm(eqx.Module):
    """The weight and the options that both norms share."""

    weight: jax.Array
    shape: tuple[int] = eqx.field(static=True)
    eps: float = eqx.field(static=True)
    weight_offset: float = eqx.field(static=True)
    casting: Casting = eqx.field(static=True)
    implementation: Implementation | None = eqx.field(static=True)

    def __init__(
        self,
        shape: int | Sequence[int],
        eps: float = 1e-5,
        *,
        use_bias: bool = False,
        dtype: DTypeLike | None = None,
        weight_offset: float = 0.0,
        casting: Casting = "float32",
        implementation: Implementation | None = None,
    ):
        axes = tuple(shape) if isinstance(shape, Sequence) else (shape,)
        if len(axes) != 1:
            raise ValueError(f"{shape=}: only the last axis can be normalized, so give its size")
        if use_bias:
            raise ValueError("use_bias=True: the operation has no bias; use eqx.nn.RMSNorm")
        check_sizes(shape=axes[0])
        self.weight = jnp.ones(axes, dtype) - weight_offset
        self.shape = axes
        self.eps = eps
        self.weight_offset = weight_offset
        self.casting = casting
        self.implementation = implementation


class RMSNorm(_Norm):
    """`pallas_kernels.rms_norm` with its weight, in place of `eqx.nn.RMSNorm`.

    Args:
      shape: D, the size of the normalized last axis.
      eps: Number that is added to the mean square.
      use_bias: False. (The default of `eqx.nn.RMSNorm` is True.)
      dtype: Dtype of the weight; `None` takes JAX's default.
      weight_offset: Number that is added to the weight to give the scale, which starts at 1.
      casting: Place where the operation rounds; `rms_norm` lists the choices.
      implementation: Implementation of the operation, as in `rms_norm`.

    Raises:
      ValueError: `shape` has several axes, or a bias is asked for.
    """

    __init__ = _Norm.__init__  # type checkers would derive another from the fields

    def __call__(self, x: Float[Array, "*T D"], *, key: Any = None) -> Float[Array, "*T D"]:
        """The norm of one token or several, in the dtype of `x`; `key` is not used."""
        return rms_norm(x, self.weight, **norm_options(self, self.eps))


class AddRMSNorm(_Norm):
    """`pallas_kernels.add_rms_norm` with its weight; it takes the arguments of `RMSNorm`."""

    __init__ = _Norm.__init__

    def __call__(
        self, x: Float[Array, "*T D"], residual: Float[Array, "*T D"], *, key: Any = None
    ) -> tuple[Float[Array, "*T D"], Float[Array, "*T D"]]:
        """`(norm(x + residual), x + residual)`; `key` is not used."""
        return add_rms_norm(x, residual, self.weight, **norm_options(self, self.eps))


class SwiGLU(eqx.Module):
    """Llama's MLP, `down_proj(silu(gate_proj(x)) · up_proj(x))`, by `pallas_kernels.swiglu_mlp`.

    The weights are in three `eqx.nn.Linear`, `[F, D]`, `[F, D]` and `[D, F]`. The operation takes
    the transposed layouts, so XLA transposes the weights in each step. On an H100, with bfloat16
    activations of 8192 x 4096 x 14336, this adds 8 % to the time of the gradients with float32
    weights and 2 % with bfloat16 weights (`docs/lab/2026-11-24-transposed-mlp-weights.md`).

    Args:
      hidden_size: D, the size of input and output.
      intermediate_size: F, the size of `gate` and `up`.
      dtype: Dtype of the weights; `None` takes JAX's default. The computation has the dtype of the
        input.
      save: Tensors kept for the backward, as in `swiglu_mlp`.
      chunk_size: Number of positions at a time, as in `swiglu_mlp`; it needs `save="x"`.
      implementation: Implementation of `swiglu_mlp`.
      key: Source of the weights' random numbers.
    """

    gate_proj: eqx.nn.Linear
    up_proj: eqx.nn.Linear
    down_proj: eqx.nn.Linear
    save: Save = eqx.field(static=True)
    chunk_size: int | None = eqx.field(static=True)
    implementation: Implementation | None = eqx.field(static=True)

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        *,
        dtype: DTypeLike | None = None,
        save: Save = "gate_up",
        chunk_size: int | None = None,
        implementation: Implementation | None = None,
        key: PRNGKeyArray,
    ):
        check_sizes(hidden_size=hidden_size, intermediate_size=intermediate_size)
        sizes = [(hidden_size, intermediate_size)] * 2 + [(intermediate_size, hidden_size)]
        self.gate_proj, self.up_proj, self.down_proj = (
            eqx.nn.Linear(*size, use_bias=False, dtype=dtype, key=part)
            for size, part in zip(sizes, jax.random.split(key, 3), strict=True)
        )
        self.save = save
        self.chunk_size = chunk_size
        self.implementation = implementation

    def __call__(self, x: Float[Array, "*T D"], *, key: Any = None) -> Float[Array, "*T D"]:
        """The MLP of one token or several; `key` is not used."""
        return swiglu_mlp(
            x,
            self.gate_proj.weight.T,
            self.up_proj.weight.T,
            self.down_proj.weight.T,
            save=self.save,
            chunk_size=self.chunk_size,
            implementation=self.implementation,
        )


class LinearCrossEntropy(eqx.Module):
    """An output head that returns its loss: `pallas_kernels.linear_cross_entropy` with its weight.

    The parameters are as in `eqx.nn.Linear(D, V)`: `weight` `[V, D]` and `bias` `[V]`.

    Under `jax.vmap` over sequences, the loss of each sequence is the mean over its own tokens. If
    the sequences have different numbers of tokens that count, the mean of their losses is not the
    mean over all tokens. Then call the module outside of `vmap`, on the hidden states of the batch.

    Args:
      in_features: D, the size of the hidden states.
      out_features: V, the size of the vocabulary.
      use_bias: Whether the logits have a bias. (The default of `eqx.nn.Linear` is True.)
      dtype: Dtype of the parameters; `None` takes JAX's default. The computation has the dtype of
        the hidden states.
      key: Source of the parameters' random numbers.
      **loss_options: Keyword arguments of `linear_cross_entropy` for every call.

    Raises:
      TypeError: `loss_options` has another name or an array.
    """

    weight: jax.Array
    bias: jax.Array | None
    loss_options: tuple[tuple[str, Any], ...] = eqx.field(static=True)

    def __init__(
        self,
        in_features: int,
        out_features: int,
        use_bias: bool = False,
        dtype: DTypeLike | None = None,
        *,
        key: PRNGKeyArray,
        **loss_options: Any,
    ):
        check_sizes(in_features=in_features, out_features=out_features)
        linear = eqx.nn.Linear(in_features, out_features, use_bias, dtype, key=key)
        self.weight = linear.weight
        self.bias = linear.bias
        self.loss_options = checked_options(loss_options)

    def __call__(
        self,
        x: Float[Array, "*T D"],
        labels: Integer[Array, "*T"],
        token_weights: Float[Array, "*T"] | None = None,
    ) -> Float[Array, "..."] | tuple[Float[Array, "..."], LossMetrics]:
        """The loss of predicting `labels` from `x`, with the loss options."""
        return linear_cross_entropy(
            x,
            self.weight,
            labels,
            bias=self.bias,
            token_weights=token_weights,
            **dict(self.loss_options),
        )

    def logits(self, x: Float[Array, "*T D"]) -> Float[Array, "*T V"]:
        """The logits, float32, for sampling; they have the softcap of the loss options."""
        softcap = dict(self.loss_options).get("logit_softcap")
        return logits_of_head(x, self.weight, self.bias, "vd", softcap)
