"""Times the Qwen 3 of Bonsai (https://github.com/jax-ml/bonsai) before and after `patch`.

The model's code is unchanged. The variants are the model with the loss of all logits in float32,
the patched model with `patched.loss`, and the patched model with its linear layers in FP8, without
the head. The widths are those of Llama 3.2 1B. Parameters and activations are bfloat16, as Bonsai's
loader leaves them. A call computes the loss and all gradients. Bonsai has no fused attention: its
scores take memory in all variants.

    python -m benchmarks.training.patched_bonsai --rounds 10

Install Bonsai as tests/foreign/bonsai.txt says.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx

import pallas_kernels
from benchmarks import command
from benchmarks.training import programs
from pallas_kernels.fp8 import Fp8DotGeneral, Fp8Einsum, RecipeName

VARIANTS: dict[str, RecipeName | None] = {
    "Bonsai's own": None,
    "patched": None,
    "patched, FP8 `rowwise`": "rowwise",
}


class Logits(nnx.Module):
    """The model's logits, without a cache from before."""

    def __init__(self, num_layers: int, vocabulary: int):
        # Not a dependency of the benchmarks.
        from bonsai.models.qwen3 import modeling  # pyright: ignore[reportMissingImports]

        config = modeling.ModelConfig(
            num_layers=num_layers,
            vocab_size=vocabulary,
            emb_dim=2048,
            mlp_dim=8192,
            num_heads=32,
            head_dim=64,
            num_kv_heads=8,
            rope_theta=1_000_000,
            rope_scaling_factor=8.0,
            local_rope_theta=1e4,
            norm_eps=1e-6,
            tie_word_embeddings=False,
        )
        self.model = modeling.Qwen3(config, rngs=nnx.Rngs(0))
        self.make_cache = modeling.init_cache
        nnx.update(self, jax.tree.map(lambda a: a.astype(jnp.bfloat16), nnx.state(self, nnx.Param)))

    def __call__(self, tokens: jax.Array) -> jax.Array:
        """The logits of `[B, T]` tokens."""
        cache = self.make_cache(self.model.config, *tokens.shape, 0, jnp.bfloat16)
        return self.model(tokens, cache=cache, segment_ids=jnp.ones_like(tokens))


def own_loss(model: nnx.Module, tokens: jax.Array, labels: jax.Array) -> jax.Array:
    """The mean loss of a model that is not patched."""
    logits = model(tokens).astype(jnp.float32)
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def patched_loss(model: nnx.Module, recipe: RecipeName | None) -> Callable[..., jax.Array]:
    """Patches the model, and returns its mean loss."""
    patched = pallas_kernels.patch(model, fp8=recipe)
    print(patched)
    if recipe is not None:
        for path, module in nnx.iter_modules(model):
            if "lm_head" in path:
                continue
            if isinstance(module, nnx.Linear | nnx.LinearGeneral):
                module.dot_general = Fp8DotGeneral(recipe)
            if isinstance(module, nnx.Einsum):
                module.einsum_op = Fp8Einsum(recipe)
    return lambda model, tokens, labels: patched.loss(model, labels, tokens)


def main() -> None:
    """Parses the command line, measures, prints and writes the table."""
    parser = command.parser("benchmarks.training.patched_bonsai", __doc__)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--rows", type=int, default=8, help="sequences of 1024 tokens")
    parser.add_argument("--vocabulary", type=int, default=128256)
    parser.add_argument("--output", type=Path, help="file to write the table to")
    arguments = parser.parse_args()

    shape = arguments.rows, 1025
    tokens = jax.random.randint(jax.random.key(0), shape, 0, arguments.vocabulary)
    batch = tokens[:, :-1], tokens[:, 1:]
    compiled: dict[str, Any] = {}
    params = None  # those of the first model; all models have the same
    for name, recipe in VARIANTS.items():
        model = Logits(arguments.layers, arguments.vocabulary)
        loss = own_loss if not compiled else patched_loss(model, recipe)
        graphdef, own_params = nnx.split(model)
        params = own_params if params is None else params

        def loss_of(params: Any, *batch: jax.Array, graphdef: Any = graphdef, loss: Any = loss):
            return loss(nnx.merge(graphdef, params), *batch)

        compiled[name] = jax.jit(jax.value_and_grad(loss_of)).lower(params, *batch).compile()
        print(f"{name}: loss {compiled[name](params, *batch)[0]:.4f}", flush=True)
        print(pallas_kernels.explain(loss_of, params, *batch), flush=True)
    args = params, *batch
    programs.report(parser.prog, compiled, args, arguments.rounds, arguments.output)


if __name__ == "__main__":
    main()
