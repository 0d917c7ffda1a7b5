"""Transfer user-defined attributes and gradient hooks to a parameter that replaces another one."""

from __future__ import annotations

from typing import TypeVar

from torch import Tensor

from lightning_pardist.compat.tensors import (
    accumulation_hooks_of,
    gradient_hooks_of,
    set_accumulation_hooks,
    set_gradient_hooks,
)
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
