"""Callback that records a ledger of one step of a Trainer, for real and for fake tensors."""

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
    """Tracks memory from the start of a run, and records the events of one optimizer step.

    Args:
        ends: Whether the module is not used after the run.
        step: Number of the recorded step, from 1. Optimizer state exists from the second step on; one-time checks of
            strategies after the first step come before the third.
        away: Kinds that are kept on the host, where the optimizer steps; they do not count as device memory.

    Attributes:
        held: Bytes by kind at the peak of that step, available after it.
        held_away: Bytes of each kind on the host when the optimizer steps.
        peak_in: ``"forward"``, ``"backward"`` or ``"optimizer"``.
        events: Events of the step.
        before_optimizer: Number of events before the optimizer's step.
        microbatches: Number of forward and backward passes in the step.
        host_work: Work of the host for the strategy in the step, see :attr:`ParallelAxis.host_work`.
    """

    def __init__(self, *, ends: bool = False, step: int = 2, away: Sequence[str] = ()) -> None:
        self._ends, self._step, self._away = ends, step, away
        self.held: Held | None = None
        self.held_away: dict[str, int] = {}
        self.peak_in = ""
        self.events: list[Event] = []
        self.before_optimizer = 0
        self.microbatches = 1
        self.host_work = 0.0
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
        self._ledger.name_remaining("other")
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
        context = trainer.strategy.context  # type: ignore[attr-defined]
        self.microbatches, self.host_work = context.passes_per_step, context.host_work
        if self.peak_in != "optimizer" and self.microbatches > 1:
            self.peak_in = "forward and backward of micro-batches"

    @override
    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self._ends:
            # The module is not used after the run: skip restoring its full parameters.
            trainer.state.status = TrainerStatus.INTERRUPTED

    def _mark(self, name: str) -> None:
        if self._ledger is not None and self._ledger.recording:
            self._ledger.updates = name == "optimizer"
            self._marks.append((len(self._ledger.events), name))

    def _close(self) -> None:
        if self._ledger is not None:
            self._ledger.__exit__(None, None, None)
            self._ledger = None

    @torch.no_grad()
    def _name(self, trainer: pl.Trainer) -> None:
        """Set the kinds of current tensors."""
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
