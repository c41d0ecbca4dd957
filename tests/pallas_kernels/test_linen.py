"""The Linen modules beside Linen's own: values, gradients, parameters. 10 s on one core."""

import dataclasses
import functools
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from jax.sharding import PartitionSpec as P

import pallas_kernels
from pallas_kernels import linear_cross_entropy, rms_norm
from pallas_kernels.head import LOSS_OPTIONS
from pallas_kernels.linen import AddRMSNorm, LinearCrossEntropy, RMSNorm, SwiGLU
from support.framework_models import linen_model
from support.frameworks import check, has_shape, normal, not_hidden_states, shuffled
from support.numerics import assert_as_accurate, quick_jit

BF16, F32 = jnp.bfloat16, jnp.float32
B, S, D, F, V = 2, 9, 20, 33, 37
LABELS = jnp.arange(B * S).reshape(B, S) % V
KEY = jax.random.key(0)

pytestmark = pytest.mark.usefixtures("fast_compilation")


class TheirAddRMSNorm(nn.Module):
    dtype: jnp.dtype

    @nn.compact
    def __call__(self, x, residual):
        total = x + residual.astype(x.dtype)
        scale = self.param("scale", nn.initializers.ones, (x.shape[-1],))
        norm = nn.RMSNorm(dtype=self.dtype, use_scale=False)(total)
        return norm * scale.astype(x.dtype), total


class TheirSwiGLU(nn.Module):
    dtype: jnp.dtype

    @nn.compact
    def __call__(self, x):
        dense = functools.partial(nn.Dense, use_bias=False, dtype=self.dtype)
        gate, up = dense(F, name="gate_proj")(x), dense(F, name="up_proj")(x)
        return dense(x.shape[-1], name="down_proj")(nn.silu(gate) * up)


class TheirHead(nn.Dense):
    features: int = V

    def __call__(self, x, *labels):
        logits = super().__call__(x)
        logits = logits.astype(jnp.promote_types(F32, x.dtype))
        if not labels:
            return logits
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, *labels)
        return jnp.mean(losses)


# Our module, Linen's own for a dtype of the computation, and the number of floating inputs.
LAYERS = {
    "RMSNorm": (RMSNorm(), lambda dtype: nn.RMSNorm(dtype=dtype), 1),
    "AddRMSNorm": (AddRMSNorm(), lambda dtype: TheirAddRMSNorm(dtype), 2),
    "SwiGLU": (SwiGLU(F), lambda dtype: TheirSwiGLU(dtype), 1),
    "LinearCrossEntropy": (
        LinearCrossEntropy(V, use_bias=True),
        lambda dtype: TheirHead(dtype=dtype),
        1,
    ),
}
each_layer = pytest.mark.parametrize("name", LAYERS)


def variables_and_inputs(name, dtype):
    """Shuffled parameters, floating inputs, and labels for the layer that takes them."""
    ours, _, num_inputs = LAYERS[name]
    inputs = [normal((B, S, D), dtype, seed) for seed in range(num_inputs)]
    labels = [LABELS] if name == "LinearCrossEntropy" else []
    return shuffled(quick_jit(ours.init)(KEY, *inputs, *labels)), inputs, labels


@pytest.mark.parametrize(
    "name, dtype",
    [
        *((name, BF16) for name in LAYERS),
        *(pytest.param(name, F32, marks=pytest.mark.full) for name in LAYERS),
    ],
)
def test_errs_as_little_as_linens_own(name, dtype):
    ours, theirs, _ = LAYERS[name]
    params, inputs, labels = variables_and_inputs(name, dtype)
    check(
        lambda params, *inputs: ours.apply(params, *inputs, *labels),
        lambda params, *inputs: theirs(inputs[0].dtype).apply(params, *inputs, *labels),
        params,
        *inputs,
    )


@each_layer
def test_has_the_parameters_of_linens_own(name):
    """Names, shapes, dtypes and first values: a checkpoint loads unchanged."""
    ours, theirs, _ = LAYERS[name]
    _, inputs, labels = variables_and_inputs(name, F32)
    with jax.numpy_dtype_promotion("standard"):
        want = theirs(F32).init(KEY, *inputs)
    chex.assert_trees_all_equal(ours.init(KEY, *inputs, *labels), want)
    params = ours.clone(param_dtype=BF16).init(KEY, *inputs, *labels)
    assert {a.dtype for a in jax.tree.leaves(params)} == {jnp.dtype(BF16)}


@each_layer
def test_the_dtype_of_the_result(name):
    ours, *_ = LAYERS[name]
    for stream in (BF16, F32):
        params, inputs, labels = variables_and_inputs(name, stream)
        for dtype in (None, BF16, F32):
            out = jax.eval_shape(ours.clone(dtype=dtype).apply, params, *inputs, *labels)
            first, *rest = jax.tree.leaves(out)
            assert first.dtype == (F32 if labels else dtype or stream)
            assert all(a.dtype == stream for a in rest)  # the residual stream


@pytest.mark.parametrize("stream, dtype", [(BF16, F32), (F32, BF16), (BF16, jnp.float16)])
def test_the_norm_rounds_its_result_alone_as_linen_does(stream, dtype):
    x = 3 * normal((B, S, D), stream)
    params = {"params": {"scale": jnp.linspace(0.5, 1.5, D)}}
    with jax.numpy_dtype_promotion("standard"):
        theirs: Any = nn.RMSNorm(dtype=dtype).apply(params, x)
    ours: Any = RMSNorm(dtype=dtype).apply(params, x)
    assert ours.dtype == theirs.dtype == dtype
    wide, scale = np.asarray(x, np.float64), np.asarray(params["params"]["scale"], np.float64)
    exact = wide / np.sqrt(np.mean(wide**2, axis=-1, keepdims=True) + 1e-6) * scale
    assert_as_accurate([ours], [theirs], [exact], names=["norm"])


def test_a_wider_result_is_rounded_once():
    x = normal((B, S, D), BF16)
    want = rms_norm(x.astype(F32), jnp.ones(D))
    got = RMSNorm(dtype=F32).apply({"params": {"scale": jnp.ones(D)}}, x)
    chex.assert_trees_all_close(got, want, rtol=1e-6)
    got, total = AddRMSNorm(dtype=F32).apply({"params": {"scale": jnp.ones(D)}}, x, x)
    chex.assert_trees_all_close(got, rms_norm(2 * x.astype(F32), jnp.ones(D)), rtol=1e-6)
    chex.assert_trees_all_equal(total, 2 * x)


@pytest.mark.parametrize("dtype", [None, BF16])
@pytest.mark.parametrize(
    "call",
    [
        lambda x, **kw: RMSNorm(**kw).init(KEY, x),
        lambda x, **kw: AddRMSNorm(**kw).init(KEY, x, jnp.ones((4, 8))),
        lambda x, **kw: SwiGLU(16, **kw).init(KEY, x),
        lambda x, **kw: LinearCrossEntropy(16, **kw).init(KEY, x, jnp.ones(4, jnp.int32)),
        lambda x, **kw: LinearCrossEntropy(16, **kw).init(KEY, x, method="logits"),
    ],
    ids=["norm", "add_norm", "mlp", "loss", "logits"],
)
def test_what_modules_refuse_with_and_without_a_dtype(unchecked_shapes, call, dtype):
    """Linen casts integers and complex numbers. 0.5 s in all."""
    for error, bad, message in not_hidden_states("x"):
        with pytest.raises(error, match=message):
            call(bad, dtype=dtype)


def test_options_reach_the_operations():
    x = normal((B, S, D), BF16)
    options: dict[str, Any] = {"weight_offset": 1.0, "casting": "llama"}
    norm = RMSNorm(epsilon=0.1, **options)
    params = norm.init(KEY, x)
    chex.assert_trees_all_equal(params["params"]["scale"], jnp.zeros(D))  # so the scale is 1
    want = rms_norm(x, jnp.zeros(D), eps=0.1, **options)
    chex.assert_trees_all_equal(norm.apply(params, x), want)

    loss: dict[str, Any] = {"z_loss": 0.1, "reduction": "none", "logit_softcap": 3.0}
    head = LinearCrossEntropy(V, **loss)
    params = head.init(KEY, x, LABELS)
    kernel: Any = params["params"]["kernel"]
    weights = jnp.arange(B * S).reshape(B, S) % 3
    got = head.apply(params, x, LABELS, weights.astype(F32))
    want = linear_cross_entropy(x, kernel.T, LABELS, token_weights=weights, **loss)
    chex.assert_trees_all_close(got, want, rtol=1e-6)
    for text in ("save=x", "chunk_size=4"):
        mlp = SwiGLU(F, save="x", chunk_size=4)
        assert text in str(jax.make_jaxpr(mlp.apply)(mlp.init(KEY, x), x)).replace("'", "")


def test_the_fields_of_the_head_are_the_options_of_the_loss():
    fields = {f.name: f.default for f in dataclasses.fields(LinearCrossEntropy)}
    assert {name: fields[name] for name in LOSS_OPTIONS} == LOSS_OPTIONS


@pytest.mark.parametrize(
    "make, option",
    [
        (RMSNorm, "eps"),
        (AddRMSNorm, "axis_name"),
        (functools.partial(SwiGLU, F), "use_bias"),
        (functools.partial(LinearCrossEntropy, V), "label_smooth"),
    ],
)
def test_an_unknown_argument_fails_at_construction(make, option):
    with pytest.raises(TypeError, match=f"unexpected keyword argument '{option}'"):
        make(**{option: 1})


@pytest.mark.parametrize(
    "layer, name", [(SwiGLU(-1), "intermediate_size"), (LinearCrossEntropy(-1), "features")]
)
def test_wrong_sizes_are_refused(unchecked_shapes, layer, name):
    args = (jnp.ones((2, D)), jnp.zeros(2, jnp.int32))[: 1 if name[0] == "i" else 2]
    with pytest.raises(ValueError, match=f"^{name}=-1 must not be below 0; give the size"):
        layer.init(jax.random.key(0), *args)


def test_logits_are_those_of_the_loss():
    x = normal((B, S, D), F32)
    head = LinearCrossEntropy(V, use_bias=True, logit_softcap=5.0)
    params = shuffled(head.init(KEY, x, LABELS))
    logits: Any = head.apply(params, x, method="logits")
    assert logits.shape == (B, S, V) and jnp.max(jnp.abs(logits)) < 5
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, LABELS)
    chex.assert_trees_all_close(head.apply(params, x, LABELS), jnp.mean(losses), rtol=1e-6)


def test_initializers_carry_metadata():
    normal_init = nn.initializers.normal()
    split = lambda *names: nn.with_partitioning(normal_init, names)
    mlp = SwiGLU(F, kernel_init=split(None, "tensor"), down_kernel_init=split("tensor", None))
    variables = mlp.init(KEY, normal((B, S, D), F32))
    specs = nn.get_partition_spec(variables)["params"]
    across = {"kernel": P(None, "tensor")}
    assert specs == {
        "gate_proj": across,
        "up_proj": across,
        "down_proj": {"kernel": P("tensor", None)},
    }
    logical = nn.with_logical_partitioning(nn.initializers.ones, ("embed",))
    variables = RMSNorm(scale_init=logical).init(KEY, normal((B, S, D), F32))
    assert nn.get_partition_spec(variables)["params"] == {"scale": P("embed")}
    # The layer finds the array in its box.
    y: Any = RMSNorm(scale_init=logical).apply(variables, normal((B, S, D), F32))
    assert y.shape == (B, S, D)


class Block(nn.Module):
    @nn.compact
    def __call__(self, x, _):
        return x + SwiGLU(F, name="mlp")(RMSNorm(name="norm")(x)), None


def test_in_scan_and_remat():
    """The layers of a deep model have stacked parameters, and a block is computed again."""
    x = normal((B, S, D), F32)
    blocks = nn.scan(
        nn.remat(Block), variable_axes={"params": 0}, split_rngs={"params": True}, length=3
    )()
    params: Any = blocks.init(KEY, x, None)
    assert params["params"]["mlp"]["gate_proj"]["kernel"].shape == (3, D, F)

    def by_hand(params, x):
        for i in range(3):
            x, _ = Block().apply(jax.tree.map(lambda a, i=i: a[i], params), x, None)
        return x

    got = jax.jit(blocks.apply)(params, x, None)[0]
    chex.assert_trees_all_close(got, jax.jit(by_hand)(params, x), rtol=1e-5, atol=1e-6)


def test_vmap_makes_one_gradient_of_a_weight():
    mlp, x = SwiGLU(F), normal((B, S, D), BF16)
    params, apply = mlp.init(KEY, x), jax.vmap(mlp.apply, (None, 0))
    loss = lambda params, x: sum(jnp.sum(a.astype(F32)) for a in jax.tree.leaves(apply(params, x)))
    assert not has_shape(jax.grad(loss), (params, x), B, D, F)
    by_member = jax.vmap(jax.grad(loss), (None, 0))
    assert has_shape(by_member, (params, x[:, None]), B, D, F)  # so the test can fail


def test_all_layers_choose_kernels(on_h100):
    variables, loss = linen_model()
    tokens = jax.ShapeDtypeStruct((8, 256), jnp.int32)
    with pallas_kernels.require_kernels():
        found = pallas_kernels.explain(loss, variables, tokens, tokens)
    names = ["rms_norm", "swiglu_mlp", "add_rms_norm", "linear_cross_entropy"]
    assert [choice.operation for choice in found.choices] == names
