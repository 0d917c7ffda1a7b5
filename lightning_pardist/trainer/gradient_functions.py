"""Replaces torch's and Lightning's gradient clipping and norm functions for sharded gradients.

User code clips gradients itself, in ``on_before_optimizer_step`` or between ``manual_backward`` and ``step``, and logs
the result of :func:`lightning.pytorch.utilities.grad_norm`. These functions read ``param.grad``. If gradients are
sharded, it is a shard, so that results would be silently wrong, or a stand-in for slices, which would be gathered.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any

import torch
from lightning.pytorch.utilities import grads as lightning_grads
from torch import Tensor, nn

from lightning_pardist.collectives import world_group
from lightning_pardist.compat.lightning_patches import replace_grad_norm
from lightning_pardist.compat.patches import cell_of
from lightning_pardist.engines.common.gradient_norm import (
    NormAxis,
    clip_grad_norm,
    clip_grad_value,
    grad_norms,
    total_norm,
)
from lightning_pardist.engines.data_engine import DataEngine


class JobWideGradients:
    """Makes torch's ``clip_grad_norm_``, ``clip_grad_value_`` and Lightning's ``grad_norm`` cover all ranks' gradients.

    The same holds for ``get_total_norm`` if ranks hold pipeline stages. While attached, all of them are collective for
    parameters of the module, as a norm over several ranks requires. Parameters of other modules are treated as usual.

    Args:
        module: Module whose parameters are covered.
        engine: Engine of its data axis.
        axes: Tensor and pipeline axes of the run, if any.
        stages: Whether other ranks hold other parameters, whose ``grad`` is None here.
    """

    def __init__(
        self, module: nn.Module, engine: DataEngine, axes: Iterable[NormAxis], *, stages: bool = False
    ) -> None:
        self.module = module
        self.engine = engine
        self.axes = list(axes)
        self.stages = stages
        #: Whether torch's own clipping runs for other modules' parameters, which calls ``get_total_norm``.
        self._of_others = False
        self._originals: list[tuple[types.CellType, Callable[..., Any]]] = []

    def attach(self) -> None:
        """Replace the functions. Not collective."""
        replaced: list[tuple[Callable[..., Any], Callable[..., Any]]] = [
            (nn.utils.clip_grad_norm_, self._norm),
            (nn.utils.clip_grad_value_, self._value),
        ]
        if self.stages:
            # Without stages each rank has all gradients, or shards of all that torch's function handles as such.
            replaced.append((nn.utils.get_total_norm, self._total))
        for function, replace in replaced:
            cell = cell_of(function)
            self._originals.append((cell, cell.cell_contents))
            cell.cell_contents = replace(cell.cell_contents)
        _attached.append(self)
        replace_grad_norm(_redirected.__code__)

    def detach(self) -> None:
        """Restore the functions. Not collective."""
        while self._originals:
            cell, original = self._originals.pop()
            cell.cell_contents = original
        if self in _attached:
            _attached.remove(self)
        if not _attached:
            replace_grad_norm(_lightning_grad_norm.__code__)

    def grad_norm(self, module: nn.Module, norm_type: float, separator: str) -> dict[str, Tensor] | None:
        """Return the result of Lightning's ``grad_norm``; None for a module with other or no parameters. Collective."""
        named = dict(module.named_parameters())
        if not named or not set(named.values()) <= set(self.module.parameters()):
            return None
        norms = grad_norms(
            self.engine,
            list(named.values()),
            norm_type,
            axes=self.axes,
            world=world_group(),
        )
        found = {
            f"grad_{norm_type}_norm{separator}{name}": norm
            for name, norm in zip(named, norms, strict=True)
            if norm is not None
        }
        if found:
            found[f"grad_{norm_type}_norm_total"] = torch.stack(list(found.values())).norm(norm_type)
        return found

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
                self._of_others = True
                try:
                    return original(others, max_norm, norm_type, error_if_nonfinite, foreach)
                finally:
                    self._of_others = False
            return clip_grad_norm(
                self.engine,
                ours,
                float(max_norm),
                float(norm_type),
                axes=self.axes,
                error_if_nonfinite=error_if_nonfinite,
            )

        return clip_grad_norm_

    def _total(self, original: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def get_total_norm(
            tensors: Tensor | Iterable[Tensor | None],
            norm_type: float = 2.0,
            error_if_nonfinite: bool = False,
            foreach: bool | None = None,
        ) -> Tensor:
            given = [tensors] if isinstance(tensors, Tensor) else list(tensors)
            ours = None if isinstance(tensors, Tensor) or self._of_others else self._parameters_of(given)
            if ours is None:
                return original(given, norm_type, error_if_nonfinite, foreach)
            return total_norm(
                self.engine,
                ours,
                float(norm_type),
                axes=self.axes,
                among=self.module.parameters(),
                error_if_nonfinite=error_if_nonfinite,
            )

        return get_total_norm

    def _parameters_of(self, given: Sequence[Tensor | None]) -> list[nn.Parameter] | None:
        """Return the module's parameters with these gradients; None if other ranks have no gradients to add to them.

        [Note: gradients of some stages]
        A list of all gradients holds those of this rank's stage, with or without None for those of other stages, and
        is empty on a rank without any. A gradient that was selected by name comes as a list of one: it is treated as
        the gradients of a whole stage only if the stage has no other.
        """
        known: dict[Hashable, nn.Parameter] = {}
        for param in self.module.parameters():
            if param.grad is not None:
                known |= dict.fromkeys(_keys(param.grad), param)
        own = [each for each in given if each is not None]
        found = [known.get(next((key for key in _keys(each) if key in known), None)) for each in own]
        ours = list(dict.fromkeys(param for param in found if param is not None))
        if len(own) == len(given) == 1 and len(set(known.values())) > 1:
            return None
        return ours if ours or not own else None

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
                f"Gradients of {type(self.module).__name__} and of tensors outside of it are clipped in one call. The"
                " module's gradients are distributed over ranks, the others are not. Clip them in two calls."
            )
        return ours, []


def _keys(grad: Tensor) -> list[Hashable]:
    """Return keys that identify a gradient, including its detached aliases."""
    plain = type(grad) is Tensor and grad.layout is torch.strided and grad.numel() > 0
    return [id(grad), *([(grad.data_ptr(), grad.shape)] if plain else [])]


#: Instances that are attached, latest last.
_attached: list[JobWideGradients] = []
_lightning_grad_norm = types.FunctionType(
    lightning_grads.grad_norm.__code__,
    lightning_grads.grad_norm.__globals__,
    argdefs=lightning_grads.grad_norm.__defaults__,
)


def grad_norm(module: nn.Module, norm_type: float | str, group_separator: str) -> dict[str, Any]:
    """Compute Lightning's ``grad_norm`` over all ranks for a module of an attached instance, locally for others."""
    if float(norm_type) > 0:
        for attached in reversed(_attached):
            norms = attached.grad_norm(module, float(norm_type), group_separator)
            if norms is not None:
                return norms
    found: dict[str, Any] = _lightning_grad_norm(module, norm_type, group_separator)
    return found


def _redirected(module: nn.Module, norm_type: float | str, group_separator: str = "/") -> dict[str, Any]:
    # Runs as the code of Lightning's function, with the globals of Lightning's module, so that it takes effect under
    # whatever name the function was imported.
    from lightning_pardist.trainer.gradient_functions import grad_norm

    return grad_norm(module, norm_type, group_separator)
