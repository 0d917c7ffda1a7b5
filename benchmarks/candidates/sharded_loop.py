"""Hand-written sharded training: torch's ``fully_shard``, and DeepSpeed if it is installed."""

from __future__ import annotations

import importlib.util
import os
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

from benchmarks.candidates.protocol import Candidate, PassesBeforeSteps, held_by
from benchmarks.devices import autocast, init_group, moved
from benchmarks.settings import Settings
from benchmarks.workloads import GPTLoss, batch_size_of, make_loader, make_net, make_optimizer


@dataclass(frozen=True)
class FullyShardLoop:
    """Loop of torch's FSDP2 tutorial: shard every block, then the root.

    Attributes:
        reshard_after_forward: torch's option; if False, parameters stay gathered from forward to backward.
    """

    name: str
    title: str
    reshard_after_forward: bool = True
    single: bool = False

    def run(self, settings: Settings, gate: PassesBeforeSteps) -> None:
        """See :class:`Candidate`."""
        device = init_group(settings)
        net = make_net(settings).to(device)
        for block in _blocks(net):
            fully_shard(block, reshard_after_forward=self.reshard_after_forward)
        fully_shard(net, reshard_after_forward=self.reshard_after_forward)
        optimizer = make_optimizer(net, settings)
        for batch in make_loader(settings, rank=dist.get_rank(), world_size=dist.get_world_size()):
            gate.before_step(lambda: held_by(net, [optimizer]))
            optimizer.zero_grad()
            with autocast(settings, device):
                loss = net(*moved(batch, device))
            loss.backward()
            optimizer.step()
            gate.took(loss)


@dataclass(frozen=True)
class DeepSpeedLoop:
    """DeepSpeed's engine in fp32 with torch's AdamW, or with its own CPU Adam kernel.

    Attributes:
        zero_stage: 1, 2 or 3.
        own_adam: Whether DeepSpeed's CPU Adam updates; it is compiled at the first start and meant for offload.
    """

    name: str
    title: str
    zero_stage: int
    own_adam: bool = False
    single: bool = False

    def run(self, settings: Settings, gate: PassesBeforeSteps) -> None:
        """See :class:`Candidate`."""
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
        import deepspeed

        deepspeed.init_distributed(dist_backend="gloo", timeout=timedelta(minutes=10))
        net = make_net(settings)
        config: dict[str, Any] = {
            "train_micro_batch_size_per_gpu": batch_size_of(settings),
            "zero_optimization": {"stage": self.zero_stage},
            "zero_force_ds_cpu_optimizer": False,
            "zero_allow_untested_optimizer": True,
            "steps_per_print": 10**9,
        }
        if self.own_adam:
            from deepspeed.ops.adam import DeepSpeedCPUAdam

            optimizer: Any = DeepSpeedCPUAdam(net.parameters(), lr=1e-3, weight_decay=0.01)
        else:
            optimizer = make_optimizer(net, settings)
        numel = sum(parameter.numel() for parameter in net.parameters())
        engine, *_ = deepspeed.initialize(model=net, optimizer=optimizer, config=config)
        # Its model states are in buffers of its own: only peak memory is compared.
        held = {"num_parameters": numel, "total": 0}
        for batch in make_loader(settings, rank=dist.get_rank(), world_size=dist.get_world_size()):
            gate.before_step(lambda: held)
            engine.backward(engine(*batch))
            engine.step()


def _blocks(net: nn.Module) -> list[nn.Module]:
    """Return the modules that torch's tutorial shards one by one: transformer blocks, or linear layers."""
    if isinstance(net, GPTLoss):
        return list(net.blocks)
    return [child for child in net.modules() if isinstance(child, nn.Linear)]


_FULLY_SHARD = (
    FullyShardLoop("torch_fully_shard", "fully_shard, loop by hand"),
    FullyShardLoop(
        "torch_fully_shard_kept", "fully_shard(reshard_after_forward=False), loop by hand", reshard_after_forward=False
    ),
)
_DEEPSPEED = tuple(
    DeepSpeedLoop(
        f"deepspeed_zero{stage}{'_cpu_adam' if own_adam else ''}",
        f"DeepSpeed, stage {stage}{', its CPU Adam' if own_adam else ''}, loop by hand",
        stage,
        own_adam,
    )
    for stage in (1, 2, 3)
    for own_adam in (False, True)
)
_ALL: dict[str, Candidate] = {candidate.name: candidate for candidate in _FULLY_SHARD}
if importlib.util.find_spec("deepspeed") is not None:
    _ALL |= {candidate.name: candidate for candidate in _DEEPSPEED}


def names() -> list[str]:
    """Return the names of this family."""
    return list(_ALL)


def find(name: str) -> Candidate | None:
    """Return the candidate of this name, or None if it belongs to another family."""
    return _ALL.get(name)
