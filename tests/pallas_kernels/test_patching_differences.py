"""`patch` on modules that differ from an operation in their derivatives or in few inputs."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import pallas_kernels
from pallas_kernels import explain, patch
from support.foreign_modules import BF16, F32, D, Einsums, Projections
from support.numerics import assert_as_accurate

pytestmark = pytest.mark.usefixtures("fast_compilation", "usual_promotion")


@pytest.fixture
def usual_promotion():
    """The code of others lets JAX promote dtypes."""
    with jax.numpy_dtype_promotion("standard"):
        yield


def rms(x, scale, eps: Any = 1e-6, axes: Any = -1):
    y = x.astype(F32)
    return (y * jax.lax.rsqrt(jnp.mean(y * y, axes, keepdims=True) + eps) * scale).astype(x.dtype)


class Norm(nnx.Module):
    """A norm whose call is a function of its scale and the input."""

    def __init__(self, fn: Any = lambda scale, x: rms(x, scale)):
        self.scale = nnx.Param(jnp.ones(D))
        self.fn = fn

    def __call__(self, x):
        return self.fn(self.scale[...], x)


class MLP(Einsums):
    """An MLP with functions of the gate and of the product."""

    def __init__(self, of_gate: Any = lambda x: x, of_product: Any = lambda x: x):
        super().__init__()
        self.of_gate, self.of_product = of_gate, of_product

    def __call__(self, x):
        dot = lambda x, w: x @ w[...].T.astype(x.dtype)
        gate = self.of_gate(jax.nn.silu(dot(x, self.gate_proj)))
        return dot(self.of_product(gate * dot(x, self.up_proj)), self.down_proj)


@jax.custom_vjp
def clipped_gradient(x):
    return x


clipped_gradient.defvjp(lambda x: (x, None), lambda _, g: (jnp.clip(g, -1e-3, 1e-3),))
stop = jax.lax.stop_gradient


def frozen_size(scale, x):
    y = x.astype(F32)
    return (y * stop(jax.lax.rsqrt(jnp.mean(y * y, -1, keepdims=True) + 1e-6)) * scale).astype(
        x.dtype
    )


def only_traced(scale, x):
    """Raises where it runs, and not where it is traced."""

    def fail(x):
        raise RuntimeError("without this device")

    return rms(x + jax.pure_callback(fail, x, x), scale)


class Flagged(nnx.Module):
    """Has its epsilon chosen by a variable that is not floating."""

    def __init__(self, is_small: bool):
        self.scale = nnx.Param(jnp.ones(D))
        self.is_small = nnx.Variable(jnp.asarray(is_small))

    def __call__(self, x):
        return rms(x, self.scale[...], jnp.where(self.is_small[...], 1e-6, 1e-2))


SMOOTH = "only smooth operations with their usual derivatives"
VARIABLE = "its result depends on the variable `is_small`, which is no parameter"
REFUSED = {
    "frozen scale": (lambda: Norm(lambda scale, x: rms(x, stop(scale))), SMOOTH),
    "frozen size": (lambda: Norm(frozen_size), "contains `stop_gradient`, and"),
    "clipped gradient": (
        lambda: Norm(lambda scale, x: rms(clipped_gradient(x), scale)),
        "contains `custom_vjp_call`, and",
    ),
    "frozen gate": (lambda: MLP(stop), "contains `stop_gradient`, and"),
    "absolute scale": (lambda: Norm(lambda scale, x: rms(x, abs(scale))), "differs from RMSNorm"),
    "root of a square": (
        lambda: Norm(lambda scale, x: rms(x, jnp.sqrt(scale * scale))),
        "differs from RMSNorm by",
    ),
    "positive scale": (lambda: Norm(lambda scale, x: rms(x, jnp.maximum(scale, 0))), "differs"),
    "clipped gate": (lambda: MLP(lambda x: x.clip(-1e6, 1e6)), SMOOTH),
    "clipped product": (lambda: MLP(of_product=lambda x: x.clip(-1e9, 1e9)), SMOOTH),
    "two axes": (
        lambda: Norm(lambda scale, x: rms(x, scale, axes=(-2, -1) if x.ndim == 4 else -1)),
        "differs from RMSNorm by",
    ),
    "runs nowhere": (lambda: Norm(only_traced), "its call on random numbers raises"),
    "flag": (lambda: Flagged(True), VARIABLE),
    "abstract flag": (lambda: nnx.eval_shape(lambda: Flagged(True)), VARIABLE),
}


@pytest.mark.parametrize("name", REFUSED)
def test_modules_that_are_left_have_a_reason(name):
    make, reason = REFUSED[name]
    (left,) = patch(make()).left
    assert reason in left.reason


def test_an_epsilon_below_all_samples_keeps_a_row_of_zeros():
    module = Norm(lambda scale, x: rms(x, scale, 1e-30))
    (found,) = patch(module).replaced
    assert found.operation == "rms_norm(weight=scale, eps=1e-30)"
    np.testing.assert_array_equal(module(jnp.zeros((2, 3, D))), 0)


@dataclasses.dataclass(frozen=True)
class Config:
    eps: float = dataclasses.field(compare=False)


class Configured(nnx.Module):
    """Has its epsilon in an attribute that equals that of another module."""

    def __init__(self, config: Any):
        self.scale = nnx.Param(jnp.ones(D))
        self.config = config

    def __call__(self, x):
        if isinstance(self.config, Config):
            return rms(x, self.scale[...], self.config.eps)
        return rms(x, self.scale[...] + (1.0 if self.config is True else 0.0))


def test_modules_with_equal_attributes_may_differ():
    configs = Config(1e-6), Config(1e-2), True, 1
    found = patch(nnx.List([Configured(config) for config in configs])).modules
    assert [m.operation for m in found] == [
        "rms_norm(weight=scale, eps=1e-06)",
        "rms_norm(weight=scale, eps=0.01)",
        "rms_norm(weight=scale, eps=1e-06, weight_offset=1)",
        "rms_norm(weight=scale, eps=1e-06)",
    ]


class WithArrays(Norm):
    """Has arrays that its call does not read, one of them in no variable."""

    def __init__(self, array: Any):
        super().__init__()
        self.ids, self.mean = nnx.data(array), nnx.BatchStat(jnp.ones(D))


@pytest.mark.parametrize("array", [jnp.arange(3), np.arange(3.0)])
def test_arrays_that_no_result_depends_on(array):
    assert len(patch(WithArrays(array)).replaced) == 1


def test_parameters_that_are_cast_later():
    """As in a training step with float32 masters: the dtypes stay, and the operation runs."""
    x = jnp.asarray(np.random.default_rng(0).normal(size=(2, 8, D)), BF16)
    for make in (lambda: nnx.RMSNorm(D, rngs=nnx.Rngs(0)), lambda: Projections(None)):
        module = make()

        def step(x, module=module):
            graphdef, state = nnx.split(module)
            return nnx.merge(graphdef, jax.tree.map(lambda a: a.astype(BF16), state))(x)

        before, exact = step(x), module(x)
        assert before.dtype == BF16 and exact.dtype == F32
        assert len(patch(module).replaced) == 1
        after = step(x)
        assert after.dtype == BF16
        assert_as_accurate([after], [before], [exact], names=["y"], floor=2**17)
        (choice,) = explain(step, x).choices
        assert "its own code" not in str(choice.reason)


class Layered(Norm):
    """Takes arguments that matter in some calls only."""

    def __call__(self, x, upcast=False, layout=None, intermediate_sharding=None):
        if intermediate_sharding is not None:
            x = jax.lax.with_sharding_constraint(x, intermediate_sharding)
        y = rms(x.astype(F32), self.scale[...])
        y = y if upcast else y.astype(x.dtype)
        return y if layout is None else jax.lax.with_sharding_constraint(y, layout)


@pytest.mark.parametrize(
    "dtype, shape, options, reason",
    [
        (BF16, (2, 3, D), {"upcast": True}, "its argument upcast=True may change the result"),
        (
            F32,
            (2, 3, D),
            {"layout": jax.sharding.PartitionSpec()},
            "its argument layout=P() may change the result",
        ),
        (F32, (1, 1, 2, 3, D), {}, "the rank of its input is 5, and it was compared for 2, 3, 4"),
        (jnp.float16, (2, 3, D), {}, "its input is float16, and it was compared for float32, bfl"),
    ],
)
def test_calls_that_run_the_modules_own_code(dtype, shape, options, reason):
    module: Any = Layered()
    assert len(patch(module).replaced) == 1
    mesh = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    with jax.set_mesh(mesh), pallas_kernels.require_kernels():
        with pytest.raises(NotImplementedError, match="own code") as caught:
            module(jnp.ones(shape, dtype), **options)
    assert reason in str(caught.value)
    with jax.set_mesh(mesh):
        y = module(jnp.ones(shape, dtype), **options)
    assert y.dtype == (F32 if options.get("upcast") else dtype)


def test_a_layout_of_intermediate_arrays_leaves_the_operation():
    """MaxText's MLP gets such an argument in each call."""
    module: Any = Layered()
    assert len(patch(module).replaced) == 1
    mesh = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    with jax.set_mesh(mesh):
        call = lambda x: module(x, intermediate_sharding=jax.sharding.PartitionSpec("data"))
        (choice,) = explain(call, jnp.ones((2, 3, D), F32)).choices
    assert "its own code" not in str(choice.reason)
