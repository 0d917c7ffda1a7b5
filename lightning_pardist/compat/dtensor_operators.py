"""DTensor operators that torch lacks or supports only partly, for callers outside of steps."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate

from lightning_pardist.compat.contract import Private

_LACKING = "torch.equal, detect_anomaly and numbers read from parameters of which ranks hold parts"
NAMES = (
    Private("torch.distributed.tensor.DTensor._op_dispatcher", _LACKING, "torch.library, once it takes DTensors"),
    Private("torch.distributed.tensor._dispatch.OpDispatcher._custom_op_handlers", _LACKING,
            "torch.library, once it takes DTensors"),
    Private("torch.ops.aten._is_any_true", _LACKING, "the operator that detect_anomaly calls"),
    Private("torch.ops.aten._is_all_true", _LACKING, "the operator that detect_anomaly calls"),
)  # fmt: skip

#: Pending reductions that are linear.
_SUMS = ("sum", "avg")
#: Number of runs that use the operators.
_users = 0


def complete_operators() -> None:
    """Register the DTensor operators of this file, until :func:`restore_operators` was called as often.

    - ``torch.equal`` for any two shapes and layouts: fine-tuning callbacks compare parameters by it. torch's own
      version raises an ``IndexError`` if the shapes differ, and reduces over all ranks of the world, while only the
      ranks of one tensor group may take part in the comparison.
    - The operators that ``detect_anomaly`` runs on every gradient, applied to this rank's shard. Not collective: a rank
      whose shard has a NaN stops, and the job with it.
    - A tensor's Python number (``float(p.norm())``, ``p.grad.abs().max().item()``), which torch takes from this rank's
      part of a pending reduction. Collective over the mesh of the tensor.
    - ``sum`` and ``mean`` of pending norms and maxima (``torch.stack([p.norm() for p in parameters]).sum()``), which
      torch adds up by rank before it completes them. Collective over the mesh of the tensor.
    """
    global _users
    _users += 1
    known = DTensor._op_dispatcher._custom_op_handlers
    for operator, handler in _handlers():
        known.setdefault(operator, handler)


def restore_operators() -> None:
    """Undo one call of :func:`complete_operators`."""
    global _users
    _users = max(_users - 1, 0)
    known = DTensor._op_dispatcher._custom_op_handlers
    for operator, handler in _handlers():
        if not _users and known.get(operator) is handler:
            del known[operator]


def _handlers() -> list[tuple[Any, Any]]:
    aten = torch.ops.aten
    return [
        (aten.equal.default, _equal),
        (aten._is_any_true.default, _on_own_part),
        (aten._is_all_true.default, _on_own_part),
        (aten._local_scalar_dense.default, _number),
        *((operator, _of_completed) for operator in (aten.sum.default, aten.sum.dim_IntList)),
        *((operator, _of_completed) for operator in (aten.mean.default, aten.mean.dim)),
    ]


def _on_own_part(op_call: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    result: Tensor = op_call(args[0]._local_tensor)
    return result


def _number(op_call: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    tensor = args[0]
    if all(placement.is_replicate() for placement in tensor.placements):
        return op_call(tensor._local_tensor)
    with torch.no_grad():
        return op_call(tensor.detach().full_tensor())


def _of_completed(op_call: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Complete the pending reductions of the input that are no sums, and run torch's own version."""
    tensor = args[0]
    placements = [Replicate() if _is_no_sum(each) else each for each in tensor.placements]
    if placements != list(tensor.placements):
        args = (tensor.redistribute(placements=placements), *args[1:])
    known = DTensor._op_dispatcher._custom_op_handlers
    handler = known.pop(op_call)
    try:
        return op_call(*args, **kwargs)
    finally:
        known[op_call] = handler


def _is_no_sum(placement: Placement) -> bool:
    # A pending norm is a kind of pending sum, of powers.
    return isinstance(placement, Partial) and (type(placement) is not Partial or placement.reduce_op not in _SUMS)


def _equal(op_call: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Compare two tensors. Collective over the mesh of the tensors if their shapes are equal."""
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
