"""Checks that refuse modules and callbacks unsupported in a pipeline, before anything is transformed."""

from __future__ import annotations

from collections.abc import Sequence

import lightning.pytorch as pl
from lightning.pytorch.callbacks import StochasticWeightAveraging
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch.optim import Optimizer

from lightning_pardist.axes.base import RunContext
from lightning_pardist.axes.pipeline.owner_recording import needs_owners
from lightning_pardist.axes.pipeline.sample_runs import STEPS
from lightning_pardist.axes.refusals import refuse_averages_in_shards, refuse_callbacks, refuse_pruning
from lightning_pardist.compat.lightning_loops import is_compiled
from lightning_pardist.engines.common.update_scope import FoundScope, ScopeSetting, find_scope, has_parameters
from lightning_pardist.engines.pipeline import SPLIT_BACKWARD


def check_trainer(trainer: pl.Trainer, context: RunContext, schedule: str) -> None:
    """Refuse modules and callbacks that a pipeline does not support. Not collective.

    Args:
        trainer: The Trainer, before its run.
        context: Context of the run.
        schedule: Schedule of the pipeline.

    Raises:
        ValueError: If something is unsupported; names it and what to use instead.
    """
    module = trainer.lightning_module
    name = type(module).__name__
    if is_compiled(module):
        raise ValueError(
            f"{name} is compiled as a whole, which hides the modules to cut between. Pass the uncompiled module."
        )
    for step in dict.fromkeys(STEPS.values()):
        if is_param_in_hook_signature(getattr(module, step), "dataloader_iter", explicit=True):
            raise ValueError(
                f"{name}.{step} takes dataloader_iter, but a pipeline cuts each batch into micro-batches."
                " Take `batch` instead."
            )
    if trainer.state.fn != TrainerFn.FITTING:
        return
    if schedule in SPLIT_BACKWARD and context.expert_ranks > 1:
        raise ValueError(
            f"schedule={schedule!r} with expert_parallel_size={context.expert_ranks} would repeat the exchanges of"
            " experts in the half of the backward pass that it defers. Use schedule='1f1b', 'gpipe' or"
            " 'interleaved'."
        )
    if schedule != "mp" and (why := needs_owners(module)) is not None:
        raise ValueError(
            f"{name} {why}: a pipeline interleaves the backward passes of all micro-batches, and cannot run one at"
            " the point where the step calls for it. Use pardist_mp, which runs whole batches, one layer after the"
            " other, or pardist_ddp, pardist_zero3 or pardist_tp."
        )
    refuse_pruning(trainer)
    if StochasticWeightAveraging.pl_module_contains_batch_norm(module):
        refuse_callbacks(
            trainer,
            StochasticWeightAveraging,
            "recomputes batch norm statistics in an epoch without backward, but a pipeline's schedule always"
            " includes the backward. Use WeightAveraging or EMAWeightAveraging, or pardist_ddp, pardist_zero1 or"
            " pardist_zero2.",
        )
    refuse_averages_in_shards(trainer, context)


def find_joint_updates(optimizers: Sequence[Optimizer], setting: ScopeSetting) -> list[tuple[Optimizer, FoundScope]]:
    """Return the optimizers whose update of an element depends on all tensors, hence on all stages. Not collective.

    Args:
        optimizers: Optimizers of the full module.
        setting: The user's setting of their update scope.
    """
    joint = []
    for optimizer in optimizers:
        if not has_parameters(optimizer):
            continue
        try:
            found = find_scope(optimizer, form="dims", setting=setting)
        except ValueError as error:
            rank_zero_warn(f"{error} Each rank of a pipeline steps on the parameters of its stages.")
            continue
        if found.scope == "joint":
            joint.append((optimizer, found))
    return joint
