"""Traced programs: calls of `jax.jit` opened, and the part of a program that some values need."""

from collections.abc import Sequence
from typing import Any

from jax.extend import core

# A core.Var or a core.Literal, and a core.JaxprEqn. JAX declares no shape for their avals.
Atom = Any
Equation = Any


class Program:
    """The equations of a traced function, without calls of `jax.jit`.

    Attributes:
      inputs: Variables of the arguments.
      outputs: Variables or literals of the results.
    """

    def __init__(self, jaxpr: Any):
        self._values: dict[core.Var, Any] = {}
        self._equations: list[core.JaxprEqn] = []
        self._producers: dict[core.Var, core.JaxprEqn] = {}
        self.inputs: list[core.Var] = [core.Var(v.aval) for v in jaxpr.invars]
        self.outputs: list[Atom] = self._open(jaxpr, self.inputs)

    def producer(self, atom: Atom) -> Equation | None:
        """The equation that computes a value; None for arguments and constants."""
        return None if isinstance(atom, core.Literal) else self._producers.get(atom)

    def run(self, atoms: Sequence[Atom], arguments: Sequence[Any]) -> list[Any]:
        """The values of the atoms, from the equations that they need and those with effects."""
        needed = {a for a in atoms if not isinstance(a, core.Literal)}
        equations = []
        for equation in reversed(self._equations):
            if equation.effects or needed & {*equation.outvars}:
                equations.append(equation)
                needed |= {a for a in equation.invars if not isinstance(a, core.Literal)}
        equations.reverse()
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
            if (inner := _opened(equation)) is not None:
                results: Sequence[Atom] = self._open(inner, operands)
                renamed |= zip(equation.outvars, results, strict=True)
                continue
            variables = [
                v if isinstance(v, core.DropVar) else core.Var(v.aval) for v in equation.outvars
            ]
            renamed |= zip(equation.outvars, variables, strict=True)
            copied: core.JaxprEqn = equation.replace(invars=operands, outvars=variables)
            self._equations.append(copied)
            self._producers |= dict.fromkeys(variables, copied)
        return [read(atom) for atom in jaxpr.outvars]


def _opened(equation: core.JaxprEqn) -> Any:
    """The program that a call of `jax.jit` runs, or None if the call fixes shardings."""
    if equation.primitive.name not in ("jit", "pjit"):
        return None
    shardings = *equation.params["in_shardings"], *equation.params["out_shardings"]
    is_plain = all(type(s).__name__ == "UnspecifiedValue" for s in shardings)
    return equation.params["jaxpr"] if is_plain else None
