"""The autograd engine: id of the running backward, and callbacks at its end."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.utils.checkpoint
from torch.autograd import Variable

from lightning_pardist.compat.contract import Private

NAMES = (
    Private("torch._C._current_graph_task_id", "telling the step's backward from others inside and beside it",
            "require manual_backward and Trainer.fit, which announce it"),
    Private("torch.autograd.Variable._execution_engine", "reducing gradients after a backward that nobody announced",
            "require manual_backward, which announces it"),
    Private("torch.utils.checkpoint._NoopSaveInputs", "checkpointing that keeps a rank's part of its inputs",
            "leave it out", until="2.12"),
    Private("torch._disable_dynamo", "hooks that torch.compile leaves alone",
            "torch.compiler.disable, which takes seconds to import"),
)  # fmt: skip

_Function = TypeVar("_Function", bound=Callable[..., Any])


def current_backward() -> int | None:
    """Return the id of the backward that runs in this thread; None outside a backward."""
    task = torch._C._current_graph_task_id()
    return None if task == -1 else task


def only_keeps_inputs(function: type) -> bool:
    """Return whether a custom autograd function is the one by which checkpointing saves its inputs (torch 2.11)."""
    return function is getattr(torch.utils.checkpoint, "_NoopSaveInputs", None)


def after_backward(act: Callable[[], None]) -> None:
    """Call ``act`` at the end of the backward that is running."""
    Variable._execution_engine.queue_callback(act)


def not_compiled(function: _Function) -> _Function:
    """Decorate a function so that ``torch.compile`` calls it without tracing it."""
    wrapped: Any = torch._disable_dynamo(function)  # type: ignore[attr-defined]
    return wrapped  # type: ignore[no-any-return]
