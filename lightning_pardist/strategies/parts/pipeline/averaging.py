"""Lightning's averaging callbacks in a pipeline: each rank averages what it holds."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch.distributed as dist
from lightning.pytorch.callbacks import WeightAveraging
from torch import nn

from lightning_pardist.engines.pipeline import PipelinePlan
from lightning_pardist.engines.pipeline.placement import Placement

_PREFIX = "module."


class StageAverages:
    """The averages of ``WeightAveraging`` and its kind, which the callback has copied from the whole module.

    Args:
        trainer: Whose callbacks.
        plan: Of the module, of which an average is a copy.
        stage_ranks: Rank of each stage.
        group: The pipeline's ranks.
    """

    def __init__(
        self, trainer: pl.Trainer, plan: PipelinePlan, stage_ranks: tuple[int, ...], group: dist.ProcessGroup
    ) -> None:
        self._averaged: list[tuple[Any, Placement]] = []
        for callback in trainer.callbacks:  # type: ignore[attr-defined]
            average = callback._average_model if isinstance(callback, WeightAveraging) else None
            if average is not None:
                placement = Placement(average.module, plan, stage_ranks, group.rank(), group)
                self._averaged.append((average, placement))

    def split(self) -> None:
        """Free what other ranks average, and let the callback find the whole when it saves. Not collective."""
        for average, placement in self._averaged:
            placement.free()
            # On the instance, past nn.Module.__setattr__: AveragedModel stays what it is.
            average.__dict__["state_dict"] = _WholeState(average, placement)

    def restore(self) -> None:
        """Make every average whole again on every rank. Collective over the pipeline."""
        for _, placement in self._averaged:
            placement.restore()

    def release(self) -> None:
        """Leave the callback as it was made. Not collective."""
        for average, _ in self._averaged:
            average.__dict__.pop("state_dict", None)


class _WholeState:
    """In place of an average's ``state_dict``: whole on the pipeline's first rank. Collective over the pipeline."""

    def __init__(self, average: nn.Module, placement: Placement) -> None:
        self._average = average
        self._placement = placement

    def __call__(self) -> dict[str, Any]:
        state = type(self._average).state_dict(self._average)
        own = {name.removeprefix(_PREFIX): value for name, value in state.items() if name.startswith(_PREFIX)}
        state.update((_PREFIX + name, value) for name, value in self._placement.gather(state=own))
        return state
