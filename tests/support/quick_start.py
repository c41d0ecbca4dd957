"""A forward and a backward through the layers, as after `pip install pallas-kernels[flax]`.

`make wheel` runs this file in an environment that has nothing but the wheel.
"""

import importlib.metadata
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

import pallas_kernels
from pallas_kernels.layers import AddRMSNorm, LinearCrossEntropy, RMSNorm, SwiGLU


class Model(nnx.Module):
    """Every layer of the library between an embedding and the loss."""

    def __init__(self, vocab_size: int, size: int, rngs: nnx.Rngs):
        self.embed = nnx.Embed(vocab_size, size, rngs=rngs)
        self.norm = RMSNorm(size, rngs=rngs)
        self.mlp = SwiGLU(size, 4 * size, rngs=rngs)
        self.last_norm = AddRMSNorm(size, rngs=rngs)
        self.head = LinearCrossEntropy(size, vocab_size, rngs=rngs)

    def __call__(self, tokens: jax.Array, labels: jax.Array) -> Any:
        h = self.embed(tokens)
        normed, _ = self.last_norm(self.mlp(self.norm(h)), h)
        return self.head(normed, labels)


def main() -> None:
    """Trains a step and checks that the loss falls."""
    package = Path(pallas_kernels.__file__)
    if not package.is_relative_to(sys.prefix):
        sys.exit(f"imported {package} instead of the wheel in {sys.prefix}")
    graphdef, params = nnx.split(Model(256, 64, nnx.Rngs(0)))
    tokens = jax.random.randint(jax.random.key(0), (2, 17), 0, 256)

    @jax.jit
    def step(params):
        loss = lambda params: nnx.merge(graphdef, params)(tokens[:, :-1], tokens[:, 1:])
        value, grads = jax.value_and_grad(loss)(params)
        return value, jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)

    first, params = step(params)
    second, params = step(params)
    if not jnp.isfinite(first) or not second < first:
        sys.exit(f"the loss went from {first} to {second}")
    version = importlib.metadata.version("pallas-kernels")
    print(f"pallas-kernels {version}: the loss went from {first:.3f} to {second:.3f}")


if __name__ == "__main__":
    main()
