"""The kernels of the loss: GEMMs of the logits and of the gradients, and one over logits in memory."""
