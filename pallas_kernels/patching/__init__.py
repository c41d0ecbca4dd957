"""Puts the operations into a Flax NNX model that exists, and takes its head into the loss.

    patched = pallas_kernels.patch(model)
    print(patched)  # what runs now, and why a module was left
    loss = patched.loss(model, labels, tokens)  # never forms all logits

A module is recognized by what it computes. `candidates` finds modules by the shapes of their
parameters. `check` runs them on random numbers and compares the results with the formula of an
operation. `rules` has the operation and its arguments for one module, and `classes` makes the
module call it. `head` finds the output projection in the traced model.
"""

from pallas_kernels.patching.api import Patched, patch

__all__ = ["Patched", "patch"]
