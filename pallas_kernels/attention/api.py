"""Attention of rows that hold several documents, by our own kernels.

It is not the Llama's attention yet, and it has not run on a GPU: the model calls cuDNN
(`models/attention.py`).
"""

import dataclasses
from collections.abc import Callable

import jax
from jaxtyping import Array, Float

from pallas_kernels.attention.backward import BackwardConfig, attention_backward
from pallas_kernels.attention.bounds import Bounds
from pallas_kernels.attention.by_heads import AttentionByHeads
from pallas_kernels.attention.config import Config, default_config
from pallas_kernels.attention.forward import attention_forward
from pallas_kernels.layout import Place, Tokens


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class AttentionConfig:
    """Launch parameters of the kernels. `None` takes the defaults for the head size.

    Attributes:
      forward: Parameters of the forward.
      backward: Parameters of the backward.
    """

    forward: Config | None = None
    backward: BackwardConfig | None = None


def document_attention(
    q: Float[Array, "B S N H"],
    k: Float[Array, "B S K H"],
    v: Float[Array, "B S K H"],
    bounds: Bounds,
    *,
    config: AttentionConfig = AttentionConfig(),
) -> Float[Array, "B S N H"]:
    """The causal attention of each document by itself; logits are divided by √H.

    The kernels take bfloat16 and float16, H of 64 and 128, and S that is a multiple of 8. The
    softmax is computed in float32. Its weights are rounded to the dtype of `v` before the product
    with `v`. The backward takes two kernels and no workspace. The gradients of `k` and `v` are
    added up over heads in float32.

    Args:
      q: Queries.
      k: Keys; N is a multiple of K, and head n of the queries reads head `n // (N // K)`.
      v: Values.
      bounds: Documents of the rows.
      config: Launch parameters.

    Raises:
      NotImplementedError: There is no GPU from Hopper on, or the result is differentiated in
        forward mode, or twice.
      ValueError: The kernels do not take the shapes or dtypes.
    """
    return _DocumentAttention(config)(q, k, v, *bounds)


@dataclasses.dataclass(frozen=True)
class _DocumentAttention(AttentionByHeads):
    config: AttentionConfig
    name = "document_attention"
    logsumexp = Tokens(("kv_heads", "g", "s"))
    of_documents = (Tokens(("s",)), Tokens(("s",)))

    def local_forward(self, place: Place) -> Callable[..., tuple[Array, Array]]:
        def forward(q: Array, k: Array, v: Array, begins: Array, _: Array) -> tuple[Array, Array]:
            options = {
                "scale": _scale(q),
                "config": self.config.forward or default_config(q.shape[-1]),
            }
            out, logsumexp = attention_forward(_heads(q), k, v, begins, **options)
            return out.reshape(q.shape), logsumexp.reshape(len(q), *q.shape[2:4], -1)

        return forward

    def local_backward(self, place: Place) -> Callable[..., tuple[Array, Array, Array]]:
        def backward(
            dout: Array, q: Array, k: Array, v: Array, out: Array, logsumexp: Array, *bounds: Array
        ) -> tuple[Array, Array, Array]:
            of_heads = logsumexp.reshape(len(q), -1, q.shape[1])
            args = _heads(q), k, v, _heads(out), of_heads, _heads(dout), *bounds
            options = {"scale": _scale(q), "config": self.config.backward}
            dq, dk, dv = attention_backward(*args, **options)
            return dq.reshape(q.shape), dk, dv

        return backward


def _heads(a: Float[Array, "B S K G H"]) -> Float[Array, "B S _ H"]:
    return jax.lax.collapse(a, 2, 4)


def _scale(q: Float[Array, "... H"]) -> float:
    return q.shape[-1] ** -0.5
