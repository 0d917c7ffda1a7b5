"""Gradient norm and clipping over all axes of a job."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Sequence
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_pardist.engines.common.gradient_math import clamp_, scale_
from lightning_pardist.engines.data_engine import DataEngine


class NormAxis(Protocol):
    """Interface of a mesh axis other than the data axis, for the gradient norm."""

    def counts(self, param: nn.Parameter) -> bool:
        """Return whether this rank counts a parameter's gradient."""
        ...

    def reduce_over_axis(self, value: Tensor, op: dist.ReduceOp.RedOpType) -> None:
        """Reduce a tensor in place over the axis. Collective over it."""
        ...


@torch.no_grad()
def clip_grad_norm(
    engine: DataEngine,
    params: Iterable[nn.Parameter],
    max_norm: float,
    norm_type: float = 2.0,
    *,
    axes: Sequence[NormAxis] = (),
    error_if_nonfinite: bool = False,
) -> Tensor:
    """Scale gradients so that their norm over the whole job is at most ``max_norm``. Collective over all axes.

    The norm is computed from local sums of powers and one reduction per axis; gradients replicated on several ranks are
    counted once.

    Args:
        engine: Engine of the data axis.
        params: Parameters of the module, the same on all ranks.
        max_norm: Largest norm allowed.
        norm_type: The p of the p-norm, ``inf`` included.
        axes: The tensor and pipeline axes, as far as they exist.
        error_if_nonfinite: Raise on every rank if the norm is not finite.

    Returns:
        The norm before clipping, a scalar equal on every rank.

    Raises:
        RuntimeError: If the norm is not finite and ``error_if_nonfinite`` is set.
    """
    params = list(params)
    norm = total_norm(engine, params, norm_type, axes=axes, among=params, error_if_nonfinite=error_if_nonfinite)
    # As torch.nn.utils.clip_grad_norm_ does.
    factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    scale_(engine.local_grads(params), factor)
    return norm


@torch.no_grad()
def total_norm(
    engine: DataEngine,
    params: Sequence[nn.Parameter],
    norm_type: float = 2.0,
    *,
    axes: Sequence[NormAxis] = (),
    among: Iterable[nn.Parameter],
    error_if_nonfinite: bool = False,
) -> Tensor:
    """Return the norm of gradients over the whole job. Collective over all axes.

    Args:
        engine: Engine of the data axis.
        params: The parameters in question; those that this rank does not hold may be left out.
        norm_type: The p of the p-norm, ``inf`` included.
        axes: The tensor and pipeline axes, as far as they exist.
        among: Parameters that determine the dtype of the norm: the same on all ranks, including all of ``params``.
        error_if_nonfinite: Raise on every rank if the norm is not finite.

    Returns:
        A scalar, equal on every rank.

    Raises:
        RuntimeError: If the norm is not finite and ``error_if_nonfinite`` is set.
    """
    norm = _norms(engine, [params], norm_type, axes, among)[0]
    if error_if_nonfinite and not torch.isfinite(norm):
        raise RuntimeError(f"The gradient norm of order {norm_type} is {norm.item()}, so gradients cannot be clipped.")
    return norm


@torch.no_grad()
def grad_norms(
    engine: DataEngine,
    params: Sequence[nn.Parameter],
    norm_type: float = 2.0,
    *,
    axes: Sequence[NormAxis] = (),
    world: dist.ProcessGroup,
) -> list[Tensor | None]:
    """Return the norm of each parameter's gradient over the whole job. Collective over all axes.

    Args:
        engine: Engine of the data axis.
        params: Parameters of the module, the same on all ranks.
        norm_type: The p of the p-norm, ``inf`` included.
        axes: The tensor and pipeline axes, as far as they exist.
        world: Process group of all ranks.

    Returns:
        For each parameter a scalar, equal on every rank, or None if it has no gradient on any rank.
    """
    norms = _norms(engine, [[param] for param in params], norm_type, axes, params)
    has_grad = torch.tensor([bool(engine.local_grads([param])) for param in params], dtype=torch.uint8)
    has_grad = has_grad.to(norms.device)
    dist.all_reduce(has_grad, op=dist.ReduceOp.MAX, group=world)
    return [norm if has else None for norm, has in zip(norms, has_grad.tolist(), strict=True)]


def _norms(
    engine: DataEngine,
    sets: Sequence[Sequence[nn.Parameter]],
    norm_type: float,
    axes: Sequence[NormAxis],
    among: Iterable[nn.Parameter],
) -> Tensor:
    """Return the norm of each set of gradients. Collective over all axes."""

    def counts(param: nn.Parameter) -> bool:
        return all(axis.counts(param) for axis in axes)

    # A rank may hold gradients of lower precision only; the dtype has to match across ranks.
    widest = functools.reduce(torch.promote_types, (param.dtype.to_real() for param in among), torch.float32)
    powers = torch.stack([engine.grad_power(params, norm_type, counts if axes else None).to(widest) for params in sets])
    largest = math.isinf(norm_type)
    for axis in axes:
        axis.reduce_over_axis(powers, dist.ReduceOp.MAX if largest else dist.ReduceOp.SUM)
    return powers if largest else powers.pow(1.0 / norm_type)


@torch.no_grad()
def clip_grad_value(engine: DataEngine, params: Iterable[nn.Parameter], limit: float) -> None:
    """Clamp every element of the gradients to ``[-limit, limit]``. Not collective."""
    clamp_(engine.local_grads(params), limit)
