"""Memory and products of the compiled losses, what they say of themselves, and meshes."""

import dataclasses
import functools
import math
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from pallas_kernels import (
    explain,
    linear_distillation_loss,
    linear_distillation_loss_top_k,
    require_kernels,
)
from pallas_kernels.distillation import passes
from pallas_kernels.distillation.arguments import checked_settings
from pallas_kernels.distillation.settings import Chunk
from support.distillation_formulas import (
    BF16,
    DIVERGENCES,
    F32,
    check_against_formula,
    loss_of,
    make_arrays,
    make_cotangent,
    make_top_k,
    run,
)
from support.loss_formulas import in_turn
from support.numerics import quick_jit

BIG_T, BIG_D, BIG_E, BIG_V, BIG_K, BIG_CHUNK = 4096, 32, 48, 1009, 8, 256


def shapes(of_top_k: bool) -> list[jax.ShapeDtypeStruct]:
    struct = lambda *shape, dtype=F32: jax.ShapeDtypeStruct(shape, dtype)
    student = [struct(BIG_T, BIG_D), struct(BIG_V, BIG_D)]
    if of_top_k:
        return [*student, struct(BIG_T, BIG_K), struct(BIG_T, BIG_K, dtype=jnp.int32)]
    return [*student, struct(BIG_T, BIG_E), struct(BIG_V, BIG_E)]


def graded(of_top_k=False, **options):
    fn = linear_distillation_loss_top_k if of_top_k else linear_distillation_loss

    def loss(*arrays):
        out = fn(*arrays, **options)
        # With unequal cotangents the gradients cannot be scaled afterwards.
        return jnp.sum(out * jnp.arange(1.0, 1 + out.size).reshape(out.shape))

    return jax.value_and_grad(loss, argnums=(0, 1))


@functools.cache
def program(of_top_k=False, **options) -> Any:
    return jax.jit(graded(of_top_k, **options)).lower(*shapes(of_top_k)).compile()


def largest_buffer(compiled):
    """Elements of the largest array in the optimized program, inside of fusions as well."""
    found = re.findall(r"\b(?:pred|[a-z]+\d+\w*)\[([\d,]*)\]", compiled.as_text())
    return max(math.prod(int(d) for d in dims.split(",") if d) for dims in found)


@pytest.mark.parametrize(
    "reduction, of_top_k",
    [
        pytest.param("mean", False, id="mean-logits"),
        pytest.param("none", True, id="none-top_k"),
        pytest.param("mean", True, id="mean-top_k", marks=pytest.mark.full),
        pytest.param("none", False, id="none-logits", marks=pytest.mark.full),
    ],
)
def test_memory_is_that_of_a_chunk(of_top_k, reduction):
    temporary = lambda compiled: compiled.memory_analysis().temp_size_in_bytes
    of_size = lambda size: program(of_top_k, reduction=reduction, chunk_size=size)
    assert largest_buffer(of_size(BIG_CHUNK)) == BIG_CHUNK * BIG_V
    # Student's and teacher's logits of a chunk, two more arrays as large, dweight and its copies
    # around the loop, dx, and numbers of tokens.
    numbers = 4 * BIG_CHUNK * BIG_V + 4 * BIG_V * BIG_D + BIG_T * (BIG_D + 32 + 4 * BIG_K)
    assert temporary(of_size(BIG_CHUNK)) <= 4 * numbers
    assert temporary(of_size(2 * BIG_CHUNK)) > temporary(of_size(BIG_CHUNK)) + 4 * BIG_CHUNK * BIG_V
    whole = program(of_top_k, reduction=reduction, implementation="reference")
    assert temporary(whole) > 4 * BIG_T * BIG_V > 4 * numbers


@pytest.mark.parametrize("of_top_k", [False, True], ids=["logits", "top_k"])
def test_the_limit_decides_the_chunks(of_top_k):
    per_token = 4 * BIG_V * (1 if of_top_k else 2)
    limited = program(of_top_k, max_logits_bytes=384 * per_token)
    assert largest_buffer(limited) == 384 * BIG_V


@pytest.mark.parametrize(
    "num_tokens, vocab_size, options, expected",
    [
        (8192, 128256, {}, (1536, 512)),
        (8192, 262144, {}, (1024, 512)),
        (8192, 32000, {}, (2816, 2816)),
        (1536, 128256, {}, (1536, 512)),
        (8192, 128256, {"max_logits_bytes": 2**30}, (3072, 1024)),
        (8192, 128256, {"max_logits_bytes": 2**25}, (128, 128)),
        (8192, 128256, {"chunk_size": 2048}, (2048, 2048)),
        # No passes by kernels, no large sums, and a gradient that is not over the logits.
        (8192, 128256, {"kernels": False}, (1024, 1024)),
        (8192, 128256, {"has_dweight": False}, (1024, 1024)),
        (8192, 128256, {"is_low_rank": True}, (768, 768)),
        (8192, 128256, {"logits_dtype": jnp.dtype(F32)}, (768, 768)),
    ],
    ids=str,
)
def test_chunks_and_parts(num_tokens, vocab_size, options, expected):
    struct = lambda *shape: jax.ShapeDtypeStruct(shape, BF16)
    teacher = struct(num_tokens, BIG_E), struct(vocab_size, BIG_E)
    options = dict(options)
    has_dweight = options.pop("has_dweight", True)
    settings = dataclasses.replace(
        checked_settings(
            divergence="forward_kl",
            beta=None,
            temperature=1.0,
            logit_softcap=None,
            chunk_size=None,
            max_logits_bytes=None,
            vocab_axis=None,
            weight_layout="vd",
            logits_dtype=None,
            counted_fraction=1.0,
        ),
        **{"kernels": True, **options},
    )
    x = struct(num_tokens, BIG_D)
    found = settings.chunk(x, teacher, vocab_size, has_dweight=has_dweight)
    assert found == Chunk(*expected)


def executed_flops(jaxpr):
    """FLOPs of the matrix products of a jaxpr, loops multiplied out."""
    total = 0
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "dot_general":
            (contracted, _), _ = eqn.params["dimension_numbers"]
            lhs, out = eqn.invars[0].aval.shape, eqn.outvars[0].aval.shape
            total += 2 * math.prod(out) * math.prod(lhs[axis] for axis in contracted)
            continue
        assert eqn.primitive.name not in ("cond", "while"), "of unknown count"
        count = eqn.params["length"] if eqn.primitive.name == "scan" else 1
        for parameter in eqn.params.values():
            inner = getattr(parameter, "jaxpr", parameter)
            if hasattr(inner, "eqns"):
                total += count * executed_flops(inner)
    return total


@pytest.mark.parametrize(
    "of_top_k, reduction, of_student, of_teacher",
    [(False, "mean", 3, 1), (False, "none", 4, 2), (True, "sum", 3, 0), (True, "none", 4, 0)],
)
@pytest.mark.parametrize("chunk_size", [7, 1000, None])
def test_products(of_top_k, reduction, of_student, of_teacher, chunk_size):
    fn = graded(of_top_k, reduction=reduction, chunk_size=chunk_size)
    one = 2 * BIG_T * BIG_V
    expected = one * (of_student * BIG_D + of_teacher * BIG_E)
    assert executed_flops(jax.make_jaxpr(fn)(*shapes(of_top_k)).jaxpr) == expected
    alone = linear_distillation_loss_top_k if of_top_k else linear_distillation_loss
    alone = functools.partial(alone, chunk_size=chunk_size)
    expected = one * (BIG_D + (0 if of_top_k else BIG_E))
    assert executed_flops(jax.make_jaxpr(alone)(*shapes(of_top_k)).jaxpr) == expected


# What a call says of itself.


@pytest.mark.parametrize("of_top_k", [False, True], ids=["logits", "top_k"])
def test_it_says_that_xla_computes_it(on_h100, of_top_k):
    fn = linear_distillation_loss_top_k if of_top_k else linear_distillation_loss
    (choice,) = explain(functools.partial(fn, chunk_size=BIG_CHUNK), *shapes(of_top_k)).choices
    assert choice.operation == fn.__name__ and choice.implementation == "xla"
    reason = (
        "no kernel computes a loss of stored log-probabilities"
        if of_top_k
        else (f"V = {BIG_V} on a device is not a multiple of 32; pad the vocabulary")
    )
    assert choice.reason is not None and reason in choice.reason
    size = BIG_CHUNK * BIG_V * 4 * (1 if of_top_k else 2) / 2**20
    assert choice.plan is not None
    assert f"16 x ({BIG_CHUNK} tokens x {BIG_V} columns), {size:.1f} MiB" in choice.plan
    assert f"{3 if of_top_k else 4} matrix products with all gradients" in choice.plan
    for name in ("require", "mosaic_gpu"):
        with pytest.raises(NotImplementedError, match=reason):
            jax.eval_shape(functools.partial(fn, implementation=name), *shapes(of_top_k))
    with require_kernels():
        if of_top_k:  # The default is no kernel on purpose.
            jax.eval_shape(fn, *shapes(of_top_k))
        else:
            with pytest.raises(NotImplementedError, match=reason):
                jax.eval_shape(fn, *shapes(of_top_k))


def test_the_kernels_take_no_logits_of_64_bits():
    reason = passes.unsupported_reason(BIG_V, jnp.dtype("float64"))
    assert reason is not None and reason.startswith("dtype of logits is float64, not bfloat16, ")
    assert reason.endswith("; set logits_dtype to one of these dtypes")


def test_it_says_that_kernels_compute_it(on_h100):
    sizes = (BIG_T, BIG_D), (128256, BIG_D), (BIG_T, BIG_E), (128256, BIG_E)
    args = [jax.ShapeDtypeStruct(size, jnp.bfloat16) for size in sizes]
    with require_kernels():
        (choice,) = explain(linear_distillation_loss, *args).choices
    assert choice.implementation == "mosaic_gpu" and choice.reason is None
    assert choice.plan is not None and "4 matrix products with all gradients" in choice.plan
    assert "3 x (1536 tokens x 128256 columns), 501.0 MiB of logits" in choice.plan
    assert "with gradients, teacher's logits of 512 tokens at a time" in choice.plan


def test_open_sizes_run_the_reference():
    (t,) = jax.export.symbolic_shape("t")
    _, weight, _, teacher_weight = shapes(False)
    args = (
        jax.ShapeDtypeStruct((t, BIG_D), F32),
        weight,
        jax.ShapeDtypeStruct((t, BIG_E), F32),
        teacher_weight,
    )
    (choice,) = explain(linear_distillation_loss, *args).choices
    assert choice.implementation == "reference" and "symbolic sizes" in str(choice.reason)
    for name in ("xla", "require"):
        with pytest.raises(NotImplementedError, match="symbolic sizes"):
            jax.eval_shape(functools.partial(linear_distillation_loss, implementation=name), *args)


def test_only_the_reference_has_second_derivatives():
    arrays, teacher = make_arrays((5,), 7)
    x, weight = jnp.asarray(arrays["x"]), jnp.asarray(arrays["weight"])
    teacher = [jnp.asarray(a) for a in teacher]

    def second(implementation):
        loss = lambda x: linear_distillation_loss(
            x, weight, *teacher, implementation=implementation
        )
        return jax.grad(lambda x: jnp.sum(jax.grad(loss)(x) ** 2))(x)

    assert np.all(np.isfinite(np.asarray(second("reference"))))
    with pytest.raises(NotImplementedError, match="no second derivative"):
        second("xla")


# Arguments.

ARRAYS = {
    False: {"x": (4, 8), "weight": (16, 8), "teacher_x": (4, 6), "teacher_weight": (16, 6)},
    True: {"x": (4, 8), "weight": (16, 8), "teacher_log_probs": (4, 3), "teacher_ids": (4, 3)},
}


def call(of_top_k=False, changed=None, **options):
    arrays: dict[str, Any] = {name: jnp.ones(shape) for name, shape in ARRAYS[of_top_k].items()}
    if of_top_k:
        arrays["teacher_ids"] = arrays["teacher_ids"].astype(jnp.int32)
    fn = linear_distillation_loss_top_k if of_top_k else linear_distillation_loss
    return fn(**(arrays | (changed or {})), **options)


@pytest.mark.parametrize(
    "of_top_k, changed, message",
    [
        (False, {"x": jnp.ones((4, 9))}, "must agree in D"),
        (False, {"teacher_x": jnp.ones((4, 9))}, "teacher_x .* must agree in D"),
        (False, {"teacher_x": jnp.ones((5, 6))}, "teacher_x must have the tokens of x"),
        (False, {"teacher_weight": jnp.ones((17, 6))}, "one vocabulary, got V = 16 .* 17"),
        (False, {"weight": jnp.ones((0, 8))}, "V >= 1"),
        (False, {"token_weights": jnp.ones(5)}, "token_weights must have the shape"),
        (False, {"bias": jnp.ones(15)}, r"bias must have shape \(16,\), got \(15,\)"),
        (False, {"teacher_bias": jnp.ones((16, 1))}, r"teacher_bias must have shape \(16,\)"),
        (True, {"bias": jnp.ones(15)}, r"bias must have shape \(16,\)"),
        (True, {"teacher_ids": jnp.ones((5, 3), jnp.int32)}, r"teacher_ids must be \(4, 'k'\)"),
        (True, {"teacher_log_probs": jnp.ones((4, 2))}, "must have one k in"),
        (
            True,
            {"teacher_log_probs": jnp.ones((4, 0)), "teacher_ids": jnp.ones((4, 0), jnp.int32)},
            r"one k in \[1, V = 16\]",
        ),
    ],
    ids=str,
)
def test_shapes_that_disagree(unchecked_shapes, of_top_k, changed, message):
    with pytest.raises(ValueError, match=message):
        call(of_top_k, changed)


@pytest.mark.parametrize(
    "of_top_k, changed",
    [
        (False, {"x": jnp.ones((4, 8), jnp.int32)}),
        (False, {"teacher_weight": jnp.ones((16, 6), jnp.float8_e4m3fn)}),
        (False, {"token_weights": jnp.ones(4, jnp.complex64)}),
        (False, {"teacher_bias": jnp.ones(16, jnp.int32)}),
        (True, {"teacher_ids": jnp.ones((4, 3))}),
        (True, {"teacher_log_probs": jnp.ones((4, 3), jnp.int32)}),
    ],
    ids=str,
)
def test_dtypes_that_do_not_suit(unchecked_shapes, of_top_k, changed):
    with pytest.raises(TypeError):
        call(of_top_k, changed)


@pytest.mark.parametrize(
    "of_top_k, options, error, message",
    [
        (False, {"divergence": "kl"}, ValueError, "divergence='kl' must be one of"),
        (False, {"divergence": "jensen_shannon", "beta": 1.5}, ValueError, "must lie in"),
        (False, {"beta": 0.5}, ValueError, "has no mixture; leave beta=None"),
        (False, {"divergence": "jensen_shannon", "beta": "half"}, TypeError, "beta must be"),
        (False, {"temperature": 0.0}, ValueError, "must be above 0"),
        (False, {"temperature": math.inf}, ValueError, "finite"),
        (False, {"logit_softcap": 0}, ValueError, "logit_softcap=0 must be above 0"),
        (False, {"teacher_logit_softcap": math.nan}, ValueError, "teacher_logit_softcap=nan must"),
        (True, {"logit_softcap": "30"}, TypeError, "logit_softcap must be a number"),
        (False, {"chunk_size": 0}, ValueError, "chunk_size=0 must be at least 1"),
        (False, {"chunk_size": 8, "max_logits_bytes": 9}, ValueError, "give one of them"),
        (False, {"max_logits_bytes": 1.5}, TypeError, "must be an integer"),
        (False, {"weight_layout": "tv"}, ValueError, "weight_layout='tv' must be one of"),
        (False, {"teacher_weight_layout": "tv"}, ValueError, "teacher_weight_layout='tv'"),
        (False, {"logits_dtype": "int32"}, TypeError, "logits_dtype=int32"),
        (False, {"logits_dtype": "number"}, TypeError, "must be a dtype"),
        (False, {"logits_dtype": "float64"}, ValueError, "needs jax_enable_x64"),
        (False, {"reduction": "batchmean"}, ValueError, "reduction='batchmean'"),
        (False, {"implementation": "triton"}, ValueError, "implementation='triton'"),
        (True, {"tail": "renormalize"}, ValueError, "tail='renormalize' must be one of"),
        (True, {"tail": "ignore", "divergence": "reverse_kl"}, ValueError, "one_bucket"),
    ],
    ids=str,
)
def test_options_out_of_range(unchecked_shapes, of_top_k, options, error, message):
    with pytest.raises(error, match=message):
        call(of_top_k, **options)


# Meshes of eight devices.

# Axes of the mesh, and the specs of tokens and of the vocabulary.
MESHES: dict[str, tuple[dict[str, int], P, P]] = {
    "tokens": ({"data": 8}, P("data"), P()),
    "fsdp": ({"data": 4, "fsdp": 2}, P(("data", "fsdp")), P(None, "fsdp")),
    "vocabulary": ({"data": 2, "tensor": 4}, P("data"), P("tensor")),
}
MESH_T, MESH_V = 48, 56


def on_mesh(mesh_name: str, kind: AxisType, student, teacher, of_top_k=False) -> Any:
    """`(mesh, student's arrays, teacher's arrays)` on the devices."""
    axes, tokens, weight = MESHES[mesh_name]
    mesh = jax.make_mesh(tuple(axes.values()), tuple(axes), axis_types=(kind,) * len(axes))
    put = lambda a, spec: jax.device_put(a, NamedSharding(mesh, spec))
    of_student, of_teacher = specs_of(tokens, weight, of_top_k)
    return (
        mesh,
        {name: put(a, of_student[name]) for name, a in student.items()},
        [put(a, spec) for a, spec in zip(teacher, of_teacher, strict=False)],
    )


def specs_of(tokens: P, weight: P, of_top_k: bool = False) -> tuple[dict[str, P], tuple[P, ...]]:
    """The specs of the arrays of student and teacher."""
    of_bias = P(weight[0] if weight else None)
    specs = {"x": tokens, "token_weights": tokens, "weight": weight, "bias": of_bias}
    return specs, (tokens, tokens) if of_top_k else (tokens, weight, of_bias)


@in_turn(
    "mesh_name, kind, divergence, reduction, implementation",
    {name: name for name in MESHES},
    {"auto": AxisType.Auto, "explicit": AxisType.Explicit},
    DIVERGENCES,
    {"mean": "mean", "none": "none"},
    {"xla": "xla", "reference": "reference"},
    also=[
        (name, kind, "forward_kl", "mean", "xla")
        for name, kind in (("fsdp", "explicit"), ("vocabulary", "explicit"))
    ],
)
def test_on_a_mesh(mesh_name, kind, divergence, reduction, implementation):
    is_split = mesh_name == "vocabulary"
    arrays, teacher = make_arrays(
        (4, MESH_T // 4) if is_split else (MESH_T,), MESH_V, biases=reduction == "mean"
    )
    options = {"implementation": implementation, "reduction": reduction, **divergence}
    if is_split:
        options |= {"logit_softcap": 3.0, "teacher_logit_softcap": 2.0}
    mesh, student, of_teacher = on_mesh(mesh_name, kind, arrays, teacher)
    with jax.set_mesh(mesh):
        got = run(student, of_teacher, chunk_size=3, **options)
    if implementation == "xla":
        assert got["x"].sharding.is_equivalent_to(student["x"].sharding, got["x"].ndim)
    check_against_formula(got, arrays, teacher, **options)


@in_turn(
    "mesh_name, kind, tail",
    {name: name for name in MESHES},
    {"auto": AxisType.Auto, "explicit": AxisType.Explicit},
    {"one_bucket": "one_bucket", "ignore": "ignore"},
    also=[("vocabulary", "explicit", "one_bucket")],
    but=[("tokens", "auto", "one_bucket")],
)
def test_top_k_on_a_mesh(mesh_name, kind, tail):
    arrays, _ = make_arrays((MESH_T,), MESH_V)
    teacher = make_top_k((MESH_T,), MESH_V)
    options = {"implementation": "xla", "tail": tail}
    mesh, student, of_teacher = on_mesh(mesh_name, kind, arrays, teacher, of_top_k=True)
    with jax.set_mesh(mesh):
        got = run(student, of_teacher, chunk_size=3, **options)
    check_against_formula(got, arrays, teacher, **options)


def test_inside_of_shard_map():
    # Each device has a mean over its own tokens; the gradient of the weight is their sum.
    arrays, teacher = make_arrays((MESH_T,), MESH_V, weights=False)
    mesh, student, of_teacher = on_mesh("tokens", AxisType.Auto, arrays, teacher)

    def loss(x, weight, teacher_x, teacher_weight):
        one = linear_distillation_loss(
            x, weight, teacher_x, teacher_weight, chunk_size=3, implementation="xla"
        )
        return jax.lax.pmean(one, "data")

    mapped = jax.shard_map(
        loss, mesh=mesh, in_specs=(P("data"), P(), P("data"), P()), out_specs=P()
    )
    graded = quick_jit(jax.value_and_grad(mapped, argnums=(0, 1)))
    value, (dx, dweight) = graded(student["x"], student["weight"], *of_teacher)
    got = {"loss": value, "x": dx, "weight": dweight}
    check_against_formula(got, arrays, teacher)


@pytest.mark.parametrize(
    "of_top_k, of_devices",
    [
        (False, "teacher"),
        (False, "token_weights"),
        pytest.param(False, "bias", marks=pytest.mark.full),
        (True, "teacher"),
        pytest.param(True, "bias", marks=pytest.mark.full),
    ],
)
def test_students_logits_that_are_the_same_on_all_devices(of_top_k, of_devices):
    """The student's logits vary over fewer Manual axes than their derivatives; 0.6 s each.

    Each device has one copy of an array along an axis that makes it vary. So each has the loss of
    one device.
    """
    arrays, teacher = make_arrays((8,), MESH_V, biases=True)
    tail = "one_bucket" if of_top_k else None
    teacher = make_top_k((8,), MESH_V) if of_top_k else teacher
    mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,))
    specs = dict.fromkeys(arrays, P()), [P()] * len(teacher)
    given = dict(arrays), list(teacher)
    if of_devices == "teacher":
        specs[1][0], given[1][0] = P("data"), np.concatenate([teacher[0]] * 2)
    else:
        specs[0][of_devices] = P("data")
        given[0][of_devices] = np.concatenate([arrays[of_devices]] * 2)

    def local(arrays, teacher):
        loss = loss_of(arrays, teacher, tail, implementation="xla")
        return jax.lax.pmean(loss, "data")

    mapped = jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=P())
    loss, gradients = quick_jit(jax.value_and_grad(mapped))(*given)
    if of_devices in gradients:
        first, second = jnp.split(gradients[of_devices], 2)
        gradients[of_devices] = first + second
    check_against_formula({"loss": loss} | gradients, arrays, teacher, tail=tail)


def graded_on_parts(check_vma, arrays, teacher, tail=None, **options):
    """Loss and gradients where the caller splits tokens and vocabulary, by name.

    A mean is over the tokens of a device, and all devices have as many.
    """
    of_top_k = tail is not None
    mesh, student, of_teacher = on_mesh("vocabulary", AxisType.Auto, arrays, teacher, of_top_k)
    tokens = P("data")
    of_student, specs = specs_of(tokens, P("tensor"), of_top_k)
    is_none = options.get("reduction") == "none"

    def local(arrays, teacher):
        loss = loss_of(arrays, teacher, tail, vocab_axis="tensor", chunk_size=5, **options)
        return loss if is_none else jax.lax.pmean(loss, "data")

    mapped = jax.shard_map(
        local,
        mesh=mesh,
        in_specs=({name: of_student[name] for name in arrays}, specs[: len(of_teacher)]),
        out_specs=tokens if is_none else P(),
        check_vma=check_vma,
    )

    def run(arrays, teacher, cotangent):
        loss, vjp = jax.vjp(lambda arrays: mapped(arrays, teacher), arrays)
        return {"loss": loss} | vjp(cotangent)[0]

    cotangent = make_cotangent(options.get("reduction"), arrays["x"].shape[:1])
    with jax.set_mesh(mesh):
        return quick_jit(run)(student, tuple(of_teacher), cotangent)


@pytest.mark.parametrize(
    "divergence, check_vma, reduction, dtype",
    [
        ("forward_kl", True, "mean", F32),
        pytest.param("reverse_kl", False, "mean", F32, marks=pytest.mark.full),
        ("jensen_shannon", False, "none", BF16),
        pytest.param("jensen_shannon", True, "none", F32, marks=pytest.mark.full),
    ],
)
def test_a_vocabulary_that_the_caller_splits(divergence, check_vma, reduction, dtype):
    """3 s each."""
    arrays, teacher = make_arrays((MESH_T,), MESH_V, dtype, biases=True)
    if reduction == "mean":  # or the devices' sums of weights would differ
        del arrays["token_weights"]
    options = {"reduction": reduction, "logit_softcap": 3.0, "divergence": divergence}
    got = graded_on_parts(check_vma, arrays, teacher, implementation="xla", **options)
    # Each device rounds its summand of dx.
    check_against_formula(got, arrays, teacher, slack=1.2 * math.sqrt(2), **options)


@pytest.mark.parametrize(
    "tail, check_vma",
    [
        ("one_bucket", False),
        pytest.param("one_bucket", True, marks=pytest.mark.full),
        pytest.param("ignore", True, marks=pytest.mark.full),
    ],
)
def test_top_k_of_a_vocabulary_that_the_caller_splits(tail, check_vma):
    """3 s each."""
    arrays, _ = make_arrays((MESH_T,), MESH_V, biases=True)
    teacher = make_top_k((MESH_T,), MESH_V)
    options = {"reduction": "none", "logit_softcap": 3.0, "tail": tail}
    got = graded_on_parts(check_vma, arrays, teacher, implementation="xla", **options)
    check_against_formula(got, arrays, teacher, slack=1.2 * math.sqrt(2), **options)


# The kernels of a split vocabulary are compiled (tests/aot) and not interpreted: at the end of a
# kernel the interpreter waits for all devices, and on two cores some of them wait in an exchange.


@pytest.mark.parametrize(
    "options, error, message",
    [
        ({"vocab_axis": "model"}, ValueError, "vocab_axis='model' is not bound; call linear_dis"),
        ({"vocab_axis": 1}, TypeError, "must be the name of a mesh axis"),
    ],
)
@pytest.mark.parametrize("of_top_k", [False, True], ids=["logits", "top_k"])
def test_axes_of_the_vocabulary_that_do_not_suit(
    unchecked_shapes, of_top_k, options, error, message
):
    with pytest.raises(error, match=message):
        call(of_top_k, **options)


def test_the_reference_has_the_whole_vocabulary():
    arrays, teacher = make_arrays((MESH_T,), MESH_V)
    with pytest.raises(ValueError, match="vocab_axis='tensor': implementation='reference' has"):
        graded_on_parts(False, arrays, teacher, implementation="reference")
