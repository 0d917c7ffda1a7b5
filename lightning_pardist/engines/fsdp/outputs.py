"""Inspection of module outputs: where backward enters, and whether parameters escape."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import torch

from lightning_pardist.compat.tensors import base_of

_LEAVES = (str, bytes, int, float, bool, complex, torch.dtype, torch.device, torch.nn.Module)


def tensors_in(value: Any, seen: set[int] | None = None) -> Iterator[torch.Tensor]:
    """Yield all tensors in an output: in containers, dataclasses, and attributes of any other object.

    Args:
        value: What a module's ``forward`` returned.
        seen: ``id`` of objects already visited, for outputs that refer to themselves.
    """
    if isinstance(value, torch.Tensor):
        yield value
        return
    if value is None or isinstance(value, (*_LEAVES, type)) or callable(value):
        return
    seen = set() if seen is None else seen
    if id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, dict):
        items = list(value.values())
    elif isinstance(value, (list, tuple, set, frozenset)):
        items = list(value)
    elif dataclasses.is_dataclass(value):
        items = [getattr(value, field.name) for field in dataclasses.fields(value)]
    else:
        slots = [name for cls in type(value).__mro__ for name in getattr(cls, "__slots__", ())]
        items = [*getattr(value, "__dict__", {}).values(), *(getattr(value, name, None) for name in slots)]
    for item in items:
        yield from tensors_in(item, seen)


def before_backward(output: Any, act: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Call ``act`` when backward reaches any tensor of an output, before it propagates further.

    The hook of a view is lost if the view is changed in place (``h += residual`` after a linear layer, whose output is
    a view), so the view's base gets a hook as well.

    Args:
        output: What a module's ``forward`` returned.
        act: Receives a gradient and returns it; called once or more.
    """
    for tensor in tensors_in(output):
        if not tensor.requires_grad:
            continue
        tensor.register_hook(act)
        base = base_of(tensor)
        if base is not None and base.grad_fn is not None:
            base.grad_fn.register_prehook(_first(act))


def shares_memory(output: Any, storages: set[int]) -> bool:
    """Return whether an output is, or is a view of, one of the storages.

    Args:
        output: What a module's ``forward`` returned.
        storages: Addresses of storages.
    """
    return any(
        tensor.layout == torch.strided and tensor.untyped_storage().data_ptr() in storages
        for tensor in tensors_in(output)
        if not tensor.is_meta
    )


def _first(act: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[tuple[torch.Tensor, ...]], None]:
    def prehook(gradients: tuple[torch.Tensor, ...]) -> None:
        act(gradients[0])

    return prehook
