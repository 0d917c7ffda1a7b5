"""Refusals of steps that cannot run stage by stage, on micro-batches, by what a recorded run shows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import torch
from lightning.pytorch.trainer.states import RunningStage
from lightning_utilities.core.rank_zero import rank_zero_debug
from torch import Tensor, nn

from lightning_pardist.axes.pipeline.collective_calls import CollectiveCalls
from lightning_pardist.axes.pipeline.reduction_rules import relative_error
from lightning_pardist.axes.pipeline.sample_runs import STEPS, SampleRuns, SampleStep
from lightning_pardist.engines.common.parameter_write_guard import ParameterWriteGuard
from lightning_pardist.engines.pipeline import CannotPipelineError, PipelinePlan, StepRecord
from lightning_pardist.engines.pipeline.errors import ALTERNATIVES, inner_gradient_error
from lightning_pardist.engines.pipeline.interception import intercepted, undisturbed
from lightning_pardist.engines.pipeline.microbatch import fresh_copy
from lightning_pardist.engines.pipeline.nested import map_leaves

#: Largest relative difference of equal parameters.
_CLOSE = 1e-4


def refuse_shared_buffers(made: PipelinePlan, written: frozenset[tuple[Any, ...]], num_ranks: int) -> None:
    """Refuse units run by several ranks if the step writes to their buffers: each rank would miss updates.

    Raises:
        CannotPipelineError: If there is such a unit; names its buffer.
    """
    for unit, stages in made.unit_stages.items():
        ranks = sorted({stage % num_ranks for stage in stages})
        name = next((".".join(each) for each in sorted(written) if f"{each[0]}.".startswith(f"{unit}.")), None)
        if len(ranks) > 1 and name is not None:
            raise CannotPipelineError(
                f"training_step calls {unit!r} several times, in the stages of ranks"
                f" {', '.join(map(str, ranks))}, and each call changes {name!r}: a rank would have only the"
                " changes of its own calls.",
                ("pardist_mp", *ALTERNATIVES),
            )


def refuse_inner_gradients(made: PipelinePlan) -> None:
    """Refuse a step that differentiates by parameters of other stages than the loss', which has no graph of them.

    Raises:
        CannotPipelineError: If there is such a parameter; names it.
    """
    for name in sorted(made.trace.differentiated):
        if set(made.parameter_stages[name]) != {made.num_stages - 1}:
            raise inner_gradient_error("training_step", name)


def refuse_collectives(sample: SampleStep, calls: CollectiveCalls) -> None:
    """Refuse a step that calls a collective.

    Raises:
        CannotPipelineError: If one was recorded.
    """
    if calls.found:
        raise CannotPipelineError(
            f"{STEPS[sample.stage]} calls a collective itself ({', '.join(dict.fromkeys(calls.found))}). In a"
            " pipeline the step runs stage by stage, so ranks reach this call at different times, or not at"
            " all. Call it in a hook (on_train_batch_end), or log with sync_dist=True."
        )


def refuse_varying_calls(runs: SampleRuns, sample: SampleStep, recorded: StepRecord) -> None:
    """Refuse a step whose later runs call other units than the recorded one, as for code that runs once only.

    Raises:
        CannotPipelineError: If a second run, with the next ``batch_idx``, calls other units than the recorded one.
    """
    first, later = [call.unit for call in recorded.calls], _later_calls(runs, sample, recorded)
    # A step that returns before it calls any unit is skipped by all stages.
    if later and first != later:
        index = next((i for i, (one, two) in enumerate(zip(first, later, strict=False)) if one != two), None)
        index = min(len(first), len(later)) if index is None else index
        one, two = (repr(each[index]) if index < len(each) else "no further layer" for each in (first, later))
        raise CannotPipelineError(
            f"{STEPS[sample.stage]} does not call the same layers in every step: after {index} calls of layers,"
            f" a first run calls {one}, and a second run with batch_idx=1 calls {two}. Stages run in a fixed"
            " order. Move what is done once, or with some batches only, to a hook.",
            ("pardist_mp", *ALTERNATIVES),
        )


def _later_calls(runs: SampleRuns, sample: SampleStep, recorded: StepRecord) -> list[str]:
    """Return the units that a second run calls, with the next ``batch_idx``; empty if it could not be tried."""
    found: list[str] = []

    def note(name: str, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        found.append(name)
        return forward(*args, **kwargs)

    units = {name: runs.module.get_submodule(name) for name in recorded.unit_names}
    try:
        with (
            undisturbed(runs.module),
            ParameterWriteGuard(runs.module),
            runs.running(sample, in_order=True) as run,
            torch.set_grad_enabled(sample.stage == RunningStage.TRAINING),
        ):
            run(fresh_copy(sample.microbatch))
            with intercepted(units, note):
                run(fresh_copy(sample.microbatch))
    except Exception as error:
        # For example, since there is no backward between the two runs.
        rank_zero_debug(f"{STEPS[sample.stage]} was not tried a second time: {error}")
        return []
    return found


@torch.no_grad()
def refuse_parameter_changes(
    runs: SampleRuns, sample: SampleStep, run: Callable[[Any], Any], written: Sequence[nn.Parameter]
) -> None:
    """Refuse a step that writes to parameters, unless repeated runs have the effect of one (a clamp).

    Raises:
        CannotPipelineError: If the change depends on how often the step runs, as for a moving average, or on other
            parameters or the samples.
    """
    begun = []
    for place, parameter in enumerate(written):
        # Each by a different amount, so that copies of each other differ.
        begun.append(parameter.add_(1.0 + place / len(written)).clone())
    with undisturbed(runs.module), torch.enable_grad():
        run(fresh_copy(sample.microbatch))
        once = [parameter.detach().clone() for parameter in written]
        run(fresh_copy(sample.microbatch))
    if (name := _differing(runs.module, written, once)) is not None:
        raise CannotPipelineError(
            f"{STEPS[sample.stage]} changes the values of {name!r} again each time that it runs; in a pipeline"
            " it runs once for every micro-batch and stage. Change parameters in a hook, and compute them only"
            " from parameters of the same stage."
        )
    # Again, with all inputs shifted: parameters that are only read, and the samples.
    starts = dict(zip(written, begun, strict=True))
    changed = {each: values for each, values in zip(written, once, strict=True) if not values.equal(starts[each])}
    for parameter in runs.module.parameters():
        if parameter in changed:
            parameter.copy_(starts[parameter])
        else:
            parameter.add_(1.0)
    moved = map_leaves(_moved, fresh_copy(sample.microbatch))
    name = None
    with undisturbed(runs.module), torch.enable_grad(), suppress(Exception):
        run(moved)
        name = _differing(runs.module, list(changed), list(changed.values()))
    if name is not None:
        raise CannotPipelineError(
            f"{STEPS[sample.stage]} computes the values of {name!r} from other parameters or from the samples;"
            " in a pipeline each rank has only the parameters of its own stages, and runs micro-batches. Set"
            " parameters in a hook, and compute them only from parameters of the same stage."
        )


def _differing(module: nn.Module, written: Sequence[nn.Parameter], values: Sequence[Tensor]) -> str | None:
    """Return the name of the first parameter whose values differ; None if none does."""
    wanted = dict(zip(written, values, strict=True))
    named = ((name, parameter) for name, parameter in module.named_parameters() if parameter in wanted)
    return next((name for name, own in named if relative_error(wanted[own], own) > _CLOSE), None)


def _moved(leaf: Any) -> Any:
    return leaf + 1.0 if isinstance(leaf, Tensor) and leaf.is_floating_point() else leaf
