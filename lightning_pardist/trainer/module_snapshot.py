"""Snapshot of a module's non-parameter state."""

from __future__ import annotations

import io
from collections import deque
from collections.abc import Sequence
from functools import partial
from types import CellType, FunctionType, MethodType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import Dataset

from lightning_pardist.compat.modules import own_parameters
from lightning_pardist.engines.common.containers import refill
from lightning_pardist.engines.common.own_generators import set_state, state_of
from lightning_pardist.engines.common.parameter_traits import HooksOnGradients
from lightning_pardist.trainer.resumable_loaders import rng_state, set_rng_state

#: Packages whose objects are not traversed: they lead to the Trainer, to file handles and to the interpreter itself.
_FOREIGN = ("torch.", "lightning.", "pytorch_lightning.", "lightning_pardist.", "builtins", "numpy.", "typing", "_io")
#: Types of class attributes that a step may modify.
_DATA = (bool, int, float, str, dict, list, set, deque, Tensor, np.ndarray, type(None))
#: The items of longer containers (a dataset, for example) are restored but not traversed.
_LONG = 10_000


class ModuleSnapshot:
    """Saves a module's non-parameter state and restores it after a trial run.

    The snapshot covers buffers, gradients and hooks on them, ``requires_grad`` and training flags, attributes of every
    submodule (lists that a step appends to, counters, states of metrics, caches) and of its class, objects reached
    through containers, through the user's own objects and through hooks, and the state of every random number
    generator. Parameter values are not covered: writes to them in a run without an optimizer step are handled by
    :class:`~lightning_pardist.engines.common.parameter_write_guard.ParameterWriteGuard`. Iterators cannot be restored.

    Args:
        module: The module; taking the snapshot does not change it.
        data: Objects that read data (datasets, collate functions): their attributes, generators and file positions are
            covered as well; tensors and arrays in them are not.
        parameters: Whether to cover which parameters are registered, their gradients, hooks and ``requires_grad``.
            False if shards and full parameters replace each other in turn, and no backward runs.
    """

    def __init__(self, module: nn.Module, data: Sequence[object] = (), *, parameters: bool = True) -> None:
        self._contents: list[tuple[Any, Any]] = []
        self._classes: list[tuple[type, dict[str, Any]]] = []
        self._tensors: list[tuple[Tensor, Tensor]] = []
        self._arrays: list[tuple[np.ndarray, np.ndarray]] = []
        self._generators: list[tuple[Any, Any]] = []
        self._files: list[tuple[Any, int]] = []
        self._seen: set[int] = set()
        self._in_data = False
        params = list(module.parameters()) if parameters else []
        self._params = [(p, p.requires_grad, p.grad) for p in params]
        self._grads = [(p.grad, p.grad.clone()) for p in params if p.grad is not None]
        self._hooks = HooksOnGradients(params)
        self._random = rng_state()
        for param in module.parameters():
            self._seen.add(id(param))
        if not parameters:
            self._seen.update(id(own_parameters(child)) for child in module.modules())
        for child in module.modules():
            self._look_into(child)
        self._in_data = True
        for each in data:
            self._look_into(getattr(each, "__self__", each))

    def restore(self) -> None:
        """Restore everything that the snapshot covers."""
        with torch.no_grad():
            for container, contents in self._contents:
                refill(container, contents)
            for owner, attributes in self._classes:
                _reset_class(owner, attributes)
            for tensor, values in (*self._tensors, *self._grads):
                # Overwritten values can be restored, resized or moved tensors cannot.
                if tensor.shape == values.shape:
                    write_back(tensor, values)
            for param, requires_grad, grad in self._params:
                param.requires_grad_(requires_grad)
                param.grad = grad
        self._hooks.restore()
        for array, numbers in self._arrays:
            array[...] = numbers
        for file, position in self._files:
            file.seek(position)
        for generator, state in self._generators:
            set_state(generator, state)
        set_rng_state(self._random)

    def _look_into(self, value: Any) -> None:
        if value is None or isinstance(value, (str, bytes, int, float, complex, type)) or id(value) in self._seen:
            return
        self._seen.add(id(value))
        if isinstance(value, Tensor):
            written = not (self._in_data or value.is_meta or value.is_inference())
            if written and value.is_leaf and not isinstance(value, nn.Parameter):
                self._tensors.append((value, value.detach().clone()))
        elif isinstance(value, np.ndarray):
            if value.dtype != object and not self._in_data:
                self._arrays.append((value, value.copy()))
        elif isinstance(value, (nn.Module, Optimizer, LRScheduler)):
            self._keep(value.__dict__)
            self._keep_classes(type(value))
        elif isinstance(value, (dict, list, set, deque)):
            self._keep(value)
        elif isinstance(value, tuple):
            for item in value[:_LONG]:
                self._look_into(item)
        elif isinstance(value, Dataset):
            # Datasets are large, and steps only read them.
            if self._in_data:
                self._keep(value.__dict__)
            else:
                self._seen.discard(id(value))
        elif (state := state_of(value)) is not None:
            self._generators.append((value, state))
        elif isinstance(value, io.IOBase):
            if self._in_data and not value.closed and value.seekable():
                self._files.append((value, value.tell()))
        elif isinstance(value, (MethodType, partial)):
            for item in (value.__self__,) if isinstance(value, MethodType) else (value.func, *value.args):
                self._look_into(item)
        elif isinstance(value, FunctionType):
            # For example a hook that appends to a list in its closure.
            if not f"{value.__module__}.".startswith(_FOREIGN):
                for cell in value.__closure__ or ():
                    self._look_into(_content(cell))
        elif hasattr(value, "__dict__") and not f"{type(value).__module__}.".startswith(_FOREIGN):
            self._keep(value.__dict__)

    def _keep_classes(self, of: type) -> None:
        """Record the data attributes of user-defined classes, such as counters and lists that instances share."""
        for owner in of.__mro__:
            if id(owner) not in self._seen and not f"{owner.__module__}.".startswith(_FOREIGN):
                self._seen.add(id(owner))
                values = _data_of(owner)
                self._classes.append((owner, values))
                for value in values.values():
                    self._look_into(value)

    def _keep(self, container: Any) -> None:
        contents = dict(container) if isinstance(container, dict) else list(container)
        self._contents.append((container, contents))
        if len(contents) <= _LONG:
            for item in contents.values() if isinstance(contents, dict) else contents:
                self._look_into(item)


def write_back(tensor: Tensor, values: Tensor) -> None:
    """Copy values of the same shape to a tensor, unless it holds them: it may be part of an autograd graph."""
    if not _holds(tensor, values):
        tensor.copy_(values)


def _holds(tensor: Tensor, values: Tensor) -> bool:
    plain = type(tensor) in (Tensor, nn.Parameter) and tensor.layout is torch.strided and not tensor.is_meta
    return plain and tensor.device == values.device and torch.equal(tensor, values)


def _data_of(owner: type) -> dict[str, Any]:
    """Return a class' data attributes: no methods, properties or dunder names."""
    return {
        name: value
        for name, value in vars(owner).items()
        if isinstance(value, _DATA) and not (name.startswith("__") and name.endswith("__"))
    }


#: Sentinel for an attribute that a class does not define.
_ABSENT = object()


def _reset_class(owner: type, values: dict[str, Any]) -> None:
    now = _data_of(owner)
    for name in now.keys() - values.keys():
        delattr(owner, name)
    for name, value in values.items():
        if vars(owner).get(name, _ABSENT) is not value:
            setattr(owner, name, value)


def _content(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        return None
