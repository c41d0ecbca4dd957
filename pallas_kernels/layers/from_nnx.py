"""Checks of the modules of Flax that `from_nnx` takes."""

import inspect
from typing import Any

from flax import nnx


def check_class(layer: str, module: Any, *classes: type) -> None:
    """Raises a TypeError unless the module is of one of the classes, and of no subclass.

    A subclass may compute something else.
    """
    if type(module) not in classes:
        names = " or an ".join(f"nnx.{c.__name__}" for c in classes)
        raise TypeError(f"{layer}.from_nnx takes an {names}, got a {type(module).__name__}")


def check_defaults(layer: str, module: nnx.Module, **remedies: str) -> None:
    """Raises a ValueError if an option has another value than by default.

    Args:
      layer: Name of the layer, for the message.
      module: Module of Flax.
      **remedies: Statement of what the layer does instead, by the name of the option.
    """
    parameters = inspect.signature(type(module).__init__).parameters
    for name, remedy in remedies.items():
        value = getattr(module, name)
        if value is not parameters[name].default and value != parameters[name].default:
            raise ValueError(f"{layer}.from_nnx: {name}={value!r} cannot be kept; {remedy}")
