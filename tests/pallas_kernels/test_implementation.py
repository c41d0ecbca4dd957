"""The implementation that each operation runs, and the reason that it gives."""

import functools

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

from pallas_kernels import implementation, rms_norm, swiglu, swiglu_mlp
from pallas_kernels.gpu.device import Device
from pallas_kernels.implementation import check_implementation
from pallas_kernels.mlp import gated_matmul
from pallas_kernels.mlp.api import choose_swiglu, choose_swiglu_mlp
from pallas_kernels.norm.api import choose_norm
from pallas_kernels.sharded_norm.api import choose_sharded_norm

BF16, F32 = jnp.bfloat16, jnp.float32
X, WEIGHT = jnp.ones((4, 128), BF16), jnp.ones(128, BF16)
SQUARE = jnp.ones((128, 128), BF16)
WEIGHTS = SQUARE, SQUARE, SQUARE


@pytest.fixture
def on_h100(monkeypatch):
    monkeypatch.setattr(implementation, "reason_not_here", lambda: None)
    device = Device("NVIDIA H100 80GB HBM3", (9, 0), 132)
    monkeypatch.setattr(gated_matmul, "target_device", lambda: device)


def choose(operation, name=None, x=X):
    match operation:
        case "norm":
            return choose_norm(x, None, WEIGHT, name, None)
        case "swiglu":
            return choose_swiglu(x, x, name, None)
        case "swiglu_mlp":
            return choose_swiglu_mlp(x, WEIGHTS, None, name, None)
        case _:
            return choose_sharded_norm(x, x, WEIGHT, name)


OPERATIONS = "norm", "swiglu", "swiglu_mlp", "sharded_norm"


@pytest.mark.parametrize("operation", OPERATIONS)
def test_a_name_is_the_choice_and_its_own_reason(operation):
    by_default = operation in ("norm", "swiglu_mlp")
    kernel = (
        "None takes the kernel where it runs" if by_default else "'mosaic_gpu' takes the kernel"
    )
    for name in ("reference", "xla"):
        reason = f"the caller asked for implementation={name!r}; implementation={kernel}"
        assert choose(operation, name) == (name, reason)


@pytest.mark.parametrize("operation", OPERATIONS)
def test_without_a_gpu_plain_jax_runs_and_says_why(operation):
    chosen, reason = choose(operation)
    assert chosen in ("reference", "xla")
    if operation in ("norm", "swiglu_mlp"):
        assert reason == "the device is 'cpu', not an NVIDIA GPU"
    else:
        assert reason is not None and "implementation='mosaic_gpu'" in reason


def test_the_kernels_run_on_a_gpu(on_h100):
    assert choose("norm") == ("mosaic_gpu", None)
    many = jnp.ones((2048, 128), BF16)
    assert choose("swiglu_mlp", x=many) == ("mosaic_gpu", None)
    assert choose("swiglu", "mosaic_gpu") == ("mosaic_gpu", None)
    chosen, reason = choose("swiglu_mlp")
    assert chosen == "mosaic_gpu"
    assert reason is not None and "the backward has num_tokens=4 at a time" in reason


def test_reasons_have_a_value_and_a_remedy(on_h100):
    many = jnp.ones((2048, 128), BF16)
    narrow = jnp.ones((4, 128), jnp.float8_e5m2)
    chosen, reason = choose("norm", x=narrow)
    assert chosen == "reference"
    assert reason is not None and "x is float8_e5m2" in reason and "; cast x to" in reason
    chosen, reason = choose("swiglu_mlp", x=X.astype(F32))
    assert chosen == "xla" and reason is not None and "float32" in reason
    mesh = jax.make_mesh((2, 4), ("data", "fsdp"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    with jax.set_mesh(mesh):
        assert choose("norm") == ("mosaic_gpu", None)
        assert choose("swiglu_mlp", x=many) == ("mosaic_gpu", None)
        partly = functools.partial(
            jax.shard_map, in_specs=P("data"), out_specs=P("data"), axis_names={"data"}
        )
        reasons = []
        jax.jit(partly(lambda x: reasons.append(choose("norm", x=x)[1]) or x))(many)
        for part in ("axes ('fsdp',) are left to XLA", "the tokens of a loss", "axis_names"):
            assert part in reasons[0]


def test_an_unknown_name(unchecked_shapes):
    operations = {
        rms_norm: (X, WEIGHT),
        swiglu: (X, X),
        swiglu_mlp: (X, *WEIGHTS),
    }
    names = r"\('reference', 'xla', 'mosaic_gpu', 'require'\)"
    message = f"implementation='triton' must be None or one of {names}"
    for function, args in operations.items():
        with pytest.raises(ValueError, match=message):
            function(*args, implementation="triton")
    with pytest.raises(ValueError, match=message):
        check_implementation("triton")
    assert check_implementation(None) is None


@pytest.mark.parametrize("operation", ["norm", "swiglu"])
def test_the_choice_is_made_once_a_call(monkeypatch, operation):
    # `explain` prints what this function returns. A second place could disagree with it.
    calls = []
    modules = {"norm": "pallas_kernels.norm.api", "swiglu": "pallas_kernels.mlp.api"}
    support = f"{modules[operation]}.mosaic_gpu.unsupported_reason"
    monkeypatch.setattr(support, lambda *arrays: calls.append(arrays))
    fn, args = {"norm": (rms_norm, (X, WEIGHT)), "swiglu": (swiglu, (X, X))}[operation]
    jax.eval_shape(functools.partial(fn, implementation="mosaic_gpu"), *args)
    assert len(calls) == 1
