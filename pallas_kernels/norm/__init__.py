"""RMSNorm, alone and fused with the residual addition before it."""

from pallas_kernels.norm.api import Casting as Casting
from pallas_kernels.norm.api import add_rms_norm as add_rms_norm
from pallas_kernels.norm.api import norm_options as norm_options
from pallas_kernels.norm.api import rms_norm as rms_norm
from pallas_kernels.norm.config import Config as Config
