"""SwiGLU."""

from pallas_kernels.swiglu.api import swiglu as swiglu
