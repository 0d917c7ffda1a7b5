"""``torch.equal`` of parameters, which callbacks use to tell them apart."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor


def compare_split_tensors() -> None:
    """Have ``torch.equal`` work on DTensors of any two shapes and layouts. Once per process; more calls do nothing.

    torch's own rule fails with an ``IndexError`` where the shapes differ, and reduces over all ranks of the world,
    which is one too many where only the ranks of one tensor group compare.
    """
    DTensor._op_dispatcher._custom_op_handlers.setdefault(torch.ops.aten.equal.default, _equal)


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
