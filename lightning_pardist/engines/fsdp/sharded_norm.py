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
    """Norm of all gradients as one vector. Collective over the data axes of the parameters, one reduction each.

    Every rank sums the powers of its shards; sharded axes are added up, replicated copies counted once. What is split
    over tensor ranks is added up over the data axes alone.

    Args:
        parameters: ``DTensor`` or ordinary parameters, each once; ordinary ones are the same on all ranks.
        norm_type: The p of the p-norm, ``inf`` included.

    Returns:
        0-dim tensor in fp32, or fp64 if any parameter is, the same on every rank; zero if nothing has a gradient.
    """
    largest = math.isinf(norm_type)
    parameters = list(parameters)
    # Of the parameters and not of the gradients, which ranks may not all have.
    widest = functools.reduce(torch.promote_types, (p.dtype.to_real() for p in parameters), torch.float32)
    parts: dict[tuple[Any, ...], list[torch.Tensor]] = {}
    meshes: dict[tuple[Any, ...], list[dist.ProcessGroup]] = {}
    device = torch.device("cpu")
    for parameter in parameters:
        gradient = parameter.grad
        key: tuple[Any, ...] = ()
        if isinstance(parameter, DTensor):
            # Every rank takes part, also one whose shard is empty.
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
    """This rank's parts of the gradients, as ordinary tensors that share their memory.

    Args:
        parameters: ``DTensor`` or ordinary parameters; those without a gradient are left out.
    """
    found = []
    for parameter in parameters:
        if parameter.grad is not None:
            gradient = parameter.grad.detach()
            found.append(gradient.to_local() if isinstance(gradient, DTensor) else gradient)
    return found
