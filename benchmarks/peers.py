"""PyTorch libraries for the same operations, which the benchmarks run beside ours.

    python -m benchmarks.peers

prints which of them are installed, in which versions. The benchmarks `bench`, `loss`, `log_probs`,
`distillation` and `attention` of `benchmarks.kernels` measure them with `--peers`. This project
does not require them:

    pip install torch liger-kernel quack-kernels nvidia-cutlass-dsl==4.7.1 cut-cross-entropy tokamax
    pip install --no-deps nvidia-cudnn-frontend  # it asks for nvidia-cutlass-dsl 4.8, unused here
    pip install --no-build-isolation 'transformer-engine[core-cu13,jax]'  # compiles C++

FlashAttention-3 (`flash-attn-3`) is built from its source, the folder `hopper` of
https://github.com/Dao-AILab/flash-attention.

Above 450 lines, because the table of peers and the functions that make them belong together.
"""

import dataclasses
import functools
import importlib
import importlib.metadata
import logging
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.kernels.formulas import (
    ADD_RMS_NORM,
    ATTENTION,
    EPS,
    LAYER_NORM,
    LINEAR_CROSS_ENTROPY,
    LINEAR_JENSEN_SHANNON,
    LINEAR_LOG_PROBS,
    LINEAR_LOG_PROBS_AND_ENTROPY,
    POLICY_LOSS,
    PREFERENCE_LOSS,
    RMS_NORM,
    SEQUENCES,
    SWIGLU,
    Arrays,
    Formula,
)
from benchmarks.kernels.ops import Direction, Prepared

PACKAGES = (
    "torch",
    "triton",
    "transformers",
    "liger-kernel",
    "torchao",
    "quack-kernels",
    "cut-cross-entropy",
    "nvidia-cudnn-frontend",
    "tokamax",
    "transformer-engine",
    "flash-attn-3",
)


@dataclasses.dataclass(frozen=True)
class Peer:
    """A peer's implementation of one operation.

    Attributes:
      op: Name of the operation.
      name: Name of the column.
      package: Package that must be installed.
      formula: Formula that it computes.
      load: Function that imports the package and returns a function of the formula's inputs.
    """

    op: str
    name: str
    package: str
    formula: Formula
    load: Callable[[], Callable[..., Any]]


def versions() -> dict[str, str | None]:
    """The version of every package, None for a package that is not installed."""
    found: dict[str, str | None] = {}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = None
    return found


def missing() -> list[str]:
    """The packages that are not installed."""
    return [package for package, version in versions().items() if version is None]


def peers_of(op: str) -> list[Peer]:
    """The installed peers of an operation."""
    absent = missing()
    # All of them need PyTorch.
    return [p for p in _PEERS if p.op == op and p.package not in absent and "torch" not in absent]


def reset() -> None:
    """Clears the programs of `torch.compile` and gives PyTorch's unused memory back.

    Call it before each shape: after eight shapes `torch.compile` would silently stop compiling.
    """
    torch = _torch()
    torch.compiler.reset()
    torch.cuda.empty_cache()


def prepare(peer: Peer, sets: list[Arrays], direction: Direction) -> Prepared:
    """Copies the inputs to PyTorch; for the backward it also runs the forward once on each set."""
    torch = _torch()
    # A compiled backward would reuse the memory of its residuals, and could run only once.
    functorch: Any = importlib.import_module("torch._functorch.config")
    functorch.donated_buffer = False
    fn, formula = peer.load(), peer.formula
    calls = []
    for arrays in sets:
        inputs = {name: _to_torch(arrays[name]) for name in formula.inputs}
        variables = {
            name: t.requires_grad_() for name, t in inputs.items() if t.is_floating_point()
        }
        if direction == "forward+backward":
            # A teacher has no gradient.
            variables = {name: variables[name] for name in formula.gradients}
            for name in inputs.keys() - variables.keys():
                inputs[name].requires_grad_(False)
        match direction:
            case "forward":
                call = functools.partial(_forward, fn, formula, inputs)
            case "backward":
                outputs = list(_forward(fn, formula, inputs).values())
                cotangents = [_to_torch(arrays[f"d{name}"]) for name in formula.outputs]
                call = functools.partial(_backward, outputs, variables, cotangents)
            case "forward+backward":
                cotangents = [
                    _to_torch(arrays[f"d{k}"]) for k in formula.outputs if f"d{k}" in arrays
                ]
                call = functools.partial(_both, fn, formula, inputs, variables, cotangents)
        calls.append(call)

    def num_bytes() -> int:
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        calls[0]()
        return torch.cuda.max_memory_allocated() - before

    return Prepared(calls, num_bytes)


def to_jax(tensors: dict[str, Any]) -> Arrays:
    """PyTorch's results as JAX arrays."""
    dense = {name: tensor.detach().contiguous() for name, tensor in tensors.items()}
    return {name: jnp.asarray(jax.dlpack.from_dlpack(t)) for name, t in dense.items()}


def _to_torch(array: jax.Array) -> Any:
    # A copy, because kernels that work in place must not change the inputs of other peers.
    tensor = _torch().from_dlpack(jax.block_until_ready(array)).clone()
    return tensor if tensor.is_floating_point() else tensor.long()  # labels must be int64


def _forward(fn, formula, inputs) -> dict[str, Any]:
    outputs = fn(*inputs.values())
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    _synchronize()
    return dict(zip(formula.outputs, outputs, strict=True))


def _backward(outputs, variables, cotangents) -> dict[str, Any]:
    autograd = _torch().autograd
    gradients = autograd.grad(outputs, list(variables.values()), cotangents, retain_graph=True)
    _synchronize()
    return {f"d{name}": gradient for name, gradient in zip(variables, gradients, strict=True)}


def _both(fn, formula, inputs, variables, cotangents) -> dict[str, Any]:
    outputs = fn(*inputs.values())
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    # A loss has no cotangent.
    gradients = _torch().autograd.grad(outputs, list(variables.values()), cotangents or None)
    _synchronize()
    named = {f"d{name}": gradient for name, gradient in zip(variables, gradients, strict=True)}
    return dict(zip(formula.outputs, outputs, strict=True)) | named


def _torch() -> Any:
    return importlib.import_module("torch")


def _synchronize() -> None:
    torch = _torch()
    if torch.cuda.is_available():
        torch.cuda.synchronize()


# The calls of each library, as torch 2.13, liger-kernel 0.8.5, quack-kernels 0.6.5 and
# cut-cross-entropy 25.1.1 define them.


def _functional() -> Any:
    return importlib.import_module("torch.nn.functional")


def _eager_rms_norm() -> Callable[..., Any]:
    rms_norm = _functional().rms_norm
    return lambda x, weight: rms_norm(x, weight.shape, weight, EPS)


def _eager_add_rms_norm() -> Callable[..., Any]:
    rms_norm = _eager_rms_norm()

    def add_rms_norm(x, residual, weight):
        residual_out = x + residual
        return rms_norm(residual_out, weight), residual_out

    return add_rms_norm


def _eager_layer_norm() -> Callable[..., Any]:
    layer_norm = _functional().layer_norm
    return lambda x, weight, bias: layer_norm(x, weight.shape, weight, bias, EPS)


def _eager_swiglu() -> Callable[..., Any]:
    silu = _functional().silu
    return lambda gate, up: silu(gate) * up


def _compiled(fn: Callable[..., Any]) -> Callable[..., Any]:
    return _torch().compile(fn, dynamic=False)


def _rms_norm_formula(x, weight):
    x_f32 = x.float()
    rstd = _torch().rsqrt(x_f32.square().mean(-1, keepdim=True) + EPS)
    return (x_f32 * rstd * weight.float()).to(x.dtype)


def _add_rms_norm_formula(x, residual, weight):
    residual_out = x + residual
    return _rms_norm_formula(residual_out, weight), residual_out


def _swiglu_formula(gate, up):
    return (_functional().silu(gate.float()) * up.float()).to(gate.dtype)


def _linear_cross_entropy_formula(x, weight, labels):
    return _functional().cross_entropy((x @ weight.T).float(), labels)


def _log_probs_of(x, weight, labels):
    return -_functional().cross_entropy((x @ weight.T).float(), labels, reduction="none")


def _log_probs_and_entropy_of(x, weight, labels):
    log_p = _functional().log_softmax((x @ weight.T).float(), -1)
    return log_p.gather(-1, labels[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)


def _by_chunks(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Chunks of 512 tokens that the backward computes again, as TRL and verl do it."""
    torch = _torch()
    checkpoint = importlib.import_module("torch.utils.checkpoint").checkpoint

    def run(x, weight, labels):
        parts = zip(x.split(512), labels.split(512), strict=True)
        found = [checkpoint(fn, a, weight, b, use_reentrant=False) for a, b in parts]
        if isinstance(found[0], tuple):
            return tuple(torch.cat(arrays) for arrays in zip(*found, strict=True))
        return torch.cat(found)

    return run


def _jensen_shannon_of(x, weight, teacher_x, teacher_weight):
    torch = _torch()
    log_p = _functional().log_softmax((x @ weight.T).float(), -1)
    log_q = _functional().log_softmax((teacher_x @ teacher_weight.T).float(), -1)
    log_m = torch.logaddexp(log_p, log_q) - math.log(2)
    terms = log_p.exp() * (log_p - log_m) + log_q.exp() * (log_q - log_m)
    return terms.sum() / (2 * len(x))


def _liger(name: str) -> Any:
    return getattr(importlib.import_module("liger_kernel.ops"), name)


def _liger_rms_norm() -> Callable[..., Any]:
    function = _liger("LigerRMSNormFunction")
    # The arguments say: no offset, all arithmetic in float32, not in place. In place moves as many
    # bytes, but overwrites the cotangent, so that the second call would see other numbers.
    return lambda x, weight: function.apply(x, weight, EPS, 0.0, "gemma", False)


def _liger_add_rms_norm() -> Callable[..., Any]:
    function = _liger("LigerFusedAddRMSNormFunction")
    return lambda x, residual, weight: function.apply(x, residual, weight, EPS, 0.0, "gemma", False)


def _liger_layer_norm() -> Callable[..., Any]:
    function = _liger("LigerLayerNormFunction")
    return lambda x, weight, bias: function.apply(x, weight, bias, EPS)


def _liger_swiglu() -> Callable[..., Any]:
    function = _liger("LigerSiLUMulFunction")
    # Its backward overwrites gate and up with their gradients, so only the first call on a set of
    # inputs, the one that is checked, sees random numbers. It moves as many bytes as ours.
    return lambda gate, up: function.apply(gate, up)


def _liger_linear_cross_entropy() -> Callable[..., Any]:
    function = _liger("LigerFusedLinearCrossEntropyFunction")
    return lambda x, weight, labels: function.apply(x, weight, labels)[0]


def _liger_hopper_linear_cross_entropy() -> Callable[..., Any]:
    # Nothing in Liger calls it. `LIGER_KERNEL_IMPL=cutedsl` takes a loss for Blackwell GPUs alone.
    module = importlib.import_module("liger_kernel.ops.cutedsl.ops.fused_linear_cross_entropy_sm90")
    return module.liger_fused_linear_cross_entropy_sm90


def _liger_linear_log_probs(*, entropy: bool) -> Callable[..., Any]:
    # On Hopper its kernels of the CuTe DSL, elsewhere chunks.
    module = importlib.import_module("liger_kernel.ops.fused_linear_scaled_cross_entropy")
    function = module.LigerFusedLinearScaledCrossEntropyFunction

    def run(x, weight, labels):
        found = function.apply(x, weight, labels, 1.0, -100, 1, entropy)
        return (-found[0], found[1].float()) if entropy else -found

    return run


def _liger_policy_loss() -> Callable[..., Any]:
    torch, losses = _torch(), importlib.import_module("liger_kernel.chunked_loss")
    loss = losses.LigerFusedLinearGRPOLoss(beta=0.0, loss_type="bnpo", use_ref_model=False)

    def run(x, weight, labels, advantages):
        sequences = len(advantages)
        labels = labels.reshape(sequences, -1)
        x = x.reshape(*labels.shape, x.shape[-1])
        return loss(x, weight, labels, torch.ones_like(labels), advantages)[0]

    return run


def _liger_preference_loss() -> Callable[..., Any]:
    losses = importlib.import_module("liger_kernel.chunked_loss")
    loss = losses.LigerFusedLinearDPOLoss(beta=0.1, use_ref_model=False)

    def run(x, weight, labels):
        labels = labels.reshape(SEQUENCES, -1)
        return loss(weight, x.reshape(*labels.shape, x.shape[-1]), labels)[0]

    return run


def _liger_jensen_shannon() -> Callable[..., Any]:
    function = _liger("LigerFusedLinearJSDFunction")
    return lambda x, weight, teacher_x, teacher_weight: function.apply(
        x, weight, teacher_x, teacher_weight
    )


def _quack_rms_norm() -> Callable[..., Any]:
    rmsnorm = importlib.import_module("quack").rmsnorm
    return lambda x, weight: rmsnorm(x, weight, eps=EPS)


def _quack_add_rms_norm() -> Callable[..., Any]:
    rmsnorm = importlib.import_module("quack").rmsnorm
    return lambda x, residual, weight: rmsnorm(x, weight, residual=residual, eps=EPS, prenorm=True)


def _cudnn_rms_norm() -> Callable[..., Any]:
    # For PyTorch: cuDNN's frontend 1.32 has no RMSNorm for JAX.
    rms_norm = importlib.import_module("cudnn.ops.norm").rms_norm
    return lambda x, weight: rms_norm(x, weight, eps=EPS)


def _quack_linear_cross_entropy() -> Callable[..., Any]:
    # QuACK 0.6.5 makes a cache key from every object that its GEMM's epilogues refer to. One of
    # them is the logger of nvidia-cutlass-dsl 4.7.1, which it rejects. This attribute gives the
    # logger a key. (In 4.8.1 the object is a ContextVar, which takes no attribute.)
    setattr(logging.Logger, "__quack_semantic_key__", lambda logger: logger.name)  # noqa: B010
    loss = importlib.import_module("quack.linear_cross_entropy").chunked_linear_cross_entropy

    def run(x, weight, labels):
        # QuACK rejects its default of 4096 if the hidden size is 4096 too ("m == n makes row/col
        # inference ambiguous").
        return loss(x, weight, labels, chunk_size=2048 if x.shape[-1] == 4096 else 4096)

    return run


def _cce() -> Callable[..., Any]:
    return importlib.import_module("cut_cross_entropy").linear_cross_entropy


def _sdpa(backend: str) -> Callable[..., Any]:
    module = importlib.import_module("torch.nn.attention")
    attention = _functional().scaled_dot_product_attention

    def run(q, k, v):
        heads_first = (tensor.transpose(1, 2) for tensor in (q, k, v))
        with module.sdpa_kernel(getattr(module.SDPBackend, backend)):
            return attention(*heads_first, is_causal=True, enable_gqa=True).transpose(1, 2)

    return run


def _flash_attention_3() -> Callable[..., Any]:
    attention = importlib.import_module("flash_attn_interface").flash_attn_func

    def run(q, k, v):
        out = attention(q, k, v, causal=True)
        return out[0] if isinstance(out, tuple) else out  # some versions return the statistics too

    return run


def _of_log_probs(
    op: str, formula: Formula, fn: Callable[..., Any], *, entropy: bool
) -> tuple[Peer, ...]:
    liger = functools.partial(_liger_linear_log_probs, entropy=entropy)
    return (
        Peer(op, "torch.compile", "torch", formula, lambda: _compiled(fn)),
        Peer(op, "PyTorch chunks", "torch", formula, lambda: _by_chunks(fn)),
        Peer(op, "Liger", "liger-kernel", formula, liger),
    )


_PEERS = (
    Peer("rms_norm", "torch", "torch", RMS_NORM, _eager_rms_norm),
    Peer("rms_norm", "torch.compile", "torch", RMS_NORM, lambda: _compiled(_rms_norm_formula)),
    Peer("rms_norm", "Liger", "liger-kernel", RMS_NORM, _liger_rms_norm),
    Peer("rms_norm", "QuACK", "quack-kernels", RMS_NORM, _quack_rms_norm),
    Peer("rms_norm", "cuDNN", "nvidia-cudnn-frontend", RMS_NORM, _cudnn_rms_norm),
    Peer("rms_norm", "LayerNorm (torch)", "torch", LAYER_NORM, _eager_layer_norm),
    Peer(
        "rms_norm",
        "LayerNorm (torch.compile)",
        "torch",
        LAYER_NORM,
        lambda: _compiled(_eager_layer_norm()),
    ),
    Peer("rms_norm", "LayerNorm (Liger)", "liger-kernel", LAYER_NORM, _liger_layer_norm),
    Peer("add_rms_norm", "torch", "torch", ADD_RMS_NORM, _eager_add_rms_norm),
    Peer(
        "add_rms_norm",
        "torch.compile",
        "torch",
        ADD_RMS_NORM,
        lambda: _compiled(_add_rms_norm_formula),
    ),
    Peer("add_rms_norm", "Liger", "liger-kernel", ADD_RMS_NORM, _liger_add_rms_norm),
    Peer("add_rms_norm", "QuACK", "quack-kernels", ADD_RMS_NORM, _quack_add_rms_norm),
    Peer("swiglu", "torch", "torch", SWIGLU, _eager_swiglu),
    Peer("swiglu", "torch.compile", "torch", SWIGLU, lambda: _compiled(_swiglu_formula)),
    Peer("swiglu", "Liger", "liger-kernel", SWIGLU, _liger_swiglu),
    Peer(
        "linear_cross_entropy",
        "torch.compile",
        "torch",
        LINEAR_CROSS_ENTROPY,
        lambda: _compiled(_linear_cross_entropy_formula),
    ),
    Peer(
        "linear_cross_entropy",
        "Liger",
        "liger-kernel",
        LINEAR_CROSS_ENTROPY,
        _liger_linear_cross_entropy,
    ),
    Peer(
        "linear_cross_entropy",
        "Liger CuTe",
        "liger-kernel",
        LINEAR_CROSS_ENTROPY,
        _liger_hopper_linear_cross_entropy,
    ),
    Peer(
        "linear_cross_entropy",
        "QuACK",
        "quack-kernels",
        LINEAR_CROSS_ENTROPY,
        _quack_linear_cross_entropy,
    ),
    Peer("linear_cross_entropy", "CCE", "cut-cross-entropy", LINEAR_CROSS_ENTROPY, _cce),
    *_of_log_probs("linear_log_probs", LINEAR_LOG_PROBS, _log_probs_of, entropy=False),
    *_of_log_probs(
        "linear_log_probs_and_entropy",
        LINEAR_LOG_PROBS_AND_ENTROPY,
        _log_probs_and_entropy_of,
        entropy=True,
    ),
    Peer("policy_loss", "Liger GRPO", "liger-kernel", POLICY_LOSS, _liger_policy_loss),
    Peer("preference_loss", "Liger DPO", "liger-kernel", PREFERENCE_LOSS, _liger_preference_loss),
    Peer(
        "linear_jensen_shannon",
        "torch.compile",
        "torch",
        LINEAR_JENSEN_SHANNON,
        lambda: _compiled(_jensen_shannon_of),
    ),
    Peer(
        "linear_jensen_shannon",
        "Liger",
        "liger-kernel",
        LINEAR_JENSEN_SHANNON,
        _liger_jensen_shannon,
    ),
    Peer("attention", "PyTorch, cuDNN", "torch", ATTENTION, lambda: _sdpa("CUDNN_ATTENTION")),
    Peer("attention", "PyTorch, flash", "torch", ATTENTION, lambda: _sdpa("FLASH_ATTENTION")),
    Peer("attention", "FlashAttention-3", "flash-attn-3", ATTENTION, _flash_attention_3),
)


def main() -> None:
    """Prints the version of each package, or that it is not installed."""
    for package, version in versions().items():
        print(f"{package}: {version or 'not installed'}")


if __name__ == "__main__":
    main()
