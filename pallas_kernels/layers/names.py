"""Names that layers had before, and modules of Flax that a layer can stand for."""

import functools
import inspect
import warnings
from collections.abc import Callable
from typing import Any

from flax import nnx


def renamed_arguments(**new_names: str) -> Callable[[Any], Any]:
    """A decorator for functions that take old names of their arguments for one more version.

    Args:
      **new_names: New names by old ones.
    """

    def decorate(function: Any) -> Any:
        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            for old, new in new_names.items():
                if old in kwargs:
                    warn_renamed(f"the argument {old}", new)
                    if new in kwargs:
                        raise TypeError(f"{old} is the old name of {new}; leave it out")
                    kwargs[new] = kwargs.pop(old)
            return function(*args, **kwargs)

        return call

    return decorate


def warn_renamed(old: str, new: str) -> None:
    """Warns a caller of the layer about a name that the next version removes."""
    warnings.warn(f"{old} is called {new} now", DeprecationWarning, stacklevel=3)


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
      **remedies: What the layer does instead, by the name of the option.
    """
    parameters = inspect.signature(type(module).__init__).parameters
    for name, remedy in remedies.items():
        value = getattr(module, name)
        if value is not parameters[name].default and value != parameters[name].default:
            raise ValueError(f"{layer}.from_nnx: {name}={value!r} cannot be kept; {remedy}")
