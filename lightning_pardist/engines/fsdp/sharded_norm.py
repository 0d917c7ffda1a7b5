"""Global norm of sharded gradients."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from lightning_pardist.engines.common.gradient_math import sum_of_powers
from lightning_pardist.local_tensors import sharded_axes


def sharded_grad_norm(parameters: Iterable[torch.Tensor], norm_type: float = 2.0) -> torch.Tensor:
    """Return the norm of all gradients as one vector. Collective over the parameters' data axes, one reduction each.

    Every rank sums the powers of its shards; the sums are added over sharded axes, and replicated copies are counted
    once. Gradients that are split over tensor ranks are summed over the data axes only.

    Args:
        parameters: ``DTensor`` or plain parameters, each once; plain ones are the same on all ranks.
        norm_type: The p of the p-norm, ``inf`` included.

    Returns:
        0-dim tensor in fp32, or fp64 if any parameter is, the same on every rank; zero if nothing has a gradient.
    """
    largest = math.isinf(norm_type)
    parameters = list(parameters)
    # From the parameters rather than the gradients, which may not exist on all ranks.
    widest = functools.reduce(torch.promote_types, (p.dtype.to_real() for p in parameters), torch.float32)
    parts: dict[tuple[Any, ...], list[torch.Tensor]] = {}
    meshes: dict[tuple[Any, ...], list[dist.ProcessGroup]] = {}
    device = torch.device("cpu")
    for parameter in parameters:
        gradient = parameter.grad
        key: tuple[Any, ...] = ()
        if isinstance(parameter, DTensor):
            # Every rank takes part, even if its shard is empty.
            axes = tuple(sharded_axes(parameter))
            key = (parameter.device_mesh, axes)
            meshes.setdefault(key, [parameter.device_mesh.get_group(axis) for axis in axes])
            device = parameter.to_local().device
        found = parts.setdefault(key, [])
        if gradient is None:
            continue
        local = gradient.to_local() if isinstance(gradient, DTensor) else gradient
        device = local.device
        if local.numel():
            found.append(local.detach())
    total = torch.zeros((), dtype=widest, device=device)
    for key, gradients in parts.items():
        value = sum_of_powers(gradients, norm_type, device=device).to(widest)
        for group in meshes.get(key, []):
            dist.all_reduce(value, op=dist.ReduceOp.MAX if largest else dist.ReduceOp.SUM, group=group)
        total = torch.maximum(total, value) if largest else total + value
    return total if largest else total.pow(1.0 / norm_type)


def local_gradients(parameters: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Return this rank's parts of the gradients, as plain tensors that share their memory.

    Args:
        parameters: ``DTensor`` or plain parameters; those without a gradient are left out.
    """
    found = []
    for parameter in parameters:
        if parameter.grad is not None:
            gradient = parameter.grad.detach()
            found.append(gradient.to_local() if isinstance(gradient, DTensor) else gradient)
    return found
