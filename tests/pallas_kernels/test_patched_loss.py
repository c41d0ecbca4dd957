"""The loss of a model that other people might write, without its logits."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from pallas_kernels import patch
from support.foreign_modules import F32, D, Model, V, shuffled
from support.numerics import assert_as_accurate, quick_jit

pytestmark = pytest.mark.usefixtures("fast_compilation", "usual_promotion")
B, S = 8, 6
# In bfloat16 the error of one number, such as the loss, is a matter of luck.
model_of_one_layer = functools.partial(Model, 1, dtype=F32)


@pytest.fixture
def usual_promotion():
    """The code of others lets JAX promote dtypes."""
    with jax.numpy_dtype_promotion("standard"):
        yield


def softcapped(model, x):
    return 5.0 * jnp.tanh(model.lm_head(x) / 5.0)


def tied(model, x):
    return model.embed.attend(x)


@jax.jit
def by_einsum(model, x):
    """The head in a function of its own, with the weight as the first operand."""
    weight = model.embed.embedding[...].astype(x.dtype)
    return jnp.einsum("vd,bsd->bsv", weight, x).astype(F32)


def of_merged_tokens(model, x):
    rows = model.lm_head(x.reshape(-1, D))
    return {"logits": rows.reshape(*x.shape[:-1], V), "hidden": x}


# A head, options of its linear layer, its weight, and the bound of its logits.
HEADS: dict[str, Any] = {
    "linear": (None, {}, lambda p: p["lm_head.kernel"], None),
    "bias and softcap": (softcapped, {"use_bias": True}, lambda p: p["lm_head.kernel"], 5.0),
    "tied": (tied, {}, lambda p: p["embed.embedding"].T, None),
    "einsum": (by_einsum, {}, lambda p: p["embed.embedding"].T, None),
    "merged tokens": (of_merged_tokens, {}, lambda p: p["lm_head.kernel"], None),
}


def tokens_and_labels():
    rng = np.random.default_rng(0)
    labels = rng.integers(V, size=(B, S)).astype(np.int32)
    labels[0, 1:4] = -100
    return jnp.asarray(rng.integers(V, size=(B, S)), jnp.int32), jnp.asarray(labels)


def by_path(state):
    return {".".join(map(str, path)): v[...] for path, v in nnx.to_flat_state(state)}


def with_gradients(model, loss, *args):
    """The loss and the gradients for all parameters, by path."""
    graphdef, params, rest = nnx.split(model, nnx.Param, ...)
    fn = lambda params, *args: loss(nnx.merge(graphdef, params, rest), *args)
    value, gradients = quick_jit(jax.value_and_grad(fn))(params, *args)
    return {"loss": value, **by_path(gradients)}


def usual_loss(model, tokens, labels):
    logits = model(tokens)
    logits = (logits["logits"] if isinstance(logits, dict) else logits).astype(F32)
    return mean_loss(logits, labels)


def mean_loss(logits, labels):
    counts = labels != -100
    label = jnp.take_along_axis(logits, jnp.where(counts, labels, 0)[..., None], -1)[..., 0]
    losses = jnp.where(counts, jax.nn.logsumexp(logits, -1) - label, 0)
    return jnp.sum(losses) / jnp.sum(counts)


def formula(p, weight, softcap, tokens, labels):
    """The loss of the model, in the dtype of the parameters."""

    def norm(x, scale):
        return x / jnp.sqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-5) * scale

    x = p["embed.embedding"][tokens]
    y = norm(x, p["layers.0.norm.scale"])
    up, gate, down = (p[f"layers.0.mlp.dense.w{j}.kernel"] for j in (1, 2, 3))
    x = x + (jax.nn.silu(y @ gate) * (y @ up)) @ down
    logits = norm(x, p["norm.scale"]) @ weight(p)
    logits += p.get("lm_head.bias", 0)
    return mean_loss(logits if softcap is None else softcap * jnp.tanh(logits / softcap), labels)


@functools.cache
def exact(name):
    head, options, weight, softcap = HEADS[name]
    params = by_path(nnx.state(shuffled(model_of_one_layer(head=head, **options)), nnx.Param))
    with jax.enable_x64(True):
        wide = {k: jnp.asarray(np.asarray(a, np.float64)) for k, a in params.items()}
        fn = lambda p: formula(p, weight, softcap, *tokens_and_labels())
        value, gradients = jax.jit(jax.value_and_grad(fn))(wide)
        return {"loss": np.asarray(value)} | jax.tree.map(np.asarray, gradients)


def assert_all_as_accurate(got, usual, name):
    names = sorted(exact(name))
    assert sorted(got) == sorted(usual) == names
    assert_as_accurate(*([r[k] for k in names] for r in (got, usual, exact(name))), names=names)


@functools.cache
def patched_model():
    """A model without a head of its own, and what `patch` says. Tests copy it."""
    model = model_of_one_layer()
    return model, patch(model)


def patched_like(model):
    """A copy of the model with patched layers."""
    copied, _ = patched_model()
    copied = nnx.clone(copied)
    copied.lm_head, copied.head = nnx.clone(model.lm_head), model.head
    nnx.update(copied, nnx.state(model))
    return copied


def loss_of(model, tokens, labels, **options):
    _, patched = patched_model()
    return patched.loss(model, labels, tokens, **options)


LONGER = ("tied", "merged tokens", "einsum", "auto, batch", "explicit, batch")


def some_are_longer(names):
    return [pytest.param(n, marks=pytest.mark.full if n in LONGER else ()) for n in names]


@pytest.mark.parametrize("name", some_are_longer(HEADS))
def test_loss_and_gradients(name):
    head, options, _, _ = HEADS[name]
    model = shuffled(model_of_one_layer(head=head, **options))
    usual = with_gradients(model, usual_loss, *tokens_and_labels())
    model = patched_like(model)
    got = with_gradients(model, loss_of, *tokens_and_labels())
    assert_all_as_accurate(got, usual, name)
    program = jax.make_jaxpr(lambda: loss_of(model, *tokens_and_labels()))()
    avals: list[Any] = [v.aval for eqn in program.jaxpr.eqns for v in eqn.outvars]
    shapes = [jnp.shape(aval) for aval in avals]
    assert not [shape for shape in shapes if shape[-1:] == (V,)]


def scaled(model, x):
    return model.lm_head(x) * 0.5


def cast_inside(model, x):
    return 30.0 * jnp.tanh((model.lm_head(x) / 30).astype(jnp.bfloat16))


def masked(model, x):
    return jnp.where(jnp.arange(V) < 30, model.lm_head(x), -1e9)


def in_a_checkpoint(model, x):
    return jax.checkpoint(lambda x, w: x @ w)(x, model.lm_head.kernel[...].astype(x.dtype))


def in_a_scan(model, x):
    kernel = model.lm_head.kernel[...].astype(x.dtype)
    return jax.lax.map(lambda row: row @ kernel, x)


def shifted(model, x):
    return model.lm_head(x) + jax.nn.relu(model.lm_head(x))


def batched(model, x):
    kernel = jnp.broadcast_to(model.lm_head.kernel[...], (B, D, V)).astype(x.dtype)
    return x @ kernel


def rounded_to_float8(model, x):
    return model.lm_head(x).astype(jnp.float8_e4m3fn).astype(F32)


def with_precision(precision):
    """A head whose product has a precision of its own."""
    dot = functools.partial(jax.lax.dot_general, dimension_numbers=(((2,), (0,)), ((), ())))
    return lambda model, x: dot(x, model.lm_head.kernel[...], precision=precision)


def of_two_dtypes(model, x):
    return jax.lax.dot_general(
        x.astype(jnp.bfloat16),
        model.lm_head.kernel[...],
        (((2,), (0,)), ((), ())),
        preferred_element_type=F32,
    )


ALGORITHM = jax.lax.DotAlgorithm(F32, F32, F32)
REFUSED = {
    "scaled": (scaled, "is multiplied by something, and is no c"),
    "cast inside": (cast_inside, "is multiplied by something, and is no c"),
    "masked": (masked, "result of 'select_n'"),
    "checkpoint": (in_a_checkpoint, "result of 'remat2' which the loss does not see into"),
    "scan": (in_a_scan, "result of 'scan' which the loss does not see into"),
    "added": (shifted, "something is added to it that is no vector"),
    "batched": (batched, "a product with batches"),
    "float8": (rounded_to_float8, "result of 'convert_element_type', and not of a product"),
    "precisions": (with_precision(("default", "highest")), "two precisions, DEFAULT and HIGHEST"),
    "algorithm": (with_precision(ALGORITHM), "DotAlgorithm.*, which the loss does not have"),
    "two dtypes": (of_two_dtypes, "it is a product of bfloat16 with float32; cast one of them"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_heads_that_are_refused(name):
    head, reason = REFUSED[name]
    with pytest.raises(NotImplementedError, match=reason):
        jax.eval_shape(lambda: loss_of(model_of_one_layer(head=head), *tokens_and_labels()))


@pytest.mark.parametrize(
    "dtypes",
    [(jnp.float8_e4m3fn, F32), (jnp.bfloat16, F32), (jnp.float8_e4m3fn, jnp.bfloat16, F32)],
)
def test_roundings_of_the_weight_are_kept(dtypes):
    """The loss is that of the rounded weight, and not closer to the one of the parameter."""

    def head(model, x):
        return x @ functools.reduce(jnp.astype, dtypes, model.lm_head.kernel[...])

    model = shuffled(model_of_one_layer(head=head))
    expected = usual_loss(model, *tokens_and_labels())
    got = loss_of(model, *tokens_and_labels())
    model.head = None
    without = usual_loss(model, *tokens_and_labels())
    assert abs(got - expected) <= 4 * np.finfo(np.float32).eps * expected
    assert abs(without - expected) > 32 * np.finfo(np.float32).eps * expected


def test_a_number_for_each_position_is_no_bias():
    """Although there are as many positions as columns."""
    head = lambda model, x: model.lm_head(x) + jnp.arange(V, dtype=x.dtype)[:, None]
    tokens = jnp.zeros((2, V), jnp.int32)
    with pytest.raises(NotImplementedError, match="something is added to it that is no vector"):
        jax.eval_shape(lambda: loss_of(model_of_one_layer(head=head), tokens, tokens))


def test_errors():
    tokens, labels = tokens_and_labels()
    model = model_of_one_layer()
    with pytest.raises(ValueError, match=r"labels \(8, 5\) need logits \(8, 5, 'V'\)"):
        loss_of(model, tokens, labels[:, 1:])
    both = model_of_one_layer(head=lambda model, x: (model.lm_head(x), 2 * x, model.lm_head(x)))
    with pytest.raises(ValueError, match=r"several outputs of the model are logits: \[0\], \[2\]"):
        loss_of(both, tokens, labels)
    with pytest.raises(TypeError, match="loss_options: the model decides logit_softcap; leave"):
        loss_of(model, tokens, labels, loss_options={"logit_softcap": 1.0})
    with pytest.raises(TypeError, match="label_smooth"):
        loss_of(model, tokens, labels, loss_options={"label_smooth": 0.1})

    def adds(model, x):
        model.more = nnx.BatchStat(jnp.zeros(1))
        return model.lm_head(x)

    with pytest.raises(NotImplementedError, match="adds or removes variables; create them before"):
        loss_of(model_of_one_layer(head=adds), tokens, labels)


def test_options_and_variables_that_the_call_changes():
    tokens, labels = tokens_and_labels()
    model = model_of_one_layer()
    weights = jnp.linspace(0, 1, labels.size).reshape(labels.shape)
    options = {"reduction": "none", "token_weights": weights, "return_metrics": True}

    @nnx.jit
    def step(model):
        losses, metrics = loss_of(model, tokens, labels, loss_options=options, counts=True)
        return losses, metrics.num_tokens

    losses, num_tokens = step(model)
    assert model.calls[...] == 1 and num_tokens == labels.size - 3
    logits = model(tokens).astype(F32)
    usual = (
        jax.nn.logsumexp(logits, -1) - jnp.take_along_axis(logits, labels[..., None], -1)[..., 0]
    )
    expected = jnp.where(labels == -100, 0, usual * weights)
    np.testing.assert_allclose(losses, expected, rtol=0.02, atol=0.02)


LAYOUTS = {
    "auto, batch": (AxisType.Auto, P()),
    "auto, fsdp": (AxisType.Auto, P("data")),
    "explicit, batch": (AxisType.Explicit, P()),
}


@pytest.mark.parametrize("layout", some_are_longer(LAYOUTS))
def test_on_a_mesh(layout):
    """`tests/aot/test_aot_patching.py` shows that each device has its own tokens."""
    kind, spec = LAYOUTS[layout]
    mesh = jax.make_mesh((8,), ("data",), axis_types=(kind,))
    model = shuffled(model_of_one_layer())
    usual = with_gradients(model, usual_loss, *tokens_and_labels())
    model = patched_like(model)
    options = {"out_sharding": P("data")} if kind == AxisType.Explicit else {}
    with jax.set_mesh(mesh):
        split = lambda a: NamedSharding(mesh, spec if a.ndim and a.shape[0] % 8 == 0 else P())
        state = nnx.state(model)
        nnx.update(model, jax.device_put(state, jax.tree.map(split, state)))
        arrays = jax.device_put(tokens_and_labels(), NamedSharding(mesh, P("data")))
        got = with_gradients(model, functools.partial(loss_of, **options), *arrays)
    assert_all_as_accurate(jax.device_get(got), usual, "linear")
