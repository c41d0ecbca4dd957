"""The README's model, as it stands there, runs the kernels on an H100."""

import os
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from aot.harness import CHIPS, missing_toolchain
from support.pages import README, python_blocks
from train.planner import aot


def test_the_step_runs_the_kernels_of_the_norms_the_mlp_and_the_loss(capsys):
    """The README's own lines say so, and so does the compiled step."""
    if reason := missing_toolchain():
        (pytest.fail if "AOT_REQUIRED" in os.environ else pytest.skip)(reason)
    model_and_step, _, did_a_kernel_run, *_ = python_blocks(README)
    (device,) = aot.devices(CHIPS["h100"], 1)
    sharding = NamedSharding(Mesh(np.array([device]), "x"), PartitionSpec())

    def on_the_gpu(a: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=sharding)

    namespace: dict[str, Any] = {"__name__": "readme"}
    with jax.numpy_dtype_promotion("standard"):
        exec(model_and_step, namespace)
        params = namespace["params"]
        opt_state = jax.eval_shape(namespace["optimizer"].init, params)
        tokens = jax.ShapeDtypeStruct((8, 257), jnp.int32)
        arrays = jax.tree.map(on_the_gpu, (params, opt_state, tokens))
        params, opt_state, tokens = arrays
        namespace |= {"params": params, "opt_state": opt_state, "tokens": tokens}
        with jax.default_device(device):
            exec(did_a_kernel_run, namespace)
            program = namespace["step"].lower(params, opt_state, tokens).compile().as_text()
    norms = {"rms_norm_fwd", "rms_norm_bwd", "add_rms_norm_fwd", "add_rms_norm_bwd"}
    mlp = {"gated_matmul", "gated_matmul_backward"}
    loss = {"linear_exponentials", "linear_exponentials_again"}
    found = set(re.findall(r'"mosaic_gpu.*?op_name="[^"]*?(\w+)/\w+"', program))
    assert found == norms | mlp | loss
    lines = [line for line in capsys.readouterr().out.splitlines() if not line.startswith(" ")]
    assert len(lines) == 4 and all(": mosaic_gpu" in line for line in lines)
