"""Modules that split themselves, as those written for Lightning's ``ModelParallelStrategy`` do."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.fabric.utilities.init import _materialize_distributed_module
from lightning.pytorch.callbacks import StochasticWeightAveraging, WeightAveraging
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.utils import _pytree as pytree
from torchmetrics import Metric
from typing_extensions import override

from lightning_pardist.engines.api import DataEngine
from lightning_pardist.engines.by_hand import (
    ByHandEngine,
    check_units,
    gathered,
    is_split,
    make_alike,
    sharded_by_units,
)
from lightning_pardist.engines.checkpoint.boxes import shards_of
from lightning_pardist.engines.checkpoint.states import common_names, copy_whole
from lightning_pardist.engines.process_group import world_group
from lightning_pardist.strategies.parts.part import DataPart, refuse_callbacks

#: Modules whose parameters a strategy has split: those of a broken run, and large ones, stay so.
_ours: weakref.WeakSet[nn.Module] = weakref.WeakSet()


def note_own_split(module: nn.Module) -> None:
    """From here on a strategy's own parts transform this module."""
    _ours.add(module)


def is_split_by_hand(module: nn.Module) -> bool:
    """Whether a module's own ``configure_model`` has made ``DTensor``s of its parameters."""
    if not is_split(module):
        _ours.discard(module)
    return is_split(module) and module not in _ours


class SplitByHand(DataPart):
    """Takes a module as its ``configure_model`` left it, in place of all other parts.

    Parameters stay as they are. What is replicated is made alike at the start and averaged over the data axis in
    backward, unless a unit of ``fully_shard`` does that; norms count every element once; checkpoints hold whole tensors
    under the module's names.
    """

    def __init__(self) -> None:
        self._gathered: AbstractContextManager[None] | None = None

    @override
    def check(self, trainer: pl.Trainer) -> None:
        strategy, module = self.strategy, self.strategy.lightning_module
        if strategy.dims.pipeline_parallel > 1:
            raise ValueError(
                f"{type(module).__name__} splits its parameters in configure_model, and a pipeline of"
                f" {strategy.dims.pipeline_parallel} ranks is to distribute them as well. Set pipeline_parallel_size=1,"
                " or leave the splitting to the strategy."
            )
        refuse_callbacks(
            trainer,
            (StochasticWeightAveraging, WeightAveraging),
            "averages whole parameters, and configure_model has split them. Remove the callback.",
        )
        if module is not None:
            check_units(module, data_size=strategy.dims.data_parallel)

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
    def steps_on_parts(self) -> bool:
        return True

    @override
    def to_device(self, module: nn.Module) -> None:
        # As Lightning does: on meta until here, if the module was built there.
        _materialize_distributed_module(module, self.strategy.root_device)
        module.to(self.strategy.root_device)

    @override
    def transform(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        make_alike(module, world=world_group(), data_group=self.strategy.data_group)
        for child in module.modules():
            if isinstance(child, Metric) and child.process_group is None:
                # Tensor ranks have the same states, which must not be added up.
                child.process_group = self.strategy.data_group

    @override
    def start_evaluation(self) -> None:
        module, group = self.strategy.lightning_module, self.strategy.data_group
        evaluation = self.strategy.data_axis.evaluation
        if module is None or evaluation is None or not sharded_by_units(module):
            return
        batches: list[list[int]] = [[] for _ in range(group.size())]
        dist.all_gather_object(batches, evaluation.batches_of_own(), group=group)
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
        return ByHandEngine(module, optimizers, group=self.strategy.data_group, world=world_group())

    @override
    def whole_module_state(self, state: dict[str, Any]) -> dict[str, Any]:
        return self.strategy.states.whole_module_state(state, like=state)

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
            copy_whole(whole, shards_of(own[name]))
        if extra:
            module.load_state_dict(extra, strict=False)

    @override
    def teardown(self) -> None:
        # An evaluation that broke off; its ranks do not meet any more.
        self._gathered = None

    @override
    def describe(self) -> str:
        module = self.strategy.lightning_module
        if module is None:
            return ""
        units = len(sharded_by_units(module))
        total = sum(1 for _ in module.parameters())
        return (
            f"Split by the module's own configure_model: {units} of {total} parameters under fully_shard; the others"
            f" are averaged over {self.strategy.dims.data_parallel} data ranks after backward"
        )
