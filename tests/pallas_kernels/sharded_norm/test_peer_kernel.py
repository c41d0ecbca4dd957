"""The kernel of the sharded norm that reads the memory of other GPUs."""

import functools

import chex
import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

from pallas_kernels import sharded_add_rms_norm
from pallas_kernels.sharded_norm import mosaic_gpu as peer_kernel
from support.numerics import quick_jit
from support.sharded_norm import (
    BF16,
    F32,
    check,
    graded,
    make_args,
    mesh_of,
    on_mesh,
)

# The interpreter has one device, so on a CPU only errors are tested.
# tests/aot compiles the kernel, and TestOnGpus runs it.


@pytest.mark.parametrize(
    "shapes, dtypes, message",
    [
        (((16, 8), (2, 8), (8,)), (F32, F32, F32), "hidden_size=8 cannot be dealt to 4 warps"),
        (((16, 256), (2, 256), (256,)), (BF16, F32, F32), "partial is bfloat16 and residual float"),
        (((16, 256), (2, 256), (256,)), (jnp.float8_e5m2, F32, F32), "partial is float8_e5m2, not"),
        (((16, 256), (2, 256), (256,)), (BF16, BF16, F32), "the device is 'cpu', not an NVIDIA"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_what_the_kernel_refuses(shapes, dtypes, message):
    def local():
        arrays = (jnp.ones(s, dtype) for s, dtype in zip(shapes, dtypes, strict=True))
        y, _ = sharded_add_rms_norm(*arrays, axis_name="tensor", implementation="mosaic_gpu")
        return jnp.sum(y)

    mapped = jax.shard_map(
        local, mesh=mesh_of(tensor=8), in_specs=(), out_specs=P(), check_vma=False
    )
    with pytest.raises(NotImplementedError, match=f"implementation='mosaic_gpu': {message}"):
        jax.eval_shape(mapped)


def test_the_kernel_refuses_several_processes(monkeypatch):
    monkeypatch.setattr(peer_kernel, "reason_not_here", lambda: None)
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    x = jnp.ones((16, 256), BF16)
    assert "there are 2 processes" in str(peer_kernel.unsupported_reason(x, x, x))


needs_gpus = [
    pytest.mark.gpu,
    pytest.mark.gpus,
    pytest.mark.skipif(jax.device_count() < 2, reason="needs several GPUs in one host"),
]


def gpu_meshes():
    n = jax.device_count()
    return [mesh_of(tensor=n)] + ([mesh_of(data=n // 2, tensor=2)] if n >= 4 else [])


class TestOnGpus:
    pytestmark = needs_gpus

    @pytest.mark.parametrize("gather", [True, False])
    @pytest.mark.parametrize("dtype", [BF16, F32], ids=jnp.dtype)
    @pytest.mark.parametrize(
        "tokens, hidden_size", [(1, 256), (37, 2880), (300, 4096), (2048, 4096), (129, 8192)]
    )
    def test_values_and_gradients(self, tokens, hidden_size, dtype, gather):
        for mesh in gpu_meshes():
            shape = tokens * mesh.shape["tensor"], hidden_size
            check(mesh, shape, (dtype, dtype, F32), gather=gather, implementation="mosaic_gpu")

    def test_leading_axes(self):
        mesh = gpu_meshes()[0]
        shape = 3, 10 * mesh.shape["tensor"], 1024
        check(mesh, shape, (BF16, BF16, BF16), implementation="mosaic_gpu", casting="llama")

    @pytest.mark.parametrize("gather", [True, False])
    def test_repeated_runs_have_the_same_bits(self, gather):
        mesh = gpu_meshes()[0]
        n = mesh.shape["tensor"]
        args, cotangents = make_args(n, (256 * n, 4096), (BF16, BF16, F32), gather=gather)
        run = graded(on_mesh(mesh, gather=gather, implementation="mosaic_gpu"))
        first = run(args, cotangents)
        for _ in range(20):
            chex.assert_trees_all_equal(run(args, cotangents), first)

    def test_operands_may_be_overwritten_at_once(self):
        """A late device still reads the operands of others, whose memory XLA uses again soon."""
        mesh = gpu_meshes()[0]
        n = mesh.shape["tensor"]
        (partials, residual, weight), _ = make_args(n, (64 * n, 4096), (F32, F32, F32))

        def layers(implementation, partials, residual, weight):
            busy, columns = jnp.ones((1024, 1024), F32), jnp.arange(4096, dtype=F32)

            def layer(carry, number):
                partials, residual, busy = carry
                y, residual = on_mesh(mesh, implementation=implementation)(
                    partials, residual, weight
                )
                # Each device has another amount of other work, and another one in each layer.
                late = jax.shard_map(
                    lambda a, number: jax.lax.fori_loop(
                        0,
                        (jax.lax.axis_index("tensor") * 7 + number * 3) % 11,
                        lambda _, a: a @ a / 1024,
                        a,
                    ),
                    mesh=mesh,
                    in_specs=(P(), P()),
                    out_specs=P(),
                    check_vma=False,
                )
                # Every layer has sums of its own, and forgets how the last ones were rounded.
                sums = jnp.sin(columns + number.astype(F32)) + y / 8
                return (sums, residual * 0.5, late(busy, number)), None

            carry, _ = jax.lax.scan(layer, (partials, residual, busy), jnp.arange(200))
            return carry[:2]

        got, want = (
            quick_jit(functools.partial(layers, implementation))(partials, residual, weight)
            for implementation in ("mosaic_gpu", "xla")
        )
        # A stale or early row is wrong by its size, the order of additions by a few epsilons.
        chex.assert_trees_all_close(got, want, rtol=0, atol=1e-4)
