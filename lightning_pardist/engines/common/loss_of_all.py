"""Combine the ranks' losses into the loss of a single process, for optimizers whose step depends on the loss value."""

from __future__ import annotations

import math
from dataclasses import astuple, dataclass

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True)
class OwnLoss:
    """Weight of one rank's loss in the combined loss.

    Attributes:
        weight: Weight of a mean among those of other ranks; None for a sum.
        samples: Number of samples in the rank's batch.
        agreed: Whether the losses of all ranks consist of the same terms; equal on all ranks.
        added: Number contained in the weight that is added once for all ranks.
    """

    weight: Tensor | float | None
    samples: float
    agreed: Tensor | bool = True
    added: float = 0.0


@dataclass(frozen=True)
class _Sums:
    """Fields of the reduced message.

    Over ranks with a loss that counts: means weighted by weight and by samples with the sums of these weights,
    unweighted means, losses that are sums, and the number of ranks with a mean and with a sum. Also the number of ranks
    without a loss whose batch counts, and the losses of filler batches that do not count, with their number.
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
    """Combine the losses of all ranks as their gradients are combined. Collective over ``group``: one small all-reduce.

    The result depends only on reduced numbers, so it is the same on all ranks. Means are averaged by weight, or by
    samples if the ranks' losses consist of different terms. Sums are added up. If a rank had no loss, all ranks are
    weighted equally, that rank with a loss of zero.

    Args:
        value: This rank's loss, of one element; None if its step had none.
        own: Weight of this rank's loss.
        counts: Whether the rank's batch counts.
        group: Ranks whose losses are combined; None for this rank alone.
        device: Device of the message.

    Returns:
        The combined loss; None if no rank had a loss.
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
        weights = total.weights + own.added
        return total.by_weight / weights if weights else total.means / total.num_means
    return (total.by_samples / total.samples if total.samples else 0.0) + total.sums


def _sums(loss: Tensor | None, own: OwnLoss, counts: bool) -> _Sums:
    if loss is None:
        return _Sums(num_without=float(counts))
    value = float(loss.detach())
    if own.weight is not None and float(own.weight) == 0 and not math.isfinite(value):
        # A mean over no items is NaN; it has zero weight.
        value = 0.0
    if not counts:
        return _Sums(fillers=value, num_fillers=1.0)
    if own.weight is None:
        # Its samples count towards the step's samples as well.
        return _Sums(sums=value, samples=own.samples, num_sums=1.0)
    weight = float(own.weight)
    return _Sums(weight * value, weight - own.added, own.samples * value, own.samples, value, num_means=1.0)
