"""Layout of a tensor over the tensor ranks: the sharded dim, and its number of segments.

[Note: segments] A fused projection computes q, k and v with one weight of shape ``[3 * C, C]``, and user code takes
its output apart with ``split(C, dim=2)``. Split into plain blocks, rank 0 of 2 would hold all of q and half of k, and
the split would need a gather. With ``segments=3`` every third of the dim is split by itself: rank 0 holds the first
half of q, of k and of v, one after the other, and the user's split needs nothing. torch's placement for it is
``StridedShard``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from lightning_pardist.compat.dtensor import StridedShard


@dataclass(frozen=True)
class Layout:
    """One dim of a tensor split over the tensor ranks; ``None`` in its place means the whole tensor on every rank.

    Attributes:
        dim: The split dim, counted from the front.
        segments: Equal runs of the dim, each of which is split by itself.
    """

    dim: int
    segments: int = 1

    def local_shape(self, shape: Sequence[int], size: int) -> tuple[int, ...]:
        """Shape of one rank's part of a tensor of global ``shape`` on ``size`` ranks."""
        local = list(shape)
        local[self.dim] //= size
        return tuple(local)

    def global_shape(self, local_shape: Sequence[int], size: int) -> tuple[int, ...]:
        """Shape of the whole tensor whose parts on ``size`` ranks have ``local_shape``."""
        whole = list(local_shape)
        whole[self.dim] *= size
        return tuple(whole)

    def divides(self, shape: Sequence[int], size: int) -> bool:
        """Whether ``size`` equal parts of a tensor of global ``shape`` exist."""
        extent = shape[self.dim]
        return extent > 0 and extent % (self.segments * size) == 0

    def take(self, whole: Tensor, rank: int, size: int) -> Tensor:
        """This rank's part of a whole tensor: a view for one segment, a copy for several."""
        if self.segments == 1:
            step = whole.shape[self.dim] // size
            return whole.narrow(self.dim, rank * step, step)
        parts: Tensor = whole.unflatten(self.dim, (self.segments, -1))
        step = parts.shape[self.dim + 1] // size
        part: Tensor = parts.narrow(self.dim + 1, rank * step, step).flatten(self.dim, self.dim + 1)
        return part

    def join(self, parts: Sequence[Tensor]) -> Tensor:
        """The whole tensor of its parts, in the order of ranks."""
        if self.segments == 1:
            return torch.cat(list(parts), self.dim)
        step = parts[0].shape[self.dim] // self.segments
        runs = [part.narrow(self.dim, index * step, step) for index in range(self.segments) for part in parts]
        return torch.cat(runs, self.dim)

    def chunks(self, shape: Sequence[int], rank: int, size: int) -> list[tuple[int, int, int]]:
        """Runs of the split dim that this rank holds, for checkpoint formats that store contiguous pieces.

        Returns:
            ``(global_offset, local_offset, length)`` along :attr:`dim`, one for each segment.
        """
        segment = shape[self.dim] // self.segments
        step = segment // size
        return [(index * segment + rank * step, index * step, step) for index in range(self.segments)]

    def describe(self) -> str:
        """Short form for tables: ``dim 0`` or ``dim 0 in 3 segments``."""
        return f"dim {self.dim}" + (f" in {self.segments} segments" if self.segments > 1 else "")


def to_placement(layout: Layout | None) -> Placement:
    """Torch's placement of a layout on a one-dimensional mesh."""
    if layout is None:
        return Replicate()
    if layout.segments == 1:
        return Shard(layout.dim)
    return StridedShard(layout.dim, split_factor=layout.segments)


def from_placement(placement: Placement, ndim: int) -> Layout | None:
    """The layout of torch's placement.

    Raises:
        RuntimeError: If the placement is neither replicated nor split along a dim.
    """
    if isinstance(placement, Replicate):
        return None
    if isinstance(placement, StridedShard):
        return Layout(placement.dim % ndim, int(placement.split_factor))
    if isinstance(placement, Shard):
        return Layout(placement.dim % ndim)
    raise RuntimeError(
        f"A parameter has the placement {placement}, which is neither Replicate nor Shard. Redistribute it first."
    )
