"""Rematerialization policies: each keeps and runs again what it says, and none changes a result."""

import dataclasses
import functools
import re
from collections import Counter
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from models.config import LlamaConfig
from models.llama import Llama
from models.remat import POLICIES, TENSOR_NAMES, remat_policy
from models.rope import RopeParameters
from models.sharding import make_mesh
from pallas_kernels import add_rms_norm
from support.jaxprs import equations
from support.numerics import assert_close, quick_jit

CONFIG = LlamaConfig(
    vocab_size=48,
    hidden_size=32,
    intermediate_size=80,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=64,
    initializer_range=0.2,
    rms_norm_eps=1e-5,
    tie_word_embeddings=True,
    rope_parameters=RopeParameters(rope_theta=1e4),
    dtype="float32",
)
B, S = 2, 24
L, D, F = CONFIG.num_hidden_layers, CONFIG.hidden_size, CONFIG.intermediate_size
N, K, H = CONFIG.num_attention_heads, CONFIG.num_key_value_heads, CONFIG.head_dim
TOKENS = jax.random.randint(jax.random.key(0), (B, S), 0, CONFIG.vocab_size, jnp.int32)
COTANGENT = jax.random.normal(jax.random.key(1), (B, S, D))

CUSTOM = "attention, gate,up"
TO_HOST = "attention,residual,gate@host,up@host"
SUMS = "attention,residual,rstd,gate,up"
# Number of a layer's 7 GEMMs that the backward runs again. The GEMMs are q with k and v, scores,
# weighted values, o, gate, up, down.
RECOMPUTED_GEMMS = {
    "none": 0,
    "minimal": 0,
    "offload": 0,
    "mlp_inputs": 2,
    # Without `normed`, the first norm is made again from what enters the layer, and no operation
    # needs the output of the down projection.
    "gate,up,attn_proj,attention": 0,
    # With `normed`, the norm that ends the layer needs that output to make its input again.
    "normed,attn_proj,attention": 3,
    CUSTOM: 1,
    # The norms run again, from the residuals. (Without `rstd` a kernel would make the residual
    # again with them.)
    TO_HOST: 0,
    SUMS: 0,
    "attention": 3,
    "q,k,v": 5,
    "gate": 5,
    "full": 6,
}
RUNS_ATTENTION_AGAIN = {"q,k,v", "gate", "full"}

each_layout = pytest.mark.parametrize("scan_layers", [True, False], ids=["scanned", "unrolled"])


def in_each_layout(names, *, full=()):
    """Each policy in the layouts that take it; cases in `full` have that marker."""
    cases = [(name, True) for name in names]
    cases += [(name, False) for name in names if not remat_policy(name).offloaded]
    assert set(full) <= set(cases)
    params = [
        pytest.param(
            *(name, scanned),
            id=f"{name}-{'scanned' if scanned else 'unrolled'}",
            marks=pytest.mark.full if (name, scanned) in full else (),
        )
        for name, scanned in cases
    ]
    return pytest.mark.parametrize("remat, scan_layers", params)


GRAPHDEF, STATE = nnx.split(Llama(CONFIG, rngs=nnx.Rngs(0)))


def forward(state, tokens, remat: str, scan_layers: bool) -> jax.Array:
    """The hidden states under a policy, which is read when the model is called."""
    model = nnx.merge(GRAPHDEF, state)
    model.config = dataclasses.replace(CONFIG, remat=remat, scan_layers=scan_layers)
    return model(tokens)


def hidden_and_gradients(state, remat: str, scan_layers: bool):
    hidden, vjp = jax.vjp(lambda state: forward(state, TOKENS, remat, scan_layers), state)
    return hidden, vjp(COTANGENT)[0]


@functools.cache
def traced(remat: str, scan_layers: bool):
    # The tests inspect the program before LLVM.
    compute = quick_jit(hidden_and_gradients, static_argnums=(1, 2))
    return compute.trace(STATE, remat, scan_layers)


@functools.cache
def compiled(remat: str, scan_layers: bool):
    return traced(remat, scan_layers).lower().compile()


@functools.cache
def kept(remat: str, scan_layers: bool) -> Counter:
    """Shapes of all arrays with a sequence axis that the forward leaves to the backward.

    Shapes of arrays in host memory have "host" before their sizes.
    """
    # A function returned by `jax.vjp` is a pytree whose leaves are what it closes over.
    program = jax.make_jaxpr(
        lambda state, tokens: jax.vjp(lambda s: forward(s, tokens, remat, scan_layers), state)[1]
    )(STATE, TOKENS)
    return kept_in(program)


def kept_in(program) -> Counter:
    shapes = shapes_of(program.out_avals)
    return Counter({shape: number for shape, number in shapes.items() if S in shape})


def shapes_of(avals: Sequence[Any]) -> Counter:
    on_host = lambda aval: aval.memory_space == jax.memory.Space.Host
    return Counter(("host", *aval.shape) if on_host(aval) else aval.shape for aval in avals)


def test_layers_tag_what_policies_may_name():
    names = {
        equation.params["name"]
        for equation in equations(traced("none", True).jaxpr.jaxpr)
        if equation.primitive.name == "name"
    }
    # The others belong to layers in FP8, and to models that norm the queries and keys.
    assert names == set(TENSOR_NAMES) - {"fp8_x", "q_proj", "k_proj"}


@pytest.mark.parametrize("remat", ["minimal", "offload", "attention"])
def test_the_norms_of_queries_and_keys(remat):
    """A policy that keeps the results of GEMMs keeps queries and keys before their norms."""
    config = dataclasses.replace(CONFIG, qk_norm=True, remat=remat)
    graphdef, state = nnx.split(nnx.eval_shape(lambda: Llama(config, rngs=nnx.Rngs(0))))
    backward_of = lambda state: jax.vjp(lambda s: nnx.merge(graphdef, s)(TOKENS), state)[1]
    found = kept_in(jax.make_jaxpr(backward_of)(state)) - kept(remat, True)
    host = ("host",) if remat == "offload" else ()
    of_norms = [(*host, L, B, S, heads, H) for heads in (N, K)]
    of_norms += [(L, B, S, heads, 1) for heads in (N, K)]
    assert found == (Counter() if remat == "attention" else Counter(of_norms))
    program = jax.make_jaxpr(lambda state: backward_of(state)(COTANGENT))(state)
    primitives = Counter(equation.primitive.name for equation in equations(program.jaxpr))
    projections = 1 if remat == "attention" else 0  # again
    assert primitives["dot_general"] == gemms_of_trace(remat) + projections


# The traces below show what each policy runs again and keeps, in both layouts. The normal run
# compiles only some of them. It compiles `offload` on a mesh, in `test_offloading_from_a_mesh`.
UNROLLED = [(name, False) for name in ("none", "minimal", "attention", "mlp_inputs", CUSTOM)]
SCANNED = [(name, True) for name in ("full", "attention", "mlp_inputs", "offload", CUSTOM, TO_HOST)]


@in_each_layout([*POLICIES, CUSTOM, TO_HOST], full=UNROLLED + SCANNED)
def test_no_policy_changes_values_or_gradients(remat, scan_layers):
    assert_close(compiled(remat, scan_layers)(STATE), compiled("none", True)(STATE))


# Some chunks divide the sequence, others do not.
@pytest.mark.parametrize(
    "remat, chunk_size, scan_layers",
    [
        pytest.param("full", 8, True, marks=pytest.mark.full),
        pytest.param("full", 8, False, marks=pytest.mark.full),
        pytest.param("mlp_inputs", 7, True, marks=pytest.mark.full),
        ("mlp_inputs", 7, False),
        pytest.param("attention", S, True, marks=pytest.mark.full),
        pytest.param("attention", S, False, marks=pytest.mark.full),
    ],
)
def test_chunks_of_the_mlp(remat, chunk_size, scan_layers):
    config = dataclasses.replace(
        CONFIG, remat=remat, mlp_chunk_size=chunk_size, scan_layers=scan_layers
    )
    graphdef = nnx.graphdef(nnx.eval_shape(lambda: Llama(config, rngs=nnx.Rngs(0))))

    def compute(state):
        hidden, vjp = jax.vjp(lambda state: nnx.merge(graphdef, state)(TOKENS), state)
        return hidden, vjp(COTANGENT)[0]

    got = quick_jit(compute).trace(STATE)
    assert_close(got.lower().compile()(STATE), compiled("none", True)(STATE))
    shapes = {v.aval.shape for equation in equations(got.jaxpr.jaxpr) for v in equation.outvars}
    assert (B, chunk_size, F) in shapes
    assert ((B, S, F) in shapes) == (chunk_size == S)


@pytest.mark.parametrize(
    "changes, message",
    [
        (dict(remat="minimal"), "makes gate and up again, which remat='minimal' keeps"),
        (dict(remat="none"), "which remat='none' keeps"),
        (dict(remat="gate@host"), "which remat='gate@host' keeps"),
        (dict(remat="full", mlp_bias=True), "without biases"),
        (dict(remat="full", hidden_act="relu"), "got hidden_act='relu'"),
        (dict(remat="full", mlp_chunk_size=-1), "mlp_chunk_size=-1 must be a whole number"),
        (dict(remat="full", mlp_chunk_size=True), "mlp_chunk_size=True must be a whole number"),
    ],
    ids=str,
)
def test_chunks_of_the_mlp_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(CONFIG, **{"mlp_chunk_size": 8} | changes)


def gemms_of_trace(remat):
    """The GEMMs of a layer in JAX's program: a GEMM has two more in its backward."""
    # JAX runs the whole MLP again for gate or up. XLA leaves out the down projection or gate if no
    # operation reads it (`test_xla_keeps_the_recomputation`).
    unread = {"mlp_inputs": 1, "attention": 1, "q,k,v": 1, "gate": 2, "full": 1}.get(remat, 0)
    return 3 * 7 + RECOMPUTED_GEMMS[remat] + unread


@in_each_layout(RECOMPUTED_GEMMS)
def test_operations_that_run_again(remat, scan_layers):
    program = traced(remat, scan_layers).jaxpr.jaxpr
    primitives = Counter(equation.primitive.name for equation in equations(program))
    layers = 1 if scan_layers else L
    assert primitives["dot_general"] == layers * gemms_of_trace(remat)
    # The exponential is the softmax's; silu has `logistic`.
    assert primitives["exp"] == layers * (1 + (remat in RUNS_ATTENTION_AGAIN))


def test_the_mlp_writes_gate_and_up_where_a_policy_keeps_them_or_runs_it_again():
    def save(remat):
        config = dataclasses.replace(CONFIG, remat=remat)
        return nnx.eval_shape(lambda: Llama(config, rngs=nnx.Rngs(0))).layers.mlp.save

    names = (*POLICIES, "residual,rstd", "residual,rstd,up", "residual,rstd,gate@host")
    saves = {remat: save(remat) for remat in names}
    assert {remat for remat, save in saves.items() if save == "x"} == {
        "mlp_inputs",
        "residual,rstd",
    }


@in_each_layout(
    ["none", "minimal", "mlp_inputs", "offload", CUSTOM, "full"],
    full=[
        *(case for case in UNROLLED if case[0] != "attention"),
        ("offload", True),
        (CUSTOM, True),
    ],
)
def test_xla_keeps_the_recomputation(remat, scan_layers):
    # XLA would merge it with the first computation where nothing prevents that.
    program = compiled(remat, scan_layers).as_text() or ""
    layers = 1 if scan_layers else L
    assert len(re.findall(r" dot\(", program)) == layers * (3 * 7 + RECOMPUTED_GEMMS[remat])


@pytest.mark.parametrize(
    "scan_layers",
    [
        pytest.param(True, id="scanned"),
        pytest.param(False, id="unrolled", marks=pytest.mark.full),
    ],
)
def test_memory_falls_from_none_to_full(scan_layers):
    def temporary_bytes(remat):
        analysis = compiled(remat, scan_layers).memory_analysis()
        assert analysis is not None
        return analysis.temp_size_in_bytes

    none, minimal, full = map(temporary_bytes, ("none", "minimal", "full"))
    assert full < minimal
    # `full` keeps only the input of a layer. (For CPUs XLA starts some recomputation of unrolled
    # layers early. Then it has one of two arrays of the softmax.)
    softmax_arrays = 2 if scan_layers else 1
    assert none - full > (L - 1) * 4 * B * S * (2 * F + softmax_arrays * N * S)


# q in groups, k and v, and two halves of the softmax's gradient; the last two are its statistics.
HEADS = B, K, N // K
SOFTMAX = [(B, S, K, N // K, H)] + [(B, S, K, H)] * 2 + [(*HEADS, S, S)] * 2 + [(*HEADS, S, 1)] * 2
ATTENTION = [*SOFTMAX, (B, S, N, H)]
# Two masks of the softmax and, twice, cosines and sines: the same in each layer, so outside of the
# scan.
MASKS, POSITIONS = [(*HEADS, S, S)] * 2, [(1, S, 1, H // 2)] * 4
# The tensors that each policy keeps of a layer, and those that a scan keeps once.
KEPT = {
    "full": ([(B, S, D)], []),
    "attention": ([*ATTENTION, (B, S, D)], MASKS),
    # `normed` enters the layer and the MLP, `residual` leaves both halves; two are `rstd`.
    "mlp_inputs": (ATTENTION + [(B, S, D)] * 4 + [(B, S, 1)] * 2, MASKS),
    "minimal": (ATTENTION + [(B, S, D)] * 4 + [(B, S, 1)] * 2 + [(B, S, F)] * 2, MASKS),
    "offload": (
        ATTENTION + [("host", B, S, D)] * 4 + [(B, S, 1)] * 2 + [("host", B, S, F)] * 2,
        MASKS,
    ),
    TO_HOST: (ATTENTION + [(B, S, D)] * 2 + [("host", B, S, F)] * 2, MASKS),
    SUMS: (ATTENTION + [(B, S, D)] * 2 + [(B, S, 1)] * 2 + [(B, S, F)] * 2, MASKS),
    # Without a checkpoint the forward keeps every factor of a derivative, gate and up of the MLP.
    "none": (SOFTMAX + [(B, S, D)] * 9 + [(B, S, 1)] * 4 + [(B, S, F)] * 2, MASKS + POSITIONS),
}
assert set(POLICIES) < set(KEPT)


def stacked(shape):
    return ("host", L, *shape[1:]) if shape[0] == "host" else (L, *shape)


@in_each_layout(KEPT)
def test_tensors_that_are_kept(remat, scan_layers):
    of_layer, of_all_layers = KEPT[remat]
    # Outside of the layers the forward keeps embeddings and arrays of a norm.
    expected = Counter({(B, S, D): 3, (B, S, 1): 3})
    if remat != "none":
        expected[1, S, H // 2] = 2  # cosines and sines
    if scan_layers:
        expected += Counter([*map(stacked, of_layer), *of_all_layers])
    else:
        expected += Counter((of_layer + of_all_layers) * L)
    assert kept(remat, scan_layers) == expected


@pytest.mark.parametrize(
    "scan_layers",
    [
        pytest.param(True, id="scanned"),
        pytest.param(False, id="unrolled", marks=pytest.mark.full),
    ],
)
@pytest.mark.parametrize(
    "name, shapes",
    [
        ("q", [(B, S, N, H)]),
        ("k", [(B, S, K, H)]),
        ("v", [(B, S, K, H)]),
        ("attn_out", [(B, S, N, H)]),
        ("attn_proj", [(B, S, D)]),
        ("gate", [(B, S, F)]),
        ("up", [(B, S, F)]),
        ("rstd", [(B, S, 1)] * 2),
        ("gate, rstd", [(B, S, F)] + [(B, S, 1)] * 2),
    ],
)
def test_a_name_keeps_its_tensor_and_nothing_else(name, shapes, scan_layers):
    expected = Counter([(L, *shape) for shape in shapes] if scan_layers else shapes * L)
    full = kept("full", scan_layers)
    assert kept(name, scan_layers) == full + expected


@each_layout
def test_the_output_of_the_mlp_is_kept_where_a_norm_follows(scan_layers):
    expected = Counter([(L, B, S, D)] if scan_layers else [(B, S, D)] * L)
    assert kept("normed,mlp_out", scan_layers) == kept("normed", scan_layers) + expected
    # Without a norm after it, the backward does not read it.
    assert kept("mlp_out", scan_layers) == kept("full", scan_layers)


@each_layout
def test_the_residual_is_kept_once(scan_layers):
    # It is the residual between attention and MLP. The one after the MLP enters the next layer, so
    # every policy keeps it.
    expected = Counter([(L, B, S, D)] if scan_layers else [(B, S, D)] * L)
    assert kept("residual", scan_layers) == kept("full", scan_layers) + expected


@pytest.mark.parametrize(
    "name, shape, number",
    [("gate", (B, S, F), 1), ("q", (B, S, N, H), 1), ("rstd", (B, S, 1), 2)],
)
def test_a_name_with_host_goes_to_host_memory(name, shape, number):
    expected = Counter({("host", L, *shape): number})
    assert kept(f"{name}@host", True) == kept("full", True) + expected


def test_the_input_of_a_layer_may_go_to_host_memory():
    on_device = Counter({(L, B, S, D): 1})
    expected = kept("full", True) - on_device + Counter({("host", L, B, S, D): 1})
    assert kept("layer_input@host", True) == expected
    assert kept("layer_input", True) == kept("full", True)


@pytest.mark.parametrize("remat", ["offload", TO_HOST, "layer_input@host"])
def test_offloading_from_unrolled_layers_is_refused(remat):
    with pytest.raises(ValueError, match="host memory, which needs scan_layers=True"):
        dataclasses.replace(CONFIG, remat=remat, scan_layers=False)


def test_offloading_from_a_mesh():
    # On a mesh the norms and some of the names are inside of a `jax.shard_map`.
    with jax.set_mesh(make_mesh(data=1, fsdp=2, devices=jax.devices()[:2])):
        on_mesh = kept.__wrapped__("offload", True)
        got = traced.__wrapped__("offload", True).lower().compile()(STATE)
    on_host = lambda shapes: {s: n for s, n in shapes.items() if s[0] == "host"}
    assert on_host(on_mesh) == on_host(kept("offload", True))
    assert_close(jax.device_get(got), compiled("none", True)(STATE))


def behind_barriers(program) -> set[tuple[int, ...]]:
    """Shapes of all arrays that go through a barrier of `jax.checkpoint`."""
    again = [e for e in equations(program.jaxpr.jaxpr) if e.params.get("differentiated")]
    assert again
    inputs = [zip(e.invars, e.params["prevent_cse"], strict=True) for e in again]
    return {v.aval.shape for pairs in inputs for v, barrier in pairs if barrier}


@pytest.mark.parametrize("remat", ["minimal", "full"])
def test_whole_weights_go_through_no_barrier(remat):
    weights = {(D, F), (F, D)}
    with jax.set_mesh(make_mesh(data=2, fsdp=1, devices=jax.devices()[:2])):
        assert not behind_barriers(traced.__wrapped__(remat, False)) & weights
    with jax.set_mesh(make_mesh(data=1, fsdp=2, devices=jax.devices()[:2])):
        assert behind_barriers(traced.__wrapped__(remat, False)) >= weights
    without_mesh = behind_barriers(traced(remat, False))
    assert not without_mesh & weights
    assert (B, S, D) in without_mesh


# JAX's next implementation of `jax.checkpoint`


@pytest.fixture
def remat3():
    if not hasattr(jax.config, "jax_remat3"):
        pytest.skip("this JAX has no jax_remat3")
    before = jax.config.jax_remat3
    jax.config.update("jax_remat3", True)
    yield
    jax.config.update("jax_remat3", before)


names_in_rules_are_not_seen = pytest.mark.xfail(
    strict=True, reason="jax_remat3 does not see the names in the rule of a jax.custom_vjp"
)


@in_each_layout(
    ["none", "full", "attention", "mlp_inputs"],
    full=[("none", True), ("full", False), ("attention", False), ("mlp_inputs", True)],
)
def test_remat3_keeps_the_same(remat3, remat, scan_layers):
    of_layer = Counter(kept.__wrapped__(remat, scan_layers))
    jax.config.update("jax_remat3", False)
    assert of_layer == kept(remat, scan_layers)


@pytest.mark.full
@in_each_layout(["full", "mlp_inputs"])
def test_remat3_computes_the_same(remat3, remat, scan_layers):
    program = traced.__wrapped__(remat, scan_layers)
    primitives = Counter(equation.primitive.name for equation in equations(program.jaxpr.jaxpr))
    assert not primitives["remat2"]
    layers = 1 if scan_layers else L
    assert primitives["dot_general"] == layers * gemms_of_trace(remat)
    assert_close(program.lower().compile()(STATE), compiled("none", True)(STATE))


@names_in_rules_are_not_seen
@in_each_layout(["minimal", "offload", TO_HOST])
def test_remat3_keeps_what_the_mlp_names(remat3, remat, scan_layers):
    of_layer = Counter(kept.__wrapped__(remat, scan_layers))
    jax.config.update("jax_remat3", False)
    assert of_layer == kept(remat, scan_layers)


@names_in_rules_are_not_seen
def test_remat3_keeps_what_a_kernel_names(remat3):
    x, weight = jnp.ones((64, 256), jnp.bfloat16), jnp.ones((256,))
    norm = lambda x: add_rms_norm(x, x, weight, implementation="mosaic_gpu")
    norm = POLICIES["minimal"].checkpoint(norm, prevent_cse=True)
    program = jax.make_jaxpr(lambda x: jax.vjp(norm, x)[1])(x)
    # The weight, the residual and rstd.
    assert shapes_of(program.out_avals) == Counter([(256,), x.shape, x.shape[:1]])
