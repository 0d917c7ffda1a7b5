"""What ranks that see different samples owe each other besides gradients."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import lightning.pytorch as pl
import torch.distributed as dist
from torch import Tensor

from lightning_pardist.collectives import all_gather, gather_among, reduce, reduce_among
from lightning_pardist.engines.data_parallel import BufferSync
from lightning_pardist.strategies.attachments import Attachments
from lightning_pardist.strategies.evaluation import ExactEvaluation
from lightning_pardist.strategies.results import EpochResults

if TYPE_CHECKING:
    from lightning_pardist.strategies.base import PardistStrategy


class DataAxis:
    """Equal buffers, evaluation that sees every sample once, epoch values of all samples, and Lightning's collectives.

    Args:
        strategy: Whose data axis.

    Attributes:
        evaluation: During a run with several data ranks.
    """

    def __init__(self, strategy: PardistStrategy) -> None:
        self.strategy = strategy
        self.evaluation: ExactEvaluation | None = None
        self._buffers: BufferSync | None = None
        self._attached = Attachments()

    def attach(self, trainer: pl.Trainer) -> None:
        """Serve a run, if there are several data ranks. Not collective.

        Args:
            trainer: Its loaders are not made yet.
        """
        strategy, module = self.strategy, self.strategy.lightning_module
        if strategy.dims.data_parallel == 1 or module is None:
            return
        group = strategy.data_group
        if strategy.broadcast_buffers:
            self._buffers = BufferSync(module, group=group)
        self.evaluation = ExactEvaluation(trainer, group=group, sit_out=self._sit_out)
        self._attached.attach(self.evaluation)
        if strategy.sync_metrics:
            self._attached.attach(EpochResults(trainer, group=group, before=strategy.before_collective))

    def detach(self) -> None:
        """The run is over. Not collective."""
        self._attached.detach()
        self.evaluation = self._buffers = None

    def _sit_out(self) -> None:
        """Take part in an evaluation without samples: other ranks may need what this one holds."""
        for part in self.strategy.parts:
            part.start_evaluation()
        for part in self.strategy.parts:
            part.end_evaluation()

    # --- buffers ------------------------------------------------------------------------------------------------

    @contextmanager
    def training_step(self) -> Generator[None, None, None]:
        """Around a training step, which may read and change buffers. Collective over the axis where any change."""
        if self._buffers is None:
            yield
            return
        self._buffers.before_training_step()
        yield
        self.strategy.before_collective()
        self._buffers.after_training_step()

    def synchronize_buffers(self) -> None:
        """Make all buffers the first rank's: before evaluation and before a checkpoint. Collective over the axis."""
        if self._buffers is not None:
            self._buffers.synchronize()

    # --- collectives --------------------------------------------------------------------------------------------

    def reduce(self, tensor: Tensor, group: Any | None, op: dist.ReduceOp | str | None) -> Tensor:
        """Combine a tensor over ``group``, the axis if None: in a step of evaluation over the ranks with a batch."""
        data_group = self.strategy.data_group
        if (present := self._present_in(group)) is not None:
            return reduce_among(tensor, group=data_group, ranks=present, op=op)
        return reduce(tensor, group=data_group if group is None else group, op=op)

    def all_gather(self, tensor: Tensor, group: Any | None, sync_grads: bool) -> Tensor:
        """Stack a tensor over ``group``, as :meth:`reduce`; the world is taken for the axis."""
        data_group = self.strategy.data_group
        if (present := self._present_in(group)) is not None:
            return gather_among(tensor, group=data_group, ranks=present)
        # LightningModule.all_gather names the world where it means the default.
        if group is None or group is dist.group.WORLD:
            group = data_group
        return all_gather(tensor, group=group, sync_grads=sync_grads)

    def _present_in(self, group: Any | None) -> list[int] | None:
        """In an evaluation step that not all ranks have a batch for: those that have. None anywhere else."""
        if self.evaluation is None or (group is not None and group is not dist.group.WORLD):
            return None
        return self.evaluation.present
