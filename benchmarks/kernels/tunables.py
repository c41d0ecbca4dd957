"""The operations whose kernels have launch parameters to tune."""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

import pallas_kernels
from benchmarks.kernels import ops
from benchmarks.kernels.formulas import EPS, Arrays, Formula
from benchmarks.kernels.ops import Direction
from benchmarks.kernels.shapes import Shape
from pallas_kernels.gpu.device import Device
from pallas_kernels.loss import xla
from pallas_kernels.loss.mosaic_gpu import logits as logits_kernel
from pallas_kernels.loss.mosaic_gpu import logits_config
from pallas_kernels.loss.token_loss import LossOptions
from pallas_kernels.mlp import config as swiglu_config
from pallas_kernels.norm import config as norm_config

# A frozen dataclass. If both directions are swept, its fields begin with "fwd_" or "bwd_".
type Config = Any


@dataclasses.dataclass(frozen=True)
class Tunable:
    """An operation whose kernels have launch parameters.

    Attributes:
      fn: Function of the formula's inputs, `implementation` and `config`.
      formula: Formula that it computes.
      inputs: Function that makes inputs and cotangents from a shape and a random key.
      passes: Arrays of the size of an input that it must read or write, by direction.
      candidates: Function, for each swept direction, that makes the candidates from the length of
        the last axis of an input and its dtype.
      config: Type of the launch parameters.
      default: Function that gives the launch parameters in use, from device, length and dtype.
      tuned: Table of tuned rows that comes with the library, by device kind, dtype, length and
        `variant`.
      seconds: Seconds that one candidate takes to compile, about.
      sizes: Flag that gives the lengths of the last axis.
      num_elements: Elements of an input, unless a flag gives another number.
      variant: Last entries of its keys in the table of tuned rows, after device, dtype and length.
    """

    fn: Callable[..., Any]
    formula: Formula
    inputs: Callable[[Shape, jax.Array], Arrays]
    passes: dict[Direction, int]
    candidates: dict[Direction, Callable[[int, str], list[Config]]]
    config: Callable[..., Config]
    default: Callable[[Device, int, DTypeLike], Config]
    tuned: Mapping[Any, Config]
    seconds: float
    sizes: str = "hidden_sizes"
    num_elements: int = 2**26
    variant: tuple[bool, ...] = ()


def _of_bench(
    op: str,
    fn: Callable[..., Any],
    forward_candidates: Callable[[int, str], list[Config]],
    backward_candidates: Callable[[int, str], list[Config]],
    **options: Any,
) -> Tunable:
    """An operation of `bench` that has a kernel for each direction."""
    return Tunable(
        fn=fn,
        formula=ops.OPS[op].contenders[0].formula,
        inputs=ops.OPS[op].inputs,
        passes=ops.OPS[op].passes,
        candidates={"forward": forward_candidates, "backward": backward_candidates},
        **options,
    )


def _norm(op: str, fn: Callable[..., Any], *, add: bool) -> Tunable:
    return _of_bench(
        op,
        functools.partial(fn, eps=EPS),
        functools.partial(norm_config.forward_candidates, add=add),
        functools.partial(norm_config.backward_candidates, add=add),
        config=norm_config.Config,
        default=functools.partial(norm_config.default_config, add=add),
        tuned=norm_config.TUNED,
        seconds=1.0,
        variant=(add,),
    )


def _logits_inputs(shape: Shape, key: jax.Array) -> Arrays:
    num_tokens, vocab_size = shape
    keys = jax.random.split(key)
    # The loss pads its logits to whole lines.
    num_columns = vocab_size + -vocab_size % logits_config.LINE
    return {
        "logits": jax.random.normal(keys[0], (num_tokens, num_columns), jnp.bfloat16),
        # Not column 0, before which the largest logit is -inf.
        "labels": jax.random.randint(keys[1], (num_tokens,), 1, vocab_size),
    }


def _loss_of_logits(logits, labels, *, implementation, config):
    """Statistics and gradient of a chunk of logits, as a training step makes them.

    The gradient overwrites the logits, so XLA copies them first; the timing does not count copies.
    """
    plain = LossOptions(label_smoothing=0.0, z_loss=0.0, logit_softcap=None)
    # XLA would make equal coefficients with a kernel, so they differ. They are powers of two, so
    # that the label's entry, by far the largest, has next to no rounding error and those of the
    # other entries count.
    coefficients = jnp.asarray(np.resize([1, 0.5], labels.shape).astype(np.float32))
    options: dict[str, Any] = {"num_columns": logits.shape[1], "coefficients": coefficients}
    if implementation == "reference":
        found, dlogits = xla.loss_of_logits(logits, labels, plain, **options)
    elif (reason := logits_kernel.unsupported_reason(logits.dtype)) is not None:
        raise NotImplementedError(reason)
    else:
        options["config"] = config
        found, dlogits = logits_kernel.loss_of_logits(logits, labels, plain, **options)
    assert found is not None and dlogits is not None
    dlogits = dlogits.astype(logits.dtype)
    return found.lse, found.label_logit, found.largest, found.largest_before, dlogits


TUNABLES: dict[str, Tunable] = {
    "rms_norm": _norm("rms_norm", pallas_kernels.rms_norm, add=False),
    "add_rms_norm": _norm("add_rms_norm", pallas_kernels.add_rms_norm, add=True),
    "swiglu": _of_bench(
        "swiglu",
        pallas_kernels.swiglu,
        lambda _, dtype: swiglu_config.forward_candidates(dtype),
        lambda _, dtype: swiglu_config.backward_candidates(dtype),
        config=swiglu_config.Config,
        default=swiglu_config.default_config,
        tuned=swiglu_config.TUNED,
        seconds=0.5,
    ),
    "linear_cross_entropy": Tunable(
        fn=_loss_of_logits,
        formula=Formula(
            functools.partial(_loss_of_logits, implementation="reference", config=None),
            inputs=("logits", "labels"),
            outputs=("lse", "label_logit", "largest", "largest_before", "dlogits"),
            gradients=(),
        ),
        inputs=_logits_inputs,
        passes={"forward": 2},
        candidates={"forward": logits_config.candidates},
        config=logits_config.Config,
        default=logits_config.default_config,
        tuned=logits_config.TUNED,
        seconds=15.0,
        sizes="vocab_sizes",
        num_elements=2**28,  # 512 MiB, as in a chunk of the loss
    ),
}
