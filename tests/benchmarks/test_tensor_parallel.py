"""The contenders of the benchmark of tensor parallelism, traced for two CPU devices. 2 s."""

import argparse

import jax
import pytest

from benchmarks.training.overlap import config_of
from benchmarks.training.tensor_parallel import contender
from models.sharding import make_mesh
from support.jaxprs import equations
from train.step import abstract_state, make_gradients

ARGUMENTS = argparse.Namespace(
    preset="qwen3-0.6b",
    layers=2,
    vocab_size=512,
    remat="minimal",
    scan=True,
    rows=2,
    sequence_length=64,
)


@pytest.mark.parametrize(("name", "has_shard_map"), [("all-reduce", False), ("ours", True)])
def test_all_reduce_leaves_the_partition_to_xla(name, has_shard_map):
    config = config_of(ARGUMENTS, fsdp=1, tensor=2)
    tokens = jax.ShapeDtypeStruct((1, 2, 64), "int32")
    mesh = make_mesh(data=1, fsdp=1, tensor=2, devices=jax.devices()[:2])
    promotes = jax.numpy_dtype_promotion("standard")  # XLA's attention does, of 16 bits
    with promotes, jax.set_mesh(mesh), contender(name, config) as traced:
        params = abstract_state(traced, mesh).params
        program = jax.make_jaxpr(make_gradients(traced))(
            params, {"tokens": tokens, "labels": tokens}
        )
    names = {equation.primitive.name for equation in equations(program.jaxpr)}
    assert ("shard_map" in names) == has_shard_map
