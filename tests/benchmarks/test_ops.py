"""The operations of the benchmark: limits, implementations and their check, without a GPU."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import timing
from benchmarks.kernels import formulas, ops, shapes


@pytest.mark.parametrize(
    ("op", "direction", "arrays"),
    [
        ("rms_norm", "forward", 2),  # x, y
        ("rms_norm", "backward", 3),  # x, dy, dx
        ("add_rms_norm", "forward", 4),  # x, residual, y, residual_out
        ("add_rms_norm", "backward", 4),  # residual_out, dy, dresidual_out, dx
        ("swiglu", "forward", 3),  # gate, up, y
        ("swiglu", "backward", 5),  # gate, up, dy, dgate, dup
    ],
)
def test_the_copy_moves_as_many_bytes_as_the_operation_must(op, direction, arrays, monkeypatch):
    monkeypatch.setattr(timing, "_ROTATION_BYTES", 1)
    num_bytes = ops.OPS[op].num_bytes((64, 128), direction)
    assert num_bytes == arrays * 64 * 128 * 2
    (call,) = ops.copy(num_bytes).calls
    assert isinstance(call, functools.partial)
    (source,) = call.args
    assert source.nbytes + call().nbytes == num_bytes
    assert not np.any(np.asarray(call() == source))  # an elementwise kernel, not a memcpy


@pytest.mark.full
@pytest.mark.parametrize("op", ["rms_norm", "add_rms_norm", "swiglu"])
def test_plain_contenders_agree_with_their_formulas(op, monkeypatch):
    monkeypatch.setattr(timing, "_ROTATION_BYTES", 1)
    op = ops.OPS[op]
    sets = ops.input_sets(op.inputs, (32, 64))
    for contender in op.contenders:
        if contender.name in ("mosaic_gpu", "default"):
            continue
        expected = formulas.exact(contender.formula, sets[0])
        names_of: dict[ops.Direction, set[str]] = {
            "forward": set(contender.formula.outputs),
            "backward": {f"d{name}" for name in contender.formula.gradients},
        }
        for direction, names in names_of.items():
            (call,) = ops.prepare(contender, sets, direction)
            got = call()
            assert set(got) == names
            assert formulas.wrong_result(got, expected) is None


@pytest.mark.parametrize("op", ["rms_norm", "add_rms_norm", "swiglu"])
def test_the_kernel_is_measured_beside_xla_and_the_default(op):
    assert [c.name for c in ops.OPS[op].contenders[:3]] == ["mosaic_gpu", "reference", "default"]


def test_the_backward_runs_on_arrays_that_another_forward_kept(monkeypatch):
    monkeypatch.setattr(timing, "_ROTATION_BYTES", 1)
    op = ops.OPS["rms_norm"]
    (reference,) = [c for c in op.contenders if c.name == "reference"]
    sets = ops.input_sets(op.inputs, (32, 64))
    kept = ops.keep(reference, sets)
    assert any(array is sets[0]["x"] for array in kept[0])  # not a copy
    (call,) = ops.prepare(reference, sets, "backward", kept=kept)
    assert formulas.wrong_result(call(), formulas.exact(reference.formula, sets[0])) is None
    with pytest.raises(ValueError, match="the forward kept"):
        ops.prepare(reference, sets, "backward", kept=[kept[0][:1]])


def test_a_wrong_result_is_refused():
    expected = {"y": jnp.ones(8), "dx": jnp.ones(8)}
    assert formulas.wrong_result({"y": jnp.ones(8) * 1.01}, expected) is None
    reason = formulas.wrong_result({"y": jnp.ones(8), "dx": jnp.ones(8) * 1.03}, expected)
    assert reason is not None and "dx" in reason
    assert formulas.wrong_result({"y": jnp.full(8, jnp.nan)}, expected) is not None


def test_reference_keeps_no_float32_copy_for_its_backward():
    (reference,) = [c for c in ops.OPS["rms_norm"].contenders if c.name == "reference"]
    x, weight = jnp.zeros((32, 64), jnp.bfloat16), jnp.zeros(64, jnp.bfloat16)
    vjp = jax.eval_shape(lambda *args: jax.vjp(reference.fn, *args)[1], x, weight)
    kept = [leaf for leaf in jax.tree.leaves(vjp) if leaf.size >= 32 * 64]
    assert [leaf.dtype for leaf in kept] == [jnp.bfloat16]


def test_shapes_are_read_as_they_are_written():
    for shape in (*shapes.NORM, *shapes.SWIGLU, *shapes.LOSS):
        assert shapes.parse(shapes.label(shape)) == shape
