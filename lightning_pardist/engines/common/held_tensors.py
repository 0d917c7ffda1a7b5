"""Tensors that a module holds whatever the batch is: matrices of penalties, grids, points that never change.

A graph shows of an operand without a gradient that it has none, and not whether it is data of the batch. So what a
module holds when it is set up is marked, on its storage: views of it, and what a graph has saved, show the mark too. A
tensor that a step makes or puts in the place of one has none.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from lightning_pardist.compat.tensors import in_transform

_MARK = "_pardist_held"
_PLAIN = (Tensor, nn.Parameter, nn.Buffer)


def mark_held(module: nn.Module) -> None:
    """Mark buffers, parameters that are not trained, and tensors among the attributes of modules. Not collective."""
    attributes = (each for part in module.modules() for each in vars(part).values())
    for each in (*attributes, *module.buffers(), *module.parameters()):
        if isinstance(each, Tensor) and not each.requires_grad and (storage := _storage(each)) is not None:
            setattr(storage, _MARK, True)


def mark_computed(tensor: Tensor) -> None:
    """Mark a tensor that was computed elsewhere from what the module holds, and from no sample. Not collective."""
    setattr(tensor, _MARK, True)
    if (storage := _storage(tensor)) is not None:
        setattr(storage, _MARK, True)


def is_held(value: Any) -> bool:
    """Whether a tensor was marked, or what it shows all of: a row of a table may be there for a sample."""
    if getattr(value, _MARK, False):
        return True
    storage = _storage(value) if isinstance(value, Tensor) else None
    if storage is None or not getattr(storage, _MARK, False):
        return False
    return bool(storage.nbytes() == value.numel() * value.element_size())


def _storage(tensor: Tensor) -> torch.UntypedStorage | None:
    """Of a plain tensor; None of sparse ones, those without values, classes of their own, and inside of transforms."""
    if in_transform() or type(tensor) not in _PLAIN:
        return None
    if tensor.layout is not torch.strided or tensor.device.type == "meta":
        return None
    return tensor.untyped_storage()
