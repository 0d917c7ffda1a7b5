"""Training loops written by hand on torch alone."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks.candidates.protocol import Candidate, PassesBeforeSteps, held_by
from benchmarks.settings import Settings
from benchmarks.workloads import make_loader, make_net, make_optimizer
from lightning_pardist.collectives import world_group
from lightning_pardist.engines.ddp import AllReduce, GradientReducer


@dataclass(frozen=True)
class TorchDDP:
    """The loop of torch's own DDP tutorial.

    Attributes:
        gradient_as_bucket_view: torch DDP's option to keep gradients in its buckets, off unless one asks for it.
    """

    name: str
    title: str
    gradient_as_bucket_view: bool = False
    single: bool = False

    def run(self, settings: Settings, gate: PassesBeforeSteps) -> None:
        """See :class:`Candidate`."""
        dist.init_process_group("gloo", timeout=timedelta(minutes=10))
        net = make_net(settings)
        wrapped: nn.Module = DistributedDataParallel(net, gradient_as_bucket_view=self.gradient_as_bucket_view)
        optimizer = make_optimizer(net)
        for batch in make_loader(settings, rank=dist.get_rank(), world_size=dist.get_world_size()):
            gate.before_step(lambda: held_by(net, [optimizer], wrapper=wrapped))
            optimizer.zero_grad()
            wrapped(*batch).backward()
            optimizer.step()


@dataclass(frozen=True)
class ReducerLoop:
    """A loop by hand around the engine of ``pardist_ddp``: what the strategy costs beside Lightning."""

    name: str = "pardist_reducer"
    title: str = "GradientReducer, loop by hand"
    single: bool = False

    def run(self, settings: Settings, gate: PassesBeforeSteps) -> None:
        """See :class:`Candidate`."""
        dist.init_process_group("gloo", timeout=timedelta(minutes=10))
        net = make_net(settings)
        optimizer = make_optimizer(net)
        reducer = GradientReducer(net, transport=AllReduce(world_group()))
        for batch in make_loader(settings, rank=dist.get_rank(), world_size=dist.get_world_size()):
            gate.before_step(lambda: held_by(net, [optimizer]))
            optimizer.zero_grad()
            loss = net(*batch)
            with reducer.backward(loss):
                loss.backward()
            optimizer.step()
            reducer.step_done()


_ALL: dict[str, Candidate] = {
    candidate.name: candidate
    for candidate in (
        TorchDDP("torch_ddp", "torch DDP, loop by hand"),
        TorchDDP("torch_ddp_views", "torch DDP, loop by hand, gradients as bucket views", gradient_as_bucket_view=True),
        ReducerLoop(),
    )
}


def names() -> list[str]:
    """Names that this family knows."""
    return list(_ALL)


def find(name: str) -> Candidate | None:
    """The candidate of this name, None if it is another family's."""
    return _ALL.get(name)
