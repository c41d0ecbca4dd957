"""Flax NNX layers that call the operations, for use in any NNX model.

Arguments, parameters and layouts have Flax's names where Flax has them, so a checkpoint of
`nnx.RMSNorm`, `nnx.Linear` or `nnx.Embed` loads. `from_nnx` makes a layer of existing modules and
shares their parameters.

The layers run on any mesh, as their operations do. They create all parameters when they are
constructed, and work in NNX's graph mode and in its tree mode. Their inputs, other than labels and
the weights of tokens, have axes `[..., D]` and a floating dtype. Other dtypes raise TypeError, also
if the layer has a `dtype`, and an array without axes raises ValueError.
"""

from pallas_kernels.layers.head import LinearCrossEntropy
from pallas_kernels.layers.mlp import SwiGLU
from pallas_kernels.layers.norms import AddRMSNorm, RMSNorm

__all__ = ["AddRMSNorm", "LinearCrossEntropy", "RMSNorm", "SwiGLU"]
