"""GPT cut by hand into stages for ``torch.distributed.pipelining``: the reference for ``pardist_pp``."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

from benchmarks.candidates.protocol import Candidate, PassesBeforeSteps, held_by
from benchmarks.settings import Settings
from benchmarks.workloads import GPTLoss, make_loader, make_net, make_optimizer
from lightning_pardist.engines.pipeline import (
    PipelineEngine,
    PipelineOptions,
    PipelinePlan,
    plan_stages,
    record_step,
    split_batch,
)

NUM_MICROBATCHES = 8


class StageOfGPT(nn.Module):
    """One stage of a :class:`~benchmarks.workloads.GPTLoss`, written as in the tutorials of ``pipelining``.

    Args:
        net: The whole model, of which this stage keeps its part.
        stage_index: Index of the stage.
        starts: Index of the first block of every stage, followed by the number of blocks.
    """

    def __init__(self, net: GPTLoss, stage_index: int, starts: tuple[int, ...]) -> None:
        super().__init__()
        self.is_first, self.is_last = stage_index == 0, stage_index == len(starts) - 2
        self.blocks = nn.ModuleList(list(net.blocks)[starts[stage_index] : starts[stage_index + 1]])
        if self.is_first:
            self.embed, self.positions = net.embed, net.positions
        if self.is_last:
            self.norm, self.head = net.norm, net.head

    def forward(self, x: Tensor) -> Tensor:
        if self.is_first:
            x = self.embed(x) + self.positions(torch.arange(x.shape[1], device=x.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)) if self.is_last else x


def _loss(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


@dataclass(frozen=True)
class PipeliningLoop:
    """Hand-written loop on torch's own stage and schedule, cut at the same blocks as ``pardist_pp``."""

    name: str
    title: str
    schedule: Any
    single: bool = False

    def run(self, settings: Settings, gate: PassesBeforeSteps) -> None:
        """See :class:`Candidate`."""
        dist.init_process_group("gloo", timeout=timedelta(minutes=10))
        rank, size = dist.get_rank(), dist.get_world_size()
        net = _gpt(settings)
        # All ranks of a pipeline train on the same samples.
        loader = make_loader(settings, rank=0, world_size=1)
        made, _ = _planned(net, next(iter(loader)), size)
        module = StageOfGPT(net, rank, _first_blocks(made))
        tied = [parameter for parameter in module.parameters() if parameter is net.embed.weight]
        psi = sum(parameter.numel() for parameter in net.parameters())
        del net
        stage = PipelineStage(module, rank, size, torch.device("cpu"))
        schedule = self.schedule(stage, NUM_MICROBATCHES, loss_fn=_loss)
        ends = dist.new_group([0, size - 1])
        optimizer = make_optimizer(module, settings)
        for tokens, targets in loader:
            gate.before_step(lambda: held_by(module, [optimizer], replicas=1) | {"num_parameters": psi})
            optimizer.zero_grad()
            losses: list[Tensor] = []
            if module.is_last:
                schedule.step(*([tokens] if module.is_first else []), target=targets, losses=losses)
            elif module.is_first:
                schedule.step(tokens)
            else:
                schedule.step()
            for parameter in tied if size > 1 else []:
                dist.all_reduce(parameter.grad, group=ends)
            optimizer.step()


@dataclass(frozen=True)
class PipelineEngineLoop:
    """Hand-written loop around the engine of ``pardist_pp``: the cost of the strategy without Lightning."""

    name: str = "pardist_pipeline"
    title: str = "pipeline engine, 1F1B, loop by hand"
    single: bool = False
    options: PipelineOptions = field(default_factory=lambda: PipelineOptions(num_microbatches=NUM_MICROBATCHES))

    def run(self, settings: Settings, gate: PassesBeforeSteps) -> None:
        """See :class:`Candidate`."""
        dist.init_process_group("gloo", timeout=timedelta(minutes=10))
        net = make_net(settings)
        loader = make_loader(settings, rank=0, world_size=1)
        made, step = _planned(net, next(iter(loader)), dist.get_world_size())
        engine = PipelineEngine(net, made, options=self.options)
        engine.free()
        optimizer = make_optimizer(net, settings)
        for batch in loader:
            gate.before_step(lambda: held_by(net, [optimizer], replicas=1))
            optimizer.zero_grad()
            engine.train_step(step, batch)
            optimizer.step()


def _gpt(settings: Settings) -> GPTLoss:
    net = make_net(settings)
    if not isinstance(net, GPTLoss):
        raise ValueError(f"model={settings.model!r} is not cut into stages by hand here. Use gpt.")
    return net


def _planned(net: nn.Module, batch: Any, num_stages: int) -> tuple[PipelinePlan, Any]:
    def step(microbatch: Any) -> Tensor:
        loss: Tensor = net(*microbatch)
        return loss

    recorded = record_step(net, step, split_batch(batch, NUM_MICROBATCHES)[0].value)
    return plan_stages(recorded, num_stages), step


def _first_blocks(made: PipelinePlan) -> tuple[int, ...]:
    """Return the index of the first block of every stage, followed by the number of blocks.

    Raises:
        ValueError: If the plan cuts anywhere but before a block.
    """
    names = [call.unit for call in made.trace.calls]
    blocks = [name for name in names if name.startswith("blocks.")]
    cuts = [names[bound] for bound in made.bounds[1:-1]]
    if not set(cuts) <= set(blocks):
        raise ValueError(f"The plan cuts before {cuts}, and not before blocks alone. Use a deeper or narrower model.")
    return (0, *(blocks.index(name) for name in cuts), len(blocks))


_ALL: dict[str, Candidate] = {
    candidate.name: candidate
    for candidate in (
        PipeliningLoop("pipelining_1f1b", "torch pipelining, 1F1B, 8 micro-batches, loop by hand", Schedule1F1B),
        PipeliningLoop("pipelining_gpipe", "torch pipelining, GPipe, 8 micro-batches, loop by hand", ScheduleGPipe),
        PipelineEngineLoop(),
    )
}


def names() -> list[str]:
    """Return the names of this family."""
    return list(_ALL)


def find(name: str) -> Candidate | None:
    """Return the candidate of this name, or None if it belongs to another family."""
    return _ALL.get(name)
