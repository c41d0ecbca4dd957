"""FLOPs and memory of cuDNN's attention and of our kernels, from the shapes."""

import math

from train.planner.dataflow import Op

# Our kernels by name. The first number is that of the products over the pairs of a query and a key.
# The others are the shares of the peak with heads of 64 and of 128 channels. They were measured on
# an H200 in rows of one document, 4 x 4096 x 32 x 8 x 64 and 1 x 8192 x 32 x 8 x 128
# (docs/lab/2026-11-30-attention-of-whole-rows.md).
_KERNELS = {
    "attention_forward": (2, 0.44, 0.65),
    "attention_backward_dq": (3, 0.66, 0.84),
    "attention_backward_dkdv": (4, 0.60, 0.74),
}
# Position of the statistics, one for each softmax, among the operands of the backward.
_STATISTICS = 10


def forward_flops(op: Op) -> float:
    """FLOPs of the forward: two products over all pairs, or over half of them if causal."""
    batch, length, heads, head_dim = op.shapes[0]
    keys = op.shapes[1][1]
    causal = "CAUSAL" in str(op.params.get("mask_type", ""))
    return 4.0 * batch * heads * length * keys * head_dim * (0.5 if causal else 1.0)


def has_window(op: Op) -> bool:
    """Whether an operation of cuDNN has a sliding window."""
    return bool(op.params.get("sliding_window_length"))


def is_kernel(op: Op) -> bool:
    """Whether the operation is one of our kernels."""
    return op.params.get("name") in _KERNELS


def kernel_flops(op: Op) -> float:
    """FLOPs of one of our kernels, for rows of one document.

    The documents are not known here. Rows of several documents take less time.
    """
    num_products, *_ = _KERNELS[op.params["name"]]
    batch, length, heads, head_dim = op.shapes[0]
    return 1.0 * num_products * batch * heads * length**2 * head_dim


def kernel_efficiency(op: Op) -> float:
    """The share of the peak that one of our kernels reaches."""
    _, of_64, of_128 = _KERNELS[op.params["name"]]
    return of_64 if op.shapes[0][-1] == 64 else of_128


def workspace_bytes(op: Op) -> int:
    """Bytes that the backward takes beside its arguments and results.

    This workspace has a float32 sum for each element of `dq`, and 4 bytes for each softmax. If
    several heads of queries share keys, it also has 16-bit gradients of keys and values for each
    head of queries. On an H200, calls with shared keys took the size that this function gives
    (docs/lab/2026-11-30-buckets-of-documents.md).
    """
    (*_, num_heads, head_dim), (*_, num_kv_heads, _) = op.shapes[:2]
    bytes_each = 4 * head_dim + 4 + (4 * head_dim if num_kv_heads < num_heads else 0)
    return math.prod(op.shapes[_STATISTICS]) * bytes_each
