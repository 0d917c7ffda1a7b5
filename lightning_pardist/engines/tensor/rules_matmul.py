"""Sharding rules of sums of products (linear layers, matrix products, convolutions), in index notation.

A linear layer is ``bi,oi->bo``. Sharded along ``o`` (column-wise), each rank computes a part of the output; along ``i``
(row-wise), each rank computes a partial sum; along ``b`` (heads, experts), the ranks are independent of each other.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal

import torch.nn.functional as F
from torch import Tensor

from lightning_pardist.engines.tensor.calls import Call, Need, NoRule, Operand, Outcome, rule
from lightning_pardist.engines.tensor.layout import Layout
from lightning_pardist.engines.tensor.rules_windows import windows_along_split_dim

#: An operand and the index letter of each of its dims.
Indexed = tuple[Operand, Sequence[str]]


def contract(
    operands: Sequence[Indexed], out: Sequence[str], *, sequence: bool = False, context: bool = False
) -> tuple[list[Need], Layout | None, Literal["", "sum"]]:
    """Return how each operand is needed, the layout of the result, and whether the result is a partial sum.

    Args:
        operands: Operands and the names of their dims.
        out: Names of the result's dims.
        sequence: Whether an operand sharded along a leading dim is gathered if a weight is sharded by features.
        context: Whether operands are redistributed to one index of the result, so that the fewest elements move.

    Raises:
        NoRule: If operands are sharded along different indices.
    """
    found = [
        (operand, index[operand.layout.dim], operand.layout.at(0)) for operand, index in operands if operand.layout
    ]
    if not found:
        raise NoRule("nothing is split")
    if context:
        return _contract_parts(operands, out, found)
    features = [item for item in found if not item[1].startswith("b")]
    chosen = _choose(features if sequence and features else found, operands, out)
    odd = [operand for operand, index, form in found if (index, form) != chosen]
    give_way = [operand for operand, index, _ in found if index.startswith("b")] if sequence else []
    if any(operand not in give_way for operand in odd):
        raise NoRule("operands split along different indices", odd)
    letter, form = chosen
    needs = []
    for operand, index in operands:
        if operand in odd:
            needs.append(Need(operand, "gather", None))
        elif operand.layout is not None:
            needs.append(operand.keep())
        elif letter in index and operand.shape[index.index(letter)] > 1:
            needs.append(operand.part(form.at(index.index(letter))))
        else:
            needs.append(operand.whole())
    if letter in out:
        return needs, form.at(list(out).index(letter)), ""
    return needs, None, "sum"


def _choose(
    found: list[tuple[Operand, str, Layout]], operands: Sequence[Indexed], out: Sequence[str]
) -> tuple[str, Layout]:
    for _, letter, form in found:
        if letter in out and all(letter in index for _, index in operands):
            return letter, form
    # Dims of equal size may differ in meaning (head_dim and heads): prefer the split with fewer segments.
    return min(((letter, form) for _, letter, form in found), key=lambda item: item[1].segments)


def _contract_parts(
    operands: Sequence[Indexed], out: Sequence[str], found: list[tuple[Operand, str, Layout]]
) -> tuple[list[Need], Layout | None, Literal["", "sum"]]:
    """Contract under context parallelism: attention scores stay sharded by rows; keys and values are gathered."""
    ways = list(dict.fromkeys((letter, form) for _, letter, form in found))
    kept = [way for way in ways if way[0] in out]
    if len(ways) > 1 and not kept:
        raise NoRule("operands split along different indices that are summed over")

    def given_up(way: tuple[str, Layout]) -> int:
        return sum(operand.numel for operand, letter, form in found if (letter, form) != way)

    letter, form = ways[0] if len(ways) == 1 else min(kept, key=given_up)
    extents = {operand.shape[index.index(letter)] for operand, index in operands if letter in index}
    if any(
        operand.shape[index.index(letter)] < max(extents)
        for operand, index in operands
        if _is_sharded_along(operand, index, letter)
    ):
        raise NoRule("a split dim is broadcast")
    needs = [
        operand.moved(form.at(index.index(letter)))
        if letter in index and operand.shape[index.index(letter)] > 1
        else operand.gathered()
        for operand, index in operands
    ]
    if letter in out:
        return needs, form.at(list(out).index(letter)), ""
    return needs, None, "sum"


def _is_sharded_along(operand: Operand, index: Sequence[str], letter: str) -> bool:
    """Return whether an operand is sharded along a letter."""
    return operand.layout is not None and index[operand.layout.dim] == letter


def batch_letters(count: int) -> list[str]:
    """Return names of leading dims, aligned from the right."""
    return [f"b{position}" for position in range(count, 0, -1)]


@rule("linear")
def linear(call: Call) -> Outcome:
    """Shard ``F.linear``; the bias of a row-wise layer is added once, after the reduction."""
    x, weight, bias = call.arg(0, "input"), call.arg(1, "weight"), call.arg(2, "bias")
    if weight.ndim != 2:
        raise NoRule("a weight of one dim")
    batch = batch_letters(x.ndim - 1)
    return _with_bias(call, [(x, [*batch, "i"]), (weight, ["o", "i"])], bias, [*batch, "o"], _linear)


def _linear(group: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return F.linear(x, weight, bias)


def _with_bias(call: Call, operands: list[Indexed], bias: Operand | None, out: list[str], run: Any) -> Outcome:
    position = out.index("o")
    if bias is None:
        needs, layout, reduce = contract(operands, out, sequence=call.sequence, context=call.context)
        return Outcome((*needs, None), out=layout, reduce=reduce, run=run)
    split = [operand for operand, index in operands if operand.layout and index[operand.layout.dim] in ("i",)]
    if split and call.context and len({operand.layout for operand, _ in operands if operand.layout}) > 1:
        raise NoRule("features split in several ways")
    if split and bias.layout is None:
        needs, layout, reduce = contract(operands, out, sequence=call.sequence, context=call.context)
        # Reshape only if needed: the context runtime averages gradients of parameters later, not those of views.
        shape = [-1, *[1] * trailing] if (trailing := len(out) - position - 1) else []
        return Outcome(
            (*needs, None), out=layout, reduce=reduce, run=run,
            after=lambda result, value: result + (value.reshape(shape) if shape else value).to(result.dtype),
            after_needs=(Need(bias, "raw", None),),
        )  # fmt: skip
    needs, layout, reduce = contract([*operands, (bias, ["o"])], out, sequence=call.sequence, context=call.context)
    if reduce:
        raise NoRule("a split bias added to a part of a sum", [bias])
    return Outcome(tuple(needs), out=layout, run=run)


@rule("matmul", "mm", "bmm")
def matmul(call: Call) -> Outcome:
    """Shard a batched matrix product; batch dims are broadcast."""
    a, b = call.args[0], call.arg(1, "other", call.kwargs.get("mat2"))
    if min(a.ndim, b.ndim) < 2:
        raise NoRule("a product with a vector")
    out = [*batch_letters(max(a.ndim, b.ndim) - 2), "m", "n"]
    # With a plain two-dimensional weight on the right, the rows are one more leading dim.
    rows = "b0" if b.ndim == 2 else "m"
    out[-2] = rows
    needs, layout, reduce = contract(
        [(a, [*batch_letters(a.ndim - 2), rows, "k"]), (b, [*batch_letters(b.ndim - 2), "k", "n"])],
        out,
        sequence=call.sequence,
        context=call.context,
    )
    return Outcome(tuple(needs), out=layout, reduce=reduce)


@rule("addmm", "baddbmm")
def addmm(call: Call) -> Outcome:
    """Shard ``bias + x @ weight``, the form of GPT-2's transposed linear layer."""
    bias, x, weight = call.args[:3]
    batch = batch_letters(x.ndim - 2)
    operands: list[Indexed] = [(x, [*batch, "m", "i"]), (weight, [*batch, "i", "o"])]
    out = [*batch, "m", "o"]
    plain = call.kwargs.get("alpha", 1) == 1 and call.kwargs.get("beta", 1) == 1
    summed = any(operand.layout and index[operand.layout.dim] == "i" for operand, index in operands)
    if summed:
        if not plain or bias.layout is not None:
            raise NoRule("a scaled sum over the split dim")
        needs, layout, reduce = contract(operands, out, sequence=call.sequence, context=call.context)
        return Outcome(
            tuple(needs), out=layout, reduce=reduce, run=_matmul,
            after=lambda result, value: result + value.to(result.dtype), after_needs=(Need(bias, "raw", None),),
        )  # fmt: skip
    needs, layout, reduce = contract(
        [(bias, out[len(out) - bias.ndim :]), *operands], out, sequence=call.sequence, context=call.context
    )
    return Outcome(tuple(needs), dict(call.kwargs), out=layout, reduce=reduce)


def _matmul(group: Any, x: Tensor, weight: Tensor) -> Tensor:
    return x @ weight


@rule("_grouped_mm", "grouped_mm")
def grouped_product(call: Call) -> Outcome:
    """Shard a grouped matrix product, as used by mixtures of experts: each group of rows has its own weight."""
    x, weight, bias = call.args[0], call.arg(1, "mat2", call.kwargs.get("mat_b")), call.arg(3, "bias")
    if (x.ndim, weight.ndim) != (2, 3) or bias is not None:
        raise NoRule("another form than rows by groups")
    if weight.layout is not None and weight.layout.dim == 0:
        raise NoRule("split between groups", [weight])
    needs, layout, reduce = contract(
        [(x, ["b1", "k"]), (weight, ["g", "k", "n"])], ["b1", "n"], sequence=call.sequence, context=call.context
    )
    offsets = call.arg(2, "offs")
    if layout is not None and layout.dim == 0:
        raise NoRule("rows are split")
    return Outcome(
        (*needs, None if offsets is None else offsets.whole()), out=layout, reduce=reduce, run=_with_offsets(call)
    )


def _with_offsets(call: Call) -> Any:
    def run(group: Any, x: Tensor, weight: Tensor, offsets: Tensor | None) -> Any:
        # The kernel requires 16-byte aligned rows in one of two memory orders, which slicing may have broken.
        return call.func(x.contiguous(), weight.transpose(-2, -1).contiguous().transpose(-2, -1), offs=offsets)

    return run


def scattered(name: str, shape: Sequence[int], size: int) -> Layout | None:
    """Return the layout in which sequence parallelism leaves a row-wise layer's result (arXiv 2205.05198), or None."""
    fits = len(shape) == 3 and shape[1] >= size and shape[1] % size == 0
    return Layout(1) if fits and name in ("linear", "matmul", "addmm", "embedding") else None


@rule("einsum")
def einsum(call: Call) -> Outcome:
    """Shard an einsum; any equation without an ellipsis or a diagonal."""
    equation = call.args[0]
    operands = call.args[1] if len(call.args) == 2 and isinstance(call.args[1], (list, tuple)) else call.args[1:]
    if not isinstance(equation, str) or "..." in equation:
        raise NoRule("an equation with an ellipsis")
    left, _, right = equation.replace(" ", "").partition("->")
    terms = left.split(",")
    if "->" not in equation:
        right = "".join(sorted(letter for letter in set(left) - {","} if left.count(letter) == 1))
    if any(len(set(term)) != len(term) for term in terms):
        raise NoRule("an equation with a diagonal")
    needs, layout, reduce = contract(
        list(zip(operands, map(list, terms), strict=True)), list(right), context=call.context
    )
    return Outcome((equation, *needs), out=layout, reduce=reduce)


@rule("conv1d", "conv2d", "conv3d")
def convolution(call: Call) -> Outcome:
    """Shard a convolution by output channels, by input channels, or by groups."""
    x, weight, bias = call.arg(0, "input"), call.arg(1, "weight"), call.arg(2, "bias")
    settings = [
        call.arg(3, "stride", 1),
        call.arg(4, "padding", 0),
        call.arg(5, "dilation", 1),
        call.arg(6, "groups", 1),
    ]
    spatial = [f"s{dim}" for dim in range(weight.ndim - 2)]
    batch = batch_letters(x.ndim - weight.ndim + 1)
    groups = settings[3]
    if call.context and _is_along_windows(x, weight, settings):
        return windows_along_split_dim(call, x, weight, bias)
    _not_along_windows(x, weight, settings)

    def run(group: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Any:
        local_groups = groups if groups == 1 else math.gcd(groups, x.shape[-weight.ndim + 1] // weight.shape[1])
        return call.func(x, weight, bias, *settings[:3], local_groups)

    kernel = [f"k{dim}" for dim in range(weight.ndim - 2)]
    if groups == 1:
        operands: list[Indexed] = [(x, [*batch, "i", *spatial]), (weight, ["o", "i", *kernel])]
        return _with_bias(call, operands, bias, [*batch, "o", *spatial], run)
    # By groups: the output channels are sharded like the input channels.
    split = x.layout or (weight.layout and Layout(len(batch), weight.layout.segments))
    if split is None or split.dim != len(batch) or split.ends or groups % (call.size * split.segments):
        raise NoRule("groups cut through the parts")
    part = Layout(0, split.segments)
    needs = [x.part(split), weight.part(part), bias.part(part) if bias is not None else None]
    return Outcome(tuple(needs), out=split, run=run)


def _is_along_windows(x: Operand, weight: Operand, settings: Sequence[Any]) -> bool:
    """Return whether windows reach into the shards of other ranks."""
    windows = weight.ndim - 2
    if x.layout is None or x.layout.dim < x.ndim - windows:
        return False
    return (
        math.prod(weight.shape[2:]) > 1
        or settings[0] not in (1, (1,) * windows)
        or settings[1] not in (0, (0,) * windows)
    )


def _not_along_windows(x: Operand, weight: Operand, settings: Sequence[Any]) -> None:
    if _is_along_windows(x, weight, settings):
        raise NoRule("windows along the split dim", [x])


@rule("conv_transpose1d", "conv_transpose2d", "conv_transpose3d")
def transposed_convolution(call: Call) -> Outcome:
    """Shard a transposed convolution by output channels or by input channels."""
    x, weight, bias = call.arg(0, "input"), call.arg(1, "weight"), call.arg(2, "bias")
    names = ("stride", "padding", "output_padding", "groups", "dilation")
    settings = [call.arg(3 + position, name, 0 if "padding" in name else 1) for position, name in enumerate(names)]
    if settings[3] != 1:
        raise NoRule("a transposed convolution in groups")
    _not_along_windows(x, weight, settings)
    spatial = [f"s{dim}" for dim in range(weight.ndim - 2)]
    batch = batch_letters(x.ndim - weight.ndim + 1)
    operands: list[Indexed] = [
        (x, [*batch, "i", *spatial]),
        (weight, ["i", "o", *(f"k{dim}" for dim in range(weight.ndim - 2))]),
    ]

    def run(group: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Any:
        return call.func(x, weight, bias, *settings)

    return _with_bias(call, operands, bias, [*batch, "o", *spatial], run)
