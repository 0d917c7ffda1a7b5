"""Layout of a tensor over the tensor ranks: the sharded dim and its number of segments.

[Note: segments] A fused projection computes q, k and v with one weight of shape ``[3 * C, C]``, and user code divides
its output with ``split(C, dim=2)``. With contiguous shards, rank 0 of 2 would hold all of q and half of k, and the
split would need a gather. With ``segments=3`` each third of the dim is sharded separately: rank 0 holds the first half
of q, of k and of v, one after the other, and the user's split is local. torch's placement for it is ``StridedShard``.
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
    """Sharding of one dim of a tensor over the tensor ranks; ``None`` instead of a layout means replicated.

    Attributes:
        dim: The sharded dim, counted from the front.
        segments: Number of equal runs of the dim, each of which is sharded separately.
        ends: End of each rank's part within a segment; None for equal parts. See :func:`uneven_layout`.
    """

    dim: int
    segments: int = 1
    ends: tuple[int, ...] | None = None

    def at(self, dim: int) -> Layout:
        """Return the same layout along another dim."""
        return Layout(dim, self.segments, self.ends)

    def run(self, extent: int, rank: int, size: int) -> tuple[int, int]:
        """Return start and end of a rank's part within a segment of a dim of global ``extent``."""
        if self.ends is not None:
            return (self.ends[rank - 1] if rank else 0), self.ends[rank]
        step = extent // self.segments // size
        return rank * step, (rank + 1) * step

    def local_shape(self, shape: Sequence[int], size: int, rank: int = 0) -> tuple[int, ...]:
        """Return the shape of one rank's shard of a tensor of global ``shape`` on ``size`` ranks."""
        local = list(shape)
        start, stop = self.run(local[self.dim], rank, size)
        local[self.dim] = (stop - start) * self.segments
        return tuple(local)

    def global_shape(self, local_shape: Sequence[int], size: int) -> tuple[int, ...]:
        """Return the global shape of a tensor whose shards on ``size`` ranks have ``local_shape``."""
        whole = list(local_shape)
        whole[self.dim] = whole[self.dim] * size if self.ends is None else self.segments * self.ends[-1]
        return tuple(whole)

    def divides(self, shape: Sequence[int], size: int) -> bool:
        """Return whether a tensor of global ``shape`` divides into ``size`` equal shards."""
        extent = shape[self.dim]
        return extent > 0 and extent % (self.segments * size) == 0

    def take(self, whole: Tensor, rank: int, size: int) -> Tensor:
        """Return this rank's shard of a full tensor: a view for one segment, a copy for several."""
        start, stop = self.run(whole.shape[self.dim], rank, size)
        if self.segments == 1:
            return whole.narrow(self.dim, start, stop - start)
        parts: Tensor = whole.unflatten(self.dim, (self.segments, -1))
        part: Tensor = parts.narrow(self.dim + 1, start, stop - start).flatten(self.dim, self.dim + 1)
        return part

    def join(self, parts: Sequence[Tensor]) -> Tensor:
        """Return the full tensor from all shards, in rank order."""
        if self.segments == 1:
            return torch.cat(list(parts), self.dim)
        steps = [part.shape[self.dim] // self.segments for part in parts]
        runs = [
            part.narrow(self.dim, index * step, step)
            for index in range(self.segments)
            for part, step in zip(parts, steps, strict=True)
        ]
        return torch.cat(runs, self.dim)

    def describe(self) -> str:
        """Return a short form for tables: ``dim 0`` or ``dim 0 in 3 segments``."""
        parts = "" if self.ends is None else f", ending at {', '.join(map(str, self.ends))}"
        return f"dim {self.dim}" + (f" in {self.segments} segments" if self.segments > 1 else "") + parts


def uneven_layout(dim: int, extent: int, size: int) -> Layout:
    """Return a layout that shards a dim of any extent; shards differ by at most one, the longer ones first.

    Args:
        dim: The dim to shard.
        extent: Extent of the dim.
        size: Number of ranks.
    """
    short, longer = divmod(extent, size)
    return layout_with_ends(dim, [(rank + 1) * short + min(rank + 1, longer) for rank in range(size)])


def layout_with_ends(dim: int, ends: Sequence[int]) -> Layout:
    """Return a layout with shards ending at ``ends``, normalised: equal shards have ``ends=None``."""
    step = ends[0]
    equal = step > 0 and all(end == step * (rank + 1) for rank, end in enumerate(ends))
    return Layout(dim, ends=None if equal else tuple(ends))


def to_placement(layout: Layout | None) -> Placement:
    """Return the torch placement of a layout on a one-dimensional mesh."""
    if layout is None:
        return Replicate()
    if layout.segments == 1:
        return Shard(layout.dim)
    return StridedShard(layout.dim, split_factor=layout.segments)


def from_placement(placement: Placement, ndim: int) -> Layout | None:
    """Return the layout of a torch placement.

    Raises:
        RuntimeError: If the placement is neither replicated nor sharded.
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
