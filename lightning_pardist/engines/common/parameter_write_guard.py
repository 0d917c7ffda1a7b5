"""Detects and undoes parameter writes outside of optimizer steps (EMA teachers, clamped weights)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from lightning_pardist.compat import pytree
from lightning_pardist.compat.tensors import storage_key


class ParameterWriteGuard(TorchFunctionMode):
    """Undoes what a trial run writes into parameters.

    A parameter is copied right before the first function that writes into its memory, by whatever view, so that a run
    which writes into none costs nothing. Code that torch functions do not see (a scripted function) is not noticed.

    Args:
        module: Whose parameters are kept; tensors on ``meta`` are not.
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
        """Those that were written to so far."""
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


#: Functions that by their name write, and leave values as they are.
_NOT_VALUES = frozenset({"requires_grad_", "detach_", "share_memory_", "rename_"})


def memory_of(tensor: Tensor) -> int:
    """The same for tensors that share memory; 0 for those without."""
    try:
        address: int = storage_key(tensor)
    except (NotImplementedError, RuntimeError):
        # Sparse tensors, and those inside of transforms (vmap, jacrev), are no views of parameters.
        return 0
    return address


def _written_to(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Arguments that such a function may overwrite: the first one, which it is a method of, and ``out``."""
    if not args:
        return kwargs
    return args[0], kwargs.get("out")


def writes(func: Callable[..., Any], kwargs: dict[str, Any]) -> bool:
    """Whether a function may overwrite an argument, by torch's naming."""
    name = getattr(func, "__name__", "")
    if name == "__set__":
        return getattr(getattr(func, "__self__", None), "__name__", "") == "data"
    if name.startswith("__i") or name == "__setitem__":
        return True
    if name in _NOT_VALUES:
        return False
    return (name.endswith("_") and not name.endswith("__")) or "out" in kwargs
