"""The mesh axes that split an array, from a sharding that XLA chose."""

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from jax.sharding import Mesh

from pallas_kernels.layout import Splits
from pallas_kernels.logs import log_once


def mesh_and_splits(
    mesh: Mesh, shardings: Sequence[Any], ndims: Sequence[int]
) -> tuple[Mesh, list[Splits]]:
    """A mesh of the same devices, and its axes that split each array.

    XLA may split an array over a part of a mesh axis. For instance, an axis of 8 devices splits the
    rows of `x`, and the program reads `x.reshape(2, -1, D)`. Then two groups of four devices have
    one half each. For such shardings every axis of the returned mesh has a prime number of devices:
    an axis `data` of 8 devices becomes `data.0`, `data.1` and `data.2`.

    A program of several devices may have no mesh: neither in the types of its arguments nor in the
    context in which JAX traced it. Then every device computes all tokens.

    Args:
      mesh: Mesh of the program; empty if there is none.
      shardings: Shardings of the arrays.
      ndims: Number of axes of each array.
    """
    if mesh.empty:
        if not all(s.is_fully_replicated for s in shardings):
            log_once(
                "every device computes all tokens, because the program has no mesh; give its "
                "arguments a NamedSharding, or call it under jax.set_mesh"
            )
        devices = sorted(shardings[0].device_set, key=lambda device: device.id)
        return Mesh(devices, ("devices",)), [((),) * ndim for ndim in ndims]
    for candidate in itertools.chain([mesh], _finer(mesh)):
        many = [splits_of(s, ndim, candidate) for s, ndim in zip(shardings, ndims, strict=True)]
        splits = [s for s in many if s is not None]
        if len(splits) == len(many):
            return candidate, splits
    log_once(
        "every device gathers the arrays that XLA splits in an order of devices that the mesh "
        f"{mesh.shape} does not have, and computes all of them; split them by "
        "jax.lax.with_sharding_constraint"
    )
    many = [splits_of(s, ndim, mesh) for s, ndim in zip(shardings, ndims, strict=True)]
    return mesh, [s or ((),) * ndim for s, ndim in zip(many, ndims, strict=True)]


def splits_of(sharding: Any, ndim: int, mesh: Mesh) -> Splits | None:
    """The mesh axes that split each axis of an array, or None if no whole axes of the mesh do."""
    parts = sharding.devices_indices_map((mesh.size,) * ndim)  # all axes have even parts
    splits = []
    for axis in range(ndim):
        slices = [parts[device][axis].indices(mesh.size) for device in mesh.devices.flat]
        part = np.reshape(
            [start // (stop - start) for start, stop, _ in slices], mesh.devices.shape
        )
        steps = {}  # from one device to the next along each axis of the mesh
        for i, name in enumerate(mesh.axis_names):
            if mesh.shape[name] > 1 and (step := np.take(part, 1, i).flat[0]):
                steps[name] = int(step)
        split = tuple(sorted(steps, key=lambda name: -steps[name]))  # major first
        if not np.array_equal(part, _parts(split, mesh)):
            return None
        splits.append(split)
    return tuple(splits)


def _parts(split: Sequence[str], mesh: Mesh) -> np.ndarray:
    """The number of the part that each device has, if these mesh axes split an axis of an array."""
    of_device = np.indices(mesh.devices.shape)
    part = np.zeros(mesh.devices.shape, int)
    for name in split:
        part = part * mesh.shape[name] + of_device[mesh.axis_names.index(name)]
    return part


def _finer(mesh: Mesh) -> Iterator[Mesh]:
    """The mesh, with an axis for each prime factor of the size of an axis, in all orders.

    Parts of an axis of 6 devices may be 2 groups of 3, or 3 groups of 2.
    """
    for orders in itertools.product(*map(_orders_of_prime_factors, mesh.shape.values())):
        names, sizes = [], []
        for name, factors in zip(mesh.axis_names, orders, strict=True):
            names += [f"{name}.{i}" for i in range(len(factors))] if len(factors) > 1 else [name]
            sizes += factors or [1]
        yield Mesh(mesh.devices.reshape(sizes), tuple(names))


def _orders_of_prime_factors(size: int) -> list[list[int]]:
    divisors = [n for n in range(2, size + 1) if size % n == 0]
    primes = [n for n in divisors if all(n % smaller for smaller in divisors if smaller < n)]
    return [[p, *rest] for p in primes for rest in _orders_of_prime_factors(size // p)] or [[]]
