"""A sum of losses of single tokens, with its gradients in the forward, by chunks of tokens.

`token_loss.py` takes a function of all tokens, whose cotangents are known once all
log-probabilities are. Where the function gives each token a loss of its own, the cotangents of a
chunk are known as soon as the log-probabilities of the chunk are. So exponentials wait for their
own chunk alone: three GEMMs at any number of tokens, and two where the weight has no gradient.
Devices exchange nothing but the sum.

A token whose label is ignored adds 0, so fewer rows may be computed, as `loss/counted.py` says.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.layout import Place, Replicated, Roles, Tokens, Weight
from pallas_kernels.log_probs.differentiable import Device
from pallas_kernels.log_probs.kept import KeptExponentials, keeps_chunks
from pallas_kernels.log_probs.of_function import OfFunction
from pallas_kernels.log_probs.token_function import TokenFunction
from pallas_kernels.loss.chunks import over_tokens
from pallas_kernels.loss.columns import Columns, Gradients
from pallas_kernels.loss.counted import compute_counted, where_counted
from pallas_kernels.loss.differentiable import wanted_gradients, weight_and_bias
from pallas_kernels.loss.token_loss import IGNORED
from pallas_kernels.mapping import Mask
from pallas_kernels.partition import split_over_explicit_axes
from pallas_kernels.protocol import Arrays


def sum_of_known(
    function: TokenFunction,
    own: Sequence[Float[Array, "*T"]],
    labels: Int[Array, "*T"],
    data: Sequence[Array],
) -> tuple[Array, Sequence[Array]]:
    """`(sum of the losses, other results)` of known log-probabilities, which JAX differentiates."""
    of_data, of_aux = _roles(function, labels.ndim, data)
    of_numbers = [Tokens()] * (len(own) + 1)
    roles = Roles((*of_numbers, *of_data), (Tokens(), *of_aux))
    losses, *aux = split_over_explicit_axes(_known_of, function, roles, *own, labels, *data)
    return jnp.sum(losses), aux


def _known_of(function: TokenFunction, place: Place) -> Callable[..., Arrays]:
    """The losses of a device's tokens, and the other results."""
    del place

    def run(*arrays) -> Arrays:
        num_own = 1 + function.with_entropy
        own, labels, data = arrays[:num_own], arrays[num_own], arrays[num_own + 1 :]
        leaves, constants = function.split(data)
        flat = lambda some: [a.reshape(labels.size, *a.shape[labels.ndim :]) for a in some]
        own, flat_labels, leaves = flat(own), labels.reshape(-1), flat(leaves)
        losses, aux = function(own, [*leaves, *constants])
        found = [where_counted(flat_labels != IGNORED, a) for a in (losses, *aux)]
        return [a.reshape(*labels.shape, *a.shape[1:]) for a in found]

    return run


def _roles(
    function: TokenFunction, num_axes: int, data: Arrays
) -> tuple[list[Tokens | Weight], list[Tokens]]:
    """The roles of the data, and of the results after the losses."""
    names = lambda of, count: tuple(f"{of}x{axis}" for axis in range(count))
    leaves, constants = function.split(data)
    roles: list[Tokens | Weight] = [
        Tokens(names(f"leaf{i}", a.ndim - num_axes)) for i, a in enumerate(leaves)
    ]
    roles += [Weight(names(f"constant{i}", a.ndim)) for i, a in enumerate(constants)]
    of_aux = function.results[1:]
    return roles, [Tokens(names(f"aux{i}", len(a.shape) - 1)) for i, a in enumerate(of_aux)]


@dataclasses.dataclass(frozen=True, slots=True)
class OfSingleTokens(OfFunction):
    """The sum of a function's losses of single tokens, and its other results for each token."""

    def roles(
        self, num_axes: int, data: Arrays
    ) -> tuple[Sequence[Any], Sequence[Any], Sequence[Any]]:
        """Each leaf of the data, its gradient and each result but the sum has rows of tokens."""
        of_data, of_aux = _roles(self.function, num_axes, data)
        return of_data, [Replicated(), *of_aux], of_data

    def on_device(self, wanted: Mask | None, place: Place) -> Callable[..., Arrays]:
        """Calls the function for the device's own tokens, or for a chunk of them at a time."""
        request, function, of_arrays = self.request, self.function, self.of_arrays(wanted)
        of_data = None if wanted is None else self.of_data(wanted)

        def run(*arrays) -> Arrays:
            x, weight, labels, *last = arrays[: self.num_arrays]
            leaves, constants = function.split(arrays[self.num_arrays :])
            weight, bias = weight_and_bias(request, x, weight, last)
            evaluate = functools.partial(_evaluated, function, of_data, constants)

            def compute(x, labels, *leaves) -> Any:
                device = Device.make(request, self.temperature, place, x, weight, bias, labels)
                if any(of_arrays) and keeps_chunks(device.request, device.plan):
                    found, per_token = _by_chunks(device, function, evaluate, of_arrays[1], leaves)
                else:
                    lse, own = device.log_probs(with_entropy=function.with_entropy)
                    per_token, cotangents = evaluate(own, labels, leaves)
                    if not any(of_arrays):
                        return per_token, ()
                    terms = device.terms(lse, *cotangents, *own[1:])
                    found = device.gradients(terms, of_arrays)
                of_x, of_weights = wanted_gradients(
                    device.request, found, of_arrays, place, is_unchecked=self.is_unchecked
                )
                return [*per_token, *of_x], of_weights

            tokens, fills = (x, labels, *leaves), (0, IGNORED, *(0,) * len(leaves))
            counts, fraction = labels != IGNORED, request.counted_fraction
            losses, *found = compute_counted(
                compute, tokens, fills, counts, fraction, place, name=self.name
            )
            total = jnp.sum(losses)
            if place.tokens:
                total = jax.lax.psum(total, place.tokens)
            num_aux, num_of_data = len(function.results) - 1, sum(of_data or ())
            aux, found = found[:num_aux], found[num_aux:]
            return [total, *aux, *found[num_of_data:], *found[:num_of_data]]

        return run


def _evaluated(
    function: TokenFunction,
    of_data: Mask | None,
    constants: Arrays,
    own: Arrays,
    labels: jax.Array,
    leaves: Arrays,
) -> tuple[list[jax.Array], Arrays]:
    """The function of some tokens, where those that are ignored have zeros.

    Returns:
      `([losses, *other results, *gradients of the wanted data], cotangents of the numbers)`. There
      are no gradients and no cotangents if `of_data` is None.
    """
    counts = labels != IGNORED
    counted = functools.partial(where_counted, counts)
    data = [*leaves, *constants]
    if of_data is None:
        losses, aux = function(own, data)
        return list(map(counted, [losses, *aux])), ()
    results, of_numbers, of_leaves = function.differentiated(own, data, of_data, counts)
    return list(map(counted, [*results, *of_leaves])), list(map(counted, of_numbers))


def _by_chunks(
    device: Device,
    function: TokenFunction,
    evaluate: Callable[..., Any],
    with_dweight: bool,
    leaves: Arrays,
) -> tuple[Gradients, list[jax.Array]]:
    """The gradients of a device's arrays, and what `evaluate` returns first."""
    plan = device.plan if with_dweight else device.plan.without_dweight
    weight = device.weight.astype(device.x.dtype)
    columns = Columns.make(device.request.settings, weight, None)

    def part(of_part: Any, chunk: Any) -> Any:
        x, labels, leaves = chunk
        some = dataclasses.replace(device, plan=of_part, x=x, labels=labels)
        kept = KeptExponentials.make(some, columns, with_entropy=function.with_entropy)
        own = kept.of_labels()
        per_token, cotangents = evaluate(own, labels, leaves)
        terms = some.terms(kept.lse, *cotangents, *own[1:])
        dx, dweight = kept.gradients(terms, with_dweight=with_dweight)
        return dweight, (per_token, dx)

    one_chunk = lambda chunk, _: part(plan.without_dweight, chunk)
    first = lambda plan, chunk: part(dataclasses.replace(plan, chunk_size=None), chunk)
    arrays = device.x, device.labels, list(leaves)
    dweight, (per_token, dx) = over_tokens(one_chunk, first, arrays, plan)
    dweight = jax.tree.map(columns.without_padding, dweight)
    return Gradients(dx, dweight, None), per_token
