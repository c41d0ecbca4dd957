"""`operation.follows`: how a `jax.checkpoint` computes a result again. All tests take 5 s.

The kernels that use it do not run in a checkpoint here, because the interpreter has effects. So the
operations are small ones in plain JAX.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.ad_checkpoint import checkpoint_name

from pallas_kernels.operation import call, follows
from support.jaxprs import equations
from support.numerics import assert_close


@dataclasses.dataclass(frozen=True)
class Square:
    """`x ** 2`."""

    name: str = "square"

    def forward(self, wanted: Any, *args: Any) -> tuple[Any, ...]:
        return (args[0] ** 2,)

    def num_residuals(self, wanted: Any) -> int:
        return 0

    def saved(self, wanted: Any, args: Any, results: Any, residuals: Any) -> Any:
        return results, args

    def backward(self, wanted: Any, saved: Any, cotangents: Any) -> Any:
        return [2 * saved[0] * cotangents[0]]

    def fold(self, wanted: Any, args: Any, is_batched: Any) -> Any:
        return None


@dataclasses.dataclass(frozen=True)
class AddSquare(Square):
    """`((x + y) ** 2, x + y)`."""

    name: str = "add_square"

    def forward(self, wanted: Any, *args: Any) -> tuple[Any, ...]:
        x, y = args
        return (x + y) ** 2, x + y

    def saved(self, wanted: Any, args: Any, results: Any, residuals: Any) -> Any:
        total = checkpoint_name(results[1], "sum")
        square = checkpoint_name(results[0], "square")
        square = follows(square, Square(), total, name="square", where_kept={"sum": total})
        return [square, total], (total,)

    def backward(self, wanted: Any, saved: Any, cotangents: Any) -> Any:
        of_square, of_sum = (0.0 if c is None else c for c in cotangents)
        gradient = 2 * saved[0] * of_square + of_sum
        return [gradient] * sum(wanted)


X, Y, MATRIX = jax.random.normal(jax.random.key(0), (3, 4, 4))


def loss(x, y):
    square, total = call(AddSquare(), x @ MATRIX, y)
    return jnp.sum(jnp.sin(square) * jnp.cos(total))


def keep(names):
    """A policy that keeps the names, those with `@host` in the memory of the host."""
    if not any(name.endswith("@host") for name in names):
        return jax.checkpoint_policies.save_only_these_names(*names)
    return jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=[name for name in names if "@" not in name],
        names_which_can_be_offloaded=[name[:-5] for name in names if name.endswith("@host")],
        offload_src="device",
        offload_dst="pinned_host",
    )


def under(policy):
    return jax.grad(jax.checkpoint(loss, policy=keep(policy)), argnums=(0, 1))


POLICIES = {
    # The operations that run, and the products.
    ("sum", "square"): (["add_square"], 2),
    ("square",): (["add_square", "add_square"], 3),
    ("sum",): (["add_square", "square"], 2),
    ("sum@host",): (["add_square", "square"], 2),
    ("sum", "square@host"): (["add_square"], 2),
    ("sum@host", "square@host"): (["add_square"], 2),
    (): (["add_square", "add_square"], 3),
}


@pytest.mark.parametrize("policy", POLICIES, ids=str)
def test_what_runs_again(policy):
    program = jax.make_jaxpr(under(policy))(X, Y).jaxpr
    found = list(equations(program))
    operations = [e.params["operation"].name for e in found if e.primitive.name == "operation"]
    products = [e for e in found if e.primitive.name == "dot_general"]
    assert (sorted(operations), len(products)) == POLICIES[policy]


@pytest.mark.parametrize("policy", POLICIES, ids=str)
def test_gradients_do_not_change(policy):
    expected = jax.grad(loss, argnums=(0, 1))(X, Y)
    assert_close(under(policy)(X, Y), expected)
    assert_close(jax.jit(under(policy))(X, Y), expected)


def test_a_policy_that_keeps_everything_and_one_gradient():
    got = jax.grad(jax.checkpoint(loss, policy=jax.checkpoint_policies.everything_saveable))(X, Y)
    assert_close(got, jax.grad(loss)(X, Y))


def test_a_batch():
    xs = jnp.stack([X, 2 * X])
    got = jax.vmap(under(("sum",)), (0, None))(xs, Y)
    for i, x in enumerate(xs):
        assert_close([a[i] for a in got], list(under(("sum",))(x, Y)))


def test_a_scan_over_layers():
    def scanned(policy):
        names = jax.checkpoint_policies.save_only_these_names(*policy)
        layer = jax.checkpoint(
            lambda x, y: (jnp.tanh(call(AddSquare(), x @ MATRIX, y)[0]), None), policy=names
        )
        return jax.grad(lambda x, ys: jnp.sum(jax.lax.scan(layer, x, ys)[0]))

    ys = jnp.stack([Y, -Y, 2 * Y])
    assert_close(scanned(("sum",))(X, ys), scanned(("sum", "square"))(X, ys))
