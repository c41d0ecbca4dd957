"""How a mesh splits the arrays of a traced step, and what each device runs of the loss.

A trace has no shardings of the arrays between a step's arguments and its results: XLA chooses them.
Two rules say what it chooses for this step:

- An array with the shape of a parameter is split as the parameter: a gradient, a moment.
- Axis 0 of every other array is split over all devices: the rows of a batch, or what a
  `jax.shard_map` over all devices keeps for its backward.
"""

import math
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from train.planner.dataflow import nbytes


class Splits:
    """The splits of the arrays of a step.

    Args:
      state: Pytree of the step's arguments that stay on the devices: the state and the frozen
        parameters, as shapes with shardings.
      mesh: The devices.
    """

    def __init__(self, state: Any, mesh: Mesh):
        self._mesh = mesh
        self._bodies: dict[Any, Any] = {}
        leaves = jax.tree.leaves(state)
        self._specs = {leaf.shape: leaf.sharding.spec for leaf in leaves}

    def spec(self, aval: Any) -> PartitionSpec:
        """The split of an array, given its abstract value."""
        return self._specs.get(aval.shape, PartitionSpec(self._mesh.axis_names))

    def bytes_per_device(self, aval: Any) -> float:
        """The bytes of an array that each device holds."""
        names = jax.tree.leaves(tuple(self.spec(aval)))
        return nbytes(aval) / math.prod(self._mesh.shape[name] for name in names)

    def body_of_device(self, eqn: Any) -> Any:
        """The `jax.shard_map` that XLA makes of an operation, as a jaxpr.

        The jaxpr on global arrays does not show what a device holds: the loss chooses its chunks
        for a device's own tokens, and gathers its weight.

        Args:
          eqn: Equation of `custom_partitioning`, as `pallas_kernels.auto_axes` makes them.
        """
        partition = eqn.params["partition"]
        avals = [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in eqn.invars]
        key = partition, *((a.shape, a.dtype) for a in avals)
        if key not in self._bodies:
            place = lambda a: a.update(sharding=NamedSharding(self._mesh, self.spec(a)))
            types = [v.aval for v in eqn.outvars]
            _, fn, results, args = partition(self._mesh, list(map(place, avals)), types)
            specs = [tuple(sharding.spec for sharding in many) for many in (args, results)]
            mapped = jax.shard_map(
                fn, mesh=self._mesh, in_specs=specs[0], out_specs=specs[1], check_vma=False
            )
            self._bodies[key] = jax.jit(mapped).trace(*avals).jaxpr
        return self._bodies[key]
