"""The implementations that operations report. Nothing is compiled; 3 s."""

import contextlib
import functools
import logging

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import pallas_kernels
from pallas_kernels import (
    add_rms_norm,
    choices,
    linear_cross_entropy,
    linear_cross_entropy_plan,
    linear_distillation_loss,
    rms_norm,
    sharded_add_rms_norm,
    swiglu,
    swiglu_mlp,
)
from pallas_kernels.layers import AddRMSNorm, LinearCrossEntropy, RMSNorm, SwiGLU
from support.jaxprs import equations

BF16, F16, F32 = jnp.bfloat16, jnp.float16, jnp.float32
X = jnp.ones((2048, 128), BF16)
WEIGHT = jnp.ones((128,), F32)
MLP = jnp.ones((128, 256), BF16), jnp.ones((128, 256), BF16), jnp.ones((256, 128), BF16)
HEAD, LABELS = jnp.ones((512, 128), BF16), jnp.zeros((2048,), jnp.int32)


def model(x, weight, head, labels):
    y = swiglu_mlp(rms_norm(x, weight), *MLP)
    return linear_cross_entropy(swiglu(y, y), head, labels)


def test_each_operation_says_what_it_runs_and_why(on_h100):
    found = pallas_kernels.explain(jax.grad(model), X, WEIGHT, HEAD, LABELS)
    names = [choice.operation for choice in found.choices]
    assert names == ["rms_norm", "swiglu_mlp", "swiglu", "linear_cross_entropy"]
    assert [c.implementation for c in found.choices] == ["mosaic_gpu"] * 2 + [
        "reference",
        "mosaic_gpu",
    ]
    assert [c.reason is None for c in found.choices] == [True, True, False, True]
    text = str(found)
    assert "rms_norm(bfloat16[2048,128], float32[128]): mosaic_gpu\n" in text
    assert found.summary.startswith(
        "kernels: linear_cross_entropy, rms_norm, swiglu_mlp; swiglu runs 'reference' (XLA's fusion"
    )
    assert "token chunks, implementation='mosaic_gpu'" in text and "3 matrix products" in text


class Layers(nnx.Module):
    def __init__(self, param_dtype):
        options = {"param_dtype": param_dtype, "rngs": nnx.Rngs(0)}
        self.norm = RMSNorm(128, **options)
        self.mlp = SwiGLU(128, 192, **options)
        self.add_norm = AddRMSNorm(128, **options)
        self.head = LinearCrossEntropy(128, 512, **options)

    def __call__(self, x):
        return self.head(self.add_norm(self.mlp(self.norm(x)), x)[0], LABELS)


def explained(stream, params):
    graph, state = nnx.split(Layers(params))
    gradients = jax.grad(lambda state, x: nnx.merge(graph, state)(x), argnums=(0, 1))
    choices = pallas_kernels.explain(gradients, state, X.astype(stream)).choices
    assert [c.operation for c in choices] == [
        "rms_norm",
        "swiglu_mlp",
        "add_rms_norm",
        "linear_cross_entropy",
    ]
    return choices


@pytest.mark.parametrize(
    "stream, params",
    [
        pytest.param(BF16, F32, marks=pytest.mark.full),
        (F16, BF16),
        pytest.param(BF16, F16, marks=pytest.mark.full),
        *(pytest.param(*dtypes, marks=pytest.mark.full) for dtypes in [(BF16, BF16), (F16, F16)]),
        pytest.param(F16, F32, marks=pytest.mark.full),
    ],
    ids=lambda d: d.__name__,
)
def test_streams_of_16_bits_run_kernels_whatever_the_parameters_are(
    on_h100, caplog, stream, params
):
    with caplog.at_level(logging.WARNING, logger=choices.__name__):
        found = explained(stream, params)
    assert [(c.implementation, c.reason) for c in found] == [("mosaic_gpu", None)] * 4
    assert not caplog.messages  # no part of the gradients falls back either


@pytest.mark.parametrize("params", [F32, BF16, F16], ids=lambda d: d.__name__)
def test_a_float32_stream_runs_matrix_products_in_xla_and_says_what_to_cast(on_h100, params):
    norm, mlp, add_norm, loss = explained(F32, params)
    assert norm.implementation == add_norm.implementation == "mosaic_gpu"
    assert mlp.implementation == loss.implementation == "xla"
    assert "float32" in str(mlp) and "cast the activations to one of these" in str(mlp)
    assert "float32" in str(loss) and "cast x to one of these" in str(loss)


def test_float32_products_have_the_precision_that_the_caller_asks_for():
    x, weights, head = X[:16].astype(F32), [w.astype(F32) for w in MLP], HEAD.astype(F32)
    loss = lambda x, *weights: linear_cross_entropy(swiglu_mlp(x, *weights), head, LABELS[:16])

    def precisions():
        jaxpr = jax.make_jaxpr(jax.grad(loss, argnums=(0, 1, 2, 3)))(x, *weights)
        found = equations(jaxpr.jaxpr)
        return [e.params["precision"] for e in found if e.primitive.name == "dot_general"]

    by_default = precisions()
    with jax.default_matmul_precision("highest"):
        highest = precisions()
    # The MLP has 3 and its gradients 6. The loss has 3.
    assert by_default == [None] * 12
    assert highest == [(jax.lax.Precision.HIGHEST,) * 2] * 12
    assert precisions() == by_default


def test_without_a_gpu_the_reason_is_the_device():
    found = pallas_kernels.explain(lambda x: rms_norm(x, WEIGHT), X)
    (choice,) = found.choices
    assert choice.implementation == "reference"
    assert choice.reason is not None and "not an NVIDIA GPU" in choice.reason
    named = functools.partial(rms_norm, weight=WEIGHT, implementation="reference")
    assert "the caller asked" in str(pallas_kernels.explain(named, X))
    assert str(pallas_kernels.explain(jnp.sin, X)) == "no operation of pallas_kernels"


def test_forward_mode_of_a_norm_is_plain_jax_and_says_so(on_h100, caplog):
    norm = lambda x: rms_norm(x, WEIGHT)
    loss = lambda x: jnp.sum(jnp.sin(norm(x)))
    forward = lambda x: jax.jvp(norm, (x,), (x,))
    of_forward = jax.grad(lambda x: jnp.sum(forward(x)[1]))
    for derivative in (forward, jax.jacfwd(loss), jax.hessian(loss), of_forward):
        kernel, *others = pallas_kernels.explain(derivative, X[0]).choices
        assert (kernel.implementation, kernel.reason) == ("mosaic_gpu", None)
        assert {(c.operation, c.implementation) for c in others} == {("rms_norm", "reference")}
        assert all("no kernel has forward mode" in str(c) for c in others)
    assert len(pallas_kernels.explain(jax.grad(loss), X).choices) == 1
    assert any("forward mode" in message for message in caplog.messages)


def test_forward_mode_raises_where_kernels_are_required(on_h100, monkeypatch):
    def derivative(**options):
        return jax.hessian(lambda x: jnp.sum(rms_norm(x, WEIGHT, **options)))

    for name in ("require", "mosaic_gpu"):
        with pytest.raises(NotImplementedError, match="use implementation='reference'"):
            jax.eval_shape(derivative(implementation=name), X)
    with choices.require_kernels(), pytest.raises(NotImplementedError, match="no forward mode"):
        jax.eval_shape(derivative(), X)
    monkeypatch.setenv(choices.VARIABLE, "1")
    with pytest.raises(NotImplementedError, match="no forward mode"):
        jax.eval_shape(derivative(), X)


def test_a_function_that_was_traced_before_is_explained_again(on_h100):
    norm = jax.jit(lambda x: rms_norm(x, WEIGHT))
    twice = jax.jit(lambda x: norm(jnp.sin(norm(x))))
    jax.eval_shape(twice, X)
    for _ in range(2):
        found = pallas_kernels.explain(twice, X)
        assert {c.operation for c in found.choices} == {"rms_norm"}


def test_required_kernels_turn_a_fallback_into_an_error(on_h100, monkeypatch):
    fits, too_wide = (lambda x: swiglu_mlp(x, *MLP)), X.astype(F32)
    with pallas_kernels.require_kernels():
        jax.eval_shape(fits, X)
        jax.eval_shape(lambda x: swiglu(x, x), X)
        with pytest.raises(NotImplementedError, match="swiglu_mlp: kernels are required"):
            jax.eval_shape(fits, too_wide)
        # An implementation that the caller names is no fallback.
        jax.eval_shape(lambda x: rms_norm(x, WEIGHT, implementation="reference"), X)
    jax.eval_shape(fits, too_wide)
    monkeypatch.setenv(choices.VARIABLE, "1")
    with pytest.raises(NotImplementedError, match="swiglu_mlp: kernels are required"):
        jax.eval_shape(fits, too_wide)
    monkeypatch.setenv(choices.VARIABLE, "0")
    jax.eval_shape(fits, too_wide)


def test_another_value_of_the_variable_is_an_error(monkeypatch):
    for value in ("", "0"):
        monkeypatch.setenv(choices.VARIABLE, value)
        assert choices.required_by(None) is None
    monkeypatch.setenv(choices.VARIABLE, "false")
    with pytest.raises(ValueError, match="PALLAS_KERNELS_REQUIRE='false' must be 0 or 1"):
        rms_norm(X, WEIGHT)


def test_a_function_with_a_keyword_fn_is_explained():
    found = pallas_kernels.explain(lambda *, fn: rms_norm(fn, WEIGHT), fn=X)
    assert [c.operation for c in found.choices] == ["rms_norm"]


CALLS = {
    "rms_norm": lambda x, **o: rms_norm(x, WEIGHT, **o),
    "add_rms_norm": lambda x, **o: add_rms_norm(x, x, WEIGHT, **o),
    "swiglu_mlp": lambda x, **o: swiglu_mlp(x, *MLP, **o),
    "linear_cross_entropy": lambda x, **o: linear_cross_entropy(x, HEAD, LABELS, **o),
}


@pytest.mark.parametrize("operation", CALLS)
def test_one_call_requires_the_kernel_that_the_default_takes(on_h100, operation):
    found = [
        pallas_kernels.explain(functools.partial(CALLS[operation], implementation=name), X).choices
        for name in (None, "require")
    ]
    assert found[0] == found[1] and found[0][0].implementation == "mosaic_gpu"
    with jax.set_mesh(jax.make_mesh((2, 4), ("data", "rest"), (AxisType.Auto,) * 2)):
        partly = jax.shard_map(
            functools.partial(CALLS[operation], implementation="require"),
            in_specs=P(),
            out_specs=P(),
            axis_names={"data"},
        )
        message = f"^{operation}: kernels are required by implementation='require', and the mesh "
        with pytest.raises(NotImplementedError, match=message):
            jax.eval_shape(jax.jit(partly), X)


@pytest.mark.parametrize("operation", CALLS)
def test_without_a_gpu_a_required_kernel_is_an_error(operation):
    call = functools.partial(CALLS[operation], implementation="require")
    message = (
        f"^{operation}: kernels are required by implementation='require', and the device is "
        "'cpu', not an NVIDIA GPU; without this requirement '(reference|xla)' runs"
    )
    for fn in (call, jax.jit(call)):
        with pytest.raises(NotImplementedError, match=message):
            fn(X)


def test_swiglu_has_no_kernel_to_require(on_h100):
    with pytest.raises(NotImplementedError, match=r"swiglu: .*; implementation='mosaic_gpu' takes"):
        swiglu(X, X, implementation="require")


def test_the_norm_between_collectives_is_required(on_h100):
    mesh = jax.make_mesh((8,), ("tensor",), (AxisType.Auto,))
    tokens = P("tensor")
    with jax.set_mesh(mesh):
        run = lambda partial, residual: jax.shard_map(
            functools.partial(
                sharded_add_rms_norm,
                weight=WEIGHT.astype(partial.dtype),
                axis_name="tensor",
                implementation="require",
            ),
            in_specs=(P(), tokens),
            out_specs=(P(), tokens),
            check_vma=False,
        )(partial, residual)
        found = pallas_kernels.explain(run, X, X)
        assert [c.implementation for c in found.choices] == ["xla", "mosaic_gpu"]
        with pytest.raises(NotImplementedError, match=r"add_rms_norm: .* x is float8_e5m2"):
            narrow = X.astype(jnp.float8_e5m2)
            jax.eval_shape(run, narrow, narrow)


# The MLP's 256 columns over 8 devices are 32 each. A kernel takes multiples of 64.
NO_PART = r"swiglu_mlp: kernels are required by .*, and on each device .*\(128, 32\)"


def split_mlp(kind):
    mesh = jax.make_mesh((1, 8), ("data", "tensor"), (kind,) * 2)
    specs = P("data"), P(None, "tensor"), P(None, "tensor"), P("tensor")
    put = lambda a, spec: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=NamedSharding(mesh, spec))
    return mesh, [put(a, spec) for a, spec in zip((X, *MLP), specs, strict=True)]


@pytest.mark.parametrize("name, context", [("require", False), (None, True), ("mosaic_gpu", True)])
def test_a_part_that_no_kernel_takes_is_a_fallback(on_h100, name, context):
    mesh, args = split_mlp(AxisType.Explicit)
    run = functools.partial(swiglu_mlp, implementation=name)
    required = pallas_kernels.require_kernels() if context else contextlib.nullcontext()
    with jax.set_mesh(mesh):
        with required, pytest.raises(NotImplementedError, match=NO_PART):
            jax.eval_shape(run, *args)
        if name != "require":
            jax.eval_shape(run, *args)  # the requirement ends with the context


def test_over_auto_axes_compilation_raises_for_a_part(on_h100):
    mesh, args = split_mlp(AxisType.Auto)
    run = functools.partial(swiglu_mlp, implementation="require")
    with jax.set_mesh(mesh), pytest.raises(jax.errors.JaxRuntimeError, match=NO_PART):
        jax.jit(run).lower(*args).compile()


@pytest.mark.parametrize("kind", [AxisType.Explicit, AxisType.Auto], ids=["explicit", "auto"])
def test_a_part_of_the_vocabulary_that_no_kernel_takes(on_h100, caplog, kind):
    # 128 columns over 8 devices are 16 each. A kernel takes multiples of 32.
    mesh = jax.make_mesh((1, 8), ("data", "tensor"), (kind,) * 2)
    put = lambda a, spec: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=NamedSharding(mesh, spec))
    x, weight = put(X, P("data")), put(HEAD[:128], P("tensor"))
    run = jax.jit(linear_distillation_loss, static_argnames="implementation")
    message = "linear_distillation_loss: kernels are required by .*, and V = 16 on a device is not"
    with jax.set_mesh(mesh), pytest.raises(Exception, match=message) as found:
        run.lower(x, weight, x, weight, implementation="require").compile()
    # XLA wraps an error that is raised while it partitions.
    is_auto = kind == AxisType.Auto
    assert found.type is (jax.errors.JaxRuntimeError if is_auto else NotImplementedError)
    # By name XLA runs in the kernel's place, which the log says.
    with jax.set_mesh(mesh):
        run.lower(x, weight, x, weight, implementation="mosaic_gpu").compile()
    (line,) = caplog.messages
    assert line.startswith("linear_distillation_loss: XLA passes over the logits: V = 16 on a dev")


def test_a_device_with_few_tokens_says_that_xla_makes_the_backward(on_h100, caplog):
    mesh = jax.make_mesh((8,), ("data",), (AxisType.Explicit,))
    x = jax.ShapeDtypeStruct((4096, 128), X.dtype, sharding=NamedSharding(mesh, P("data")))
    total = lambda x: jnp.sum(swiglu_mlp(x, *MLP).astype(F32))
    with jax.set_mesh(mesh), caplog.at_level(logging.WARNING, logger=choices.__name__):
        jax.eval_shape(jax.grad(total), x)
    (line,) = caplog.messages
    assert line.startswith(
        "swiglu_mlp: XLA makes the backward, because a device has num_tokens=512"
    )


@pytest.mark.parametrize("by_member", ["weights", "gradients"])
@pytest.mark.parametrize("names", [(), ("data",), ("expert", "data")], ids=str)
def test_a_loop_over_members_says_that_axes_left_to_xla_do_not_split_it(
    on_h100, caplog, by_member, names
):
    """Only inside of a `jax.shard_map` that leaves an Auto axis to XLA. It takes 0.1 s each."""
    mesh = jax.make_mesh((4, 2), ("expert", "data"), (AxisType.Auto,) * 2)
    x, weight = jnp.ones((4, 8, 128), BF16), jnp.ones((4, 128, 128), BF16)
    total = lambda x, w: jnp.sum(swiglu_mlp(x, w, w, w).astype(F32))
    run = jax.vmap(total)
    if by_member == "gradients":
        weight = weight[0]
        run = lambda x, w: jax.vmap(jax.grad(total, 1), (0, None))(x, w)
    if names:
        specs = {"in_specs": P(), "out_specs": P(), "axis_names": set(names)}
        run = jax.shard_map(run, check_vma=False, **specs)
    with jax.set_mesh(mesh), caplog.at_level(logging.WARNING, logger=choices.__name__):
        jax.eval_shape(run, x, weight)
    lines = [line for line in caplog.messages if "a loop computes one member" in line]
    assert len(lines) == (names == ("data",))
    assert all("('expert',)" in line and "name these axes in axis_names" in line for line in lines)


def test_an_empty_array_needs_no_kernel():
    for call in (CALLS["rms_norm"], CALLS["add_rms_norm"], CALLS["swiglu_mlp"]):
        assert jax.tree.leaves(call(X[:0], implementation="require"))[0].shape == (0, 128)


def test_the_plan_of_the_loss_requires_kernels_too(on_h100):
    plan = linear_cross_entropy_plan(X, HEAD, LABELS, implementation="require")
    assert plan.implementation == "mosaic_gpu"
    with pytest.raises(NotImplementedError, match="linear_cross_entropy: kernels are required"):
        linear_cross_entropy_plan(X.astype(F32), HEAD, LABELS, implementation="require")


def test_a_new_reason_is_logged_once(on_h100, caplog):
    with caplog.at_level(logging.WARNING, logger=choices.__name__):
        for dtype in (BF16, F32, F32):
            jax.eval_shape(lambda x: swiglu_mlp(x, *MLP), X.astype(dtype))
    (line,) = caplog.messages
    assert "swiglu_mlp: implementation='xla' runs, because" in line and "float32" in line


def test_without_a_gpu_nothing_is_logged(caplog):
    with caplog.at_level(logging.WARNING, logger=choices.__name__):
        jax.eval_shape(lambda x: rms_norm(x, WEIGHT), X)
    assert not caplog.messages
