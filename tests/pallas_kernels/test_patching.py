"""`patch` on modules that other people might write: those that it recognizes and those it keeps."""

import copy
import functools
import pickle  # noqa: TID251  of our own objects, in one process
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import pallas_kernels
from pallas_kernels import explain, patch
from pallas_kernels.fp8 import Fp8DotGeneral
from support.foreign_modules import (
    BF16,
    F32,
    D,
    Einsums,
    FloatNorm,
    Fused,
    Model,
    Projections,
    Remat,
    RoundingNorm,
    shuffled,
)
from support.numerics import assert_as_accurate, quick_jit, value_and_grads

pytestmark = pytest.mark.usefixtures("fast_compilation", "usual_promotion")


@pytest.fixture
def usual_promotion():
    """The code of others lets JAX promote dtypes."""
    with jax.numpy_dtype_promotion("standard"):
        yield


def flax_norm(**options: Any):
    return nnx.RMSNorm(D, rngs=nnx.Rngs(0), **options)


def norm_of(name: str, eps: float, offset: float = 0.0):
    def formula(p, x):
        return x / jnp.sqrt(jnp.mean(x * x, -1, keepdims=True) + eps) * (p[name] + offset)

    return formula


def mlp_of(gate, up, down):
    return lambda p, x: (jax.nn.silu(x @ gate(p)) * (x @ up(p))) @ down(p)


def plain(name: str):
    return lambda p: p[name]


def transposed(name: str):
    return lambda p: p[name].T


def half(axis: int | None, i: int):
    """A half of the array that `Fused` has."""
    if axis is None:
        return lambda p: jnp.split(p["wi"], 2, axis=1)[i]
    return lambda p: jnp.take(p["wi"], i, axis=axis)


EINSUMS = mlp_of(transposed("gate_proj"), transposed("up_proj"), transposed("down_proj"))
PROJECTIONS = mlp_of(*map(plain, ("dense.w2.kernel", "dense.w1.kernel", "dense.w3.kernel")))
HALVES = "swiglu_mlp(wi[first half of axis AXIS], wi[second half of axis AXIS], wo)"
# A function that makes a module, the text of the operation in its place, and its formula.
RECOGNIZED = {
    "flax": (
        lambda: flax_norm(epsilon=1e-3, dtype=BF16),
        "rms_norm(weight=scale, eps=0.001)",
        norm_of("scale", 1e-3),
    ),
    "flax, promotes": (flax_norm, "rms_norm(weight=scale, eps=1e-06)", norm_of("scale", 1e-6)),
    "offset": (
        FloatNorm,
        "rms_norm(weight=w, eps=0.0003, weight_offset=1)",
        norm_of("w", 3e-4, 1.0),
    ),
    "rounds": (
        RoundingNorm,
        "rms_norm(weight=gamma, eps=2.5e-05, casting='llama')",
        norm_of("gamma", 2.5e-5),
    ),
    "linear layers": (
        Projections,
        "swiglu_mlp(dense.w2.kernel, dense.w1.kernel, dense.w3.kernel)",
        PROJECTIONS,
    ),
    "float32": (
        lambda: Projections(None),
        "swiglu_mlp(dense.w2.kernel, dense.w1.kernel, dense.w3.kernel)",
        PROJECTIONS,
    ),
    "transposed": (Einsums, "swiglu_mlp(gate_proj.T, up_proj.T, down_proj.T)", EINSUMS),
    "remat": (Remat, "swiglu_mlp(gate_proj.T, up_proj.T, down_proj.T, save='x')", EINSUMS),
    **{
        f"fused {axis}": (
            functools.partial(Fused, axis),
            HALVES.replace("AXIS", "1" if axis is None else str(axis)),
            mlp_of(half(axis, 0), half(axis, 1), plain("wo")),
        )
        for axis in (None, 0, 1)
    },
}


def parameters(module) -> dict[str, Any]:
    flat = nnx.to_flat_state(nnx.state(module, nnx.Param))
    return {".".join(map(str, path)): v[...] for path, v in flat}


@functools.cache
def input_and_cotangent(dtype: Any):
    rng = np.random.default_rng(0)
    return tuple(jnp.asarray(rng.normal(size=(2, 32, D)), dtype) for _ in range(2))


def results(module, dtype: Any):
    """The value and the gradients for all parameters and the input, by name."""
    graphdef, state = nnx.split(module)
    x, dy = input_and_cotangent(dtype)

    def run(state, x):
        y, vjp = jax.vjp(lambda state, x: nnx.merge(graphdef, state)(x), state, x)
        return y, vjp(dy.astype(y.dtype))

    y, (dstate, dx) = quick_jit(run)(state, x)
    return {"y": y, "x": dx} | {
        ".".join(map(str, path)): v[...] for path, v in nnx.to_flat_state(dstate)
    }


LONGER = ("float32", "flax, promotes", "fused 0", "fused 1", "transposed")


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.full if n in LONGER else ()) for n in RECOGNIZED]
)
def test_modules_that_are_recognized_keep_their_values_and_gradients(name):
    make, text, formula = RECOGNIZED[name]
    # XLA for CPUs lacks a product of bfloat16 in this layout, unless it optimizes.
    dtype = F32 if formula is EINSUMS else BF16
    module = shuffled(make())
    before = results(module, dtype)
    (found,) = patch(module).modules
    assert found.operation == text
    after = results(module, dtype)
    assert {k: a.dtype for k, a in after.items()} == {k: a.dtype for k, a in before.items()}
    with jax.enable_x64(True):
        wide = lambda a: jnp.asarray(np.asarray(a, np.float64))
        p = {k: wide(a) for k, a in parameters(module).items()}
        x, dy = map(wide, input_and_cotangent(dtype))
        y, *gradients = quick_jit(functools.partial(value_and_grads, formula))((p, x), dy)
        exact = dict(zip([*sorted(p), "x"], map(np.asarray, gradients), strict=True))
        exact["y"] = np.asarray(y)
    assert_as_accurate(*([r[k] for k in exact] for r in (after, before, exact)), names=exact)


class LargeEpsilon(nnx.Module):
    """Has its epsilon beside the root, and not under it."""

    def __init__(self):
        self.scale = nnx.Param(jnp.ones(D))

    def __call__(self, x):
        return x / (jnp.sqrt(jnp.mean(x * x, -1, keepdims=True)) + 1e-6) * self.scale[...]


class Clamped(Einsums):
    def __call__(self, x):
        dot = lambda x, w: x @ w[...].T
        gate = jnp.minimum(dot(x, self.gate_proj), 7.0)
        return dot(jax.nn.silu(gate) * dot(x, self.up_proj), self.down_proj)


class WithDropout(Einsums):
    def __init__(self, **options):
        super().__init__()
        self.dropout = nnx.Dropout(0.5, rngs=nnx.Rngs(0), **options)

    def __call__(self, x):
        return self.dropout(super().__call__(x))


class Counting(Einsums):
    def __init__(self):
        super().__init__()
        self.count = 0

    def __call__(self, x):
        self.count += 1
        return super().__call__(x)


class Adding(nnx.Module):
    def __init__(self):
        self.scale = nnx.Param(jnp.ones(D))

    def __call__(self, x, residual):
        return (x + residual) * self.scale[...]


class VariableEpsilon(nnx.Module):
    """Has its epsilon in a variable, which may have another value in each module."""

    def __init__(self, eps):
        self.scale = nnx.Param(jnp.ones(D))
        self.eps = nnx.Variable(jnp.float32(eps))

    def __call__(self, x):
        mean = jnp.mean(x * x, -1, keepdims=True)
        return x * jax.lax.rsqrt(mean + self.eps[...]) * self.scale[...]


class Failing(FloatNorm):
    def __call__(self, x):
        raise RuntimeError("only under a mesh")


REFUSED = {
    "LayerNorm": (lambda: nnx.LayerNorm(D, rngs=nnx.Rngs(0)), "an RMSNorm has one vector, and"),
    "LayerNorm without bias": (
        lambda: nnx.LayerNorm(D, use_bias=False, rngs=nnx.Rngs(0)),
        "differs from RMSNorm by",
    ),
    "epsilon beside the root": (LargeEpsilon, "differs from RMSNorm by"),
    "GELU": (lambda: Projections(activation=nnx.gelu), "differs from a gated MLP with silu by"),
    "biases": (lambda: Projections(use_bias=True), "a gated MLP has three matrices, and this has"),
    "precision": (
        lambda: Projections(precision=jax.lax.Precision.HIGHEST),
        "products have a precision of their own",
    ),
    "FP8": (
        lambda: Projections(dot_general=Fp8DotGeneral("rowwise")),
        "`dense.w1.dot_general` is an Fp8DotGeneral; call patch before you set it",
    ),
    "clamped": (Clamped, "differs from a gated MLP with silu by"),
    "dropout": (WithDropout, "in evaluation mode, for example by dropout"),
    "dropout in evaluation": (lambda: WithDropout(deterministic=True), "in training mode"),
    "attributes": (Counting, "changes its attributes"),
    "two inputs": (Adding, r"its call takes \(x, residual\), and not one array"),
    "epsilon in a variable": (
        lambda: VariableEpsilon(1e-6),
        "its result depends on the variable `eps`, which is no parameter",
    ),
    "abstract epsilon": (
        lambda: nnx.eval_shape(lambda: VariableEpsilon(1e-2)),
        "its result depends on the variable `eps`, which is no parameter",
    ),
    "failing": (Failing, "raises only under a mesh"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_modules_that_are_left_have_a_reason(name):
    make, reason = REFUSED[name]
    module = make()
    cls = type(module)
    (left,) = patch(module).left
    assert type(module) is cls and left.operation is None
    with pytest.raises(AssertionError, match=reason):
        raise AssertionError(left.reason)


def test_other_modules_are_no_candidates(unchecked_shapes):
    model = nnx.Dict(
        attention=nnx.MultiHeadAttention(2, D, rngs=nnx.Rngs(0)),
        embed=nnx.Embed(7, D, rngs=nnx.Rngs(0)),
        conv=nnx.Conv(D, D, 3, rngs=nnx.Rngs(0)),
    )
    assert patch(model).modules == ()
    with pytest.raises(TypeError, match=r"takes an nnx\.Module, got a dict"):
        patch({})  # pyright: ignore[reportArgumentType]


@functools.cache
def patched_model():
    """A model with other numbers than it starts from, and what `patch` says. Tests copy it."""
    model = shuffled(Model(2))
    return model, patch(model)


TABLE = """\
path               module       runs now
layers.*.mlp (2)   Projections  swiglu_mlp(dense.w2.kernel, dense.w1.kernel, dense.w3.kernel)
layers.*.norm (2)  RMSNorm      rms_norm(weight=scale, eps=1e-05)
norm               RMSNorm      rms_norm(weight=scale, eps=1e-05)"""


def test_only_the_calls_change():
    model, patched = patched_model()
    assert str(patched) == TABLE
    assert len(patched.replaced) == 5 and patched.left == ()
    fresh = shuffled(Model(2))
    assert jax.tree.structure(nnx.state(fresh)) == jax.tree.structure(nnx.state(model))
    assert parameters(fresh).keys() == parameters(model).keys()
    norm, mlp = model.norm, model.layers[0].mlp
    assert isinstance(norm, nnx.RMSNorm) and isinstance(mlp, Projections)
    assert norm.epsilon == 1e-5 and mlp.activation is nnx.silu
    assert type(mlp) is type(model.layers[1].mlp)
    # A second patch has nothing to do.
    assert patch(model).modules == ()


def test_undo():
    module = Projections()
    patched = patch(module)
    assert nnx.graphdef(module) != nnx.graphdef(Projections())
    for _ in range(2):
        patched.undo()
        assert type(module) is Projections
        assert nnx.graphdef(module) == nnx.graphdef(Projections())


def operations(fn, *args):
    return [choice.operation for choice in explain(fn, *args).choices]


def test_copies_and_definitions_keep_the_operations():
    model, _ = patched_model()
    x = jnp.zeros((2, 8), jnp.int32)
    expected = operations(model, x)
    assert expected.count("rms_norm") == 3 and expected.count("swiglu_mlp") == 2
    graphdef, state = nnx.split(model)
    one, two = FloatNorm(), FloatNorm()
    for module in (one, two):
        patch(module)
    assert nnx.graphdef(one) == nnx.graphdef(two)
    assert hash(nnx.graphdef(one)) == hash(nnx.graphdef(two))
    for other in (nnx.clone(model), copy.deepcopy(model), nnx.merge(graphdef, state)):
        assert operations(other, x) == expected
    assert nnx.graphdef(nnx.clone(model)) == graphdef
    layer = model.layers[0].norm
    unpickled = lambda a: pickle.loads(pickle.dumps(a))  # noqa: S301  of our own object
    assert type(unpickled(layer)) is type(layer)
    assert unpickled(nnx.graphdef(layer)) == nnx.graphdef(layer)


def test_transforms_of_nnx():
    mlp = patched_model()[0].layers[0].mlp
    x = jnp.ones((2, 3, D))
    total = lambda mlp: jnp.sum(mlp(x) ** 2)
    expected = nnx.jit(nnx.grad(total))(mlp)
    again = nnx.jit(nnx.grad(nnx.remat(total)))(mlp)
    assert_close = functools.partial(np.testing.assert_allclose, rtol=1e-2, atol=1e-3)
    jax.tree.map(assert_close, expected, again)


def test_layers_that_are_stacked_for_a_scan():
    layers = nnx.vmap(lambda key: Stacked(nnx.Rngs(key)))(jax.random.split(jax.random.key(0), 3))
    x = jnp.asarray(np.random.default_rng(0).normal(size=(2, 4, D)), BF16)

    def forward(layers, x):
        scan = nnx.scan(lambda x, layer: (layer(x), None), in_axes=(nnx.Carry, 0))
        return scan(x, layers)[0]

    before = nnx.jit(forward)(layers, x)
    patched = patch(layers)
    assert [m.operation for m in patched.replaced] == [
        "swiglu_mlp(dense.w2.kernel, dense.w1.kernel, dense.w3.kernel)",
        "rms_norm(weight=scale, eps=1e-06)",
    ]
    assert operations(nnx.jit(forward), layers, x) == ["rms_norm", "swiglu_mlp"]
    np.testing.assert_allclose(nnx.jit(forward)(layers, x), before, rtol=0.1, atol=0.05)
    # Outside of the scan the parameters are stacks, which no layer has.
    with pallas_kernels.require_kernels():
        with pytest.raises(NotImplementedError, match="own code, because its parameters are stack"):
            layers.norm(x)


class Stacked(nnx.Module):
    def __init__(self, rngs):
        self.norm = nnx.RMSNorm(D, dtype=BF16, rngs=rngs)
        self.mlp = Projections()

    def __call__(self, x):
        return x + self.mlp(self.norm(x))


def test_a_model_without_arrays():
    (found,) = patch(nnx.eval_shape(FloatNorm)).replaced
    assert found.operation == RECOGNIZED["offset"][1]


def test_arguments_that_change_nothing_are_accepted():
    module = Projections()
    patch(module)
    x = jnp.zeros((2, 3, D), BF16)
    for options in ({}, {"deterministic": True}, {"deterministic": False, "out_sharding": None}):
        found = explain(lambda x, o=options: module(x, **o), x)
        assert [c.reason is None or "its own code" not in c.reason for c in found.choices] == [True]
    assert operations(lambda x: module(inputs=x), x) == ["swiglu_mlp"]
    with pytest.raises(TypeError, match="unknown"):
        module(x, **{"unknown": True})


class WithMask(FloatNorm):
    def __call__(self, x, mask=None, gain=1.0):
        y = super().__call__(x) * gain
        return y if mask is None else jnp.where(mask, y, 0)


class LoRAParam(nnx.Param):
    pass


@pytest.mark.parametrize(
    "change, dtype, options, reason",
    [
        (None, BF16, {"mask": np.ones((2, 3, 1), bool)}, "its argument mask=<ndarray> may change"),
        (None, BF16, {"gain": 2.0}, "its argument gain=2.0 may change the result"),
        (None, jnp.float16, {}, "its input is float16, and it was compared for float32, bfloat16"),
        ("lora", F32, {}, "it has other parameters than when it was patched: lora"),
    ],
)
def test_where_the_comparison_says_nothing_the_module_runs_its_own_code(
    change, dtype, options, reason
):
    module: Any = WithMask()
    assert len(patch(module).replaced) == 1
    if change is not None:
        module.lora = LoRAParam(jnp.zeros(D))
    x = jnp.ones((2, 3, D), dtype)
    np.testing.assert_array_equal(module(x, **options), WithMask()(x, **options))
    call = lambda x: module(x, **options)
    assert reason in str(explain(call, x))
    with pallas_kernels.require_kernels(), pytest.raises(NotImplementedError, match="own code"):
        call(x)
