"""All operations in one model, compiled for eight H100s: their kernels and collectives.

The programs are those of tests/pallas_kernels/test_meshes.py, which checks their numbers.
`make test-aot` compiles each layout, and in each mode weights that are split by hidden units and
weights that are split by columns. `--full` compiles the whole cross of layouts, modes and
transforms. A program takes 20 s of one core, and 15 s more if its kernels are new.
"""

import dataclasses
import math
import re
from collections import Counter

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

from aot.harness import Case
from benchmarks.training.schedule import Schedule
from pallas_kernels import linear_cross_entropy, rms_norm
from support import mesh_programs
from support.mesh_programs import LAYOUTS

pytestmark = pytest.mark.oldest
SIZES = mesh_programs.Sizes(batch=16, sequence=2048, hidden=512, columns=1024, vocabulary=2048)
B, S, D, F, V = 16, 2048, 512, 1024, 2048
# Sums of the loss, of the number of labels, and of the scalars that XLA combines with them.
SCALARS = 8


def make_case(layout: str, mode: str, transform: str) -> Case:
    args = mesh_programs.shapes(SIZES, transform, jnp.bfloat16, jnp.float32)
    specs = mesh_programs.specs(LAYOUTS[layout], transform)
    names = [name for name in args if name != "labels"]
    gradients = mesh_programs.gradients_of(LAYOUTS[layout], mode, transform, "mosaic_gpu")
    return Case(
        lambda *arrays: gradients(dict(zip(names, arrays, strict=False)), arrays[-1]),
        (*(args[name] for name in names), args["labels"]),
        mesh=mesh_programs.AXES,
        specs=(*(specs[name] for name in names), specs["labels"]),
        is_explicit=mode == "explicit",
    )


def name_of(*parts: str) -> str:
    return ", ".join(parts)


def _loss_beside_an_auto_axis(x, scale, weight, labels):
    return linear_cross_entropy(
        rms_norm(x, scale, implementation="require"), weight, labels, implementation="require"
    )


# Tokens are split over an Explicit axis, beside an Auto axis that splits nothing.
MIXED = Case(
    jax.grad(_loss_beside_an_auto_axis, (0, 1, 2)),
    (
        jax.ShapeDtypeStruct((B, S, D), jnp.bfloat16),
        jax.ShapeDtypeStruct((D,), jnp.float32),
        jax.ShapeDtypeStruct((V, D), jnp.float32),
        jax.ShapeDtypeStruct((B, S), jnp.int32),
    ),
    mesh={"data": 4, "others": 2},
    specs=(P("data"), P(), P(), P("data")),
    is_explicit=True,
    auto=("others",),
)


# Axes of one device split nothing, also where types of arrays name them.
OF_ONE_DEVICE = {
    f"{data} x {tensor}": dataclasses.replace(
        MIXED,
        mesh={"data": data, "tensor": tensor},
        specs=(P("data"), P("data"), P("tensor", "data"), P("data")),
        auto=(),
    )
    for data, tensor in ((1, 1), (8, 1))
}


def _by_tokens(a):
    return jax.lax.with_sharding_constraint(a, P("data"))


def _of_a_table(table, scale, tokens):
    h = _by_tokens(table.at[tokens].get(mode="fill").astype(jnp.bfloat16))
    return jnp.sum(jnp.square(rms_norm(h, scale)), dtype=jnp.float32)


def _in_a_branch(x, scale, is_normed):
    norm = lambda x: rms_norm(x, scale)
    y = jax.lax.cond(is_normed, norm, lambda x: x, _by_tokens(x))
    return jnp.sum(_by_tokens(y), dtype=jnp.float32)


# Programs in which XLA would gather tokens, with the constraints of docs/meshes.md.
CONSTRAINED = {
    name: Case(
        jax.grad(function, (0, 1)),
        (
            jax.ShapeDtypeStruct(shape, dtype),
            jax.ShapeDtypeStruct((D,), jnp.float32),
            jax.ShapeDtypeStruct(*last),
        ),
        mesh={"data": 8},
        specs=(spec, P(), P("data") if last[0] else P()),
    )
    for name, function, shape, dtype, spec, last in (
        ("table", _of_a_table, (V, D), jnp.float32, P(None, "data"), ((B, S), jnp.int32)),
        ("branch", _in_a_branch, (B, S, D), jnp.bfloat16, P("data"), ((), jnp.bool_)),
    )
}
CASES = (
    {name_of(*case): make_case(*case) for case in mesh_programs.cases()}
    | {"mixed": MIXED}
    | OF_ONE_DEVICE
    | CONSTRAINED
)
NORMAL = {
    "batch, auto, plain",
    "sequence, explicit, scan",
    "fsdp, manual, remat",
    "tensor, manual, scan",
    "fsdp and tensor, auto, remat",
    "fsdp and tensor, explicit, scan",
}
PARAMS = [
    pytest.param("h100", name, id=name, marks=() if name in NORMAL else pytest.mark.full)
    for name in CASES
    if name not in ("mixed", *OF_ONE_DEVICE, *CONSTRAINED)
]
each_program = pytest.mark.parametrize("chip, case", PARAMS)


@each_program
def test_every_operation_runs_its_kernels(compiled, chip, case):
    program = compiled(chip, case)
    names = " ".join(kernel.name for kernel in program.kernels)
    for name in (
        "rms_norm_fwd",
        "rms_norm_bwd",
        "add_rms_norm_fwd",
        "add_rms_norm_bwd",
        "swiglu_fwd",
        "swiglu_bwd",
        "gated_matmul",
        "gated_matmul_backward",
    ):
        assert re.search(rf"\b\w*?{name}\b|{name}", names), (name, names)
    is_split = LAYOUTS[case.split(", ")[0]].columns is not None
    assert ("loss_of_logits" if is_split else "linear_exponentials") in names


@each_program
def test_devices_exchange_only_what_the_layout_needs(compiled, chip, case):
    """The elements of each collective are those of the layout's weights and gradients."""
    layout_name, _, transform = case.split(", ")
    layout = LAYOUTS[layout_name]
    columns = 2 if layout.columns else 1
    num_layers = 2 if transform == "scan" else 1
    of_layer = D + 3 * D * F // columns
    of_model = num_layers * of_layer + D + V * D // columns
    tokens = B * S * columns // 8
    found: Counter[str] = Counter()
    sums_of_tokens = statistics = 0
    for collective in Schedule(compiled(chip, case).hlo).collectives():
        for shape in collective.results:
            size = math.prod(shape)
            if collective.kind == "all-reduce" and size == tokens * D:
                sums_of_tokens += collective.times
            elif shape == (5, 2, tokens):
                statistics += collective.times
            else:
                found[collective.kind] += collective.times * size
    assert not found.keys() - {"all-reduce", "all-gather", "reduce-scatter"}

    # Devices sum the MLP's result, and the gradients of the inputs of the MLP and of the head.
    forwards = 2 if transform == "remat" else 1
    assert sums_of_tokens == (num_layers * (forwards + 1) + 1 if layout.columns else 0)
    assert statistics == (1 if layout.columns else 0)
    if layout.hidden is None:
        assert found["all-gather"] == found["reduce-scatter"] == 0
        assert of_model <= found["all-reduce"] <= of_model + SCALARS
        return
    # A weight is gathered for each use: in the forward, again by `jax.checkpoint`, in the backward.
    # The head has one use.
    assert of_model <= found["all-gather"] <= (forwards + 1) * of_model - V * D // columns
    # The halves of the gradients are summed over the other axes. Inside of `jax.shard_map`, JAX
    # sums whole gradients first.
    assert found["reduce-scatter"] == of_model // 2
    assert of_model // 2 <= found["all-reduce"] <= of_model + SCALARS


@pytest.mark.parametrize("chip, case", [("h100", "mixed")])
def test_explicit_axes_beside_an_auto_axis(compiled, chip, case):
    """The kernels run, and devices exchange the gradients of the weights alone. It takes 20 s."""
    program = compiled(chip, case)
    names = {kernel.name for kernel in program.kernels}
    assert names >= {"rms_norm_fwd", "rms_norm_bwd", "linear_exponentials"}, names
    found = Schedule(program.hlo).exchanged()
    assert found.keys() == {"all-reduce"}
    assert V * D + D <= found["all-reduce"] <= V * D + D + SCALARS


@pytest.mark.parametrize("chip", ["h100"])
@pytest.mark.parametrize("case", list(OF_ONE_DEVICE))
def test_explicit_axes_of_one_device(compiled, chip, case):
    """The kernels are those of a whole vocabulary. 11 s and 5 s."""
    program = compiled(chip, case)
    names = {kernel.name for kernel in program.kernels}
    assert names >= {"rms_norm_fwd", "rms_norm_bwd", "linear_exponentials"}, names
    assert "loss_of_logits" not in names
    found = Schedule(program.hlo).exchanged()
    if case == "1 x 1":
        assert not found
        return
    assert found.keys() == {"all-gather", "reduce-scatter", "all-reduce"}
    assert found["all-gather"] == V * D + D
    assert found["reduce-scatter"] == (V * D + D) // 8
    assert found["all-reduce"] <= SCALARS


@pytest.mark.parametrize("chip", ["h100"])
@pytest.mark.parametrize("case", list(CONSTRAINED))
def test_constraints_keep_xla_from_gathering_tokens(compiled, chip, case):
    """Without them each program has an all-gather of `[B, S, D]`, with JAX 0.11. 1 s a case."""
    program = compiled(chip, case)
    assert {"rms_norm_fwd", "rms_norm_bwd"} <= {kernel.name for kernel in program.kernels}
    for collective in Schedule(program.hlo).collectives():
        if collective.kind == "all-gather":
            assert max(map(math.prod, collective.results)) < B * S * D, collective
