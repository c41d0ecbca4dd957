"""Eight devices: the same numbers as on one, parameters split, the batch never gathered."""

import dataclasses
import functools
import math
import re
from collections import Counter
from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType, PartitionSpec

from models.config import LlamaConfig
from models.llama import Llama
from models.rope import RopeParameters
from models.sharding import (
    batch_sharding,
    make_mesh,
    parameter_path,
    parameter_shardings,
    replicated,
    split_batch,
)
from pallas_kernels import linear_cross_entropy
from train.config import preset
from train.step import init_state

# Every size is another number, so that a shape in a compiled program tells which array it is. The
# vocabulary is larger than the number of tokens, as in real runs. Otherwise XLA gathers the table
# to look tokens up.
CONFIG = LlamaConfig(
    vocab_size=1008,
    hidden_size=64,
    intermediate_size=104,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=20,
    max_position_embeddings=64,
    initializer_range=0.15,
    rms_norm_eps=1e-5,
    tie_word_embeddings=False,
    attention_bias=True,
    qk_norm=True,
    rope_parameters=RopeParameters(rope_theta=100.0),
    dtype="float32",
    remat="minimal",
)
B, S = 24, 28
L, D, F, V, Q, KV = 3, 64, 104, 1008, 80, 40

# The last has both axes, so that the normal run need not compile for one axis alone.
ONE_COPY = pytest.param(1, 8, marks=pytest.mark.full)
ONLY_COPIES = pytest.param(8, 1, marks=pytest.mark.full)
MESHES = [pytest.param(1, 1, marks=pytest.mark.full), ONLY_COPIES, ONE_COPY, (2, 4)]

pytestmark = pytest.mark.usefixtures("fast_compilation")


def mesh_of(data: int, fsdp: int) -> jax.sharding.Mesh:
    return make_mesh(data=data, fsdp=fsdp, devices=jax.devices()[: data * fsdp])


@functools.cache
def parameters(config: LlamaConfig = CONFIG):
    """A model's structure and, as numpy arrays, random parameters."""
    graphdef, shapes = nnx.split(nnx.eval_shape(lambda: Llama(config, rngs=nnx.Rngs(0))))
    rng = np.random.default_rng(0)

    def random(path, shape):
        center = 1.0 if "norm" in parameter_path(path)[-2] else 0.0
        return np.asarray(center + 0.15 * rng.normal(size=shape.shape), shape.dtype)

    return graphdef, jax.tree.map_with_path(random, shapes)


def packed_batch() -> dict[str, np.ndarray]:
    """Rows of two documents of lengths that differ by row, some with padding at the end."""
    rng = np.random.default_rng(1)
    column, row = np.arange(S), np.arange(B)[:, None]
    boundary, end = 3 + row % 20, S - row % 3
    segment_ids = np.where(column < boundary, 1, 2) * (column < end)
    positions = np.where(column < boundary, column, column - boundary) * (column < end)
    labels = rng.integers(V, size=(B, S))
    labels[(column == boundary - 1) | (column >= end - 1)] = -100
    batch = {
        "tokens": rng.integers(V, size=(B, S)),
        "labels": labels,
        "segment_ids": segment_ids,
        "positions": positions,
    }
    return {name: np.asarray(array, np.int32) for name, array in batch.items()}


def loss_and_gradients(graphdef, params, batch):
    def loss(params):
        model = nnx.merge(graphdef, params)
        hidden = model(
            batch["tokens"], positions=batch["positions"], segment_ids=batch["segment_ids"]
        )
        # A device has three chunks of tokens. XLA cannot split a scan over them by itself.
        options = {"reduction": "sum", "chunk_size": B // 8 * S // 3}
        return linear_cross_entropy(hidden, model.output_weight, batch["labels"], **options)

    return jax.value_and_grad(loss)(params)


def placed(mesh, config: LlamaConfig = CONFIG):
    graphdef, params = parameters(config)
    params = jax.device_put(params, parameter_shardings(params, mesh))
    return graphdef, params, jax.device_put(packed_batch(), batch_sharding(mesh))


@functools.cache
def compiled(data: int, fsdp: int, config: LlamaConfig = CONFIG):
    """The compiled loss and gradients, and its arguments on the mesh."""
    mesh = mesh_of(data, fsdp)
    graphdef, params, batch = placed(mesh, config)
    shardings = replicated(mesh), parameter_shardings(params, mesh)
    compute = jax.jit(loss_and_gradients, static_argnums=0, out_shardings=shardings)
    with jax.set_mesh(mesh):
        return compute.lower(graphdef, params, batch).compile(), params, batch


@functools.cache
def without_a_mesh(config: LlamaConfig):
    graphdef, params = parameters(config)
    return jax.jit(loss_and_gradients, static_argnums=0)(graphdef, params, packed_batch())


def assert_like_one_device(data: int, fsdp: int, config: LlamaConfig) -> None:
    program, params, batch = compiled(data, fsdp, config)
    loss, gradients = program(params, batch)
    expected_loss, expected = without_a_mesh(config)
    np.testing.assert_allclose(loss, expected_loss, rtol=1e-6)
    assert all(np.any(leaf) for leaf in jax.tree.leaves(expected))
    # The sums over tokens have another order: some float32 epsilons of the largest gradient.
    scaled = lambda tree: jax.tree.map(lambda a, e: np.asarray(a) / np.abs(e).max(), tree, expected)
    chex.assert_trees_all_close(scaled(gradients), scaled(expected), rtol=0, atol=3e-6)
    for gradient, param in zip(*map(jax.tree.leaves, (gradients, params)), strict=True):
        assert gradient.sharding.is_equivalent_to(param.sharding, param.ndim)


# The next test has the mesh of both axes.
@pytest.mark.full
@pytest.mark.parametrize("data, fsdp", MESHES)
def test_loss_and_gradients_are_those_of_one_device(data, fsdp):
    assert_like_one_device(data, fsdp, CONFIG)


def test_a_head_of_an_odd_vocabulary_gives_what_one_device_gives():
    """`fsdp` splits this head by columns. 8 s."""
    config = dataclasses.replace(CONFIG, vocab_size=V + 1, num_hidden_layers=1)
    assert_like_one_device(2, 4, config)


# The placement of parameters


def expected_shard(names: tuple[str, ...], shape: tuple[int, ...], fsdp: int) -> tuple[int, ...]:
    """Matrices are split along D, but for the head. Norms and biases are whole."""
    if "norm" in names[-2] or names[-1] == "bias":
        return shape
    axis = shape.index(V if names[-2] == "lm_head" else D)
    return *shape[:axis], shape[axis] // fsdp, *shape[axis + 1 :]


def assert_split(tree, fsdp: int, num_devices: int) -> int:
    leaves = jax.tree.leaves_with_path(tree)
    for path, leaf in leaves:
        names = parameter_path(path)
        shards = [shard.data.shape for shard in leaf.addressable_shards]
        assert shards == [expected_shard(names, leaf.shape, fsdp)] * num_devices, names
    return len(leaves)


@pytest.mark.parametrize("data, fsdp", [(8, 1), (1, 8), (2, 4)])
def test_parameters_are_split(data, fsdp):
    _, params, batch = placed(mesh_of(data, fsdp))
    assert assert_split(params, fsdp, data * fsdp) == 18
    for array in batch.values():
        assert {shard.data.shape for shard in array.addressable_shards} == {(B // 8, S)}
        assert len({shard.index[0].start for shard in array.addressable_shards}) == 8


def test_initial_parameters_and_moments_are_split():
    mesh = mesh_of(2, 4)
    demo = preset("demo")
    data = dataclasses.replace(demo.data, sequence_length=CONFIG.max_position_embeddings)
    config = dataclasses.replace(demo, model=CONFIG, data=data, sample_tokens=0)
    with jax.set_mesh(mesh):
        state = init_state(config, mesh)
    num_params = assert_split(state.params, 4, 8)
    moments = [
        (path, leaf) for path, leaf in jax.tree.leaves_with_path(state.opt_state) if leaf.ndim
    ]
    assert len(moments) == 2 * num_params
    by_shape = lambda leaves: Counter((leaf.shape, leaf.sharding.spec) for leaf in leaves)
    doubled = by_shape(jax.tree.leaves(state.params)) + by_shape(jax.tree.leaves(state.params))
    assert by_shape([leaf for _, leaf in moments]) == doubled


@pytest.mark.parametrize("tie_word_embeddings", [False, True])
def test_every_matrix_is_split(tie_word_embeddings):
    """A parameter that the table of shardings does not know would be whole on every device."""
    config = dataclasses.replace(
        CONFIG, tie_word_embeddings=tie_word_embeddings, qk_norm=False, mlp_bias=True
    )
    params = parameters(config)[1]
    shardings = parameter_shardings(params, mesh_of(2, 4))
    for (path, param), sharding in zip(
        jax.tree.leaves_with_path(params), jax.tree.leaves(shardings), strict=True
    ):
        per_layer = param.shape[1:] if parameter_path(path)[0] == "layers" else param.shape
        split = Counter(sharding.spec)["fsdp"]
        assert split == (len(per_layer) == 2), parameter_path(path)
        assert param.shape[0] != L or not sharding.spec or sharding.spec[0] is None


def test_a_head_is_split_by_rows_or_by_columns_if_its_rows_do_not_divide():
    for vocab_size, spec in (
        (1008, PartitionSpec("fsdp", None)),
        (1009, PartitionSpec(None, "fsdp")),
    ):
        config = dataclasses.replace(CONFIG, vocab_size=vocab_size, tie_word_embeddings=False)
        shardings = parameter_shardings(parameters(config)[1], mesh_of(2, 4))
        assert shardings["lm_head"]["weight"].spec == spec


@pytest.mark.parametrize("fsdp", [1, 2, 4, 8])
def test_sizes_that_do_not_divide_raise(fsdp):
    config = dataclasses.replace(CONFIG, hidden_size=60)
    params = parameters(config)[1]
    mesh = make_mesh(data=8 // fsdp, fsdp=fsdp)
    if 60 % fsdp == 0:
        parameter_shardings(params, mesh)
        return
    message = r"embed_tokens\.embedding \(1008, 60\): fsdp=8 does not divide 60; use fewer devices"
    with pytest.raises(ValueError, match=message):
        parameter_shardings(params, mesh)


def test_a_mesh_takes_all_devices():
    mesh = make_mesh(data=2, fsdp=4)
    assert dict(mesh.shape) == {"data": 2, "fsdp": 4} and mesh.size == 8
    with pytest.raises(ValueError, match=r"data=2 times fsdp=3 must be .* number of devices, 8"):
        make_mesh(data=2, fsdp=3)


def test_batches_are_split_along_the_axis_named():
    sharding = batch_sharding(mesh_of(2, 4), batch_axis=1)
    assert sharding.shard_shape((5, 16, 28)) == (5, 2, 28)


# Collectives of the compiled program

COLLECTIVE = re.compile(
    r"= (.*?) (all-gather|all-reduce|all-to-all|reduce-scatter|collective-permute"
    r"|collective-broadcast|ragged-all-to-all)(?:-start)?\("
)


class Moved(NamedTuple):
    """A result of a collective operation."""

    operation: str
    dtype: str
    shape: tuple[int, ...]


def collectives(program: str) -> list[Moved]:
    """All results of all collective operations in a compiled program."""
    return [
        Moved(operation, dtype, tuple(map(int, shape.split(","))) if shape else ())
        for results, operation in COLLECTIVE.findall(program)
        for dtype, shape in re.findall(r"([a-z0-9]+)\[([\d,]*)\]", results)
    ]


def program_of(data: int, fsdp: int) -> str:
    return compiled(data, fsdp)[0].as_text() or ""


@pytest.mark.parametrize("data, fsdp", [ONLY_COPIES, ONE_COPY, (2, 4)])
def test_no_activation_is_gathered(data, fsdp):
    moved = collectives(program_of(data, fsdp))
    assert moved
    # Sizes that only arrays of tokens have: rows and tokens of all devices, of a copy of the model.
    rows = {B, B // data}
    of_tokens = [m for m in moved if {S, *rows, *(n * S for n in (B // 8, *rows))} & set(m.shape)]
    if fsdp == 1:
        assert not of_tokens
        return
    # Each device looks up its own channels for the tokens of its copy. The devices then exchange
    # them for all channels of their own tokens. That moves B*S*D/8 numbers, and to gather the table
    # would move V*D. The backward does the same.
    by_operation = Counter()
    for m in of_tokens:
        by_operation[m.operation, m.dtype] += math.prod(m.shape)
    assert by_operation == {
        ("all-gather", "s32"): B * S // data,
        ("all-to-all", "f32"): 2 * B * S * D // 8,
    }


@pytest.mark.parametrize("data, fsdp", [ONE_COPY, (2, 4)])
def test_weights_are_gathered_one_layer_at_a_time(data, fsdp):
    gathered = [
        tuple(sorted(size for size in m.shape if size > 1))
        for m in collectives(program_of(data, fsdp))
        if m.operation == "all-gather" and m.dtype == "f32"
    ]
    # Whole matrices of a layer (q with k and v, o, the three of the MLP; forward and backward) and
    # once the output embedding.
    head = tuple(sorted((fsdp, D, V // fsdp)))
    assert Counter(gathered) == {(D, Q + 2 * KV): 2, (D, Q): 2, (D, F): 6, head: 1}


@pytest.mark.parametrize("data, fsdp", [ONE_COPY, (2, 4)])
def test_the_output_embedding_s_gradient_is_summed_and_split_at_once(data, fsdp):
    """XLA may choose for the other gradients; for GPUs it makes reduce-scatters of them, too."""
    summed = Counter(
        m.operation
        for m in collectives(program_of(data, fsdp))
        if m.operation in ("all-reduce", "reduce-scatter") and set(m.shape) & {V, V // fsdp}
    )
    # Copies of the model sum the gradients of both embeddings.
    assert summed == {"reduce-scatter": 1} | ({"all-reduce": 2} if data > 1 else {})
    for m in collectives(program_of(data, fsdp)):
        if m.operation == "all-reduce" and set(m.shape) != {D, Q + 2 * KV}:  # that of q, k and v
            assert math.prod(m.shape) <= V * D // fsdp


@pytest.mark.full
def test_copies_of_the_model_gather_nothing():
    assert {m.operation for m in collectives(program_of(8, 1))} == {"all-reduce"}


def test_the_collectives_are_found():
    """The two tests above would see a batch that is gathered."""
    mesh = mesh_of(2, 4)
    x = jax.device_put(jnp.ones((B, S, D)), batch_sharding(mesh))
    gather = jax.jit(lambda x: x * 2, out_shardings=replicated(mesh))
    moved = collectives(gather.lower(x).compile().as_text() or "")
    assert moved == [Moved("all-gather", "f32", (B, S, D))]


# Activations


def test_activations_are_split_on_a_mesh_and_untouched_without():
    x = jnp.ones((B, S, D))
    assert split_batch(x) is x
    mesh = mesh_of(2, 4)
    with jax.set_mesh(mesh):
        y = jax.jit(lambda x: split_batch(x) * 2)(jax.device_put(x, replicated(mesh)))
    assert y.sharding.is_equivalent_to(batch_sharding(mesh), 3)


@pytest.mark.parametrize(
    "sizes, kind, found",
    [
        ({"replica": 2, "fsdp": 4}, AxisType.Auto, r"'replica' \(Auto\), 'fsdp' \(Auto\)"),
        ({"data": 2, "fsdp": 4}, AxisType.Explicit, r"'data' \(Explicit\), 'fsdp' \(Explicit\)"),
    ],
)
def test_a_mesh_that_the_model_does_not_know_raises(sizes, kind, found):
    mesh = jax.make_mesh(tuple(sizes.values()), tuple(sizes), axis_types=(kind,) * 2)
    graphdef, params = parameters()
    with jax.set_mesh(mesh), pytest.raises(ValueError, match=f"{found}; make it with"):
        jax.eval_shape(nnx.merge(graphdef, params), packed_batch()["tokens"])


def test_parameters_on_a_mesh_that_is_not_in_context_raise():
    """Without the mesh, XLA gathers the tokens of all devices in each layer."""
    mesh = mesh_of(2, 4)
    graphdef, params = parameters()
    params = jax.device_put(params, parameter_shardings(params, mesh))
    hidden_of = lambda params, tokens: nnx.merge(graphdef, params)(tokens)
    with pytest.raises(ValueError, match=r"mesh of 8 devices .* under jax\.set_mesh\(mesh\)"):
        jax.eval_shape(jax.jit(hidden_of), params, packed_batch()["tokens"])


def test_the_devices_need_not_divide_a_batch(caplog):
    """A few prompts, for example: no kernel warns that it gathers them again."""
    mesh = mesh_of(2, 4)
    graphdef, params = parameters()
    tokens = packed_batch()["tokens"][:3]
    hidden_of = jax.jit(lambda params, tokens: nnx.merge(graphdef, params)(tokens))
    expected = hidden_of(params, tokens)
    with jax.set_mesh(mesh):
        hidden = hidden_of(jax.device_put(params, parameter_shardings(params, mesh)), tokens)
    np.testing.assert_allclose(hidden, expected, rtol=0, atol=3e-6 * np.abs(expected).max())
    assert "every device gathers" not in caplog.text
