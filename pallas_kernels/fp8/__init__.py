"""FP8 for training: tensors in 8-bit floating point, their products, and layers of products."""

from pallas_kernels.fp8.layers import Fp8DotGeneral as Fp8DotGeneral
from pallas_kernels.fp8.layers import Fp8Einsum as Fp8Einsum
from pallas_kernels.fp8.linear import fp8_linear as fp8_linear
from pallas_kernels.fp8.linear import fp8_linears as fp8_linears
from pallas_kernels.fp8.mlp import fp8_swiglu_mlp as fp8_swiglu_mlp
from pallas_kernels.fp8.norms import add_rms_norm_quantized as add_rms_norm_quantized
from pallas_kernels.fp8.norms import rms_norm_quantized as rms_norm_quantized
from pallas_kernels.fp8.products import Accumulation as Accumulation
from pallas_kernels.fp8.products import fp8_matmul as fp8_matmul
from pallas_kernels.fp8.quantize import Scaling as Scaling
from pallas_kernels.fp8.quantize import quantize as quantize
from pallas_kernels.fp8.quantize import quantize_both as quantize_both
from pallas_kernels.fp8.quantize import quantize_transposed as quantize_transposed
from pallas_kernels.fp8.recipes import RECIPES as RECIPES
from pallas_kernels.fp8.recipes import Cast as Cast
from pallas_kernels.fp8.recipes import Recipe as Recipe
from pallas_kernels.fp8.recipes import RecipeName as RecipeName
from pallas_kernels.fp8.types import Quantized as Quantized
from pallas_kernels.fp8.weights import QuantizedWeight as QuantizedWeight
from pallas_kernels.fp8.weights import quantize_weight as quantize_weight
