"""Mesh axes of shardings that XLA chose. 1 s on one core."""

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from pallas_kernels.shardings import mesh_and_splits, splits_of


def mesh_of(sizes, names):
    return jax.make_mesh(sizes, names, (AxisType.Auto,) * len(names))


@pytest.mark.parametrize("spec", [P(), P("a"), P(None, ("b", "a")), P("b", "a"), P(("a", "b"))])
def test_whole_axes(spec):
    mesh = mesh_of((4, 2, 1), ("a", "b", "c"))
    found, splits = mesh_and_splits(mesh, [NamedSharding(mesh, spec)], [2])
    entries = [*spec, None, None][:2]
    want = tuple(() if e is None else (e,) if isinstance(e, str) else e for e in entries)
    assert found == mesh and splits == [want]


def test_a_part_of_an_axis():
    """Eight devices are two groups of four, and XLA splits a second array over all eight."""
    mesh = mesh_of((8,), ("data",))
    groups = Mesh(mesh.devices.reshape(2, 4), ("group", "own"))
    given = NamedSharding(groups, P("group", "own")), NamedSharding(mesh, P(None, "data"))
    found, splits = mesh_and_splits(mesh, given, (2, 2))
    assert found.shape == {"data.0": 2, "data.1": 2, "data.2": 2}
    assert list(found.devices.flat) == list(mesh.devices.flat)
    all_devices = ("data.0", "data.1", "data.2")
    assert splits == [(all_devices[:1], all_devices[1:]), ((), all_devices)]


@pytest.mark.parametrize("sizes", [(2, 3), (3, 2)])
def test_parts_of_an_axis_of_six(sizes):
    mesh = Mesh(np.array(jax.devices()[:6]), ("data",))
    groups = Mesh(mesh.devices.reshape(sizes), ("group", "own"))
    found, splits = mesh_and_splits(mesh, [NamedSharding(groups, P("group", "own"))], [2])
    assert tuple(found.shape.values()) == sizes
    assert splits == [(("data.0",), ("data.1",))]


def test_an_order_of_devices_that_the_mesh_does_not_have(caplog):
    mesh = mesh_of((8,), ("data",))
    other = NamedSharding(Mesh(mesh.devices[::-1], ("data",)), P("data"))
    own = NamedSharding(mesh, P("data"))
    assert splits_of(other, 1, mesh) is None
    _, splits = mesh_and_splits(mesh, [other, own], [1, 1])
    assert splits == [((),), (("data",),)]
    assert "in an order of devices that the mesh" in caplog.text


def test_a_program_without_a_mesh(caplog):
    mesh = mesh_of((8,), ("data",))
    empty = Mesh(np.empty((), object), ())
    found, splits = mesh_and_splits(empty, [NamedSharding(mesh, P("data"))], [2])
    assert found.shape == {"devices": 8} and splits == [((), ())]
    assert "the program has no mesh" in caplog.text
