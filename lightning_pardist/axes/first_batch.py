"""What the first of the ranks that work on one batch was given, on all of them."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_pardist.engines.pipeline.nested import map_leaves


def of_first_rank(value: Any, *, group: dist.ProcessGroup, device: torch.device) -> Any:
    """The first rank's value, with its tensors on this rank's device. Collective over ``group``.

    Args:
        value: A batch, or several: anything that holds tensors, and can be pickled.
        group: Ranks that use the same.
        device: Of this rank's tensors.
    """
    box = [map_leaves(_to_host, value) if group.rank() == 0 else None]
    dist.broadcast_object_list(box, group_src=0, group=group)
    return map_leaves(lambda leaf: leaf.to(device) if isinstance(leaf, Tensor) else leaf, box[0])


def _to_host(value: Any) -> Any:
    return value.detach().cpu() if isinstance(value, Tensor) else value
