"""Log-probabilities of a linear layer's labels, and losses made of them, without the logits."""

from pallas_kernels.log_probs.api import linear_log_probs as linear_log_probs
from pallas_kernels.log_probs.api import linear_token_loss as linear_token_loss
