"""Sharding rules of windows along a sharded dim: convolutions and zero padding over a sequence under context parallel.

A window at the end of a rank's shard reaches into the next rank's. Each rank fetches the rows that its windows need
from the ranks that hold them (halo exchange), and computes the windows whose centre it holds.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from lightning_pardist.engines.tensor.calls import Call, NoRule, Operand, Outcome
from lightning_pardist.engines.tensor.layout import Layout, layout_with_ends
from lightning_pardist.engines.tensor.regions import TensorGroup


def windows_along_split_dim(call: Call, x: Operand, weight: Operand, bias: Operand | None) -> Outcome:
    """Shard ``conv1d`` to ``conv3d`` of an input that is sharded along one of the window dims.

    Raises:
        NoRule: If some rank would have no window, or weights are sharded as well.
    """
    layout, count = x.layout, weight.ndim - 2
    split = [operand for operand in (weight, bias) if operand is not None and operand.layout is not None]
    if layout is None or layout.segments > 1 or split:
        raise NoRule("windows along the split dim", [x])
    place = layout.dim - (x.ndim - count)
    stride = _each(call.arg(3, "stride", 1), count)
    dilation = _each(call.arg(5, "dilation", 1), count)
    reach = [dilation[dim] * (weight.shape[2 + dim] - 1) for dim in range(count)]
    padding = _paddings(call.arg(4, "padding", 0), reach)
    if any(before != after for dim, (before, after) in enumerate(padding) if dim != place):
        raise NoRule("uneven padding along another dim")
    before = padding[place][0]
    extent, windows = x.shape[layout.dim], call.meta().shape[layout.dim]
    ends = _ends(layout, extent, call.size, windows, stride[place], before, reach[place])
    wanted, missing = [], []
    for rank in range(call.size):
        first, last = (ends[rank - 1] if rank else 0), ends[rank] - 1
        start, stop = first * stride[place] - before, last * stride[place] - before + reach[place] + 1
        if last < first or min(stop, extent) <= max(start, 0):
            raise NoRule("fewer windows along the split dim than ranks")
        wanted.append((max(start, 0), min(stop, extent)))
        missing.append((max(-start, 0), max(stop - extent, 0)))
    kept = [0 if dim == place else padding[dim][0] for dim in range(count)]
    outside = [0] * (2 * (count - 1 - place)) + list(missing[call.rank])
    groups = call.arg(6, "groups", 1)

    def run(group: TensorGroup, x: Tensor, weight: Tensor, bias: Tensor | None) -> Any:
        rows = group.rows(x, layout, wanted)
        return call.func(F.pad(rows, outside) if any(outside) else rows, weight, bias, stride, kept, dilation, groups)

    start, stop = layout.run(extent, call.rank, call.size)
    fetched = max(wanted[call.rank][1] - stop, 0) + max(start - wanted[call.rank][0], 0)
    return Outcome(
        (x.keep(), weight.whole(), None if bias is None else bias.whole()),
        out=layout_with_ends(layout.dim, ends),
        run=run,
        collectives=(("all_to_all", fetched * x.numel // extent),),
    )


def zeros_along_split_dim(call: Call, x: Operand, widths: Sequence[int]) -> Outcome:
    """Shard ``F.pad`` with a constant along the sharded dim: the first and the last rank add the padding.

    Raises:
        NoRule: If it crops, or pads with values of other ranks.
    """
    layout = x.layout
    if layout is None or layout.segments > 1 or call.arg(2, "mode", "constant") != "constant" or min(widths) < 0:
        raise NoRule("padded along the split dim", [x])
    place = 2 * (x.ndim - 1 - layout.dim)
    before, after = widths[place : place + 2]
    ends = [layout.run(x.shape[layout.dim], rank, call.size)[1] + before for rank in range(call.size)]
    ends[-1] += after
    own = list(widths)
    own[place : place + 2] = before if call.rank == 0 else 0, after if call.rank == call.size - 1 else 0
    value = call.arg(3, "value")

    def run(group: TensorGroup, x: Tensor) -> Tensor:
        return F.pad(x, own, value=value)

    return Outcome((x.keep(),), out=layout_with_ends(layout.dim, ends), run=run)


def _each(setting: Any, count: int) -> list[int]:
    return [setting] * count if isinstance(setting, int) else list(setting) * (count if len(setting) == 1 else 1)


def _paddings(setting: Any, reach: Sequence[int]) -> list[tuple[int, int]]:
    """Return the zeros before and after each dim, also for ``"valid"`` and ``"same"``, as torch defines them."""
    if setting == "valid":
        return [(0, 0)] * len(reach)
    if setting == "same":
        return [(total // 2, total - total // 2) for total in reach]
    return [(each, each) for each in _each(setting, len(reach))]


def _ends(layout: Layout, extent: int, size: int, windows: int, stride: int, before: int, reach: int) -> list[int]:
    """Return the end of each rank's windows: those whose centre it holds, so that equal extents have equal layouts."""
    ends = []
    for rank in range(size):
        stop = layout.run(extent, rank, size)[1]
        ends.append(min(max(-(-(stop + before - reach // 2) // stride), 0), windows))
    ends[-1] = windows
    return ends
