"""SwiGLU."""

from pallas_kernels.mlp.api import swiglu as swiglu
from pallas_kernels.mlp.config import Config as Config
from pallas_kernels.mlp.gated import MLPConfig as MLPConfig
from pallas_kernels.mlp.gated import Save as Save
from pallas_kernels.mlp.gated import swiglu_mlp as swiglu_mlp
