"""Arithmetic over one rank's gradients."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

#: Whether a parameter of the module is counted on this rank.
Counts = Callable[[nn.Parameter], bool]


@torch.no_grad()
def sum_of_powers(grads: Sequence[Tensor], norm_type: float, *, device: torch.device) -> Tensor:
    """Sum of ``|g| ** norm_type`` over all elements, or the largest ``|g|`` if that is ``inf``.

    Args:
        grads: Ordinary tensors of any shapes and dtypes.
        norm_type: The p of the p-norm.
        device: Of the result.

    Returns:
        A scalar in fp32 or wider; zero without gradients.
    """
    grads = [grad for grad in grads if grad.numel()]
    if not grads:
        return torch.zeros((), device=device)
    widest = functools.reduce(torch.promote_types, (grad.dtype.to_real() for grad in grads), torch.float32)
    norms = [
        torch.linalg.vector_norm(grad, norm_type, dtype=torch.promote_types(grad.dtype, torch.float32))
        for grad in grads
    ]
    stacked = torch.stack([norm.to(device, widest) for norm in norms])
    return stacked.max() if math.isinf(norm_type) else stacked.pow(norm_type).sum()
