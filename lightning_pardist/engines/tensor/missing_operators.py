"""Operators of DTensors that torch lacks, or has for some tensors only, and that callers outside of steps use."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor


def complete_operators() -> None:
    """Have DTensors know the operators of this file. Once per process; more calls do nothing.

    - ``torch.equal`` of any two shapes and layouts: fine-tuning callbacks tell parameters apart by it. torch's own
      fails with an ``IndexError`` where the shapes differ, and reduces over all ranks of the world, where only those of
      one tensor group may compare.
    - What ``detect_anomaly`` asks of every gradient: whether this rank's part has a NaN. Not collective: the rank that
      has one stops, and the job with it.
    """
    known = DTensor._op_dispatcher._custom_op_handlers
    known.setdefault(torch.ops.aten.equal.default, _equal)
    for operator in (torch.ops.aten._is_any_true.default, torch.ops.aten._is_all_true.default):
        known.setdefault(operator, _on_own_part)


def _on_own_part(op_call: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    result: Tensor = op_call(args[0]._local_tensor)
    return result


def _equal(op_call: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Collective over the mesh of the tensors if their shapes are the same."""
    one, other = args
    if one.shape != other.shape:
        return False
    if isinstance(one, DTensor) and isinstance(other, DTensor) and _alike(one, other):
        same = torch.tensor(int(torch.equal(one._local_tensor, other._local_tensor)), device=one.device)
        for axis, placement in enumerate(one.placements):
            if not placement.is_replicate():
                dist.all_reduce(same, op=dist.ReduceOp.MIN, group=one.device_mesh.get_group(axis))
        return bool(same.item())
    return torch.equal(_whole(one), _whole(other))


def _alike(one: DTensor, other: DTensor) -> bool:
    return one.device_mesh == other.device_mesh and one.placements == other.placements


def _whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
