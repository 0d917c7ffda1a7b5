"""torch's own functions for clipping, made right for gradients that no rank has whole.

Modules clip by hand, in ``on_before_optimizer_step`` or between ``manual_backward`` and ``step``. torch's functions
see ``param.grad``, which is a part of the gradient or nothing at all where gradients are sharded, and would clip by the
wrong norm without a word.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from lightning_pardist.engines.api import DataEngine
from lightning_pardist.engines.gradient_norm import NormAxis, clip_grad_norm, clip_grad_value


class JobWideClipping:
    """While attached, ``clip_grad_norm_`` and ``clip_grad_value_`` of torch reach a module's gradients on all ranks.

    Both become collective for parameters of the module, as any clipping by a norm over several ranks has to be. Those
    of other modules are clipped as always.

    Args:
        module: Whose parameters are meant.
        engine: Of its data axis.
        axes: Tensor and pipeline axes, of those that there are.
    """

    def __init__(self, module: nn.Module, engine: DataEngine, axes: Iterable[NormAxis]) -> None:
        self.module = module
        self.engine = engine
        self.axes = list(axes)
        self._originals: list[tuple[types.CellType, Callable[..., Any]]] = []

    def attach(self) -> None:
        """Take torch's functions over. Not collective."""
        for function, replace in (
            (nn.utils.clip_grad_norm_, self._norm),
            (nn.utils.clip_grad_value_, self._value),
        ):
            cell = _cell_of(function)
            self._originals.append((cell, cell.cell_contents))
            cell.cell_contents = replace(cell.cell_contents)

    def detach(self) -> None:
        """Give torch its functions back. Not collective."""
        while self._originals:
            cell, original = self._originals.pop()
            cell.cell_contents = original

    def _norm(self, original: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def clip_grad_norm_(
            parameters: Tensor | Iterable[Tensor],
            max_norm: float,
            norm_type: float = 2.0,
            error_if_nonfinite: bool = False,
            foreach: bool | None = None,
        ) -> Tensor:
            ours, others = self._divide(parameters)
            if not ours:
                return original(others, max_norm, norm_type, error_if_nonfinite, foreach)
            return clip_grad_norm(
                self.engine,
                ours,
                float(max_norm),
                float(norm_type),
                axes=self.axes,
                error_if_nonfinite=error_if_nonfinite,
            )

        return clip_grad_norm_

    def _value(self, original: Callable[..., None]) -> Callable[..., None]:
        def clip_grad_value_(
            parameters: Tensor | Iterable[Tensor], clip_value: float, foreach: bool | None = None
        ) -> None:
            ours, others = self._divide(parameters)
            clip_grad_value(self.engine, ours, float(clip_value))
            if others:
                original(others, clip_value, foreach)

        return clip_grad_value_

    def _divide(self, parameters: Tensor | Iterable[Tensor]) -> tuple[list[nn.Parameter], list[Tensor]]:
        given = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        known = set(self.module.parameters())
        ours = [param for param in given if isinstance(param, nn.Parameter) and param in known]
        if not ours:
            return [], given
        others = [param for param in given if param not in known]
        if any(param.grad is not None for param in others):
            raise ValueError(
                f"Gradients of {type(self.module).__name__} and of tensors outside of it are clipped in one call."
                " Clip them in two: the module's are spread over ranks."
            )
        return ours, []


def _cell_of(function: Callable[..., Any]) -> types.CellType:
    """Where torch keeps the function behind its ``no_grad`` wrapper, whatever names the wrapper was imported by."""
    for cell in getattr(function, "__closure__", None) or ():
        if callable(cell.cell_contents):
            found: types.CellType = cell
            return found
    raise RuntimeError(f"torch {torch.__version__} has {function.__name__} in a form that is not known here.")
