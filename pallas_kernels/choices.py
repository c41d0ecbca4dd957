"""Reports which implementation each operation runs, and can require that it is a kernel.

A *fallback* is an implementation that runs in place of the kernel, because the device, the arrays
or the mesh rule the kernel out. An implementation that the caller named is no fallback.

- `explain(fn, *args)` says for each operation in a function which implementation runs, and why it
  is no kernel.
- Every fallback is an error with `implementation="require"` for one call, with `require_kernels()`
  for a part of a program, or with the environment variable `PALLAS_KERNELS_REQUIRE=1`.
- On a GPU, every new reason for a fallback is logged once.
"""

import contextlib
import contextvars
import dataclasses
import functools
import itertools
import os
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import jax
from jax.experimental.xla_metadata import set_xla_metadata
from jax.extend.core import subjaxprs

from pallas_kernels.gpu.device import target_device
from pallas_kernels.implementation import Chosen, Implementation
from pallas_kernels.logs import log_once
from pallas_kernels.plain_products import Products, plain_products

VARIABLE = "PALLAS_KERNELS_REQUIRE"

# Why no kernel computes a tangent. The norms have plain JAX for it.
TANGENT_REASON = (
    "no kernel has forward mode or second derivatives; the results and the first gradients run "
    "kernels all the same"
)

_numbers = itertools.count()


@dataclasses.dataclass(frozen=True)
class Choice:
    """The implementation that one call of an operation runs.

    Attributes:
      operation: Name of the public function, with `.backward` after it for a backward whose
        implementation is chosen on its own.
      arrays: Dtypes and shapes of its arrays.
      implementation: Implementation that runs.
      reason: Reason why it is not the kernel, or not the kernel alone; None if it is.
      plan: Description of the plan, if the operation has several.
    """

    operation: str
    arrays: tuple[str, ...]
    implementation: Chosen
    reason: str | None
    plan: str | None = None

    def __str__(self) -> str:
        text = f"{self.operation}({', '.join(self.arrays)}): {self.implementation}"
        if self.reason is not None:
            text += f"; {self.reason}"
        if self.plan is not None:
            text += "\n  " + self.plan.replace("\n", "\n  ")
        return text


@dataclasses.dataclass(frozen=True)
class Explanation:
    """The calls of operations in a function, and what each runs; `str` makes a text to print.

    Attributes:
      choices: The calls, in the order in which JAX traces them.
      products: The matrix products and convolutions outside of the operations, which plain JAX
        computes; `print(explanation.products)` prints a table of them. `str(explanation)` leaves
        them out.
    """

    choices: tuple[Choice, ...]
    products: Products = dataclasses.field(default_factory=Products)

    @property
    def summary(self) -> str:
        """One line: the operations that run kernels, and the others with their reasons."""
        kernels = sorted({c.operation for c in self.choices if c.implementation == "mosaic_gpu"})
        others = sorted(
            {
                f"{c.operation} runs {c.implementation!r} ({c.reason})"
                for c in self.choices
                if c.implementation != "mosaic_gpu"
            }
        )
        return "; ".join([f"kernels: {', '.join(kernels) or 'none'}", *others])

    def __str__(self) -> str:
        if not self.choices:
            return "no operation of pallas_kernels"
        lines = []
        for choice, number in Counter(self.choices).items():
            first, newline, rest = str(choice).partition("\n")
            lines.append(
                first + (f" (traced {number} times)" if number > 1 else "") + newline + rest
            )
        return "\n".join(lines)


_found: contextvars.ContextVar[list[Choice] | None] = contextvars.ContextVar("found", default=None)
_calling: contextvars.ContextVar[str | None] = contextvars.ContextVar("calling", default=None)
_required: contextvars.ContextVar[bool] = contextvars.ContextVar("required", default=False)


def explain(fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Explanation:
    """Says which implementation each operation in `fn(*args, **kwargs)` runs, and why.

        print(pallas_kernels.explain(train_step, state, batch))

    `explain` traces the function for JAX's default device and runs nothing. On a mesh it shows the
    shapes of whole arrays, and the plan of the loss for whole arrays; on Explicit axes, FP8 has the
    shapes of a device's part. XLA splits the arrays only later, so `explain` cannot show that a
    device's part of F is too narrow for a kernel of the MLP. Then the log says so.

    Args:
      fn: Function, jitted or not.
      *args: Arguments of the function, or `jax.ShapeDtypeStruct` in place of arrays. They are
        pytrees, in which two NNX modules that share a parameter become two copies. If the function
        updates such modules, pass the state from `nnx.split` and merge it inside of the function.
        JAX traces every argument. Bind static arguments first: `explain(functools.partial(fn,
        mode="a"), x)`.
      **kwargs: Keyword arguments of the function.

    Returns:
      One `Choice` for each call that JAX traces: implementation, reason and plan. And the matrix
      products that plain JAX computes outside of the operations, as `products`.

    Raises:
      NotImplementedError: A kernel is required, and a call would not run it.
    """
    # A function that is jitted and traced already is traced again, because the metadata is a part
    # of the key under which JAX keeps a trace.
    metadata = set_xla_metadata(pallas_kernels_explanation=str(next(_numbers)))
    with recording() as found, metadata:
        # A partial is hashable, whatever `fn` is.
        traced = jax.jit(functools.partial(fn)).trace(*args, **kwargs)
    jaxpr = traced.jaxpr.jaxpr
    products = plain_products(jaxpr, {choice.operation for choice in found})
    return Explanation((*found, *_tangents_in(jaxpr)), products)


def _tangents_in(jaxpr: Any) -> Iterator[Choice]:
    """The tangents in a program that are left for plain JAX to compute."""
    for equation in jaxpr.eqns:
        if equation.primitive.name == "operation_tangent":
            arrays = tuple(v.aval.str_short() for v in equation.invars)
            name = equation.params["operation"].name
            yield Choice(name, arrays, "reference", TANGENT_REASON)
    for inner in subjaxprs(jaxpr):
        yield from _tangents_in(inner)


@contextlib.contextmanager
def recording() -> Iterator[list[Choice]]:
    """The list of choices that JAX traces inside of the context, for a caller who traces anyway."""
    found: list[Choice] = []
    token = _found.set(found)
    try:
        yield found
    finally:
        _found.reset(token)


@contextlib.contextmanager
def require_kernels() -> Iterator[None]:
    """A context in which an operation that would not run its kernel raises NotImplementedError.

    The check happens while JAX traces: a function that was traced before is not checked. The
    environment variable `PALLAS_KERNELS_REQUIRE=1` does the same for a whole process, and
    `implementation="require"` for one call. The context does not check

    - calls that name `"reference"` or `"xla"`, and calls whose first array is empty;
    - `swiglu` and `linear_distillation_loss_top_k` with `implementation=None`, which by design
      takes no kernel there;
    - the sums over devices of `sharded_add_rms_norm` with `implementation=None`;
    - the backward of `swiglu_mlp` below 2048 tokens;
    - `fp8_linear` with a weight too small for FP8, and FP8's casts of tokens or weights that are
      split over a mesh.
    """
    token = _required.set(True)
    try:
        yield
    finally:
        _required.reset(token)


@contextlib.contextmanager
def inside_of(operation: str) -> Iterator[None]:
    """Makes errors about operations inside of the context name the operation that the user called.

    If contexts are nested, the outermost one sets the name.
    """
    token = _calling.set(_calling.get() or operation)
    try:
        yield
    finally:
        _calling.reset(token)


def called(operation: str) -> str:
    """The name of the operation that the user called, where `operation` runs; see `inside_of`."""
    return _calling.get() or operation


def fall_back_on_a_part(operation: str, required: str | None, reason: str, instead: str) -> None:
    """Logs once that no kernel takes a device's part of the arrays.

    Args:
      operation: Name of the operation.
      required: Result of `required_by` for the call.
      reason: Reason why no kernel takes the part.
      instead: Statement of what XLA does instead.

    Raises:
      NotImplementedError: Kernels are required.
    """
    if required is not None:
        raise NotImplementedError(f"{operation}: kernels are required by {required}, and {reason}")
    log_once(f"{operation}: {instead}: {reason}")


def required_by(asked_for: Implementation | None) -> str | None:
    """The demand that a call runs kernels, as the caller wrote it, or None if there is none.

    Raises:
      ValueError: The environment variable is neither 0 nor 1.
    """
    if asked_for == "require":
        return f"implementation={asked_for!r}"
    if asked_for == "reference" or asked_for == "xla":
        return None
    if _required.get():
        return "require_kernels()"
    value = os.environ.get(VARIABLE, "0")
    if value not in ("", "0", "1"):
        raise ValueError(f"{VARIABLE}={value!r} must be 0 or 1")
    return f"{VARIABLE}={value}" if value == "1" else None


def refuse_fallback(
    operation: str,
    x: Any,
    asked_for: Implementation | None,
    chosen: Chosen,
    reason: str | None,
) -> bool:
    """Whether a call falls back. The arguments are those of `record`, `x` is its first array.

    Raises:
      NotImplementedError: The call falls back, and kernels are required.
    """
    # An empty array needs no kernel.
    if asked_for not in (None, "require") or chosen == "mosaic_gpu" or 0 in x.shape:
        return False
    if (required := required_by(asked_for)) is not None:
        outer = called(operation)
        is_called = outer in (operation, operation.removesuffix(".backward"))
        name = operation if is_called else f"{outer}, in {operation}"
        raise NotImplementedError(
            f"{name}: kernels are required by {required}, and {reason}; without this "
            f"requirement {chosen!r} runs"
        )
    return True


def record(
    operation: str,
    arrays: tuple[Any, ...],
    asked_for: Implementation | None,
    chosen: Chosen,
    reason: str | None,
    *,
    plan: Callable[[], str] | None = None,
) -> None:
    """Notes what a call runs.

    Args:
      operation: Name of the public function.
      arrays: Arrays of the call; None is no array.
      asked_for: Name that the caller gave. An operation whose default is no kernel on purpose gives
        the name of its default in the place of None.
      chosen: Implementation that runs.
      reason: Reason why it is not the kernel.
      plan: Function that describes the plan.

    Raises:
      NotImplementedError: The call falls back, and kernels are required.
    """
    is_fallback = refuse_fallback(operation, arrays[0], asked_for, chosen, reason)
    if is_fallback and target_device().capability is not None:
        log_once(f"{operation}: implementation={chosen!r} runs, because {reason}")
    if (found := _found.get()) is not None:
        shapes = tuple(jax.typeof(a).str_short() for a in jax.tree.leaves(arrays))
        described = None if plan is None else plan()
        found.append(Choice(operation, shapes, chosen, reason, described))
