"""The linear cross-entropy on a GPU, at real sizes."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import linear_cross_entropy
from support.numerics import assert_as_accurate, value_and_grads
from support.on_gpu import graded, large, sampled

pytestmark = pytest.mark.gpu
ALL_OPTIONS = {"label_smoothing": 0.1, "z_loss": 1e-3, "logit_softcap": 20.0}


def assert_loss_is_as_accurate(shape, *, dtype=jnp.bfloat16, weight_dtype=jnp.bfloat16, **options):
    """Compares loss and gradients with those of all logits in `dtype`, and with a second run."""
    num_tokens, hidden_size, vocab_size = shape
    keys = jax.random.split(jax.random.key(0), 4)
    x = jax.random.normal(keys[0], (num_tokens, hidden_size), dtype)
    weight = (jax.random.normal(keys[1], (vocab_size, hidden_size)) * 0.05).astype(weight_dtype)
    labels = jax.random.randint(keys[2], (num_tokens,), 0, vocab_size).at[::7].set(-100)
    bias = jax.random.normal(keys[3], (vocab_size,))
    is_transposed = options.get("weight_layout") == "dv"
    loss_options = {k: v for k, v in options.items() if k in ALL_OPTIONS or k == "reduction"}

    @jax.custom_jvp
    def with_rounded_gradient(logits):
        return logits

    @with_rounded_gradient.defjvp
    def _(primals, tangents):
        # XLA would drop a cast to 16 bits and back.
        bits = jnp.finfo(dtype)
        rounded = jax.lax.reduce_precision(tangents[0], bits.nexp, bits.nmant)
        return primals[0], rounded

    def exact(x, weight, bias):
        floats = x.astype(jnp.float32), weight.astype(jnp.float32)
        return linear_cross_entropy(
            *floats, labels, bias=bias, implementation="xla", chunk_size=1024, **loss_options
        )

    def plain(x, weight, bias):
        """The loss with logits and their gradients rounded to `dtype`."""
        logits = with_rounded_gradient((x @ weight.astype(dtype).T).astype(jnp.float32) + bias)
        capped = logits
        if cap := loss_options.get("logit_softcap"):
            capped = cap * jnp.tanh(logits / cap)
        lse = jax.nn.logsumexp(capped, axis=-1)
        picked = jnp.take_along_axis(capped, jnp.maximum(labels, 0)[:, None], axis=-1)[:, 0]
        smoothing = loss_options.get("label_smoothing", 0.0)
        losses = lse - (1 - smoothing) * picked - smoothing * jnp.mean(capped, axis=-1)
        losses += loss_options.get("z_loss", 0.0) * jnp.square(lse)
        losses = jnp.where(labels >= 0, losses, 0)
        if loss_options.get("reduction") == "none":
            return losses
        return jnp.sum(losses) / jnp.sum(labels >= 0, dtype=jnp.float32)

    def ours(x, weight, bias):
        weight = weight.T if is_transposed else weight
        return linear_cross_entropy(
            x, weight, labels, bias=bias, implementation="mosaic_gpu", **options
        )

    cotangent = jax.random.normal(keys[0], labels.shape) + 1
    if loss_options.get("reduction") != "none":
        cotangent = jnp.float32(1)
    graded = lambda fn: jax.jit(lambda *args: value_and_grads(fn, args, cotangent))
    arguments = x, weight, bias
    with jax.default_matmul_precision("highest"):
        want = sampled(graded(exact)(*arguments))
    got = graded(ours)(*arguments)
    names = ("loss", "dx", "dweight", "dbias")
    assert_as_accurate(sampled(got), sampled(graded(plain)(*arguments)), want, names=names)
    chex.assert_trees_all_equal(got, graded(ours)(*arguments))
    # Without gradients the kernel does not round the logits.
    alone = jax.jit(ours)(*arguments)
    np.testing.assert_allclose(alone, want[0], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("shape", [(4096, 2048, 128256), (1000, 1024, 32001)], ids=str)
def test_linear_cross_entropy_at_real_sizes(shape):
    assert_loss_is_as_accurate(shape)


@pytest.mark.parametrize(
    "options",
    [
        {"chunk_size": 100},
        {"chunk_size": 100, "dtype": jnp.float16},
        {"vocab_chunk_size": 8192},
        {"vocab_chunk_size": 1000, "weight_dtype": jnp.float32, **ALL_OPTIONS},
        {"reduction": "none", "chunk_size": 512, **ALL_OPTIONS},
        {"reduction": "none", "vocab_chunk_size": 30000},
        {"vocab_chunk_size": 8192, **ALL_OPTIONS},
        {"vocab_chunk_size": 30000, "dtype": jnp.float16},
        {"weight_layout": "dv", "chunk_size": 300, **ALL_OPTIONS},
        {"weight_layout": "dv", "vocab_chunk_size": 1000, "dtype": jnp.float16},
    ],
    ids=str,
)
def test_linear_cross_entropy_with_options(options):
    # A vocabulary that no tile divides; rows of `[D, V]` must be a multiple of 128.
    vocab_size = 50304 if "weight_layout" in options else 50257
    assert_loss_is_as_accurate((1000, 1024, vocab_size), **options)


@large
def test_linear_cross_entropy_of_more_logits_than_int32_can_count():
    assert_loss_is_as_accurate((17408, 128, 128256), chunk_size=17408)


# With weights of size 12 the labels' logits are so far below the largest one that the kernel makes
# the exponentials again. The last case has more logits than int32 can count.
@pytest.mark.parametrize(
    "shape, options, size",
    [
        ((4096, 2048, 128256), {"chunk_size": 2048}, 1),
        ((1000, 1024, 32001), {"chunk_size": 400}, 1),
        ((1000, 1024, 32001), {"chunk_size": 400}, 12),
        ((1000, 1024, 32001), {"chunk_size": 400, "z_loss": 1e-2}, 1),
        ((4096, 2048, 128256), {"vocab_chunk_size": 2048}, 1),
        ((1000, 1024, 32001), {"vocab_chunk_size": 3000}, 12),
        # The cases use the memory of a float32 gradient, of a 16-bit one, 1024 more tokens, and 3
        # chunks.
        ((4096, 2048, 128256), {}, 1),
        ((2000, 2048, 128256), {"max_logits_bytes": 2**24, "z_loss": 1e-2}, 12),
        ((5000, 2048, 32000), {"max_logits_bytes": 2**26}, 1),
        ((3000, 1600, 32001), {"max_logits_bytes": 2**22}, 1),  # sizes that no tile divides
        ((10000, 2048, 32000), {"max_logits_bytes": 2**27}, 1),
        # The same with a weight [D, V].
        ((4096, 2048, 128256), {"weight_layout": "dv", "max_logits_bytes": 2**24}, 1),
        ((2000, 2048, 128256), {"weight_layout": "dv", "max_logits_bytes": 2**24}, 12),
        ((5000, 2048, 32000), {"weight_layout": "dv", "max_logits_bytes": 2**26}, 1),
        ((10000, 2048, 32000), {"weight_layout": "dv", "max_logits_bytes": 2**25}, 1),
        ((1000, 520, 32128), {"weight_layout": "dv", "chunk_size": 400, "z_loss": 1e-2}, 12),
        pytest.param((17408, 128, 128256), {"chunk_size": 17408}, 1, marks=large),
    ],
    ids=str,
)
def test_linear_cross_entropy_by_exponentials(shape, options, size):
    """A loss without a bias, as `pallas_kernels/loss/mosaic_gpu/exponentials.py` computes it."""
    num_tokens, hidden_size, vocab_size = shape
    keys = jax.random.split(jax.random.key(0), 3)
    x = jax.random.normal(keys[0], (num_tokens, hidden_size), jnp.bfloat16)
    weight = size * jax.random.normal(keys[1], (vocab_size, hidden_size)) / hidden_size**0.5
    weight = weight.astype(jnp.bfloat16)
    labels = jax.random.randint(keys[2], (num_tokens,), 0, vocab_size).at[::7].set(-100)
    z_loss = options.get("z_loss", 0.0)

    def exact(x, weight):
        return linear_cross_entropy(
            x, weight, labels, implementation="xla", chunk_size=1024, z_loss=z_loss
        )

    def ours(x, weight):
        weight = weight.T if options.get("weight_layout") == "dv" else weight
        return linear_cross_entropy(x, weight, labels, implementation="mosaic_gpu", **options)

    @jax.jit
    def plain(x, weight):
        """The same roundings, except for tokens whose exponentials the kernel makes again."""
        dot = functools.partial(jnp.einsum, preferred_element_type=jnp.float32)
        logits = dot("td,vd->tv", x, weight)
        counts = (labels >= 0).astype(jnp.float32)
        column = jnp.maximum(labels, 0)[:, None]
        lse = jax.nn.logsumexp(logits, axis=-1, keepdims=True)
        offset = jnp.take_along_axis(logits, column, axis=-1)
        offset = jnp.where(lse - offset > 40, lse, offset)
        total = jnp.exp(lse - offset) / (1 + 2 * z_loss * lse)
        losses = lse - jnp.take_along_axis(logits, column, axis=-1) + z_loss * jnp.square(lse)
        onehot = jax.lax.broadcasted_iota(jnp.int32, logits.shape, 1) == column
        dz = jnp.exp(logits - offset) - jnp.where(onehot, total, 0)
        bits = jnp.finfo(x.dtype)
        rounded = jax.lax.reduce_precision(dz, bits.nexp, bits.nmant)
        at_label = lambda a: jnp.sum(jnp.where(onehot, a, 0), axis=1, keepdims=True)
        factor = counts[:, None] / jnp.sum(counts) / total * at_label(dz) / at_label(rounded)
        dz = rounded.astype(x.dtype)
        dx = dot("tv,vd->td", dz, weight) * factor
        if "vocab_chunk_size" in options:
            # The logsumexp is known by then, and the kernel stores dlogits.
            dlogits = jnp.exp(logits - lse) * (1 + 2 * z_loss * lse) - onehot.astype(jnp.float32)
            dlogits *= counts[:, None] / jnp.sum(counts)
            dz = jax.lax.reduce_precision(dlogits, bits.nexp, bits.nmant).astype(x.dtype)
            dx, dweight = dot("tv,vd->td", dz, weight), dot("tv,td->vd", dz, x)
        else:
            scaled = (x.astype(jnp.float32) * factor).astype(x.dtype)
            dweight = dot("tv,td->vd", dz, scaled)
        loss = jnp.sum(losses[:, 0] * counts) / jnp.sum(counts)
        return loss, dx.astype(x.dtype), dweight.astype(x.dtype)

    names = ("loss", "dx", "dweight")
    arguments, one = (x, weight), jnp.float32(1)
    with jax.default_matmul_precision("highest"):
        want = sampled(graded(exact)(jax.tree.map(lambda a: a.astype(jnp.float32), arguments), one))
    got = graded(ours)(arguments, one)
    assert_as_accurate(sampled(got), sampled(plain(*arguments)), want, names=names, slack=1.3)
    chex.assert_trees_all_equal(got, graded(ours)(arguments, one))
    if size > 1:
        assert want[0] > 44


def test_the_default_loss_is_the_kernels():
    x, weight = jnp.ones((256, 128), jnp.bfloat16), jnp.ones((1000, 128), jnp.bfloat16)
    labels = jnp.zeros(256, jnp.int32)
    program = jax.jit(jax.value_and_grad(lambda x: linear_cross_entropy(x, weight, labels)))
    assert "mosaic_gpu" in program.lower(x).as_text()
