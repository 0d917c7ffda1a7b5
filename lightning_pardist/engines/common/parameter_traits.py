"""User-defined attributes of parameters, and hooks on their gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterable, MutableMapping
from typing import Any, TypeVar

from torch import Tensor

from lightning_pardist.compat.tensors import (
    accumulation_hooks_of,
    gradient_hooks_of,
    set_accumulation_hooks,
    set_gradient_hooks,
)
from lightning_pardist.engines.common.containers import refill
from lightning_pardist.engines.common.elementwise import user_attributes

T = TypeVar("T", bound=Tensor)


def copy_traits(made: T, before: Tensor) -> T:
    """Copy the attributes of a parameter, and the hooks on its gradient and its accumulation, to its replacement.

    Hooks are shared: removing one by its existing handle removes it from both.

    Args:
        made: The replacement.
        before: The parameter that is replaced.
    """
    marks = user_attributes(before)
    hooks = marks.pop("gradient_hooks", None) or gradient_hooks_of(before)
    made.__dict__.update(marks)
    if hooks:
        set_gradient_hooks(made, hooks)
    if accumulated := accumulation_hooks_of(before):
        set_accumulation_hooks(made, accumulated)
    return made


def hooks_on_gradient(parameter: Tensor) -> MutableMapping[int, Callable[[Tensor], Tensor | None]]:
    """Return the hooks on a parameter's gradient by handle id, also of one that is replaced in steps."""
    replaced: MutableMapping[int, Any] | None = getattr(parameter, "gradient_hooks", None)
    return gradient_hooks_of(parameter) if replaced is None else replaced


class HooksOnGradients:
    """Saves the hooks on the gradients of parameters, and on their accumulation, for the time of a trial run.

    Args:
        parameters: The parameters.
    """

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        self._kept = [
            (parameter, dict(hooks_on_gradient(parameter)), dict(accumulation_hooks_of(parameter)))
            for parameter in parameters
        ]

    def restore(self) -> None:
        """Remove hooks that were registered since, and add those that were removed."""
        for parameter, hooks, accumulated in self._kept:
            refill(hooks_on_gradient(parameter), hooks)
            refill(accumulation_hooks_of(parameter), accumulated)
