"""A transformer in Flax NNX on Explicit axes, compiled for eight H100s.

One axis splits as FSDP does, and one by tensor parallelism. All layers, the embeddings, and the
attention with its projections are in one program, which takes 15 s of one core. Another program, of
18 s, has products in FP8. `tests/pallas_kernels/test_mesh_transformer.py` checks the numbers of the
first one.
"""

import dataclasses
import functools
import re
from collections import Counter

import jax
import jax.numpy as jnp
import pytest

from aot.harness import Case, Program
from benchmarks.training import transformer
from benchmarks.training.schedule import Schedule

pytestmark = pytest.mark.oldest
FSDP, TENSOR = 4, 2
# A device has the norms, the MLP and the loss of `test_aot_meshes.py`, so only the kernels of the
# attention are new to the process that compiles both.
B, S, D, F, V = 16, 2048, 512, 1024, 2048
L, N, K, H = 3, 4, 2, 64
SIZES = transformer.Sizes(
    hidden=D,
    intermediate=F,
    num_heads=N,
    num_kv_heads=K,
    head_size=H,
    vocabulary=V,
    num_layers=L,
    dtype=jnp.bfloat16,
)
FP8_SIZES = dataclasses.replace(
    SIZES, hidden=2048, intermediate=2048, num_heads=32, num_kv_heads=8, fp8="rowwise"
)
TOKENS = jax.ShapeDtypeStruct((B, S), jnp.int32)


def loss_and_gradients(sizes, *arrays):
    params = jax.tree.unflatten(jax.tree.structure(transformer.shapes(sizes)), arrays[:-3])
    return transformer.gradients_of(sizes)(params, *arrays[-3:])


def case(sizes, fsdp, tensor):
    return Case(
        functools.partial(loss_and_gradients, sizes),
        (*jax.tree.leaves(transformer.shapes(sizes)), *(TOKENS,) * 3),
        mesh={"fsdp": fsdp, "tensor": tensor},
        specs=(*jax.tree.leaves(transformer.specs(sizes)), *(transformer.TOKENS,) * 3),
        is_explicit=True,
    )


CASES = {"explicit": case(SIZES, FSDP, TENSOR), "fp8": case(FP8_SIZES, FSDP, TENSOR)}
KERNELS = {
    "rms_norm_fwd",
    "rms_norm_bwd",
    "attention_forward",
    "attention_backward_dq",
    "attention_backward_dkdv",
    "add_rms_norm_fwd",
    "add_rms_norm_bwd",
    "gated_matmul",
    "gated_matmul_backward",
    "loss_of_logits",
}


@pytest.mark.parametrize("chip, case", [("h100", "explicit")])
def test_every_kernel_runs(compiled, chip, case):
    program: Program = compiled(chip, case)
    assert {kernel.name for kernel in program.kernels} == KERNELS


@pytest.mark.parametrize("chip, case", [("h100", "explicit")])
def test_no_kernel_of_a_forward_runs_twice(compiled, chip, case):
    """XLA peels the loop of the backward, so kernels of the backward would count twice.

    The policy of the layers names all results of kernels that the backward reads. Stacks and layers
    read some results, for which XLA would run a kernel twice without a barrier.
    """
    program: Program = compiled(chip, case)
    of_layer = Counter(("rms_norm_fwd", "attention_forward", "add_rms_norm_fwd", "gated_matmul"))
    after = Counter(("rms_norm_fwd",))
    found = Counter({k: n for k, n in program.calls.items() if k in of_layer})
    assert found == of_layer + after


@pytest.mark.parametrize("chip, case", [("h100", "explicit")])
def test_devices_exchange_only_what_the_layout_needs(compiled, chip, case):
    """The elements of the results of all collectives, on one device."""
    program: Program = compiled(chip, case)
    found = Schedule(program.hlo).exchanged()
    of_layer = (2 * D * (N + K) * H + 3 * D * F) // TENSOR
    of_head = V * D // TENSOR
    tokens = B * S // FSDP
    statistics = 5 * 2 * tokens  # of the loss
    scalars = found["all-reduce"] - (4 * L + 1) * tokens * D - (2 * L + 1) * D
    assert 1 <= scalars <= 8
    assert found == {
        # Layers gather their weights in the forward and in the backward. A device looks up the
        # tokens of all devices, and gets its embeddings from the devices of `tensor`.
        "all-gather": 2 * L * of_layer + of_head + B * S + tokens * D + statistics,
        "reduce-scatter": (L * of_layer + of_head) // FSDP,
        # Columns of the embeddings and of their gradients, for tokens.
        "all-to-all": 2 * tokens * D // TENSOR,
        # The results of the attention and of the MLP, the gradients of their inputs and of the
        # input of the head. The scales of the norms, and sums of the loss.
        "all-reduce": (4 * L + 1) * tokens * D + (2 * L + 1) * D + scalars,
    }


@pytest.mark.parametrize("chip, case", [("h100", "fp8")])
def test_layers_in_fp8_gather_fp8(compiled, chip, case):
    """A device's columns or rows of large weights; those of k and v are too small for FP8."""
    program: Program = compiled(chip, case)
    print(f"{program.seconds:.1f} s", program.calls)
    in_fp8 = {"fp8_matmul", "fp8_gated_matmul", "fp8_quantize"}
    assert KERNELS - {"gated_matmul", "gated_matmul_backward"} | in_fp8 <= program.calls.keys()
    assert not {"gated_matmul", "gated_matmul_backward"} & program.calls.keys()
    gathers = re.findall(r"= (.*) all-gather(?:-start)?\(", program.hlo)
    weights = re.findall(rf"(\w+)\[{FP8_SIZES.hidden},(\d\d+)\]", " ".join(gathers))
    assert set(weights) == {("f8e4m3fn", "1024"), ("bf16", "256")}
    times = Counter()
    for collective in Schedule(program.hlo).collectives():
        if collective.kind == "all-gather":
            for shape in collective.results:
                times[shape] += collective.times
    # Five weights in the forward, and five in the backward. The policy does not name q, k and v, so
    # the backward computes them again. No weight is gathered over `tensor`.
    assert times[2048, 1024] == L * (5 + 5 + 1)
    assert times[2048, 256] == L * (2 + 2)
