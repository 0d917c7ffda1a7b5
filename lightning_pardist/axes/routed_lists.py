"""Lists of modules of which a step calls those that its tokens ask for."""

from __future__ import annotations

from collections.abc import Sequence

import lightning.pytorch as pl
from torch import nn

from lightning_pardist.axes.base import RunContext
from lightning_pardist.axes.pipeline.meta_stages import stand_ins
from lightning_pardist.axes.together import raise_together
from lightning_pardist.engines.experts import ExpertLayer, find_layers
from lightning_pardist.trainer import trial_run


def find_callers(context: RunContext, trainer: pl.Trainer, module: pl.LightningModule) -> list[str]:
    """Names of modules whose forwards choose among experts in lists, by a trial of the step. Collective over the world.

    Which experts a rank calls, and how many, depends on its samples: what all ranks have to do together is done for the
    module that calls them.

    Args:
        context: The run, whose first batch is tried.
        trainer: Of the run.
        module: Plain and whole.

    Raises:
        Exception: On every rank, if the trial fails on one, or the module itself calls experts, or its step.
    """
    if not any(isinstance(child, nn.ModuleList) and len(child) > 1 for child in module.modules()):
        return []
    callers: list[str] = []
    failure = None
    try:
        callers = _callers_of(_listed_here(context, trainer, module), module)
    except Exception as error:
        failure = error
    raise_together(failure)
    # Which there are may depend on a rank's batch.
    return context.broadcast(callers)


def _listed_here(context: RunContext, trainer: pl.Trainer, module: pl.LightningModule) -> list[ExpertLayer]:
    name, batch = trial_run.step_name(trainer), context.samples.first()
    left: list[ExpertLayer] = []
    with (
        trial_run.without_trace(module, trainer),
        context.samples.rehearsed(),
        stand_ins(module, context.device),
    ):
        layers = find_layers(module, lambda: trial_run.run(module, name, batch, trainer), left=left)
    return [layer for layer in (*layers, *left) if layer.lists]


def _callers_of(layers: Sequence[ExpertLayer], module: nn.Module) -> list[str]:
    for layer in layers:
        if layer.outside or not layer.runner:
            raise ValueError(
                f"The experts {layer.name!r} are called by {type(module).__name__} itself, as tokens ask for them, and"
                " ranks of a pipeline's stage could not gather their shards together. Call them in the forward of a"
                " module of their own, or use data_parallel='zero2'."
            )
    return list(dict.fromkeys(layer.runner for layer in layers))
