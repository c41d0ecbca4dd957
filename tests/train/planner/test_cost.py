"""The cost of parts of a program by the planner's estimate."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.sharding import NamedSharding, PartitionSpec

from models.sharding import BATCH_AXES, make_mesh
from pallas_kernels import document_attention, document_bounds, linear_cross_entropy
from pallas_kernels.fp8 import Quantized, gated_kernel, product_kernel
from pallas_kernels.gpu.device import Device
from pallas_kernels.loss.mosaic_gpu import exponentials, linear_launch, products
from pallas_kernels.loss.mosaic_gpu.statistics import linear_statistics
from pallas_kernels.mlp import gated_matmul
from support import tiny_run
from support.plan_measures import Measures
from train.config import preset
from train.planner import aot, cost
from train.planner.plan import Programs, plan, table, with_remat
from train.planner.splits import Splits
from train.planner.target import target_elsewhere
from train.reporting.metrics import flops_per_token

H100 = aot.CHIPS["h100"]


@pytest.fixture
def cost_of_cudnn(monkeypatch):
    """A function to the cost of cuDNN's attention and its gradients."""
    cudnn = "jax._src.cudnn.fused_attention_stablehlo"
    monkeypatch.setattr(f"{cudnn}.check_cudnn_version", lambda: 91000)  # it need not be here
    rates = cost.Rates(flops=1e12, bandwidth=1e12, host_bandwidth=1e9)

    def cost_of(kv_heads, local_window_size=None, **options):
        shapes = [(2, 4096, heads, 64) for heads in (4, kv_heads, kv_heads)]
        arrays = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes]
        attend = functools.partial(
            jax.nn.dot_product_attention,
            is_causal=True,
            local_window_size=local_window_size,
            implementation="cudnn",
        )
        traced = jax.jit(lambda q, k, v: jax.vjp(attend, q, k, v)[1](q)).trace(*arrays)
        options |= {"bytes_per_device": cost.nbytes, "num_devices": 1}
        return cost.Program(rates, **options).estimate(traced.jaxpr)

    return cost_of


@pytest.mark.parametrize("kv_heads, bytes_each", [(2, 8 * 64 + 4), (4, 4 * 64 + 4)])
def test_workspace_of_the_attention(cost_of_cudnn, kv_heads, bytes_each):
    both = [cost_of_cudnn(kv_heads, has_workspace=w).temp_bytes for w in (True, False)]
    # The memory is fullest in the backward, whose dq, dk and dv are the only other results.
    assert both[0] - both[1] == pytest.approx(2 * 4096 * 4 * bytes_each, rel=0.1)


def test_cudnn_computes_the_pairs_of_its_window(cost_of_cudnn):
    """The share of the pairs says nothing where cuDNN has no window. 0.1 s."""
    whole, without_window, windowed = (
        cost_of_cudnn(2, **options)
        for options in (
            {},
            {"share_of_pairs": 0.25},
            {"share_of_pairs": 0.25, "local_window_size": (511, 0)},
        )
    )
    assert without_window == whole
    assert windowed.flops == whole.flops / 4 > 0
    assert windowed.temp_bytes == whole.temp_bytes


@pytest.mark.parametrize(("H", "rates"), [(64, (0.44, 0.66, 0.60)), (128, (0.65, 0.84, 0.74))])
def test_flops_of_the_kernels_of_attention(H, rates):
    """Two products of the forward and seven of the backward, of half of the pairs."""
    B, S, N, K = 2, 256, 4, 2
    q, k = (jax.ShapeDtypeStruct((B, S, heads, H), jnp.bfloat16) for heads in (N, K))

    def gradients(q, k, v, segment_ids):
        bounds = document_bounds(segment_ids)
        attend = functools.partial(document_attention, implementation="mosaic_gpu")
        return jax.vjp(lambda q, k, v: attend(q, k, v, bounds), q, k, v)[1](q)

    traced = jax.jit(gradients).trace(q, k, k, jax.ShapeDtypeStruct((B, S), jnp.int32))
    of_device = cost.Rates(flops=1e12, bandwidth=1e18, host_bandwidth=1e9)
    options = {"bytes_per_device": cost.nbytes, "num_devices": 1}
    found = cost.Program(of_device, **options).estimate(traced.jaxpr)
    product = B * N * S**2 * H
    assert found.flops == 9 * product
    seconds = product * sum(n / rate for n, rate in zip((2, 3, 4), rates, strict=True)) / 1e12
    assert found.seconds == pytest.approx(seconds, rel=1e-3)
    windowed = cost.Program(of_device, **options, share_of_pairs=0.25).estimate(traced.jaxpr)
    assert windowed.flops == found.flops / 4
    assert windowed.seconds == pytest.approx(seconds / 4, rel=1e-3)
    # Without any pair the kernels still read and write their arrays. The first reads q, k and v and
    # writes a q. The others read these, the gradient of the result, and write dq, or dk and dv.
    slow = dataclasses.replace(of_device, bandwidth=1e9)
    no_pairs = cost.Program(slow, **options, share_of_pairs=0.0).estimate(traced.jaxpr)
    size = 2 * (7 * q.size + 8 * k.size)
    assert no_pairs.seconds > size / (1e9 * cost.COPY_EFFICIENCY)


def test_a_window_leaves_less_attention(monkeypatch):
    """In the time that the planner estimates, and in its MFU."""

    class FoundError(Exception):
        pass

    def found(*args, share_of_pairs, **kwargs):
        raise FoundError(share_of_pairs)

    where = target_elsewhere(H100, make_mesh(data=1, fsdp=1, devices=jax.devices()[:1]))
    with monkeypatch.context() as patch:
        patch.setattr(cost, "Program", found)
        for window, share in ((None, 1.0), (16, 1.0), (4, (1 + 2 + 3 + 13 * 4 - 8) / 128)):
            model = dataclasses.replace(tiny_run.MODEL, sliding_window=window, remat="minimal")
            with pytest.raises(FoundError, match=rf"^{share}$"):
                Programs(where).estimate(dataclasses.replace(tiny_run.CONFIG, model=model))
    base = with_remat(preset("llama3.2-1b"), "full")
    attended = {None: 2048.0, 256: np.minimum(np.arange(4096) + 1, 256).mean() - 0.5}
    for window, mean_context in attended.items():
        model = dataclasses.replace(base.model, sliding_window=window)
        chosen = plan([dataclasses.replace(base, model=model)], where, Measures())
        flops = 4 * 4096 * flops_per_token(model, mean_context)
        assert f" {flops / 0.35 / H100.limits.bf16_flops:.1%} " in table(chosen)


def test_cost_of_products_and_loops():
    rates = cost.Rates(flops=1e12, bandwidth=1e12, host_bandwidth=1e9)

    def cost_of(fn, *shapes):
        traced = jax.jit(fn).trace(*(jax.ShapeDtypeStruct(s, jnp.float32) for s in shapes))
        return cost.Program(rates, bytes_per_device=cost.nbytes, num_devices=1).estimate(
            traced.jaxpr
        )

    square = (256, 256)
    one = cost_of(lambda a, b: a @ b, square, square)
    assert one.flops == 2 * 256**3
    assert one.seconds == pytest.approx(one.flops / (1e12 * cost.GEMM_EFFICIENCY))
    loop = cost_of(lambda a, b: jax.lax.fori_loop(0, 7, lambda _, c: c @ b, a), square, square)
    assert loop.flops == 7 * one.flops
    # How often a loop runs whose number of steps is an array is not known; its memory is.
    steps = lambda n, a, b: jax.lax.fori_loop(0, n[0].astype(int), lambda _, c: c @ b @ b, a)
    unknown = cost_of(steps, (1,), square, square)
    assert unknown.flops == 0 and unknown.seconds < one.seconds / 10
    assert unknown.temp_bytes >= 4 * 256**2  # the first of the two products

    # Elementwise operations that are used are one pass together, jitted or not.
    def gelu_twice(x):
        jnp.sin(x)
        return jax.nn.gelu(jax.nn.gelu(x) * 2)

    size = 4 * 10**6
    assert cost_of(gelu_twice, (10**6,)).seconds == pytest.approx(
        2 * size / (1e12 * cost.COPY_EFFICIENCY)
    )
    # The division waits for the sum over all rows: two passes read, and one writes.
    assert cost_of(lambda x: x / jnp.sum(x), (10**6,)).seconds == pytest.approx(
        3 * size / (1e12 * cost.COPY_EFFICIENCY), rel=1e-3
    )

    # Rematerialization runs the product again.
    def remade(a, b):
        def f(a):
            return jnp.sin(jnp.sin(a @ b) @ b).sum()

        return jax.grad(jax.checkpoint(f, policy=jax.checkpoint_policies.nothing_saveable))(a)

    assert cost_of(remade, square, square).flops == 4 * one.flops


def test_cost_of_tensors_that_go_to_the_host_and_back():
    rates = cost.Rates(flops=1e12, bandwidth=1e30, host_bandwidth=1e9)

    def cost_of(*places):
        def fn(x):
            for place in places:
                x = jax.device_put(x, place)
            return x

        traced = jax.jit(fn).trace(jax.ShapeDtypeStruct((1000,), jnp.float32))
        return cost.Program(rates, bytes_per_device=cost.nbytes, num_devices=1).estimate(
            traced.jaxpr
        )

    host, device = jax.memory.Space.Host, jax.memory.Space.Device
    both_ways = cost_of(host, device)
    assert both_ways.seconds == pytest.approx(2 * 4000 / 1e9)
    assert cost_of(device).seconds < 1e-12


def test_cost_of_kernels_with_products(monkeypatch):
    device = Device(H100.device_kind, (9, 0), 132)
    monkeypatch.setattr(gated_matmul, "target_device", lambda: device)
    monkeypatch.setattr(linear_launch, "target_device", lambda: device)
    monkeypatch.setattr(products, "target_device", lambda: device)
    rates = cost.Rates(flops=1e12, bandwidth=1e12, host_bandwidth=1e9)
    tokens, hidden_size, width = 2048, 256, 1024
    array = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.bfloat16)
    x, activation = array(tokens, hidden_size), array(tokens, width)
    down, across = array(width, hidden_size), array(hidden_size, width)
    labels = jax.ShapeDtypeStruct((tokens,), jnp.int32)
    forward = functools.partial(gated_matmul.gated_matmul, keep=True)
    loss = functools.partial(linear_statistics, softcap=None)
    loss_and_dlogits = functools.partial(exponentials.loss_of_linear, num_columns=width)
    coefficients = jax.ShapeDtypeStruct((tokens,), jnp.float32)
    transposed = array(width, tokens)
    product = functools.partial(products.product, dtype=jnp.float32)
    dweight = functools.partial(product, a_layout="KM", kernel_name="weight_gradient")
    dweight_rows = functools.partial(product, a_layout="MK", kernel_name="weight_gradient_rows")
    dx = functools.partial(product, a_layout="KM", kernel_name="input_gradient")
    for number, fn, args in (
        (2, forward, (x, across, across)),
        (1, gated_matmul.gated_matmul_backward, (x, down, activation, activation)),
        (1, loss, (x, down, None, labels)),
        # Only rows out of range need its second kernel, which costs nothing here.
        (1, loss_and_dlogits, (x, down, labels, coefficients)),
        (1, dweight, (activation, x)),
        (1, dweight_rows, (transposed, x)),
        (1, dweight_rows, ((array(width, 1536), array(width, 512)), x)),
        (1, lambda a, b, factor: dx(a, b, row_factor=factor), (transposed, down, coefficients)),
    ):
        traced = jax.jit(fn).trace(*args)
        found = cost.Program(rates, bytes_per_device=cost.nbytes, num_devices=1).estimate(
            traced.jaxpr
        )
        assert found.flops == number * 2 * tokens * hidden_size * width
        assert found.seconds >= found.flops / (1e12 * cost.GEMM_EFFICIENCY)


def test_products_in_fp8_run_at_twice_the_rate(monkeypatch):
    device = Device(H100.device_kind, (9, 0), 132)
    for module in (gated_kernel, product_kernel):
        monkeypatch.setattr(module, "target_device", lambda: device)
    rates = cost.Rates(flops=1e12, bandwidth=1e30, host_bandwidth=1e9)
    tokens, hidden_size, width = 2048, 256, 1024

    def quantized(*shape):
        values = jax.ShapeDtypeStruct(shape, jnp.float8_e4m3fn)
        return Quantized(values, jax.ShapeDtypeStruct((), jnp.float32))

    x, weight = quantized(tokens, hidden_size), quantized(width, hidden_size)
    one = functools.partial(product_kernel.product, out_dtype=jnp.bfloat16, promoted=True)
    for number, fn, args in (
        (1, one, (x, weight)),
        (
            2,
            functools.partial(gated_kernel.gated, out_dtype=jnp.bfloat16, keep=True),
            (x, weight, weight),
        ),
    ):
        traced = jax.jit(fn).trace(*args)
        found = cost.Program(rates, bytes_per_device=cost.nbytes, num_devices=1).estimate(
            traced.jaxpr
        )
        assert found.flops == number * 2 * tokens * hidden_size * width
        assert found.seconds == pytest.approx(found.flops / (2e12 * cost.GEMM_EFFICIENCY))


@pytest.mark.parametrize("loop", ["scan", "layer_scan"])
def test_one_device_makes_no_copies_of_a_layers_part_of_a_stack(loop):
    rates = cost.Rates(flops=1e30, bandwidth=1e12 / cost.COPY_EFFICIENCY, host_bandwidth=1e9)
    num_layers, size = 4, 256

    def with_scan(x, stack):
        return jax.lax.scan(lambda x, weight: (x @ weight,) * 2, x, stack)

    def with_indices(x, stack):
        """The program that `models.layer_scan` becomes."""

        def layer(i, state):
            x, stacked = state
            x = x @ jax.lax.dynamic_index_in_dim(stack, i, keepdims=False)
            return x, jax.lax.dynamic_update_index_in_dim(stacked, x, i, 0)

        stacked = jax.lax.empty((num_layers, size, size), x.dtype)
        return jax.lax.fori_loop(0, num_layers, layer, (x, stacked))

    x = jax.ShapeDtypeStruct((size, size), jnp.float32)
    stack = jax.ShapeDtypeStruct((num_layers, size, size), jnp.float32)
    fn = with_scan if loop == "scan" else with_indices
    traced = jax.jit(fn).trace(x, stack)
    seconds = [
        cost.Program(rates, bytes_per_device=cost.nbytes, num_devices=number)
        .estimate(traced.jaxpr)
        .seconds
        for number in (1, 2)
    ]
    layer = 4 * size**2 / 1e12
    # A GEMM reads two matrices and writes one. A copy of an operand reads one matrix and writes
    # one, as does a copy of the result.
    assert seconds[0] == pytest.approx(num_layers * 3 * layer, rel=0.01)
    assert seconds[1] == pytest.approx(num_layers * (3 + 2 + 2) * layer, rel=0.01)

    # A `jax.shard_map` over several devices costs as much as their program.
    mesh = make_mesh(data=2, fsdp=1, devices=jax.devices()[:2])
    whole = PartitionSpec()
    mapped = jax.shard_map(fn, mesh=mesh, in_specs=whole, out_specs=whole, check_vma=False)
    found = cost.Program(rates, bytes_per_device=cost.nbytes, num_devices=2).estimate(
        jax.jit(mapped).trace(x, stack).jaxpr
    )
    assert found.seconds == pytest.approx(seconds[1])


def test_cost_of_collectives():
    rates = cost.Rates(flops=1e12, bandwidth=1e12, host_bandwidth=1e9, link_bandwidth=1e9)
    mesh = make_mesh(data=1, fsdp=2, tensor=4)
    size = 4 * 64**2

    def cost_of(fn):
        whole = PartitionSpec()
        mapped = jax.shard_map(fn, mesh=mesh, in_specs=whole, out_specs=whole, check_vma=False)
        traced = jax.jit(mapped).trace(jax.ShapeDtypeStruct((64, 64), jnp.float32))
        return cost.Program(
            rates, bytes_per_device=cost.nbytes, num_devices=8, hidden_axes=BATCH_AXES
        ).estimate(traced.jaxpr)

    # A device receives data from the three others of its axis.
    for received, fn in (
        (3 * size, lambda x: jax.lax.all_gather(x, "tensor", tiled=True)),
        (0.75 * size, lambda x: jax.lax.psum_scatter(x, "tensor", tiled=True)),
        (0.75 * size, lambda x: jax.lax.all_to_all(x, "tensor", 0, 0, tiled=True)),
        (1.5 * size, lambda x: jax.lax.psum(x, "tensor")),
        (1.5 * size, lambda x: jax.lax.psum(x, ("fsdp", "tensor"))),
        (0, lambda x: jax.lax.all_gather(x, "fsdp", tiled=True)),
    ):
        found = cost_of(fn)
        assert found.link_bytes == received
        assert found.seconds == pytest.approx(received / (1e9 * cost.LINK_EFFICIENCY))
    # Inside of the map a device has its own part.
    assert cost_of(lambda x: x @ x).flops == 2 * 64**3
    unknown = dataclasses.replace(rates, link_bandwidth=0.0)
    assert unknown.link_seconds(1e9) == 0.0


def test_a_loop_overwrites_its_carry_and_nothing_else():
    rates = cost.Rates(flops=1e12, bandwidth=1e12, host_bandwidth=1e9)
    size = 4 * 4 * 64**2  # of a stack of four matrices

    def fn(x, stack):
        carry, weights = jnp.sin(x), jnp.sin(stack @ x)
        return jax.lax.scan(lambda c, w: (jnp.tanh(c @ w), c), carry, weights)

    args = (jax.ShapeDtypeStruct(s, jnp.float32) for s in ((64, 64), (4, 64, 64)))
    found = cost.Program(rates, bytes_per_device=cost.nbytes, num_devices=1).estimate(
        jax.jit(fn).trace(*args).jaxpr
    )
    # The loop holds a stack that it reads, one that it writes, one carry and a product.
    assert found.temp_bytes == pytest.approx(2 * size + 2 * size / 4)


@pytest.mark.parametrize("in_place", [True, False])
def test_a_kernel_overwrites_the_operand_that_it_names(in_place):
    rates = cost.Rates(flops=1e12, bandwidth=1e12, host_bandwidth=1e9)
    x = jax.ShapeDtypeStruct((64, 64), jnp.float32)
    kernel = pl.pallas_call(
        lambda x_ref, y_ref: None, out_shape=x, input_output_aliases={0: 0} if in_place else {}
    )
    traced = jax.jit(lambda x: kernel(x @ x)).trace(x)
    found = cost.Program(rates, bytes_per_device=cost.nbytes, num_devices=1).estimate(traced.jaxpr)
    assert found.temp_bytes == (1 if in_place else 2) * cost.nbytes(x)


def test_the_cost_of_the_loss_is_the_part_of_one_device():
    mesh = make_mesh(data=2, fsdp=4)
    rates = target_elsewhere(H100, mesh).rates
    rows, length, width, vocabulary = 16, 32, 64, 1024
    split = NamedSharding(mesh, PartitionSpec(None, "fsdp"))
    weight = jax.ShapeDtypeStruct((vocabulary, width), jnp.float32, sharding=split)
    x = jax.ShapeDtypeStruct((rows, length, width), jnp.bfloat16)
    labels = jax.ShapeDtypeStruct((rows, length), jnp.int32)
    loss = functools.partial(linear_cross_entropy, reduction="sum", implementation="xla")
    splits = Splits(weight, mesh)
    with jax.set_mesh(mesh):
        traced = jax.jit(jax.grad(loss, argnums=1)).trace(x, weight, labels)
        part, of_global_arrays = (
            cost.Program(
                rates,
                bytes_per_device=splits.bytes_per_device,
                num_devices=mesh.size,
                hidden_axes=BATCH_AXES,
                body_of_device=body_of_device,
            ).estimate(traced.jaxpr)
            for body_of_device in (splits.body_of_device, None)
        )
    # Each device holds the whole weight in 16 bits and its whole gradient in float32.
    assert of_global_arrays.temp_bytes < (4 + 2) * vocabulary * width < part.temp_bytes
    # The products are logits and dweight. The test does not ask for dx.
    assert part.flops == 2 * 2 * (rows * length / mesh.size) * width * vocabulary
