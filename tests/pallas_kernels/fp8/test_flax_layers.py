"""Layers of Flax in FP8, beside float64 and the functions. 15 s on one core."""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from flax import linen as nn
from flax import nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from pallas_kernels import linen, patch
from pallas_kernels.fp8 import RECIPES, Fp8DotGeneral, Fp8Einsum, fp8_swiglu_mlp
from pallas_kernels.layers import SwiGLU
from support import foreign_modules
from support.fp8_formulas import SMALL, exact_mlp, exact_of_quantized, make_args, mlp_args
from support.numerics import assert_as_accurate, quick_jit, rounded, value_and_grads

BF16, F32 = jnp.bfloat16, jnp.float32
ROWWISE = SMALL["rowwise"]
D, HEADS, SIZE, F = 24, 4, 8, 40
OPTIONS: dict[str, Any] = {"use_bias": False, "dtype": BF16, "dot_general": Fp8DotGeneral(ROWWISE)}
RNGS = nnx.Rngs(0)
KERNEL = ("kernel",)
EINSUM: dict[str, Any] = {"dtype": BF16, "rngs": RNGS, "einsum_op": Fp8Einsum(ROWWISE)}


def of_nnx(module, *paths):
    """The module as a function of its input and of its parameters at these paths."""
    graphdef, state = nnx.split(module)

    def call(x, *kernels):
        flat = dict(nnx.to_flat_state(state))
        flat |= {p: flat[p].replace(k) for p, k in zip(paths, kernels, strict=True)}
        return nnx.merge(graphdef, nnx.from_flat_state(flat))(x)

    return call


def of_linen(module):
    return lambda x, kernel: module.apply({"params": {"kernel": kernel}}, x)


# The function, and the axes of the kernel that are contracted and that are not.
LINEAR = {
    "nnx.Linear": (of_nnx(nnx.Linear(D, 13, rngs=RNGS, **OPTIONS), KERNEL), (D,), (13,)),
    "nnx.LinearGeneral to heads": (
        of_nnx(nnx.LinearGeneral(D, (HEADS, SIZE), rngs=RNGS, **OPTIONS), KERNEL),
        (D,),
        (HEADS, SIZE),
    ),
    "nnx.LinearGeneral of heads": (
        of_nnx(nnx.LinearGeneral((HEADS, SIZE), D, axis=(-2, -1), rngs=RNGS, **OPTIONS), KERNEL),
        (HEADS, SIZE),
        (D,),
    ),
    "nnx.Einsum to heads": (
        of_nnx(nnx.Einsum("btd,dnh->btnh", (D, HEADS, SIZE), **EINSUM), KERNEL),
        (D,),
        (HEADS, SIZE),
    ),
    "nnx.Einsum of heads": (
        of_nnx(nnx.Einsum("btnh,nhd->btd", (HEADS, SIZE, D), **EINSUM), KERNEL),
        (HEADS, SIZE),
        (D,),
    ),
    "nn.Dense": (of_linen(nn.Dense(13, **OPTIONS)), (D,), (13,)),
    "nn.DenseGeneral": (
        of_linen(nn.DenseGeneral(D, axis=(-2, -1), **OPTIONS)),
        (HEADS, SIZE),
        (D,),
    ),
}


def check_linear(fn, contracted, columns, place=lambda *arrays: arrays, slack=(1.2, 1.2), **parts):
    """Compares the product and its gradients with those of the quantized numbers in float64.

    Args:
      fn: Function of the input and the kernel.
      contracted: Axes of the kernel that are contracted.
      columns: Its other axes.
      place: Function that puts the input, the kernel and the cotangent on a mesh.
      slack: Ratios of errors that are allowed for the product and the input's gradient, and for
        the kernel's gradient.
      **parts: Numbers of parts of K and of N, as for `exact_of_quantized`.
    """
    sizes = math.prod(contracted), math.prod(columns)
    # A kernel of bfloat16 numbers, because the layers round it to bfloat16 first.
    x, (weight,), (dy,) = make_args((4, 6, sizes[0]), sizes[1:], weight_dtype=BF16)
    args = (
        x.reshape(4, 6, *contracted),
        weight.reshape(*contracted, *columns).astype(F32),
        dy.reshape(4, 6, *columns),
    )
    got = quick_jit(lambda x, w, dy: value_and_grads(fn, (x, w), dy))(*place(*args))
    like = args[2], args[0], args[1]
    assert [(a.shape, a.dtype) for a in got] == [(a.shape, a.dtype) for a in like]
    exact = exact_of_quantized(ROWWISE, x, [weight], [dy], **parts)
    exact = [e.reshape(g.shape) for e, g in zip(exact, got, strict=True)]
    best = rounded(exact, [dy, x, weight])  # the layers round the kernel's gradient to bfloat16
    assert_as_accurate(got[:2], best[:2], exact[:2], names=("y", "dx"), slack=slack[0])
    assert_as_accurate(got[2:], best[2:], exact[2:], names=("dw",), slack=slack[1])
    return got


@pytest.mark.parametrize("name", LINEAR)
def test_linear_layers(name):
    check_linear(*LINEAR[name])


def test_any_order_of_axes():
    """A product of `[N, K]`, as `attend` of an embedding has, and of inputs with K in front."""
    product = Fp8DotGeneral(ROWWISE)
    fn = lambda x, w: product(x.transpose(2, 0, 1), w.T, (((0,), (1,)), ((), ())))
    check_linear(lambda x, w: fn(x, w.astype(BF16)), (D,), (13,))


# The axes `fsdp` and `tensor` that split the input, the kernel, the cotangent and the product, and
# the parts of K and of N in which devices compute.
SPLIT = {
    "to heads, channels": (
        "nnx.LinearGeneral to heads",
        (P("fsdp"), P("fsdp", None, "tensor"), P("fsdp"), P("fsdp")),
        {},
    ),
    "to heads": (
        "nnx.LinearGeneral to heads",
        (P("fsdp"), P("fsdp", "tensor"), P("fsdp", None, "tensor"), P("fsdp", None, "tensor")),
        {"parts_of_n": [2]},
    ),
    "of heads": (
        "nnx.LinearGeneral of heads",
        (P("fsdp", None, "tensor"), P("tensor", "fsdp"), P("fsdp"), P("fsdp")),
        {"parts_of_k": 2},
    ),
}


@pytest.mark.parametrize("kind", [AxisType.Explicit, AxisType.Auto])
@pytest.mark.parametrize("name", SPLIT)
def test_meshes(name, kind, caplog):
    """Kernels and inputs of heads: an axis splits the heads, or the channels of each head."""
    mesh = jax.make_mesh((2, 2), ("fsdp", "tensor"), axis_types=(kind,) * 2)
    layer, (*of_args, of_product), parts = SPLIT[name]
    put = lambda a, spec: jax.device_put(a, NamedSharding(mesh, spec))
    with jax.set_mesh(mesh):
        # Each device rounds its part of the sum over the tokens to bfloat16, and its part of a sum
        # over K or N.
        place = lambda *args: map(put, args, of_args)
        y, dx, dw = check_linear(*LINEAR[layer], place=place, slack=(2.0, 2.0), **parts)
    if kind == AxisType.Explicit:
        warning = "gathers axis 2 of (24, 4, 8), which the mesh axes ('tensor',) split"
        assert (warning in caplog.text) == (name == "to heads, channels")
        whole = lambda spec, a: P(*spec, *[None] * (a.ndim - len(spec)))
        for a, spec in ((y, of_product), (dx, of_args[0]), (dw, of_args[1])):
            assert jax.typeof(a).sharding.spec == whole(spec, a)


def check_mlp(layer, args):
    """Compares an MLP and its gradients with `fp8_swiglu_mlp`: it errs as the function does."""
    function = lambda *args: fp8_swiglu_mlp(*args, recipe=ROWWISE)
    graded = lambda fn: quick_jit(lambda *args: value_and_grads(fn, args[:-1], args[-1]))
    got, plain = (graded(fn)(*args) for fn in (layer, function))
    exact = [e.reshape(g.shape) for e, g in zip(exact_mlp(*args), got, strict=True)]
    assert_as_accurate(got, plain, exact, names=("y", "dx", "dw_gate", "dw_up", "dw_down"))


def test_gated_mlp():
    paths = [(f"{name}_proj", "kernel") for name in ("gate", "up", "down")]
    module = SwiGLU(D, F, fp8=ROWWISE, rngs=RNGS)
    check_mlp(of_nnx(module, *paths), mlp_args((2, 13, D), F))


def test_gated_mlp_of_linen():
    def layer(x, *weights):
        names = "gate_proj", "up_proj", "down_proj"
        params = {n: {"kernel": w} for n, w in zip(names, weights, strict=True)}
        return linen.SwiGLU(F, fp8=ROWWISE).apply({"params": params}, x)

    check_mlp(layer, mlp_args((2, 13, D), F))


def test_patched_mlps():
    """`patch` gives MLPs the recipe; and nothing to a module that is patched without it."""
    paths = [("dense", name, "kernel") for name in ("w2", "w1", "w3")]
    module = foreign_modules.Projections()
    patched = patch(module, fp8=ROWWISE)
    text = "fp8_swiglu_mlp(dense.w2.kernel, dense.w1.kernel, dense.w3.kernel, recipe='rowwise')"
    assert [m.operation for m in patched.modules] == [text]
    check_mlp(of_nnx(module, *paths), mlp_args((2, 13, foreign_modules.D), foreign_modules.F))
    assert patch(module, fp8=ROWWISE).modules == ()
    with pytest.raises(ValueError, match=r"was patched with fp8=Recipe.*and now fp8=None; pass"):
        patch(module)
    patched.undo()
    patched = patch(module, fp8="rowwise")
    assert patch(module, fp8=RECIPES["rowwise"]).modules == ()  # the same recipe
    patched.undo()
    assert [m.operation for m in patch(module).modules] == [
        text[4:].replace(", recipe='rowwise'", "")
    ]


def test_patched_mlps_that_are_computed_again():
    """A module with a `jax.checkpoint` of its own keeps nothing but its input."""
    module = foreign_modules.Remat()
    patch(module, fp8=ROWWISE)
    x = jnp.ones((2, 13, foreign_modules.D), BF16)
    _, vjp = jax.vjp(lambda x: module(x), x)
    kept = [a.dtype for a in jax.tree.leaves(vjp) if hasattr(a, "dtype")]
    assert BF16 in kept and not {jnp.dtype("int8"), jnp.dtype("float8_e4m3fn")} & {*kept}


def test_layers_of_linear_layers():
    """`from_nnx` shares the parameters and takes the recipe."""
    linear = lambda *sizes: nnx.Linear(*sizes, use_bias=False, rngs=RNGS)
    gate, up, down = linear(D, F), linear(D, F), linear(F, D)
    mlp = SwiGLU.from_nnx(gate, up, down, fp8=ROWWISE)
    assert mlp.gate_proj.kernel is gate.kernel
    x = jnp.ones((3, D), BF16)
    weights = (layer.kernel[...] for layer in (gate, up, down))
    assert jnp.array_equal(mlp(x), fp8_swiglu_mlp(x, *weights, recipe=ROWWISE))


def test_layers_of_one_recipe_have_one_graph_definition():
    """Otherwise each new model would be compiled again."""

    def make(recipe):
        mlp = SwiGLU(D, F, fp8=recipe, rngs=RNGS)
        linear = nnx.Linear(D, D, dot_general=Fp8DotGeneral(recipe), rngs=RNGS)
        return nnx.graphdef(nnx.List([mlp, linear]))

    again = dataclasses.replace(RECIPES["rowwise"])
    assert make(RECIPES["rowwise"]) == make(again) != make(RECIPES["tensorwise"])
    assert make("rowwise") == make("rowwise") != make("tensorwise")


def product(**options):
    x, w = jnp.ones((2, 3, D), BF16), jnp.ones((D, 5), BF16)
    return Fp8DotGeneral(ROWWISE)(x, w, (((2,), (0,)), ((), ())), **options)


def test_arguments_of_dot_general():
    expected = product()
    for options in ({"precision": "default"}, {"preferred_element_type": BF16}):
        assert jnp.array_equal(product(**options), expected)
    with pytest.raises(ValueError, match="precision='highest', but the operands are in FP8"):
        product(precision="highest")
    with pytest.raises(ValueError, match="dtype of the input, bfloat16; leave it at None"):
        product(preferred_element_type=F32)
    # As many numbers as the kernel contracts, in axes of other sizes: heads in the wrong order.
    heads = nnx.LinearGeneral((HEADS, SIZE), D, axis=(-2, -1), rngs=RNGS, **OPTIONS)
    with pytest.raises(
        ValueError, match=r"sizes \(8, 4\) in the input .* and \(4, 8\) in the weight"
    ):
        heads(jnp.ones((2, SIZE, HEADS), BF16))
    scores = (((2,), (2,)), ((0,), (0,)))
    with pytest.raises(ValueError, match=r"has batch axes.*jax\.lax\.dot_general"):
        Fp8DotGeneral(ROWWISE)(jnp.ones((2, 3, D)), jnp.ones((2, 3, D)), scores)


def test_subscripts():
    """The axes of the result have any order. What is no linear layer is an error."""
    x, w = make_args((4, 6, D), (HEADS * SIZE,))[:2]
    w = w[0].reshape(D, HEADS, SIZE)
    fp8 = Fp8Einsum(ROWWISE)
    y = fp8("btd,dnh->btnh", x, w)
    assert y.shape == (4, 6, HEADS, SIZE)
    assert jnp.array_equal(fp8("b t d, d n h -> n b t h", x, w), y.transpose(2, 0, 1, 3))
    assert jnp.array_equal(fp8("btd,nhd->bnth", x, w.transpose(1, 2, 0)), y.swapaxes(1, 2))
    wrong = "btd,dnh->bth", "btd,bnh->btn", "...d,dnh->...nh", "btd,dnh", "btd,ddh->bth", "btd->btd"
    for subscripts in wrong:
        with pytest.raises(ValueError, match=r"is no product.*give this layer jnp\.einsum"):
            fp8(subscripts, x, w)


@pytest.mark.usefixtures("unchecked_shapes")
def test_options_that_fp8_does_not_have():
    wrong: Any = "fast"
    with pytest.raises(ValueError, match="recipe='fast' must be"):
        Fp8DotGeneral(wrong)
    with pytest.raises(ValueError, match="recipe='fast' must be"):
        Fp8Einsum(wrong)
    with pytest.raises(ValueError, match="recipe='fast' must be"):
        SwiGLU(D, F, fp8=wrong, rngs=RNGS)
    x = jnp.ones((3, D), BF16)
    given: list[dict[str, Any]] = [
        {"save": "all"},
        {"save": "x", "chunk_size": 8},
        {"implementation": "xla"},
    ]
    for options in given:
        (name, value) = next(iter(options.items()))
        with pytest.raises(ValueError, match=f"{name}='{value}' is for MLPs without FP8"):
            SwiGLU(D, F, fp8="rowwise", rngs=RNGS, **options)
        with pytest.raises(ValueError, match=f"{name}='{value}' is for MLPs without FP8"):
            linen.SwiGLU(F, fp8="rowwise", **options).init(jax.random.key(0), x)
    with pytest.raises(ValueError, match="recipe='fast' must be"):
        patch(foreign_modules.Projections(), fp8=wrong)
    with pytest.raises(ValueError, match="fp8='rowwise' is for layers without biases"):
        SwiGLU(D, F, use_bias=True, fp8="rowwise", rngs=RNGS)
