"""Tensors among an operator's arguments and results: single ones and lists of them, by the dispatcher's types."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor


def tensors_in(*values: Any) -> list[Tensor]:
    """All tensors, in order."""
    found: list[Tensor] = []
    _collect(values, found)
    return found


def _collect(values: Any, found: list[Tensor]) -> None:
    # For each operator of a step: the common types first.
    for value in values:
        kind = type(value)
        if kind is int or kind is float or kind is bool or value is None:
            continue
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, (list, tuple)):
            _collect(value, found)
        elif isinstance(value, dict):
            _collect(value.values(), found)


def map_leaves(function: Callable[[Any], Any], value: Any) -> Any:
    """The same with every leaf replaced."""
    if isinstance(value, (list, tuple)):
        return type(value)([map_leaves(function, each) for each in value])
    if isinstance(value, dict):
        return {name: map_leaves(function, each) for name, each in value.items()}
    return function(value)
