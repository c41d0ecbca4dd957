"""Flax NNX layers over the operations, for use in any NNX model.

The layers run on any mesh, as their operations do. They hold plain `nnx.Param`s without sharding
annotations, create no parameters after construction, and work in NNX's graph mode and in its tree
mode.
"""

import inspect
from typing import Any

import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jax.nn import initializers
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Integer

from pallas_kernels.implementation import Implementation
from pallas_kernels.loss import LossMetrics, linear_cross_entropy
from pallas_kernels.mlp import Save, swiglu, swiglu_mlp
from pallas_kernels.norm import Casting, add_rms_norm, rms_norm

_LECUN_NORMAL = initializers.lecun_normal()
_NORMAL = initializers.normal(0.02)
# All but the arrays, which a call or the layer has, and the layout of the layer's weight.
_LOSS_OPTIONS = {
    name
    for name, parameter in inspect.signature(linear_cross_entropy).parameters.items()
    if parameter.kind is parameter.KEYWORD_ONLY
    and name not in ("bias", "token_weights", "weight_layout")
}


class _Norm(nnx.Module):
    """The weight and the options that both norms share."""

    def __init__(
        self,
        hidden_size: int,
        *,
        eps: float = 1e-6,
        weight_offset: float = 0.0,
        casting: Casting = "float32",
        param_dtype: DTypeLike = jnp.float32,
        implementation: Implementation | None = None,
        rngs: nnx.Rngs | None = None,
    ):
        del rngs  # The weight starts as a constant; callers pass `rngs` to every NNX layer.
        self.weight = nnx.Param(jnp.full((hidden_size,), 1.0 - weight_offset, param_dtype))
        self.eps = eps
        self.weight_offset = weight_offset
        self.casting: Casting = casting
        self.implementation: Implementation | None = implementation

    @property
    def _options(self) -> dict[str, Any]:
        """The keyword arguments of the operation."""
        return {
            "eps": self.eps,
            "weight_offset": self.weight_offset,
            "casting": self.casting,
            "implementation": self.implementation,
        }


class RMSNorm(_Norm):
    """`pallas_kernels.rms_norm` with its weight, which starts so that the scale is 1.

    Args:
      hidden_size: D, the size of the normalized last axis.
      eps: Constant that is added to the mean square.
      weight_offset: Constant that is added to the weight to give the scale.
      casting: Where the operation rounds; `rms_norm` lists the choices.
      param_dtype: Dtype of the weight.
      implementation: Implementation of the operation, as in `rms_norm`.
      rngs: Not used.
    """

    def __call__(self, x: Float[Array, "*T D"]) -> Float[Array, "*T D"]:
        """The norm of `x`, in the dtype of `x`."""
        return rms_norm(x, self.weight[...], **self._options)


class AddRMSNorm(_Norm):
    """`pallas_kernels.add_rms_norm` with its weight; it takes the arguments of `RMSNorm`."""

    def __call__(
        self, x: Float[Array, "*T D"], residual: Float[Array, "*T D"]
    ) -> tuple[Float[Array, "*T D"], Float[Array, "*T D"]]:
        """`(norm(x + residual), x + residual)`."""
        return add_rms_norm(x, residual, self.weight[...], **self._options)


class SwiGLU(nnx.Module):
    """Llama's MLP, `down_proj(silu(gate_proj(x)) · up_proj(x))`, by `pallas_kernels.swiglu_mlp`.

    The policies of `jax.checkpoint` can name the first two projections, `gate` and `up`.
    `swiglu_mlp` has no biases; with `use_bias` the layer is three `nnx.Linear` layers and
    `pallas_kernels.swiglu`.

    Args:
      hidden_size: D, the size of input and output.
      intermediate_size: F, the size of `gate` and `up`.
      use_bias: Whether the three linear layers have biases.
      dtype: Dtype of the computation; `None` takes the dtype of the input, whatever the dtypes of
        the parameters are. (`nnx.Linear` would take the common dtype, so float32 parameters would
        make a bfloat16 stream float32, for which there is no kernel.)
      param_dtype: Dtype of the parameters.
      kernel_init: Initializer of the three kernels.
      save: Tensors kept for the backward, as in `swiglu_mlp`; only "gate_up" with biases.
      chunk_size: Number of positions at a time, as in `swiglu_mlp`; it needs `save="x"`.
      implementation: Implementation of `swiglu_mlp` or, with biases, of `swiglu`.
      rngs: Source of the kernels' random numbers.

    Raises:
      ValueError: `save` has another value, and the layer has biases.
    """

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        *,
        use_bias: bool = False,
        dtype: DTypeLike | None = None,
        param_dtype: DTypeLike = jnp.float32,
        kernel_init: initializers.Initializer = _LECUN_NORMAL,
        save: Save = "gate_up",
        chunk_size: int | None = None,
        implementation: Implementation | None = None,
        rngs: nnx.Rngs,
    ):
        if use_bias and save != "gate_up":
            raise ValueError(f"{save=} is for layers without biases; leave it at 'gate_up'")

        def linear(size_in: int, size_out: int) -> nnx.Linear:
            return nnx.Linear(
                size_in,
                size_out,
                use_bias=use_bias,
                dtype=dtype,
                param_dtype=param_dtype,
                kernel_init=kernel_init,
                rngs=rngs,
            )

        self.gate_proj = linear(hidden_size, intermediate_size)
        self.up_proj = linear(hidden_size, intermediate_size)
        self.down_proj = linear(intermediate_size, hidden_size)
        self.dtype = dtype
        self.save: Save = save
        self.chunk_size = chunk_size
        self.implementation: Implementation | None = implementation

    def __call__(self, x: Float[Array, "*T D"]) -> Float[Array, "*T D"]:
        """The MLP of every token."""
        x = x.astype(self.dtype or x.dtype)
        if self.gate_proj.bias is not None:
            gate = checkpoint_name(_linear(self.gate_proj, x), "gate")
            up = checkpoint_name(_linear(self.up_proj, x), "up")
            return _linear(self.down_proj, swiglu(gate, up, implementation=self.implementation))
        w_gate, w_up, w_down = (
            layer.kernel[...] for layer in (self.gate_proj, self.up_proj, self.down_proj)
        )
        return swiglu_mlp(
            x,
            w_gate,
            w_up,
            w_down,
            save=self.save,
            chunk_size=self.chunk_size,
            implementation=self.implementation,
        )


def _linear(layer: nnx.Linear, x: Float[Array, "*T D"]) -> Float[Array, "*T F"]:
    """The linear layer with a bias, in the dtype of `x`."""
    assert layer.bias is not None
    return x @ layer.kernel[...].astype(x.dtype) + layer.bias[...].astype(x.dtype)


class LinearCrossEntropy(nnx.Module):
    """An output head that returns its loss: `pallas_kernels.linear_cross_entropy` with its weight.

    Args:
      hidden_size: D, the size of the hidden states.
      vocab_size: V.
      use_bias: Whether the logits have a bias.
      dtype: Dtype of the operands of the GEMMs; `None` takes the dtype of the hidden states.
      param_dtype: Dtype of the parameters.
      kernel_init: Initializer of the weight `[V, D]`.
      rngs: Source of the weight's random numbers.
      **loss_options: Keyword arguments of `linear_cross_entropy` for every call.

    Raises:
      TypeError: `loss_options` has another name.
    """

    def __init__(
        self,
        hidden_size: int,
        vocab_size: int,
        *,
        use_bias: bool = False,
        dtype: DTypeLike | None = None,
        param_dtype: DTypeLike = jnp.float32,
        kernel_init: initializers.Initializer = _NORMAL,
        rngs: nnx.Rngs,
        **loss_options: Any,
    ):
        if unknown := sorted(loss_options.keys() - _LOSS_OPTIONS):
            raise TypeError(
                f"{', '.join(unknown)}: not among the options of linear_cross_entropy, which are "
                f"{', '.join(sorted(_LOSS_OPTIONS))}"
            )
        self.weight = nnx.Param(kernel_init(rngs.params(), (vocab_size, hidden_size), param_dtype))
        self.bias = nnx.Param(jnp.zeros((vocab_size,), param_dtype)) if use_bias else nnx.data(None)
        self.dtype = dtype
        # A tuple, because the static attributes of a module must be hashable.
        self.loss_options = nnx.static(tuple(sorted(loss_options.items())))

    def __call__(
        self,
        x: Float[Array, "*T D"],
        labels: Integer[Array, "*T"],
        token_weights: Float[Array, "*T"] | None = None,
    ) -> Float[Array, "..."] | tuple[Float[Array, "..."], LossMetrics]:
        """The loss of predicting `labels` from `x`, with the loss options."""
        return linear_cross_entropy(
            x if self.dtype is None else x.astype(self.dtype),
            self.weight[...],
            labels,
            bias=None if self.bias is None else self.bias[...],
            token_weights=token_weights,
            **dict(self.loss_options),
        )

    def logits(self, x: Float[Array, "*T D"]) -> Float[Array, "*T V"]:
        """The logits, float32, for sampling; they have the softcap of the loss options."""
        dtype = self.dtype or x.dtype
        logits = jnp.einsum(
            "...d,vd->...v",
            x.astype(dtype),
            self.weight[...].astype(dtype),
            preferred_element_type=jnp.float32,
        )
        if self.bias is not None:
            logits += self.bias[...].astype(jnp.float32)
        softcap = dict(self.loss_options).get("logit_softcap")
        return logits if softcap is None else softcap * jnp.tanh(logits / softcap)
