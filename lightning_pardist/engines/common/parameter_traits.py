"""What users put on a parameter, and another one that takes its place has to have as well."""

from __future__ import annotations

from typing import TypeVar

from torch import Tensor

from lightning_pardist.compat.tensors import gradient_hooks_of, set_gradient_hooks
from lightning_pardist.engines.common.elementwise import marks_of

T = TypeVar("T", bound=Tensor)


def take_place(made: T, before: Tensor) -> T:
    """Give a parameter the attributes of another one, and the hooks on its gradient.

    Hooks are shared: a handle from before takes a hook away from both.

    Args:
        made: Takes the place.
        before: Whose place it takes.
    """
    marks = marks_of(before)
    hooks = marks.pop("gradient_hooks", None) or gradient_hooks_of(before)
    made.__dict__.update(marks)
    if hooks:
        set_gradient_hooks(made, hooks)
    return made
