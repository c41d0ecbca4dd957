"""JAX's transformations of every operation: what works, and programs that show it.

`MATRIX` has the outcome of each transformation, operation and implementation, and the page
docs/transforms.md shows it. `VALUES` are transformations of a function. Their programs are small
enough to be parts of one program for each operation.
"""

import dataclasses
import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import checkify

import pallas_kernels
from support.transform_formulas import FORMULAS, of_log_probs, wide

IMPLEMENTATIONS: tuple[str, ...] = "reference", "xla", "mosaic_gpu"
# One of them, as an operation chooses it.
DEFAULT = "None"
NO_FORWARD_MODE = r"has a gradient rule of its own, so it has no forward mode .*'reference'"


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Sizes of the arrays: members of a batch, tokens of each, D, F and V."""

    members: int
    tokens: int
    hidden: int
    columns: int
    vocabulary: int


@dataclasses.dataclass(frozen=True)
class Call:
    """A function, and the arguments that a transformation gives it.

    Attributes:
      fn: Function of the arguments.
      args: Arrays of tokens `[members, tokens, ...]`, weights and labels.
      axes: 0 for arrays of tokens, None for weights.
      num_floating: Number of arguments that have a gradient; they come first.
    """

    fn: Callable[..., Any]
    args: tuple[Any, ...]
    axes: tuple[int | None, ...]
    num_floating: int

    def loss(self, *args: Any) -> Any:
        """A number that depends on every element of the results."""
        leaves = jax.tree.leaves(self.fn(*args))
        return functools.reduce(jnp.add, (jnp.sum(jnp.sin(wide(a))) for a in leaves))

    @property
    def floating(self) -> tuple[int, ...]:
        return tuple(range(self.num_floating))

    def gradient(self, loss: Callable[..., Any] | None = None) -> Callable[..., Any]:
        return jax.grad(loss or self.loss, self.floating)

    def member(self, i: int) -> list[Any]:
        """The arguments of one member of the batch."""
        pairs = zip(self.args, self.axes, strict=True)
        return [a if axis is None else a[i] for a, axis in pairs]

    def of_floating(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        """`fn` of the floating arguments, with the others as they are."""
        return lambda *floating: fn(*floating, *self.args[self.num_floating :])

    def over_members(
        self, fn: Callable[..., Any], **options: Any
    ) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        """`jax.vmap(fn)` and its arguments, whose weights all members share."""
        return jax.vmap(fn, self.axes, **options), self.args

    @property
    def floating_args(self) -> tuple[Any, ...]:
        return self.args[: self.num_floating]


def _sum_over_members(call: Call, fn: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    return lambda *args: jnp.sum(call.over_members(fn, **options)[0](*args))


def _vjp_twice(call: Call) -> Any:
    y, vjp = jax.vjp(call.of_floating(call.loss), *call.floating_args)
    return vjp(jnp.ones_like(y)), vjp(2 * jnp.ones_like(y))


def _many_cotangents(call: Call) -> Any:
    y, vjp = jax.vjp(call.of_floating(call.loss), *call.floating_args)
    return jax.vmap(vjp)(jnp.arange(1, 3, dtype=y.dtype))


def _linearize(call: Call) -> Any:
    _, linear = jax.linearize(call.of_floating(call.loss), *call.floating_args)
    return linear(*call.floating_args)


def _along_scale(derivative: Callable[..., Any], call: Call) -> Any:
    """A derivative with respect to one factor of all floating arguments."""
    of_floating = call.of_floating(call.loss)

    def scaled(factor: Any) -> Any:
        return of_floating(*(a * factor.astype(a.dtype) for a in call.floating_args))

    return derivative(scaled)(wide(jnp.ones((), call.args[0].dtype)))


def _second(call: Call) -> Any:
    def size(*floating: Any) -> Any:
        gradients = call.gradient(call.of_floating(call.loss))(*floating)
        return functools.reduce(jnp.add, (jnp.sum(wide(g) ** 2) for g in gradients))

    return jax.grad(size, call.floating)(*call.floating_args)


def _vmap(call: Call) -> Any:
    run, args = call.over_members(call.fn)
    return run(*args)


def _gradient_of_vmap(call: Call) -> Any:
    return call.gradient(_sum_over_members(call, call.loss))(*call.args)


def _vmap_of_gradient(call: Call) -> Any:
    run, args = call.over_members(call.gradient())
    return run(*args)


def _vmap_over_weights(call: Call) -> Any:
    size = len(call.args[0])
    pairs = zip(call.args, call.axes, strict=True)
    factors = jnp.linspace(0.5, 1.5, size)
    stacked = [
        a if axis == 0 else factors.astype(a.dtype)[(..., *(None,) * a.ndim)] * a
        for a, axis in pairs
    ]
    return call.gradient(lambda *args: jnp.sum(jax.vmap(call.loss)(*args)))(*stacked)


def _vmap_over_axis_1(call: Call) -> Any:
    pairs = list(zip(call.args, call.axes, strict=True))
    args = [a if axis is None else jnp.moveaxis(a, 0, 1) for a, axis in pairs]
    axes = tuple(None if axis is None else 1 for axis in call.axes)
    of_sum = call.gradient(lambda *args: jnp.sum(jax.vmap(call.loss, axes)(*args)))(*args)
    return of_sum, jax.vmap(call.gradient(), axes, out_axes=-1)(*args)


def _nested_vmap(call: Call) -> Any:
    pairs = zip(call.args, call.axes, strict=True)
    args = [a if axis is None else a[:, None] for a, axis in pairs]
    twice = lambda fn: jax.vmap(jax.vmap(fn, call.axes), call.axes)
    of_sum = call.gradient(lambda *args: jnp.sum(twice(call.loss)(*args)))(*args)
    return of_sum, twice(call.gradient())(*args)


def _loop(call: Call, run: Callable[..., Any]) -> Any:
    """The gradient of `run(one, members)`; `one` is the loss of a member."""

    def looped(*args: Any) -> Any:
        pairs = list(zip(args, call.axes, strict=True))

        def one(parts: list[Any]) -> Any:
            part = iter(parts)
            return call.loss(*(a if axis is None else next(part) for a, axis in pairs))

        return run(one, [a for a, axis in pairs if axis == 0])

    return call.gradient(looped)(*call.args)


def _scan(call: Call) -> Any:
    def run(one: Any, members: Any) -> Any:
        first = jnp.zeros_like(jax.eval_shape(one, [a[0] for a in members]))
        return jax.lax.scan(lambda total, m: (total + one(m), None), first, members)[0]

    return _loop(call, run)


def _scan_of_checkpoint(call: Call) -> Any:
    def run(one: Any, members: Any) -> Any:
        first = jnp.zeros_like(jax.eval_shape(one, [a[0] for a in members]))
        body = jax.checkpoint(lambda total, m: (total + one(m), None))
        return jax.lax.scan(body, first, members)[0]

    return _loop(call, run)


def _map(call: Call) -> Any:
    return _loop(call, lambda one, members: jnp.sum(jax.lax.map(one, members)))


def _while(call: Call) -> Any:
    def body(carry: Any) -> Any:
        i, total = carry
        return i + 1, total + call.loss(*call.args)

    first = jnp.zeros_like(jax.eval_shape(call.loss, *call.args))
    return jax.lax.while_loop(lambda carry: carry[0] < 2, body, (0, first))[1]


def _cond(call: Call) -> Any:
    def run(*args: Any) -> Any:
        return jax.lax.cond(jnp.isfinite(args[0].ravel()[0]), call.loss, lambda *_: 0 * _one, *args)

    _one = jnp.ones_like(jax.eval_shape(call.loss, *call.args))
    return call.gradient(run)(*call.args)


_POLICIES = (
    jax.checkpoint_policies.everything_saveable,
    jax.checkpoint_policies.dots_saveable,
    jax.checkpoint_policies.save_only_these_names("rstd", "gate", "up"),
)


def _checkpoint_policies(call: Call) -> Any:
    return [call.gradient(jax.checkpoint(call.loss, policy=p))(*call.args) for p in _POLICIES]


def _checkpoint_in_vmap(call: Call) -> Any:
    kept = jax.checkpoint(call.loss)
    of_sum = call.gradient(_sum_over_members(call, kept))(*call.args)
    return of_sum, call.over_members(call.gradient(kept))[0](*call.args)


def _custom_vmap(call: Call) -> Any:
    by_rule = jax.custom_batching.custom_vmap(call.fn)

    @by_rule.def_vmap
    def _(size: int, is_batched: list[bool], *args: Any) -> Any:
        y = jax.vmap(call.fn, [0 if b else None for b in is_batched])(*args)
        return y, jax.tree.map(lambda _: True, y)

    in_turn = jax.custom_batching.sequential_vmap(call.fn)
    return [call.over_members(fn)[0](*call.args) for fn in (by_rule, in_turn)]


def _custom_vjp(call: Call) -> Any:
    outer = jax.custom_vjp(call.loss)
    outer.defvjp(lambda *args: jax.vjp(call.loss, *args), lambda vjp, dy: vjp(dy))
    return call.gradient(_sum_over_members(call, outer))(*call.args)


def _checkify(call: Call) -> Any:
    errors = checkify.user_checks | checkify.float_checks
    fns = (call.gradient(), call.args), call.over_members(call.gradient())
    return [checkify.checkify(fn, errors=errors)(*args)[1] for fn, args in fns]


def _x64(call: Call) -> Any:
    with jax.enable_x64(True):
        return call.gradient()(*call.args)


def _shapes(call: Call) -> Any:
    found = jax.eval_shape(call.gradient(), *call.args)
    for a, given in zip(found, call.floating_args, strict=True):
        assert (a.shape, a.dtype) == (given.shape, given.dtype)
    return ()


@dataclasses.dataclass(frozen=True)
class Transform:
    """A transformation of a function.

    Attributes:
      run: Function that computes the results.
      expected: Function that makes the results of the results in `BASE`. It is None for the
        transformations in `BASE`, which the tests compare with those of the formula.
    """

    run: Callable[[Call], Any]
    expected: Callable[[dict[str, Any]], Any] | None = None


_G, _OF_SUM, _OF_MEMBERS = "`jax.grad`", "`grad(vmap(f))`, shared weights", "`vmap(grad(f))`"
_VMAP, _LOSS, _SCALE = "`jax.vmap`, shared weights", "the loss", "`jax.jvp`, `jax.jacfwd`"


def _moved(base: dict[str, Any]) -> Any:
    of_sum = [np.moveaxis(g, 0, 1) if g.ndim == 3 else g for g in base[_OF_SUM]]
    return of_sum, [np.moveaxis(g, 0, -1) for g in base[_OF_MEMBERS]]


def _nested(base: dict[str, Any]) -> Any:
    of_sum = [g[:, None] if g.ndim == 3 else g for g in base[_OF_SUM]]
    return of_sum, [g[:, None] for g in base[_OF_MEMBERS]]


_same = operator.itemgetter
VALUES: dict[str, Transform] = {
    "`jax.jit`": Transform(lambda call: call.fn(*call.args)),
    _G: Transform(lambda call: call.gradient()(*call.args)),
    "`jax.vjp`, its result called twice": Transform(
        _vjp_twice, lambda base: (base[_G], [2 * g for g in base[_G]])
    ),
    "`jax.vmap` of the result of `jax.vjp`": Transform(
        _many_cotangents, lambda base: [np.stack([g, 2 * g]) for g in base[_G]]
    ),
    "`jax.eval_shape`": Transform(_shapes, lambda base: ()),
    _VMAP: Transform(_vmap),
    _OF_SUM: Transform(_gradient_of_vmap),
    _OF_MEMBERS: Transform(_vmap_of_gradient),
    "`jax.vmap`, a weight for each member": Transform(_vmap_over_weights),
    "`jax.vmap` over another axis than 0": Transform(_vmap_over_axis_1, _moved),
    "`jax.vmap` of `jax.vmap`": Transform(_nested_vmap, _nested),
    "`jax.lax.scan`": Transform(_scan, _same(_OF_SUM)),
    "`jax.lax.map`": Transform(_map, _same(_OF_SUM)),
    "`jax.lax.while_loop`, without gradients": Transform(_while, lambda base: 2 * base[_LOSS]),
    "`jax.lax.cond`": Transform(_cond, _same(_G)),
    "`jax.checkpoint`": Transform(
        lambda call: call.gradient(jax.checkpoint(call.loss))(*call.args), _same(_G)
    ),
    "`jax.checkpoint` with a policy": Transform(
        _checkpoint_policies, lambda base: [base[_G]] * len(_POLICIES)
    ),
    "`jax.checkpoint` in `jax.lax.scan`": Transform(_scan_of_checkpoint, _same(_OF_SUM)),
    "`jax.checkpoint` in `jax.vmap`": Transform(_checkpoint_in_vmap, _same(_OF_SUM, _OF_MEMBERS)),
    "`jax.custom_vjp` around it": Transform(_custom_vjp, _same(_OF_SUM)),
    "`jax.custom_batching` around it": Transform(_custom_vmap, _same(_VMAP, _VMAP)),
    "`checkify.checkify`, user and float checks": Transform(_checkify, _same(_G, _OF_MEMBERS)),
    "`jax_enable_x64`": Transform(_x64, _same(_G)),
    _SCALE: Transform(functools.partial(_along_scale, jax.jacfwd)),
    "`jax.linearize`": Transform(_linearize, _same(_SCALE)),
    "second derivatives by `jax.grad`": Transform(_second),
    "`jax.hessian`": Transform(functools.partial(_along_scale, jax.hessian)),
}
DONATION = "donated arguments (`donate_argnums`)"
BASE = tuple(name for name, transform in VALUES.items() if transform.expected is None)


def expected(name: str, base: dict[str, Any], donated: Sequence[Any]) -> Any:
    """The results of a transformation, made of the results in `BASE`."""
    if name == DONATION:
        return _descended(donated, base[_G])
    found = VALUES[name].expected
    return base[name] if found is None else found(base)


def _descended(args: Sequence[Any], gradients: Sequence[Any]) -> list[Any]:
    tenth = lambda g: g * np.asarray(0.1, g.dtype)
    return [a - tenth(g) for a, g in zip(args, gradients, strict=True)]


# Outcomes.
WORKS, RAISES = "works", "raises"
_ALL: dict[str, str] = dict.fromkeys((*IMPLEMENTATIONS, DEFAULT), WORKS)
_KERNEL_RAISES = _ALL | {"mosaic_gpu": RAISES}
_ONLY_REFERENCE = _KERNEL_RAISES | {"xla": RAISES, DEFAULT: RAISES}
OPERATIONS: tuple[str, ...] = (
    "rms_norm",
    "add_rms_norm",
    "swiglu",
    "swiglu_mlp",
    "linear_cross_entropy",
    "linear_log_probs",
    "linear_token_loss",
    "linear_distillation_loss",
)
_OF_FORWARD_MODE = {
    "rms_norm": _KERNEL_RAISES,
    "add_rms_norm": _KERNEL_RAISES,
    "swiglu": _KERNEL_RAISES,
    "swiglu_mlp": _ONLY_REFERENCE,
    **dict.fromkeys(OPERATIONS[4:], _ONLY_REFERENCE),
}
FORWARD_MODE = tuple(VALUES)[-4:]
MATRIX: dict[str, dict[str, dict[str, str]]] = {
    name: _OF_FORWARD_MODE if name in FORWARD_MODE else dict.fromkeys(OPERATIONS, _ALL)
    for name in (*VALUES, DONATION)
}


_OF_LABELS = OPERATIONS[4:7]
_OPTIONS: dict[str, dict[str, Any]] = {
    "linear_log_probs": {"return_entropy": True},
    "linear_token_loss": {"token_fn": of_log_probs},
}


def make_call(operation: str, implementation: str, sizes: Sizes, dtype: Any) -> Call:
    """A call of an operation with random arguments, or of its formula for `"formula"`."""
    numbers = np.random.default_rng(0)
    n, t, d, f, v = dataclasses.astuple(sizes)
    normal = lambda *shape, size=1.0: jnp.asarray(size * numbers.standard_normal(shape), dtype)
    x, weight = normal(n, t, d), 1 + normal(d, size=0.1)
    labels = numbers.integers(0, v, (n, t))
    labels[:, 0] = -100
    args: dict[str, tuple[Any, ...]] = {
        "rms_norm": (x, weight),
        "add_rms_norm": (x, normal(n, t, d), weight),
        "swiglu": (x, normal(n, t, d)),
        "swiglu_mlp": (
            x,
            normal(d, f, size=d**-0.5),
            normal(d, f, size=d**-0.5),
            normal(f, d, size=f**-0.5),
        ),
    }
    head = x, normal(v, d, size=d**-0.5)
    args |= dict.fromkeys(_OF_LABELS, (*head, jnp.asarray(labels, jnp.int32)))
    args["linear_distillation_loss"] = *head, normal(n, t, f), normal(v, f, size=f**-0.5)
    given = args[operation]
    fn = FORMULAS[operation]
    if implementation != "formula":
        named = None if implementation == DEFAULT else implementation
        options = _OPTIONS.get(operation, {})
        fn = functools.partial(getattr(pallas_kernels, operation), implementation=named, **options)
    axes = tuple(0 if a.shape[:2] == (n, t) else None for a in given)
    # Labels and a teacher have no gradient.
    num_floating = 2 if operation in OPERATIONS[4:] else len(given)
    return Call(fn, given, axes, num_floating)


def run_all(
    call: Call,
    names: Sequence[str],
    args: tuple[Any, ...],
    donated: tuple[Any, ...],
) -> dict[str, Any]:
    """The results of transformations, and a step of descent in the place of `donated`."""
    call = dataclasses.replace(call, args=args)
    results = {name: VALUES[name].run(call) for name in names}
    results[_LOSS] = call.loss(*args)
    gradients = call.gradient()(*donated, *args[call.num_floating :])
    return results | {DONATION: _descended(donated, gradients)}
