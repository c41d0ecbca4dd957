"""Traced programs: calls of `jax.jit` opened, and the part of a program that some values need."""

from collections.abc import Collection, Sequence
from typing import Any

import jax.numpy as jnp
from jax.extend import core

# A core.Var or a core.Literal, and a core.JaxprEqn. JAX declares no shape for their avals.
Atom = Any
Equation = Any

# Names of the primitives of `jax.jit` and `jax.checkpoint` (JAX 0.11.2 and 0.12).
JIT, CHECKPOINT = "jit", "remat2"


def variables(atoms: Sequence[Atom]) -> set[core.Var]:
    """The atoms that are no literals."""
    return {a for a in atoms if not isinstance(a, core.Literal)}


class Program:
    """The equations of a traced function, with some calls opened.

    Args:
      jaxpr: Traced function.
      opens: Names of the primitives whose programs are opened.

    Attributes:
      inputs: Variables of the arguments.
      outputs: Variables or literals of the results.
    """

    def __init__(self, jaxpr: Any, opens: Collection[str] = (JIT,)):
        self._opens = opens
        self._values: dict[core.Var, Any] = {}
        self._equations: list[core.JaxprEqn] = []
        self._producers: dict[core.Var, core.JaxprEqn] = {}
        self.inputs: list[core.Var] = [core.Var(v.aval) for v in jaxpr.invars]
        self.outputs: list[Atom] = self._open(jaxpr, self.inputs)

    def producer(self, atom: Atom) -> Equation | None:
        """The equation that computes a value; None for arguments and constants."""
        return None if isinstance(atom, core.Literal) else self._producers.get(atom)

    def needed(self, atoms: Sequence[Atom]) -> tuple[list[Equation], set[Atom]]:
        """The equations that the atoms need and those with effects, and all variables in them."""
        needed = variables(atoms)
        equations = []
        for equation in reversed(self._equations):
            if equation.effects or needed & {*equation.outvars}:
                equations.append(equation)
                needed |= variables(equation.invars)
        return equations[::-1], needed

    def scalars(self) -> set[float]:
        """All floating numbers that are literals or constants."""
        literals = [a for e in self._equations for a in e.invars if isinstance(a, core.Literal)]
        values = [a.val for a in literals] + [*self._values.values()]
        is_one = lambda v: jnp.shape(v) == () and jnp.issubdtype(jnp.result_type(v), jnp.floating)
        return {float(v) for v in values if is_one(v)}

    def run(self, atoms: Sequence[Atom], arguments: Sequence[Any]) -> list[Any]:
        """The values of the atoms, from the equations that they need and those with effects."""
        equations, needed = self.needed(atoms)
        constants = [v for v in self._values if v in needed]
        effects = frozenset().union(*(equation.effects for equation in equations))
        debug_info = core.DebugInfo("jit", "model", None, None)
        program = core.Jaxpr(
            (), [*constants, *self.inputs], list(atoms), equations, effects, debug_info
        )
        return core.jaxpr_as_fun(program)(*(self._values[v] for v in constants), *arguments)

    def _open(self, jaxpr: Any, arguments: Sequence[Atom]) -> list[Atom]:
        """Appends the equations, with new variables, and returns the results."""
        renamed: dict[core.Var, Atom] = dict(zip(jaxpr.invars, arguments, strict=True))
        for variable, value in zip(jaxpr.constvars, jaxpr.consts, strict=True):
            renamed[variable] = constant = core.Var(variable.aval)
            self._values[constant] = value
        read = lambda atom: atom if isinstance(atom, core.Literal) else renamed[atom]
        for equation in jaxpr.eqns:
            operands = [read(atom) for atom in equation.invars]
            if (inner := self._opened(equation)) is not None:
                results: Sequence[Atom] = self._open(inner, operands)
                renamed |= zip(equation.outvars, results, strict=True)
                continue
            outvars = [
                v if isinstance(v, core.DropVar) else core.Var(v.aval) for v in equation.outvars
            ]
            renamed |= zip(equation.outvars, outvars, strict=True)
            copied: core.JaxprEqn = equation.replace(invars=operands, outvars=outvars)
            self._equations.append(copied)
            self._producers |= dict.fromkeys(outvars, copied)
        return [read(atom) for atom in jaxpr.outvars]

    def _opened(self, equation: core.JaxprEqn) -> Any:
        """The program that an equation runs, or None if it stays closed.

        A call of `jax.jit` that fixes shardings stays closed.
        """
        if equation.primitive.name not in self._opens:
            return None
        names = "in_shardings", "out_shardings"
        shardings = [s for name in names for s in equation.params.get(name, ())]
        is_plain = all(type(s).__name__ == "UnspecifiedValue" for s in shardings)
        return equation.params["jaxpr"] if is_plain else None
