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
from lightning_pardist.engines.common.own_generators import set_state, state_of
from lightning_pardist.trainer.resumable_loaders import rng_state, set_rng_state

#: Attributes of these packages' objects lead to the Trainer, to file handles and to the interpreter itself.
_FOREIGN = ("torch.", "lightning.", "pytorch_lightning.", "lightning_pardist.", "builtins", "numpy.", "typing", "_io")
#: What of a class' attributes a step may count in, add to or write.
_DATA = (bool, int, float, str, dict, list, set, deque, Tensor, np.ndarray, type(None))
#: Items of longer containers are put back, and not looked into: a data set, say.
_LONG = 10_000


class ModuleSnapshot:
    """Saves a module's non-parameter state and restores it after a trial run.

    Kept are buffers, gradients, ``requires_grad`` and training flags, attributes of every submodule (lists that a
    step appends to, counters, states of metrics, caches) and of its class, what attributes in containers and in the
    user's own objects refer to, what hooks refer to, and the state of every random number generator. Parameters are
    not: what a run without an optimizer step writes into them is for
    :class:`~lightning_pardist.engines.common.parameter_write_guard.ParameterWriteGuard`. Iterators cannot be restored.

    Args:
        module: Not changed.
        data: Objects that read data (data sets, collate functions): their attributes and generators are kept as well,
            and where their files are read; tensors and arrays in them are not.
        parameters: Whether it is kept which parameters there are, their gradients and which require some. Not where
            their places are taken by shards in turns, and no backward runs.
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
        """Bring everything back to what it was."""
        with torch.no_grad():
            for container, contents in self._contents:
                _refill(container, contents)
            for owner, attributes in self._classes:
                _reset_class(owner, attributes)
            for tensor, values in (*self._tensors, *self._grads):
                # What user code resized or moved is gone for good; what it overwrote is not. What it left alone may be
                # part of a graph, which a write would break.
                if tensor.shape == values.shape and not _holds(tensor, values):
                    tensor.copy_(values)
            for param, requires_grad, grad in self._params:
                param.requires_grad_(requires_grad)
                param.grad = grad
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
            # Read by steps, not written, and large.
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
            # A hook that appends to a list of a function around it.
            if not f"{value.__module__}.".startswith(_FOREIGN):
                for cell in value.__closure__ or ():
                    self._look_into(_content(cell))
        elif hasattr(value, "__dict__") and not f"{type(value).__module__}.".startswith(_FOREIGN):
            self._keep(value.__dict__)

    def _keep_classes(self, of: type) -> None:
        """What instances share: counters and lists that a class of the user's own has."""
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


def _holds(tensor: Tensor, values: Tensor) -> bool:
    plain = type(tensor) in (Tensor, nn.Parameter) and tensor.layout is torch.strided and not tensor.is_meta
    return plain and tensor.device == values.device and torch.equal(tensor, values)


def _refill(container: Any, contents: Any) -> None:
    if isinstance(container, dict):
        if len(container) != len(contents) or any(container.get(key) is not contents[key] for key in contents):
            container.clear()
            container.update(contents)
    elif isinstance(container, set):
        container.clear()
        container.update(contents)
    elif len(container) != len(contents) or any(a is not b for a, b in zip(container, contents, strict=True)):
        container.clear()
        container.extend(contents)


def _data_of(owner: type) -> dict[str, Any]:
    """A class' attributes that are no methods, properties or names of the language's own."""
    return {
        name: value
        for name, value in vars(owner).items()
        if isinstance(value, _DATA) and not (name.startswith("__") and name.endswith("__"))
    }


#: What a class has of its own that no attribute is.
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
