"""Launch parameters of the attention's kernels: what they refuse, and what a block can have."""

import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import document_attention, document_bounds
from pallas_kernels.attention import (
    AttentionConfig,
    ForwardConfig,
    KeysConfig,
    QueriesConfig,
    dkdv_kernel,
    dq_kernel,
    forward,
)
from pallas_kernels.attention import config as configs
from pallas_kernels.attention.dkdv_kernel import gradients_of_keys_and_values
from pallas_kernels.attention.dq_kernel import gradient_of_queries
from pallas_kernels.attention.forward import attention_forward
from pallas_kernels.gpu.device import Device

array = jax.ShapeDtypeStruct


@pytest.mark.parametrize("value", [2.5, 2.0, True, np.float32(2), "2", None], ids=repr)
@pytest.mark.parametrize(
    ("make", "field"),
    [
        (ForwardConfig, "warpgroups"),
        (functools.partial(ForwardConfig, warpgroups=2), "block_kv"),
        (functools.partial(QueriesConfig, warpgroups=2), "stages"),
        (KeysConfig, "tile"),
    ],
    ids=["forward warpgroups", "forward block_kv", "dq stages", "dkdv tile"],
)
def test_launch_parameters_are_integers(unchecked_shapes, make, field, value):
    message = rf"{field} must be an integer, got {re.escape(repr(value))}; the docstring of \w+Conf"
    with pytest.raises(TypeError, match=message):
        make(**{field: value})


@pytest.mark.parametrize("as_type", [np.int64, jnp.asarray])
def test_integers_of_other_libraries(unchecked_shapes, as_type):
    """They become Python's, so that the parameters can be static."""
    config = QueriesConfig(warpgroups=as_type(2), stages=as_type(3))
    assert hash(config) == hash(QueriesConfig(warpgroups=2, stages=3))
    assert repr(config) == "QueriesConfig(warpgroups=2, stages=3)"


@pytest.mark.parametrize("field", ["forward", "dq", "dkdv"])
@pytest.mark.parametrize("value", [{}, AttentionConfig()], ids=["dict", "AttentionConfig"])
def test_launch_parameters_are_of_their_class(unchecked_shapes, field, value):
    class_name = {"forward": "ForwardConfig", "dq": "QueriesConfig", "dkdv": "KeysConfig"}[field]
    message = (
        rf"{field}={re.escape(repr(value))} must be a pallas_kernels\S+\.{class_name}, or None"
    )
    with pytest.raises(TypeError, match=message):
        AttentionConfig(**{field: value})


type Config = ForwardConfig | QueriesConfig | KeysConfig
FIELDS = {ForwardConfig: "forward", QueriesConfig: "dq", KeysConfig: "dkdv"}


def with_config(config: Config, length=1024, head_size=64, group=4):
    """Shapes of the attention by kernels with these launch parameters, for one head of keys."""
    field: dict[str, Any] = {FIELDS[type(config)]: config}
    of = lambda num_heads: array((1, length, num_heads, head_size), jnp.bfloat16)
    bounds = document_bounds(jnp.zeros((1, length), jnp.int32))
    options = {"implementation": "mosaic_gpu", "config": AttentionConfig(**field)}
    attend = lambda q, k, v: document_attention(q, k, v, bounds, **options)
    return jax.eval_shape(attend, of(group), of(1), of(1))


# The most that a block has, and one stage more. In the second and the fourth pair, the arrays of
# the larger configuration fill the memory, and its barriers do not fit.
LIMITS = [
    (64, ForwardConfig(warpgroups=4, max_stages=12), ForwardConfig(warpgroups=4, max_stages=13)),
    (64, QueriesConfig(warpgroups=2, stages=11), QueriesConfig(warpgroups=2, stages=12)),
    (128, ForwardConfig(warpgroups=4, max_stages=5), ForwardConfig(warpgroups=4, max_stages=6)),
    (128, QueriesConfig(warpgroups=3, stages=3), QueriesConfig(warpgroups=3, stages=4)),
    (64, KeysConfig(stages=11), KeysConfig(stages=12)),
    (128, KeysConfig(stages=4), KeysConfig(stages=5)),
]


def lowered(config, head_size):
    """Lowers the kernel alone for a GPU, where Mosaic counts the shared memory."""
    q, k = (array((1, 1024, heads, head_size), jnp.bfloat16) for heads in (4, 1))
    bounds, sums = array((1, 1024), jnp.int32), array((1, 4, 1024), jnp.float32)
    if isinstance(config, ForwardConfig):
        run = functools.partial(attention_forward, config=config)
        args = q, k, k, bounds
    else:
        of_queries = isinstance(config, QueriesConfig)
        run = gradient_of_queries if of_queries else gradients_of_keys_and_values
        run = functools.partial(run, config=config)
        args = q, k, k, q, sums, sums, bounds
    return jax.export.export(jax.jit(functools.partial(run, scale=1.0)), platforms=["cuda"])(*args)


@pytest.mark.parametrize(("head_size", "largest", "larger"), LIMITS, ids=str)
def test_shared_memory_is_counted_as_mosaic_counts_it(head_size, largest, larger):
    with_config(largest, head_size=head_size)
    lowered(largest, head_size)
    with pytest.raises(ValueError, match="exceeds available shared memory") as of_mosaic:
        lowered(larger, head_size)
    found = re.search(r"smem_bytes=(\d+) > max_smem_bytes=(\d+)", str(of_mosaic.value))
    assert found is not None
    message = (
        rf"{re.escape(str(larger))} with heads of {head_size} numbers takes {found[1]} bytes of "
        rf"shared memory, a block of cpu can have {found[2]}; take .*fewer"
    )
    with pytest.raises(ValueError, match=message):
        with_config(larger, head_size=head_size)


def test_a_short_row_has_fewer_stages():
    with_config(ForwardConfig(warpgroups=4, max_stages=99), length=768)


@pytest.mark.parametrize(("head_size", "largest"), [(64, 192), (128, 128)], ids=str)
def test_sums_fit_the_registers(head_size, largest):
    """tests/aot/test_aot_attention.py compiles the largest tiles of heads of 64 numbers."""
    config = lambda size: ForwardConfig(warpgroups=4, block_kv=size, max_stages=1)
    with_config(config(largest), head_size=head_size)
    message = rf"block_kv={largest + 64}.* has 160 sums .* of 4 warpgroups has 128 registers"
    with pytest.raises(ValueError, match=message):
        with_config(config(largest + 64), head_size=head_size)


@pytest.mark.parametrize(
    ("head_size", "largest", "larger", "registers"),
    [
        (64, KeysConfig(tile=128, stages=2), KeysConfig(tile=192, stages=2), 240),
        (64, KeysConfig(warpgroups=3), KeysConfig(warpgroups=4), 112),
        (128, KeysConfig(), KeysConfig(warpgroups=3), 160),
    ],
    ids=str,
)
def test_sums_of_keys_fit_the_registers(head_size, largest, larger, registers):
    with_config(largest, head_size=head_size)
    sums = larger.tile + head_size
    message = rf"has {sums} sums .* of {larger.warpgroups} computing .* has {registers} registers"
    with pytest.raises(ValueError, match=message):
        with_config(larger, head_size=head_size)


@pytest.mark.parametrize(
    ("shape", "group", "parts"),
    [
        ((4, 4096, 8, 64), 4, 1),  # 1024 blocks for 132 multiprocessors
        ((1, 4096, 8, 128), 4, 1),  # 256
        ((2, 4096, 2, 64), 7, 2),  # 128
        ((1, 4096, 2, 128), 8, 4),  # 64
        ((1, 1000, 2, 64), 4, 4),  # 16, and no more parts than heads
        ((1, 8, 1, 64), 1, 1),
    ],
)
def test_few_keys_have_parts(monkeypatch, shape, group, parts):
    monkeypatch.setattr(configs, "target_device", lambda: Device("a GPU", (9, 0), 132))
    assert configs.keys_config(shape, group) == KeysConfig(parts=parts)


def test_more_parts_than_heads_are_an_error():
    with_config(KeysConfig(parts=4))
    message = r"parts=5\) divides 4 heads of queries .* into 5 parts; take up to 4"
    with pytest.raises(ValueError, match=message):
        with_config(KeysConfig(parts=5))


def test_tiles_of_rows_of_one_document():
    of = functools.partial(configs.forward_config, head_size=64)
    assert of(2048, whole_rows=True).block_kv == 128
    assert of(2040, whole_rows=True) == of(2048, whole_rows=False) == ForwardConfig(warpgroups=2)


@pytest.mark.parametrize(
    ("config", "group"),
    [
        (ForwardConfig(warpgroups=1), 4),
        (QueriesConfig(warpgroups=1, stages=2), 4),
        (KeysConfig(warpgroups=1), 1),
    ],
    ids=str,
)
def test_a_grid_has_65535_blocks_of_a_row(config, group):
    most = 65535 // group * 64
    with_config(config, length=most, group=group)
    message = r"makes 65536 blocks of a row of \d+ tokens, and a grid has up to 65535; take more wa"
    with pytest.raises(ValueError, match=message):
        with_config(config, length=most + 8, group=group)


@pytest.mark.parametrize("shape", [(32768, 136, 4, 2, 64), (2, 1048576, 8, 2, 64)], ids=str)
def test_axes_of_a_grid_have_at_most_65535_blocks(monkeypatch, shape):
    """It is CUDA's limit for all axes but the last one here, which has the heads."""
    grids = {}

    def as_launched(_, *, kernel_name, grid, out_type, **__):
        grids[kernel_name] = grid
        return lambda *_: jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), out_type)

    for module in (forward, dq_kernel, dkdv_kernel):
        monkeypatch.setattr(module, "gpu_kernel", as_launched)
    batch_size, length, num_heads, num_kv_heads, head_size = shape
    of = lambda heads: array((batch_size, length, heads, head_size), jnp.bfloat16)
    attend = functools.partial(document_attention, bounds=None, implementation="mosaic_gpu")
    loss = lambda *qkv: jnp.sum(attend(*qkv).astype(jnp.float32))
    jax.eval_shape(jax.grad(loss), of(num_heads), of(num_kv_heads), of(num_kv_heads))
    assert len(grids) == 3
    assert all(len(grid) == 3 and max(grid[:2]) <= 65535 for grid in grids.values())
