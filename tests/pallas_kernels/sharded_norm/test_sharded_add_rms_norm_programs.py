"""Programs of the sharded norm: collectives, memory and transformations."""

import functools
import re
from collections import Counter

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from pallas_kernels import add_rms_norm, sharded_add_rms_norm
from support.numerics import quick_jit, value_and_grads
from support.sharded_norm import (
    BF16,
    DTYPES,
    F32,
    GATHER,
    NORMS,
    D,
    compare,
    each_gather,
    each_norm,
    graded,
    in_pairs,
    make_args,
    mesh_of,
    on_mesh,
)

# Collectives, and arrays that are kept for the backward.

COLLECTIVES = "all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute"


def collectives(fn, *args) -> Counter[tuple[str, tuple[int, ...]]]:
    """How many collectives a compiled function has, by name and shape of the result."""
    program = quick_jit(fn).lower(*args).compile().as_text()
    assert program is not None
    found = re.findall(rf" = (\(?[^()]+\)?) ({COLLECTIVES})(?:-start)?\(", program)
    assert len(found) == len(re.findall(rf" (?:{COLLECTIVES})(?:-start)?\(", program))
    return Counter(
        (name, tuple(int(size) for size in dims.split(",") if size))
        for results, name in found
        for dims in re.findall(r"\w\[([\d,]*)\]", results)
    )


@in_pairs("axes, dtype, gather", NORMS, [{"tensor": 8}, {"data": 2, "tensor": 4}], DTYPES, GATHER)
def test_between_devices(implementation, axes, dtype, gather):
    n, leading = axes["tensor"], ("data",) if "data" in axes else ()
    shape = (2,) * len(leading) + (40, D)
    whole, shard = ((1,) * len(leading) + (size, D) for size in (40, 40 // n))
    args, cotangents = make_args(n, shape, (dtype,) * 3, gather=gather)
    fn = on_mesh(mesh_of(**axes), leading, gather=gather, implementation=implementation)
    forward = Counter({("reduce-scatter", shard): 1, ("all-gather", whole): int(gather)})
    assert collectives(fn, *args) == +forward
    # dweight is summed over all devices, once.
    backward = Counter({("all-gather", whole): 1, ("reduce-scatter", shard): int(gather)})
    backward += Counter({("all-reduce", (D,)): 1})
    run = functools.partial(value_and_grads, fn)
    assert collectives(run, args, cotangents) == forward + backward


def test_a_weight_that_is_stored_in_parts_is_gathered_once():
    axes = {"data": 2, "fsdp": 2, "tensor": 2}
    mesh, split = mesh_of(**axes), ("data", "fsdp")
    dtypes = (F32,) * 3
    (partials, residual, weight), cotangents = make_args(2, (4, 6, D), dtypes)
    stored = jax.device_put(weight, NamedSharding(mesh, P("fsdp")))
    args = partials, residual, stored
    run = functools.partial(value_and_grads, on_mesh(mesh, (split,), implementation="xla"))
    compare(quick_jit(run)(args, cotangents), args, cotangents, num_parts=4)
    moved = collectives(run, args, cotangents)
    of_weight = {key: number for key, number in moved.items() if len(key[1]) == 1}
    assert of_weight == {("all-gather", (D,)): 1, ("all-reduce", (D,)): 1}


def kept(fn, args):
    """Shapes and dtypes of the arrays that are saved for the backward."""
    leaves = jax.tree.leaves(jax.eval_shape(lambda *args: jax.vjp(fn, *args)[1], *args))
    return Counter((a.shape, str(a.dtype)) for a in leaves if a.ndim)


def kept_on_one_device(n, args, **options):
    """`kept` of what one device of n runs."""
    found = []

    def local(partial, residual, weight, **options):
        fn = functools.partial(sharded_add_rms_norm, **options)
        found.append(kept(fn, (partial, residual, weight)))
        return fn(partial, residual, weight)

    jax.eval_shape(on_mesh(mesh_of(tensor=n), fn=local, **options), *args)
    return found[0]


@each_gather
def test_kept_with_the_kernel(kernel_formulas, gather):
    args, _ = make_args(8, (40, D), (BF16, BF16, F32))
    assert kept_on_one_device(8, args, gather=gather) == Counter(
        {
            ((5, D), "bfloat16"): 1,  # residual_out
            ((5,), "float32"): 1,  # rstd
            ((D,), "float32"): 1,  # the weight
        }
    )


@each_norm
@each_gather
def test_kept_is_a_part_of_what_one_device_keeps(implementation, gather):
    n, num_tokens = 8, 40
    args, _ = make_args(n, (num_tokens, D), (BF16, BF16, BF16))
    got = kept_on_one_device(n, args, implementation=implementation, gather=gather)
    on_one = kept(add_rms_norm, (args[0][0], *args[1:]))
    assert any(num_tokens in shape for shape, _ in on_one)
    part = lambda shape: tuple(size // n if size == num_tokens else size for size in shape)
    assert got == Counter({(part(shape), dtype): k for (shape, dtype), k in on_one.items()})


# Transformations.


def normally(name):
    """Both norms, of which the normal run has this one."""
    norms = [pytest.param(norm, marks=() if norm == name else pytest.mark.full) for norm in NORMS]
    return pytest.mark.parametrize("implementation", norms, indirect=True)


@normally("xla_kernel")
def test_remat_keeps_names_and_does_not_sum_again(implementation):
    policy = jax.checkpoint_policies.save_only_these_names("residual", "rstd", "normed")

    def block(partial, residual, weight, **options):
        y, residual_out = sharded_add_rms_norm(partial, residual, weight, **options)
        return jnp.sin(y), residual_out  # the backward of sin reads y

    def with_policy(*args, **options):
        return jax.checkpoint(functools.partial(block, **options), policy=policy)(*args)

    args, cotangents = make_args(8, (40, D))
    run = lambda fn: functools.partial(
        value_and_grads, on_mesh(mesh_of(tensor=8), fn=fn, implementation=implementation)
    )
    chex.assert_trees_all_close(
        quick_jit(run(with_policy))(args, cotangents), quick_jit(run(block))(args, cotangents)
    )
    again = collectives(run(with_policy), args, cotangents)
    again.subtract(collectives(run(block), args, cotangents))
    assert +again == Counter({("all-gather", (40, D)): 1}) and not -again


@normally("xla")
def test_scan_over_layers(implementation):
    n, num_layers, tokens = 4, 3, 8
    rng = np.random.default_rng(0)
    shares = rng.uniform(0.5, 1.5, size=(num_layers, n)).astype(np.float32)
    weights = rng.uniform(0.5, 1.5, size=(num_layers, D)).astype(np.float32)
    x, dx_out = rng.normal(size=(2, tokens, D)).astype(np.float32)

    def layers(norm, partial_of, x, y, shares, weights):
        def layer(carry, layer):
            share, weight = layer
            y, residual = carry
            return norm(partial_of(jnp.sin(y), share), residual, weight), None

        return jax.lax.scan(layer, (y, x), (shares, weights))[0]

    def sharded(x, shares, weights):
        y = jax.lax.all_gather(x, "tensor", tiled=True)
        norm = functools.partial(
            sharded_add_rms_norm, axis_name="tensor", implementation=implementation
        )
        return layers(norm, lambda a, share: a * share, x, y, shares, weights)[1]

    def on_one(x, shares, weights):
        norm = functools.partial(add_rms_norm, implementation="reference")
        return layers(norm, lambda a, share: a * jnp.sum(share), x, x, shares, weights)[1]

    on_all = jax.shard_map(
        sharded,
        mesh=mesh_of(tensor=n),
        in_specs=(P("tensor"), P(None, "tensor"), P()),
        out_specs=P("tensor"),
        check_vma=False,
    )
    got, expected = (graded(fn)((x, shares, weights), dx_out) for fn in (on_all, on_one))
    for a, b in zip(got, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5 * np.max(np.abs(b)))


@each_norm
def test_vmap_is_a_leading_axis(implementation):
    args, cotangents = make_args(4, (3, 8, D))

    def mapped(partial, residual, weight, **options):
        fn = functools.partial(sharded_add_rms_norm, **options)
        return jax.vmap(fn, in_axes=(0, 0, None))(partial, residual, weight)

    run = lambda fn: graded(
        on_mesh(mesh_of(tensor=4), (None,), fn=fn, implementation=implementation)
    )(args, cotangents)
    chex.assert_trees_all_close(run(mapped), run(sharded_add_rms_norm), atol=1e-6)
