"""Which activations of a layer are kept for the backward, by name; the others are computed again.

The layers tag their tensors with `jax.ad_checkpoint.checkpoint_name`. A policy is the set of names
to keep. `attention` is not a tensor: it keeps everything the backward of the attention needs (q, k,
v, its output and its softmax statistics), which names alone cannot do, because the statistics live
inside the attention's own gradient rule.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax

TENSOR_NAMES = (
    "q",
    "k",
    "v",
    "attn_out",
    "attn_proj",
    "residual",
    "rstd",
    "normed",
    "gate",
    "up",
    "mlp_out",
)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class RematPolicy:
    """What one layer keeps.

    Attributes:
      tensors: names of the tensors to keep; `None` keeps whatever the backward uses.
      attention: keep all that the backward of the attention needs, so that it never runs again.
    """

    tensors: tuple[str, ...] | None
    attention: bool

    def checkpoint(self, fn: Callable[..., Any], *, in_scan: bool) -> Callable[..., Any]:
        """`fn` under `jax.checkpoint` with this policy.

        Args:
          fn: part of a layer; its inputs are kept in any case.
          in_scan: whether it runs in the body of a `lax.scan`. Outside of one, XLA would merge the
            recomputation with the first computation and so keep everything, unless it is prevented.
        """
        if self.tensors is None:
            return fn
        keep = jax.checkpoint_policies.save_only_these_names(*self.tensors)
        return jax.checkpoint(fn, policy=keep, prevent_cse=not in_scan)


POLICIES = {
    # Everything is kept.
    "none": RematPolicy(tensors=None, attention=True),
    # Only what enters the layer is kept; the layer's forward runs again.
    "full": RematPolicy(tensors=(), attention=False),
    # The attention is kept; output projection and MLP run again.
    "attention": RematPolicy(tensors=(), attention=True),
    # No GEMM, no attention and no norm runs again, only rotations and the gated activation.
    # `normed` is there because a kernel makes it in one call with `residual`: without it that call
    # would run again, and before it the GEMM that makes its input.
    "minimal": RematPolicy(tensors=("residual", "rstd", "normed", "gate", "up"), attention=True),
}


def remat_policy(name: str) -> RematPolicy:
    """The policy called `name`, or one made of the comma-separated names of what to keep.

    `"attention,gate,up"` keeps the attention and the two MLP projections.

    Raises:
      ValueError: `name` is neither a policy nor a list of tensor names.
    """
    if name in POLICIES:
        return POLICIES[name]
    kept = tuple(part.strip() for part in name.split(","))
    unknown = set(kept) - {*TENSOR_NAMES, "attention"}
    if unknown:
        raise ValueError(
            f"remat={name!r}: {sorted(unknown)} unknown; use one of {sorted(POLICIES)} or a "
            f"comma-separated "
            f"list of {(*TENSOR_NAMES, 'attention')}"
        )
    tensors = tuple(part for part in kept if part != "attention")
    return RematPolicy(tensors=tensors, attention="attention" in kept)
