"""Chunks of an axis, one after the other."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.folding import fold_chunks

# Size, chunk size, and the sizes of the chunks.
CASES = [
    (7, 9, [7]),
    (6, 6, [6]),
    (7, 2, [1, 2, 2, 2]),
    (6, 2, [2, 2, 2]),
    # Two chunks become three, of whole tiles if they are that long.
    (7, 6, [1, 3, 3]),
    (6, 3, [2, 2, 2]),
    (1000, 512, [232, 384, 384]),
    (768, 384, [256, 256, 256]),
    (4096, 2048, [1024, 1536, 1536]),
    (5, 3, [1, 2, 2]),
    (4, 2, [1, 1, 1, 1]),
    (3, 2, [1, 1, 1]),
    (2, 1, [1, 1]),
    (1, 1, [1]),
    (0, 4, [0]),
]


@pytest.mark.parametrize(
    "size, chunk_size, sizes, axis",
    [
        pytest.param(
            *case, axis, marks=pytest.mark.full if axis and case[0] not in (7, 768) else ()
        )
        for axis in (0, 1)
        for case in CASES
    ],
)
def test_chunks(size, chunk_size, sizes, axis):
    a = np.random.default_rng(0).integers(100, size=(size, 3) if axis == 0 else (3, size))
    seen = []

    def body(chunk, start):
        seen.append(chunk.shape[axis])
        place = start + jnp.arange(chunk.shape[axis])
        return jnp.sum(chunk), chunk * 2 + (place[:, None] if axis == 0 else place)

    total, parts = jax.jit(lambda a: fold_chunks(body, a, chunk_size, axis=axis))(a)
    assert total == np.sum(a)
    place = np.arange(size)
    np.testing.assert_array_equal(parts, 2 * a + (place[:, None] if axis == 0 else place))
    # The body is traced for the first chunk and once for the others.
    assert seen == sizes[:2]
    assert sum(sizes) == size

    sums = lambda chunk, _: (None, jnp.sum(chunk, axis))
    _, stacked = jax.jit(lambda a: fold_chunks(sums, a, chunk_size, axis=axis, stack=True))(a)
    ends = np.cumsum(sizes)
    want = [
        np.take(a, np.arange(end - n, end), axis).sum(axis)
        for end, n in zip(ends, sizes, strict=True)
    ]
    np.testing.assert_array_equal(stacked, np.stack(want, axis))


def test_none_is_no_array():
    total, parts = fold_chunks(lambda chunk, _: (None, chunk[0]), (jnp.arange(5), None), 2)
    assert total is None
    np.testing.assert_array_equal(parts, np.arange(5))


def test_gradients():
    a = jnp.arange(7.0)
    square = lambda a: fold_chunks(lambda chunk, _: (jnp.sum(chunk**2), chunk), a, 2)[0]
    np.testing.assert_array_equal(jax.grad(square)(a), 2 * a)
