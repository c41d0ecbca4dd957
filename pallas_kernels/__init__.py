"""Operations for training a Llama on NVIDIA GPUs, each with an exact gradient.

Shape letters used everywhere: B batch, S sequence, T tokens (B·S, or any leading axes), D hidden
size, F intermediate size, V vocabulary, N query heads, K key/value heads, H head size, L layers.
"""

from pallas_kernels.loss import LossMetrics as LossMetrics
from pallas_kernels.loss import LossPlan as LossPlan
from pallas_kernels.loss import linear_cross_entropy as linear_cross_entropy
from pallas_kernels.loss import linear_cross_entropy_plan as linear_cross_entropy_plan
from pallas_kernels.mlp import swiglu as swiglu
from pallas_kernels.mlp import swiglu_mlp as swiglu_mlp
from pallas_kernels.norm import add_rms_norm as add_rms_norm
from pallas_kernels.norm import rms_norm as rms_norm
from pallas_kernels.sharded_norm import sharded_add_rms_norm as sharded_add_rms_norm
