"""Norms, scaling and clamping of one rank's gradients."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from lightning_pardist.compat.optimizers import foreach_clamp_, foreach_multiply_, foreach_norms
from lightning_pardist.engines.common.devices import has_generator

#: Returns whether this rank counts a parameter of the module.
Counts = Callable[[nn.Parameter], bool]


@torch.no_grad()
def sum_of_powers(grads: Sequence[Tensor], norm_type: float, *, device: torch.device) -> Tensor:
    """Return the sum of ``|g| ** norm_type`` over all elements, or the largest ``|g|`` if ``norm_type`` is ``inf``.

    Args:
        grads: Plain tensors of any shapes and dtypes.
        norm_type: The p of the p-norm.
        device: Device of the result.

    Returns:
        A scalar in fp32 or wider; zero without gradients.
    """
    grads = [grad for grad in grads if grad.numel()]
    if not grads:
        return torch.zeros((), device=device)
    widest = functools.reduce(torch.promote_types, (grad.dtype.to_real() for grad in grads), torch.float32)
    # One copy per dtype and device: each copy synchronizes with the device if gradients are offloaded to the host.
    stacked = torch.cat([torch.stack(norms).to(device, widest) for norms in norms_of(grads, norm_type)])
    return stacked.max() if math.isinf(norm_type) else stacked.pow(norm_type).sum()


def norms_of(grads: Sequence[Tensor], norm_type: float) -> list[list[Tensor]]:
    """Return the norms of non-empty tensors, grouped by device and dtype, in fp32 or wider."""
    found: list[list[Tensor]] = []
    for members in by_kind(grads):
        wide = torch.promote_types(members[0].dtype, torch.float32)
        if use_foreach(members):
            found.append(foreach_norms(members, norm_type, wide))
        else:
            found.append([torch.linalg.vector_norm(grad, norm_type, dtype=wide) for grad in members])
    return found


def scale_(grads: Sequence[Tensor], factor: Tensor) -> None:
    """Multiply tensors in place by a scalar tensor."""
    for members in by_kind(grads):
        own = factor.to(members[0].device, members[0].dtype)
        if use_foreach(members):
            foreach_multiply_(members, own)
        else:
            for grad in members:
                grad.mul_(own)


def clamp_(grads: Sequence[Tensor], limit: float) -> None:
    """Clamp all elements of tensors in place to ``[-limit, limit]``."""
    for members in by_kind(grads):
        if use_foreach(members):
            foreach_clamp_(members, limit)
        else:
            for grad in members:
                grad.clamp_(-limit, limit)


def by_kind(grads: Sequence[Tensor]) -> list[list[Tensor]]:
    """Group tensors by device and dtype."""
    found: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for grad in grads:
        found.setdefault((grad.device, grad.dtype), []).append(grad)
    return list(found.values())


def use_foreach(members: Sequence[Tensor]) -> bool:
    """Return whether to use multi-tensor kernels: they save kernel launches on a device, and nothing on the host."""
    return has_generator(members[0].device) and not members[0].is_complex()
