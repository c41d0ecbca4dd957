"""Models of our layers on meshes of eight devices whose axes split the arrays at random.

Whatever the axes split, the loss and all gradients err as on one device. On a mesh with Auto and
Explicit axes all arrays are float32, because XLA for CPUs cannot add up 16-bit numbers in a
`jax.shard_map` over some axes of a mesh (`docs/troubleshooting.md`).
"""

import random

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from support.numerics import assert_as_accurate
from support.random_layers import BF16, EVEN, F32, FRAMEWORKS, Model, exact, graded, make_args
from support.random_meshes import SIZES, random_spec

AUTO, EXPLICIT = AxisType.Auto, AxisType.Explicit
KINDS_IN_32_BITS = (AUTO,) * 3, (EXPLICIT,) * 3, (AUTO, EXPLICIT, AUTO)
KINDS_IN_16_BITS = KINDS_IN_32_BITS[:2]


# A seed has two or three meshes. It takes 1.5 s for each of them, and 1.5 s more for the model.
@pytest.mark.parametrize(
    "seed", [pytest.param(i, marks=() if i < 5 else pytest.mark.full) for i in range(30)]
)
def test_random_splits(seed):
    is_wide = seed % 4 == 0
    dtypes = [(F32, F32)] if is_wide else [(BF16, F32), (BF16, F32), (BF16, BF16)]
    model = Model.make(random.Random(seed), FRAMEWORKS[seed % 3], dtypes)
    args, labels = make_args(model)
    on_one = jax.tree.leaves(graded(model)(args, labels))
    in_float64 = exact(args, labels)
    for kinds in KINDS_IN_32_BITS if is_wide else KINDS_IN_16_BITS:
        names, got = on_mesh(random.Random(f"{seed} {kinds}"), kinds, model, args, labels)
        # Each device rounds its part of a gradient to the dtype of the parameter, before the sum.
        assert_as_accurate(got[1:], on_one[1:], in_float64[1:], names=names, slack=2.0)
        # One number may err little on one device by chance, so it may err by half an epsilon of
        # FP8 or of the dtype.
        unit = 2**-4 if model.recipe else 0.5 * float(jnp.finfo(model.dtype).eps)
        floor = max(8.0, unit / float(jnp.finfo(F32).eps))
        loss = got[:1], on_one[:1], in_float64[:1]
        assert_as_accurate(*loss, names=[f"loss; {names[0]}"], slack=2.0, floor=floor)


def on_mesh(rng, kinds, model, args, labels):
    """Names of the gradients, and the loss and the gradients on a mesh with axes of these kinds."""
    sizes = rng.choice(SIZES)
    mesh = jax.make_mesh(sizes, ("a", "b", "c")[: len(sizes)], kinds[: len(sizes)])
    auto = [
        name for name, kind in zip(mesh.axis_names, mesh.axis_types, strict=True) if kind == AUTO
    ]
    explicit = [name for name in mesh.axis_names if name not in auto]

    def put(a, spec):
        return jax.device_put(a, NamedSharding(mesh, spec))

    def spec_of(path, a):
        name = jax.tree_util.keystr(path)
        # JAX refuses some splits of a product of its own over Explicit axes.
        is_plain = "heads" in name and model.recipe is None
        names = auto if explicit and is_plain else None
        return random_spec(rng, mesh, a.shape, names=names, first="blocks" in name)

    # On Auto axes the devices need not divide the axes of tokens.
    pinned = random_spec(
        rng, mesh, args[1].shape, names=explicit or None, last=2, is_even=bool(explicit)
    )
    is_free = not explicit and model.sizes == EVEN and rng.random() < 0.5

    def pin(x):
        split = jax.sharding.reshard if explicit else jax.lax.with_sharding_constraint
        return x if is_free else split(x, NamedSharding(mesh, pinned))

    specs = jax.tree_util.tree_map_with_path(spec_of, args)
    with jax.set_mesh(mesh):
        placed = jax.tree.map(put, args, specs)
        got = graded(model, pin)(placed, put(labels, random_spec(rng, mesh, labels.shape)))
    got = jax.tree.leaves(got)
    for a, b in zip(got[1:], jax.tree.leaves(placed), strict=True):
        assert a.dtype == b.dtype
        if not auto:  # where XLA chooses no split
            assert jax.typeof(a) == jax.typeof(b)
    leaves = jax.tree.leaves_with_path(specs, is_leaf=lambda s: isinstance(s, P))
    where = f"on {mesh}, tokens {None if is_free else pinned}"
    return [f"{jax.tree_util.keystr(path)}, {spec} {where}" for path, spec in leaves], got
