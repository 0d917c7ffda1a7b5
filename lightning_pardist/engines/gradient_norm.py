"""The norm of all gradients of a job, whatever axes they are spread over."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_pardist.engines.api import DataEngine


class NormAxis(Protocol):
    """A mesh axis beside the data axis, as far as the norm is concerned."""

    def counts(self, param: nn.Parameter) -> bool:
        """Whether this rank counts a parameter's gradient."""
        ...

    def sum_over_axis(self, value: Tensor) -> None:
        """Add up a tensor in place over the axis. Collective over it."""
        ...


@torch.no_grad()
def clip_grad_norm(
    engine: DataEngine, optimizer: Optimizer, max_norm: float, *, axes: Sequence[NormAxis] = ()
) -> Tensor:
    """Scale an optimizer's gradients so that their global norm is at most ``max_norm``. Collective over all axes.

    Args:
        engine: Of the data axis.
        optimizer: One of the engine's.
        max_norm: Largest norm allowed.
        axes: Tensor and pipeline axes, of those that there are.

    Returns:
        The norm before, a scalar equal on every rank. Local sums of squares, one reduction an axis; what several ranks
        hold alike is counted once.
    """
    counts: Callable[[nn.Parameter], bool] | None = None
    if axes:

        def counts(param: nn.Parameter) -> bool:
            return all(axis.counts(param) for axis in axes)

    total = engine.squared_grad_norm(optimizer, counts)
    for axis in axes:
        axis.sum_over_axis(total)
    norm = total.sqrt()
    # As torch.nn.utils.clip_grad_norm_ does.
    engine.scale_grads(optimizer, (max_norm / (norm + 1e-6)).clamp(max=1.0))
    return norm
