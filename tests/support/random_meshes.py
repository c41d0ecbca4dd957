"""Splits of arrays over the axes of a mesh at random."""

import math

from jax.sharding import PartitionSpec as P

SIZES = (2, 4), (4, 2), (2, 2, 2), (8, 1), (1, 8)


def random_spec(rng, mesh, shape, *, names=None, first=0, last=None, is_even=True):
    """A spec that gives some of the mesh axes to axes of an array.

    Args:
      rng: Random numbers of Python.
      mesh: Mesh.
      shape: Shape of the array.
      names: Mesh axes that may split the array; None takes all.
      first: First axis of the array that may be split.
      last: Axis behind the last one that may be split; None takes the number of axes.
      is_even: Whether an axis stays whole that the devices do not divide.
    """
    names = list(mesh.axis_names if names is None else names)
    stop = len(shape) if last is None else last
    split = [[] for _ in shape]
    for name in rng.sample(names, len(names)):
        axis = rng.randrange(first, stop + 1)
        if axis < stop:
            split[axis].append(name)
    devices = [math.prod(mesh.shape[name] for name in of_axis) for of_axis in split]
    fits = [size % n == 0 or not is_even for size, n in zip(shape, devices, strict=True)]
    return P(*(tuple(s) if fit and s else None for s, fit in zip(split, fits, strict=True)))
