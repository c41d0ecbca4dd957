"""Losses of the output layer on two GPUs, each with a part of the vocabulary."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from pallas_kernels import linear_cross_entropy, linear_distillation_loss, linear_log_probs
from support.numerics import assert_as_accurate
from support.on_gpu import sampled

pytestmark = [pytest.mark.gpu, pytest.mark.gpus]

NUM_TOKENS, HIDDEN_SIZE, TEACHER_HIDDEN_SIZE = 1000, 1024, 1536
VOCAB_SIZE = 50240  # 25120 on each GPU, which no tile divides
SPECS = (P(), P("tensor"), P(), P(), P("tensor"))


def cross_entropy(x, weight, labels, teacher_x, teacher_weight, **options):
    del teacher_x, teacher_weight
    return linear_cross_entropy(x, weight, labels, **options)


def log_probs(x, weight, labels, teacher_x, teacher_weight, **options):
    del teacher_x, teacher_weight
    return linear_log_probs(x, weight, labels, return_entropy=True, **options)


def distillation(x, weight, labels, teacher_x, teacher_weight, **options):
    del labels
    return linear_distillation_loss(x, weight, teacher_x, teacher_weight, **options)


def both_reductions(name, loss):
    return {
        name: functools.partial(loss, reduction="mean"),
        f"{name} of tokens": functools.partial(loss, reduction="none"),
    }


LOSSES = {
    "log_probs": log_probs,
    **both_reductions("cross_entropy", cross_entropy),
    **both_reductions("forward_kl", functools.partial(distillation, divergence="forward_kl")),
    **both_reductions("reverse_kl", functools.partial(distillation, divergence="reverse_kl")),
    **both_reductions(
        "jensen_shannon", functools.partial(distillation, divergence="jensen_shannon")
    ),
}


@functools.cache
def make_arguments():
    keys = jax.random.split(jax.random.key(0), 5)
    normal = lambda key, *shape: jax.random.normal(key, shape, jnp.bfloat16)
    scale = jnp.bfloat16(0.05)
    return (
        normal(keys[0], NUM_TOKENS, HIDDEN_SIZE),
        scale * normal(keys[1], VOCAB_SIZE, HIDDEN_SIZE),
        jax.random.randint(keys[2], (NUM_TOKENS,), 0, VOCAB_SIZE).at[::7].set(-100),
        normal(keys[3], NUM_TOKENS, TEACHER_HIDDEN_SIZE),
        scale * normal(keys[4], VOCAB_SIZE, TEACHER_HIDDEN_SIZE),
    )


def graded(fn):
    """The results of `fn` and its gradients of `x` and `weight`, compiled."""

    @jax.jit
    def run(x, weight, *others):
        results, vjp = jax.vjp(lambda x, weight: fn(x, weight, *others), x, weight)
        results, tree = jax.tree.flatten(results)
        cotangents = [
            jax.random.normal(jax.random.key(i), a.shape, a.dtype) for i, a in enumerate(results)
        ]
        return [*results, *vjp(jax.tree.unflatten(tree, cotangents))]

    return run


@functools.cache
def on_one_gpu(name, implementation):
    """The kernels' results, or those of plain JAX in float32."""
    if implementation != "xla":
        return sampled(
            graded(functools.partial(LOSSES[name], implementation=implementation))(
                *make_arguments()
            )
        )
    in_float32 = [a.astype(jnp.float32) if a.dtype == jnp.bfloat16 else a for a in make_arguments()]
    exact = functools.partial(LOSSES[name], implementation="xla", chunk_size=512)
    with jax.default_matmul_precision("highest"):
        return sampled(graded(exact)(*in_float32))


@pytest.mark.parametrize("mode", ["auto", "explicit", "manual"])
@pytest.mark.parametrize("name", list(LOSSES))
def test_two_gpus_compute_what_one_does(name, mode):
    """The gradients' errors, and those of results that each token has."""
    axis_type = AxisType.Explicit if mode == "explicit" else AxisType.Auto
    mesh = jax.make_mesh((2,), ("tensor",), (axis_type,), devices=jax.devices()[:2])
    fn = functools.partial(LOSSES[name], implementation="mosaic_gpu")
    if mode == "manual":
        fn = functools.partial(fn, vocab_axis="tensor")
        fn = jax.shard_map(fn, mesh=mesh, in_specs=SPECS, out_specs=P())
    arguments = [
        jax.device_put(a, NamedSharding(mesh, spec))
        for a, spec in zip(make_arguments(), SPECS, strict=True)
    ]
    with jax.set_mesh(mesh):
        got = sampled(jax.device_get(graded(fn)(*arguments)))
    found = got, on_one_gpu(name, "mosaic_gpu"), on_one_gpu(name, "xla")
    assert np.ndim(got[0]) or np.isclose(got[0], found[-1][0], rtol=1e-4)
    # The mean of a loss is one number, whose error depends on chance.
    found = [[a for a in arrays if np.ndim(a)] for arrays in found]
    assert_as_accurate(
        *found,
        names=[*("result", "entropy")[: len(found[0]) - 2], "dx", "dweight"],
        # Each GPU rounds its summand of dx, and the sum is rounded. The mean's cotangent multiplies
        # the sum of cross-entropy, which rounds it again, where one GPU rounds once.
        slack=1.2 * math.sqrt(3 if name == "cross_entropy" else 2),
        floor=16.0,
    )
