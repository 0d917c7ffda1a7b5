"""Trial run of a pipeline plan in one process: every stage in turn, and the loss compared with the unsplit step's."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from lightning_pardist.engines.pipeline.errors import CannotPipelineError, transform_call_error
from lightning_pardist.engines.pipeline.interception import undisturbed
from lightning_pardist.engines.pipeline.microbatch import fresh_copy
from lightning_pardist.engines.pipeline.records import Output, Value
from lightning_pardist.engines.pipeline.replay import StageReplay, StageRun, contains_stub
from lightning_pardist.engines.pipeline.stage_plan import PipelinePlan
from lightning_pardist.engines.pipeline.step_record import find_loss

#: Relative difference of losses up to which they count as equal, on CPU and on accelerators.
_CLOSE, _LOOSE = 1e-5, 1e-3


def dry_run(
    module: nn.Module,
    step: Callable[[Any], Any],
    batch: Any,
    plan: PipelinePlan,
    *,
    loss_of: Callable[[Any], torch.Tensor | None] = find_loss,
) -> Any:
    """Replay every stage of a plan in order, forward only. Not collective; costs about two forwards.

    It finds failures that occur only when stubs replace units, at a point where all ranks still raise the same error.

    Args:
        module: The root module with all its parameters; its state is restored afterwards.
        step: The user's step.
        batch: The sample micro-batch of the recorded run.
        plan: The plan to try.
        loss_of: Returns the loss in the step's result.

    Returns:
        The step's result on the last stage.

    Raises:
        CannotPipelineError: If a stage cannot run on stubs, or the loss differs from that of the unsplit step.
    """
    replay = StageReplay(module, plan)
    values: dict[Value, torch.Tensor] = {}
    outputs: list[Output] = []
    result: Any = None
    # The staged and the unsplit run use the same seeds per call, so that dropout does not make their losses differ.
    for stage_index in range(plan.num_stages):
        with undisturbed(module), torch.set_grad_enabled(plan.trace.grad_enabled):
            run = _run_stage(replay, stage_index, step, batch, values, outputs)
        outputs = run.outputs
        made = {value: tensor.detach().requires_grad_(tensor.requires_grad) for value, tensor in run.values.items()}
        have = {**values, **made}
        values = {value: have[value] for value in plan.sent[stage_index] if value in have}
        result = run.result
    loss = loss_of(result)
    if loss is not None and contains_stub(loss):
        raise CannotPipelineError("The loss depends on a value that it did not use in the recorded run.")
    with undisturbed(module), torch.set_grad_enabled(plan.trace.grad_enabled):
        whole = loss_of(_whole_run(module, step, batch, plan))
    if loss is not None and whole is not None and loss.numel() == 1:
        _compare(loss, whole)
    return result


def _run_stage(
    replay: StageReplay,
    stage_index: int,
    step: Callable[[Any], Any],
    batch: Any,
    values: dict[Value, torch.Tensor],
    outputs: list[Output],
) -> StageRun:
    try:
        return replay.run(stage_index, step, fresh_copy(batch), values, outputs, seed=0)
    except CannotPipelineError:
        raise
    except Exception as error:
        if (unit := replay.plan.trace.transformed) is not None:
            raise transform_call_error("The step", unit) from error
        raise CannotPipelineError(
            f"The step fails in stage {stage_index}, where other stages' modules are stubs:"
            f" {type(error).__name__}: {error}"
        ) from error


def _whole_run(module: nn.Module, step: Callable[[Any], Any], batch: Any, plan: PipelinePlan) -> Any:
    """Run the step as a single stage, with the same random seeds as the stages."""
    bounds = (0, len(plan.trace.calls))
    one = PipelinePlan(plan.trace, bounds, plan.unit_stages, plan.parameter_stages, plan.reads)
    return StageReplay(module, one).run(0, step, fresh_copy(batch), {}, [], seed=0).result


def _compare(loss: torch.Tensor, of_whole: torch.Tensor) -> None:
    # The same operations run in the same order. On accelerators some add up in any order.
    tolerance = _CLOSE if loss.device.type == "cpu" else _LOOSE
    replayed, whole = float(loss.detach()), float(of_whole.detach())
    if not math.isclose(replayed, whole, rel_tol=tolerance, abs_tol=1e-6) and not (
        math.isnan(replayed) and math.isnan(whole)
    ):
        raise CannotPipelineError(
            f"The stages give a loss of {replayed:.6g}, but the whole module gives {whole:.6g}: values pass between"
            " units in a way that the recorded run did not show."
        )
