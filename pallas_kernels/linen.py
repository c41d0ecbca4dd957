"""Flax Linen modules that call the operations, for use in any Linen model.

Parameters have the names, shapes and initial values of Linen's own modules, so that a checkpoint of
`nn.RMSNorm` and `nn.Dense` loads unchanged. Initializers may carry metadata, from
`nn.with_partitioning` or `nn.with_logical_partitioning`. The modules run on any mesh, as their
operations do. Their inputs, other than labels and the weights of tokens, have axes `[..., D]` and a
floating dtype. Other dtypes raise TypeError, also if the module has a `dtype`, and an array without
axes raises ValueError.
"""

import jax.numpy as jnp
from flax import linen as nn
from flax.typing import Initializer
from jax.nn import initializers
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Integer

from pallas_kernels.arguments import check_sizes, common_dtype, layer_input
from pallas_kernels.fp8 import Recipe, RecipeName
from pallas_kernels.fp8.layers import check_mlp_options, gated_mlp
from pallas_kernels.head import LOSS_OPTIONS, logits_of_head
from pallas_kernels.implementation import Implementation
from pallas_kernels.loss import LossMetrics, linear_cross_entropy
from pallas_kernels.loss.arguments import Reduction
from pallas_kernels.loss.config import Config
from pallas_kernels.mlp import Save
from pallas_kernels.norm import Casting, add_rms_norm, norm_options, rms_norm

_LECUN_NORMAL = initializers.lecun_normal()


class _Norm(nn.Module):
    """The fields that both norms share."""

    epsilon: float = 1e-6
    dtype: DTypeLike | None = None
    param_dtype: DTypeLike = jnp.float32
    scale_init: Initializer | None = None
    weight_offset: float = 0.0
    casting: Casting = "float32"
    implementation: Implementation | None = None

    def _scale(self, x: Float[Array, "*T D"]) -> Float[Array, " D"]:
        init = self.scale_init or initializers.constant(1.0 - self.weight_offset)
        return self.param("scale", init, x.shape[-1:], self.param_dtype)

    def _widened(self, x: Float[Array, "*T D"]) -> Float[Array, "*T D"]:
        """`x` in the common dtype of input and result, so that nothing is rounded too early."""
        return x.astype(common_dtype(x.dtype, self.dtype or x.dtype))


class RMSNorm(_Norm):
    """`pallas_kernels.rms_norm` with its weight, in place of `nn.RMSNorm`.

    The parameter is `scale` `[D]`. The statistics are float32.

    Args:
      epsilon: Number that is added to the mean square.
      dtype: Dtype of the result; `None` takes the dtype of the input. The norm is computed in the
        common dtype of `dtype` and `x`, and then cast to `dtype`, as in `nn.RMSNorm`. (NNX's norm
        casts its input instead.) With `casting="llama"`, `x · rstd` is rounded to the common dtype.
        With `None`, `nn.RMSNorm` would take the common dtype of input and scale. Then a float32
        scale would make a bfloat16 residual stream float32.
      param_dtype: Dtype of `scale`.
      scale_init: Initializer of `scale`; `None` starts at `1 - weight_offset`.
      weight_offset: Number that is added to `scale`, as in `rms_norm`.
      casting: Place where the operation rounds; `rms_norm` lists the choices.
      implementation: Implementation of the operation, as in `rms_norm`.
    """

    @nn.compact
    def __call__(self, x: Float[Array, "*T D"]) -> Float[Array, "*T D"]:
        """The norm of `x`."""
        x = layer_input("x", x, None)
        y = rms_norm(self._widened(x), self._scale(x), **norm_options(self, self.epsilon))
        return y.astype(self.dtype or x.dtype)


class AddRMSNorm(_Norm):
    """`pallas_kernels.add_rms_norm` with its weight; it has the fields of `RMSNorm`.

    `dtype` is the dtype of the norm. The sum is returned in the dtype of `x`. If `dtype` is wider,
    the norm reads the sum in `dtype`, before it is rounded.
    """

    @nn.compact
    def __call__(
        self, x: Float[Array, "*T D"], residual: Float[Array, "*T D"]
    ) -> tuple[Float[Array, "*T D"], Float[Array, "*T D"]]:
        """`(norm(x + residual), x + residual)`."""
        x = layer_input("x", x, None)
        y, total = add_rms_norm(
            self._widened(x), residual, self._scale(x), **norm_options(self, self.epsilon)
        )
        return y.astype(self.dtype or x.dtype), total.astype(x.dtype)


class _Kernel(nn.Module):
    """The kernel of an `nn.Dense` without its product."""

    shape: tuple[int, int]
    param_dtype: DTypeLike
    kernel_init: Initializer

    @nn.compact
    def __call__(self) -> Float[Array, "K N"]:
        return self.param("kernel", self.kernel_init, self.shape, self.param_dtype)


class SwiGLU(nn.Module):
    """Llama's MLP, `down_proj(silu(gate_proj(x)) · up_proj(x))`, by `pallas_kernels.swiglu_mlp`.

    The parameters are as in three `nn.Dense` without biases: `gate_proj/kernel` and
    `up_proj/kernel` `[D, F]`, and `down_proj/kernel` `[F, D]`.

    Args:
      intermediate_size: F, the size of `gate` and `up`.
      dtype: Dtype of the computation; `None` takes the dtype of the input, whatever the dtype of
        the parameters is.
      param_dtype: Dtype of the parameters.
      kernel_init: Initializer of the kernels.
      down_kernel_init: Initializer of `down_proj/kernel`; `None` takes `kernel_init`. The axes of
        this kernel are in the opposite order, so metadata for meshes needs another initializer.
      save: Tensors kept for the backward, as in `swiglu_mlp`.
      chunk_size: Number of positions at a time, as in `swiglu_mlp`; it needs `save="x"`.
      implementation: Implementation of `swiglu_mlp`.
      fp8: Recipe of `pallas_kernels.fp8.fp8_swiglu_mlp`, or its name; `None` multiplies in the
        dtype of the input. With a recipe, each call quantizes the kernels, and the three options
        above raise ValueError.
    """

    intermediate_size: int
    dtype: DTypeLike | None = None
    param_dtype: DTypeLike = jnp.float32
    kernel_init: Initializer = _LECUN_NORMAL
    down_kernel_init: Initializer | None = None
    save: Save = "gate_up"
    chunk_size: int | None = None
    implementation: Implementation | None = None
    fp8: Recipe | RecipeName | None = None

    @nn.compact
    def __call__(self, x: Float[Array, "*T D"]) -> Float[Array, "*T D"]:
        """The MLP of every token."""
        check_sizes(intermediate_size=self.intermediate_size)
        check_mlp_options(self.fp8, self.save, self.chunk_size, self.implementation)
        x = layer_input("x", x, self.dtype)
        hidden_size = x.shape[-1]
        across = hidden_size, self.intermediate_size
        down = self.intermediate_size, hidden_size
        down_init = self.down_kernel_init or self.kernel_init
        weights = [
            _Kernel(across, self.param_dtype, self.kernel_init, name="gate_proj")(),
            _Kernel(across, self.param_dtype, self.kernel_init, name="up_proj")(),
            _Kernel(down, self.param_dtype, down_init, name="down_proj")(),
        ]
        return gated_mlp(
            x,
            weights,
            fp8=self.fp8,
            save=self.save,
            chunk_size=self.chunk_size,
            implementation=self.implementation,
        )


class LinearCrossEntropy(nn.Module):
    """An output head that returns its loss: `pallas_kernels.linear_cross_entropy` with its weight.

    The parameters are as in `nn.Dense(features, use_bias=use_bias)`: `kernel` `[D, V]` and
    `bias` `[V]`.

    Args:
      features: V, the size of the vocabulary.
      use_bias: Whether the logits have a bias.
      dtype: Dtype of the operands of the GEMMs; `None` takes the dtype of the hidden states.
      param_dtype: Dtype of the parameters.
      kernel_init: Initializer of `kernel`.
      bias_init: Initializer of `bias`.

    The other arguments are keyword arguments of `linear_cross_entropy`, which describes them.
    """

    features: int
    use_bias: bool = False
    dtype: DTypeLike | None = None
    param_dtype: DTypeLike = jnp.float32
    kernel_init: Initializer = _LECUN_NORMAL
    bias_init: Initializer = initializers.zeros
    ignore_index: int = -100
    reduction: Reduction = "mean"
    label_smoothing: float = 0.0
    z_loss: float = 0.0
    logit_softcap: float | None = None
    chunk_size: int | None = None
    vocab_chunk_size: int | None = None
    max_logits_bytes: int | None = None
    counted_fraction: float = 1.0
    vocab_axis: str | None = None
    accum_dtype: DTypeLike = jnp.float32
    check_labels: bool = False
    return_metrics: bool = False
    implementation: Implementation | None = None
    config: Config | None = None

    @nn.compact
    def _parameters(
        self, x: Float[Array, "*T D"]
    ) -> tuple[Float[Array, "D V"], Float[Array, " V"] | None]:
        check_sizes(features=self.features)
        shape = x.shape[-1], self.features
        kernel = self.param("kernel", self.kernel_init, shape, self.param_dtype)
        if not self.use_bias:
            return kernel, None
        return kernel, self.param("bias", self.bias_init, shape[1:], self.param_dtype)

    def __call__(
        self,
        x: Float[Array, "*T D"],
        labels: Integer[Array, "*T"],
        token_weights: Float[Array, "*T"] | None = None,
    ) -> Float[Array, "..."] | tuple[Float[Array, "..."], LossMetrics]:
        """The loss of predicting `labels` from `x`."""
        x = layer_input("x", x, self.dtype)
        kernel, bias = self._parameters(x)
        return linear_cross_entropy(
            x,
            kernel,
            labels,
            bias=bias,
            token_weights=token_weights,
            weight_layout="dv",
            **{name: getattr(self, name) for name in LOSS_OPTIONS},
        )

    def logits(self, x: Float[Array, "*T D"]) -> Float[Array, "*T V"]:
        """The logits, float32, for sampling; they have the softcap of the loss."""
        x = layer_input("x", x, self.dtype)
        return logits_of_head(x, *self._parameters(x), "dv", self.logit_softcap)
