"""Sharding rules: views, permutations, slices, splits and concatenations."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_pardist.compat import pytree
from lightning_pardist.engines.tensor.calls import Call, NoRule, Operand, Outcome, rule
from lightning_pardist.engines.tensor.layout import Layout
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
    """Layout after a view of ``shape`` as ``new_shape``.

    Seen as one run of numbers, the split dim says: every ``period`` elements, ``size`` blocks of ``block`` elements go
    to one rank each. A dim of the new shape can carry that if it starts where periods start and its rows do not cut
    blocks.

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
    """Any change of shape that keeps the order of the elements."""
    x = call.args[0] if call.args else None
    if not isinstance(x, Operand) or x.layout is None:
        raise NoRule("unusual arguments")
    if any(isinstance(arg, torch.dtype) for arg in call.args[1:]):
        raise NoRule("view as another type")
    new_shape = tuple(call.meta().shape)
    layout = x.layout if new_shape == x.shape else viewed(x.shape, x.layout, new_shape, call.size)
    local = layout.local_shape(new_shape, call.size)
    return Outcome((x.keep(), local), {}, out=layout, run=_reshape)


def _reshape(group: Any, local: Tensor, shape: tuple[int, ...]) -> Tensor:
    return local.reshape(shape)


@rule("transpose", "permute", "t", "swapaxes", "swapdims", "movedim", "moveaxis", "get:T", "get:mT", "adjoint")
def permute(call: Call) -> Outcome:
    """Dims in another order: found out on a tensor without data whose strides tell its dims apart."""
    x, layout = _first(call)
    probe = torch.empty_strided(x.shape, [10 ** (x.ndim - dim) for dim in range(x.ndim)], device="meta")
    moved = call.func(probe, *call.args[1:], **call.kwargs)
    dim = [int(stride) for stride in moved.stride()].index(10 ** (x.ndim - layout.dim))
    args, kwargs = keep_all(call)
    return Outcome(args, kwargs, out=Layout(dim, layout.segments))


@rule("expand", "expand_as", "broadcast_to")
def expand(call: Call) -> Outcome:
    """Dims of size 1 repeated; the split dim is larger than 1."""
    x = call.args[0] if call.args else None
    if not isinstance(x, Operand) or x.layout is None:
        raise NoRule("unusual arguments")
    shape = tuple(call.meta().shape)
    layout = Layout(x.layout.dim + len(shape) - x.ndim, x.layout.segments)
    return Outcome((x.keep(), layout.local_shape(shape, call.size)), {}, out=layout, run=_expand)


def _expand(group: Any, local: Tensor, shape: tuple[int, ...]) -> Tensor:
    return local.expand(shape)


@rule("repeat", "tile")
def repeat(call: Call) -> Outcome:
    """Copies along dims that are not split."""
    x, layout = _first(call)
    sizes = call.args[1:] if len(call.args) > 2 else call.arg(1, "repeats", call.kwargs.get("dims"))
    sizes = [sizes] if isinstance(sizes, int) else list(sizes)
    dim = layout.dim + max(len(sizes) - x.ndim, 0)
    if dim - len(sizes) >= -len(sizes) and dim < len(sizes) and sizes[dim] != 1:
        raise NoRule("repeated along the split dim")
    args, kwargs = keep_all(call)
    return Outcome(args, kwargs, out=Layout(dim, layout.segments))


@rule("repeat_interleave")
def repeat_interleave(call: Call) -> Outcome:
    """Every element a number of times: blocks stay with their rank."""
    _, layout = _first(call)
    dim = call.arg(2, "dim")
    if not isinstance(call.arg(1, "repeats"), int) or dim is None:
        raise NoRule("a number of repeats for every element")
    args, kwargs = keep_all(call)
    return Outcome(args, kwargs, out=layout)


@rule("split", "chunk", "tensor_split", "split_with_sizes", "unsafe_chunk", "unsafe_split")
def split(call: Call) -> Outcome:
    """Into pieces: along the split dim where they follow its segments."""
    x, layout = _first(call)
    dim = call.arg(2, "dim", 0) % x.ndim
    sizes = [piece.shape[dim] for piece in call.meta()]
    if dim != layout.dim:
        args, kwargs = keep_all(call)
        return Outcome(args, kwargs, out=[layout] * len(sizes))
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
    """One result for each index of a dim that is not split."""
    x, layout = _first(call)
    dim = call.arg(1, "dim", 0) % x.ndim
    _not_along(call, layout, dim)
    args, kwargs = keep_all(call)
    return Outcome(args, kwargs, out=[_without(layout, dim)] * x.shape[dim])


@rule("select")
def select(call: Call) -> Outcome:
    """One index of a dim that is not split."""
    x, layout = _first(call)
    dim = call.arg(1, "dim") % x.ndim
    _not_along(call, layout, dim)
    args, kwargs = keep_all(call)
    return Outcome(args, kwargs, out=_without(layout, dim))


@rule("index_select", "take_along_dim_", "index_add_")
def index_select(call: Call) -> Outcome:
    """Indices of a dim that is not split."""
    x, layout = _first(call)
    _not_along(call, layout, call.arg(1, "dim") % x.ndim)
    args, kwargs = keep_all(call)
    return Outcome(args, kwargs, out=layout)


@rule("narrow")
def narrow(call: Call) -> Outcome:
    """A run of a dim; of the split one where it follows the segments."""
    x, layout = _first(call)
    dim, start, length = call.arg(1, "dim") % x.ndim, call.arg(2, "start"), call.arg(3, "length")
    if dim != layout.dim:
        args, kwargs = keep_all(call)
        return Outcome(args, kwargs, out=layout)
    new, first = _segment_run(x, layout, start, start + length, call.size)
    return Outcome((x.keep(), dim, first, length // call.size), out=new, run=_narrow)


def _narrow(group: Any, local: Tensor, dim: int, start: int, length: int) -> Tensor:
    return local.narrow(dim, start, length)


@rule("getitem")
def getitem(call: Call) -> Outcome:
    """Basic indexing, and one index tensor on dims that are not split."""
    x = call.args[0]
    if not isinstance(x, Operand) or x.layout is None:
        raise NoRule("a whole tensor indexed by a split one")
    index, out = sliced(x, call.args[1], call.size)
    return Outcome((x.keep(), index), {}, out=out)


@rule("setitem")
def setitem(call: Call) -> Outcome:
    """A value written along dims that are not split, or everywhere."""
    x, index, value = call.args
    if not isinstance(x, Operand) or x.layout is None:
        raise NoRule("a split tensor written into a whole one", call.split_operands())
    local_index, out = sliced(x, index, call.size)
    if not isinstance(value, Operand):
        return Outcome((x.keep(), local_index, value), {}, out=x.layout)
    if value.ndim == 0:
        return Outcome((x.keep(), local_index, value.whole()), {}, out=x.layout)
    region = len(torch.empty(x.shape, device="meta")[_on_meta(index)].shape)
    dim = out.dim - (region - value.ndim)
    need = value.whole() if dim < 0 or value.shape[dim] == 1 else value.part(Layout(dim, out.segments))
    return Outcome((x.keep(), local_index, need), {}, out=x.layout)


def _on_meta(index: Any) -> Any:
    if any(isinstance(item, Operand) for item in pytree.tree_leaves(index)):
        raise NoRule("a tensor written where an index tensor says")
    return index


def sliced(x: Operand, index: Any, size: int) -> tuple[Any, Layout]:
    """Local form of an index, and how the result lies.

    Raises:
        NoRule: If it reaches into the split dim other than by whole segments, or has several index tensors.
    """
    layout = _layout(x)
    items = list(index) if isinstance(index, tuple) else [index]
    if any(isinstance(item, (list, range)) for item in items):
        raise NoRule("indexed by a list")
    tensors = [item for item in items if isinstance(item, Operand)]
    if len(tensors) > 1 or any(tensor.layout is not None for tensor in tensors):
        raise NoRule("indexed by several tensors")
    used = sum(_dims_used(item) for item in items)
    if Ellipsis not in [item if item is Ellipsis else 0 for item in items]:
        items.append(Ellipsis)
    place = next(position for position, item in enumerate(items) if item is Ellipsis)
    items[place : place + 1] = [slice(None)] * (x.ndim - used)
    return _walk(x, layout, items, size)


def _walk(x: Operand, layout: Layout, items: list[Any], size: int) -> tuple[Any, Layout]:
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
            kept, first = _segment_run(x, layout, start, stop, size)
            item = slice(first, first + (stop - start) // size)
            out = Layout(target, kept.segments)
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
    """Layout and local start of the run ``start:stop`` of the split dim."""
    extent = x.shape[layout.dim]
    segment = extent // layout.segments
    if stop <= start or start % segment or stop % segment:
        unit = math.gcd(start, stop, extent)
        # Equal shares of a fused projection; anything finer is a coincidence of sizes.
        good = layout.segments == 1 and unit and stop - start == unit and unit % size == 0
        raise NoRule("slice cuts through the parts", segments=extent // unit if good else None)
    return Layout(layout.dim, (stop - start) // segment), start // size


def _not_along(call: Call, layout: Layout, dim: int) -> None:
    if dim == layout.dim:
        raise NoRule(f"{call.name} along the split dim")


def _without(layout: Layout, dim: int) -> Layout:
    return Layout(layout.dim - (dim < layout.dim), layout.segments)


@rule("cat", "concat", "concatenate", "stack", "hstack_")
def concatenate(call: Call) -> Outcome:
    """Along a dim that is not split; tensors that are whole are sliced to match."""
    given = call.arg(0, "tensors")
    # Empty tensors of one dim join anything, as caches use them; they say nothing.
    tensors = [operand for operand in given if operand.shape != (0,)]
    stacked = call.name == "stack"
    layouts = {operand.layout for operand in tensors if operand.layout is not None}
    if len(layouts) != 1:
        raise NoRule("tensors split in different ways")
    layout = layouts.pop()
    ndim = tensors[0].ndim + stacked
    dim = call.arg(1, "dim", 0) % ndim
    if not stacked and dim == layout.dim:
        raise NoRule("concatenated along the split dim")
    if any(operand.ndim != tensors[0].ndim for operand in tensors):
        raise NoRule("tensors of different rank")
    out = Layout(layout.dim + (stacked and dim <= layout.dim), layout.segments)
    return Outcome(([operand.part(layout) for operand in tensors], dim), {}, out=out)


@rule("new_zeros", "new_ones", "new_empty", "new_full", "new_tensor")
def unrelated(call: Call) -> Outcome:
    """Takes type and device alone: the result is whole."""
    _first(call)
    args, kwargs = keep_all(call)
    return Outcome(args, kwargs, out=None)
