"""cuDNN's attention of some documents of each row in plain JAX, for machines without cuDNN.

cuDNN leaves the results of tokens of other documents undefined, so they are NaN here. All results
are NaN if the offsets of queries and keys disagree, or if a document is longer than the rows.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax._src.cudnn import fused_attention_stablehlo as cudnn
from jax.interpreters import mlir


def emulate(monkeypatch: Any) -> None:
    """Runs the emulation on CPUs."""
    monkeypatch.setattr(cudnn, "check_cudnn_version", lambda: 91000)
    for primitive, fn in (
        (cudnn._dot_product_attention_fwd_p, _forward),
        (cudnn._dot_product_attention_bwd_p, _backward),
    ):
        rule = mlir.lower_fun(fn, multiple_results=True)
        mlir.register_lowering(primitive, rule, platform="cpu")


class _Places(NamedTuple):
    """Where the tokens of the documents are, among those of all rows `[T]`.

    Attributes:
      begins: First token of each document.
      lengths: Number of tokens of each document.
      numbers: Document of each token.
      is_here: Whether a token is in any of the documents.
      mask: Whether a token attends to another.
    """

    begins: jax.Array
    lengths: jax.Array
    numbers: jax.Array
    is_here: jax.Array
    mask: jax.Array

    @classmethod
    def of(cls, q: Any, k: Any, lengths: Any, k_lengths: Any, *offsets: Any) -> "_Places":
        batch_size, length, *_ = q.shape
        num_tokens = batch_size * length
        num_documents = lengths.size
        by_queries, by_keys = (
            numbers.reshape(-1)[: num_documents + 1] // (a.shape[2] * a.shape[3])
            for numbers, a in zip(offsets, (q, k), strict=True)
        )
        begins, lengths = by_queries[:-1], lengths.reshape(-1)
        tokens = jnp.arange(num_tokens, dtype=jnp.int32)
        is_in = (begins <= tokens[:, None]) & (tokens[:, None] < begins + lengths)
        numbers = jnp.argmax(is_in, axis=1)
        agree = jnp.all(by_queries == by_keys) & jnp.all(lengths == k_lengths.reshape(-1))
        agree &= jnp.all(lengths <= length)
        is_here = jnp.any(is_in, axis=1) & agree & (by_queries[-1] == num_tokens)
        is_pair = is_here[:, None] & is_here & (numbers[:, None] == numbers)
        mask = is_pair & (tokens[:, None] >= tokens)
        return cls(begins, lengths, numbers, is_here, mask)

    def finished(self, a: jax.Array, like: jax.Array) -> jax.Array:
        a = jnp.where(self.is_here[:, None], a.reshape(len(self.is_here), -1), jnp.nan)
        return a.reshape(like.shape).astype(like.dtype)


def _in_float32(q: jax.Array, k: jax.Array, v: jax.Array, mask: jax.Array) -> tuple[jax.Array, ...]:
    """Queries `[T, K, G, H]`, keys and values `[T, K, H]`, and logits `[K, G, T, T]`."""
    _, _, num_kv_heads, head_dim = k.shape
    of_keys = lambda a: a.reshape(-1, num_kv_heads, head_dim).astype(jnp.float32)
    queries = q.reshape(-1, num_kv_heads, q.shape[2] // num_kv_heads, head_dim)
    queries, keys = queries.astype(jnp.float32), of_keys(k)
    logits = jnp.einsum("tkgh,ukh->kgtu", queries, keys) * head_dim**-0.5
    return queries, keys, of_keys(v), jnp.where(mask, logits, -jnp.inf)


def _forward(q: Any, k: Any, v: Any, _: Any, *others: Any, **__: Any) -> tuple[jax.Array, ...]:
    """The output, and the statistics `[B*M, N, S]`."""
    places = _Places.of(q, k, *others[:4])
    *_, values, logits = _in_float32(q, k, v, places.mask)
    out = jnp.einsum("kgtu,ukh->tkgh", jax.nn.softmax(logits, axis=-1), values)
    # The statistics are stored by document and position.
    logsumexp = jax.nn.logsumexp(logits, axis=-1).reshape(-1, logits.shape[-1])
    steps = jnp.arange(q.shape[1], dtype=jnp.int32)
    tokens = jnp.clip(places.begins[:, None] + steps, 0, logits.shape[-1] - 1)
    is_in = steps < places.lengths[:, None]
    stats = jnp.where(is_in, logsumexp[:, tokens], jnp.nan)
    return places.finished(out, q), jnp.moveaxis(stats, 0, 1)


def _backward(q: Any, k: Any, v: Any, _: Any, *others: Any, **__: Any) -> tuple[jax.Array, ...]:
    """The gradients of `q`, `k` and `v`."""
    *_, stats, out, dout = others
    places = _Places.of(q, k, *others[:4])
    queries, keys, values, logits = _in_float32(q, k, v, places.mask)
    place = jnp.arange(len(places.numbers), dtype=jnp.int32) - places.begins[places.numbers]
    logsumexp = stats[places.numbers, :, jnp.clip(place, 0, q.shape[1] - 1)]
    logsumexp = logsumexp.T.reshape(*logits.shape[:-1], 1)
    probabilities = jnp.where(places.mask, jnp.exp(logits - logsumexp), 0.0)
    # cuDNN reads no other tokens.
    is_here = places.is_here[:, None, None, None]
    of_tokens = lambda a: jnp.where(is_here, a.reshape(queries.shape).astype(jnp.float32), 0.0)
    out, dout = of_tokens(out), of_tokens(dout)
    dv = jnp.einsum("kgtu,tkgh->ukh", probabilities, dout)
    dprobabilities = jnp.einsum("tkgh,ukh->kgtu", dout, values)
    total = jnp.einsum("tkgh,tkgh->kgt", dout, out)[..., None]
    dlogits = probabilities * (dprobabilities - total) * q.shape[-1] ** -0.5
    dq = jnp.einsum("kgtu,ukh->tkgh", dlogits, keys)
    dk = jnp.einsum("kgtu,tkgh->ukh", dlogits, queries)
    return places.finished(dq, q), places.finished(dk, k), places.finished(dv, v)
