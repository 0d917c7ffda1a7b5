"""Collectives with the meaning that Lightning gives them, each over a group that is named."""

from __future__ import annotations

from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.nn.functional import all_gather as differentiable_all_gather

_OPS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN, "product": dist.ReduceOp.PRODUCT}


def reduce(tensor: Tensor, *, group: dist.ProcessGroup, op: dist.ReduceOp | str | None = "mean") -> Tensor:
    """Combine a tensor over ``group``; every rank receives the result. Collective over ``group``.

    Args:
        tensor: Same shape on every rank; it is left as it is.
        group: Who takes part.
        op: ``"mean"``/``"avg"``, ``"sum"``, ``"max"``, ``"min"``, ``"product"`` in any case, or a ``ReduceOp``;
            None means sum, as in Lightning.

    Returns:
        A new tensor of the same shape and dtype (a mean of integers is rounded towards zero).

    Raises:
        ValueError: If ``op`` is a name that is not known.
    """
    result = tensor.clone()
    if isinstance(op, str):
        name = op.lower()
        if name in ("mean", "avg"):
            dist.all_reduce(result, op=dist.ReduceOp.SUM, group=group)
            mean = result / group.size()
            return mean if mean.dtype == tensor.dtype else mean.to(tensor.dtype)
        if name not in _OPS:
            raise ValueError(f"reduce_op={op!r} is unknown. Use mean, {', '.join(_OPS)} or a torch ReduceOp.")
        dist.all_reduce(result, op=_OPS[name], group=group)
    else:
        dist.all_reduce(result, op=dist.ReduceOp.SUM if op is None else op, group=group)
    return result


def all_gather(tensor: Tensor, *, group: dist.ProcessGroup, sync_grads: bool = False) -> Tensor:
    """Stack every rank's tensor. Collective over ``group``.

    Args:
        tensor: Same shape ``[...]`` on every rank.
        group: Who takes part.
        sync_grads: Whether gradients flow back to the ranks that the parts came from.

    Returns:
        Shape ``[group size, ...]``.
    """
    with nullcontext() if sync_grads else torch.no_grad():
        return torch.stack(differentiable_all_gather(tensor.contiguous(), group))
