"""Read from the autograd graph which items of the batch a sum leaves out."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator

import torch
from torch import Tensor
from torch.autograd.graph import Node

from lightning_pardist.compat.autograd_graph import inputs_of, kind_of, saved, scalar, shape_of
from lightning_pardist.engines.common.batch_dim import ELEMENTWISE, LOSSES, PICKED, REACH, SAME

#: Masks with more elements are not read.
SMALL = 2**22
_BELOW_SUMS = SAME | ELEMENTWISE | {"Sum"}


def elements(node: Node, kinds: Collection[str] = _BELOW_SUMS) -> Iterator[Node]:
    """Yield a few operations below a sum: elementwise operations on one result, and further sums."""
    for _ in range(REACH // 2):
        inputs = [child for child in inputs_of(node) if child is not None]
        # Below an addition, masks and divisors belong to one summand only.
        if len(inputs) != 1 or kind_of(inputs[0]) not in kinds:
            return
        node = inputs[0]
        yield node


def mask_of(node: Node) -> Tensor | None:
    """Return the tensor by which an operation with one differentiable input masks or multiplies its elements."""
    kind, sides = kind_of(node), inputs_of(node)
    if len([each for each in sides if each is not None]) != 1:
        return None
    if kind in LOSSES:
        found = saved(node, "total_weight")
        found = saved(node, "weight") if found is None else found
    elif kind == "Where":
        condition = saved(node, "condition")
        found = ~condition if isinstance(condition, Tensor) and sides[0] is None else condition
    elif kind == "MaskedFill":
        mask = saved(node, "mask")
        found = ~mask if isinstance(mask, Tensor) else None
    else:
        found = saved(node, "self" if sides[0] is None else "other") if kind == "Mul" else None
        found = found if isinstance(found, Tensor) and found.dim() else None
    return found if isinstance(found, Tensor) else None


def counts_items_of(node: Node, count: float) -> bool:
    """Return whether a number is that of the items that a sum adds up: those selected for it, or left by its mask.

    Sums of weights may differ by rounding.

    Args:
        node: The sum.
        count: The number.
    """
    for child in (node, *elements(node)):
        left: float | None = None
        if kind_of(child) in PICKED:
            left = (shape_of(child) or (0,))[0]
        elif (mask := mask_of(child)) is not None and 0 < mask.numel() <= SMALL:
            left = scalar(mask.sum())
        elif mask is None:
            left = labels_of(child)
        if left is not None and math.isclose(left, count, rel_tol=1e-5, abs_tol=1e-6):
            return True
    return False


def labels_of(node: Node) -> float | None:
    """Return the number of labels that are not ignored in one loss for each item; None if the input is another."""
    inputs = [child for child in inputs_of(node) if child is not None]
    if len(inputs) != 1 or kind_of(inputs[0]) not in ("NllLoss", "NllLoss2D") or saved(inputs[0], "reduction"):
        return None
    target, ignored = saved(inputs[0], "target"), saved(inputs[0], "ignore_index")
    if not isinstance(target, Tensor) or target.numel() > SMALL:
        return None
    return scalar((target != ignored).sum())


def sums_of_mask(node: Node, dims: tuple[int, ...], sizes: tuple[int, ...], table: Tensor) -> Tensor | None:
    """Return the number of items that a mask leaves in each of several sums, if these are their divisors.

    The result has the shape of ``table``; None if they are not. Divisors of empty sums are ignored in the comparison.

    Args:
        node: The sum.
        dims: The dims it sums over.
        sizes: Shape of the summed tensor.
        table: The divisors of the sums.
    """
    for each in (node, *elements(node)):
        mask = mask_of(each)
        if mask is None or mask.numel() > SMALL or mask.dim() != len(sizes):
            continue
        counted = mask.sum(dims)
        for counts in (counted, counted * math.prod(sizes[dim] // mask.shape[dim] for dim in dims)):
            if counts.shape == table.shape and torch.allclose(torch.where(counts > 0, table, 0).to(counts), counts):
                return counts.to(torch.float64)
    return None


def is_empty_sum(node: Node) -> bool:
    """Return whether a sum is over no elements; its divisor, as in ``max(number_of_boxes, 1)``, is not a count then."""
    children = [child for child in inputs_of(node) if child is not None]
    return any(0 in (shape_of(child) or ()) for child in children)


def unclamped(count: Tensor | float, node: Node) -> Tensor | float:
    """Return zero in place of a count clamped by ``clamp(min=1)`` if the mask of the sum leaves no items."""
    if (not isinstance(count, Tensor) or count.device.type == "cpu") and count > 1:
        return count
    counted = next((mask for each in (node, *elements(node)) if (mask := mask_of(each)) is not None), None)
    if counted is None:
        left = next((left for each in (node, *elements(node)) if (left := labels_of(each)) is not None), None)
        return 0.0 if left == 0 else count
    if counted.numel() > SMALL:
        return count
    return torch.where(counted.any(), count, 0.0)
