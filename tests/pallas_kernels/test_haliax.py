"""The functions for Haliax in docs/frameworks.md: values and gradients."""

from typing import Any

import haliax as hax
import haliax.nn as hnn
import jax
import jax.numpy as jnp
import optax
import pytest

from support.frameworks import check, normal, shuffled
from support.pages import ROOT, python_blocks

BF16, F32 = jnp.bfloat16, jnp.float32
BATCH, POSITION, EMBED, MLP, VOCABULARY = hax.make_axes(
    batch=2, position=9, embed=20, mlp=33, vocabulary=37
)
KEY = jax.random.key(0)
AXES = (POSITION, EMBED, BATCH)
LABELS = jnp.arange(18).reshape(2, 9) * 2
RECIPE: dict[str, Any] = {}
exec(next(b for b in python_blocks(ROOT / "docs/frameworks.md") if "import haliax" in b), RECIPE)


def linear(axis_in, axis_out, **options):
    return hnn.Linear.init(axis_in, axis_out, key=KEY, use_bias=False, **options)


NORM = hnn.RmsNorm.init(EMBED, use_bias=False)
# One matrix is stored as the operation takes it, the others are not.
PROJECTIONS = linear(EMBED, MLP, out_first=False), linear(EMBED, MLP), linear(MLP, EMBED)
HEAD = linear(EMBED, VOCABULARY)


# The same functions without the recipe, on arrays [position, embed, batch]. On JAX 0.12 Haliax's
# norm runs, and its products do not.


def plain_norm(norm, x):
    wide = hax.named(x.astype(jnp.promote_types(F32, x.dtype)), AXES)
    return norm(wide).rearrange(AXES).array.astype(x.dtype)


def plain_mlp(layers, x):
    w_gate, w_up, w_down = (layer.weight.array.astype(x.dtype) for layer in layers)
    gate, up = jnp.einsum("peb,em->pmb", x, w_gate), jnp.einsum("peb,me->pmb", x, w_up)
    return jnp.einsum("pmb,em->peb", jax.nn.silu(gate) * up, w_down)


def plain_loss(head, x):
    logits = jnp.einsum("peb,ve->bpv", x, head.weight.array.astype(x.dtype))
    logits = logits.astype(jnp.promote_types(F32, x.dtype))
    return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits, LABELS))


# The recipe and the plain function, and their module or modules.
CASES = {
    "norm": (RECIPE["named_rms_norm"], plain_norm, NORM),
    "mlp": (lambda layers, x: RECIPE["named_mlp"](*layers, x), plain_mlp, PROJECTIONS),
    "loss": (
        lambda head, x: RECIPE["named_loss"](head, x, hax.named(LABELS, (BATCH, POSITION))),
        plain_loss,
        HEAD,
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_errs_as_little_as_plain_jax(name):
    """The axes of the tokens are in another order, with the embedding axis between them."""
    recipe, plain, module = CASES[name]
    leaves, structure = jax.tree.flatten(shuffled(module))

    def with_names(leaves, x):
        out = recipe(jax.tree.unflatten(structure, leaves), hax.named(x, AXES))
        return out.rearrange(AXES).array if isinstance(out, hax.NamedArray) else out

    def without(leaves, x):
        return plain(jax.tree.unflatten(structure, leaves), x)

    x = normal(tuple(axis.size for axis in AXES), BF16)
    check(with_names, without, leaves, x)
