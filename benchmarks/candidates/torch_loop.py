"""Hand-written training loops on plain torch."""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks.candidates.protocol import Candidate, PassesBeforeSteps, held_by
from benchmarks.devices import autocast, init_group, moved, use_device
from benchmarks.settings import Settings
from benchmarks.workloads import make_loader, make_net, make_optimizer
from lightning_pardist.collectives import world_group
from lightning_pardist.engines.ddp import AllReduce, GradientReducer


@dataclass(frozen=True)
class PlainLoop:
    """Single process on plain torch.

    Attributes:
        compiled: Whether each block is compiled with ``module.compile()``.
    """

    name: str = "torch_loop"
    title: str = "one process, torch alone, loop by hand"
    compiled: bool = False
    single: bool = True

    def run(self, settings: Settings, gate: PassesBeforeSteps) -> None:
        """See :class:`Candidate`."""
        device = use_device(settings)
        net = make_net(settings).to(device)
        if self.compiled:
            for block in getattr(net, "blocks", (net,)):
                block.compile()
        optimizer = make_optimizer(net, settings)
        for batch in make_loader(settings, rank=0, world_size=1):
            gate.before_step(lambda: held_by(net, [optimizer]))
            optimizer.zero_grad()
            with autocast(settings, device):
                loss = net(*moved(batch, device))
            loss.backward()
            optimizer.step()
            gate.took(loss)


@dataclass(frozen=True)
class TorchDDP:
    """Loop of torch's own DDP tutorial.

    Attributes:
        gradient_as_bucket_view: torch DDP's option to store gradients as views of its buckets; off by default.
    """

    name: str
    title: str
    gradient_as_bucket_view: bool = False
    single: bool = False

    def run(self, settings: Settings, gate: PassesBeforeSteps) -> None:
        """See :class:`Candidate`."""
        device = init_group(settings)
        net = make_net(settings).to(device)
        wrapped: nn.Module = DistributedDataParallel(net, gradient_as_bucket_view=self.gradient_as_bucket_view)
        optimizer = make_optimizer(net, settings)
        for batch in make_loader(settings, rank=dist.get_rank(), world_size=dist.get_world_size()):
            gate.before_step(lambda: held_by(net, [optimizer], wrapper=wrapped))
            optimizer.zero_grad()
            with autocast(settings, device):
                loss = wrapped(*moved(batch, device))
            loss.backward()
            optimizer.step()
            gate.took(loss)


@dataclass(frozen=True)
class ReducerLoop:
    """Hand-written loop around the engine of ``pardist_ddp``: the cost of the strategy without Lightning."""

    name: str = "pardist_reducer"
    title: str = "GradientReducer, loop by hand"
    single: bool = False

    def run(self, settings: Settings, gate: PassesBeforeSteps) -> None:
        """See :class:`Candidate`."""
        device = init_group(settings)
        net = make_net(settings).to(device)
        optimizer = make_optimizer(net, settings)
        reducer = GradientReducer(net, transport=AllReduce(world_group()))
        for batch in make_loader(settings, rank=dist.get_rank(), world_size=dist.get_world_size()):
            gate.before_step(lambda: held_by(net, [optimizer]))
            optimizer.zero_grad()
            with autocast(settings, device):
                loss = net(*moved(batch, device))
            with reducer.backward(loss):
                loss.backward()
            optimizer.step()
            reducer.step_done()
            gate.took(loss)


_ALL: dict[str, Candidate] = {
    candidate.name: candidate
    for candidate in (
        PlainLoop(),
        TorchDDP("torch_ddp", "torch DDP, loop by hand"),
        TorchDDP("torch_ddp_views", "torch DDP, loop by hand, gradients as bucket views", gradient_as_bucket_view=True),
        ReducerLoop(),
        PlainLoop("torch_loop_compiled", "one process, torch alone, each block compiled by hand", compiled=True),
    )
}


def names() -> list[str]:
    """Return the names of this family."""
    return list(_ALL)


def find(name: str) -> Candidate | None:
    """Return the candidate of this name, or None if it belongs to another family."""
    return _ALL.get(name)
