"""The sharded RMSNorm compiles for several H100s as one kernel that reads its peers."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

from aot.harness import Case, Program
from pallas_kernels import sharded_add_rms_norm
from pallas_kernels.gpu.device import REGISTERS_PER_SM

# Shape of the stream, dtype, mesh; the tokens of the last but one axis are split over "tensor".
SHAPES: dict[str, tuple[tuple[int, ...], Any, dict[str, int]]] = {
    "8192x4096": ((8192, 4096), jnp.bfloat16, {"tensor": 4}),
    "1024x8192": ((1024, 8192), jnp.bfloat16, {"fsdp": 2, "tensor": 2}),
    "2x512x2880": ((2, 512, 2880), jnp.bfloat16, {"tensor": 8}),
    "64x2048-float32": ((64, 2048), jnp.float32, {"tensor": 2}),
}


def norm(partial, residual, weight, *, gather):
    fn = functools.partial(
        sharded_add_rms_norm, axis_name="tensor", gather=gather, implementation="mosaic_gpu"
    )
    shard = P(*(None,) * (partial.ndim - 2), "tensor")
    whole = P() if gather else shard
    return jax.shard_map(fn, in_specs=(P(), shard, P()), out_specs=(whole, shard), check_vma=False)(
        partial, residual, weight
    )


def gradients(partial, residual, weight, *, gather):
    outputs, vjp = jax.vjp(functools.partial(norm, gather=gather), partial, residual, weight)
    return vjp(outputs)


def gradients_of_layers(partials, residual, weights):
    """With stacks of layers, out of which arrays for the kernels are taken."""

    def layer(residual, partial_and_weight):
        y, residual = norm(partial_and_weight[0], residual, partial_and_weight[1], gather=True)
        return residual, y

    def total(*args):
        ys = jax.lax.scan(layer, args[1], (args[0], args[2]))[1]
        return jnp.sum(ys.astype(jnp.float32))

    return jax.grad(total, argnums=(0, 1, 2))(partials, residual, weights)


def _cases() -> dict[str, Case]:
    cases = {}
    for name, (shape, dtype, mesh) in SHAPES.items():
        array = jax.ShapeDtypeStruct(shape, dtype)
        args = (array, array, jax.ShapeDtypeStruct(shape[-1:], jnp.float32))
        specs = P(), P(*(None,) * (len(shape) - 2), "tensor"), P()
        for gather in (True, False):
            suffix = "" if gather else "-sharded"
            for kind, fn in (("forward", norm), ("gradients", gradients)):
                cases[f"{kind}-{name}{suffix}"] = Case(
                    functools.partial(fn, gather=gather), args, mesh=mesh, specs=specs
                )
    layers = jax.ShapeDtypeStruct((5, 1024, 2048), jnp.bfloat16)
    residual = jax.ShapeDtypeStruct((1024, 2048), jnp.bfloat16)
    weights = jax.ShapeDtypeStruct((5, 2048), jnp.float32)
    cases["layers"] = Case(
        gradients_of_layers,
        (layers, residual, weights),
        mesh={"tensor": 2},
        specs=(P(), P("tensor"), P()),
    )
    return cases


CASES = _cases()


@pytest.mark.parametrize("chip", ["h100"])
@pytest.mark.parametrize(
    "case",
    [
        "forward-8192x4096",
        "forward-8192x4096-sharded",
        "gradients-8192x4096",
        "gradients-1024x8192",
        "gradients-1024x8192-sharded",
        "gradients-2x512x2880",
        "gradients-64x2048-float32",
    ],
)
def test_one_kernel_each_way_over_peer_memory(compiled, chip, case):
    program: Program = compiled(chip, case)
    print(f"{program.seconds:.1f} s", *program.kernels, sep="\n")
    names = [kernel.name for kernel in program.kernels]
    backward = ["sharded_add_rms_norm_bwd"] if case.startswith("gradients") else []
    assert names == ["sharded_add_rms_norm_fwd", *backward]
    _, _, mesh = SHAPES[case.removesuffix("-sharded").split("-", 1)[1]]
    for kernel in program.kernels:
        is_forward = kernel.name.startswith("sharded_add_rms_norm_fwd")
        assert kernel.arch == "sm_90a" and kernel.spill_bytes == 0
        # A block signals each peer after the norm, and once more after it has read from the peers.
        waits = 1 if case.endswith("-sharded") and is_forward else 2
        assert kernel.peer_signals == waits * (mesh["tensor"] - 1)
        assert kernel.multicasts == 0
        # All blocks must run at the same time, or one waits for another that has no room.
        registers = 128 if is_forward else 168
        blocks_per_sm = max(1, min(2, REGISTERS_PER_SM // (kernel.threads * registers)))
        assert blocks_per_sm * kernel.threads * kernel.registers <= REGISTERS_PER_SM
    # Only the weight's gradient needs collectives of XLA.
    if not backward:
        assert "reduce-scatter" not in program.hlo and "all-gather" not in program.hlo
    assert "all-to-all" not in program.hlo and "collective-permute" not in program.hlo


@pytest.mark.parametrize("chip", ["h100"])
@pytest.mark.parametrize("case", ["layers"])
def test_arrays_that_peers_read_are_not_in_a_stack(compiled, chip, case):
    """Peers cannot read an array that XLA leaves in a stack of layers."""
    program: Program = compiled(chip, case)
    assert len(program.kernels) == 2
    assert sum(part.is_kernel for part in program.instructions.values()) == 2
    assert "dynamic-slice-fusion" not in program.hlo
