"""The gated MLP."""

import itertools
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jax.nn import initializers
from jax.sharding import AxisType, NamedSharding
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from pallas_kernels.arguments import check_sizes, check_unused, layer_input
from pallas_kernels.fp8 import Recipe, RecipeName
from pallas_kernels.fp8.layers import check_mlp_options, gated_mlp
from pallas_kernels.implementation import Implementation
from pallas_kernels.layers.from_nnx import check_class, check_defaults
from pallas_kernels.layout import to_spec
from pallas_kernels.mlp import Save, swiglu
from pallas_kernels.partition import explicit_splits, split_as

_LECUN_NORMAL = initializers.lecun_normal()
# Options of `nnx.Linear` that one projection may have for itself.
_LINEAR_OPTIONS = {"kernel_init", "kernel_metadata", "bias_init", "bias_metadata"}
_NO_OPTIONS: Mapping[str, Any] = MappingProxyType({})


class SwiGLU(nnx.Module):
    """Llama's MLP, `down_proj(silu(gate_proj(x)) · up_proj(x))`, by `pallas_kernels.swiglu_mlp`.

    For policies of `jax.checkpoint`, the results of the first two projections have the names `gate`
    and `up`. `swiglu_mlp` has no biases; with `use_bias` the layer is three `nnx.Linear` layers and
    `pallas_kernels.swiglu`. With `fp8` the layer is `pallas_kernels.fp8.fp8_swiglu_mlp`, and each
    call quantizes the kernels.

    Args:
      hidden_size: D, the size of input and output.
      intermediate_size: F, the size of `gate` and `up`.
      use_bias: Whether the three linear layers have biases.
      dtype: Dtype of the computation; `None` takes the dtype of the input, whatever the dtypes of
        the parameters are. `nnx.Linear` would take the common dtype. Then float32 parameters would
        make a bfloat16 residual stream float32, for which there is no kernel.
      param_dtype: Dtype of the parameters.
      kernel_init: Initializer of the three kernels.
      gate: Options of `nnx.Linear` for `gate_proj` alone: `kernel_init`, `kernel_metadata`,
        `bias_init` and `bias_metadata`. The metadata may say how a kernel is sharded.
      up: The same options for `up_proj`.
      down: The same options for `down_proj`.
      save: Tensors kept for the backward, as in `swiglu_mlp`; only "gate_up" with biases.
      chunk_size: Number of positions at a time, as in `swiglu_mlp`; it needs `save="x"`.
      implementation: Implementation of `swiglu_mlp` or, with biases, of `swiglu`. With biases,
        `None` takes no kernel, and `"require"` raises in the call.
      fp8: Recipe of `fp8_swiglu_mlp`, or its name; `None` multiplies in the dtype of the input.
      rngs: Source of the kernels' random numbers.

    Raises:
      ValueError: The layer has biases, and `save` is not `"gate_up"`, or there is a `chunk_size` or
        `fp8`. The layer has `fp8`, and another of the last three options; or there is no recipe of
        that name.
      TypeError: An option of one projection has another name.
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
        gate: Mapping[str, Any] = _NO_OPTIONS,
        up: Mapping[str, Any] = _NO_OPTIONS,
        down: Mapping[str, Any] = _NO_OPTIONS,
        save: Save = "gate_up",
        chunk_size: int | None = None,
        implementation: Implementation | None = None,
        fp8: Recipe | RecipeName | None = None,
        rngs: nnx.Rngs,
    ):
        check_sizes(hidden_size=hidden_size, intermediate_size=intermediate_size)
        check_mlp_options(fp8, save, chunk_size, implementation)
        if use_bias:
            check_unused(
                "layers without biases",
                fp8=(fp8, None),
                save=(save, "gate_up"),
                chunk_size=(chunk_size, None),
            )

        def linear(size_in: int, size_out: int, own: Mapping[str, Any]) -> nnx.Linear:
            if unknown := sorted(own.keys() - _LINEAR_OPTIONS):
                raise TypeError(
                    f"{', '.join(unknown)}: not among the options of one projection, which are "
                    f"{', '.join(sorted(_LINEAR_OPTIONS))}"
                )
            options: dict[str, Any] = {"kernel_init": kernel_init, **own}
            return nnx.Linear(
                size_in,
                size_out,
                use_bias=use_bias,
                dtype=dtype,
                param_dtype=param_dtype,
                rngs=rngs,
                **options,
            )

        self.gate_proj = linear(hidden_size, intermediate_size, gate)
        self.up_proj = linear(hidden_size, intermediate_size, up)
        self.down_proj = linear(intermediate_size, hidden_size, down)
        self.dtype = dtype
        self.save: Save = save
        self.chunk_size = chunk_size
        self.implementation: Implementation | None = implementation
        self.fp8: Recipe | RecipeName | None = fp8

    @classmethod
    def from_nnx(
        cls,
        gate: nnx.Linear,
        up: nnx.Linear,
        down: nnx.Linear,
        *,
        save: Save = "gate_up",
        chunk_size: int | None = None,
        implementation: Implementation | None = None,
        fp8: Recipe | RecipeName | None = None,
    ) -> "SwiGLU":
        """A layer of three linear layers, which become its `gate_proj`, `up_proj` and `down_proj`.

        Their parameters are shared. `dtype=None` means the dtype of the input; in Flax it is the
        common dtype of input and kernel.

        Args:
          gate: Projection that `silu` acts on.
          up: Second projection.
          down: Projection of the product.
          save: Tensors kept for the backward, as in the constructor.
          chunk_size: Number of positions at a time, as in the constructor.
          implementation: Name, as in the constructor.
          fp8: Recipe or its name, as in the constructor.

        Raises:
          TypeError: One of the layers is no `nnx.Linear`.
          ValueError: The layers do not fit together, or have an option that the MLP does not have.
        """
        layers = {"gate": gate, "up": up, "down": down}
        for layer in layers.values():
            check_class(cls.__name__, layer, nnx.Linear)
            check_defaults(
                cls.__name__,
                layer,
                precision="products take operands of dtype and accumulate in float32",
                dot_general="the MLP has products of its own",
                promote_dtype="dtype is the dtype of the computation",
                preferred_element_type="dtype is the dtype of the result",
            )
        for name in ("dtype", "use_bias"):
            values = {k: getattr(layer, name) for k, layer in layers.items()}
            if name == "dtype":  # jnp.bfloat16 and np.dtype("bfloat16") are one dtype
                values = {k: None if d is None else jnp.dtype(d) for k, d in values.items()}
            if len({*values.values()}) > 1:
                raise ValueError(
                    f"{cls.__name__}.from_nnx: the layers differ in {name}: {values}; make them "
                    f"with one {name}"
                )
        shapes = {name: layer.kernel.shape for name, layer in layers.items()}
        if shapes["up"] != shapes["gate"] or shapes["down"] != shapes["gate"][::-1]:
            raise ValueError(
                f"{cls.__name__}.from_nnx: the kernels must be [D, F], [D, F] and [F, D], got "
                f"{shapes}"
            )
        mlp = nnx.eval_shape(
            lambda: cls(
                *shapes["gate"],
                use_bias=gate.use_bias,
                dtype=gate.dtype,
                save=save,
                chunk_size=chunk_size,
                implementation=implementation,
                fp8=fp8,
                rngs=nnx.Rngs(0),
            )
        )
        mlp.gate_proj, mlp.up_proj, mlp.down_proj = gate, up, down
        return mlp

    def __call__(self, x: Float[Array, "*T D"]) -> Float[Array, "*T D"]:
        """The MLP of every token."""
        x = layer_input("x", x, self.dtype)
        if self.gate_proj.bias is not None:
            gate = checkpoint_name(_linear(self.gate_proj, x), "gate")
            up = checkpoint_name(_linear(self.up_proj, x), "up")
            return _linear(self.down_proj, swiglu(gate, up, implementation=self.implementation))
        return gated_mlp(
            x,
            [layer.kernel[...] for layer in (self.gate_proj, self.up_proj, self.down_proj)],
            fp8=self.fp8,
            save=self.save,
            chunk_size=self.chunk_size,
            implementation=self.implementation,
        )


def _linear(layer: nnx.Linear, x: Float[Array, "*T D"]) -> Float[Array, "*T F"]:
    """The linear layer with a bias, in the dtype of `x`.

    Explicit axes that split the tokens split nothing else: the kernel is gathered over them. Where
    an axis splits D, the devices add up their products.
    """
    assert layer.bias is not None
    kernel, bias = (a[...].astype(x.dtype) for a in (layer.kernel, layer.bias))
    mesh, split = jax.typeof(x).sharding.mesh, None
    if AxisType.Explicit in mesh.axis_types:
        *tokens, of_x = explicit_splits(x)
        used = {*itertools.chain(*tokens), *of_x}
        columns = tuple(name for name in explicit_splits(kernel)[1] if name not in used)
        kernel, bias = split_as((of_x, columns), kernel, mesh), split_as((columns,), bias, mesh)
        split = NamedSharding(mesh, to_spec((*tokens, columns)))
    y = jnp.matmul(x, kernel, out_sharding=split)
    return y + jax.lax.broadcast_to_rank(bias, y.ndim)
