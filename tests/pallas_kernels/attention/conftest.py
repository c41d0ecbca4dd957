"""Lets the interpreter multiply operands in registers, as the attention kernels do."""

from typing import Any

import jax
import numpy as np
import pytest
from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu


@pytest.fixture
def interpreted(monkeypatch, interpreted):
    """The fixture of all kernels, with `wgmma` of a left operand in registers.

    JAX's interpreter takes every operand for a reference to shared memory (JAX 0.11.2 and 0.12).
    """
    callbacks: Any = gpu_callbacks
    of_references = callbacks.wgmma

    @callbacks.fail_on_exception
    def of_values(*, token, mesh_location, thread, **operands):
        memory = callbacks._get_shared_memory()
        info = callbacks.memory.GPULoggingInfo(mesh_location, thread, operands["source_info"])

        def place(name):
            key = callbacks.HostAllocationKey.from_array(
                operands[f"{name}_allocation_key_as_array"]
            )
            transforms = callbacks._remove_noop_transforms(operands[f"{name}_transforms"])
            return key, memory.access(key, jax.tree.map(int, transforms))

        def read(name):
            return memory.get_buffer_content(*place(name), thread, logging_info=info)[0]

        a, acc = np.asarray(operands["a_allocation_key_as_array"]), read("acc")
        total = acc + np.matmul(a, read("b"), dtype=acc.dtype)
        memory.store_buffer_content(*place("acc"), total, thread, logging_info=info)
        return token

    def wgmma(**arguments):
        is_value = arguments["a_allocation_key_as_array"].ndim > 1
        return (of_values if is_value else of_references)(**arguments)

    # The interpreter has no `run_state` either. A sum from zero stands for one that goes on.
    def run_state(compute):
        def run(acc):
            def from_zero(ref):
                compute(ref)
                return plgpu.wgmma_accumulator_load(ref, wait_n=0)

            return acc._init + pl.run_scoped(
                from_zero, plgpu.WGMMAAccumulatorRef(acc.shape, acc.dtype)
            )

        return run

    monkeypatch.setattr(callbacks, "wgmma", wgmma)
    monkeypatch.setattr(pl, "run_state", run_state)
    return interpreted
