"""Exponentials of logits that wait for the cotangents of the log-probabilities.

The GEMM of the logits stores their exponentials, in the memory of `dweight` or in an array of their
own. They become the gradient in the logits once the cotangents are known. So the gradients need two
GEMMs more, and no logits.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels.log_probs.differentiable import Device
from pallas_kernels.loss.columns import Columns, product, weight_product
from pallas_kernels.loss.gradient_terms import GradientTerms
from pallas_kernels.loss.mosaic_gpu import exponentials, in_place
from pallas_kernels.loss.mosaic_gpu.statistics import entropy_of
from pallas_kernels.loss.plan import InPlace, Request, TokenChunks
from pallas_kernels.loss.token_loss import IGNORED, is_column


def keeps_all(request: Request, plan: TokenChunks | InPlace) -> bool:
    """Whether the exponentials of all of a device's tokens can wait for the cotangents."""
    at_once = plan.chunk_size if isinstance(plan, TokenChunks) else plan.extent.num_tokens
    return len(request.x) <= at_once and keeps_chunks(request, plan)


def keeps_chunks(request: Request, plan: TokenChunks | InPlace) -> bool:
    """Whether the exponentials of a chunk can wait for the cotangents of its tokens."""
    settings = request.settings
    return (
        plan.by_exponentials and settings.options.logit_softcap is None and not settings.vocab_axes
    )


@dataclasses.dataclass(frozen=True)
class KeptExponentials:
    """The exponentials of all logits of some tokens, with their statistics.

    Attributes:
      device: The plan and the arrays. The plan is for these tokens alone: all of them in place, or
        one chunk.
      columns: The columns of the vocabulary.
      found: Exponentials of the chunk. For a plan in place: those in the memory of `dweight`, then
        those in memory of their own, if there are any.
      lse: Logsumexp of each token.
    """

    device: Device
    columns: Columns
    found: list[exponentials.Exponentials]
    lse: Float[Array, " T"]

    @classmethod
    def make(cls, device: Device, columns: Columns, *, with_entropy: bool) -> "KeptExponentials":
        """The exponentials of the device's tokens: one GEMM."""
        made = [
            exponentials.exponentials_of_linear(
                device.x[tokens],
                columns.weight,
                device.labels[tokens],
                device.labels[tokens] != IGNORED,
                num_columns=columns.num_columns,
                temperature=device.temperature,
                with_weighted=with_entropy,
                stored=place,
                weight_layout=columns.layout,
                config=device.request.settings.config.linear,
            )
            for tokens, place in _parts(device)
        ]
        found, lse = zip(*made, strict=True)
        return cls(device, columns, list(found), in_place.joined(lse))

    @classmethod
    def of_saved(
        cls,
        device: Device,
        columns: Columns,
        values: Float[Array, "T Vp"],
        sum_exp: Float[Array, " T"],
        of_label: Float[Array, " T"],
        *,
        lse: Float[Array, " T"],
    ) -> "KeptExponentials":
        """The exponentials of one chunk that were saved, with as much as `gradients` reads."""
        unread = jnp.full_like(lse, jnp.nan)  # logits
        found = exponentials.Exponentials(values, sum_exp, of_label, unread, unread, unread, None)
        return cls(device, columns, [found], lse)

    def of_labels(self) -> list[jax.Array]:
        """The log-probabilities, and the entropies if the kernel made them; 0 where ignored."""
        label_logit, sum_exp, weighted = in_place.joined(
            [(f.label_logit, f.sum_exp, f.weighted) for f in self.found]
        )
        labels = self.device.labels
        in_range = is_column(labels, self.columns.num_columns)
        values = [jnp.where(in_range, label_logit - self.lse, jnp.nan)]
        if weighted is not None:
            values.append(entropy_of(sum_exp, weighted))
        return [jnp.where(labels == IGNORED, 0.0, a) for a in values]

    def gradients(
        self, terms: GradientTerms, *, with_dweight: bool = True
    ) -> tuple[Float[Array, "T D"], Any]:
        """`(dx, dweight)` of the gradient that `terms` describes: a GEMM for each.

        `dweight` has the padding of `columns`. It is None without `with_dweight`, which a plan in
        place does not take.
        """
        device, columns = self.device, self.columns
        values, factors = [], []
        for found, (tokens, place) in zip(self.found, _parts(device), strict=True):
            labels, of_part = device.labels[tokens], terms.of(tokens)
            options = {"num_columns": columns.num_columns, "stored": place}
            if terms.softmax_log is None:
                # Without entropies the gradient is that of a loss whose coefficients are -g.
                part, factor = exponentials.dlogits_and_factor(
                    found, labels, of_part.softmax, 1.0, **options
                )
                factors.append(factor)
            else:
                part = exponentials.dlogits_of_exponentials(found, labels, of_part, **options)
            values.append(part)
        factor = in_place.joined(factors) if factors else None
        x = device.x
        if factor is None:
            x = jnp.where(terms.counts[:, None], x, 0)  # 0 · NaN is NaN
        plan, settings = device.plan, device.request.settings
        if isinstance(plan, InPlace):
            return in_place.gradients(
                values,
                factor,
                x,
                columns.weight,
                extent=plan.extent,
                weight_layout=columns.layout,
                config=settings.config,
            )
        (dz,) = values
        dx = product(f"tv,{columns.layout}->td", dz, columns.weight, jnp.float32)
        if factor is not None:
            dx, x = dx * factor[:, None], exponentials.scaled(x, factor)
        dweight = None
        if with_dweight:
            dweight = weight_product(dz, x, columns.weight, columns.layout, settings.accum_dtype)
        return dx.astype(device.x.dtype), dweight


def _parts(device: Device) -> list[tuple[slice, Any]]:
    """The tokens whose exponentials lie together, and their layout; None for `[T, V]`."""
    if not isinstance(device.plan, InPlace):
        return [(slice(None), None)]
    layout = device.request.settings.weight_layout
    return in_place.parts_of(device.plan.extent, device.x.shape[1], layout)
