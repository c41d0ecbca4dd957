"""The implementations of PyTorch libraries, operation by operation; `peers` runs them."""

import dataclasses
import importlib
import logging
import math
from collections.abc import Callable
from typing import Any

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
    Formula,
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


def torch() -> Any:
    """The module, which need not be installed."""
    return importlib.import_module("torch")


def _functional() -> Any:
    return importlib.import_module("torch.nn.functional")


# The calls of each library, as torch 2.13, liger-kernel 0.8.5, quack-kernels 0.6.5 and
# cut-cross-entropy 25.1.1 define them.


def _rms_norm(x, weight):
    return _functional().rms_norm(x, weight.shape, weight, EPS)


def _add_rms_norm(x, residual, weight):
    residual_out = x + residual
    return _rms_norm(residual_out, weight), residual_out


def _layer_norm(x, weight, bias):
    return _functional().layer_norm(x, weight.shape, weight, bias, EPS)


def _swiglu(gate, up):
    return _functional().silu(gate) * up


def _compiled(fn: Callable[..., Any]) -> Callable[..., Any]:
    return torch().compile(fn, dynamic=False)


def _rms_norm_formula(x, weight):
    x_f32 = x.float()
    rstd = torch().rsqrt(x_f32.square().mean(-1, keepdim=True) + EPS)
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
    checkpoint = importlib.import_module("torch.utils.checkpoint").checkpoint

    def run(x, weight, labels):
        parts = zip(x.split(512), labels.split(512), strict=True)
        found = [checkpoint(fn, a, weight, b, use_reentrant=False) for a, b in parts]
        if isinstance(found[0], tuple):
            return tuple(torch().cat(arrays) for arrays in zip(*found, strict=True))
        return torch().cat(found)

    return run


def _jensen_shannon_of(x, weight, teacher_x, teacher_weight):
    log_p = _functional().log_softmax((x @ weight.T).float(), -1)
    log_q = _functional().log_softmax((teacher_x @ teacher_weight.T).float(), -1)
    log_m = torch().logaddexp(log_p, log_q) - math.log(2)
    terms = log_p.exp() * (log_p - log_m) + log_q.exp() * (log_q - log_m)
    return terms.sum() / (2 * len(x))


def _liger(name: str, *options: Any) -> Callable[[], Callable[..., Any]]:
    """Loads an autograd function of Liger, which takes these options after its inputs."""

    def load() -> Callable[..., Any]:
        function = getattr(importlib.import_module("liger_kernel.ops"), name)
        return lambda *inputs: function.apply(*inputs, *options)

    return load


# No offset, all arithmetic in float32, not in place. In place moves as many bytes, but overwrites
# the cotangent, so that the second call would see other numbers.
_LIGER_NORM = (EPS, 0.0, "gemma", False)


def _liger_linear_cross_entropy() -> Callable[..., Any]:
    function = _liger("LigerFusedLinearCrossEntropyFunction")()
    return lambda x, weight, labels: function(x, weight, labels)[0]


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
    losses = importlib.import_module("liger_kernel.chunked_loss")
    loss = losses.LigerFusedLinearGRPOLoss(beta=0.0, loss_type="bnpo", use_ref_model=False)

    def run(x, weight, labels, advantages):
        sequences = len(advantages)
        labels = labels.reshape(sequences, -1)
        x = x.reshape(*labels.shape, x.shape[-1])
        return loss(x, weight, labels, torch().ones_like(labels), advantages)[0]

    return run


def _liger_preference_loss() -> Callable[..., Any]:
    losses = importlib.import_module("liger_kernel.chunked_loss")
    loss = losses.LigerFusedLinearDPOLoss(beta=0.1, use_ref_model=False)

    def run(x, weight, labels):
        labels = labels.reshape(SEQUENCES, -1)
        return loss(weight, x.reshape(*labels.shape, x.shape[-1]), labels)[0]

    return run


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
    # By default it leaves out the gradients of blocks whose probabilities are all below 2^-12. With
    # the random numbers of `kernels.loss`, its dx errs by 2.3 % on an H200 at D 2304 and V 256000.
    # A model of the filter in NumPy has 1.9 % there, 1.5 % at 2048 and 128256, and 0.02 % at 4096
    # and 128256.
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


def _of(
    op: str, formula: Formula, *entries: tuple[str, str, Callable[[], Callable[..., Any]]]
) -> tuple[Peer, ...]:
    """The peers of an operation, from their names, packages and functions that load them."""
    return tuple(Peer(op, name, package, formula, load) for name, package, load in entries)


def _of_log_probs(
    op: str, formula: Formula, fn: Callable[..., Any], *, entropy: bool
) -> tuple[Peer, ...]:
    return _of(
        op,
        formula,
        ("torch.compile", "torch", lambda: _compiled(fn)),
        ("PyTorch chunks", "torch", lambda: _by_chunks(fn)),
        ("Liger", "liger-kernel", lambda: _liger_linear_log_probs(entropy=entropy)),
    )


PEERS = (
    *_of(
        "rms_norm",
        RMS_NORM,
        ("torch", "torch", lambda: _rms_norm),
        ("torch.compile", "torch", lambda: _compiled(_rms_norm_formula)),
        ("Liger", "liger-kernel", _liger("LigerRMSNormFunction", *_LIGER_NORM)),
        ("QuACK", "quack-kernels", _quack_rms_norm),
        ("cuDNN", "nvidia-cudnn-frontend", _cudnn_rms_norm),
    ),
    *_of(
        "rms_norm",
        LAYER_NORM,
        ("LayerNorm (torch)", "torch", lambda: _layer_norm),
        ("LayerNorm (torch.compile)", "torch", lambda: _compiled(_layer_norm)),
        ("LayerNorm (Liger)", "liger-kernel", _liger("LigerLayerNormFunction", EPS)),
    ),
    *_of(
        "add_rms_norm",
        ADD_RMS_NORM,
        ("torch", "torch", lambda: _add_rms_norm),
        ("torch.compile", "torch", lambda: _compiled(_add_rms_norm_formula)),
        ("Liger", "liger-kernel", _liger("LigerFusedAddRMSNormFunction", *_LIGER_NORM)),
        ("QuACK", "quack-kernels", _quack_add_rms_norm),
    ),
    *_of(
        "swiglu",
        SWIGLU,
        ("torch", "torch", lambda: _swiglu),
        ("torch.compile", "torch", lambda: _compiled(_swiglu_formula)),
        # Its backward overwrites gate and up with their gradients, so only the first call on a set
        # of inputs, the one that is checked, sees random numbers. It moves as many bytes as ours.
        ("Liger", "liger-kernel", _liger("LigerSiLUMulFunction")),
    ),
    *_of(
        "linear_cross_entropy",
        LINEAR_CROSS_ENTROPY,
        ("torch.compile", "torch", lambda: _compiled(_linear_cross_entropy_formula)),
        ("Liger", "liger-kernel", _liger_linear_cross_entropy),
        ("Liger CuTe", "liger-kernel", _liger_hopper_linear_cross_entropy),
        ("QuACK", "quack-kernels", _quack_linear_cross_entropy),
        ("CCE", "cut-cross-entropy", _cce),
    ),
    *_of_log_probs("linear_log_probs", LINEAR_LOG_PROBS, _log_probs_of, entropy=False),
    *_of_log_probs(
        "linear_log_probs_and_entropy",
        LINEAR_LOG_PROBS_AND_ENTROPY,
        _log_probs_and_entropy_of,
        entropy=True,
    ),
    *_of("policy_loss", POLICY_LOSS, ("Liger GRPO", "liger-kernel", _liger_policy_loss)),
    *_of("preference_loss", PREFERENCE_LOSS, ("Liger DPO", "liger-kernel", _liger_preference_loss)),
    *_of(
        "linear_jensen_shannon",
        LINEAR_JENSEN_SHANNON,
        ("torch.compile", "torch", lambda: _compiled(_jensen_shannon_of)),
        ("Liger", "liger-kernel", _liger("LigerFusedLinearJSDFunction")),
    ),
    *_of(
        "attention",
        ATTENTION,
        ("PyTorch, cuDNN", "torch", lambda: _sdpa("CUDNN_ATTENTION")),
        ("PyTorch, flash", "torch", lambda: _sdpa("FLASH_ATTENTION")),
        ("FlashAttention-3", "flash-attn-3", _flash_attention_3),
    ),
)
