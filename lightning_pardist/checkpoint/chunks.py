"""Representation of a rank's part of a global tensor as n-dimensional boxes with global offsets.

A checkpoint stores global tensors in boxes, and a rank of any other job reads the boxes that overlap its own. Every
sharding is expressed as boxes: a full tensor is one box, a ``DTensor`` one box per combination of runs of its dims, and
a flat slice of a tensor of ``k`` dims (ZeRO) at most ``2 k - 1`` boxes.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from lightning_pardist.compat.dtensor import StridedShard
from lightning_pardist.local_tensors import tensor_axis

#: Contiguous range along one dim: start in the global tensor, start in the local tensor, length.
Run = tuple[int, int, int]


@dataclass(frozen=True)
class Chunk:
    """One box of a global tensor, with its values.

    Attributes:
        offsets: Start of the box in the global tensor.
        values: Tensor with the box' shape; a view of this rank's local tensor.
    """

    offsets: tuple[int, ...]
    values: Tensor

    @property
    def sizes(self) -> tuple[int, ...]:
        """Extent of the box along every dim."""
        return tuple(self.values.shape)


@dataclass(frozen=True)
class Shards:
    """This rank's part of one global tensor.

    Attributes:
        shape: Global shape.
        dtype: Dtype of all parts.
        parts: Disjoint boxes; empty if other ranks hold the whole tensor.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    parts: tuple[Chunk, ...]


def shards_of(tensor: Tensor) -> Shards:
    """Return a tensor's local boxes: of a plain full tensor, a ``DTensor`` on any mesh, or none for ``meta``.

    Raises:
        ValueError: If a ``DTensor`` holds partial sums, or has an unknown placement.
    """
    shape = tuple(tensor.shape)
    if tensor.is_meta:
        return Shards(shape, tensor.dtype, ())
    if isinstance(tensor, DTensor):
        local = tensor.to_local().detach()
        return Shards(shape, tensor.dtype, tuple(_located(local, runs_of(tensor))))
    return Shards(shape, tensor.dtype, (Chunk((0,) * tensor.dim(), tensor.detach()),))


def shards_of_slice(param: Tensor, start: int, stop: int, flat: Tensor) -> Shards:
    """Return the boxes of a flat slice of a parameter.

    Args:
        param: The sliced parameter: a plain tensor, or a ``DTensor``, whose local tensor is sliced.
        start: First element of the slice, in the memory order of the parameter's elements.
        stop: End of the slice, exclusive.
        flat: Values of the slice, shape ``[stop - start]``.
    """
    local = param.to_local() if isinstance(param, DTensor) else param
    runs = runs_of(param) if isinstance(param, DTensor) else full_runs(param.shape)
    order = memory_order(local)
    back = [order.index(dim) for dim in range(len(order))]
    parts: list[Chunk] = []
    taken = 0
    for offsets, sizes in flat_boxes([local.shape[dim] for dim in order], start, stop):
        numel = math.prod(sizes)
        values = flat[taken : taken + numel].view(sizes).permute(back)
        taken += numel
        parts += _located(values, runs, at=[offsets[dim] for dim in back])
    return Shards(tuple(param.shape), flat.dtype, tuple(parts))


def full_runs(shape: Sequence[int]) -> list[list[Run]]:
    """Return the runs of a full local tensor."""
    return [[(0, 0, size)] for size in shape]


def runs_of(tensor: DTensor) -> list[list[Run]]:
    """Return for each dim the runs of global indices that this rank's local tensor holds, in local order.

    Raises:
        ValueError: If the tensor holds partial sums, or has an unknown placement.
    """
    held: list[list[tuple[int, int]]] = [[(0, size)] for size in tensor.shape]
    coordinate = tensor.device_mesh.get_coordinate()
    if coordinate is None:
        return [[] for _ in tensor.shape]
    for axis, dim, segments in _in_order(tensor):
        held[dim] = _split(held[dim], segments, tensor.device_mesh.shape[axis], coordinate[axis])
    runs = []
    for pieces in held:
        starts = itertools.accumulate((length for _, length in pieces), initial=0)
        runs.append([(first, at, length) for (first, length), at in zip(pieces, starts, strict=False)])
    return runs


def flat_boxes(shape: Sequence[int], start: int, stop: int) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Split elements ``start`` to ``stop`` of a row-major tensor into at most ``2 * len(shape) - 1`` boxes, in order.

    Yields:
        Offsets and sizes of a box.
    """
    if start >= stop:
        return
    if not shape:
        yield (), ()
        return
    inner = math.prod(shape[1:])
    first, head = divmod(start, inner)
    last, tail = divmod(stop, inner)
    if first == last:
        yield from _in_row(shape, first, head, tail)
        return
    if head:
        yield from _in_row(shape, first, head, inner)
        first += 1
    if first < last:
        yield (first, *(0 for _ in shape[1:])), (last - first, *shape[1:])
    if tail:
        yield from _in_row(shape, last, 0, tail)


def overlap(
    offsets: Sequence[int], sizes: Sequence[int], other_offsets: Sequence[int], other_sizes: Sequence[int]
) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """Return the intersection of two boxes in global offsets, or None. Boxes without dims are one element."""
    low = tuple(max(a, b) for a, b in zip(offsets, other_offsets, strict=True))
    high = tuple(min(a + n, b + m) for a, n, b, m in zip(offsets, sizes, other_offsets, other_sizes, strict=True))
    if any(a >= b for a, b in zip(low, high, strict=True)):
        return None
    return low, tuple(b - a for a, b in zip(low, high, strict=True))


def within(part: Chunk, offsets: Sequence[int], sizes: Sequence[int]) -> Tensor:
    """Return the view of a part's values that a smaller box covers."""
    view = part.values
    for dim, (start, size) in enumerate(zip(offsets, sizes, strict=True)):
        view = view.narrow(dim, start - part.offsets[dim], size)
    return view


def memory_order(tensor: Tensor) -> list[int]:
    """Return the dims in memory order, outermost first: row-major, or channels last."""
    if tensor.dim() in (4, 5):
        last = torch.channels_last if tensor.dim() == 4 else torch.channels_last_3d
        if tensor.is_contiguous(memory_format=last) and not tensor.is_contiguous():
            return [0, *range(2, tensor.dim()), 1]
    return list(range(tensor.dim()))


def _in_row(shape: Sequence[int], row: int, start: int, stop: int) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    for offsets, sizes in flat_boxes(shape[1:], start, stop):
        yield (row, *offsets), (1, *sizes)


def _located(values: Tensor, runs: Sequence[Sequence[Run]], at: Sequence[int] | None = None) -> Iterator[Chunk]:
    """Yield a local box, starting at local index ``at``, as chunks with contiguous global indices."""
    at = [0] * values.dim() if at is None else at
    if values.numel() == 0 and not all(runs):
        return
    cuts = []
    for dim, start in enumerate(at):
        stop = start + values.shape[dim]
        cut = []
        for first, local, length in runs[dim]:
            low, high = max(start, local), min(stop, local + length)
            if low < high:
                cut.append((first + low - local, low - start, high - low))
        cuts.append(cut)
    for combination in itertools.product(*cuts):
        view = values
        for dim, (_, local, length) in enumerate(combination):
            view = view.narrow(dim, local, length)
        yield Chunk(tuple(first for first, _, _ in combination), view)


def _dim_of(placement: Placement) -> int:
    if isinstance(placement, Shard | StridedShard):
        return int(placement.dim)
    raise ValueError(
        f"A tensor with placement {placement} cannot be saved: it is neither replicated nor sharded along a dim."
    )


def _in_order(tensor: DTensor) -> list[tuple[int, int, int]]:
    """Return mesh axes in the order in which they split a tensor, with the dim and the number of segments of each.

    If a tensor is split over tensor ranks, data sharding (``fully_shard``) has split each tensor shard afterwards,
    into contiguous runs, whatever the order of the placements: torch's notation cannot express it for a fused
    projection of queries, keys and values.
    """
    found = [
        (axis, _dim_of(placement) % tensor.dim(), int(getattr(placement, "split_factor", 1)))
        for axis, placement in enumerate(tensor.placements)
        if not isinstance(placement, Replicate)
    ]
    inner = tensor_axis(tensor)
    if all(axis != inner for axis, *_ in found):
        return found
    return [each for each in found if each[0] == inner] + [(axis, dim, 1) for axis, dim, _ in found if axis != inner]


def _split(pieces: list[tuple[int, int]], segments: int, size: int, index: int) -> list[tuple[int, int]]:
    """Return one rank's share of the runs of a dim; each segment is chunked as in torch, the last part shorter."""
    total = sum(length for _, length in pieces)
    segment = -(-total // segments) if total else 0
    kept: list[tuple[int, int]] = []
    for begin in range(0, total, segment) if segment else ():
        length = min(segment, total - begin)
        step = -(-length // size)
        low = begin + min(index * step, length)
        high = begin + min((index + 1) * step, length)
        kept += _cut(pieces, low, high)
    return _merged(kept)


def _cut(pieces: list[tuple[int, int]], low: int, high: int) -> list[tuple[int, int]]:
    found, at = [], 0
    for first, length in pieces:
        start, stop = max(low, at), min(high, at + length)
        if start < stop:
            found.append((first + start - at, stop - start))
        at += length
    return found


def _merged(pieces: list[tuple[int, int]]) -> list[tuple[int, int]]:
    merged: list[tuple[int, int]] = []
    for first, length in pieces:
        if merged and sum(merged[-1]) == first:
            merged[-1] = (merged[-1][0], merged[-1][1] + length)
        else:
            merged.append((first, length))
    return merged
