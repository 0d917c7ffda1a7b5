"""Custom autograd functions that call several layers, which they call again in backward (reversible layers)."""

from __future__ import annotations

from collections.abc import Callable, Collection
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointFunction
from typing_extensions import Self

from lightning_pardist.compat.patches import custom_functions


class SpanningFunctions:
    """While entered, notes which modules are called by custom autograd functions. Not collective.

    Checkpointing is left out, which calls again what it was given, and that by its own means.

    Args:
        module: Whose submodules.
    """

    def __init__(self, module: nn.Module) -> None:
        self._names = {each: name for name, each in module.named_modules()}
        self._calls: list[tuple[str, list[str]]] = []
        self._inside: list[list[str]] = []
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
        self._inside.append([])
        try:
            return apply(*args, **kwargs)
        finally:
            self._calls.append((function.__name__, self._inside.pop()))

    def _note(self, module: nn.Module, args: Any) -> None:
        if self._inside:
            self._inside[-1].append(self._names[module])

    def over_several(self, units: Collection[str]) -> tuple[str, list[str]] | None:
        """A function that called several of these modules, and which; None if there is none."""
        for function, called in self._calls:
            found = [name for name in dict.fromkeys(called) if name in units]
            if len(found) > 1:
                return function, found
        return None
