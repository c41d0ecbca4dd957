"""`patch`, and what it returns."""

import dataclasses
import re
from collections import Counter
from typing import Any

from flax import nnx

from pallas_kernels.patching import candidates, classes, head
from pallas_kernels.patching.check import Refused, rule_for
from pallas_kernels.patching.rules import Path, Rule, name_of


@dataclasses.dataclass(frozen=True)
class Module:
    """A module that was replaced or left.

    Attributes:
      path: Path in the model.
      class_name: Name of its class.
      operation: Operation that runs now, or None if the module was left.
      reason: Reason why it was left, or None.
    """

    path: Path
    class_name: str
    operation: str | None
    reason: str | None


class Patched:
    """What `patch` replaced in a model. Its `str` is a table.

    Attributes:
      modules: All modules that were replaced, or left for a reason.
    """

    def __init__(self, modules: tuple[Module, ...], replaced: tuple[nnx.Module, ...]):
        self.modules = modules
        self._replaced = replaced

    @property
    def replaced(self) -> tuple[Module, ...]:
        """The modules that run an operation now."""
        return tuple(m for m in self.modules if m.operation is not None)

    @property
    def left(self) -> tuple[Module, ...]:
        """The modules that have the parameters of a norm or MLP and compute something else."""
        return tuple(m for m in self.modules if m.operation is None)

    def loss(
        self,
        model: nnx.Module,
        labels: Any,
        *args: Any,
        loss_options: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> Any:
        return head.loss(model, labels, args, kwargs, loss_options or {})

    def undo(self) -> None:
        """Gives every replaced module its class back."""
        for module in self._replaced:
            if classes.is_patched(module):
                classes.set_class(module, type(module).pallas_kernels_base)  # pyright: ignore

    def __str__(self) -> str:
        rows = Counter(
            (
                re.sub(r"\b\d+\b", "*", name_of(m.path)),
                m.class_name,
                m.operation or f"left: {m.reason}",
            )
            for m in self.modules
        )
        lines = [
            ("path", "module", "runs now"),
            *((f"{p} ({n})" if n > 1 else p, c, w) for (p, c, w), n in rows.items()),
        ]
        widths = [max(len(line[i]) for line in lines) for i in (0, 1)]
        return "\n".join(f"{p:{widths[0]}}  {c:{widths[1]}}  {w}" for p, c, w in lines)

    __repr__ = __str__


def patch(model: nnx.Module) -> Patched:
    """Replaces the RMSNorms and gated MLPs of an NNX model, in place."""
    if not isinstance(model, nnx.Module):
        raise TypeError(f"patch takes an nnx.Module, got a {type(model).__name__}")
    known: dict[Any, Rule | str | None] = {}
    modules, replaced, done = [], [], set()
    for path, module in _inner_first(model):
        paths = {(*path, *p) for p in candidates.parameters(module)}
        if not paths or paths <= done or classes.is_patched(module):
            continue
        rule = _rule(module, known)
        if rule is None:
            continue
        name = type(module).__name__
        if isinstance(rule, str):
            modules.append(Module(path, name, None, rule))
            continue
        classes.set_class(module, classes.patched_class(type(module), rule))
        modules.append(Module(path, name, str(rule.run), None))
        replaced.append(module)
        done |= paths
    in_order = {path: i for i, (path, _) in enumerate(nnx.iter_modules(model))}
    modules.sort(key=lambda m: in_order[m.path])
    return Patched(tuple(modules), tuple(replaced))


def _inner_first(model: nnx.Module) -> list[tuple[Path, nnx.Module]]:
    """All modules, those inside of another before it."""
    return sorted(nnx.iter_modules(model), key=lambda item: -len(item[0]))


def _rule(module: nnx.Module, known: dict[Any, Rule | str | None]) -> Rule | str | None:
    """The rule of a module, the reason why there is none, or None if it is no candidate.

    Equal modules, such as those of all layers, are compared once.
    """
    graphdef, state = nnx.split(module)
    arrays = tuple((p, v.shape, v.dtype) for p, v in nnx.to_flat_state(state))
    try:
        key = graphdef, arrays
        hash(key)
    except TypeError:
        key = id(module)
    if key not in known:
        try:
            known[key] = rule_for(module)
        except Refused as e:
            known[key] = str(e)
    return known[key]
