"""The caller's function of log-probabilities: its checks, and the static option made of it."""

import dataclasses
import hashlib
import logging
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.extend.core import jaxpr_as_fun

from pallas_kernels.gpu.kernel import vary, varying_axes
from pallas_kernels.loss.counted import where_counted
from pallas_kernels.mapping import Mask
from pallas_kernels.protocol import Arrays

_logger = logging.getLogger(__name__)
_HAS_RULE = "custom_jvp_call", "custom_vjp_call"  # primitives with a rule that no text shows


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
      rules_read_arrays: Whether its own rules for derivatives may read arrays.
      digest: SHA-256 of the function's jaxpr and of the constants inside of it, and of those of its
        gradients if it has a rule of its own for them (`jax.custom_vjp`, `jax.custom_jvp`). It
        tells apart what functions compute, in every process.
      results: Shapes and dtypes of what it returns, the loss first.
    """

    fn: Callable[..., Any] = dataclasses.field(repr=False)
    treedef: Any
    num_constants: int
    with_entropy: bool
    rules_read_arrays: bool = dataclasses.field(repr=False)  # the digest shows it
    digest: str
    results: tuple[jax.ShapeDtypeStruct, ...]

    def __call__(self, of_tokens: Sequence[Any], data: Sequence[Any]) -> tuple[Any, list[Any]]:
        """`(loss, other results)` of log-probabilities, entropies, leaves of data and constants."""
        log_probs, entropy = of_tokens if self.with_entropy else (of_tokens[0], None)
        leaves, constants = self.split(data)
        args = log_probs, entropy, jax.tree.unflatten(self.treedef, leaves)
        # A function that partitions itself may hold no arrays, so they come as arguments.
        traced = jax.make_jaxpr(_not_cached(self.fn))(*args)
        assert len(traced.consts) == self.num_constants
        run = jaxpr_as_fun(traced.replace(consts=constants))
        loss, *aux = run(*jax.tree.leaves(args))
        return loss, aux

    def split[T](self, data: Sequence[T]) -> tuple[Sequence[T], Sequence[T]]:
        """Leaves of `token_data`, and constants."""
        num_leaves = len(data) - self.num_constants
        return data[:num_leaves], data[num_leaves:]

    def differentiated(
        self, of_tokens: Arrays, data: Arrays, wanted: Mask, counts: jax.Array | None = None
    ) -> tuple[list[jax.Array], Arrays, Arrays]:
        """`([loss, *other results], cotangents of of_tokens, gradients of the wanted data)`.

        The gradients are those of the loss, or of the sum of the losses of tokens that count.
        Inside of `jax.shard_map` they are those of a device's own loss, and only the backward adds
        up those of an array that is the same on several devices. So `jax.grad` must not.
        """
        varying = varying_axes((of_tokens, data))
        own = lambda arrays: [vary(a, varying) for a in arrays]

        def run(of_tokens: Arrays, data: Arrays, counts: jax.Array | None) -> Any:
            def of_wanted(of_tokens: Any, some: Any) -> Any:
                some = iter(some)
                given = [next(some) if w else a for a, w in zip(data, wanted, strict=True)]
                loss, aux = self(of_tokens, given)
                total = loss if counts is None else jnp.sum(where_counted(counts, loss))
                return total, [loss, *aux]

            some = own(a for a, w in zip(data, wanted, strict=True) if w)
            return jax.grad(of_wanted, argnums=(0, 1), has_aux=True)(own(of_tokens), some)

        # A function that partitions itself may hold no arrays. `jax.jit` holds those of a rule.
        run = jax.jit(run) if self.rules_read_arrays else run
        (of_numbers, of_data), results = run(of_tokens, data, counts)
        return results, of_numbers, of_data


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
      TypeError: It is no function. Or it does not return a float32 scalar, or a float32 number for
        each token with `per_token`; or it reads a traced array that is not among its arguments; or
        it has no hash.
      ValueError: With `per_token`, a leaf of the data or a result has another number of tokens, or
        the function does not take any number of them.
    """
    if not callable(fn):
        raise TypeError(
            f"token_fn must be a function, got {fn!r}; pass one of log-probabilities, entropies "
            "and token_data, or call linear_log_probs"
        )
    try:
        hash(fn)
    except TypeError as error:
        raise TypeError(
            f"token_fn must have a hash ({error}); pass a function, or give the class a __hash__, "
            "as a frozen dataclass has"
        ) from error
    fn_once = _not_cached(fn)
    leaves, treedef = jax.tree.flatten(data)
    leaves = list(map(jnp.asarray, leaves))
    structs = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in leaves]
    if per_token:
        for a in leaves:
            if a.shape[: len(shape)] != shape:
                raise ValueError(
                    f"with per_token=True every leaf of token_data begins with the axes of labels, "
                    f"{shape}; got {a.shape}; a number for all tokens can be a constant of token_fn"
                )
        num_axes, shape = len(shape), (math.prod(shape),)
        structs = [jax.ShapeDtypeStruct((*shape, *a.shape[num_axes:]), a.dtype) for a in leaves]
    numbers = jax.ShapeDtypeStruct(shape, jnp.float32)
    entropy = numbers if with_entropy else None
    args = numbers, entropy, jax.tree.unflatten(treedef, structs)
    try:
        traced, shapes = jax.make_jaxpr(fn_once, return_shape=True)(*args)
    except (AttributeError, TypeError) as error:
        if not with_entropy and "NoneType" in str(error):
            error.add_note(
                "token_fn got entropy=None; pass with_entropy=True if it reads entropies"
            )
        raise
    if any(isinstance(a, Tracer) for a in traced.consts):
        raise TypeError(
            "token_fn reads an array that jax.jit or jax.grad traces and that is not among its "
            "arguments; pass it in token_data"
        )
    loss, aux = _checked_results(shapes, shape, has_aux=has_aux, per_token=per_token)
    if per_token:
        _check_any_number(fn_once, args)
    digest, rules_read_arrays = _digest(traced, fn_once, args, has_aux)
    function = TokenFunction(
        fn=fn,
        treedef=treedef,
        num_constants=len(traced.consts),
        with_entropy=with_entropy,
        rules_read_arrays=rules_read_arrays,
        digest=digest,
        results=tuple(
            jax.ShapeDtypeStruct(a.shape, a.dtype) for a in (loss, *jax.tree.leaves(aux))
        ),
    )
    return function, [*leaves, *map(jnp.asarray, traced.consts)], jax.tree.structure(aux)


def _checked_results(
    shapes: Any, of_tokens: tuple[int, ...], *, has_aux: bool, per_token: bool
) -> tuple[Any, Any]:
    """`(loss, aux)` of what a function returns; raises as `token_function` says."""
    if has_aux and not (isinstance(shapes, tuple) and len(shapes) == 2):
        raise TypeError(f"token_fn must return (loss, aux), because has_aux=True; got {shapes}")
    loss, aux = shapes if has_aux else (shapes, ())
    shape, dtype = getattr(loss, "shape", None), getattr(loss, "dtype", None)
    wanted = of_tokens if per_token else ()
    if shape != wanted or dtype != jnp.float32:
        what = f"a float32 array {wanted}" if per_token else "a float32 scalar"
        remedy = "return a number for each token" if per_token else "sum or average over tokens"
        more = "" if has_aux else ", and pass has_aux=True to return more"
        remedy = "cast it to float32" if shape == wanted else f"{remedy}{more}"
        raise TypeError(f"token_fn must return {what}, got {loss}; {remedy}")
    if per_token and any(a.shape[:1] != of_tokens for a in jax.tree.leaves(aux)):
        raise ValueError(
            f"with per_token=True every array of aux has a row for each of {of_tokens[0]} tokens, "
            f"got {[a.shape for a in jax.tree.leaves(aux)]}"
        )
    return loss, aux


def _not_cached(fn: Callable[..., Any]) -> Callable[..., Any]:
    """The function as one that JAX has not traced yet.

    JAX keeps traces by equality. A method is equal to itself after its object has changed.
    """
    return lambda *args: fn(*args)


def _digest(traced: Any, fn: Callable[..., Any], args: Any, has_aux: bool) -> tuple[str, bool]:
    """`(digest, rules_read_arrays)` of a `TokenFunction`.

    The digest is the SHA-256 of the function's program, and of its gradients' where the text does
    not show them. A program's text does not show its constants either. The digest leaves out those
    of the function itself, which are arguments of the operation. A rule keeps what it reads.
    """
    programs = list(_programs_in(traced))
    equations = [equation for program in programs for equation in program.eqns]
    gradients = []
    if any(equation.primitive.name in _HAS_RULE for equation in equations):
        gradients = _gradients_of(fn, args, has_aux)
    for gradient in gradients:
        programs += _programs_in(gradient)
    digest = hashlib.sha256()
    for program in programs:
        digest.update(str(program).encode())
        for a in () if program is traced else getattr(program, "consts", ()):
            a = jax.random.key_data(a) if jnp.issubdtype(a.dtype, jax.dtypes.prng_key) else a
            a = np.asarray(a)
            digest.update(f"{a.dtype}{a.shape}".encode() + a.tobytes())
    return digest.hexdigest(), any(gradient.consts for gradient in gradients)


def _programs_in(jaxpr: Any) -> Iterator[Any]:
    """The program, and the programs inside of it at all depths."""
    yield jaxpr
    is_program = lambda value: hasattr(value, "eqns")
    for equation in jaxpr.eqns:
        for value in jax.tree.leaves(list(equation.params.values()), is_leaf=is_program):
            if is_program(value):
                yield from _programs_in(value)


def _gradients_of(fn: Callable[..., Any], args: Any, has_aux: bool) -> list[Any]:
    """The programs of the loss's gradients in all floating arguments.

    A function may have no gradient in some arguments, which nobody asks for then. So each argument
    has a program of its own if there is none for all of them.
    """
    leaves, treedef = jax.tree.flatten(args)

    def program(wanted: list[int]) -> Any:
        def total(some: Any, leaves: Any) -> Any:
            given = dict(enumerate(leaves)) | dict(zip(wanted, some, strict=True))
            results = fn(*jax.tree.unflatten(treedef, given.values()))
            return jnp.sum(results[0] if has_aux else results)

        return jax.make_jaxpr(jax.grad(total))([leaves[i] for i in wanted], leaves)

    floating = [i for i, a in enumerate(leaves) if jnp.issubdtype(a.dtype, jnp.floating)]
    found = []
    for wanted in (floating, *([i] for i in floating)):
        try:
            found.append(program(wanted))
        except Exception as error:  # whatever a rule raises: it comes again if somebody asks for it
            _logger.debug("linear_token_loss: token_fn has no such gradient: %s", error)
        if wanted == floating and found:
            break
    return found


def _check_any_number(fn: Callable[..., Any], args: Any) -> None:
    """Raises ValueError if a function of single tokens does not take one token more."""
    more = jax.tree.map(
        lambda a: jax.ShapeDtypeStruct((a.shape[0] + 1, *a.shape[1:]), a.dtype), args
    )
    remedy = (
        "with per_token=True token_fn gets any number of tokens at a time; pass arrays of tokens "
        "in token_data"
    )
    try:
        found = jax.tree.leaves(jax.eval_shape(fn, *more))
    except (TypeError, ValueError) as error:
        raise ValueError(f"{remedy}. With one token more it fails: {error}") from error
    num_tokens = more[0].shape[0]
    if any(a.shape[:1] != (num_tokens,) for a in found):
        raise ValueError(f"{remedy}. With {num_tokens} it returns {[a.shape for a in found]}")
