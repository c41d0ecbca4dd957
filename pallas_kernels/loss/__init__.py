"""Cross-entropy of a linear layer, without the logits in memory."""

from pallas_kernels.loss.api import LossMetrics as LossMetrics
from pallas_kernels.loss.api import linear_cross_entropy as linear_cross_entropy
from pallas_kernels.loss.api import linear_cross_entropy_plan as linear_cross_entropy_plan
from pallas_kernels.loss.description import LossPlan as LossPlan
from pallas_kernels.loss.low_rank import LoRA as LoRA
