"""A transformer in Flax NNX with all layers, for a mesh with the Explicit axes `fsdp` and `tensor`.

It is what a user writes: the layers of `pallas_kernels`, `document_attention` with a rotary
embedding between `nnx.LinearGeneral`, and a scan over layers under `jax.checkpoint`. Its layout is
the table of docs/meshes.md. Tests run it on CPUs and compile it for eight H100s.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec as P

from pallas_kernels import document_attention, document_bounds
from pallas_kernels.attention.bounds import Bounds
from pallas_kernels.fp8 import Fp8DotGeneral, RecipeName
from pallas_kernels.layers import AddRMSNorm, LinearCrossEntropy, RMSNorm, SwiGLU

AXES = ("fsdp", "tensor")
TOKENS = P("fsdp")
HEADS = P("fsdp", None, "tensor")
COLUMNS = P(None, ("tensor", "fsdp"))  # of the table of embeddings
SPECS = {
    "scale": P(),
    "embed": COLUMNS,
    "query": P("fsdp", "tensor"),
    "key": P("fsdp", "tensor"),
    "value": P("fsdp", "tensor"),
    "out": P("tensor", None, "fsdp"),
    "gate_proj": P("fsdp", "tensor"),
    "up_proj": P("fsdp", "tensor"),
    "down_proj": P("tensor", "fsdp"),
    "head": P("fsdp", "tensor"),
}
# The names of all that the backward of a layer's kernels reads.
KEPT = ("normed", "rstd", "residual", "context", "gate", "up")


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Sizes of the model, its dtype, and how it runs.

    Attributes:
      has_mesh: Whether a mesh with `AXES` is in context.
      kept: Names of the arrays that a layer keeps for its backward; None keeps everything.
      fp8: Recipe of the projections of the attention and of the MLP; None multiplies in `dtype`.
    """

    hidden: int
    intermediate: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    vocabulary: int
    num_layers: int
    dtype: Any
    has_mesh: bool = True
    kept: tuple[str, ...] | None = KEPT
    fp8: RecipeName | None = None

    def out(self, spec: P) -> dict[str, P]:
        """The argument `out_sharding` of an operation of Flax."""
        return {"out_sharding": spec} if self.has_mesh else {}


class Block(nnx.Module):
    """A layer: attention and a gated MLP, each after a norm."""

    def __init__(self, sizes: Sizes, rngs: nnx.Rngs):
        self.sizes = sizes
        d, h = sizes.hidden, sizes.head_size
        options: dict[str, Any] = {"use_bias": False, "dtype": sizes.dtype, "rngs": rngs}
        if sizes.fp8 is not None:
            options["dot_general"] = Fp8DotGeneral(sizes.fp8)
        self.attention_norm = RMSNorm(d)
        self.query = nnx.LinearGeneral(d, (sizes.num_heads, h), **options)
        self.key = nnx.LinearGeneral(d, (sizes.num_kv_heads, h), **options)
        self.value = nnx.LinearGeneral(d, (sizes.num_kv_heads, h), **options)
        self.out = nnx.LinearGeneral((sizes.num_heads, h), d, axis=(-2, -1), **options)
        self.mlp_norm = AddRMSNorm(d)
        self.mlp = SwiGLU(d, sizes.intermediate, dtype=sizes.dtype, fp8=sizes.fp8, rngs=rngs)

    def __call__(self, x: jax.Array, bounds: Bounds, angles: jax.Array) -> jax.Array:
        """The tokens `[B, S, D]` after the layer."""
        normed = self.attention_norm(x)
        q, k = _rotated(self.query(normed), angles), _rotated(self.key(normed), angles)
        heads = document_attention(q, k, self.value(normed), bounds)
        normed, x = self.mlp_norm(self.out(heads, **self.sizes.out(TOKENS)), x)
        return x + self.mlp(normed)


class Transformer(nnx.Module):
    """Embeddings, layers in a scan, a norm, and the loss of the output embedding."""

    def __init__(self, sizes: Sizes, rngs: nnx.Rngs):
        self.sizes = sizes
        d, v = sizes.hidden, sizes.vocabulary
        self.embed = nnx.Embed(v, d, dtype=sizes.dtype, rngs=rngs)
        make = nnx.vmap(lambda rngs: Block(sizes, rngs), in_axes=0, out_axes=0)
        self.blocks = make(rngs.split(sizes.num_layers))
        self.norm = RMSNorm(d)
        self.head = LinearCrossEntropy(d, v, rngs=rngs)

    def __call__(self, tokens: jax.Array, labels: jax.Array, segment_ids: jax.Array) -> jax.Array:
        """The mean loss of `[B, S]` tokens."""
        bounds = document_bounds(segment_ids)
        positions = (jnp.arange(tokens.shape[1]) - bounds.begins).astype(jnp.float32)
        exponents = -jnp.linspace(0, 1, self.sizes.head_size // 2, endpoint=False)
        angles = positions[..., None, None] * 10000.0**exponents
        graphdef, state = nnx.split(self.blocks)

        def layer(x: jax.Array, state: Any) -> tuple[jax.Array, None]:
            return nnx.merge(graphdef, state)(x, bounds, angles), None

        if (kept := self.sizes.kept) is not None:
            policy = jax.checkpoint_policies.save_only_these_names(*kept)
            layer = jax.checkpoint(layer, policy=policy, prevent_cse=False)
        x, _ = jax.lax.scan(layer, self._embedded(tokens), state)
        loss = self.head(self.norm(x), labels)
        assert isinstance(loss, jax.Array)  # it has no metrics
        return loss

    def _embedded(self, tokens: jax.Array) -> jax.Array:
        if not self.sizes.has_mesh:
            return self.embed(tokens)
        x = self.embed(jax.sharding.reshard(tokens, P()), out_sharding=P(None, *COLUMNS))
        return jax.sharding.reshard(jax.sharding.reshard(x, HEADS), TOKENS)


def _rotated(x: jax.Array, angles: jax.Array) -> jax.Array:
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    halves = first * cos - second * sin, second * cos + first * sin
    return jnp.concatenate(halves, axis=-1).astype(x.dtype)


def shapes(sizes: Sizes) -> nnx.State:
    """The parameters, as shapes."""
    return nnx.state(_abstract(sizes), nnx.Param)


def _abstract(sizes: Sizes) -> Transformer:
    return nnx.eval_shape(lambda: Transformer(sizes, nnx.Rngs(0)))


def specs(sizes: Sizes) -> nnx.State:
    """The spec of each parameter. Axis 0 of the parameters of layers counts the layers."""

    def spec(path: tuple[Any, ...], _: Any) -> P:
        names = [key.key for key in path if isinstance(key, jax.tree_util.DictKey)]
        (found,) = (SPECS[name] for name in names if name in SPECS)
        return P(None, *found) if "blocks" in names else found

    return jax.tree_util.tree_map_with_path(spec, shapes(sizes))


def gradients_of(sizes: Sizes) -> Callable[..., Any]:
    """Loss and gradients of `(params, tokens, labels, segment_ids)`."""
    graphdef = nnx.graphdef(_abstract(sizes))
    return jax.value_and_grad(lambda params, *batch: nnx.merge(graphdef, params)(*batch))
