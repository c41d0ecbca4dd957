"""A scalar made of log-probabilities, with its gradients in the forward.

Once all log-probabilities are known, so are their cotangents: the caller's function is
differentiated in the forward. If the exponentials of all logits are still there, in the memory of
`dweight` (`loss/mosaic_gpu/in_place.py`), the gradients need no logits: three GEMMs. The entropy's
gradient takes a pass over the exponentials, which reads and writes 2 bytes for each token and
column. Without the exponentials the forward computes the logits again: four GEMMs.

The function sees the numbers of all tokens. Where tokens are split over devices, each device
gathers 4 bytes a token for the log-probabilities, and as much for the entropies. It calls the
function on all of them, and takes the cotangents of its own tokens.

With `counted_fraction` the tokens that count are computed in fewer rows (`loss/counted.py`). The
function gets 0 for the others. Devices gather inside of the branch, so all of them take the same
one: they compute few rows if the tokens that count fit on each device.
"""

import dataclasses
import hashlib
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import Tracer
from jax.extend.core import jaxpr_as_fun
from jaxtyping import Array, Float, Int

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
from pallas_kernels.log_probs.kept import KeptExponentials, keeps_all
from pallas_kernels.loss import low_rank
from pallas_kernels.loss.arguments import IGNORED
from pallas_kernels.loss.columns import Columns, Gradients
from pallas_kernels.loss.counted import FewRows, for_few_or_all
from pallas_kernels.loss.layout import Embedding
from pallas_kernels.loss.plan import Request
from pallas_kernels.operation import Mask, Operation, call
from pallas_kernels.partition import Place, Same, Weight, of_all_tokens, of_own_tokens


@dataclasses.dataclass(frozen=True)
class TokenFunction:
    """The caller's function, as a static option of an operation.

    Attributes:
      fn: Function `(log_probs, entropy, token_data) -> loss`, or `-> (loss, aux)`. The loss is a
        scalar, or the losses of single tokens.
      treedef: Structure of `token_data`.
      num_constants: Number of arrays that the function reads and that are no arguments. They follow
        the leaves of the data.
      with_entropy: Whether the function gets entropies; otherwise None.
      has_aux: Whether it returns more than the loss.
      digest: Number that tells apart what functions compute, in every process.
      results: Shapes and dtypes of what it returns, the loss first.
    """

    fn: Callable[..., Any] = dataclasses.field(repr=False)
    treedef: Any
    num_constants: int
    with_entropy: bool
    has_aux: bool
    digest: str
    results: tuple[jax.ShapeDtypeStruct, ...]

    def __call__(self, of_tokens: Sequence[Any], data: Sequence[Any]) -> tuple[Any, list[Any]]:
        """`(loss, other results)` of log-probabilities, entropies, leaves of data and constants."""
        log_probs, entropy = of_tokens if self.with_entropy else (of_tokens[0], None)
        num_leaves = len(data) - self.num_constants
        leaves, constants = data[:num_leaves], data[num_leaves:]
        args = log_probs, entropy, jax.tree.unflatten(self.treedef, leaves)
        # A function that partitions itself may hold no arrays, so they come as arguments.
        traced = jax.make_jaxpr(self.fn)(*args)
        assert len(traced.consts) == self.num_constants
        run = jaxpr_as_fun(traced.replace(consts=constants))
        loss, *aux = run(*jax.tree.leaves(args))
        return loss, aux


def token_function(
    fn: Callable[..., Any],
    shape: tuple[int, ...],
    data: Any,
    *,
    with_entropy: bool,
    has_aux: bool,
    per_token: bool,
) -> tuple[TokenFunction, list[Any], Any]:
    """`(function, data and constants, structure of the other results)`, checked.

    Raises:
      TypeError: The function does not return a float32 scalar, or a float32 number for each token
        with `per_token`; or it reads a traced array that is not among its arguments.
      ValueError: With `per_token`, a leaf of the data or a result has another number of tokens.
    """
    leaves, treedef = jax.tree.flatten(data)
    leaves = list(map(jnp.asarray, leaves))
    shapes_of_leaves = [a.shape for a in leaves]
    if per_token:
        for a in leaves:
            if a.shape[: len(shape)] != shape:
                raise ValueError(
                    f"with per_token=True every leaf of token_data begins with the axes of labels, "
                    f"{shape}; got {a.shape}; a number for all tokens can be a constant of token_fn"
                )
        shapes_of_leaves = [(math.prod(shape), *s[len(shape) :]) for s in shapes_of_leaves]
        shape = (math.prod(shape),)
    numbers = jax.ShapeDtypeStruct(shape, jnp.float32)
    structs = [
        jax.ShapeDtypeStruct(s, a.dtype) for s, a in zip(shapes_of_leaves, leaves, strict=True)
    ]
    entropy = numbers if with_entropy else None
    traced, shapes = jax.make_jaxpr(fn, return_shape=True)(
        numbers, entropy, jax.tree.unflatten(treedef, structs)
    )
    if any(isinstance(a, Tracer) for a in traced.consts):
        raise TypeError(
            "token_fn reads an array that jax.jit or jax.grad traces and that is not among its "
            "arguments; pass it in token_data"
        )
    if has_aux and not (isinstance(shapes, tuple) and len(shapes) == 2):
        raise TypeError(f"token_fn must return (loss, aux), because has_aux=True; got {shapes}")
    loss: Any
    loss, aux = shapes if has_aux else (shapes, ())
    is_array = hasattr(loss, "shape") and hasattr(loss, "dtype")
    wanted = shape if per_token else ()
    if not is_array or loss.shape != wanted or loss.dtype != jnp.float32:
        what = f"a float32 array {wanted}" if per_token else "a float32 scalar"
        remedy = "return a number for each token" if per_token else "sum or average over tokens"
        more = "" if has_aux else ", and pass has_aux=True to return more"
        raise TypeError(f"token_fn must return {what}, got {loss}; {remedy}{more}")
    if per_token and any(a.shape[:1] != shape for a in jax.tree.leaves(aux)):
        raise ValueError(
            f"with per_token=True every array of aux has a row for each of {shape[0]} tokens, got "
            f"{[a.shape for a in jax.tree.leaves(aux)]}"
        )
    function = TokenFunction(
        fn=fn,
        treedef=treedef,
        num_constants=len(traced.consts),
        with_entropy=with_entropy,
        has_aux=has_aux,
        digest=hashlib.sha256(str(traced.jaxpr).encode()).hexdigest(),
        results=tuple(
            jax.ShapeDtypeStruct(a.shape, a.dtype) for a in (loss, *jax.tree.leaves(aux))
        ),
    )
    return function, [*leaves, *map(jnp.asarray, traced.consts)], jax.tree.structure(aux)


def token_loss(
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
    """The results of the function, the loss first; only the loss has a gradient.

    Args:
      request: Everything that the plan depends on.
      x: Hidden states.
      weight: Output embedding.
      bias: Bias of the logits, if there is one.
      labels: Column of each token, `IGNORED` for an ignored one.
      function: The caller's function.
      data: Leaves of the function's last argument, and its constants.
      temperature: Divisor of the logits after the softcap.
    """
    first, last = low_rank.arguments(weight)
    others = last if bias is None else (bias, *last)
    operation = _TokenLoss(
        request, temperature, function, len(others), is_unchecked(request, first)
    )
    return call(operation, x, first, labels, *others, *data)


@dataclasses.dataclass(frozen=True, slots=True)
class _TokenLoss:
    """Results of a function of log-probabilities, for `(x, weight, labels, *bias, *data)`.

    Attributes:
      request: Everything that the plan depends on. Each device puts its own shapes in the place of
        those in the request.
      temperature: Divisor of the logits after the softcap.
      function: The caller's function.
      num_others: Number of arguments between the labels and the data.
      is_unchecked: As `differentiable.is_unchecked` says.
    """

    request: Request
    temperature: float
    function: TokenFunction
    num_others: int
    is_unchecked: bool

    name = "linear_token_loss"

    @property
    def num_arrays(self) -> int:
        """Number of arguments before the data."""
        return 3 + self.num_others

    def _of_arrays(self, wanted: Mask) -> Mask:
        return of_arrays_in(wanted[: self.num_arrays])

    def forward(self, wanted: Mask | None, *args: jax.Array) -> tuple[jax.Array, ...]:
        results = [Same(len(a.shape)) for a in self.function.results]
        data = args[self.num_arrays :]
        if wanted is not None:
            results += roles_of_gradients(self._of_arrays(wanted))
            of_data = zip(data, wanted[self.num_arrays :], strict=True)
            results += [Same(a.ndim) for a, is_wanted in of_data if is_wanted]
        roles = [Weight(tuple(f"data{axis}" for axis in range(a.ndim))) for a in data]
        key = self, wanted
        return split(
            self.request, _results_of, key, args[: self.num_arrays], data, results, more=roles
        )

    def num_residuals(self, wanted: Mask) -> int:
        return sum(self._of_arrays(wanted)) + sum(wanted[self.num_arrays :])

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
        of_loss, *of_aux = cotangents
        assert of_loss is not None and not any(a is not None for a in of_aux)
        whole = of_loss
        if self.is_unchecked:
            whole = jax.lax.psum(of_loss, self.request.settings.vocab_axes)
        num_of_arrays = sum(self._of_arrays(wanted))
        # The gradients of the data are no sums over parts of the vocabulary: they take the share.
        factors = [whole if i < num_of_arrays else of_loss for i in range(len(saved))]
        return [g.astype(jnp.float32) * c for g, c in zip(saved, factors, strict=True)]

    def fold(
        self, wanted: Mask | None, args: Sequence[jax.Array], is_batched: Mask
    ) -> tuple[Operation, Sequence[jax.Array]] | None:
        return None  # the function sees the tokens of one member


def _results_of(
    key: tuple[_TokenLoss, Mask | None], place: Place
) -> Callable[..., Sequence[jax.Array]]:
    """The results, and the wanted gradients of a device's arrays and of the data."""
    operation, wanted = key
    function, with_entropy = operation.function, operation.function.with_entropy

    def run(*arrays) -> Sequence[jax.Array]:
        x, weight, labels, *biases = arrays[: operation.num_arrays]
        data = list(arrays[operation.num_arrays :])
        flat_x, flat_labels = x.reshape(labels.size, x.shape[-1]), labels.reshape(-1)
        weight, biases = weight_and_biases(operation.request, x, weight, biases)
        of_arrays = operation._of_arrays(wanted) if wanted is not None else (False,) * 3
        exchanged = () if operation.is_unchecked else place.parts[0]

        def compute(few: FewRows | None) -> list[jax.Array]:
            take = lambda a, fill: a if few is None else few.take(a, fill)
            put_back = lambda a: a if few is None else few.put_back(a)
            device = Device.make(
                operation.request,
                operation.temperature,
                place,
                take(flat_x, 0),
                weight,
                take(flat_labels, IGNORED),
            )
            stored = None
            if of_arrays[1] and keeps_all(device, biases):
                columns = Columns.make(device.request.settings, weight.astype(x.dtype), None)
                stored = KeptExponentials.make(device, columns, with_entropy=with_entropy)
                lse, own = stored.lse, stored.of_labels()
            else:
                lse, own = device.log_probs(biases, with_entropy=with_entropy)
            numbers = [of_all_tokens(put_back(a).reshape(labels.shape), place) for a in own]
            if wanted is None:
                loss, aux = function(numbers, data)
                return [loss, *aux]
            loss, aux, of_numbers, of_data = _differentiated(operation, wanted, numbers, data)
            g, *h = [take(of_own_tokens(a, place).reshape(-1), 0) for a in of_numbers]
            rows = device.rows(lse, g, *own[1:], *h)
            found: Sequence[jax.Array] = ()
            if stored is not None:
                dx, dweight = stored.gradients(rows)
                dweight = stored.columns.without_padding(dweight)
                found = device.pick(Gradients(dx, dweight, None), of_arrays, exchanged)
            elif any(of_arrays):
                found = device.gradients(biases, rows, of_arrays, exchanged)
            num_per_token = int(of_arrays[0])
            dx = [put_back(a).reshape(x.shape) for a in found[:num_per_token]]
            of_weights = in_one_dtype(operation.request, of_arrays, found[num_per_token:])
            return [loss, *aux, *dx, *of_weights, *of_data]

        fraction = fraction_in_effect(operation.name, operation.request, place, labels.size)
        return for_few_or_all(compute, flat_labels != IGNORED, fraction, agreeing=place.tokens)

    return run


def _differentiated(
    operation: _TokenLoss, wanted: Mask, numbers: Sequence[jax.Array], data: Sequence[jax.Array]
) -> tuple[jax.Array, Sequence[jax.Array], Sequence[jax.Array], Sequence[jax.Array]]:
    """`(loss, other results, cotangents of numbers, gradients of the wanted data)`."""
    is_wanted = wanted[operation.num_arrays :]

    def of_wanted(numbers, some):
        some = iter(some)
        given = [next(some) if w else a for a, w in zip(data, is_wanted, strict=True)]
        return operation.function(numbers, given)

    some = [a for a, w in zip(data, is_wanted, strict=True) if w]
    differentiated = jax.value_and_grad(of_wanted, argnums=(0, 1), has_aux=True)
    (loss, aux), (of_numbers, of_data) = differentiated(numbers, some)
    return loss, aux, of_numbers, of_data
