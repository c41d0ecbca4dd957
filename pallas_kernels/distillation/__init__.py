"""Distillation losses of two linear layers over one vocabulary, without the logits in memory."""

from pallas_kernels.distillation.api import linear_distillation_loss as linear_distillation_loss
from pallas_kernels.distillation.api import (
    linear_distillation_loss_top_k as linear_distillation_loss_top_k,
)
