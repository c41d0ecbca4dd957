"""RMSNorm of partial sums over devices and a residual that is split by tokens over them."""

from pallas_kernels.sharded_norm.api import sharded_add_rms_norm as sharded_add_rms_norm
