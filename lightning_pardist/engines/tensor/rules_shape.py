"""Sharding rules: views, permutations, slices, splits and concatenations."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_pardist.compat import pytree
from lightning_pardist.engines.tensor.calls import Call, NoRule, Operand, Outcome, rule
from lightning_pardist.engines.tensor.layout import Layout, layout_with_ends
from lightning_pardist.engines.tensor.rules_elementwise import keep_all


def _layout(x: Operand) -> Layout:
    if x.layout is None:
        raise NoRule("nothing is split")
    return x.layout


def _first(call: Call) -> tuple[Operand, Layout]:
    x = call.only_split()
    if not call.args or x is not call.args[0]:
        raise NoRule("unusual arguments")
    return x, _layout(x)


def viewed(shape: Sequence[int], layout: Layout, new_shape: Sequence[int], size: int) -> Layout:
    """Return the layout after a view of ``shape`` as ``new_shape``.

    In the flattened tensor, each run of ``period`` elements consists of ``size`` blocks of ``block`` elements, one for
    each rank. A dim of the new shape can be the sharded one if it starts at multiples of the period and its rows do not
    cut blocks.

    Raises:
        NoRule: If no dim can; with the number of segments that would make it possible, if there is one.
    """
    total = math.prod(shape)
    if total == 0:
        raise NoRule("view of an empty tensor")
    found = _carrier(shape, layout, new_shape, size)
    if found is not None:
        return found
    advice = None
    if layout.segments == 1:
        candidates = sorted(
            {math.prod(new_shape[a:b]) for a in range(len(new_shape)) for b in range(a + 1, len(new_shape))}
        )
        for segments in candidates:
            fits = segments > 1 and shape[layout.dim] % (segments * size) == 0
            if fits and _carrier(shape, Layout(layout.dim, segments), new_shape, size) is not None:
                advice = segments
                break
    raise NoRule(f"view of {tuple(shape)} as {tuple(new_shape)} cuts through the parts", segments=advice)


def _carrier(shape: Sequence[int], layout: Layout, new_shape: Sequence[int], size: int) -> Layout | None:
    if layout.ends is not None:
        return _uneven_carrier(shape, layout, new_shape)
    inner = math.prod(shape[layout.dim + 1 :])
    period = shape[layout.dim] // layout.segments * inner
    block = period // size
    suffix = math.prod(new_shape)
    for dim, extent in enumerate(new_shape):
        run, suffix = suffix, suffix // extent
        if extent < size or block % suffix or run % period:
            continue
        if (run // period) * (period // suffix) == extent and (period // suffix) % size == 0:
            return Layout(dim, run // period)
    return None


@rule(
    "view", "reshape", "flatten", "unflatten", "squeeze", "unsqueeze", "view_as", "reshape_as", "ravel", "atleast_2d_"
)
def view(call: Call) -> Outcome:
    """Shard any change of shape that keeps the order of the elements."""
    x = call.args[0] if call.args else None
    if not isinstance(x, Operand) or x.layout is None:
        raise NoRule("unusual arguments")
    if any(isinstance(arg, torch.dtype) for arg in call.args[1:]):
        raise NoRule("view as another type")
    new_shape = tuple(call.meta().shape)
    layout = x.layout if new_shape == x.shape else viewed(x.shape, x.layout, new_shape, call.size)
    local = layout.local_shape(new_shape, call.size, call.rank)
    return Outcome((x.keep(), local), {}, out=layout, run=_reshape)


def _reshape(group: Any, local: Tensor, shape: tuple[int, ...]) -> Tensor:
    return local.reshape(shape)


@rule("transpose", "permute", "t", "swapaxes", "swapdims", "movedim", "moveaxis", "get:T", "get:mT", "adjoint")
def permute(call: Call) -> Outcome:
    """Shard a permutation of dims, determined on a meta tensor whose strides identify its dims."""
    x, layout = _first(call)
    probe = torch.empty_strided(x.shape, [10 ** (x.ndim - dim) for dim in range(x.ndim)], device="meta")
    moved = call.func(probe, *call.args[1:], **call.kwargs)
    dim = [int(stride) for stride in moved.stride()].index(10 ** (x.ndim - layout.dim))
    args, kwargs = keep_all(call)
    return Outcome(args, kwargs, out=layout.at(dim))


@rule("expand", "expand_as", "broadcast_to")
def expand(call: Call) -> Outcome:
    """Shard an expansion of dims of size 1; the sharded dim is not expanded."""
    x = call.args[0] if call.args else None
    if not isinstance(x, Operand) or x.layout is None:
        raise NoRule("unusual arguments")
    shape = tuple(call.meta().shape)
    layout = x.layout.at(x.layout.dim + len(shape) - x.ndim)
    if shape[layout.dim] != x.shape[x.layout.dim]:
        raise NoRule("repeated along the split dim")
    return Outcome((x.keep(), layout.local_shape(shape, call.size, call.rank)), {}, out=layout, run=_expand)


def _expand(group: Any, local: Tensor, shape: tuple[int, ...]) -> Tensor:
    return local.expand(shape)


@rule("repeat", "tile")
def repeat(call: Call) -> Outcome:
    """Shard copies along dims other than the sharded one."""
    x, layout = _first(call)
    sizes = call.args[1:] if len(call.args) > 2 else call.arg(1, "repeats", call.kwargs.get("dims"))
    sizes = [sizes] if isinstance(sizes, int) else list(sizes)
    if call.name == "tile":
        sizes = [1] * (x.ndim - len(sizes)) + sizes
    dim = layout.dim + max(len(sizes) - x.ndim, 0)
    if dim - len(sizes) >= -len(sizes) and dim < len(sizes) and sizes[dim] != 1:
        raise NoRule("repeated along the split dim")
    args, kwargs = keep_all(call)
    return Outcome(args, kwargs, out=layout.at(dim))


@rule("repeat_interleave")
def repeat_interleave(call: Call) -> Outcome:
    """Shard ``repeat_interleave`` with one number of repeats: copies stay on the rank of their element."""
    x, layout = _first(call)
    dim = call.arg(2, "dim")
    if not isinstance(call.arg(1, "repeats"), int) or dim is None:
        raise NoRule("a number of repeats for every element")
    if layout.ends is not None and dim % x.ndim == layout.dim:
        raise NoRule("repeated along the split dim")
    args, kwargs = keep_all(call)
    return Outcome(args, kwargs, out=layout)


@rule("split", "chunk", "tensor_split", "split_with_sizes", "unsafe_chunk", "unsafe_split")
def split(call: Call) -> Outcome:
    """Shard a split into pieces; along the sharded dim, the pieces have to match its segments."""
    x, layout = _first(call)
    dim = call.arg(2, "dim", 0) % x.ndim
    sizes = [piece.shape[dim] for piece in call.meta()]
    if dim != layout.dim:
        args, kwargs = keep_all(call)
        return Outcome(args, kwargs, out=[layout] * len(sizes))
    if call.context:
        return _split_anywhere(call, x, layout, sizes)
    segment = x.shape[dim] // layout.segments
    if any(size % segment or size == 0 for size in sizes):
        unit = math.gcd(*sizes)
        count = x.shape[dim] // unit if unit else 0
        good = layout.segments == 1 and count and unit % call.size == 0 and len(set(sizes)) == 1
        raise NoRule("pieces cut through the parts", segments=count if good else None)
    return Outcome(
        (x.keep(), [size // call.size for size in sizes], dim),
        out=[Layout(dim, size // segment) for size in sizes],
        run=_split,
    )


def _split(group: Any, local: Tensor, sizes: list[int], dim: int) -> tuple[Tensor, ...]:
    return torch.split(local, sizes, dim)


@rule("unbind")
def unbind(call: Call) -> Outcome:
    """Shard ``unbind`` along a dim other than the sharded one."""
    x, layout = _first(call)
    dim = call.arg(1, "dim", 0) % x.ndim
    _not_along(call, layout, dim)
    args, kwargs = keep_all(call)
    return Outcome(args, kwargs, out=[_without(layout, dim)] * x.shape[dim])


@rule("select")
def select(call: Call) -> Outcome:
    """Shard the selection of one index of a dim other than the sharded one."""
    x, layout = _first(call)
    dim = call.arg(1, "dim") % x.ndim
    if call.context and dim == layout.dim:
        return _one_of(call, x, layout, dim, call.arg(2, "index"))
    _not_along(call, layout, dim)
    args, kwargs = keep_all(call)
    return Outcome(args, kwargs, out=_without(layout, dim))


@rule("index_select", "take_along_dim_", "index_add_")
def index_select(call: Call) -> Outcome:
    """Shard the selection of indices of a dim other than the sharded one."""
    x, layout = _first(call)
    _not_along(call, layout, call.arg(1, "dim") % x.ndim)
    args, kwargs = keep_all(call)
    return Outcome(args, kwargs, out=layout)


@rule("narrow")
def narrow(call: Call) -> Outcome:
    """Shard a slice of one dim; along the sharded dim, it has to match the segments."""
    x, layout = _first(call)
    dim, start, length = call.arg(1, "dim") % x.ndim, call.arg(2, "start"), call.arg(3, "length")
    if dim != layout.dim:
        args, kwargs = keep_all(call)
        return Outcome(args, kwargs, out=layout)
    new, first, local_length = _cut(call, x, layout, start, start + length)
    return Outcome((x.keep(), dim, first, local_length), out=new, run=_narrow)


def _narrow(group: Any, local: Tensor, dim: int, start: int, length: int) -> Tensor:
    return local.narrow(dim, start, length)


@rule("getitem")
def getitem(call: Call) -> Outcome:
    """Shard basic indexing, and indexing by one tensor along dims other than the sharded one."""
    x = call.args[0]
    if not isinstance(x, Operand) or x.layout is None:
        raise NoRule("a whole tensor indexed by a split one")
    if call.context and (place := _index_of_split(x, call.args[1])) is not None:
        return _one_of(call, x, x.layout, x.layout.dim, place[0], place[1])
    index, out = sliced(call, x, call.args[1])
    return Outcome((x.keep(), index), {}, out=out)


@rule("setitem")
def setitem(call: Call) -> Outcome:
    """Shard a write along dims other than the sharded one, or to the full tensor."""
    x, index, value = call.args
    if not isinstance(x, Operand) or x.layout is None:
        raise NoRule("a split tensor written into a whole one", call.split_operands())
    local_index, out = sliced(call, x, index)
    if not isinstance(value, Operand):
        return Outcome((x.keep(), local_index, value), {}, out=x.layout)
    if value.ndim == 0:
        return Outcome((x.keep(), local_index, value.whole()), {}, out=x.layout)
    region = len(torch.empty(x.shape, device="meta")[_on_meta(index)].shape)
    dim = out.dim - (region - value.ndim)
    need = value.whole() if dim < 0 or value.shape[dim] == 1 else value.part(out.at(dim))
    return Outcome((x.keep(), local_index, need), {}, out=x.layout)


def _on_meta(index: Any) -> Any:
    if any(isinstance(item, Operand) for item in pytree.tree_leaves(index)):
        raise NoRule("a tensor written where an index tensor says")
    return index


def _expanded(x: Operand, index: Any) -> list[Any]:
    """Return the index with one item for every dim."""
    items = list(index) if isinstance(index, tuple) else [index]
    used = sum(_dims_used(item) for item in items)
    if Ellipsis not in [item if item is Ellipsis else 0 for item in items]:
        items.append(Ellipsis)
    place = next(position for position, item in enumerate(items) if item is Ellipsis)
    items[place : place + 1] = [slice(None)] * (x.ndim - used)
    return items


def sliced(call: Call, x: Operand, index: Any) -> tuple[Any, Layout]:
    """Return the local form of an index and the layout of the result.

    Raises:
        NoRule: If the sharded dim is indexed other than by a slice that stays local, or if there are several index
            tensors.
    """
    layout = _layout(x)
    items = list(index) if isinstance(index, tuple) else [index]
    if any(isinstance(item, (list, range)) for item in items):
        raise NoRule("indexed by a list")
    tensors = [item for item in items if isinstance(item, Operand)]
    if len(tensors) > 1 or any(tensor.layout is not None for tensor in tensors):
        raise NoRule("indexed by several tensors")
    return _walk(call, x, layout, _expanded(x, index))


def _walk(call: Call, x: Operand, layout: Layout, items: list[Any]) -> tuple[Any, Layout]:
    local: list[Any] = []
    source, target = 0, 0
    out: Layout | None = None
    for item in items:
        width = _dims_used(item)
        if item is not None and source <= layout.dim < source + width:
            if not isinstance(item, slice):
                raise NoRule("indexed along the split dim")
            start, stop, step = item.indices(x.shape[layout.dim])
            if step != 1:
                raise NoRule("sliced with a step along the split dim")
            kept, first, length = _cut(call, x, layout, start, stop)
            item = slice(first, first + length)
            out = kept.at(target)
        local.append(item.whole() if isinstance(item, Operand) else item)
        source += width
        target += _dims_made(item)
    if out is None:
        raise NoRule("indexed along the split dim")
    return tuple(local), out


def _dims_used(item: Any) -> int:
    if item is None or item is Ellipsis or isinstance(item, bool):
        return 0
    if isinstance(item, Operand) and item.dtype is torch.bool:
        return item.ndim
    return 1


def _dims_made(item: Any) -> int:
    if isinstance(item, int) and not isinstance(item, bool):
        return 0
    if isinstance(item, Operand) and item.dtype is not torch.bool:
        return item.ndim
    return 1


def _segment_run(x: Operand, layout: Layout, start: int, stop: int, size: int) -> tuple[Layout, int]:
    """Return layout and local start of the run ``start:stop`` of the sharded dim."""
    extent = x.shape[layout.dim]
    segment = extent // layout.segments
    if stop <= start or start % segment or stop % segment:
        unit = math.gcd(start, stop, extent)
        # Advise only equal shares of a fused projection; anything finer is a coincidence of sizes.
        good = layout.segments == 1 and unit and stop - start == unit and unit % size == 0
        raise NoRule("slice cuts through the parts", segments=extent // unit if good else None)
    return Layout(layout.dim, (stop - start) // segment), start // size


def _cut(call: Call, x: Operand, layout: Layout, start: int, stop: int) -> tuple[Layout, int, int]:
    """Return layout, local start and local length of the run ``start:stop`` of the sharded dim."""
    if (start, stop) == (0, x.shape[layout.dim]):
        low, high = layout.run(stop, call.rank, call.size)
        return layout, 0, (high - low) * layout.segments
    if call.context and layout.segments == 1 and stop > start:
        runs = [layout.run(x.shape[layout.dim], rank, call.size) for rank in range(call.size)]
        kept = [(min(max(low, start), stop), min(max(high, start), stop)) for low, high in runs]
        low, high = kept[call.rank]
        # Shards before the run have an empty slice at their end, those after it at their start.
        local = max(min(low - runs[call.rank][0], runs[call.rank][1] - runs[call.rank][0]), 0)
        if stop - start == 1:
            raise NoRule("a single element of the split dim, which may be broadcast later")
        return layout_with_ends(layout.dim, [high - start for _, high in kept]), local, high - low
    if layout.ends is not None:
        raise NoRule("slice cuts through the parts")
    new, first = _segment_run(x, layout, start, stop, call.size)
    return new, first, (stop - start) // call.size


def _split_anywhere(call: Call, x: Operand, layout: Layout, sizes: list[int]) -> Outcome:
    """Split the sharded dim into pieces; each stays on the ranks that hold it."""
    start, pieces = 0, []
    for size in sizes:
        pieces.append(_cut(call, x, layout, start, start + size))
        start += size
    return Outcome(
        (x.keep(), [(first, length) for _, first, length in pieces], layout.dim),
        out=[kept for kept, _, _ in pieces],
        run=_narrow_all,
    )


def _narrow_all(group: Any, local: Tensor, pieces: list[tuple[int, int]], dim: int) -> tuple[Tensor, ...]:
    return tuple(local.narrow(dim, first, length) for first, length in pieces)


def _index_of_split(x: Operand, index: Any) -> tuple[int, Any] | None:
    """Return the integer that selects one entry of the sharded dim, and the index to apply to that length-1 slice.

    A slice of length one counts as well, and keeps the dim. None for any other index.
    """
    items = _expanded(x, index)
    source = 0
    for position, item in enumerate(items):
        width = _dims_used(item)
        if item is not None and source <= _layout(x).dim < source + width:
            place: int | slice = 0
            if isinstance(item, slice):
                start, stop, step = item.indices(x.shape[_layout(x).dim])
                if stop - start != 1 or step != 1 or x.shape[_layout(x).dim] == 1:
                    return None
                item, place = start, slice(None)
            if isinstance(item, bool) or not isinstance(item, int):
                return None
            rest = [*items[:position], place, *items[position + 1 :]]
            plain = all(isinstance(each, (slice, int)) or each is None for each in rest)
            return (item, tuple(rest)) if plain else None
        source += width
    return None


def _one_of(call: Call, x: Operand, layout: Layout, dim: int, index: int, rest: Any = None) -> Outcome:
    """Select one index of the sharded dim: the rank that holds it contributes it to a sum with zeros."""
    if x.dtype is torch.bool or layout.segments != 1:
        raise NoRule(f"{call.name} along the split dim")
    extent = x.shape[dim]
    index = index + extent if index < 0 else index
    if not 0 <= index < extent:
        raise NoRule("an index that there is not")
    start, stop = layout.run(extent, call.rank, call.size)
    here = start <= index < stop

    def run(group: Any, local: Tensor) -> Tensor:
        if here:
            one = local.narrow(dim, index - start, 1)
        else:
            # Concatenate an empty slice to keep the autograd history, so that backward is the same on all ranks.
            one = torch.cat(
                [local.narrow(dim, 0, 0), local.new_zeros(*local.shape[:dim], 1, *local.shape[dim + 1 :])], dim
            )
        return one.select(dim, 0) if rest is None else one[rest]

    return Outcome((x.keep(),), reduce="sum", run=run)


def _uneven_carrier(shape: Sequence[int], layout: Layout, new_shape: Sequence[int]) -> Layout | None:
    """Return the layout of an unevenly sharded dim after a view, or None.

    The new dim has the same dims after it, and the extent of one segment or of several.
    """
    segment = shape[layout.dim] // layout.segments
    inner = math.prod(shape[layout.dim + 1 :])
    suffix = math.prod(new_shape)
    for dim, extent in enumerate(new_shape):
        suffix //= extent
        if suffix == inner and extent and extent % segment == 0 and _lines_up(shape, layout, new_shape, dim):
            return Layout(dim, extent // segment, layout.ends)
    return None


def _lines_up(shape: Sequence[int], layout: Layout, new_shape: Sequence[int], dim: int) -> bool:
    return math.prod(shape[: layout.dim]) * shape[layout.dim] == math.prod(new_shape[: dim + 1])


def _not_along(call: Call, layout: Layout, dim: int) -> None:
    if dim == layout.dim:
        raise NoRule(f"{call.name} along the split dim")


def _without(layout: Layout, dim: int) -> Layout:
    return layout.at(layout.dim - (dim < layout.dim))


@rule("cat", "concat", "concatenate", "stack", "hstack_")
def concatenate(call: Call) -> Outcome:
    """Shard a concatenation along a dim other than the sharded one; replicated tensors are sliced to match."""
    given = call.arg(0, "tensors")
    # Empty tensors of one dim, as in empty caches, can be concatenated with any tensor and are ignored.
    tensors = [operand for operand in given if operand.shape != (0,)]
    stacked = call.name == "stack"
    layouts = list(dict.fromkeys(operand.layout for operand in tensors if operand.layout is not None))
    ndim = tensors[0].ndim + stacked
    dim = call.arg(1, "dim", 0) % ndim
    if any(operand.ndim != tensors[0].ndim for operand in tensors):
        raise NoRule("tensors of different rank")
    layout = layouts[0]
    if not stacked and dim == layout.dim:
        if call.context and len(call.split_operands()) == 1 and layout.segments == 1:
            return _joined(call, tensors, layout)
        raise NoRule("concatenated along the split dim")
    if len(layouts) != 1 and not call.context:
        raise NoRule("tensors split in different ways")
    out = layout.at(layout.dim + (stacked and dim <= layout.dim))
    return Outcome(([operand.moved(layout) for operand in tensors], dim), {}, out=out)


def _joined(call: Call, tensors: list[Operand], layout: Layout) -> Outcome:
    """Concatenate replicated tensors before and after a sharded one: the first and last rank add them."""
    dim = layout.dim
    place = next(position for position, operand in enumerate(tensors) if operand.layout is not None)
    before = sum(operand.shape[dim] for operand in tensors[:place])
    behind = sum(operand.shape[dim] for operand in tensors[place + 1 :])
    extent = tensors[place].shape[dim]
    ends = [before + layout.run(extent, rank, call.size)[1] for rank in range(call.size)]
    ends[-1] += behind
    first, last = call.rank == 0, call.rank == call.size - 1

    def run(group: Any, *parts: Tensor) -> Tensor:
        # Tensors that another rank adds take part with no elements, so that their gradients are summed over all ranks.
        mine = [
            part if position == place or (first if position < place else last) else part.narrow(dim, 0, 0)
            for position, part in enumerate(parts)
        ]
        return torch.cat(mine, dim)

    return Outcome(tuple(operand.gathered() if operand.layout is None else operand.keep() for operand in tensors),
                   out=layout_with_ends(dim, ends), run=run)  # fmt: skip


@rule("new_zeros", "new_ones", "new_empty", "new_full", "new_tensor")
def unrelated(call: Call) -> Outcome:
    """Keep new tensors replicated: they take only the dtype and device of the sharded tensor."""
    _first(call)
    args, kwargs = keep_all(call)
    return Outcome(args, kwargs, out=None)
