"""What each rematerialization policy keeps and runs again, and that none changes a result."""

import dataclasses
import functools
import re
from collections import Counter

import chex
import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from models.llama import Llama, LlamaConfig
from models.remat import POLICIES, TENSOR_NAMES, remat_policy
from models.rope import RopeParameters

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
# How many of a layer's 9 GEMMs the backward runs again: q, k, v, scores, weighted values, o, gate,
# up, down.
RECOMPUTED_GEMMS = {
    "none": 0,
    "minimal": 0,
    # The down projection: the norm that follows it needs the sum of its output and the residual.
    "gate,up,attn_proj,attention": 1,
    CUSTOM: 2,
    "attention": 4,
    "q,k,v": 6,
    "gate": 8,
    "full": 9,
}
RUNS_ATTENTION_AGAIN = {"q,k,v", "gate", "full"}

each_layout = pytest.mark.parametrize("scan_layers", [True, False], ids=["scanned", "unrolled"])


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
    # Compiles in half the time; LLVM comes after all that is inspected here.
    options = {"xla_backend_optimization_level": 0}
    compute = jax.jit(hidden_and_gradients, static_argnums=(1, 2), compiler_options=options)
    return compute.trace(STATE, remat, scan_layers)


@functools.cache
def compiled(remat: str, scan_layers: bool):
    return traced(remat, scan_layers).lower().compile()


@functools.cache
def kept(remat: str, scan_layers: bool) -> Counter:
    """Shapes of all arrays with a sequence axis that the forward leaves to the backward."""
    # A function returned by `jax.vjp` is a pytree whose leaves are what it closes over.
    vjp = jax.eval_shape(
        lambda state, tokens: jax.vjp(lambda s: forward(s, tokens, remat, scan_layers), state)[1],
        STATE,
        TOKENS,
    )
    return Counter(leaf.shape for leaf in jax.tree.leaves(vjp) if S in leaf.shape)


def equations(jaxpr):
    """All equations, those of inner programs (once each) included."""
    for equation in jaxpr.eqns:
        yield equation
        for inner in jax.tree.leaves(
            list(equation.params.values()),
            is_leaf=lambda a: hasattr(a, "eqns") or hasattr(a, "jaxpr"),
        ):
            inner = getattr(inner, "jaxpr", inner)
            if hasattr(inner, "eqns"):
                yield from equations(inner)


def test_layers_tag_what_policies_may_name():
    names = {
        equation.params["name"]
        for equation in equations(traced("none", True).jaxpr.jaxpr)
        if equation.primitive.name == "name"
    }
    assert names == set(TENSOR_NAMES)


@each_layout
@pytest.mark.parametrize("remat", [*POLICIES, CUSTOM])
def test_no_policy_changes_values_or_gradients(remat, scan_layers):
    got, expected = compiled(remat, scan_layers)(STATE), compiled("none", True)(STATE)
    # Fused differently, so rounded differently: some float32 epsilons of the largest element.
    chex.assert_trees_all_close(
        *(jax.tree.map(lambda a, e: a / jnp.max(jnp.abs(e)), t, expected) for t in (got, expected)),
        rtol=0,
        atol=2e-6,
    )


@each_layout
@pytest.mark.parametrize("remat", RECOMPUTED_GEMMS)
def test_what_runs_again(remat, scan_layers):
    program = traced(remat, scan_layers).jaxpr.jaxpr
    primitives = Counter(equation.primitive.name for equation in equations(program))
    layers = 1 if scan_layers else L
    # A GEMM has two more in its backward.
    assert primitives["dot_general"] == layers * (3 * 9 + RECOMPUTED_GEMMS[remat])
    # The exponential is the softmax's; silu has `logistic`.
    assert primitives["exp"] == layers * (1 + (remat in RUNS_ATTENTION_AGAIN))


@each_layout
@pytest.mark.parametrize("remat", ["none", "minimal", CUSTOM, "full"])
def test_xla_keeps_the_recomputation(remat, scan_layers):
    # XLA would merge it with the first computation where nothing prevents that.
    program = compiled(remat, scan_layers).as_text() or ""
    layers = 1 if scan_layers else L
    assert len(re.findall(r" dot\(", program)) == layers * (3 * 9 + RECOMPUTED_GEMMS[remat])


@each_layout
def test_memory_falls_from_none_to_full(scan_layers):
    def temporary_bytes(remat):
        analysis = compiled(remat, scan_layers).memory_analysis()
        assert analysis is not None
        return analysis.temp_size_in_bytes

    none, minimal, full = map(temporary_bytes, ("none", "minimal", "full"))
    assert full < minimal < none
    # Of what `none` keeps in a layer, `full` drops all but the two arrays that enter it.
    assert none - full > (L - 1) * 4 * B * S * (3 * F + 2 * N * S)


@each_layout
def test_full_keeps_only_what_enters_a_layer(scan_layers):
    per_layer = kept("full", scan_layers)
    # Outside of the layers: gathered embeddings and first norm, tokens' cos and sin.
    outside = Counter({(B, S, D): 3, (B, S, 1): 3, (1, S, H // 2): 2})
    entering = Counter({(L, B, S, D): 2} if scan_layers else {(B, S, D): 2 * L - 1})
    assert per_layer == outside + entering


@each_layout
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
        ("mlp_out", [(B, S, D)]),
        ("rstd", [(B, S, 1)] * 2),
        ("gate, rstd", [(B, S, F)] + [(B, S, 1)] * 2),
    ],
)
def test_a_name_keeps_its_tensor_and_nothing_else(name, shapes, scan_layers):
    expected = Counter([(L, *shape) for shape in shapes] if scan_layers else shapes * L)
    full = kept("full", scan_layers)
    assert kept(name, scan_layers) == full + expected


def residuals(scan_layers):
    # The residual between attention and MLP. The one after the MLP enters the next layer and so is
    # kept in any case, but for the last layer's.
    return Counter({(L, B, S, D): 1} if scan_layers else {(B, S, D): L + 1})


@each_layout
def test_the_residual_is_kept_once(scan_layers):
    assert kept("residual", scan_layers) == kept("full", scan_layers) + residuals(scan_layers)


@each_layout
def test_minimal_adds_to_the_attention_what_spares_gemms(scan_layers):
    # gate and up; the residual; the normed input of the MLP; a number per token for each norm.
    shapes = [(B, S, F)] * 2 + [(B, S, D)] + [(B, S, 1)] * 2
    expected = Counter([(L, *shape) for shape in shapes] if scan_layers else shapes * L)
    expected += residuals(scan_layers)
    assert kept("minimal", scan_layers) == kept("attention", scan_layers) + expected


@each_layout
def test_attention_keeps_no_tensor_of_the_mlp(scan_layers):
    extra = kept("attention", scan_layers) - kept("full", scan_layers)
    assert extra and not any(F in shape or shape[-1] == D for shape in extra)
    assert any(shape[-2:] == (S, S) for shape in extra)


@pytest.mark.parametrize(
    "remat, unknown",
    [
        ("nothing", "nothing"),
        ("Full", "Full"),
        ("", ""),
        ("q,,k", ""),
        ("gate,full", "full"),
        ("gate,upp", "upp"),
    ],
)
def test_unknown_names_raise(remat, unknown):
    with pytest.raises(ValueError, match=re.escape(f"[{unknown!r}] unknown; use one of")) as error:
        remat_policy(remat)
    assert repr(remat) in str(error.value)
    assert all(name in str(error.value) for name in (*POLICIES, *TENSOR_NAMES))
    with pytest.raises(ValueError, match="unknown"):
        dataclasses.replace(CONFIG, remat=remat)


def test_names_may_stand_in_any_order_with_spaces():
    assert remat_policy(" up , attention,gate ") == dataclasses.replace(
        remat_policy("up"), tensors=("up", "gate"), attention=True
    )
