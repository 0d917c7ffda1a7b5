"""Decide which divisors of a sum over the batch are counts of its items.

[Note: which divisor is a count]
A sum over the batch is a mean if it is divided by a count of items on the way to the loss: ``/ mask.sum()``,
``/ len(x)``, ``* (1 / n)``. A Python number may also be a constant: ``/ 100``, or the size of the whole batch. It is
taken as a count if it is the number of summed samples, times the sizes of other summed dims; if it is a multiple of at
least 8 samples, such as samples times pixels, and neither a power of ten nor a multiple of the samples of all ranks; or
if items were selected by their values and their number is not known. A factor such as 0.1 or 0.25 is taken as a weight
unless exactly 10 or 4 items were selected or left by a mask; 0.0625 and 0.142857 are taken as 1/16 and 1/7. A number
that differs between parts of a batch is no constant, which a comparison of parts detects.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.autograd.graph import Node

from lightning_pardist.compat.autograd_graph import inputs_of, is_python_number, kind_of, saved, scalar, shape_of
from lightning_pardist.engines.common.batch_dim import PICKED, SAME
from lightning_pardist.engines.common.masked_sums import SMALL, elements, labels_of, mask_of

#: Number of samples of which a constant is unlikely to be a multiple.
_MANY = 8
#: Operations that commute with a sum, up to the arrangement of elements.
_LINEAR = SAME | {"Mul", "Div", "Sum"}


@dataclass(frozen=True)
class Divisor:
    """A divisor of a term.

    Attributes:
        value: A Python number or a tensor.
        at: Position of the division; None if it is below the reduction.
        rounded: Whether it stems from a factor of one or two digits, which is more likely a weight.
        table: Whether the value has one divisor for each of several sums over the batch, such as one per class.
    """

    value: Any
    at: Any = None
    rounded: bool = False
    table: bool = False


def counts_among(
    divisors: Sequence[Divisor],
    sizes: tuple[int, ...],
    dim: int,
    samples: int | None,
    ranks: int,
    *,
    picked: bool,
) -> list[Divisor]:
    """Return the divisors of a sum over the batch that are counts, not constants such as 2 or a temperature.

    Args:
        divisors: Tensors computed by the step, or Python numbers.
        sizes: Shape of the summed tensor.
        dim: Dim of the samples, or of their items such as tokens.
        samples: Number of samples in the batch, if known.
        ranks: Number of ranks that the batch is divided among.
        picked: Whether the summed items were selected by their values, so that their number can be any.
    """
    computed = [each for each in divisors if is_computed(each.value)]
    if computed:
        return computed
    items = sizes[dim] if sizes else 1
    features = _products([size for place, size in enumerate(sizes) if place != dim])

    def is_size(number: float) -> bool:
        return number == samples or bool(items and number / items in features)

    counted, other = [], []
    for each in divisors:
        number = number_of(each.value)
        if number is None or number < 1 or each.rounded:
            continue
        if is_size(number):
            counted.append(each)
        elif (picked and number >= max(min(items, samples or items), 1)) or (
            number not in features and not is_size(number / ranks) and _is_multiple(number, samples or items)
        ):
            other.append(each)
    if counted or other:
        return counted[-1:] or other
    numbers = [(each, number) for each in divisors if (number := number_of(each.value)) is not None]
    product = math.prod(number for _, number in numbers)
    # A factor that equals the number of ranks makes up for their average.
    least = max(min(items, samples or items), 3)
    by_hand = any(ranks * number == 1 for _, number in numbers)
    by_hand &= any(number >= least and not each.rounded and not is_power_of_ten(number) for each, number in numbers)
    is_count = any(number < 1 for _, number in numbers) and (is_size(product) or by_hand)
    return [each for each, _ in numbers] if is_count else []


def is_count_of(node: Node, number: float | None) -> bool:
    """Return whether a number is the count of items that were selected for a sum or left by its mask.

    For a mask that leaves none, 1 is taken as the count.
    """
    if number is None:
        return False
    for child in (node, *elements(node)):
        if kind_of(child) in PICKED:
            return (shape_of(child) or (0,))[0] == number
        mask = mask_of(child)
        if mask is not None:
            left = scalar(mask.sum()) if 0 < mask.numel() <= SMALL else None
            if left == 0:
                return number == 1
            return left is not None and number in (left, left * math.prod(shape_of(child) or ()) / mask.numel())
        left = labels_of(child)
        if left is not None:
            return number == max(left, 1)
    return False


def divisors_inside(node: Node) -> Iterator[Any]:
    """Yield divisors below a sum that divide all of its elements, equivalent to dividing the sum."""
    for child in elements(node, _LINEAR):
        if kind_of(child) != "Div" or inputs_of(child)[1:] not in ([], [None]):
            continue
        other, sizes = saved(child, "other"), shape_of(child) or ()
        # One number for each of one sample.
        of_sample = isinstance(other, Tensor) and 0 < other.dim() == len(sizes) and sizes[0] == 1
        if not of_sample:
            yield other


def number_of(value: Any) -> float | None:
    """Return a divisor as a number if it is a Python number, not one that was computed by the step."""
    return scalar(value) if is_python_number(value) else None


def product_of_numbers(divisors: Sequence[Divisor]) -> float:
    """Return the product of the Python numbers that may be counts: no factors, such as weights of samples."""
    numbers = [number_of(each.value) for each in divisors if not each.rounded]
    return math.prod(number for number in numbers if number is not None)


def is_computed(divisor: Any) -> bool:
    """Return whether a divisor is a tensor of one element that was computed by the step."""
    return isinstance(divisor, Tensor) and divisor.numel() == 1 and number_of(divisor) is None


def reciprocal(factor: float) -> float | None:
    """Return n if a factor is 1/n for an integer n; None otherwise."""
    count = 1 / abs(factor) if 0 < abs(factor) <= 1 else 0.0
    return float(round(count)) if count and math.isclose(count, round(count), rel_tol=1e-6) else None


def is_rounded(factor: float) -> bool:
    """Return whether a number has at most two significant digits, as weights such as 0.1 or 0.25."""
    return math.isclose(factor, float(f"{factor:.1e}"), rel_tol=1e-7)


def _is_multiple(number: float, samples: int) -> bool:
    """Return whether a number is more likely samples times a size, such as pixels, than a constant."""
    return samples >= _MANY and number % samples == 0 and not is_power_of_ten(number)


def is_power_of_ten(number: float) -> bool:
    """Return whether a positive number is 1, 10, 100 and so on."""
    return math.log10(number).is_integer()


def _products(sizes: Sequence[int]) -> set[int]:
    """Return the products of all subsets of the first 8 sizes, including 1 for the empty subset."""
    found = {1}
    for size in sizes[:8]:
        found |= {size * each for each in found}
    return found
