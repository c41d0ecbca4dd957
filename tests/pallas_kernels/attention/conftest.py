"""Lets the interpreter multiply operands in registers, as the attention kernels do."""

from typing import Any

import jax
import numpy as np
import pytest
from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks


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

    monkeypatch.setattr(callbacks, "wgmma", wgmma)
    return interpreted
