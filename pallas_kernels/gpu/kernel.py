"""The launch of a kernel, and the error where it cannot run."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax._src import config as jax_config
from jax.core import ShapedArray
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir

from pallas_kernels.gpu.device import runs_here, target_device


def gpu_kernel(
    body: Callable[..., None], *, kernel_name: str, **options: Any
) -> Callable[..., Any]:
    """`plgpu.kernel`, which raises NotImplementedError where the kernel cannot run.

    If the default device is an NVIDIA GPU before Ampere, the error comes while JAX traces. Only
    compilation knows whether a program is for a CPU, because `jax.export` traces programs for GPUs
    that are not here; then the error comes at compilation.
    """
    run = plgpu.kernel(body, kernel_name=kernel_name, **options)

    def checked(*operands: Any) -> Any:
        if target_device().capability is not None and (reason := runs_here()) is not None:
            raise NotImplementedError(f"implementation='mosaic_gpu': {reason}")
        if interpreted():
            return run(*operands)
        # One operand is enough; some operands are references.
        is_array = [isinstance(jax.typeof(a), ShapedArray) for a in operands]
        i = is_array.index(True)
        on_gpu = _on_gpu_p.bind(jnp.asarray(operands[i]), kernel_name=kernel_name)
        results = run(*operands[:i], on_gpu, *operands[i + 1 :])
        arrays = [a for a, b in zip(operands, is_array, strict=True) if b]
        # `plgpu.kernel` returns arrays of a type that says they are the same on all devices.
        varying = frozenset().union(*map(varying_axes, arrays))
        return jax.tree.map(lambda a: vary(a, varying), results)

    return checked


def varying_axes(a: Any) -> frozenset[str]:
    """The Manual axes over which the array's type says that it varies."""
    return jax.typeof(a).manual_axis_type.varying


def vary(a: jax.Array, axes: frozenset[str]) -> jax.Array:
    """The array, with a type that says that it varies over these Manual axes, too."""
    missing = tuple(sorted(axes - varying_axes(a)))
    return jax.lax.pcast(a, missing, to="varying") if missing else a


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
