"""RMSNorm and the residual addition with RMSNorm."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import jax.numpy as jnp
from flax import nnx
from jax.nn import initializers
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from pallas_kernels.arguments import check_sizes, layer_input
from pallas_kernels.implementation import Implementation
from pallas_kernels.layers.from_nnx import check_class, check_defaults
from pallas_kernels.norm import Casting, add_rms_norm, norm_options, rms_norm


class _Norm(nnx.Module):
    """The scale and the options that both norms share."""

    def __init__(
        self,
        num_features: int,
        *,
        epsilon: float = 1e-6,
        dtype: DTypeLike | None = None,
        param_dtype: DTypeLike = jnp.float32,
        scale_init: initializers.Initializer | None = None,
        scale_metadata: Mapping[str, Any] = MappingProxyType({}),
        weight_offset: float = 0.0,
        casting: Casting = "float32",
        implementation: Implementation | None = None,
        rngs: nnx.Rngs | None = None,
    ):
        check_sizes(num_features=num_features)
        # Flax's norm takes a key, although its scale starts as a constant. So this one does, too,
        # and later layers start from the same numbers as in Flax.
        key: Any = None if rngs is None else rngs.params()
        if scale_init is None:
            scale_init = initializers.constant(1.0 - weight_offset)
        elif rngs is None:
            raise ValueError("scale_init needs random numbers; pass rngs")
        self.scale = nnx.Param(scale_init(key, (num_features,), param_dtype), **scale_metadata)
        self.epsilon = epsilon
        self.dtype = dtype
        self.weight_offset = weight_offset
        self.casting: Casting = casting
        self.implementation: Implementation | None = implementation

    @classmethod
    def from_nnx[N: "_Norm"](
        cls: type[N],
        norm: nnx.RMSNorm,
        *,
        casting: Casting = "float32",
        implementation: Implementation | None = None,
    ) -> N:
        """A layer with the parameter and the options of an `nnx.RMSNorm`.

        Both share one `nnx.Param`. `dtype=None` means the dtype of the input; in Flax it is the
        common dtype of input and scale.

        Args:
          norm: Norm of Flax.
          casting: Place where the result is rounded, as in `rms_norm`.
          implementation: Name, as in `rms_norm`.

        Raises:
          TypeError: `norm` is of another class.
          ValueError: The norm has an option that `rms_norm` does not have.
        """
        check_class(cls.__name__, norm, nnx.RMSNorm)
        check_defaults(
            cls.__name__,
            norm,
            use_scale="the norm has a scale",
            reduction_axes="the norm is over the last axis",
            feature_axes="the scale is along the last axis",
            axis_name="on a mesh each device norms its own tokens",
            axis_index_groups="on a mesh each device norms its own tokens",
            promote_dtype="dtype is the dtype of the result",
        )
        options = {"epsilon": norm.epsilon, "dtype": norm.dtype, "casting": casting}
        options |= {"implementation": implementation}
        layer = nnx.eval_shape(lambda: cls(norm.num_features, **options))
        layer.scale = norm.scale
        return layer


class RMSNorm(_Norm):
    """`pallas_kernels.rms_norm` with its parameter `scale`, in place of `nnx.RMSNorm`.

    Args:
      num_features: D, the size of the normalized last axis.
      epsilon: Number added to the mean square.
      dtype: Dtype to which the input is cast before the norm, as `nnx.RMSNorm` does, and of the
        result; `None` takes the dtype of the input. (Linen's norm casts the result alone.)
      param_dtype: Dtype of the scale.
      scale_init: Initializer of the scale; `None` starts with a factor of 1.
      scale_metadata: Metadata of the `nnx.Param`, for example its sharding.
      weight_offset: Number added to the scale to give the factor, as in `rms_norm`.
      casting: Place where the operation rounds; `rms_norm` lists the choices.
      implementation: Implementation of the operation, as in `rms_norm`.
      rngs: Source of random numbers, which `scale_init` needs.

    Raises:
      ValueError: There is a `scale_init` and no `rngs`.
    """

    def __call__(self, x: Float[Array, "*T D"]) -> Float[Array, "*T D"]:
        """The norm of `x`."""
        x = layer_input("x", x, self.dtype)
        return rms_norm(x, self.scale[...], **norm_options(self, self.epsilon))


class AddRMSNorm(_Norm):
    """`pallas_kernels.add_rms_norm` with its parameter; it takes the arguments of `RMSNorm`.

    With a `dtype`, `x` and `residual` are cast to it before the addition, and both results have it:
    `bfloat16` rounds a float32 residual stream. With `None` both results have the dtype of `x`.
    """

    def __call__(
        self, x: Float[Array, "*T D"], residual: Float[Array, "*T D"]
    ) -> tuple[Float[Array, "*T D"], Float[Array, "*T D"]]:
        """`(norm(x + residual), x + residual)`."""
        x = layer_input("x", x, self.dtype)
        residual = layer_input("residual", residual, self.dtype)
        return add_rms_norm(x, residual, self.scale[...], **norm_options(self, self.epsilon))
