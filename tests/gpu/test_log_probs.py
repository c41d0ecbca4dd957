"""Log-probabilities and losses of tokens on a GPU, at real sizes."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import linear_log_probs, linear_token_loss
from support.numerics import assert_as_accurate
from support.on_gpu import sampled

pytestmark = pytest.mark.gpu
NAMES = ("log_probs", "entropy", "dx", "dweight")
TRANSFORM = {"temperature": 0.7, "logit_softcap": 20.0}
IN_PLACE = {"max_logits_bytes": 2**24}  # no chunk of tokens has so few


def rounded_in_backward(dtype, also_forward):
    """The identity, whose gradient is rounded to `dtype`, and its value on request."""
    bits = jnp.finfo(dtype)
    # XLA would drop a cast to 16 bits and back.
    rounded = lambda a: jax.lax.reduce_precision(a, bits.nexp, bits.nmant)

    @jax.custom_jvp
    def run(logits):
        return rounded(logits) if also_forward else logits

    @run.defjvp
    def _(primals, tangents):
        return run(primals[0]), rounded(tangents[0])

    return run


def make_arguments(shape, dtype, weight_dtype):
    num_tokens, hidden_size, vocab_size = shape
    keys = jax.random.split(jax.random.key(0), 5)
    x = jax.random.normal(keys[0], (num_tokens, hidden_size), dtype)
    weight = (jax.random.normal(keys[1], (vocab_size, hidden_size)) * 0.05).astype(dtype)
    labels = jax.random.randint(keys[2], (num_tokens,), 0, vocab_size).at[::7].set(-100)
    cotangents = tuple(jax.random.normal(key, labels.shape) for key in keys[3:])
    return x, weight.astype(weight_dtype), labels, cotangents


def plain(labels, dtype, *, rounds_logits=False, temperature=1.0, logit_softcap=None):
    """Results of all logits, with their gradient rounded to `dtype`, and the logits on request."""
    round_ = rounded_in_backward(dtype, rounds_logits)

    def run(x, weight):
        logits = round_((x @ weight.astype(dtype).T).astype(jnp.float32))
        if logit_softcap is not None:
            logits = logit_softcap * jnp.tanh(logits / logit_softcap)
        log_p = jax.nn.log_softmax(logits / temperature, axis=-1)
        picked = jnp.take_along_axis(log_p, jnp.maximum(labels, 0)[:, None], axis=-1)[:, 0]
        found = picked, -jnp.sum(jnp.exp(log_p) * log_p, axis=-1)
        return tuple(jnp.where(labels >= 0, a, 0) for a in found)

    return run


def graded(fn, cotangents):
    def run(*args):
        results, vjp = jax.vjp(fn, *args)
        return [*results, *vjp(cotangents)]

    return jax.jit(run)


@pytest.mark.parametrize(
    "shape, dtype, weight_dtype, options",
    [
        ((4096, 2048, 128256), jnp.bfloat16, jnp.float32, {}),  # in place
        ((4096, 2048, 128256), jnp.bfloat16, jnp.bfloat16, TRANSFORM),  # a part lies beside
        ((4096, 2048, 128256), jnp.bfloat16, jnp.float32, {"weight_layout": "dv", **IN_PLACE}),
        ((1000, 1024, 50257), jnp.bfloat16, jnp.float32, TRANSFORM),
        ((1000, 1024, 50257), jnp.bfloat16, jnp.float32, {"chunk_size": 300}),
        ((1000, 1024, 50257), jnp.float16, jnp.float16, TRANSFORM),
    ],
    ids=str,
)
def test_log_probs_and_entropies(shape, dtype, weight_dtype, options):
    x, weight, labels, cotangents = make_arguments(shape, dtype, weight_dtype)
    transform = {k: v for k, v in options.items() if k in TRANSFORM}
    is_transposed = options.get("weight_layout") == "dv"

    def exact(x, weight):
        floats = x.astype(jnp.float32), weight.astype(jnp.float32)
        return linear_log_probs(
            *floats,
            labels,
            return_entropy=True,
            implementation="xla",
            chunk_size=512,
            **transform,
        )

    def ours(x, weight):
        return linear_log_probs(
            x,
            weight.T if is_transposed else weight,
            labels,
            return_entropy=True,
            implementation="mosaic_gpu",
            **options,
        )

    with jax.default_matmul_precision("highest"):
        want = sampled(graded(exact, cotangents)(x, weight))
    low = sampled(graded(plain(labels, dtype, **transform), cotangents)(x, weight))
    got = graded(ours, cotangents)(x, weight)
    assert_as_accurate(sampled(got), low, want, names=NAMES, floor=16.0)
    chex.assert_trees_all_equal(got, graded(ours, cotangents)(x, weight))


@pytest.mark.parametrize("with_entropy", [False, True])
def test_kept_exponentials(with_entropy):
    """The gradients are as accurate as those of logits in 16 bits."""
    x, weight, labels, cotangents = make_arguments((4096, 2048, 128256), jnp.bfloat16, jnp.float32)
    count = 1 + with_entropy

    def of(fn):
        run = graded(lambda x, weight: fn(x, weight)[:count], cotangents[:count])
        return run(x, weight)

    def log_probs(x, weight, **options):
        found = linear_log_probs(x, weight, labels, return_entropy=with_entropy, **options)
        return found if with_entropy else (found,)

    def exact(x, weight):
        return log_probs(x.astype(jnp.float32), weight, implementation="xla", chunk_size=512)

    def ours(x, weight):
        return log_probs(x, weight, implementation="mosaic_gpu", keep_exponentials=True)

    with jax.default_matmul_precision("highest"):
        want = sampled(of(exact))
    of_results = sampled(of(plain(labels, jnp.bfloat16)))[:count]
    of_gradients = sampled(of(plain(labels, jnp.bfloat16, rounds_logits=True)))[count:]
    got = of(ours)
    names = [*NAMES[:count], *NAMES[2:]]
    assert_as_accurate(sampled(got), [*of_results, *of_gradients], want, names=names, floor=16.0)
    chex.assert_trees_all_equal(got, of(ours))


@pytest.mark.parametrize("layout", ["vd", "dv"])
def test_argmax(layout):
    """Small integers: logits are exact, so the lowest of many equal ones is known."""
    shape = 4096, 2048, 128256
    x, weight, labels, _ = make_arguments(shape, jnp.bfloat16, jnp.bfloat16)
    x, weight = jnp.clip(jnp.round(x), -1, 1), jnp.clip(jnp.round(20 * weight), -1, 1)
    of = lambda weight, **options: jax.jit(
        lambda: linear_log_probs(x, weight, labels, return_argmax=True, **options)[1]
    )()
    want = of(weight, implementation="xla", chunk_size=512)
    turned = weight if layout == "vd" else weight.T
    got = of(turned, implementation="mosaic_gpu", weight_layout=layout)
    np.testing.assert_array_equal(got.ids, want.ids)
    # Two units of the logsumexp, which is between 128 and 256.
    np.testing.assert_allclose(got.log_probs, want.log_probs, atol=2 * 2.0**-16)


@pytest.mark.parametrize("with_entropy", [False, True])
@pytest.mark.parametrize("weight_dtype", [jnp.float32, jnp.bfloat16])
def test_losses_of_tokens(with_entropy, weight_dtype):
    """The gradients are as accurate as those of logits in 16 bits, which PyTorch has."""
    shape = 4096, 2048, 128256
    x, weight, labels, (g, h) = make_arguments(shape, jnp.bfloat16, weight_dtype)

    def token_fn(log_probs, entropy, data):
        loss = jnp.sum(data[0] * log_probs)
        return loss + jnp.sum(data[1] * entropy) if with_entropy else loss

    def ours(x, weight):
        return linear_token_loss(
            x,
            weight,
            labels,
            token_fn,
            (g, h),
            with_entropy=with_entropy,
            implementation="mosaic_gpu",
        )

    def of(results):
        def loss(x, weight):
            log_probs, entropy = results(x, weight)
            return token_fn(log_probs, entropy, (g, h))

        return loss

    def exact(x, weight):
        floats = x.astype(jnp.float32), weight.astype(jnp.float32)
        return linear_log_probs(
            *floats, labels, return_entropy=True, implementation="xla", chunk_size=512
        )

    run = lambda fn: jax.jit(jax.value_and_grad(fn, argnums=(0, 1)))(x, weight)
    with jax.default_matmul_precision("highest"):
        loss, want = run(of(exact))
    _, low = run(of(plain(labels, jnp.bfloat16, rounds_logits=True)))
    got_loss, got = run(ours)
    size = jnp.sqrt(jnp.sum(jnp.square(g)) + jnp.sum(jnp.square(h)))
    np.testing.assert_allclose(got_loss, loss, atol=1e-4 * float(size))
    sampled_of = lambda gradients: sampled(list(gradients))
    assert_as_accurate(sampled_of(got), sampled_of(low), sampled_of(want), names=NAMES[2:])
    chex.assert_trees_all_equal((got_loss, got), run(ours))
