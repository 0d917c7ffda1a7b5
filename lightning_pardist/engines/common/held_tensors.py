"""Mark tensors that a module holds independently of the batch: penalty matrices, grids, fixed points.

An autograd graph shows that an operand has no gradient, but not whether it is data of the batch. Tensors held by the
module at setup are therefore marked on their storage, which is shared by views and by tensors saved for backward. A
tensor that a step creates, or assigns in place of a held one, is not marked.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from lightning_pardist.compat.tensors import in_transform

_MARK = "_pardist_held"
_PLAIN = (Tensor, nn.Parameter, nn.Buffer)


def mark_held(module: nn.Module) -> None:
    """Mark buffers, frozen parameters and tensor attributes of modules, if they need no gradient. Not collective."""
    attributes = (each for part in module.modules() for each in vars(part).values())
    for each in (*attributes, *module.buffers(), *module.parameters()):
        if isinstance(each, Tensor) and not each.requires_grad and (storage := _storage(each)) is not None:
            setattr(storage, _MARK, True)


def mark_computed(tensor: Tensor) -> None:
    """Mark a tensor that another pipeline stage computed without any sample of the batch. Not collective."""
    setattr(tensor, _MARK, True)
    if (storage := _storage(tensor)) is not None:
        setattr(storage, _MARK, True)


def is_held(value: Any) -> bool:
    """Return whether a tensor is marked, or covers all of a marked storage.

    A view of a part of the storage, such as a row of a table, may have been selected for a sample.
    """
    if getattr(value, _MARK, False):
        return True
    storage = _storage(value) if isinstance(value, Tensor) else None
    if storage is None or not getattr(storage, _MARK, False):
        return False
    return bool(storage.nbytes() == value.numel() * value.element_size())


def _storage(tensor: Tensor) -> torch.UntypedStorage | None:
    """Return the storage of a plain tensor; None for sparse, meta and subclassed tensors, and inside transforms."""
    if in_transform() or type(tensor) not in _PLAIN:
        return None
    if tensor.layout is not torch.strided or tensor.device.type == "meta":
        return None
    return tensor.untyped_storage()
