"""Copies of nested checkpoint values with other tensors."""

from __future__ import annotations

import copy
import dataclasses
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor


def map_tensors(function: Callable[[Tensor], Tensor], value: Any) -> Any:
    """Return a nested value with ``function`` applied to its tensors.

    Dicts, lists and deques are copied, so that later changes of the original do not show in the result. Tuples and
    dataclasses, frozen ones too, are copied if something in them differs. Any other object is returned itself.
    """
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, dict | list | deque):
        # Not built by its class, whose constructor may take other arguments.
        copied: Any = copy.copy(value)
        items: Iterable[tuple[Any, Any]] = value.items() if isinstance(value, dict) else enumerate(value)
        for key, item in items:
            if (mapped := map_tensors(function, item)) is not item:
                copied[key] = mapped
        return copied
    if isinstance(value, tuple):
        found = [map_tensors(function, item) for item in value]
        if all(one is other for one, other in zip(found, value, strict=True)):
            return value
        return type(value)(*found) if hasattr(value, "_fields") else type(value)(found)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {field.name: getattr(value, field.name, None) for field in dataclasses.fields(value)}
        changed = {name: new for name, old in fields.items() if (new := map_tensors(function, old)) is not old}
        copied = copy.copy(value) if changed else value
        for name, new in changed.items():
            # As a dataclass' own __init__ does, if it is frozen.
            object.__setattr__(copied, name, new)
        return copied
    return value
