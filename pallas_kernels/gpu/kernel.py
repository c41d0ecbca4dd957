"""The launch of a kernel, and the error where it cannot run."""

import functools
import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax._src import config as jax_config
from jax._src.state.discharge import discharge_state
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.extend.core import Primitive, jaxpr_as_fun
from jax.interpreters import ad, batching, mlir

from pallas_kernels.gpu.device import reason_not_here, target_device


def shared[**P, R](*static: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """A decorator for a function that launches kernels: equal calls launch one kernel.

    JAX lowers a kernel once for each trace of its body. XLA compiles it once for each lowering,
    because a kernel's text has the number of its lowering (JAX 0.11.2). To compile a kernel takes
    0.5 to 1 s of a core (docs/lab/2026-11-26-fp8-compile-times.md). So equal calls share a trace,
    whose equations become equations of the caller's jaxpr (`inline=True`).

    Args:
      *static: Names of the arguments that are no arrays.
    """
    jit: Any = functools.partial(jax.jit, static_argnames=static, inline=True)
    return jit


def gpu_kernel(
    body: Callable[..., None], *, kernel_name: str, in_place: int | None = None, **options: Any
) -> Callable[..., Any]:
    """`plgpu.kernel`, which raises NotImplementedError where the kernel cannot run.

    If the default device is an NVIDIA GPU before Ampere, the error comes while JAX traces. Only
    compilation knows whether a program is for a CPU, because `jax.export` traces programs for GPUs
    that are not here; then the error comes at compilation.

    Args:
      body: Function of references to operands, results and scratch memory.
      kernel_name: Name in errors and profiles.
      in_place: Position of an operand that the kernel writes. The array that it becomes follows
        the results.
      **options: Arguments of `plgpu.kernel`.
    """
    run = plgpu.kernel(body, kernel_name=kernel_name, **options)
    if in_place is not None:
        run = _writing(run, in_place)

    def launch(*operands: Any) -> Any:
        # A kernel's indices have 32 bits, and its Python numbers must not become 64-bit arrays.
        with jax.enable_x64(False):
            return run(*operands)

    def checked(*operands: Any) -> Any:
        if target_device().capability is not None and (reason := reason_not_here()) is not None:
            raise NotImplementedError(f"implementation='mosaic_gpu': {reason}")
        if interpreted():
            return launch(*operands)
        first = _on_gpu_p.bind(jnp.asarray(operands[0]), kernel_name=kernel_name)
        results = launch(first, *operands[1:])
        # `plgpu.kernel` returns arrays of a type that says they are the same on all devices.
        varying = varying_axes(operands)
        return jax.tree.map(lambda a: vary(a, varying), results)

    return checked


def in_groups(items: Iterable[Any], *sizes: int) -> list[list[Any]]:
    """The items, such as the references that a kernel gets, in groups of these sizes."""
    rest = iter(items)
    return [list(itertools.islice(rest, size)) for size in sizes]


_SMEM_ALIGNMENT = 1024  # Mosaic GPU begins each array in shared memory at a multiple of it
_BARRIER_BYTES = 8


def check_fits(what: str, scratch_types: Sequence[Any], *, remedy: str) -> None:
    """Raises ValueError if scratch memory does not fit the shared memory of a block.

    Args:
      what: Launch parameters, for the message.
      scratch_types: Types that `gpu_kernel` takes: arrays of shared memory, and barriers.
      remedy: Change of the parameters that takes less memory, for the message.
    """
    device, num_bytes = target_device(), smem_bytes(scratch_types)
    if num_bytes > device.smem_bytes:
        raise ValueError(
            f"{what} takes {num_bytes} bytes of shared memory, a block of {device.kind} can have "
            f"{device.smem_bytes}; {remedy}"
        )


def smem_bytes(scratch_types: Sequence[Any]) -> int:
    """Bytes of shared memory that a block has for arrays and barriers of these types."""
    num_bytes = 0
    for a in scratch_types:
        if isinstance(a, plgpu.Barrier):
            num_bytes += _BARRIER_BYTES * int(np.prod(a.num_barriers))
        else:
            size = math.prod(a.shape) * jnp.dtype(a.dtype).itemsize
            num_bytes += -(-size // _SMEM_ALIGNMENT) * _SMEM_ALIGNMENT
    return num_bytes


def _writing(run: Callable[..., Any], in_place: int) -> Callable[..., Any]:
    """`run`, which writes an operand in place and returns `(*results, operand)`."""

    def launch(*operands: jax.Array) -> tuple[jax.Array, ...]:
        refs: list[Any] = list(operands)
        refs[in_place] = jax.new_ref(operands[in_place])
        results = run(*refs)
        return *results, jax.freeze(refs[in_place])

    def without_references(*operands: jax.Array) -> list[jax.Array]:
        # JAX allows references inside of its own primitives, and not inside of ours. So they are
        # discharged here. JAX has no references to arrays that vary over Manual axes, so the types
        # here leave the axes out (JAX 0.11.2 and 0.12).
        types = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in operands]
        return jaxpr_as_fun(discharge_state(jax.make_jaxpr(launch)(*types)))(*operands)

    return without_references


def varying_axes(arrays: Any) -> frozenset[str]:
    """The Manual axes over which any array of a pytree varies, as its type says."""
    of_each = (jax.typeof(a).manual_axis_type.varying for a in jax.tree.leaves(arrays))
    return frozenset[str]().union(*of_each)


def vary(a: jax.Array, axes: frozenset[str]) -> jax.Array:
    """The array, with a type that says that it varies over these Manual axes, too."""
    missing = tuple(sorted(axes - varying_axes(a)))
    return jax.lax.pcast(a, missing, to="varying") if missing else a


# A change of an array's type alone. `jax.lax.pcast` cannot take an axis away, and its transpose
# adds up the gradient.
_retyped_p = Primitive("retyped")
_retyped_p.def_impl(lambda a, *, varying: a)
_retyped_p.def_abstract_eval(
    lambda a, *, varying: a.update(
        manual_axis_type=a.manual_axis_type.update(varying=frozenset(varying))
    )
)
ad.deflinear2(
    _retyped_p,
    lambda gradient, a, *, varying: [retyped(gradient, a.aval.manual_axis_type.varying)],
)
batching.defvectorized(_retyped_p)
mlir.register_lowering(_retyped_p, lambda context, a, *, varying: [a])


def retyped(a: jax.Array, axes: frozenset[str]) -> jax.Array:
    """The array, with a type that says that it varies over these Manual axes and no others."""
    return a if varying_axes(a) == axes else _retyped_p.bind(a, varying=tuple(sorted(axes)))


def interpreted() -> bool:
    """Whether kernels run in the interpreter (`plgpu`'s context manager)."""
    # There is no public way to ask (JAX 0.11.2 and 0.12).
    return jax_config.pallas_tpu_interpret_mode_context_manager.value is not None


# Returns its operand in programs for NVIDIA GPUs. Lowering it for another platform raises.
_on_gpu_p = Primitive("on_gpu")
_on_gpu_p.def_abstract_eval(lambda a, *, kernel_name: a)


@_on_gpu_p.def_impl
def _on_gpu(a: jax.Array, *, kernel_name: str) -> jax.Array:
    platforms = {device.platform for device in a.devices()}
    if platforms != {"gpu"}:
        _refuse_platforms(platforms, kernel_name)
    return a


def _lower_elsewhere(context: Any, a: Any, *, kernel_name: str) -> Any:
    _refuse_platforms(context.module_context.platforms, kernel_name)


def _refuse_platforms(platforms: Any, kernel_name: str) -> None:
    raise NotImplementedError(
        f"implementation='mosaic_gpu': its kernel {kernel_name!r} is for NVIDIA GPUs, and this "
        f"program is for {' and '.join(map(repr, platforms))}; leave implementation=None, which "
        "takes what runs here"
    )


batching.defvectorized(_on_gpu_p)
mlir.register_lowering(_on_gpu_p, _lower_elsewhere)
mlir.register_lowering(_on_gpu_p, lambda context, a, *, kernel_name: [a], platform="cuda")
