"""`vocab_axis` of the losses: all devices of the axis must have the same tokens."""

from types import SimpleNamespace
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from pallas_kernels import (
    LoRA,
    linear_cross_entropy,
    linear_cross_entropy_plan,
    linear_distillation_loss,
    linear_distillation_loss_top_k,
    linear_log_probs,
    linear_token_loss,
)
from support.numerics import quick_jit

T, D, V = 8, 4, 12
RNG = np.random.default_rng(0)
ARRAYS: dict[str, Any] = {
    "x": RNG.normal(size=(T, D)).astype(np.float32),
    "weight": RNG.normal(size=(V, D)).astype(np.float32),
    "labels": RNG.integers(V, size=T).astype(np.int32),
    "b": np.ones((4, D), np.float32),
    "numbers": np.ones(T, np.float32),
    "teacher_x": np.ones((T, D), np.float32),
    "teacher_ids": np.zeros((T, 1), np.int32),
    "teacher_log_probs": np.full((T, 1), -1, np.float32),
}
OPTIONS: Any = {"vocab_axis": "tensor", "implementation": "xla"}
LOSSES = {
    "cross_entropy": lambda a: linear_cross_entropy(
        a.x, a.weight, a.labels, token_weights=a.numbers, **OPTIONS
    ),
    "plan": lambda a: linear_cross_entropy_plan(
        a.x, a.weight, a.labels, token_weights=a.numbers, **OPTIONS
    ),
    "lora": lambda a: linear_cross_entropy(a.x, LoRA(a.weight, a.weight, a.b), a.labels, **OPTIONS),
    "log_probs": lambda a: linear_log_probs(a.x, a.weight, a.labels, **OPTIONS),
    "token_loss": lambda a: linear_token_loss(
        a.x, a.weight, a.labels, lambda log_probs, _, data: log_probs @ data, a.numbers, **OPTIONS
    ),
    "distillation": lambda a: linear_distillation_loss(
        a.x, a.weight, a.teacher_x, a.weight, token_weights=a.numbers, **OPTIONS
    ),
    "top_k": lambda a: linear_distillation_loss_top_k(
        a.x, a.weight, a.teacher_log_probs, a.teacher_ids, token_weights=a.numbers, **OPTIONS
    ),
}
# A loss, an array that the axis splits, too, and the name in the error.
SPLIT = [
    *(("cross_entropy", name, name) for name in ("x", "labels")),
    ("cross_entropy", "numbers", "token_weights"),
    ("plan", "labels", "labels"),
    ("lora", "b", "x or weight.b"),
    *(("log_probs", name, name) for name in ("x", "labels")),
    *(("token_loss", name, name) for name in ("x", "labels")),
    ("token_loss", "numbers", "token_data"),
    ("distillation", "x", "x"),
    ("distillation", "numbers", "token_weights"),
    *(("top_k", name, name) for name in ("x", "teacher_log_probs", "teacher_ids")),
    ("top_k", "numbers", "token_weights"),
]


def over_tensor(fn, specs):
    mesh = jax.make_mesh((4,), ("tensor",), (AxisType.Auto,), devices=jax.devices()[:4])
    return jax.shard_map(fn, mesh=mesh, in_specs=specs, out_specs=P())


@pytest.mark.parametrize("loss, split, name", SPLIT)
def test_an_axis_that_splits_an_array_of_the_tokens(loss, split, name):
    """Each device would take the tokens of all for its own: wrong losses, or wrong gradients."""

    def local(arrays):
        # As after a gather of what the axis splits: right shapes, and types that differ.
        arrays = arrays | {split: jax.lax.pcast(arrays[split], "tensor", to="varying")}
        return jnp.sum(LOSSES[loss](SimpleNamespace(**arrays)))

    specs = {n: P("tensor") if n == "weight" else P() for n in ARRAYS}
    message = f"^{name} differs by its type between the 4 devices of vocab_axis='tensor', which .*"
    with pytest.raises(ValueError, match=message + "jax.lax.all_gather"):
        jax.eval_shape(over_tensor(local, (specs,)), ARRAYS)


def test_tokens_that_are_gathered_as_the_error_says():
    """With another gather `dx` was 4 times too large."""
    x, weight, labels = (jnp.asarray(ARRAYS[name]) for name in ("x", "weight", "labels"))

    def local(x, weight, labels):
        x, labels = (
            jax.lax.all_gather(a, "tensor", tiled=True, to="invarying") for a in (x, labels)
        )
        return linear_cross_entropy(x, weight, labels, **OPTIONS)

    on_one = lambda *arrays: linear_cross_entropy(*arrays, implementation="xla")
    got, wanted = (
        quick_jit(jax.value_and_grad(fn, (0, 1)))(x, weight, labels)
        for fn in (over_tensor(local, P("tensor")), on_one)
    )
    chex.assert_trees_all_close(got, wanted, rtol=1e-5)


def test_hidden_states_of_a_teacher_may_be_gathered_in_any_way():
    """They have no gradient; 1 s."""
    x, weight, teacher_x = (jnp.asarray(ARRAYS[name]) for name in ("x", "weight", "teacher_x"))

    def loss(x, weight, teacher_x, **options):
        return linear_distillation_loss(x, weight, teacher_x, 2 * weight, **options)

    def local(x, weight, teacher_x):
        return loss(x, weight, jax.lax.all_gather(teacher_x, "tensor", tiled=True), **OPTIONS)

    got, wanted = (
        quick_jit(jax.value_and_grad(fn, (0, 1)))(x, weight, teacher_x)
        for fn in (over_tensor(local, (P(), P("tensor"), P("tensor"))), loss)
    )
    chex.assert_trees_all_close(got, wanted, rtol=1e-4, atol=1e-6)


def test_an_axis_of_vmap():
    x, labels = jnp.asarray(ARRAYS["x"]), jnp.asarray(ARRAYS["labels"])
    loss = lambda weight: linear_cross_entropy(x, weight, labels, **OPTIONS)
    with pytest.raises(ValueError, match="vocab_axis='tensor' is not bound; call"):
        jax.vmap(loss, axis_name="tensor")(jnp.ones((4, 3, D)))
