"""One gradient scale and one overflow decision for a whole job."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from lightning_pardist.engines.api import DataEngine


class JobWideScaling:
    """While attached, a gradient scaler unscales what this rank holds of the gradients, and all ranks skip alike.

    torch's scaler looks at ``param.grad``, which is a shard, or stands for slices that the engine keeps, and decides
    on each rank by itself: a rank whose shard overflowed would skip the step that the others take.

    Args:
        scaler: Of the precision plugin.
        engine: Of the data axis.
        group: All ranks of the job.
        device: This rank's.
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
        """Take over from the scaler. Not collective; from now on unscaling is, over the job."""
        if self.scaler.is_enabled() and self.scaler._scale is None:
            # It waits for its first loss, which this rank may not have in the first step.
            self.scaler._lazy_init_scale_growth_tracker(self.device)
        self.scaler.__dict__["_unscale_grads_"] = self._unscale

    def detach(self) -> None:
        """Give back to the scaler. Not collective."""
        self.scaler.__dict__.pop("_unscale_grads_", None)

    @torch.no_grad()
    def _unscale(self, optimizer: Optimizer, inv_scale: Tensor, found_inf: Tensor, *unused: Any) -> dict[Any, Tensor]:
        params = [param for group in optimizer.param_groups for param in group["params"]]
        by_kind: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
        for grad in self.engine.local_grads(params):
            by_kind.setdefault((grad.device, grad.dtype), []).append(grad)
        found = found_inf.to(self.device)
        for (device, _), grads in by_kind.items():
            here = found_inf.to(device, copy=True)
            torch._amp_foreach_non_finite_check_and_unscale_(grads, here, inv_scale.to(device))
            found = torch.maximum(found, here.to(self.device))
        self.before()
        dist.all_reduce(found, op=dist.ReduceOp.MAX, group=self.group)
        return {self.device: found}
