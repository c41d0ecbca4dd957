"""`patch`, and what it returns."""

import dataclasses
import re
from collections import Counter
from typing import Any

from flax import nnx
from jaxtyping import Array, Integer

from pallas_kernels.fp8 import Recipe, RecipeName
from pallas_kernels.fp8.recipes import find_recipe
from pallas_kernels.patching import candidates, classes, head
from pallas_kernels.patching.check import Comparison, comparison_of
from pallas_kernels.patching.original import Refused
from pallas_kernels.patching.rules import MLPRule, Path, Rule, name_of


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

    @property
    def text(self) -> str:
        """Name of the operation that runs now, or why the module runs its own code."""
        return self.operation or f"its own code: {self.reason}"


class Patched:
    """The modules that `patch` replaced in a model. Its `str` is a table.

    Attributes:
      modules: All modules that were replaced, or that were left for a reason.
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
        """The modules that have the parameters of a norm or MLP, but compute something else."""
        return tuple(m for m in self.modules if m.operation is None)

    def loss(
        self,
        model: nnx.Module,
        labels: Integer[Array, "*T"],
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """The cross-entropy of `model(*args, **kwargs)` against `labels`, without its logits.

            loss, grads = nnx.value_and_grad(patched.loss)(model, labels, tokens)

        The loss is `linear_cross_entropy` of the hidden states and the matrix of the head, which
        are found in the traced call. The output embedding may have either layout, a bias and a
        softcap, and may be the input embedding. One output of the call must be logits for the
        labels. Variables that the call changes are changed as by the call itself.

        Args:
          model: The model, or a copy with other parameters, such as `nnx.merge` returns.
          labels: Token to predict at each position of the logits; -100 does not count.
          *args: Arguments of the model.
          **kwargs: Keyword arguments of the model. One is for the loss: `loss_options` is a mapping
            with keyword arguments of `linear_cross_entropy`, for example `z_loss`, `token_weights`
            or `return_metrics`. The model's own bias and softcap are used.

        Returns:
          The results of `linear_cross_entropy`.

        Raises:
          NotImplementedError: The logits are no product with one matrix, something else happens to
            them afterwards, the product is inside of a `jax.checkpoint` or a loop, or the call adds
            or removes variables.
          ValueError: No output of the call, or more than one, has logits for the labels.
          TypeError: An option is not one of the loss; or it is `bias`, `logit_softcap`,
            `vocab_axis` or `weight_layout`, which the model decides.
        """
        # No argument of its own, because NNX's transforms take no keyword-only arguments.
        options = kwargs.pop("loss_options", {})
        return head.loss(model, labels, args, kwargs, options)

    def undo(self) -> None:
        """Gives every replaced module its class back."""
        for module in self._replaced:
            if classes.is_patched(module):
                classes.set_class(module, type(module).pallas_kernels_base)  # pyright: ignore

    def __str__(self) -> str:
        # Modules that differ in a number of their path only, such as layers, share a line.
        rows = Counter(
            (re.sub(r"\b\d+\b", "*", name_of(m.path)), m.class_name, m.text) for m in self.modules
        )
        lines = [("path", "module", "runs now")]
        for (path, name, text), number in rows.items():
            lines.append((f"{path} ({number})" if number > 1 else path, name, text))
        widths = [max(len(line[i]) for line in lines) for i in (0, 1)]
        return "\n".join(f"{p:{widths[0]}}  {c:{widths[1]}}  {w}" for p, c, w in lines)

    __repr__ = __str__


def patch(model: nnx.Module, *, fp8: Recipe | RecipeName | None = None) -> Patched:
    """Replaces the RMSNorms and gated MLPs of a Flax NNX model by this library's, in place.

        patched = pallas_kernels.patch(model)
        print(patched)

    With `fp8`, the gated MLPs multiply in FP8, by `pallas_kernels.fp8.fp8_swiglu_mlp`.

    A module is recognized by what it computes, not by the name of its class. Its parameters must be
    one vector, or the three matrices of a gated MLP in any layout; gate and up may be in one array.
    Its result on random inputs must equal the formula up to a few roundings, in float32 and
    bfloat16. Its traced call must have only smooth operations, because then its derivatives are
    equal, too. A module with another result, with biases, dropout or effects stays as it is. A
    module also stays if its result depends on a variable that is no `nnx.Param`, such as an epsilon
    in an `nnx.Variable`.

    Only the call of a replaced module changes. The model keeps its parameters, their paths, its
    attributes, and `isinstance`, so checkpoints, optimizers and NNX's transforms work as before.
    Results have the same dtypes. Modules whose parameters are stacked for a scan or vmap over
    layers are replaced, too. The parameters may be `jax.ShapeDtypeStruct`.

    A replaced module runs its original code in calls that the comparison did not cover:

    - an input of another dtype than float32 and bfloat16, or of a rank other than 2, 3 and 4;
    - an argument that may change the result;
    - added parameters, and parameters in another dtype than their own or bfloat16.

    `explain` shows the reason, and under `require_kernels` the call is an error. Changing an
    attribute later, such as an epsilon, has no effect: `undo` and patch again.

    Args:
      model: Model to change, outside of `jax.jit`.
      fp8: Recipe of the gated MLPs, or its name; None multiplies in the dtypes of the modules.

    Returns:
      The list of modules that were replaced or left. Its methods compute the loss and undo the
      change.

    Raises:
      TypeError: `model` is no `nnx.Module`.
      ValueError: There is no recipe of that name, or an MLP was patched with another one.
    """
    if not isinstance(model, nnx.Module):
        raise TypeError(f"patch takes an nnx.Module, got a {type(model).__name__}")
    recipe = None if fp8 is None else find_recipe(fp8)
    known: dict[Any, Comparison | str | None] = {}
    modules, replaced, done = [], [], set()
    inner_first = sorted(nnx.iter_modules(model), key=lambda item: -len(item[0]))
    for path, module in inner_first:
        paths = {(*path, *p) for p in candidates.parameters(module)}
        if classes.is_patched(module):
            _check_recipe(path, module, recipe)
            done |= paths
        if not paths or paths <= done or not callable(module):
            continue
        rule = _rule(module, known)
        if rule is None:
            continue
        if isinstance(rule, Rule) and isinstance(rule.operation, MLPRule):
            operation = dataclasses.replace(rule.operation, recipe=recipe)
            rule = dataclasses.replace(rule, operation=operation)
        name = type(module).__name__
        if isinstance(rule, str):
            if paths & done:  # a block around what was replaced
                continue
            modules.append(Module(path, name, None, rule))
            continue
        classes.set_class(module, classes.patched_class(type(module), rule))
        modules.append(Module(path, name, str(rule.operation), None))
        replaced.append(module)
        done |= paths
    in_order = {path: i for i, (path, _) in enumerate(nnx.iter_modules(model))}
    modules.sort(key=lambda m: in_order[m.path])
    return Patched(tuple(modules), tuple(replaced))


def _check_recipe(path: Path, module: Any, recipe: Recipe | None) -> None:
    """Raises a ValueError if a patched MLP has another recipe."""
    operation = type(module).pallas_kernels_rule.operation
    if isinstance(operation, MLPRule) and operation.recipe != recipe:
        raise ValueError(
            f"{name_of(path)} was patched with fp8={operation.recipe!r}, and now fp8={recipe!r}; "
            "pass the same recipe, or call undo() of the first patch before"
        )


def _rule(module: nnx.Module, known: dict[Any, Comparison | str | None]) -> Rule | str | None:
    """The rule of a module, the reason why there is none, or None if it is no candidate.

    Modules such as those of all layers are compared once. Their graph definitions are equal, and so
    are their traced calls: attributes may be equal and differ, as `True` and 1 do.
    """
    graphdef, state = nnx.split(module)
    arrays = tuple((p, v.shape, v.dtype) for p, v in nnx.to_flat_state(state))
    try:
        key = graphdef, arrays
        hash(key)
    except TypeError:
        key = id(module)
    found = known.get(key)
    if key not in known or (isinstance(found, Comparison) and not found.holds_for(module)):
        try:
            found = comparison_of(module)
        except Refused as e:
            found = str(e)
        known[key] = found
    return found.rule if isinstance(found, Comparison) else found
