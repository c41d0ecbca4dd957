"""Devices that share sequences: what their programs exchange and keep."""

import functools
import re
from collections import Counter

import jax
import jax.numpy as jnp
import pytest

import train.step
from models.config import LlamaConfig
from pallas_kernels import linear_cross_entropy
from support.split_llama import (
    BIASES,
    CONFIG,
    KV,
    UNROLLED,
    VARIANTS,
    B,
    D,
    F,
    L,
    Q,
    S,
    V,
    assert_close,
    changed,
    compiled,
    forward,
    loss_and_gradients,
    lowered,
    mesh_of,
    on_mesh,
    on_one_device,
    packed_batch,
    parameters,
)
from train.objectives import loss_and_sums
from train.step import model_graph

pytestmark = pytest.mark.usefixtures("fast_compilation")


# test_tensor_parallel.py compares unrolled layers with one device, and with the textbook.
@pytest.mark.full
@pytest.mark.parametrize("remat", ["none", "minimal"])
def test_unrolled_layers_have_the_numbers_of_scanned_ones(remat):
    got = on_mesh(changed(**UNROLLED, **BIASES, remat=remat), mesh_of(2, 2, 2))
    assert_close(got, on_one_device(VARIANTS["untied_scanned_biases"]))


# Collectives between devices.

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
    "data, fsdp, tensor, remat",
    [
        (2, 2, 2, "none"),
        pytest.param(2, 2, 2, "minimal", marks=pytest.mark.full),
        pytest.param(1, 1, 4, "none", marks=pytest.mark.full),
        pytest.param(1, 1, 4, "minimal", marks=pytest.mark.full),
    ],
)
def test_a_sublayer_gathers_tokens_once_and_scatters_their_sums_once(data, fsdp, tensor, remat):
    config = changed(**UNROLLED, **BIASES, remat=remat)
    mesh, tokens = mesh_of(data, fsdp, tensor), B // (data * fsdp) * S
    num_layers = config.num_hidden_layers
    in_layers = Counter({"all-gather": 2 * num_layers, "reduce-scatter": 2 * num_layers})
    loss = Counter({"all-gather": 1})
    only_forward = lowered(config, mesh, fn=forward)[0].compile().as_text() or ""
    assert of_tokens(only_forward, tokens, tensor) == in_layers + loss
    loss_backward = Counter({"reduce-scatter": 1})
    both = in_layers + loss + in_layers + loss_backward
    # Tensors that are kept in parts are gathered again.
    again = Counter({"all-gather": 2 * num_layers}) if remat == "minimal" else Counter()
    assert of_tokens(program_of(config, mesh), tokens, tensor) == both + again


def test_nothing_else_goes_between_devices():
    """The layers are scanned, so their collectives are in the program once."""
    rows, tensor = B // 4, 2
    T = rows * S
    found = collectives(program_of(CONFIG, mesh_of(2, 2, tensor)))
    q, kv, f, v, d, t = Q // tensor, KV // tensor, F // tensor, V // tensor, D // 2, T // tensor
    qkv = q + 2 * kv
    weights = {(D, qkv): 2, (q, D): 2, (D, f): 4, (f, D): 2}
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
            ("reduce-scatter", (d, qkv)): 1,
            ("reduce-scatter", (q, d)): 1,
            ("reduce-scatter", (d, f)): 2,
            ("reduce-scatter", (f, d)): 1,
            ("reduce-scatter", (v, d)): 1,
            ("reduce-scatter", (t, D)): 2 + 2 + 1,
            ("reduce-scatter", (2, t, d)): 1,
        }
    )
    # Embeddings and their gradients, in two parts.
    assert {k for k in found if k[0] == "all-to-all"} == {("all-to-all", (1, t, d))}
    # Sums of gradients over copies of the model, sums of replicated gradients, and scalars.
    parts = [(d, q), (q, d), (d, kv), (d, f), (f, d), (D,)]
    assert {shape for name, shape in found if name == "all-reduce"} == {
        *((L, *shape) for shape in parts),
        (v, d),
        (D,),
        (),
    }
    assert not any(name == "collective-permute" for name, _ in found)


# In the normal run test_nothing_else_goes_between_devices counts the gathers of this weight.
@pytest.mark.full
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


# Tensors that are kept.


def kept(config: LlamaConfig, mesh) -> Counter[tuple[int, ...]]:
    """Shapes of the tensors that a device keeps of its layers, stacked on axis 0 by device."""
    params, batch = jax.tree.map(jnp.asarray, (parameters(config), packed_batch()))
    loss = lambda params: loss_and_sums(model_graph(config), params, batch)[0]
    with jax.set_mesh(mesh):
        saved = jax.tree.leaves(jax.eval_shape(lambda params: jax.vjp(loss, params)[1], params))
    shapes = [a.shape for a in saved if a.shape[:1] == (L * mesh.size,)]
    return Counter(shape[1:] for shape in shapes)


@pytest.mark.parametrize(
    "data, fsdp, tensor", [pytest.param(1, 1, 4, marks=pytest.mark.full), (1, 2, 2)]
)
def test_the_residual_stream_is_kept_in_parts(data, fsdp, tensor):
    mesh, rows = mesh_of(data, fsdp, tensor), B // (data * fsdp)
    share = rows * S // tensor, D
    # The input of the layer, normed and not, and the joined kernel of q, k and v.
    joined = D // fsdp, (Q + 2 * KV) // tensor
    assert kept(changed(remat="full"), mesh) == {share: 2, (D,): 1, joined: 1}
    minimal = kept(CONFIG, mesh)
    assert minimal[share] == 4
    assert minimal[rows, S, F // tensor] == 2
    everything = kept(changed(remat="none"), mesh)
    whole = {(rows, S, D), (rows * S, D)}
    assert whole.isdisjoint(minimal) and not whole.isdisjoint(everything)
    # Weights are not kept whole there either.
    weights = {(D, (Q + 2 * KV) // tensor), (Q // tensor, D), (D, F // tensor), (F // tensor, D)}
    if fsdp > 1:
        assert weights.isdisjoint(everything)
