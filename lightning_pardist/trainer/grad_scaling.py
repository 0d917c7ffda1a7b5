"""Gradient scaling (``GradScaler``) with the same scale and overflow decision on all ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from lightning_pardist.compat.optimizers import initialize_scaler, replace_unscale, unscale_
from lightning_pardist.engines.data_engine import DataEngine


class JobWideScaling:
    """Makes a gradient scaler unscale local gradient shards and skip optimizer steps on all ranks together.

    torch's scaler reads ``param.grad``, which is a shard or a stand-in for slices that the engine holds, and detects
    overflow on each rank separately: a rank whose shard overflowed would skip a step that the others run.

    Args:
        scaler: Scaler of the precision plugin.
        engine: Engine of the data axis.
        group: Process group of all ranks of the job.
        device: Device of this rank.
        before: Called before the collective of each step.
    """

    def __init__(
        self,
        scaler: torch.amp.GradScaler,
        engine: DataEngine,
        *,
        group: dist.ProcessGroup,
        device: torch.device,
        before: Callable[[], None],
    ) -> None:
        self.scaler = scaler
        self.engine = engine
        self.group = group
        self.device = device
        self.before = before

    def attach(self) -> None:
        """Replace the scaler's unscaling, which becomes collective over ``group``. Not collective itself."""
        # The scaler is initialized lazily by its first loss, and this rank may have none in the first step.
        initialize_scaler(self.scaler, self.device)
        replace_unscale(self.scaler, self._unscale)

    def detach(self) -> None:
        """Restore the scaler's unscaling. Not collective."""
        replace_unscale(self.scaler, None)

    @torch.no_grad()
    def _unscale(self, optimizer: Optimizer, inv_scale: Tensor, found_inf: Tensor, *unused: Any) -> dict[Any, Tensor]:
        params = [param for group in optimizer.param_groups for param in group["params"]]
        by_kind: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
        for grad in self.engine.local_grads(params):
            by_kind.setdefault((grad.device, grad.dtype), []).append(grad)
        found = found_inf.to(self.device)
        for (device, _), grads in by_kind.items():
            here = found_inf.to(device, copy=True)
            unscale_(grads, here, inv_scale.to(device))
            found = torch.maximum(found, here.to(self.device))
        self.before()
        dist.all_reduce(found, op=dist.ReduceOp.MAX, group=self.group)
        return {self.device: found}
