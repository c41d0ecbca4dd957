"""A small language model of all layers, in Linen and in Equinox, and its loss as a function."""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from flax import linen as nn

from pallas_kernels import equinox as in_equinox
from pallas_kernels import linen as in_linen

type Loss = Callable[[Any, jax.Array, jax.Array], jax.Array]


class LinenModel(nn.Module):
    """All modules of `pallas_kernels.linen`."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    dtype: Any

    @nn.compact
    def __call__(self, tokens: jax.Array, labels: jax.Array) -> Any:
        h = nn.Embed(self.vocab_size, self.hidden_size, dtype=self.dtype, name="embed")(tokens)
        y = in_linen.RMSNorm(name="norm")(h)
        y = in_linen.SwiGLU(self.intermediate_size, name="mlp")(y)
        y, _ = in_linen.AddRMSNorm(name="last_norm")(y, h)
        return in_linen.LinearCrossEntropy(self.vocab_size, name="head")(y, labels)


class EquinoxModel(eqx.Module):
    """All modules of `pallas_kernels.equinox`, for the tokens of one sequence."""

    embed: eqx.nn.Embedding
    norm: in_equinox.RMSNorm
    mlp: in_equinox.SwiGLU
    last_norm: in_equinox.AddRMSNorm
    head: in_equinox.LinearCrossEntropy
    dtype: Any = eqx.field(static=True)

    def __init__(
        self, vocab_size: int, hidden_size: int, intermediate_size: int, dtype: Any, key: jax.Array
    ):
        keys = jax.random.split(key, 3)
        self.embed = eqx.nn.Embedding(vocab_size, hidden_size, key=keys[0])
        self.norm = in_equinox.RMSNorm(hidden_size)
        self.mlp = in_equinox.SwiGLU(hidden_size, intermediate_size, key=keys[1])
        self.last_norm = in_equinox.AddRMSNorm(hidden_size)
        self.head = in_equinox.LinearCrossEntropy(hidden_size, vocab_size, key=keys[2])
        self.dtype = dtype

    def __call__(self, tokens: jax.Array, labels: jax.Array) -> Any:
        h = jax.vmap(self.embed)(tokens).astype(self.dtype)
        # A layer takes a token, as Equinox's own do, or a sequence.
        y = self.mlp(jax.vmap(self.norm)(h))
        y, _ = self.last_norm(y, h)
        return self.head(y, labels)


def linen_loss(sizes: tuple[int, int, int], dtype: Any) -> tuple[Any, Loss]:
    """Shapes of the variables, and the mean loss of a batch as a function of them."""
    model = LinenModel(*sizes, dtype)
    tokens = jax.ShapeDtypeStruct((1, 8), jnp.int32)
    apply: Any = model.apply  # its type says that there may be other results
    return jax.eval_shape(model.init, jax.random.key(0), tokens, tokens), apply


def equinox_loss(sizes: tuple[int, int, int], dtype: Any) -> tuple[Any, Loss]:
    """Shapes of the module, and the mean loss of a batch as a function of it."""
    shapes = eqx.filter_eval_shape(EquinoxModel, *sizes, dtype, jax.random.key(0))
    return shapes, lambda model, tokens, labels: jnp.mean(jax.vmap(model)(tokens, labels))


LOSSES = {"linen": linen_loss, "equinox": equinox_loss}
