"""The projections q, k and v of the attention as one product, because they have one input.

Before the first layer, `join_projections` concatenates the stacked kernels of the three. The layers
then multiply once. The gradient of the input is one product, too, instead of a sum of three. The
model's parameters and its files still have three kernels.

In shapes, K is the size of a product's input and N the size of its output.
"""

import itertools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from pallas_kernels.fp8 import QuantizedWeight, RecipeName, fp8_linear

JOINED = ("q_proj", "k_proj", "v_proj")


def join_projections(state: nnx.State) -> nnx.State:
    """The state of stacked attentions, with one kernel for q, k and v.

    `q_proj` gets the kernel `[L, K, N]` of all three, their columns side by side. The other two get
    None. A state without these projections stays as it is. So does one whose projections have more
    parameters than a kernel and a bias, such as `nnx.LoRALinear`.

    Args:
      state: Part of the state of the layers.
    """
    if not all(name in state and set(state[name]) <= {"kernel", "bias"} for name in JOINED):
        return state
    state = jax.tree.map(lambda a: a, state)  # a copy, whose variables may be set
    variables: list[Any] = [state[name]["kernel"] for name in JOINED]
    # `fsdp` splits K, and `tensor` the heads of each, so no device needs a column of another one.
    kernel = jnp.concatenate([variable.get_value() for variable in variables], axis=-1)
    for variable in variables:
        variable.set_value(kernel if variable is variables[0] else None)
    return state


def kernel_of(projection: nnx.Linear) -> Any:
    """The kernel of a projection: an array, a `QuantizedWeight`, or None (`join_projections`)."""
    return projection.kernel.get_value()


def is_quantized(*projections: nnx.Linear) -> bool:
    """Whether the kernel of one of the projections is a `QuantizedWeight`."""
    return any(isinstance(kernel_of(p), QuantizedWeight) for p in projections)


def project(
    x: Float[Array, "*T K"], projections: Sequence[nnx.Linear], recipe: RecipeName | None
) -> list[Float[Array, "*T _"]]:
    """The results of several projections of `x`, which are one product if they are joined."""
    kernel, *others = map(kernel_of, projections)
    if recipe is not None and is_quantized(*projections):
        y = fp8_linear(x, kernel, recipe=recipe)
    elif others and all(other is None for other in others):
        y = jnp.matmul(x, kernel)
    else:
        return [projection(x) for projection in projections]
    ends = list(itertools.accumulate(p.out_features for p in projections))
    num_parts = ends[-1] // y.shape[-1]  # devices that share sequences have columns of their own
    results = jnp.split(y, [end // num_parts for end in ends[:-1]], axis=-1)
    return [
        y if p.bias is None else y + p.bias[...] for y, p in zip(results, projections, strict=True)
    ]
