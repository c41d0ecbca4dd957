"""What the Mosaic GPU kernels share: the device they are for, a register layout, and loads and
stores in it.

Mosaic GPU is the Pallas backend for NVIDIA GPUs
(https://docs.jax.dev/en/latest/pallas/gpu/index.html). A thread block has one or more warpgroups
of four warps; a Pallas thread is a warpgroup.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax._src import config as jax_config
from jax.core import ShapedArray
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir
from jax.typing import DTypeLike

from pallas_kernels import hardware

WARPS_PER_WARPGROUP = 4
LANES = 32
MAX_WARPS = 32  # 1024 threads, the limit of a block
BYTES_PER_ACCESS = 16  # the widest load or store of a lane
_ALIGNMENT = 256  # bytes, of the addresses of operands and results

# Of a multiprocessor, on every architecture since Volta.
REGISTERS_PER_SM = 65536
MAX_REGISTERS_PER_LANE = 255


@dataclasses.dataclass(frozen=True, slots=True)
class Device:
    """What launch parameters depend on.

    Attributes:
      kind: `jax.Device.device_kind`.
      capability: compute capability, such as `(9, 0)`; None if it is no NVIDIA GPU.
      num_sms: streaming multiprocessors; 1 if it is no NVIDIA GPU.
    """

    kind: str
    capability: tuple[int, int] | None
    num_sms: int

    @property
    def has_tma(self) -> bool:
        """Whether it has a tensor memory accelerator, as Hopper and later.

        Where it is no NVIDIA GPU a kernel is interpreted, or exported for one that has.
        """
        return self.capability is None or self.capability >= (9, 0)

    @property
    def smem_bytes(self) -> int:
        """Shared memory that one thread block may ask for."""
        match self.capability:
            case None | (9 | 10 | 11, _):
                return hardware.SMEM_SM90
            case (8, 0 | 7):
                return hardware.SMEM_SM80
            case _:
                return hardware.SMEM_SM86


def target_device() -> Device:
    """The device that Pallas compiles for: JAX's default device.

    On a machine without a GPU the kernels can still be interpreted, or exported; their launch
    parameters are then those of a GPU with one multiprocessor: right anywhere, fast nowhere. It
    cannot run them, which `gpu_kernel` says when they are compiled for it.
    """
    device: Any = jax.config.jax_default_device
    if device is None or isinstance(device, str):
        device = jax.devices(device)[0]
    # A CPU has none, and that of other GPUs is no pair of numbers.
    major, dot, minor = str(getattr(device, "compute_capability", "")).partition(".")
    if not dot:
        return Device(device.device_kind, None, 1)
    return Device(device.device_kind, (int(major), int(minor)), device.core_count)


def runs_here() -> str | None:
    """Why no kernel can be compiled for the default device, or None if it can."""
    device = target_device()
    if device.capability is None:
        return f"the device is {device.kind!r}, not an NVIDIA GPU"
    if device.capability < (8, 0):
        return f"compute capability {device.capability} is below (8, 0), that of the A100"
    return None


def gpu_kernel(
    body: Callable[..., None], *, kernel_name: str, **options: Any
) -> Callable[..., Any]:
    """`plgpu.kernel`, which raises NotImplementedError where the kernel cannot run.

    While JAX traces, that is so for a default device that is an NVIDIA GPU before Ampere. Whether a
    program is for a CPU is known only when it is compiled: `jax.export` traces it as well for a GPU
    that is not here.
    """
    run = plgpu.kernel(body, kernel_name=kernel_name, **options)

    def checked(*operands: Any) -> Any:
        if target_device().capability is not None and (reason := runs_here()) is not None:
            raise NotImplementedError(f"implementation='mosaic_gpu': {reason}")
        # There is no public way to ask (JAX 0.11.2 and 0.12).
        if jax_config.pallas_tpu_interpret_mode_context_manager.value is not None:
            return run(*operands)
        # One operand will do; some are references.
        is_array = [isinstance(jax.typeof(a), ShapedArray) for a in operands]
        i = is_array.index(True)
        on_gpu = _on_gpu_p.bind(jnp.asarray(operands[i]), kernel_name=kernel_name)
        return run(*operands[:i], on_gpu, *operands[i + 1 :])

    return checked


# Its operand, in programs for NVIDIA GPUs. Lowering it for another platform raises.
_on_gpu_p = Primitive("on_gpu")
_on_gpu_p.def_abstract_eval(lambda a, *, kernel_name: a)


@_on_gpu_p.def_impl
def _on_gpu(a: jax.Array, *, kernel_name: str) -> jax.Array:
    platforms = {device.platform for device in a.devices()}
    if platforms != {"gpu"}:
        _refuse_platforms(platforms, kernel_name)
    return a


def _batch_on_gpu(arrays: Any, axes: Any, *, kernel_name: str) -> Any:
    return _on_gpu_p.bind(*arrays, kernel_name=kernel_name), axes[0]


def _lower_elsewhere(context: Any, a: Any, *, kernel_name: str) -> Any:
    _refuse_platforms(context.module_context.platforms, kernel_name)


def _refuse_platforms(platforms: Any, kernel_name: str) -> None:
    raise NotImplementedError(
        f"implementation='mosaic_gpu': its kernel {kernel_name!r} is for NVIDIA GPUs, and this "
        f"program is for {' and '.join(map(repr, platforms))}; leave implementation=None, which "
        "takes what runs here"
    )


batching.primitive_batchers[_on_gpu_p] = _batch_on_gpu
mlir.register_lowering(_on_gpu_p, _lower_elsewhere)
mlir.register_lowering(_on_gpu_p, lambda context, a, *, kernel_name: [a], platform="cuda")


def sharded_over_devices(x: jax.Array) -> bool:
    """Whether XLA may have split `x` over several devices.

    It would gather the operands of a kernel, which it cannot split. Inside of `jax.shard_map` an
    array is the part of one device.
    """
    # The first is that of the context (`jax.set_mesh`), the second that of sharded arguments.
    meshes = (jax.sharding.get_abstract_mesh(), jax.typeof(x).sharding.mesh)
    return any(
        size > 1 and kind != jax.sharding.AxisType.Manual
        for mesh in meshes
        for size, kind in zip(mesh.axis_sizes, mesh.axis_types, strict=True)
    )


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def not_differentiable(message: str, arrays: Any) -> Any:
    """The arrays; differentiating what is made of them raises NotImplementedError(message)."""
    return arrays


@not_differentiable.defjvp
def _refuse(message, primals, tangents):
    raise NotImplementedError(message)


def at_aligned_addresses(arrays: Any) -> Any:
    """The operands or results of a kernel, in the shapes that its caller knows.

    XLA gives a kernel a part of an array where it lies, and lets it write a part there: `x[1:]`, a
    layer of a stack. It does so if the size of the part is a multiple of 256 bytes and does not ask
    where the part begins (JAX 0.11.2 and 0.12), but the kernel does: "Input buffer 4 is not
    256-byte aligned". So those that may be part of an array whose rows are no such multiple are
    kept apart by a barrier, which costs a copy where they are one, and else nothing.

    Args:
      arrays: a pytree; None is no array.
    """

    def apart(a: jax.Array) -> jax.Array:
        # A single row may be anywhere in a longer one.
        row = a.shape[-1] if a.size > a.shape[-1] else 1
        return jax.lax.optimization_barrier(a) if row * a.dtype.itemsize % _ALIGNMENT else a

    return jax.tree.map(apart, arrays)


def uninitialized(shape: Sequence[int], dtype: DTypeLike, *, after: jax.Array) -> jax.Array:
    """An array of whatever is in memory, which XLA places once `after` is there.

    `jax.lax.empty` depends on nothing, so its memory may be taken from the start.
    """
    return gpu_kernel(
        lambda after_gmem, out_gmem: None,
        out_type=jax.ShapeDtypeStruct(tuple(shape), dtype),
        kernel_name="uninitialized",
    )(at_aligned_addresses(after))


def rows_of_warps(vector: int) -> Any:
    """Layout of a `[4, n·32·vector]` value: row i is warp i's, a lane has `vector` in a row.

    A sum over axis 1 stays within a warp, so it needs no shared memory. (`jnp.sum` of a layout
    that spans warps goes through one scratch buffer a block, where several warpgroups race.)
    """
    return plgpu.Layout.TILED(
        plgpu.Tiling(((WARPS_PER_WARPGROUP, LANES * vector), (vector,))),
        warp_dims=(-3,),
        lane_dims=(-2,),
        vector_dim=-1,
    )


def load(ref: Any, layout: Any) -> jax.Array:
    """The values of a reference in a tiled layout."""
    # "optimized" asks for whole 32-byte sectors a warp; JAX 0.11 has no other way for tiled
    # layouts from global memory, 0.12 refuses some that are fine.
    return plgpu.load(ref, layout=layout, optimized=False)


def store(ref: Any, value: jax.Array) -> None:
    """Stores a value that is in a tiled layout."""
    if hasattr(plgpu, "store"):  # since JAX 0.12, where `ref[...] =` implies `optimized=True`
        plgpu.store(ref, value, optimized=False)
    else:
        ref[...] = value
