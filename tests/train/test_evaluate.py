"""Sums over the batches of an evaluation."""

import jax
import numpy as np
from flax import nnx

from models.sharding import make_mesh
from train.evaluate import Sums, measure


def measured(labels, num_tokens):
    """The sums over three batches with these labels, each with `num_tokens` by its own count."""
    batch = {name: np.array([labels], np.int32) for name in ("tokens", "labels")}
    # 2**24 and more: float32 no longer tells neighbouring whole numbers apart.
    of_batch = {"nll_sum": np.float32(2**24), "correct_sum": np.float32(1)}
    values = of_batch | {"num_tokens": np.int32(num_tokens)}
    steps = iter([values, values | {"nll_sum": np.float32(1)}, values | {"nll_sum": np.float32(1)}])
    mesh = make_mesh(data=1, fsdp=1, devices=jax.devices()[:1])
    token_bytes = np.array([0, 1], np.int32)
    return measure(lambda *_: next(steps), nnx.State({}), [batch] * 3, token_bytes, mesh)


def test_sums_neither_overflow_nor_round():
    found = measured([1, 1], 2**30)
    assert (found.nll, found.correct, found.tokens, found.bytes) == (2**24 + 2, 3, 3 * 2**30, 6)


def test_ends_of_documents_alone_are_no_text():
    assert measured([0, 0], 2) == Sums()
