"""Tensors among an operator's arguments and results: single ones and lists of them, by the dispatcher's types."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor


def tensors_in(*values: Any) -> list[Tensor]:
    """All tensors, in order."""
    found: list[Tensor] = []
    for value in values:
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, (list, tuple)):
            found += tensors_in(*value)
        elif isinstance(value, dict):
            found += tensors_in(*value.values())
    return found


def map_leaves(function: Callable[[Any], Any], value: Any) -> Any:
    """The same with every leaf replaced."""
    if isinstance(value, (list, tuple)):
        return type(value)([map_leaves(function, each) for each in value])
    if isinstance(value, dict):
        return {name: map_leaves(function, each) for name, each in value.items()}
    return function(value)
