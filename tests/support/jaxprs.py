"""Programs as JAX traces them."""

import jax


def equations(jaxpr):
    """All equations, those of inner programs (once each) included."""
    for equation in jaxpr.eqns:
        yield equation
        for inner in jax.tree.leaves(
            list(equation.params.values()),
            is_leaf=lambda a: hasattr(a, "eqns") or hasattr(a, "jaxpr"),
        ):
            inner = getattr(inner, "jaxpr", inner)
            if hasattr(inner, "eqns"):
                yield from equations(inner)
