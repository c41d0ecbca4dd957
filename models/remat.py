"""Rematerialization policies: what a layer keeps on the device or in host memory for its backward.

The layers tag their tensors and their inputs with `jax.ad_checkpoint.checkpoint_name`. A policy is
data: the names to keep on the device and the names to keep in host memory. The backward computes
all other tensors again, from the nearest ones that are kept.

**Where a layer begins.** If a policy keeps `normed`, a layer begins with the residual stream and
its norm. It ends with the same pair for the next layer, because one kernel computes sum and norm.
If a policy does not keep `normed`, a layer begins with the residual stream alone and ends with
`residual + mlp_out`, so that the GEMM of `mlp_out` runs only once. A layer that is split over
`tensor` always has the pair. There each device has a summand of `mlp_out`, and the exchange adds
the summands up.

**The attention.** The name `attention` is not a tensor. It keeps on the device everything that the
backward of the attention needs: q, k, v, the output and the softmax statistics. The name of a
tensor cannot do that, because the statistics are inside of the attention's own gradient rule. We
cannot tag them in cuDNN's rule, and no public function takes cuDNN's logsumexp as an argument. So
inside of a `jax.checkpoint` the attention's forward would run again. A layer is therefore two
checkpointed halves, with the attention between them and outside of any checkpoint. For the same
reason the tensors of the attention cannot go to the host.

`q_proj` and `k_proj` are the queries and keys before their norms, in models that norm them. The
backward of these norms reads them. The attention reads the normed and rotated q and k.

**Host memory.** The device reaches host memory over PCIe, at 50 GB/s. A transfer is slow beside a
GEMM. Take one 16-bit element of a tensor that a GEMM made, as a sum of K products:

- The transfer takes 4 bytes on the bus, 2 out and 2 back: 4 B / (50 GB/s) = 80 ps.
- To compute the element again takes 2 K FLOPs: 2 K / (600 TFLOP/s), or 80 ps at K = 24,000.

For gate and up, K is the hidden size, at most 8192 in our presets. So it is faster to compute them
again, unless the transfer runs beside other work. That works in large models: at hidden size 8192
the forward of a layer takes a little longer than the transfer of its gate and up. At 2048 it takes
a third of the time of the transfer.

The inputs of a layer are the first tensors to go to host memory: to compute them again, all layers
before it would have to run.

Only scanned layers offload. In the loop XLA sends and fetches a layer's tensors while that layer
runs. With unrolled layers, XLA's scheduler may hide copies behind any work of the whole program. It
starts some copies only when the backward needs the tensor. It also moves the GEMMs of weight
gradients to the end, and their operands stay on the device until then. Unrolled, Llama 3.2 1B with
4 x 4096 tokens would need 17.5 GiB beside its arguments, against 18.5 GiB under `minimal`, although
11.9 GiB went to the host. Scanned, it needs 8.9 GiB against 20.5 GiB (compiled for an H100, jax
0.11.2).
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax

TENSOR_NAMES = (
    "layer_input",
    "q_proj",
    "k_proj",
    "q",
    "k",
    "v",
    "attn_out",
    "attn_proj",
    "residual",
    "rstd",
    "normed",
    "fp8_x",
    "gate",
    "up",
    "mlp_out",
)

_KEPT_BY_ATTENTION = ("q", "k", "v", "attn_out")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class RematPolicy:
    """The tensors that one layer keeps.

    Attributes:
      tensors: Names of the tensors to keep on the device; `None` keeps all that the backward uses.
      offloaded: Names of the tensors to keep in host memory.
      attention: Whether to keep all that the backward of the attention needs, so that the
        attention's forward never runs again.
      description: One line about the policy.
    """

    tensors: tuple[str, ...] | None
    offloaded: tuple[str, ...] = ()
    attention: bool
    description: str = ""

    @property
    def kept(self) -> frozenset[str]:
        """Names of the tensors that are not computed again, wherever they are kept."""
        return frozenset(TENSOR_NAMES if self.tensors is None else self.tensors + self.offloaded)

    def checkpoint(
        self, fn: Callable[..., Any], *, prevent_cse: bool | Sequence[bool]
    ) -> Callable[..., Any]:
        """`fn` under `jax.checkpoint` with this policy.

        Args:
          fn: Part of a layer. Its inputs stay on the device, unless `fn` tags them with a name that
            the policy offloads.
          prevent_cse: Whether `jax.checkpoint` puts inputs behind a barrier, for all or for each.
            Without one XLA merges the recomputation with the first computation, and so keeps
            everything. The body of a `lax.scan` needs no barrier.
        """
        if self.tensors is None:
            return fn
        keep = jax.checkpoint_policies.save_and_offload_only_these_names(
            names_which_can_be_saved=self.tensors,
            names_which_can_be_offloaded=self.offloaded,
            offload_src="device",
            offload_dst="pinned_host",
        )
        return jax.checkpoint(fn, policy=keep, prevent_cse=prevent_cse)


POLICIES = {
    "none": RematPolicy(
        tensors=None,
        attention=True,
        description="keeps everything",
    ),
    "full": RematPolicy(
        tensors=(),
        attention=False,
        description="keeps the inputs of a layer; all that its backward reads runs again",
    ),
    "attention": RematPolicy(
        tensors=(),
        attention=True,
        description="keeps the attention; output projection, norms and MLP run again",
    ),
    # `fp8_x` names the inputs of products in FP8, which are then not quantized again. In FP8,
    # `normed` is kept only where the backward reads it as it is. Without `normed` in the list, the
    # backward would norm each residual again, and the first norm of a layer would be a kernel of
    # its own.
    "mlp_inputs": RematPolicy(
        tensors=("residual", "rstd", "normed", "fp8_x", "q_proj", "k_proj"),
        attention=True,
        description="keeps the attention and the norms; gate and up run again",
    ),
    # A step of Llama 8B on four H200s takes 1596 ms with `minimal`, and 1652 ms without `normed`.
    "minimal": RematPolicy(
        tensors=("residual", "rstd", "normed", "fp8_x", "q_proj", "k_proj", "gate", "up"),
        attention=True,
        description="keeps GEMMs, attention and norms; the activation runs again",
    ),
    # `rstd` is 4 bytes a token and stays.
    "offload": RematPolicy(
        tensors=("rstd",),
        offloaded=("layer_input", "residual", "normed", "q_proj", "k_proj", "gate", "up"),
        attention=True,
        description="keeps what minimal does, all but the attention and rstd in host memory",
    ),
}


def remat_policy(name: str) -> RematPolicy:
    """The policy called `name`, or a policy of the comma-separated names of the tensors to keep.

    `"attention,residual,gate@host,up@host"` keeps the attention and the residual on the device and
    the two MLP projections in host memory.

    Raises:
      ValueError: `name` is neither a policy nor such a list, or a tensor cannot be offloaded.
    """
    if name in POLICIES:
        return POLICIES[name]
    parts = [part.strip() for part in name.split(",")]
    offloaded = tuple(part.removesuffix("@host") for part in parts if part.endswith("@host"))
    kept = tuple(part for part in parts if not part.endswith("@host"))
    unknown = {*kept, *offloaded} - {*TENSOR_NAMES, "attention"}
    if unknown:
        raise ValueError(
            f"remat={name!r}: {sorted(unknown)} unknown; use one of {sorted(POLICIES)} or a "
            f"comma-separated list of {(*TENSOR_NAMES, 'attention')}, each with '@host' after it "
            "to keep it in host memory"
        )
    if twice := sorted({*kept} & {*offloaded}):
        raise ValueError(
            f"remat={name!r}: {twice} both on the device and in host memory; name each tensor once"
        )
    attention = "attention" in kept
    on_device = ("attention", *(_KEPT_BY_ATTENTION if attention else ()))
    if stuck := [part for part in offloaded if part in on_device]:
        raise ValueError(
            f"remat={name!r}: {stuck} cannot go to host memory, because the attention keeps all "
            "that its backward reads on the device; drop '@host' or 'attention'"
        )
    return RematPolicy(
        tensors=tuple(part for part in kept if part != "attention"),
        offloaded=offloaded,
        attention=attention,
    )
