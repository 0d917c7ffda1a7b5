"""A callback that keeps a ledger of one of a Trainer's steps, whether its tensors have values or not."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.trainer.states import TrainerStatus
from torch import Tensor
from torch.distributed.tensor import DTensor
from typing_extensions import override

from lightning_pardist.compat.dtensor import local_tensor_of
from lightning_pardist.compat.pytree import tree_leaves
from lightning_pardist.planner.ledger import Event, Held, Ledger


class StepLedger(pl.Callback):
    """Counts from the start of a run, and keeps what happens in one step of an optimizer.

    Args:
        ends: Whether the module is not used after the run.
        step: Which step, from 1. In the second optimizer state exists; what strategies look at once, when the first
            is over, comes before the third.
        away: Kinds that rest on the host, where the optimizer steps on them: memory is the device's without them.

    Attributes:
        held: Bytes by kind when they were most in that step, once it is over.
        held_away: Bytes of each kind on the host when the optimizer steps.
        peak_in: ``"forward"``, ``"backward"`` or ``"optimizer"``.
        events: What happened in the step.
        before_optimizer: How much of that before the optimizer's step.
        microbatches: How often the step ran forward and backward.
    """

    def __init__(self, *, ends: bool = False, step: int = 2, away: Sequence[str] = ()) -> None:
        self._ends, self._step, self._away = ends, step, away
        self.held: Held | None = None
        self.held_away: dict[str, int] = {}
        self.peak_in = ""
        self.events: list[Event] = []
        self.before_optimizer = 0
        self.microbatches = 1
        self._ledger: Ledger | None = None
        self._batches = 0
        self._marks: list[tuple[int, str]] = []

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        self._ledger = Ledger().__enter__()
        self._ledger.note([*pl_module.parameters(), *pl_module.buffers()])

    @override
    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        self._close()

    @override
    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        self._close()

    @override
    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        self._batches += 1
        if self._ledger is None or self._batches != (self._step - 1) * trainer.accumulate_grad_batches + 1:
            return
        self._name(trainer)
        self._ledger.rest_is("other")
        self._ledger.note(leaf for leaf in tree_leaves(batch) if isinstance(leaf, Tensor))
        self._ledger.start()
        self._mark("forward")

    @override
    def on_before_backward(self, trainer: pl.Trainer, pl_module: pl.LightningModule, loss: Tensor) -> None:
        self._mark("backward")

    @override
    def on_before_optimizer_step(self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Any) -> None:
        self._mark("optimizer")
        if self._ledger is not None and self._ledger.recording:
            self._name(trainer)

    @override
    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self._ledger is None or self._batches != self._step * trainer.accumulate_grad_batches:
            return
        self._ledger.stop()
        self._name(trainer)
        self.events = self._ledger.events
        ends = (at for at, name in self._marks if name == "optimizer")
        self.before_optimizer = next(ends, len(self.events))
        self.held, where = self._ledger.at_peak(self._away, self.before_optimizer if self._away else None)
        self.held_away = self._ledger.held_before(self._away, self.before_optimizer)
        self.peak_in = next((name for at, name in reversed(self._marks) if at <= where), "forward")
        self.microbatches = trainer.strategy.context.runs_a_step  # type: ignore[attr-defined]
        if self.peak_in != "optimizer" and self.microbatches > 1:
            self.peak_in = "forward and backward of micro-batches"

    @override
    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self._ends:
            # Nobody needs the module whole again.
            trainer.state.status = TrainerStatus.INTERRUPTED

    def _mark(self, name: str) -> None:
        if self._ledger is not None and self._ledger.recording:
            self._marks.append((len(self._ledger.events), name))

    def _close(self) -> None:
        if self._ledger is not None:
            self._ledger.__exit__(None, None, None)
            self._ledger = None

    @torch.no_grad()
    def _name(self, trainer: pl.Trainer) -> None:
        """Say of what is there what it is."""
        if self._ledger is None:
            return
        params = list(trainer.lightning_module.parameters())
        for optimizer in trainer.optimizers:
            params += [param for group in optimizer.param_groups for param in group["params"]]
        engine = getattr(trainer.strategy, "data_engine", None)
        grads = [param.grad for param in params] if engine is None else engine.local_grads(params)
        state = [
            value
            for optimizer in trainer.optimizers
            for values in optimizer.state.values()
            for value in (values.values() if isinstance(values, dict) else ())
            if isinstance(value, Tensor)
        ]
        for kind, tensors in (("parameters", params), ("gradients", grads), ("optimizer", state)):
            self._ledger.name([_local(tensor) for tensor in tensors if tensor is not None], kind)


def _local(tensor: Tensor) -> Tensor:
    return local_tensor_of(tensor) if isinstance(tensor, DTensor) else tensor.detach()
