"""The loss that one process has where each rank has that of its samples, for optimizers that decide by its value."""

from __future__ import annotations

import math
from dataclasses import astuple, dataclass

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True)
class OwnLoss:
    """What is known of one rank's loss beside its value.

    Attributes:
        weight: What it is multiplied with among those of other ranks; None for a sum.
        samples: In the rank's batch.
        agreed: Whether the losses of all ranks consist of the same terms; equal on all ranks.
    """

    weight: Tensor | float | None
    samples: float
    agreed: Tensor | bool = True


@dataclass(frozen=True)
class _Sums:
    """Of ranks with a loss that counts: means by weight and by samples, what these are divided by, means as they are,
    losses that are sums, and how many ranks have either; ranks whose batch counts and that have no loss; the losses of
    batches that do not count, and how many.
    """

    by_weight: float = 0.0
    weights: float = 0.0
    by_samples: float = 0.0
    samples: float = 0.0
    means: float = 0.0
    sums: float = 0.0
    num_means: float = 0.0
    num_sums: float = 0.0
    num_without: float = 0.0
    fillers: float = 0.0
    num_fillers: float = 0.0


def loss_of_all(
    value: Tensor | None, own: OwnLoss, *, counts: bool, group: dist.ProcessGroup | None, device: torch.device
) -> float | None:
    """Put the losses of all ranks together, as their gradients are. Collective over ``group``: one small reduction.

    Everything is decided by what the ranks have said together, so that all come to the same number: means go by their
    weights, or by samples where ranks' losses differ in kind, sums add up, and where a rank had no loss all count
    alike, it with a loss of zero.

    Args:
        value: This rank's loss, of one element; None if its step had none.
        own: What is known of it.
        counts: Whether the rank's batch counts.
        group: Ranks whose losses make up that of the step; None if this one is alone.
        device: Of the message.

    Returns:
        None if no rank had a loss.
    """
    message = torch.tensor(astuple(_sums(value, own, counts)), dtype=torch.float64, device=device)
    if group is not None:
        dist.all_reduce(message, group=group)
    total = _Sums(*message.tolist())
    if not total.num_means + total.num_sums:
        return total.fillers / total.num_fillers if total.num_fillers else None
    if total.num_without:
        return total.means / (1 if group is None else group.size()) + total.sums
    if bool(own.agreed) and not total.num_sums:
        return total.by_weight / total.weights if total.weights else total.means / total.num_means
    return (total.by_samples / total.samples if total.samples else 0.0) + total.sums


def _sums(loss: Tensor | None, own: OwnLoss, counts: bool) -> _Sums:
    if loss is None:
        return _Sums(num_without=float(counts))
    value = float(loss.detach())
    if own.weight is not None and float(own.weight) == 0 and not math.isfinite(value):
        # A mean of nothing is no number, and counts nothing.
        value = 0.0
    if not counts:
        return _Sums(fillers=value, num_fillers=1.0)
    if own.weight is None:
        # Its samples are those of the step as well.
        return _Sums(sums=value, samples=own.samples, num_sums=1.0)
    weight = float(own.weight)
    return _Sums(weight * value, weight, own.samples * value, own.samples, value, num_means=1.0)
