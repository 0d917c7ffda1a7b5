"""Arithmetic over the gradients of one rank."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.optim import Optimizer


@torch.no_grad()
def sum_of_squares(grads: Sequence[Tensor], *, device: torch.device) -> Tensor:
    """Sum of squares of all elements, a scalar in fp32 or wider on ``device``."""
    if not grads:
        return torch.zeros((), device=device)
    widest = functools.reduce(torch.promote_types, (grad.dtype for grad in grads), torch.float32)
    norms = [torch.linalg.vector_norm(grad, dtype=torch.promote_types(grad.dtype, torch.float32)) for grad in grads]
    return torch.stack([norm.to(device, widest) for norm in norms]).square().sum()


@torch.no_grad()
def scale_(optimizer: Optimizer, factor: Tensor) -> None:
    """Multiply an optimizer's gradients by a scalar."""
    for grad in _grads(optimizer):
        grad.mul_(factor.to(grad.device, grad.dtype))


@torch.no_grad()
def clamp_(optimizer: Optimizer, limit: float) -> None:
    """Clamp every element of an optimizer's gradients to ``[-limit, limit]``."""
    for grad in _grads(optimizer):
        grad.clamp_(-limit, limit)


def _grads(optimizer: Optimizer) -> list[Tensor]:
    params = (param for group in optimizer.param_groups for param in group["params"])
    return [param.grad for param in params if param.grad is not None]
