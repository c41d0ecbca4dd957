"""Explicit axes of one device: types of arrays name them, and they split nothing.

All operations are traced with their gradients, 0.1 s each. The test of numbers takes 0.5 s a mesh.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from pallas_kernels import (
    add_rms_norm,
    document_attention,
    document_bounds,
    linear_cross_entropy,
    linear_distillation_loss,
    linear_distillation_loss_top_k,
    linear_log_probs,
    linear_token_loss,
    partition,
    rms_norm,
    swiglu,
    swiglu_mlp,
)
from pallas_kernels.fp8 import RECIPES, fp8_linear, fp8_swiglu_mlp
from pallas_kernels.layout import Place, Roles, Tokens, Weight

pytestmark = pytest.mark.usefixtures("fast_compilation")

B, S, D, F, V = 8, 8, 16, 32, 64
TOKENS, ACROSS, DOWN = P("fsdp", "tensor"), P("fsdp", "tensor"), P("tensor", "fsdp")
SHAPES = {
    "x": ((B, S, D), TOKENS),
    "residual": ((B, S, D), TOKENS),
    "norm": ((D,), P("fsdp")),
    "w_gate": ((D, F), ACROSS),
    "w_up": ((D, F), ACROSS),
    "w_down": ((F, D), DOWN),
    "head": ((V, D), DOWN),
    "q": ((B, S, 4, D), P("fsdp", "tensor")),
    "k": ((B, S, 2, D), P("fsdp", None, "tensor")),
}
FP8 = dataclasses.replace(RECIPES["rowwise"], least_size=0)


def mesh_of(*sizes: int, kind_of_tensor: AxisType = AxisType.Explicit):
    return jax.make_mesh(sizes, ("fsdp", "tensor"), (AxisType.Explicit, kind_of_tensor))


def put(mesh, *names: str):
    numbers = np.random.default_rng(0)
    normal = lambda shape: numbers.normal(scale=0.3, size=shape).astype(np.float32)
    return [
        jax.device_put(normal(shape), NamedSharding(mesh, spec))
        for shape, spec in (SHAPES[name] for name in names)
    ]


def integers(shape: tuple[int, ...], spec: P = TOKENS) -> jax.Array:
    return jax.device_put(jnp.zeros(shape, jnp.int32), spec)


def cross_entropy(x, head, **options):
    return linear_cross_entropy(x, head, integers((B, S)), **options)


def log_probs(x, head, **options):
    return linear_log_probs(x, head, integers((B, S)), return_entropy=True, **options)


def loss_of_all_tokens(x, head, **options):
    fn = lambda log_probs, entropy, data: -jnp.sum(log_probs)
    return linear_token_loss(x, head, integers((B, S)), fn, **options)


def loss_of_each_token(x, head, **options):
    fn = lambda log_probs, entropy, data: -data * log_probs
    return linear_token_loss(x, head, integers((B, S)), fn, x[..., 0], per_token=True, **options)


def distillation(x, head, teacher_x, **options):
    return linear_distillation_loss(x, head, teacher_x, head, **options)


def top_k(x, head, **options):
    ids = integers((B, S, 2)) + jnp.arange(2)
    return linear_distillation_loss_top_k(x, head, ids.astype(jnp.float32) - 3, ids, **options)


def attention(q, k, **options):
    bounds = document_bounds(integers((B, S), P("fsdp")))
    return document_attention(q, k, k, bounds, **options)


OPERATIONS: dict[Any, tuple[str, ...]] = {
    rms_norm: ("x", "norm"),
    add_rms_norm: ("x", "residual", "norm"),
    swiglu: ("x", "residual"),
    swiglu_mlp: ("x", "w_gate", "w_up", "w_down"),
    cross_entropy: ("x", "head"),
    log_probs: ("x", "head"),
    loss_of_all_tokens: ("x", "head"),
    loss_of_each_token: ("x", "head"),
    distillation: ("x", "head", "residual"),
    top_k: ("x", "head"),
    attention: ("q", "k"),
    fp8_linear: ("x", "w_gate"),
    fp8_swiglu_mlp: ("x", "w_gate", "w_up", "w_down"),
}
FP8_OPERATIONS = fp8_linear, fp8_swiglu_mlp
CASES = {
    f"{fn.__name__}, {name}": (fn, {"recipe": FP8} if name == "fp8" else {"implementation": name})
    for fn in OPERATIONS
    for name in (["fp8"] if fn in FP8_OPERATIONS else [None, "reference"])
}


@pytest.mark.parametrize("case", CASES)
def test_operations_on_a_mesh_of_one_device(case, caplog):
    fn, options = CASES[case]
    mesh = mesh_of(1, 1)

    def total(*args):
        return sum(jnp.sum(jnp.sin(a)) for a in jax.tree.leaves(fn(*args, **options)))

    with jax.set_mesh(mesh):
        args = put(mesh, *OPERATIONS[fn])
        gradients = jax.grad(total, tuple(range(len(args))))
        got = jax.jit(gradients).trace(*args).jaxpr.out_avals
        assert [a.sharding for a in got] == [jax.typeof(a).sharding for a in args]
    assert "mesh axes" not in caplog.text  # no warning that devices compute the same


@pytest.mark.parametrize(
    "sizes, kind_of_tensor",
    [
        ((1, 1), AxisType.Explicit),
        ((8, 1), AxisType.Explicit),
        ((1, 8), AxisType.Explicit),
        ((1, 8), AxisType.Auto),
    ],
    ids=str,
)
def test_values_and_types(sizes, kind_of_tensor):
    mesh = mesh_of(*sizes, kind_of_tensor=kind_of_tensor)

    def run(x, w_gate, w_up, w_down):
        y = swiglu_mlp(x, w_gate, w_up, w_down, implementation="reference")
        return jnp.sum(jnp.sin(y)), y

    names = "x", "w_gate", "w_up", "w_down"
    gradients = jax.jit(jax.grad(run, (0, 1, 2, 3), has_aux=True))
    with jax.set_mesh(mesh):
        args = put(mesh, *names)
        got, y = gradients(*args)
        types = gradients.trace(*args).jaxpr.out_avals
    assert [a.sharding for a in types] == [jax.typeof(a).sharding for a in (*args, args[0])]
    with jax.enable_x64(True):
        wide = [np.asarray(a, np.float64) for a in args]
        want = jax.tree.map(np.asarray, gradients(*wide))
    for a, b in zip((*got, y), (*want[0], want[1]), strict=True):
        error = np.linalg.norm(np.asarray(a, np.float64) - b) / np.linalg.norm(b)
        assert error < 2e-6


def test_an_axis_of_one_device_decides_nothing():
    """Its name in a weight must not choose the program for a part of the weight."""
    mesh = mesh_of(8, 1)
    places = []

    def local(key, place):
        places.append(place)
        return lambda x, weight: (x @ weight @ weight.T,)

    roles = Roles((Tokens(("d",)), Weight(("d", "f"))), (Tokens(("d",)),), ("f",))
    x, weight = put(mesh, "x", "w_gate")
    with jax.set_mesh(mesh):
        run = jax.jit(lambda *args: partition.partitioned(local, None, roles, *args)[0])
        y = run.trace(x, weight).jaxpr.out_avals[0]
    assert places == [Place(parts=((),), leading=(("fsdp",), ()))]
    assert y.sharding == jax.typeof(x).sharding


def test_an_axis_of_one_device_gathers_nothing(caplog):
    """F is no multiple of 128, as a part of it must be. Before, a warning said it was gathered."""
    mesh = mesh_of(8, 1)
    with jax.set_mesh(mesh):
        x, *weights = put(mesh, *OPERATIONS[fp8_swiglu_mlp])
        x = jax.device_put(x, NamedSharding(mesh, P("fsdp")))
        jax.jit(lambda *args: fp8_swiglu_mlp(*args, recipe=FP8)).trace(x, *weights)
    assert "mesh axes" not in caplog.text
