"""Contexts around the user's hooks outside of steps, which may compute with parameters of which ranks hold parts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import wraps
from typing import Any

import lightning.pytorch as pl

from lightning_pardist.axes.base import ParallelAxis
from lightning_pardist.engines.common.whole_arrays import WholeArrays
from lightning_pardist.trainer.patch_stack import Patch, PatchStack

_STAGES = ("sanity_check", "train", "validation", "test", "predict")
_HOOKS = (
    *("on_fit_start", "on_fit_end"),
    *(f"on_{stage}_{moment}" for stage in _STAGES for moment in ("start", "end")),
    *(f"on_{stage}_{part}_{moment}" for stage in _STAGES for part in ("epoch", "batch") for moment in ("start", "end")),
)
#: Hooks between backward and the update.
_GRADIENT_HOOKS = ("on_after_backward", "on_before_optimizer_step", "on_before_zero_grad")
_OF_LIBRARIES = ("lightning.", "lightning_pardist.")


class HookCalls:
    """Runs hooks of the module and of the user's callbacks in the contexts of the axes.

    Not among them are hooks on batches, and the one between forward and backward.

    Args:
        trainer: Trainer of the run.
        axes: Axes with a context.
    """

    def __init__(self, trainer: pl.Trainer, axes: list[ParallelAxis]) -> None:
        self._trainer = trainer
        self._axes = axes
        self._attached = PatchStack()

    def attach(self) -> None:
        """Patch the hooks that are overridden. Not collective."""
        for owner, base in self._owners():
            for name in (*_HOOKS, *_GRADIENT_HOOKS):
                hook = getattr(owner, name, None)
                if callable(hook) and getattr(hook, "__func__", hook) is not getattr(base, name, None):
                    self._attached.attach(Patch(owner, name, self._wrapped(hook, name in _GRADIENT_HOOKS)))

    def detach(self) -> None:
        """Restore the hooks. Not collective."""
        self._attached.detach()

    def _owners(self) -> Iterator[tuple[Any, type]]:
        yield self._trainer.lightning_module, pl.LightningModule
        callbacks: list[pl.Callback] = self._trainer.callbacks  # type: ignore[attr-defined]
        for callback in callbacks:
            if not type(callback).__module__.startswith(_OF_LIBRARIES):
                yield callback, pl.Callback

    def _wrapped(self, hook: Callable[..., Any], sees_gradients: bool) -> Callable[..., Any]:
        # Not a bound method: deep copies of the module (weight averaging) would copy the Trainer with it.
        @wraps(hook)
        def in_contexts(*args: Any, **kwargs: Any) -> Any:
            with ExitStack() as stack, WholeArrays():
                for axis in self._axes:
                    stack.enter_context(axis.around_gradient_hook() if sees_gradients else axis.around_hook())
                return hook(*args, **kwargs)

        return in_contexts
