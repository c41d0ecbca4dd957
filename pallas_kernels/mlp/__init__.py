"""SwiGLU, alone and as the whole gated MLP."""

from pallas_kernels.mlp.api import Save as Save
from pallas_kernels.mlp.api import swiglu as swiglu
from pallas_kernels.mlp.api import swiglu_mlp as swiglu_mlp
from pallas_kernels.mlp.config import Config as Config
from pallas_kernels.mlp.config import MLPConfig as MLPConfig
