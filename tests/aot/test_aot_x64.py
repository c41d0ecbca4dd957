"""Gradients of every operation with `jax_enable_x64`, compiled for an H100. 30 s on one core."""

import jax
import jax.numpy as jnp
import pytest

from aot.harness import Case
from pallas_kernels import (
    add_rms_norm,
    linear_cross_entropy,
    linear_log_probs,
    rms_norm,
    swiglu,
    swiglu_mlp,
)

pytestmark = pytest.mark.oldest
BF16, F32 = jnp.bfloat16, jnp.float32
T, D, F, V = 4096, 512, 1024, 2048


def with_x64(fn, *args) -> Case:
    floating = [i for i, a in enumerate(args) if jnp.issubdtype(a.dtype, jnp.floating)]
    loss = lambda *args: sum(jnp.sum(a.astype(F32)) for a in jax.tree.leaves(fn(*args)))

    def run(*args):
        with jax.enable_x64(True):
            return jax.grad(loss, floating)(*args)

    return Case(run, args)


def array(*shape, dtype=BF16):
    return jax.ShapeDtypeStruct(shape, dtype)


X, NORM, LABELS = array(T, D), array(D, dtype=F32), array(T, dtype=jnp.int32)
WEIGHTS = array(D, F, dtype=F32), array(D, F, dtype=F32), array(F, D, dtype=F32)


def in_chunks(x, weight, labels):
    labels = labels.astype(jnp.int64)
    return linear_cross_entropy(x, weight, labels, chunk_size=1024, label_smoothing=0.1)


def with_argmax(x, weight, labels):
    return linear_log_probs(x, weight, labels, return_argmax=True, return_entropy=True)


CASES = {
    "rms_norm": with_x64(rms_norm, X, NORM),
    "add_rms_norm": with_x64(add_rms_norm, X, X, NORM),
    "swiglu": with_x64(
        lambda gate, up: swiglu(gate, up, implementation="mosaic_gpu"), array(T, F), array(T, F)
    ),
    "swiglu_mlp": with_x64(swiglu_mlp, X, *WEIGHTS),
    "loss": with_x64(linear_cross_entropy, X, array(V, D), LABELS),
    "argmax": with_x64(with_argmax, X, array(V, D), LABELS),
    "loss in chunks": with_x64(in_chunks, X, array(V, D), LABELS),
}


@pytest.mark.parametrize("chip, case", [("h100", case) for case in CASES])
def test_kernels_run(compiled, chip, case):
    assert compiled(chip, case).kernels
