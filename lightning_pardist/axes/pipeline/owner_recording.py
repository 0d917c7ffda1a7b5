"""Steps that run without stages: conditions, and their recording before the module's layers are distributed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.utilities.model_helpers import is_overridden

from lightning_pardist.axes.pipeline.pipeline_settings import PipelineSettings
from lightning_pardist.axes.pipeline.spanning_functions import SpanningFunctions
from lightning_pardist.engines.common.parameter_write_guard import ParameterWriteGuard
from lightning_pardist.engines.pipeline import CannotPipelineError, PipelinePlan, StepRecord, record_step
from lightning_pardist.engines.pipeline.errors import inner_gradient_error, transform_call_error
from lightning_pardist.engines.pipeline.owner_plan import plan_owners
from lightning_pardist.trainer import trial_run


def needs_owners(module: pl.LightningModule) -> str | None:
    """Return why a module's training cannot run in stages at all, as a predicate for messages; None if it can."""
    if not module.automatic_optimization:
        return "optimizes by hand (automatic_optimization=False)"
    if is_overridden("backward", module):
        return "overrides backward()"
    return None


def repeats_units(record: StepRecord) -> str | None:
    """Return why a recorded step may call layers differently in the next batch; None if it does not look so."""
    called = [call.unit for call in record.calls]
    repeated = next((unit for unit in called if called.count(unit) > 1), None)
    if repeated is not None:
        return f"It calls {repeated!r} several times."
    return "Shapes in it depend on values, as those of packed sequences do." if record.dynamic else None


def record_for_owners(
    trainer: pl.Trainer, settings: PipelineSettings, num_ranks: int, steps: Sequence[tuple[str, Any]]
) -> PipelinePlan:
    """Run steps once without side effects, and plan the distribution of layers over ranks. Not collective.

    Args:
        trainer: The Trainer of the module.
        settings: Settings of the pipeline.
        num_ranks: Number of pipeline ranks.
        steps: Names of step functions, each with a batch; the first one determines the placement.

    Raises:
        Exception: The exception of the first step, if it fails. Other steps that fail are ignored.
        CannotPipelineError: If the first step calls fewer layers than there are ranks, a custom autograd function
            calls several layers, or training computes gradients of parameters itself or runs layers in transforms in
            ways that are not supported.
    """
    module = trainer.lightning_module
    records: list[StepRecord] = []
    for name, batch in steps:
        try:
            with trial_run.without_side_effects(module, trainer), ParameterWriteGuard(module):

                def step(given: Any, name: str = name) -> Any:
                    return trial_run.run(module, name, given, trainer)

                training = name == "training_step"
                with SpanningFunctions(module) as functions:
                    record = record_step(module, step, batch, grad=training, loss_of=lambda result: None)
                records.append(record)
        except Exception:
            if not records:
                raise
            continue
        if training:
            functions.refuse(record.unit_names)
            inner = sorted(each for each in record.differentiated if record.parameters[each].unit is not None)
            if inner:
                raise inner_gradient_error(name, inner[0])
            if record.transformed is not None:
                raise transform_call_error(name, record.transformed)
    if not records[0].calls:
        raise CannotPipelineError("The step calls no module that holds parameters, so there is nothing to distribute.")
    return plan_owners(records, num_ranks, split=settings.split)
