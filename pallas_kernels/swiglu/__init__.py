"""SwiGLU."""

from pallas_kernels.swiglu.api import swiglu as swiglu
from pallas_kernels.swiglu.config import Config as Config
from pallas_kernels.swiglu.mlp import MLPConfig as MLPConfig
from pallas_kernels.swiglu.mlp import Save as Save
from pallas_kernels.swiglu.mlp import swiglu_mlp as swiglu_mlp
