"""Search for tensors and process groups in an operator's arguments and results."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_pardist.compat.fake_group import group_by_name
from lightning_pardist.compat.fake_tensors import is_inplace_view, schema_of, unsafe_view

_views: dict[Any, bool] = {}


def tensors_in(*values: Any) -> list[Tensor]:
    """Return all tensors in nested values, in order."""
    found: list[Tensor] = []
    _collect(values, found)
    return found


def _collect(values: Any, found: list[Tensor]) -> None:
    # Hot path, called for each operator of a step: check the common types first.
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
    """Return a nested value with ``function`` applied to every leaf."""
    if isinstance(value, (list, tuple)):
        return type(value)([map_leaves(function, each) for each in value])
    if isinstance(value, dict):
        return {name: map_leaves(function, each) for name, each in value.items()}
    return function(value)


def is_view(func: Any) -> bool:
    """Return whether an operator returns a view and does not change its memory."""
    found = _views.get(func)
    if found is None:
        schema = schema_of(func)
        views = not schema.is_mutable and any(each.alias_info is not None for each in schema.returns)
        found = _views[func] = views or func is unsafe_view or is_inplace_view(func)
    return found


def group_in(args: Iterable[Any]) -> dist.ProcessGroup | None:
    """Return the process group among a collective's arguments, given as object or name; None if there is none."""
    return next((found for argument in args if (found := _group(argument)) is not None), None)


def _group(argument: Any) -> dist.ProcessGroup | None:
    if isinstance(argument, torch.ScriptObject):
        try:
            return dist.ProcessGroup.unbox(argument)
        except (RuntimeError, TypeError):
            return None
    if isinstance(argument, str):
        try:
            return group_by_name(argument)
        except (RuntimeError, ValueError, LookupError):
            return None
    return None


def written_by(func: Any, args: Any, kwargs: Any) -> list[Tensor]:
    """Return the arguments that an operator writes to."""
    found: list[Tensor] = []
    for index, argument in enumerate(schema_of(func).arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            found += tensors_in(args[index] if index < len(args) else kwargs.get(argument.name))
    return found


def received_by(func: Any, args: Any, kwargs: Any, result: Any) -> list[Tensor]:
    """Return the tensors that a collective writes to: its results, or its first argument if it returns none."""
    found = written_by(func, args, kwargs) or tensors_in(result)
    is_old = func.namespace == "c10d" and func.overloadpacket.__name__ != "send"
    return found or (tensors_in(args[0]) if is_old and args else [])
