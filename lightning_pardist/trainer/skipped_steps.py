"""Lets ``training_step`` return None on some or all ranks.

Lightning allows this on one process and raises on several, because torch DDP would wait for a backward that never
comes. The engines of this package complete a step without a backward, so the check is disabled.
"""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.loops.optimization.automatic import ClosureResult
from typing_extensions import override

#: Sentinel that replaces None in Lightning's check.
_SKIPPED = object()


class SkippableResult(ClosureResult):
    """Closure result that may come from a skipped step."""

    @classmethod
    @override
    def from_training_step_output(cls, training_step_output: Any, normalize: int = 1) -> ClosureResult:
        output = None if training_step_output is _SKIPPED else training_step_output
        return super().from_training_step_output(output, normalize)


def skipped_if_none(output: Any, module: pl.LightningModule | None) -> Any:
    """Replace a ``training_step`` output of None by a sentinel, after :func:`allow_skipped_steps` was called."""
    if output is None and module is not None and module.automatic_optimization:
        return _SKIPPED
    return output


def allow_skipped_steps(trainer: pl.Trainer) -> None:
    """Make this Trainer accept steps without a loss on any number of ranks. Other results are not affected."""
    loop: Any = trainer.fit_loop.epoch_loop.automatic_optimization
    loop.output_result_cls = SkippableResult
