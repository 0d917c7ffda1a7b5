"""Axis for modules parallelized by their own ``configure_model`` (``ModelParallelStrategy`` style)."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import StochasticWeightAveraging, WeightAveraging
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torchmetrics import Metric
from typing_extensions import override

from lightning_pardist.axes.base import DataParallelAxis
from lightning_pardist.axes.refusals import refuse_callbacks
from lightning_pardist.checkpoint.chunks import shards_of
from lightning_pardist.checkpoint.coordination import world_coordinator
from lightning_pardist.checkpoint.gather import assemble_module
from lightning_pardist.checkpoint.tensors import common_names, copy_from_full
from lightning_pardist.collectives import world_group
from lightning_pardist.compat import pytree
from lightning_pardist.compat.lightning_functions import materialize_module
from lightning_pardist.engines.data_engine import DataEngine
from lightning_pardist.engines.user_parallelized import (
    UserParallelizedEngine,
    check_units,
    gathered,
    is_split,
    make_alike,
    sharded_by_units,
)

#: Modules whose parameters a strategy's own axes have split; large ones, and those of a failed run, stay split.
_ours: weakref.WeakSet[nn.Module] = weakref.WeakSet()


def note_user_parallelized(module: nn.Module) -> None:
    """Mark a module as transformed by a strategy's own axes."""
    _ours.add(module)


def is_user_parallelized(module: nn.Module) -> bool:
    """Return whether a module's own ``configure_model`` has converted its parameters to ``DTensor``s."""
    if not is_split(module):
        _ours.discard(module)
    return is_split(module) and module not in _ours


class UserParallelizedAxis(DataParallelAxis):
    """Replaces all other axes for a module that its ``configure_model`` has parallelized.

    Parameters keep their placements. Replicated parameters are broadcast at the start, and their gradients are averaged
    over the data axis after backward, unless a ``fully_shard`` unit averages them. Norms count every element once.
    Checkpoints hold full tensors under the module's names.
    """

    name = "user_parallelized"
    calls_may_differ = False

    def __init__(self) -> None:
        self._gathered: AbstractContextManager[None] | None = None

    @override
    def compile_refusal(self, whole_step: bool) -> str:
        return "takes a module as its configure_model has parallelized it. Compile it there"

    @override
    def check(self, trainer: pl.Trainer) -> None:
        dims, module = self.context.dims, self.context.module
        if dims.pipeline_parallel > 1:
            raise ValueError(
                f"{type(module).__name__} splits its parameters in configure_model, and a pipeline of"
                f" {dims.pipeline_parallel} ranks is to distribute them as well. Set pipeline_parallel_size=1,"
                " or leave the splitting to the strategy."
            )
        refuse_callbacks(
            trainer,
            (StochasticWeightAveraging, WeightAveraging),
            "averages whole parameters, and configure_model has split them. Remove the callback.",
        )
        if module is not None:
            check_units(module, data_size=dims.data_parallel)

    @property
    @override
    def loads_after_setup(self) -> bool:
        return True

    @property
    @override
    def broadcasts(self) -> bool:
        return True

    @property
    @override
    def steps_on_shards(self) -> bool:
        return True

    @override
    def to_device(self, module: nn.Module) -> None:
        # Materialize parameters on `meta` here, as Lightning does.
        materialize_module(module, self.context.device)
        module.to(self.context.device)

    @override
    def transform(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        make_alike(module, world=world_group(), data_group=self.context.gradient_group)
        for child in module.modules():
            if isinstance(child, Metric) and child.process_group is None:
                # Metric states are equal on tensor ranks and must not be reduced over them.
                child.process_group = self.context.batch_group

    @override
    def start_evaluation(self) -> None:
        module, group = self.context.module, self.context.gradient_group
        own_batch_counts = self.context.own_batch_counts
        if module is None or own_batch_counts is None or not sharded_by_units(module):
            return
        batches: list[list[int]] = [[] for _ in range(group.size())]
        dist.all_gather_object(batches, own_batch_counts(), group=group)
        if any(other != batches[0] for other in batches):
            self._gathered = gathered(module)
            self._gathered.__enter__()

    @override
    def end_evaluation(self) -> None:
        if self._gathered is not None:
            held, self._gathered = self._gathered, None
            held.__exit__(None, None, None)

    @override
    def make_engine(self, module: nn.Module, optimizers: list[Optimizer]) -> DataEngine:
        return UserParallelizedEngine(module, optimizers, group=self.context.gradient_group, world=world_group())

    @override
    def full_module_state(self, state: dict[str, Any]) -> dict[str, Any]:
        return assemble_module(state, world_coordinator(), like=state)

    @override
    @torch.no_grad()
    def whole_values(self, tree: Any) -> Any:
        return pytree.tree_map_only(DTensor, lambda value: value.full_tensor(), tree)

    @override
    @torch.no_grad()
    def load_module_state(self, module: nn.Module, state: Mapping[str, Any], *, strict: bool) -> None:
        own = module.state_dict(keep_vars=True)
        extra: dict[str, Any] = {}
        for name in common_names(module, own, state, strict=strict):
            if not isinstance(own[name], Tensor):
                extra[name] = state[name]
                continue
            whole = state[name]
            if whole.shape != own[name].shape:
                raise RuntimeError(
                    f"{name} has shape {tuple(own[name].shape)} in the module and {tuple(whole.shape)} in the"
                    " checkpoint."
                )
            copy_from_full(whole, shards_of(own[name]))
        if extra:
            module.load_state_dict(extra, strict=False)

    @override
    def teardown(self) -> None:
        # After an interrupted evaluation, exiting the context would be a collective that other ranks do not join.
        self._gathered = None

    @override
    def describe(self) -> str:
        module = self.context.module
        if module is None:
            return ""
        units = len(sharded_by_units(module))
        total = sum(1 for _ in module.parameters())
        return (
            f"Split by the module's own configure_model: {units} of {total} parameters under fully_shard; the others"
            f" are averaged over {self.context.dims.data_parallel} data ranks after backward"
        )
