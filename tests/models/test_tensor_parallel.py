"""Devices that share sequences: the numbers of one device, and what goes between them."""

import dataclasses
import functools
import re
from collections import Counter
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import train.step
from models.config import LlamaConfig
from models.llama import Llama
from models.remat import POLICIES
from models.rope import RopeParameters
from models.sampling import generate
from models.sharding import (
    batch_sharding,
    check_tensor_parallel,
    make_mesh,
    parameter_path,
    parameter_shardings,
    replicated,
    sum_over_devices,
    tensor_axis,
)
from pallas_kernels import linear_cross_entropy
from support.numerics import assert_trees_as_accurate
from support.textbook_llama import textbook_logits
from train.config import DataConfig, OptimizerConfig, TrainConfig
from train.step import init_state, loss_and_sums, make_train_step, model_graph

# Sizes, and the parts of them on up to eight devices, say in a compiled program what they are.
CONFIG = LlamaConfig(
    vocab_size=1008,
    hidden_size=64,
    intermediate_size=144,
    num_hidden_layers=3,
    num_attention_heads=8,
    num_key_value_heads=4,
    head_dim=10,
    max_position_embeddings=64,
    rms_norm_eps=1e-5,
    tie_word_embeddings=False,
    rope_parameters=RopeParameters(rope_theta=100.0),
    dtype="float32",
    remat="minimal",
)
BIASES = {"attention_bias": True, "mlp_bias": True}
L, D, F, V, Q, KV = 3, 64, 144, 1008, 80, 40
# On four devices of `data` and `fsdp` three rows each, which two devices share as 1.5 rows each.
B, S = 12, 28
Z_LOSS = 0.01

pytestmark = pytest.mark.usefixtures("fast_compilation")


def changed(**changes: Any) -> LlamaConfig:
    return dataclasses.replace(CONFIG, **changes)


def mesh_of(data: int, fsdp: int, tensor: int) -> jax.sharding.Mesh:
    devices = jax.devices()[: data * fsdp * tensor]
    return make_mesh(data=data, fsdp=fsdp, tensor=tensor, devices=devices)


def parameters(config: LlamaConfig = CONFIG) -> nnx.State:
    """Random numpy arrays: no norm is the identity, no bias 0."""
    shapes = nnx.state(nnx.eval_shape(lambda: Llama(config, rngs=nnx.Rngs(0))))
    rng = np.random.default_rng(0)

    def random(path, shape):
        center = 1.0 if "norm" in parameter_path(path)[-2] else 0.0
        return np.asarray(center + 0.15 * rng.normal(size=shape.shape), shape.dtype)

    return jax.tree.map_with_path(random, shapes)


def packed_batch() -> dict[str, np.ndarray]:
    """Rows of two documents of lengths that differ by row, some with padding at the end."""
    rng = np.random.default_rng(1)
    column, row = np.arange(S), np.arange(B)[:, None]
    boundary, end = 3 + row % 20, S - row % 3
    labels = rng.integers(V, size=(B, S))
    labels[(column == boundary - 1) | (column >= end - 1)] = -100
    batch = {
        "tokens": rng.integers(V, size=(B, S)),
        "labels": labels,
        "segment_ids": np.where(column < boundary, 1, 2) * (column < end),
        "positions": np.where(column < boundary, column, column - boundary) * (column < end),
    }
    return {name: np.asarray(array, np.int32) for name, array in batch.items()}


def loss_and_gradients(graphdef, params, batch):
    loss = lambda params: loss_and_sums(graphdef, params, batch, z_loss=Z_LOSS)
    return jax.value_and_grad(loss, has_aux=True)(params)


def forward(graphdef, params, batch):
    return loss_and_sums(graphdef, params, batch)


def lowered(config: LlamaConfig, mesh, batch=None, fn=loss_and_gradients, params=None):
    """The program on a mesh, and its arguments."""
    params = parameters(config) if params is None else params
    shardings = parameter_shardings(params, mesh)
    params = jax.device_put(params, shardings)
    batch = jax.device_put(packed_batch() if batch is None else batch, batch_sharding(mesh))
    out = None if fn is forward else (None, shardings)
    # jax.nn.dot_product_attention does not lower in 16 bits under strict promotion.
    with jax.set_mesh(mesh), jax.numpy_dtype_promotion("standard"):
        program = jax.jit(fn, static_argnums=0, out_shardings=out)
        return program.lower(model_graph(config), params, batch), params, batch


@functools.cache
def compiled(config: LlamaConfig, mesh):
    """The program of loss and gradients on a mesh, and its arguments."""
    program, params, batch = lowered(config, mesh)
    return program.compile(), params, batch


def on_mesh(config: LlamaConfig, mesh):
    """`((loss, sums), gradients)`."""
    program, params, batch = compiled(config, mesh)
    return program(params, batch)


@functools.cache
def on_one_device(config: LlamaConfig):
    return on_mesh(config, mesh_of(1, 1, 1))


@functools.cache
def by_the_textbook(config: LlamaConfig, dtype: str):
    """`((loss, sums), gradients)`, all in `dtype`, whatever that of the configuration."""
    batch = packed_batch()
    labels = batch.pop("labels")

    def loss(params):
        logits = textbook_logits(params, config=config, dtype=jnp.dtype(dtype), **batch)
        lse = jax.nn.logsumexp(logits, axis=-1)
        counts = labels != -100
        nll = lse - jnp.take_along_axis(logits, np.maximum(labels, 0)[..., None], -1)[..., 0]
        correct = jnp.sum(jnp.argmax(logits, axis=-1) == labels).astype(logits.dtype)
        total = lambda a: jnp.sum(jnp.where(counts, a, 0.0))
        return total(nll + Z_LOSS * lse**2), {"nll_sum": total(nll), "correct_sum": correct}

    with jax.enable_x64(dtype == "float64"), jax.numpy_dtype_promotion("standard"):
        params = nnx.to_pure_dict(parameters(config))
        params = jax.tree.map(lambda a: jnp.asarray(a, dtype), params)
        found = jax.jit(jax.value_and_grad(loss, has_aux=True))(params)
        return jax.tree.map(np.asarray, found)


def check(config: LlamaConfig, got, *, slack: float = 2.0):
    """Compares with the textbook on one device, by the error that it makes in the same precision.

    The ratio of the two errors scatters around 1 with the order of sums.
    """
    got = got[0], nnx.to_pure_dict(got[1])
    dtype = config.dtype
    config = dataclasses.replace(config, dtype="float32")  # one entry for all dtypes
    low, exact = by_the_textbook(config, dtype), by_the_textbook(config, "float64")
    assert all(np.any(leaf) for leaf in jax.tree.leaves(exact[1]))
    assert_trees_as_accurate(got, low, exact, slack=slack)


def assert_close(got, want):
    """Sums over tokens in another order: some float32 epsilons of the largest element."""
    scale = jax.tree.map(lambda w: max(np.abs(w).max(), 1e-30), want)  # no token may be right
    scaled = lambda tree: jax.tree.map(lambda a, s: np.asarray(a) / s, tree, scale)
    chex.assert_trees_all_close(scaled(got), scaled(want), rtol=0, atol=5e-6)


# The textbook and unrolled layers take as long to compile as there are layers.
TWO_LAYERS = {"num_hidden_layers": 2}
UNROLLED = TWO_LAYERS | {"scan_layers": False}
VARIANTS = {
    "untied_scanned_biases": changed(**TWO_LAYERS, **BIASES),
    "tied_unrolled_full": changed(**UNROLLED, tie_word_embeddings=True, remat="full"),
}


# With copies of the parameters, with parts of them, and with both; in `full` each variant.
@pytest.mark.parametrize(
    "data, fsdp, tensor, variant",
    [
        pytest.param(1, 1, 4, "untied_scanned_biases", marks=pytest.mark.full),
        (1, 2, 2, "tied_unrolled_full"),
        pytest.param(2, 2, 2, "untied_scanned_biases", marks=pytest.mark.full),
        pytest.param(1, 1, 2, "tied_unrolled_full", marks=pytest.mark.full),
        pytest.param(2, 1, 2, "untied_scanned_biases", marks=pytest.mark.full),
        pytest.param(2, 2, 2, "tied_unrolled_full", marks=pytest.mark.full),
        pytest.param(1, 4, 2, "untied_scanned_biases", marks=pytest.mark.full),
    ],
)
def test_loss_and_gradients_are_those_of_one_device(data, fsdp, tensor, variant):
    config = VARIANTS[variant]
    mesh = mesh_of(data, fsdp, tensor)
    got = on_mesh(config, mesh)
    check(config, got)
    assert_close(got, on_one_device(config))
    shardings = parameter_shardings(got[1], mesh)
    for gradient, sharding in zip(*map(jax.tree.leaves, (got[1], shardings)), strict=True):
        assert gradient.sharding.is_equivalent_to(sharding, gradient.ndim)


HOST = "attention,residual,gate@host"
# An MLP that keeps its input, and offloading. `minimal` is the configuration's own, and `full` that
# of other tests here.
POLICIES_BY_DEFAULT = ("mlp_inputs", HOST)


@pytest.mark.parametrize(
    "remat",
    [
        pytest.param(name, marks=() if name in POLICIES_BY_DEFAULT else pytest.mark.full)
        for name in (*POLICIES, "q,mlp_out,attn_proj", HOST)
    ],
)
def test_no_policy_changes_the_numbers(remat):
    assert_close(on_mesh(changed(remat=remat), mesh_of(1, 2, 2)), on_one_device(CONFIG))


@pytest.mark.parametrize("remat", ["none", pytest.param("minimal", marks=pytest.mark.full)])
def test_unrolled_layers_have_the_numbers_of_scanned_ones(remat):
    got = on_mesh(changed(**UNROLLED, **BIASES, remat=remat), mesh_of(2, 2, 2))
    assert_close(got, on_one_device(VARIANTS["untied_scanned_biases"]))


@pytest.mark.parametrize(
    "changes",
    [
        BIASES | {"hidden_act": "gelu", "implementation": "xla"},
        pytest.param(BIASES | {"hidden_act": "gelu"}, marks=pytest.mark.full),
        pytest.param({"implementation": "xla"}, marks=pytest.mark.full),
    ],
    ids=str,
)
def test_other_layers(changes):
    config = changed(**TWO_LAYERS, **changes)
    check(config, on_mesh(config, mesh_of(2, 2, 2)))


def test_in_bfloat16():
    config = dataclasses.replace(VARIANTS["untied_scanned_biases"], dtype="bfloat16")
    check(config, on_mesh(config, mesh_of(2, 2, 2)))


def test_rows_of_one_document_whose_padding_token_is_read_but_not_trained():
    batch = {name: array for name, array in packed_batch().items() if name in ("tokens", "labels")}
    config = changed(tie_word_embeddings=False, pad_token_id=int(batch["tokens"][0, 0]))
    programs = [lowered(config, mesh_of(*m), batch=batch) for m in ((1, 2, 2), (1, 1, 1))]
    got, want = (program.compile()(*arguments) for program, *arguments in programs)
    assert_close(got, want)
    gradient = got[1]["embed_tokens"]["embedding"][...]
    assert not np.any(gradient[config.pad_token_id]) and np.any(gradient)


@functools.cache
def hidden_states():
    """Of `(params, batch)`, on two devices, which share all rows: nothing is left to sum over."""

    def states(params, batch):
        model = nnx.merge(model_graph(CONFIG), params)
        return model(batch["tokens"], segment_ids=batch["segment_ids"])

    return jax.jit(lambda params, batch: sum_over_devices(states)(params, batch))


@pytest.mark.parametrize("token", [-1, V, -(2**31), 2**31 - 1])
def test_a_token_on_no_device_makes_its_row_nan(token):
    batch = packed_batch()
    batch["tokens"][4, 0] = token
    mesh = mesh_of(1, 1, 2)
    params = jax.device_put(parameters(), parameter_shardings(parameters(), mesh))
    with jax.set_mesh(mesh):
        states = hidden_states()(params, jax.device_put(batch, batch_sharding(mesh)))
    is_nan = np.isnan(states)
    assert np.all(is_nan[4]) and not np.any(np.delete(is_nan, 4, axis=0))


# What is refused.


def test_heads_that_cannot_be_shared_raise():
    config = changed(num_key_value_heads=2)
    message = r"tensor=4 does not divide num_key_value_heads=2, .* use tensor=2, and fsdp for"
    with pytest.raises(ValueError, match=message):
        lowered(config, mesh_of(1, 1, 4))
    check_tensor_parallel(2, num_key_value_heads=2, num_tokens=6)


def test_tokens_that_cannot_be_shared_raise():
    batch = {name: array[:3, :27] for name, array in packed_batch().items()}
    with pytest.raises(ValueError, match=r"tensor=2 does not divide the 81 tokens .* multiple"):
        lowered(CONFIG, mesh_of(1, 1, 2), batch=batch)


def test_a_vocabulary_that_cannot_be_split_raises():
    config = changed(vocab_size=1010)
    message = r"embed_tokens\.embedding \(1010, 64\): tensor=4 does not divide 1010; use fewer"
    with pytest.raises(ValueError, match=message):
        parameter_shardings(parameters(config), mesh_of(1, 1, 4))


def test_a_mesh_has_the_axis_if_it_has_devices():
    assert dict(make_mesh(data=2, fsdp=2, tensor=2).shape) == {"data": 2, "fsdp": 2, "tensor": 2}
    assert dict(make_mesh(data=2, fsdp=4, tensor=1).shape) == {"data": 2, "fsdp": 4}
    with pytest.raises(ValueError, match=r"data=2 times fsdp=3 times tensor=2 must be .*, 8"):
        make_mesh(data=2, fsdp=3, tensor=2)
    assert tensor_axis() is None


# Where parameters lie.


def test_parameters_are_split():
    config = changed(**BIASES)
    params = parameters(config)
    shardings = parameter_shardings(params, mesh_of(2, 2, 2))
    shards = {
        parameter_path(path)[-2:]: sharding.shard_shape(param.shape)
        for (path, param), sharding in zip(
            jax.tree.leaves_with_path(params), jax.tree.leaves(shardings), strict=True
        )
    }
    assert shards == {
        ("embed_tokens", "embedding"): (V // 2, D // 2),
        ("lm_head", "weight"): (V // 2, D // 2),
        ("q_proj", "kernel"): (L, D // 2, Q // 2),
        ("q_proj", "bias"): (L, Q // 2),
        ("k_proj", "kernel"): (L, D // 2, KV // 2),
        ("k_proj", "bias"): (L, KV // 2),
        ("v_proj", "kernel"): (L, D // 2, KV // 2),
        ("v_proj", "bias"): (L, KV // 2),
        ("o_proj", "kernel"): (L, Q // 2, D // 2),
        ("o_proj", "bias"): (L, D),
        ("gate_proj", "kernel"): (L, D // 2, F // 2),
        ("gate_proj", "bias"): (L, F // 2),
        ("up_proj", "kernel"): (L, D // 2, F // 2),
        ("up_proj", "bias"): (L, F // 2),
        ("down_proj", "kernel"): (L, F // 2, D // 2),
        ("down_proj", "bias"): (L, D),
        ("input_layernorm", "weight"): (L, D),
        ("post_attention_layernorm", "weight"): (L, D),
        ("norm", "weight"): (D,),
    }


# What goes between devices.

COLLECTIVES = "all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute"
LINE = re.compile(rf"= (\(?[^()]+\)?) ({COLLECTIVES})(?:-start)?\((.*)")


def collectives(program: str) -> Counter[tuple[str, tuple[int, ...]]]:
    """How many collectives a compiled program has, by name and shape of the result."""
    return Counter(
        (name, tuple(int(size) for size in dims.split(",") if size))
        for results, name, _ in LINE.findall(program)
        for dims in re.findall(r"\w\[([\d,]*)\]", results)
    )


def of_tokens(program: str, num_tokens: int, num_devices: int) -> Counter[str]:
    """Collectives of normed tokens, gathered, and of sums of them, split over `tensor`."""
    found = collectives(program)
    parts = {"all-gather": (num_tokens, D), "reduce-scatter": (num_tokens // num_devices, D)}
    return Counter({name: found[name, shape] for name, shape in parts.items()})


def program_of(config, mesh) -> str:
    return compiled(config, mesh)[0].as_text() or ""


@pytest.mark.parametrize(
    "data, fsdp, tensor", [pytest.param(1, 1, 4, marks=pytest.mark.full), (2, 2, 2)]
)
def test_a_half_layer_gathers_tokens_once_and_scatters_their_sums_once(data, fsdp, tensor):
    config = changed(**UNROLLED, **BIASES, remat="none")
    mesh, tokens = mesh_of(data, fsdp, tensor), B // (data * fsdp) * S
    num_layers = config.num_hidden_layers
    in_layers = Counter({"all-gather": 2 * num_layers, "reduce-scatter": 2 * num_layers})
    loss = Counter({"all-gather": 1})
    only_forward = lowered(config, mesh, fn=forward)[0].compile().as_text() or ""
    assert of_tokens(only_forward, tokens, tensor) == in_layers + loss
    loss_backward = Counter({"reduce-scatter": 1})
    both = in_layers + loss + in_layers + loss_backward
    assert of_tokens(program_of(config, mesh), tokens, tensor) == both
    # What is not kept whole is gathered again.
    again = Counter({"all-gather": 2 * num_layers})
    config = dataclasses.replace(config, remat="minimal")
    assert of_tokens(program_of(config, mesh), tokens, tensor) == both + again


def test_nothing_else_goes_between_devices():
    """Of scanned layers, whose collectives are in the program once."""
    rows, tensor = B // 4, 2
    T = rows * S
    found = collectives(program_of(CONFIG, mesh_of(2, 2, tensor)))
    q, kv, f, v, d, t = Q // tensor, KV // tensor, F // tensor, V // tensor, D // 2, T // tensor
    weights = {(D, q): 2, (q, D): 2, (D, kv): 4, (D, f): 4, (f, D): 2}
    assert Counter({k: n for k, n in found.items() if k[0] == "all-gather"}) == Counter(
        {("all-gather", shape): n for shape, n in weights.items()}  # forward and backward
        | {
            ("all-gather", (v, D)): 1,  # the weight of the loss
            ("all-gather", (T, D)): 2 + 1 + 2 + 2,  # as above
            ("all-gather", (5, tensor, T)): 1,  # statistics of the logits
            ("all-gather", (2, T)): 1,  # tokens to look up
            ("all-gather", (2, T, d)): 1,  # their gradients
        }
    )
    assert Counter({k: n for k, n in found.items() if k[0] == "reduce-scatter"}) == Counter(
        {
            ("reduce-scatter", (d, q)): 1,
            ("reduce-scatter", (q, d)): 1,
            ("reduce-scatter", (d, kv)): 2,
            ("reduce-scatter", (d, f)): 2,
            ("reduce-scatter", (f, d)): 1,
            ("reduce-scatter", (v, d)): 1,
            ("reduce-scatter", (t, D)): 2 + 2 + 1,
            ("reduce-scatter", (2, t, d)): 1,
        }
    )
    # Embeddings and their gradients, in two parts.
    assert {k for k in found if k[0] == "all-to-all"} == {("all-to-all", (1, t, d))}
    # Parts of gradients over copies of the model, what is replicated over all, and scalars.
    parts = [(d, q), (q, d), (d, kv), (d, f), (f, d), (D,)]
    assert {shape for name, shape in found if name == "all-reduce"} == {
        *((L, *shape) for shape in parts),
        (v, d),
        (D,),
        (),
    }
    assert not any(name == "collective-permute" for name, _ in found)


def test_the_loss_gathers_its_weight_before_it_starts(monkeypatch):
    T = B // 2 * S
    chunked = functools.partial(linear_cross_entropy, chunk_size=T // 4)
    monkeypatch.setattr(train.step, "linear_cross_entropy", chunked)
    traced_anew = lambda *args: loss_and_gradients(*args)
    program, params, batch = lowered(CONFIG, mesh_of(1, 2, 2), fn=traced_anew)
    in_chunks = program.compile()
    assert_close(in_chunks(params, batch), on_one_device(CONFIG))
    gathers = [
        (results, rest)
        for results, name, rest in LINE.findall(in_chunks.as_text() or "")
        if name == "all-gather"
    ]
    in_loop = [results for results, rest in gathers if "while" in rest]
    assert sum(f"[5,2,{T // 4}]" in results for results in in_loop) == 1
    of_vocabulary = [
        results for results, _ in gathers if re.search(rf"\b({V}|{V // 2})\b", results)
    ]
    assert len(of_vocabulary) == 1 and f"[{V // 2},{D}]" in of_vocabulary[0]
    assert of_vocabulary[0] not in in_loop


# What is kept.


def kept(config: LlamaConfig, mesh) -> Counter[tuple[int, ...]]:
    """Shapes of what a device keeps of its layers; they are stacked on axis 0, device by device."""
    params, batch = jax.tree.map(jnp.asarray, (parameters(config), packed_batch()))
    loss = lambda params: loss_and_sums(model_graph(config), params, batch)[0]
    with jax.set_mesh(mesh):
        saved = jax.tree.leaves(jax.eval_shape(lambda params: jax.vjp(loss, params)[1], params))
    shapes = [a.shape for a in saved if a.shape[:1] == (L * mesh.size,)]
    return Counter(shape[1:] for shape in shapes)


@pytest.mark.parametrize("data, fsdp, tensor", [(1, 1, 4), (1, 2, 2)])
def test_the_residual_stream_is_kept_in_parts(data, fsdp, tensor):
    mesh, rows = mesh_of(data, fsdp, tensor), B // (data * fsdp)
    share = rows * S // tensor, D
    # The input of the layer, normed and not.
    assert kept(changed(remat="full"), mesh) == {share: 2, (D,): 1}
    minimal = kept(CONFIG, mesh)
    assert minimal[share] == 4
    assert minimal[rows, S, F // tensor] == 2
    everything = kept(changed(remat="none"), mesh)
    whole = {(rows, S, D), (rows * S, D)}
    assert whole.isdisjoint(minimal) and not whole.isdisjoint(everything)
    # Not even there are weights kept whole.
    weights = {(D, Q // tensor), (D, KV // tensor), (D, F // tensor), (F // tensor, D)}
    if fsdp > 1:
        assert weights.isdisjoint(everything)


# The training step, and the model after it.

SMALL = changed(
    vocab_size=64,
    num_hidden_layers=2,
    hidden_size=32,
    head_dim=4,
    intermediate_size=64,
    initializer_range=0.2,
    **BIASES,
)


@functools.cache
def trained(data, fsdp, tensor):
    """Losses, gradient norms and accuracies of three steps, and the state after them."""
    config = TrainConfig(
        name="test",
        model=SMALL,
        data=DataConfig(source="synthetic", sequence_length=16, batch_size=8),
        optimizer=OptimizerConfig(learning_rate=1e-2, warmup_steps=1, eps=1e-4, clip_norm=0.5),
        steps=10,
        z_loss=1e-3,
        eval_every=0,
        sample_tokens=0,
        save=False,
    )
    mesh = mesh_of(data, fsdp, tensor)
    rng = np.random.default_rng(0)
    with jax.set_mesh(mesh):
        state = init_state(config, mesh)
        shardings = jax.tree.map(lambda a: a.sharding, state)
        step = jax.jit(make_train_step(config), donate_argnums=0, out_shardings=(shardings, None))
        losses, norms, accuracies = [], [], []
        for _ in range(3):
            tokens, labels = rng.integers(64, size=(2, 2, 8, 16), dtype=np.int32)
            labels[0, 3:] = -100  # the two batches of a step have other numbers of labels
            batch = {"tokens": tokens, "labels": labels}
            batch = jax.device_put(batch, batch_sharding(mesh, batch_axis=1))
            state, metrics = step(state, batch)
            losses.append(float(metrics["loss"]))
            norms.append(float(metrics["grad_norm"]))
            accuracies.append(float(metrics["accuracy"]))
    return losses, norms, accuracies, state


@pytest.mark.parametrize(
    "data, fsdp, tensor",
    [(2, 2, 2)]
    + [
        pytest.param(*sizes, marks=pytest.mark.full)
        for sizes in ((1, 2, 1), (1, 1, 2), (1, 2, 2), (2, 1, 4))
    ],
)
def test_training_is_that_of_one_device(data, fsdp, tensor):
    losses, norms, accuracies, state = trained(data, fsdp, tensor)
    want_losses, want_norms, want_accuracies, want = trained(1, 1, 1)
    np.testing.assert_allclose(losses, want_losses, rtol=1e-6)
    np.testing.assert_allclose(norms, want_norms, rtol=1e-5)
    # Counts of right tokens, divided by that of the labels.
    np.testing.assert_allclose(accuracies, want_accuracies, rtol=1e-6)
    assert any(accuracies)
    assert want_losses[2] != want_losses[0]
    for got, expected in zip(*map(jax.tree.leaves, (state.params, want.params)), strict=True):
        scale = np.abs(expected).max()
        np.testing.assert_allclose(got / scale, expected / scale, rtol=0, atol=1e-4)


def test_text_is_that_of_one_device():
    prompts = np.arange(12, dtype=np.int32).reshape(3, 4)
    texts = []
    for sizes in ((1, 1, 1), (1, 2, 2)):
        mesh = mesh_of(*sizes)
        params = parameters(SMALL)
        params = jax.device_put(params, parameter_shardings(params, mesh))
        with jax.set_mesh(mesh):
            model = nnx.merge(model_graph(SMALL), params)
            placed = jax.device_put(prompts, replicated(mesh))
            texts.append(np.asarray(generate(model, placed, max_new_tokens=6)))
    np.testing.assert_array_equal(*texts)
