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

from pallas_kernels.folding import fold_chunks
from pallas_kernels.log_probs.differentiable import (
    Device,
    fraction_in_effect,
    in_one_dtype,
    is_unchecked,
    of_arrays_in,
    roles_of_gradients,
    split,
    weight_and_biases,
)
from pallas_kernels.log_probs.kept import KeptExponentials, keeps_chunks
from pallas_kernels.log_probs.token_loss import TokenFunction
from pallas_kernels.loss import low_rank
from pallas_kernels.loss.arguments import IGNORED
from pallas_kernels.loss.columns import Columns, Gradients
from pallas_kernels.loss.counted import in_fewer_rows
from pallas_kernels.loss.layout import Embedding
from pallas_kernels.loss.plan import InPlace, Request
from pallas_kernels.operation import Mask, Operation, call
from pallas_kernels.partition import (
    Place,
    Roles,
    Same,
    Tokens,
    Weight,
    split_over_explicit_axes,
)


def sum_of_losses(
    request: Request,
    x: Float[Array, "*T D"],
    weight: Embedding,
    bias: Float[Array, " V"] | None,
    labels: Int[Array, "*T"],
    function: TokenFunction,
    data: Sequence[Array],
    *,
    temperature: float,
) -> tuple[Array, ...]:
    """The sum of the function's losses, then its other results; only the sum has a gradient.

    Args:
      request: Everything that the plan depends on.
      x: Hidden states.
      weight: Output embedding.
      bias: Bias of the logits, if there is one.
      labels: Column of each token, `IGNORED` for an ignored one.
      function: The caller's function, of tokens in one axis.
      data: Leaves of the function's last argument, `[*T, ...]`, and its constants.
      temperature: Divisor of the logits after the softcap.
    """
    first, last = low_rank.arguments(weight)
    biases = () if bias is None else (bias,)
    num_last = len(biases) + len(last)
    operation = _PerTokenLoss(
        request, temperature, function, num_last, is_unchecked(request, first)
    )
    return call(operation, x, first, labels, *biases, *last, *data)


def sum_of_known(
    function: TokenFunction,
    own: Sequence[Float[Array, "*T"]],
    labels: Int[Array, "*T"],
    data: Sequence[Array],
) -> tuple[Array, Sequence[Array]]:
    """`(sum of the losses, other results)` of known log-probabilities, which JAX differentiates."""
    num_leaves = len(data) - function.num_constants
    args, results = _roles(function, labels.ndim, data)
    of_numbers = [Tokens()] * (len(own) + 1)
    roles = Roles((*of_numbers, *args), (Tokens(), *results))
    key = function, len(own), num_leaves
    found = split_over_explicit_axes(_known_of, key, roles, *own, labels, *data)
    return jnp.sum(found[0]), found[1:]


def _known_of(
    key: tuple[TokenFunction, int, int], place: Place
) -> Callable[..., Sequence[jax.Array]]:
    function, num_numbers, num_leaves = key

    def run(*arrays) -> Sequence[jax.Array]:
        labels = arrays[num_numbers]
        of_tokens = arrays[: num_numbers + 1 + num_leaves]
        flat = [a.reshape(labels.size, *a.shape[labels.ndim :]) for a in of_tokens]
        constants = arrays[len(of_tokens) :]
        losses, aux = function(flat[:num_numbers], [*flat[num_numbers + 1 :], *constants])
        found = [_where(flat[num_numbers] != IGNORED, a) for a in (losses, *aux)]
        return [a.reshape(*labels.shape, *a.shape[1:]) for a in found]

    return run


def _where(counts: jax.Array, a: jax.Array) -> jax.Array:
    """Rows of the tokens that count, and zeros for the others."""
    return jnp.where(counts.reshape(-1, *(1,) * (a.ndim - 1)), a, jnp.zeros((), a.dtype))


def _roles(
    function: TokenFunction, num_axes: int, data: Sequence[jax.Array]
) -> tuple[list[Tokens | Weight], list[Tokens]]:
    """The roles of the data, and of the results after the losses."""
    names = lambda of, count: tuple(f"{of}x{axis}" for axis in range(count))
    num_leaves = len(data) - function.num_constants
    roles: list[Tokens | Weight] = [
        Tokens(names(f"leaf{i}", a.ndim - num_axes)) for i, a in enumerate(data[:num_leaves])
    ]
    roles += [Weight(names(f"constant{i}", a.ndim)) for i, a in enumerate(data[num_leaves:])]
    of_aux = function.results[1:]
    return roles, [Tokens(names(f"aux{i}", len(a.shape) - 1)) for i, a in enumerate(of_aux)]


@dataclasses.dataclass(frozen=True, slots=True)
class _PerTokenLoss:
    """A sum over tokens, for `(x, weight, labels, *bias, *frozen weight, *data)`.

    Attributes:
      request: Everything that the plan depends on. Each device puts its own shapes in the place of
        those in the request.
      temperature: Divisor of the logits after the softcap.
      function: The caller's function.
      num_last: Number of arguments between the labels and the data.
      is_unchecked: As `differentiable.is_unchecked` says.
    """

    request: Request
    temperature: float
    function: TokenFunction
    num_last: int
    is_unchecked: bool

    name = "linear_token_loss"

    @property
    def num_arrays(self) -> int:
        """Number of arguments before the data."""
        return 3 + self.num_last

    def of_arrays(self, wanted: Mask) -> Mask:
        """Whether the gradients of x, weight and bias are wanted."""
        return of_arrays_in(wanted[: self.num_arrays])

    def of_data(self, wanted: Mask) -> Mask:
        """Whether the gradient of each leaf of the data is wanted; constants have none."""
        leaves = wanted[self.num_arrays : len(wanted) - self.function.num_constants]
        assert sum(leaves) == sum(wanted[self.num_arrays :])
        return leaves

    def forward(self, wanted: Mask | None, *args: jax.Array) -> tuple[jax.Array, ...]:
        data = args[self.num_arrays :]
        roles, of_aux = _roles(self.function, args[2].ndim, data)
        results: list[Any] = [Same(), *of_aux]
        if wanted is not None:
            results += roles_of_gradients(self.of_arrays(wanted))
            of_data = self.of_data(wanted)
            results += [r for r, w in zip(roles[: len(of_data)], of_data, strict=True) if w]
        return split(
            self.request,
            _results_of,
            (self, wanted),
            args[: self.num_arrays],
            data,
            results,
            more=roles,
        )

    def num_residuals(self, wanted: Mask) -> int:
        return sum(self.of_arrays(wanted)) + sum(self.of_data(wanted))

    def saved(
        self,
        wanted: Mask,
        args: Sequence[jax.Array],
        results: Sequence[jax.Array],
        residuals: Sequence[jax.Array],
    ) -> tuple[Sequence[jax.Array], Sequence[jax.Array]]:
        return results, residuals

    def backward(
        self, wanted: Mask, saved: Sequence[jax.Array], cotangents: Sequence[jax.Array | None]
    ) -> Sequence[jax.Array]:
        of_sum, *of_aux = cotangents
        assert of_sum is not None and not any(a is not None for a in of_aux)
        whole = of_sum
        if self.is_unchecked:
            whole = jax.lax.psum(of_sum, self.request.settings.vocab_axes)
        num_of_arrays = sum(self.of_arrays(wanted))
        # The gradients of the data are no sums over parts of the vocabulary: they take the share.
        factors = [whole if i < num_of_arrays else of_sum for i in range(len(saved))]
        return [g.astype(jnp.float32) * c for g, c in zip(saved, factors, strict=True)]

    def fold(
        self, wanted: Mask | None, args: Sequence[jax.Array], is_batched: Mask
    ) -> tuple[Operation, Sequence[jax.Array]] | None:
        return None  # the function sees the tokens of one member


def _results_of(
    key: tuple[_PerTokenLoss, Mask | None], place: Place
) -> Callable[..., Sequence[jax.Array]]:
    """The results, and the wanted gradients of a device's arrays and of its data."""
    operation, wanted = key
    function = operation.function
    of_arrays, of_data = (False,) * 3, ()
    if wanted is not None:
        of_arrays, of_data = operation.of_arrays(wanted), operation.of_data(wanted)
    num_aux, num_per_token = len(function.results) - 1, int(of_arrays[0])

    def run(*arrays) -> Sequence[jax.Array]:
        x, weight, labels, *biases = arrays[: operation.num_arrays]
        data = arrays[operation.num_arrays :]
        num_leaves = len(data) - function.num_constants
        constants = data[num_leaves:]
        weight, biases = weight_and_biases(operation.request, x, weight, biases)
        exchanged = () if operation.is_unchecked else place.parts[0]
        evaluate = functools.partial(_evaluated, function, of_data, constants, wanted is not None)

        def compute(x, labels, *leaves) -> Any:
            device = Device.make(operation.request, operation.temperature, place, x, weight, labels)
            if any(of_arrays) and keeps_chunks(device, biases):
                found, per_token = _by_chunks(device, function, evaluate, of_arrays[1], leaves)
                found = device.pick(found, of_arrays, exchanged)
            else:
                lse, own = device.log_probs(biases, with_entropy=function.with_entropy)
                per_token, cotangents = evaluate(own, labels, leaves)
                found = ()
                if any(of_arrays):
                    rows = _rows(device, lse, own, cotangents)
                    found = device.gradients(biases, rows, of_arrays, exchanged)
            of_weights = in_one_dtype(operation.request, of_arrays, found[num_per_token:])
            return [*per_token, *found[:num_per_token]], of_weights

        of_tokens = x, labels, *data[:num_leaves]
        flat = [a.reshape(labels.size, *a.shape[labels.ndim :]) for a in of_tokens]
        fills = 0, IGNORED, *(0,) * num_leaves
        fraction = fraction_in_effect(operation.name, operation.request, place, labels.size)
        per_token, of_weights = in_fewer_rows(compute, flat, fills, flat[1] != IGNORED, fraction)
        total = jnp.sum(per_token[0])
        if place.tokens:
            total = jax.lax.psum(total, place.tokens)
        shaped = [a.reshape(*labels.shape, *a.shape[1:]) for a in per_token[1:]]
        aux, of_leaves = shaped[:num_aux], shaped[num_aux : num_aux + sum(of_data)]
        dx = shaped[num_aux + sum(of_data) :]
        return [total, *aux, *dx, *of_weights, *of_leaves]

    return run


def _evaluated(
    function: TokenFunction,
    of_data: Mask,
    constants: Sequence[jax.Array],
    differentiates: bool,
    own: Sequence[jax.Array],
    labels: jax.Array,
    leaves: Sequence[jax.Array],
) -> tuple[list[jax.Array], Sequence[jax.Array]]:
    """The function of some tokens, where those that are ignored have zeros.

    Returns:
      `([losses, *other results, *gradients of the wanted data], cotangents of the numbers)`.
    """
    counted = functools.partial(_where, labels != IGNORED)

    def of_wanted(own, some) -> Any:
        some = iter(some)
        given = [next(some) if w else a for a, w in zip(leaves, of_data, strict=True)]
        losses, aux = function(own, [*given, *constants])
        return jnp.sum(counted(losses)), (losses, aux)

    if not differentiates:
        losses, aux = function(own, [*leaves, *constants])
        return list(map(counted, [losses, *aux])), ()
    some = [a for a, w in zip(leaves, of_data, strict=True) if w]
    differentiated = jax.grad(of_wanted, argnums=(0, 1), has_aux=True)
    (of_numbers, of_leaves), (losses, aux) = differentiated(list(own), some)
    return list(map(counted, [losses, *aux, *of_leaves])), list(map(counted, of_numbers))


def _rows(
    device: Device, lse: jax.Array, own: Sequence[jax.Array], cotangents: Sequence[jax.Array]
) -> Any:
    g, *h = cotangents
    return device.rows(lse, g, *own[1:], *h)


def _by_chunks(
    device: Device,
    function: TokenFunction,
    evaluate: Callable[..., Any],
    with_dweight: bool,
    leaves: Sequence[jax.Array],
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
        dx, dweight = kept.gradients(
            _rows(some, kept.lse, own, cotangents), with_dweight=with_dweight
        )
        return dweight, (per_token, dx)

    if isinstance(plan, InPlace):
        first = functools.partial(part, dataclasses.replace(plan, chunk_size=None))
        first, chunk_size = (plan.extent.num_tokens, first), plan.chunk_size or len(device.x)
    else:
        first, chunk_size = None, plan.chunk_size
    one_chunk = lambda chunk, _: part(plan.without_dweight, chunk)
    arrays = device.x, device.labels, list(leaves)
    dweight, (per_token, dx) = fold_chunks(one_chunk, arrays, chunk_size, first=first)
    dweight = jax.tree.map(columns.without_padding, dweight)
    return Gradients(dx, dweight, None), per_token
