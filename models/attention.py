"""Causal attention of whole sequences, and which library computes it."""

from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from models.packed_attention import Documents, packed_attention
from pallas_kernels.choices import log_once
from pallas_kernels.gpu.device import reason_not_here, target_device


def causal_attention(
    q: Float[Array, "B S N H"],
    k: Float[Array, "B S K H"],
    v: Float[Array, "B S K H"],
    documents: Documents | None,
    implementation: Literal["xla", "cudnn"] | None,
) -> Float[Array, "B S N H"]:
    """The attention of each token to itself and to the earlier tokens of its document.

    Args:
      q: Queries.
      k: Keys, each of which N / K heads of queries share.
      v: Values.
      documents: Documents of the rows; None if each row is one document.
      implementation: `LlamaConfig.attention_implementation`.

    Raises:
      NotImplementedError: `implementation` is "cudnn", and there is no cuDNN.
    """
    if implementation is None:
        reason = _why_no_cudnn(q)
        implementation = "cudnn" if reason is None else "xla"
        if reason is not None and reason_not_here() is None:
            log_once(f"attention: XLA computes it and keeps all S² scores, because {reason}")
    try:
        if documents is None:
            return jax.nn.dot_product_attention(
                q, k, v, is_causal=True, implementation=implementation
            )
        if implementation == "cudnn" and _has_packed_attention():
            return packed_attention(q, k, v, documents)
        numbers = documents.numbers
        mask = (numbers[:, :, None] == numbers[:, None, :])[:, None]
        return jax.nn.dot_product_attention(
            q, k, v, mask=mask, is_causal=True, implementation=implementation
        )
    except RuntimeError as error:
        # XLA's errors are of other classes. This one says that there is no cuDNN.
        if type(error) is not RuntimeError or implementation != "cudnn":
            raise
        raise NotImplementedError(
            f"attention_implementation='cudnn': {error} Leave it None, which takes what runs here."
        ) from error


def _why_no_cudnn(q: Float[Array, "B S N H"]) -> str | None:
    """Why cuDNN's attention does not take `q`, or None if it does.

    As for the kernels, the default device decides. It may be a GPU that is only compiled for.
    """
    _, num_positions, _, head_dim = q.shape
    if (reason := reason_not_here()) is not None:
        return reason
    if q.dtype not in (jnp.bfloat16, jnp.float16):
        return f"cuDNN takes bfloat16 and float16, not {q.dtype}; set dtype='bfloat16'"
    # With 256 channels on an H200 it takes 0.18 of the time of XLA's, and errs as little.
    capability = target_device().capability
    largest = 256 if capability is not None and capability[0] == 9 else 128
    if head_dim % 8 or head_dim > largest:
        return f"cuDNN takes heads of 8, 16, ... or {largest} channels here, not {head_dim}"
    if num_positions % 2:  # JAX's gradient refuses them
        return f"cuDNN takes an even number of positions, not {num_positions}; pad the sequences"
    return None


def _has_packed_attention() -> bool:
    """Whether cuDNN can compute each document of a row by itself. If not, the log says so."""
    capability = target_device().capability
    if capability is not None and capability < (9, 0):
        log_once(
            "attention: cuDNN reads a mask of S² numbers for each row of documents, because it "
            f"takes documents one by one only from compute capability (9, 0) on, not {capability}"
        )
        return False
    return True
