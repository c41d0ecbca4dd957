"""Checks of the arguments of the log-probabilities, and the plan of a call in words."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
from jaxtyping import Array, Int

from pallas_kernels.choices import record
from pallas_kernels.implementation import Implementation, symbolic_reason
from pallas_kernels.log_probs import differentiable, saved
from pallas_kernels.logs import log_once
from pallas_kernels.loss.arguments import (
    checked_request,
    checked_temperature,
    labels_and_weights,
    num_parts,
)
from pallas_kernels.loss.description import describe
from pallas_kernels.loss.layout import Embedding, WeightLayout
from pallas_kernels.loss.mosaic_gpu import linear_launch
from pallas_kernels.loss.plan import Request, choose


def check_alone(**others: Any) -> None:
    """Raises ValueError if an option is not None that saved exponentials do not go with."""
    for name, value in others.items():
        if value is not None:
            shown = "a bias" if name == "bias" else f"{name}={value}"
            raise ValueError(
                f"keep_exponentials=True does not go with {shown}; leave one of the two out"
            )


def checked_options(
    name: str,
    x: Array,
    weight: Embedding,
    bias: Array | None,
    labels: Any,
    *,
    temperature: float,
    vocab_axis: str | None,
    ignore_index: int,
    check_labels: bool,
    implementation: Implementation | None,
    weight_layout: WeightLayout,
    token_data: Any = None,
    keep_exponentials: bool = False,
    keeps: Callable[[Request, Any], bool] | None = None,
    **options: Any,
) -> tuple[Request, float, Int[Array, "*T"], int]:
    """`(request, temperature, labels, V of all devices)` of a call of the public function `name`.

    The arguments are those of this function, with `x`, `weight` and `bias` from `check_arrays`.
    `keeps(request, plan)` says whether exponentials wait for the cotangents in the forward. It is
    None if the forward does not know the cotangents. The call is noted for `choices.explain`.
    """
    temperature = checked_temperature(temperature)
    unsupported = None
    if symbolic_reason(x) is None and x.size:
        operand = jax.ShapeDtypeStruct(weight.shape, x.dtype)
        unsupported = linear_launch.unsupported_reason(x, operand, weight_layout)
    request, why_no_kernel = checked_request(
        x,
        weight,
        bias,
        ignore_index=ignore_index,
        reduction="none",
        label_smoothing=0.0,
        z_loss=0.0,
        vocab_chunk_size=None,
        vocab_axis=vocab_axis,
        weight_layout=weight_layout,
        implementation=implementation,
        also_unsupported=unsupported,
        **options,
    )
    is_kept = False
    if keep_exponentials:
        reason = saved.unsupported_reason(request)
        if is_kept := reason is None:
            request = dataclasses.replace(request, chunk_size=len(request.x))
        else:
            log_once(f"{name}: keep_exponentials=True has no effect: {reason}")
    describe_plan = lambda: _described(request, why_no_kernel, is_kept, keeps)
    record(
        name,
        (x, weight, labels, bias),
        implementation,
        request.settings.implementation,
        why_no_kernel,
        plan=describe_plan if symbolic_reason(x) is None else None,
    )
    of_tokens = {"x": x, "labels": labels, "token_data": token_data}
    vocab_size = num_parts(vocab_axis, name, weight, **of_tokens) * request.sizes[0]
    labels, _, _ = labels_and_weights(x, labels, None, vocab_size, ignore_index, check_labels, name)
    return request, temperature, labels, vocab_size


def _described(request: Request, why_no_kernel: str | None, is_kept: bool, keeps: Any) -> str:
    """The plan in words, for `checked_options`, which has these values."""
    is_three = is_kept
    if keeps is not None and request.settings.implementation == "mosaic_gpu":
        rows = request.of_counted
        is_three = keeps(rows, choose(differentiable.planned(rows)).plan)
    plan = describe(differentiable.planned(request), why_no_kernel, 3 if is_three else 4)
    if is_kept:
        plan = dataclasses.replace(plan, reason="The caller asks for keep_exponentials=True.")
    return str(plan)
