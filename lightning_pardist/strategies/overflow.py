"""One overflow decision for all ranks: a gradient scaler sees the gradients of its own rank only."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.amp import GradScaler
from torch.optim import Optimizer


def share_overflow(
    scaler: GradScaler,
    *,
    group: dist.ProcessGroup,
    slices: Callable[[Optimizer], AbstractContextManager[None]],
    before: Callable[[], None],
) -> Callable[[], None]:
    """Let a scaler skip a step, and lower its scale, where any rank's part of the gradients is not finite.

    Each optimizer step becomes collective over ``group``, by one number. So all ranks keep the same scale.

    Args:
        scaler: This rank's; all ranks begin with the same scale.
        group: Ranks that hold parts of the same gradients.
        slices: Inside, an optimizer's groups hold the parameters whose gradients this rank keeps.
        before: Called before each collective.

    Returns:
        What undoes it.
    """
    unscale: Callable[..., dict[torch.device, Tensor]] = scaler._unscale_grads_

    def unscale_everywhere(
        optimizer: Optimizer, inv_scale: Tensor, found_inf: Tensor, *rest: Any
    ) -> dict[torch.device, Tensor]:
        with slices(optimizer):
            found = unscale(optimizer, inv_scale, found_inf, *rest)
        total = torch.stack([value.to(found_inf.device) for value in (found_inf, *found.values())]).amax()
        if group.size() > 1:
            before()
            dist.all_reduce(total, op=dist.ReduceOp.MAX, group=group)
        # A rank without gradients of its own decides as well.
        return {total.device: total}

    scaler.__dict__["_unscale_grads_"] = unscale_everywhere
    return lambda: scaler.__dict__.pop("_unscale_grads_", None)
