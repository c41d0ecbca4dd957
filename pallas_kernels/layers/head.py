"""The output head that returns its loss."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import jax.numpy as jnp
from flax import nnx
from jax.nn import initializers
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Integer

from pallas_kernels.arguments import check_choice, check_sizes, layer_input
from pallas_kernels.head import checked_options, logits_of_head
from pallas_kernels.layers.from_nnx import check_class, check_defaults
from pallas_kernels.loss import LossMetrics, linear_cross_entropy
from pallas_kernels.loss.layout import WeightLayout

_NORMAL = initializers.normal(0.02)
_NO_METADATA: Mapping[str, Any] = MappingProxyType({})


class LinearCrossEntropy(nnx.Module):
    """An output head that returns its loss: `pallas_kernels.linear_cross_entropy` with its weight.

    The parameter is `kernel` `[D, V]`, as in `nnx.Linear`, or `embedding` `[V, D]`, as in
    `nnx.Embed`. Neither is copied for the loss.

    Args:
      hidden_size: D, the size of the hidden states.
      vocab_size: Size V of the vocabulary.
      use_bias: Whether the logits have a bias.
      dtype: Dtype of the operands of the GEMMs; `None` takes the dtype of the hidden states.
      param_dtype: Dtype of the parameters.
      kernel_init: Initializer of the kernel or embedding.
      kernel_metadata: Metadata of its `nnx.Param`, for example its sharding.
      bias_metadata: Metadata of the bias.
      weight_layout: `"dv"` for a parameter `kernel` `[D, V]`, `"vd"` for `embedding` `[V, D]`.
      rngs: Source of the kernel's random numbers.
      **loss_options: Keyword arguments of `linear_cross_entropy` for every call.

    Raises:
      TypeError: A name in `loss_options` is no option of `linear_cross_entropy`, or its value is an
        array. Other values are checked when the layer is called.
      ValueError: `weight_layout` is neither `"dv"` nor `"vd"`.
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
        kernel_metadata: Mapping[str, Any] = _NO_METADATA,
        bias_metadata: Mapping[str, Any] = _NO_METADATA,
        weight_layout: WeightLayout = "dv",
        rngs: nnx.Rngs,
        **loss_options: Any,
    ):
        check_sizes(hidden_size=hidden_size, vocab_size=vocab_size)
        check_choice("weight_layout", weight_layout, WeightLayout)
        options = checked_options(loss_options)
        shape = (hidden_size, vocab_size) if weight_layout == "dv" else (vocab_size, hidden_size)
        weight = nnx.Param(kernel_init(rngs.params(), shape, param_dtype), **kernel_metadata)
        if weight_layout == "dv":
            self.kernel = weight
        else:
            self.embedding = weight
        self.bias = nnx.data(None)
        if use_bias:
            self.bias = nnx.Param(jnp.zeros((vocab_size,), param_dtype), **bias_metadata)
        self.dtype = dtype
        self.weight_layout: WeightLayout = weight_layout
        self.loss_options = nnx.static(options)

    @classmethod
    def from_nnx(cls, head: nnx.Linear | nnx.Embed, **loss_options: Any) -> "LinearCrossEntropy":
        """A head with the parameters of an output projection or of an embedding.

        They are shared, so an embedding stays tied. `dtype=None` means the dtype of the hidden
        states; in `nnx.Linear` it is the common dtype of input and kernel. An `nnx.Embed` computes
        in the dtype of its parameter unless it was given another.

        Args:
          head: Layer whose product with the hidden states gives the logits.
          **loss_options: Keyword arguments of the loss, as in the constructor.

        Raises:
          TypeError: `head` is of another class, or `loss_options` has another name or an array.
          ValueError: The layer has an option that the loss does not have.
        """
        check_class(cls.__name__, head, nnx.Linear, nnx.Embed)
        remedies = {"promote_dtype": "dtype is the dtype of the operands"}
        if isinstance(head, nnx.Linear):
            products = "products take operands of dtype and accumulate in float32"
            remedies |= dict.fromkeys(("precision", "dot_general"), products)
            remedies["preferred_element_type"] = "logits are float32"
            weight_layout, sizes = "dv", head.kernel.shape
        else:
            weight_layout, sizes = "vd", head.embedding.shape[::-1]
        check_defaults(cls.__name__, head, **remedies)
        layer = nnx.eval_shape(
            lambda: cls(
                *sizes,
                use_bias=isinstance(head, nnx.Linear) and head.use_bias,
                dtype=head.dtype,
                weight_layout=weight_layout,
                rngs=nnx.Rngs(0),
                **loss_options,
            )
        )
        if isinstance(head, nnx.Linear):
            layer.kernel = head.kernel
            if head.bias is not None:
                layer.bias = head.bias
        else:
            layer.embedding = head.embedding
        return layer

    def __call__(
        self,
        x: Float[Array, "*T D"],
        labels: Integer[Array, "*T"],
        token_weights: Float[Array, "*T"] | None = None,
    ) -> Float[Array, "..."] | tuple[Float[Array, "..."], LossMetrics]:
        """The loss of predicting `labels` from `x`, with the loss options."""
        return linear_cross_entropy(
            layer_input("x", x, self.dtype),
            self._weight[...],
            labels,
            bias=None if self.bias is None else self.bias[...],
            token_weights=token_weights,
            weight_layout=self.weight_layout,
            **dict(self.loss_options),
        )

    def logits(self, x: Float[Array, "*T D"]) -> Float[Array, "*T V"]:
        """The logits, float32, for sampling; they have the softcap of the loss options."""
        return logits_of_head(
            layer_input("x", x, self.dtype),
            self._weight[...],
            None if self.bias is None else self.bias[...],
            self.weight_layout,
            dict(self.loss_options).get("logit_softcap"),
        )

    @property
    def _weight(self) -> nnx.Param[Any]:
        return self.kernel if self.weight_layout == "dv" else self.embedding
