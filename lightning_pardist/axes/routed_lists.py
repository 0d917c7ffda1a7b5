"""Detection of modules that route tokens to experts in a ``ModuleList``."""

from __future__ import annotations

from collections.abc import Sequence

import lightning.pytorch as pl
from torch import nn

from lightning_pardist.axes.base import RunContext
from lightning_pardist.axes.pipeline.meta_stages import meta_placeholders
from lightning_pardist.axes.together import raise_on_all_ranks
from lightning_pardist.engines.experts import ExpertLayer, find_layers
from lightning_pardist.trainer import trial_run


def find_callers(context: RunContext, trainer: pl.Trainer, module: pl.LightningModule) -> list[str]:
    """Return names of modules whose forward selects experts from a list, found by a trial step.

    The experts that a rank calls, and their number, depend on its samples. Collectives are therefore run for the module
    that calls the experts, not for each expert. Collective over the world.

    Args:
        context: The run, whose first batch is used in the trial.
        trainer: The run's Trainer.
        module: The module before any axis transforms it.

    Raises:
        Exception: On every rank, if the trial fails on one rank, or if the module's own forward or its step function
            calls the experts.
    """
    if not any(isinstance(child, nn.ModuleList) and len(child) > 1 for child in module.modules()):
        return []
    callers: list[str] = []
    failure = None
    try:
        callers = _callers_of(_listed_here(context, trainer, module), module)
    except Exception as error:
        failure = error
    raise_on_all_ranks(failure)
    # The result may depend on a rank's batch.
    return context.broadcast(callers)


def _listed_here(context: RunContext, trainer: pl.Trainer, module: pl.LightningModule) -> list[ExpertLayer]:
    name, batch = trial_run.step_name(trainer), context.samples.first()
    left: list[ExpertLayer] = []
    with (
        trial_run.without_side_effects(module, trainer),
        context.samples.in_trial_run(),
        meta_placeholders(module, context.device),
    ):
        layers = find_layers(module, lambda: trial_run.run(module, name, batch, trainer), left=left)
    return [layer for layer in (*layers, *left) if layer.lists]


def _callers_of(layers: Sequence[ExpertLayer], module: nn.Module) -> list[str]:
    for layer in layers:
        if layer.outside or not layer.runner:
            raise ValueError(
                f"The experts {layer.name!r} are called by {type(module).__name__} itself, depending on the routing"
                " of tokens, so the ranks of a pipeline stage could not all-gather their shards together. Call them"
                " in the forward of a module of their own, or use data_parallel='zero2'."
            )
    return list(dict.fromkeys(layer.runner for layer in layers))
