"""All operations in one model, on eight CPU devices: values and gradients for every layout.

`tests/aot/test_aot_meshes.py` compiles the same programs for eight H100s. Each program takes about
2 s.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding

from support import mesh_programs
from support.mesh_programs import LAYOUTS

pytestmark = pytest.mark.usefixtures("fast_compilation")

SIZES = mesh_programs.Sizes(batch=16, sequence=4, hidden=16, columns=32, vocabulary=64)


def formula(args):
    """The model in the dtype of its arguments, differentiated by JAX."""

    def norm(x, weight):
        return x / jnp.sqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6) * weight

    def layer(h, weights):
        weight, w_gate, w_up, w_down = weights
        h = jnp.sin(h) + h
        y = norm(h, weight)
        out = (jax.nn.silu(y @ w_gate) * (y @ w_up)) @ w_down
        return h + jax.nn.silu(out) * y

    names = "norm", "w_gate", "w_up", "w_down"
    weights = [args[name] for name in names]
    h = args["x"]
    for one in zip(*weights, strict=True) if weights[0].ndim == 2 else [weights]:
        h = layer(h, one)
    logits = norm(h, args["last_norm"]) @ args["head"].T
    labels = args["labels"]
    nll = jax.nn.logsumexp(logits, -1) - jnp.take_along_axis(
        logits, jnp.maximum(labels, 0)[..., None], -1
    ).squeeze(-1)
    return jnp.sum(jnp.where(labels >= 0, nll, 0)) / float(np.sum(labels >= 0))


def arguments(transform, dtype: Any = np.float32):
    args = mesh_programs.make_args(SIZES, transform, jnp.float32, jnp.float32)
    labels = np.asarray(args.pop("labels"))
    return {name: np.asarray(a, dtype) for name, a in args.items()}, labels


@functools.cache
def exact(transform):
    with jax.enable_x64(True):
        arrays, labels = arguments(transform, np.float64)
        fn = jax.value_and_grad(lambda arrays: formula(arrays | {"labels": labels}))
        return jax.tree.map(np.asarray, jax.jit(fn)(arrays))


# The normal run has each mode and each transformation, and the layout with both splits of a weight
# twice. test_partition.py has each split.
IN_NORMAL_RUN = {
    ("batch", "auto", "plain"),
    ("sequence", "manual", "plain"),
    ("sequence", "auto", "remat"),
    ("fsdp and tensor", "explicit", "scan"),
    ("fsdp and tensor", "auto", "remat"),
}


@pytest.mark.parametrize(
    "layout, mode, transform",
    [
        pytest.param(*case, marks=() if case in IN_NORMAL_RUN else pytest.mark.full)
        for case in mesh_programs.cases()
    ],
)
def test_values_and_gradients(layout, mode, transform):
    check(layout, mode, transform, mesh_programs.AXES)


@pytest.mark.parametrize(
    "layout, sizes",
    [
        ("fsdp and tensor", (1, 1, 1)),
        ("sequence", (4, 2, 1)),
        pytest.param("fsdp and tensor", (4, 2, 1), marks=pytest.mark.full),
        pytest.param("fsdp and tensor", (1, 4, 2), marks=pytest.mark.full),
    ],
)
def test_explicit_axes_of_one_device(layout, sizes):
    """The types of arrays name such axes, too, and JAX compares the types of a scan's carry."""
    check(layout, "explicit", "scan", dict(zip(mesh_programs.AXES, sizes, strict=True)))


def check(layout, mode, transform, axes):
    kind = AxisType.Explicit if mode == "explicit" else AxisType.Auto
    mesh = jax.make_mesh(tuple(axes.values()), tuple(axes), axis_types=(kind,) * len(axes))
    specs = mesh_programs.specs(LAYOUTS[layout], transform)
    put = lambda name, a: jax.device_put(a, NamedSharding(mesh, specs[name]))
    arrays, labels = arguments(transform)
    with jax.set_mesh(mesh):
        run = jax.jit(mesh_programs.gradients_of(LAYOUTS[layout], mode, transform))
        got = run({name: put(name, a) for name, a in arrays.items()}, put("labels", labels))
    want = exact(transform)
    assert abs(float(got[0]) - want[0]) < 2e-6 * want[0]
    for name, gradient in want[1].items():
        error = np.linalg.norm(np.asarray(got[1][name], np.float64) - gradient)
        assert error < 1e-5 * np.linalg.norm(gradient), name
        if mode == "explicit":
            assert jax.typeof(got[1][name]).sharding == jax.typeof(put(name, gradient)).sharding
