"""A small language model of all layers, in Linen and in Equinox, and its loss as a function."""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from flax import linen as nn

from pallas_kernels import equinox as in_equinox
from pallas_kernels import linen as in_linen

V, D, F = 512, 128, 256
# One chunk of all tokens, which has the fewest kernels to compile.
CHUNK = 2048
BF16 = jnp.bfloat16


class LinenModel(nn.Module):
    """All modules of `pallas_kernels.linen`."""

    @nn.compact
    def __call__(self, tokens: jax.Array, labels: jax.Array) -> Any:
        h = nn.Embed(V, D, dtype=BF16, name="embed")(tokens)
        y = in_linen.SwiGLU(F, name="mlp")(in_linen.RMSNorm(name="norm")(h))
        y, _ = in_linen.AddRMSNorm(name="last_norm")(y, h)
        return in_linen.LinearCrossEntropy(V, chunk_size=CHUNK, name="head")(y, labels)


class EquinoxModel(eqx.Module):
    """All modules of `pallas_kernels.equinox`, for the tokens of one sequence."""

    embed: eqx.nn.Embedding
    norm: in_equinox.RMSNorm
    mlp: in_equinox.SwiGLU
    last_norm: in_equinox.AddRMSNorm
    head: in_equinox.LinearCrossEntropy

    def __init__(self, key: jax.Array):
        keys = jax.random.split(key, 3)
        self.embed = eqx.nn.Embedding(V, D, key=keys[0])
        self.norm = in_equinox.RMSNorm(D)
        self.mlp = in_equinox.SwiGLU(D, F, key=keys[1])
        self.last_norm = in_equinox.AddRMSNorm(D)
        self.head = in_equinox.LinearCrossEntropy(D, V, key=keys[2], chunk_size=CHUNK)

    def __call__(self, tokens: jax.Array, labels: jax.Array) -> Any:
        h = jax.vmap(self.embed)(tokens).astype(BF16)
        # A layer takes a token, as Equinox's own do, or a sequence.
        y, _ = self.last_norm(self.mlp(jax.vmap(self.norm)(h)), h)
        return self.head(y, labels)


type Loss = Callable[[Any, jax.Array, jax.Array], jax.Array]


def linen_model() -> tuple[Any, Loss]:
    """Shapes of the variables, and the mean loss of a batch as a function of them."""
    model = LinenModel()
    apply: Any = model.apply  # its type says that there may be other results
    tokens = jax.ShapeDtypeStruct((1, 8), jnp.int32)
    return jax.eval_shape(model.init, jax.random.key(0), tokens, tokens), apply


def equinox_model() -> tuple[Any, Loss]:
    """Shapes of the module, and the mean loss of a batch as a function of it."""
    shapes = eqx.filter_eval_shape(EquinoxModel, jax.random.key(0))
    return shapes, lambda model, tokens, labels: jnp.mean(jax.vmap(model)(tokens, labels))
