"""Detect and undo parameter writes outside of optimizer steps (EMA teachers, clamped weights)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from lightning_pardist.compat import pytree
from lightning_pardist.compat.tensors import storage_key


class ParameterWriteGuard(TorchFunctionMode):
    """Function mode that undoes the parameter writes of a trial run on exit.

    A parameter is copied right before the first function that writes into its memory, through any view, so a run
    without writes costs no copies. Writes that bypass ``__torch_function__`` (scripted functions) are not detected.

    Args:
        module: The module whose parameters are restored, except for those on ``meta``.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self._owners: dict[int, list[nn.Parameter]] = {}
        self._kept: dict[nn.Parameter, tuple[Tensor, Tensor]] = {}
        for parameter in module.parameters():
            if not parameter.is_meta:
                self._owners.setdefault(memory_of(parameter), []).append(parameter)

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if writes(func, kwargs):
            for tensor in pytree.tree_leaves(_written_to(args, kwargs)):
                if isinstance(tensor, Tensor) and not tensor.is_meta and type(tensor) in (Tensor, nn.Parameter):
                    self._keep(self._owners.get(memory_of(tensor), ()))
        return func(*args, **kwargs)

    @property
    def written(self) -> list[nn.Parameter]:
        """The parameters written to so far."""
        return list(self._kept)

    def _keep(self, parameters: Any) -> None:
        for parameter in parameters:
            if parameter not in self._kept:
                self._kept[parameter] = parameter.data, parameter.detach().clone()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        with torch.no_grad():
            for parameter, (data, values) in self._kept.items():
                parameter.data = data
                parameter.copy_(values)
        self._kept.clear()


#: Functions with in-place names that do not change values.
_NOT_VALUES = frozenset({"requires_grad_", "detach_", "share_memory_", "rename_"})


def memory_of(tensor: Tensor) -> int:
    """Return a key that is equal for tensors that share memory; 0 for tensors without memory."""
    try:
        address: int = storage_key(tensor)
    except (NotImplementedError, RuntimeError):
        # Sparse tensors, and those inside of transforms (vmap, jacrev), are no views of parameters.
        return 0
    return address


def _written_to(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return the arguments that a writing function may overwrite: the first one (``self``) and ``out``."""
    if not args:
        return kwargs
    return args[0], kwargs.get("out")


def writes(func: Callable[..., Any], kwargs: dict[str, Any]) -> bool:
    """Return whether a function may overwrite an argument, by torch's naming conventions."""
    name = getattr(func, "__name__", "")
    if name == "__set__":
        return getattr(getattr(func, "__self__", None), "__name__", "") == "data"
    if name.startswith("__i") or name == "__setitem__":
        return True
    if name in _NOT_VALUES:
        return False
    return (name.endswith("_") and not name.endswith("__")) or "out" in kwargs
