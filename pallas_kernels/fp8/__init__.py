"""FP8 for training: quantization of tensors to 8-bit floating point."""

from pallas_kernels.fp8.norms import add_rms_norm_quantized as add_rms_norm_quantized
from pallas_kernels.fp8.norms import rms_norm_quantized as rms_norm_quantized
from pallas_kernels.fp8.quantize import Scaling as Scaling
from pallas_kernels.fp8.quantize import quantize as quantize
from pallas_kernels.fp8.quantize import quantize_both as quantize_both
from pallas_kernels.fp8.quantize import quantize_transposed as quantize_transposed
from pallas_kernels.fp8.types import Quantized as Quantized
