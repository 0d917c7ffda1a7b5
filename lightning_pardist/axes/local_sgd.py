"""The outer axis of local SGD: islands that train by themselves and average their parameters every few steps."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Literal

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import StochasticWeightAveraging, WeightAveraging
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from lightning_pardist.axes.base import ParallelAxis
from lightning_pardist.axes.refusals import refuse_callbacks
from lightning_pardist.engines.ddp.buffers import average_tensors
from lightning_pardist.mesh import Degree, ParallelDims
from lightning_pardist.settings import one_of, positive

OuterSize = int | Literal["auto", "node"]


class LocalSGDAxis(ParallelAxis):
    """Averages parameters and floating-point buffers over islands (local SGD, arXiv 1805.09767).

    Between two averages nothing travels between islands on behalf of gradients. Validation, checkpoints and the end of
    training average first, so that what is evaluated and saved is what all islands go on from. Optimizer state stays
    with its island; a checkpoint holds the first island's.

    The arguments are those of :class:`~lightning_pardist.LocalSGDStrategy`.

    Raises:
        ValueError: If a setting is out of range; during a run, if a callback keeps averages of its own.
    """

    name = "outer"
    mesh_axes = ("outer_parallel",)
    # After every axis that works inside an island.
    order = 60

    def __init__(self, *, outer_parallel_size: OuterSize = "auto", sync_every: int = 32) -> None:
        if isinstance(outer_parallel_size, str):
            one_of("outer_parallel_size", outer_parallel_size, ("auto", "node"), or_else="a number of islands")
        self.outer_parallel_size = outer_parallel_size
        self.sync_every = int(positive("sync_every", sync_every, "Use the optimizer steps between two averages."))
        self._steps: dict[Optimizer, int] = {}

    @override
    def degrees(self, num_nodes: int, ranks_per_node: int) -> dict[str, Degree]:
        size = self.outer_parallel_size
        if size == "node" or (size == "auto" and num_nodes > 1):
            size = num_nodes
        return {"outer_parallel": size}

    @override
    def check(self, trainer: pl.Trainer) -> None:
        refuse_callbacks(
            trainer,
            (StochasticWeightAveraging, WeightAveraging),
            "averages the weights of every island by itself, and nothing would bring those averages together. Remove"
            f" the callback, or use {self.context.name}(outer_parallel_size=1).",
        )

    @override
    def ready(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        self._steps = {}

    # --- steps --------------------------------------------------------------------------------------------------

    @property
    def group(self) -> dist.ProcessGroup:
        """This rank and its counterparts on the other islands."""
        return self.context.mesh["outer_parallel"].get_group()

    @override
    def optimizer_stepped(self, optimizer: Optimizer) -> None:
        """Average the parameters of an optimizer that has made its steps, and with the first one's all others.

        Collective over the outer axis, every :attr:`sync_every` steps of the optimizer.
        """
        self._steps[optimizer] = self._steps.get(optimizer, 0) + 1
        if self._steps[optimizer] >= self.sync_every:
            self._average(optimizer)

    @override
    def synchronize(self) -> None:
        for optimizer in [one for one in self.context.optimizers if self._steps.get(one)]:
            self._average(optimizer)

    @torch.no_grad()
    def _average(self, optimizer: Optimizer) -> None:
        self._steps[optimizer] = 0
        self.context.before_collective()
        average_tensors(self._values_of(optimizer), group=self.group)

    def _values_of(self, optimizer: Optimizer) -> Iterator[Tensor]:
        """What this rank holds of an optimizer's parameters; the first one also answers for what no optimizer has."""
        module, optimizers = self.context.module, self.context.optimizers
        if module is None:
            return
        others = {param for other in optimizers if other is not optimizer for param in _params(other)}
        mine = set(_params(optimizer))
        tensors: Iterator[Tensor] = module.parameters()
        if optimizer is optimizers[0]:
            tensors = itertools.chain(tensors, module.buffers())
        else:
            others = {param for param in module.parameters() if param not in mine}
        for tensor in tensors:
            if not tensor.is_meta and tensor not in others and (tensor.is_floating_point() or tensor.is_complex()):
                yield tensor

    # --- for people, and the end --------------------------------------------------------------------------------

    @override
    def describe(self) -> str:
        return (
            f"Local SGD: {self.context.dims.outer_parallel} islands of {_ranks(self.context.dims)}, parameters averaged"
            f" every {self.sync_every} optimizer steps, and before validation and checkpoints"
        )

    @override
    def teardown(self) -> None:
        self._steps = {}


def _params(optimizer: Optimizer) -> list[nn.Parameter]:
    return [param for group in optimizer.param_groups for param in group["params"]]


def _ranks(dims: ParallelDims) -> str:
    size = dims.world_size // dims.outer_parallel
    return f"{size} ranks" if size > 1 else "1 rank"
