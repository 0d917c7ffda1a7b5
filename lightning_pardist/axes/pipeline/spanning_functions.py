"""Detection of custom autograd functions that call several layers, and again in backward (reversible layers)."""

from __future__ import annotations

from collections.abc import Callable, Collection
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointFunction
from typing_extensions import Self

from lightning_pardist.compat.modules import TABLES
from lightning_pardist.compat.patches import custom_functions
from lightning_pardist.engines.pipeline import CannotPipelineError
from lightning_pardist.engines.pipeline.interception import HOOKS


class SpanningFunctions:
    """Context that records which modules custom autograd functions call. Not collective.

    ``CheckpointFunction`` is excluded: activation checkpointing recomputes the given function by its own means.

    Args:
        module: Root of the modules to record.
    """

    def __init__(self, module: nn.Module) -> None:
        self._modules = dict(module.named_modules())
        self._names = {each: name for name, each in self._modules.items()}
        self._calls: list[tuple[str, list[str]]] = []
        self._inside: list[dict[str, dict[str, Any]]] = []
        self._kept: list[tuple[str, str]] = []
        self._entered = ExitStack()

    def __enter__(self) -> Self:
        self._entered.enter_context(custom_functions(self._call))
        for each in self._names:
            if isinstance(each, torch.jit.ScriptModule):
                continue
            self._entered.callback(each.register_forward_pre_hook(self._note).remove)
        return self

    def __exit__(self, *error: Any) -> None:
        self._entered.close()

    def _call(self, function: type, apply: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        if function is CheckpointFunction:
            return apply(*args, **kwargs)
        self._inside.append({})
        try:
            return apply(*args, **kwargs)
        finally:
            called = self._inside.pop()
            self._calls.append((function.__name__, list(called)))
            for name, before in called.items():
                now = self._modules[name].__dict__
                changed = {key for key in now if key not in before or now[key] is not before[key]}
                self._kept += [(function.__name__, f"{name}.{key}") for key in changed - _REGISTRIES]

    def _note(self, module: nn.Module, args: Any) -> None:
        if self._inside:
            self._inside[-1].setdefault(self._names[module], dict(module.__dict__))

    @property
    def kept(self) -> tuple[str, str] | None:
        """A function, and an attribute set by a layer that it called, possibly for its backward; None if none was."""
        return next(iter(self._kept), None)

    def refuse(self, units: Collection[str]) -> None:
        """Refuse functions that called several of these modules.

        Raises:
            CannotPipelineError: If there is one; names it and the modules.
        """
        for function, called in self._calls:
            found = [name for name in called if name in units]
            if len(found) > 1:
                raise CannotPipelineError(
                    f"{function}, a custom autograd function, calls {len(found)} layers ({', '.join(found[:3])},"
                    " ...), and calls them again in its backward. A rank that holds only some of them cannot do"
                    " that.",
                )


_REGISTRIES = TABLES | HOOKS
