"""Kernels of the loss: GEMMs of logits and gradients, and one over logits in memory."""
