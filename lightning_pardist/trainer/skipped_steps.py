"""Lets ``training_step`` return None on some or all ranks.

Lightning allows that on one process and refuses it on several, because torch DDP would wait for a backward that never
comes. Our engines complete a step without one, so the refusal is taken away.
"""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.loops.optimization.automatic import ClosureResult
from typing_extensions import override

#: Stands for None on its way through Lightning's check.
_SKIPPED = object()


class SkippableResult(ClosureResult):
    """A closure's result that may be a skipped step's."""

    @classmethod
    @override
    def from_training_step_output(cls, training_step_output: Any, normalize: int = 1) -> ClosureResult:
        output = None if training_step_output is _SKIPPED else training_step_output
        return super().from_training_step_output(output, normalize)


def skipped_if_none(output: Any, module: pl.LightningModule | None) -> Any:
    """What the strategy returns for ``training_step``'s output, once :func:`allow_skipped_steps` was called."""
    if output is None and module is not None and module.automatic_optimization:
        return _SKIPPED
    return output


def allow_skipped_steps(trainer: pl.Trainer) -> None:
    """Let this Trainer take a step without a loss on any number of ranks. One process' results stay as they are."""
    loop: Any = trainer.fit_loop.epoch_loop.automatic_optimization
    loop.output_result_cls = SkippableResult
