"""Which activations of a layer the backward finds on the device, in host memory, or computes again.

The layers tag their tensors with `jax.ad_checkpoint.checkpoint_name`, their inputs too. A policy is
data: the names to keep on the device and the names to keep in host memory; all others are computed
again from the nearest tensors that are kept.

A layer begins with the residual stream alone and ends with `residual + mlp_out`, so that what made
`mlp_out` runs only once. Where `normed` is kept it begins with the residual and its norm and ends
with the next layer's, for which one kernel makes sum and norm. So it is too where the layers are
split over `tensor`; there `mlp_out` is what the exchange adds up.

`attention` is not a tensor: it keeps everything the backward of the attention needs (q, k, v, its
output and its softmax statistics) on the device. Names cannot do that, because the statistics live
inside the attention's own gradient rule (cuDNN's is not ours to tag, and no public function takes
its logsumexp back), so inside of a `jax.checkpoint` the attention's forward runs again. A layer is
therefore two checkpointed halves with the attention between them, outside of any checkpoint, and
for the same reason what the attention keeps cannot go to the host.

Host memory is reached over PCIe. A tensor that a GEMM with K terms made costs 2 K FLOPs an element
to compute again and, in 16 bits, 4 bytes over the bus. At 600 TFLOP/s and 50 GB/s both take as long
at K = 24,000, so what one GEMM made is worth offloading only while the bus is idle anyway: in the
forward a layer of hidden size 8192 computes a little longer than its gate and up travel, one of
2048 a third as long. A layer's inputs would cost all layers before it, so they come first.

Only scanned layers offload. In the loop XLA sends and fetches a layer's tensors while that layer
runs. Of unrolled layers its scheduler takes the whole program for one stretch of work to hide
copies behind: it starts some only when the backward needs the tensor, and puts the GEMMs of weight
gradients off to the end, with their operands on the device. Llama 3.2 1B with 4 x 4096 tokens would
need 17.5 GiB beside its arguments, against 18.5 under `minimal`, though 11.9 GiB went to the host;
scanned it is 8.9 against 20.5 (compiled for an H100, jax 0.11.2).
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax

TENSOR_NAMES = (
    "layer_input",
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

_KEPT_BY_ATTENTION = ("q", "k", "v", "attn_out")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class RematPolicy:
    """What one layer keeps.

    Attributes:
      tensors: names of the tensors to keep on the device; `None` keeps whatever the backward uses.
      offloaded: names of the tensors to keep in host memory.
      attention: keep all that the backward of the attention needs, so that it never runs again.
      description: in one line.
    """

    tensors: tuple[str, ...] | None
    offloaded: tuple[str, ...] = ()
    attention: bool
    description: str = ""

    @property
    def kept(self) -> frozenset[str]:
        """Names of the tensors that do not run again, wherever they are kept."""
        return frozenset(TENSOR_NAMES if self.tensors is None else self.tensors + self.offloaded)

    def checkpoint(self, fn: Callable[..., Any], *, in_scan: bool) -> Callable[..., Any]:
        """`fn` under `jax.checkpoint` with this policy.

        Args:
          fn: part of a layer; its inputs are kept on the device unless `fn` tags them and they are
            offloaded by name.
          in_scan: whether it runs in the body of a `lax.scan`. Outside of one, XLA would merge the
            recomputation with the first computation and so keep everything, unless it is prevented.
        """
        if self.tensors is None:
            return fn
        keep = jax.checkpoint_policies.save_and_offload_only_these_names(
            names_which_can_be_saved=self.tensors,
            names_which_can_be_offloaded=self.offloaded,
            offload_src="device",
            offload_dst="pinned_host",
        )
        return jax.checkpoint(fn, policy=keep, prevent_cse=not in_scan)


POLICIES = {
    "none": RematPolicy(
        tensors=None,
        attention=True,
        description="keeps everything",
    ),
    "full": RematPolicy(
        tensors=(),
        attention=False,
        description="keeps what enters the layer; all that its backward reads runs again",
    ),
    "attention": RematPolicy(
        tensors=(),
        attention=True,
        description="keeps the attention; projections, norms and MLP run again",
    ),
    # `normed` is there because a kernel makes it in one call with `residual`: without it that call
    # would run again, and before it the GEMM that makes its input.
    "mlp_inputs": RematPolicy(
        tensors=("residual", "rstd", "normed"),
        attention=True,
        description="keeps the attention and the norms; gate and up run again",
    ),
    "minimal": RematPolicy(
        tensors=("residual", "rstd", "normed", "gate", "up"),
        attention=True,
        description="keeps what spares GEMMs, attention and norms; rotations and activation rerun",
    ),
    # `rstd` is 4 bytes a token and stays.
    "offload": RematPolicy(
        tensors=("rstd",),
        offloaded=("layer_input", "residual", "normed", "gate", "up"),
        attention=True,
        description="as minimal, with all but the attention and rstd in host memory",
    ),
}


def remat_policy(name: str) -> RematPolicy:
    """The policy called `name`, or one made of the comma-separated names of what to keep.

    `"attention,residual,gate@host,up@host"` keeps the attention and the residual on the device and
    the two MLP projections in host memory.

    Raises:
      ValueError: `name` is neither a policy nor such a list, or asks for what cannot be offloaded.
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
        raise ValueError(f"remat={name!r}: {twice} both on the device and in host memory")
    attention = "attention" in kept
    on_device = ("attention", *(_KEPT_BY_ATTENTION if attention else ()))
    if stuck := [part for part in offloaded if part in on_device]:
        raise ValueError(
            f"remat={name!r}: {stuck} cannot go to host memory, because the attention keeps what "
            "its backward reads on the device; drop '@host' or 'attention'"
        )
    return RematPolicy(
        tensors=tuple(part for part in kept if part != "attention"),
        offloaded=offloaded,
        attention=attention,
    )
