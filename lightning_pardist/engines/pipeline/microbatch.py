"""Micro-batches, and merging of their results into the result of the batch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from lightning_pardist.engines.pipeline.nested import children_of, flatten, replace_leaves, with_children


@dataclass(frozen=True)
class MicroBatch:
    """A part of a batch.

    Attributes:
        value: The part, of the same structure as the batch.
        size: Number of samples.
    """

    value: Any
    size: int


def fresh_copy(value: Any, *, clone: bool = True) -> Any:
    """Copy the containers of a nested value, for a step that pops keys or writes in place and will run again.

    Args:
        value: Any nested value.
        clone: Whether to clone tensors as well.
    """

    def copied(leaf: Any) -> Any:
        return leaf.clone() if clone and isinstance(leaf, torch.Tensor) else leaf

    return replace_leaves(value, [copied(leaf) for leaf in flatten(value)[0]])


#: Combines the numbers at one place of the results: takes the place (indices, outermost first), the numbers, and the
#: indices of their micro-batches.
CombineNumbers = Callable[[tuple[int, ...], list[Any], Sequence[int]], Any]


def merge_results(
    results: Sequence[Any],
    weights: Sequence[float],
    sizes: Sequence[int],
    *,
    combine: CombineNumbers | None = None,
) -> Any:
    """Merge the micro-batches' results into one: samples are concatenated, numbers averaged by weight.

    Samples are tensors whose dim 0 is the micro-batch's size, and lists with one item per sample. At a place where only
    some micro-batches returned None, these are left out.

    Args:
        results: The step's result for each micro-batch.
        weights: Weight of each micro-batch in the batch's loss.
        sizes: Number of samples of each micro-batch.
        combine: Combines numbers; by default they are averaged.

    Returns:
        The same structure; the first result's leaf for leaves that are neither tensors nor numbers, and a list of the
        micro-batches' values where their structures differ.
    """
    return _Merge(weights, sizes, combine)(results, range(len(results)), ())


@dataclass(frozen=True)
class _Merge:
    """Recursive merge of the micro-batches' results at one place and below it."""

    weights: Sequence[float]
    sizes: Sequence[int]
    combine: CombineNumbers | None

    def __call__(self, results: Sequence[Any], which: Sequence[int], place: tuple[int, ...]) -> Any:
        known = [(result, index) for result, index in zip(results, which, strict=True) if result is not None]
        if known and len(known) < len(results):
            results, which = [result for result, _ in known], [index for _, index in known]
        first = results[0]
        if len(results) == 1:
            return first
        if _are_samples(results, [self.sizes[index] for index in which]):
            return type(first)(item for result in results for item in result)
        children = [inside for result in results if (inside := children_of(result)) is not None]
        if not children:
            return self._leaf(list(results), which, place)
        if len(children) < len(results) or len({_shape_of(result) for result in results}) > 1:
            return list(results)
        columns = enumerate(zip(*children, strict=True))
        return with_children(first, [self(each, which, (*place, index)) for index, each in columns])

    def _leaf(self, column: list[Any], which: Sequence[int], place: tuple[int, ...]) -> Any:
        first = column[0]
        if isinstance(first, bool) or not isinstance(first, (torch.Tensor, int, float)):
            return first
        if isinstance(first, torch.Tensor):
            batched = all(t.ndim and t.shape[0] == self.sizes[index] for t, index in zip(column, which, strict=True))
            if batched and all(t.shape[1:] == first.shape[1:] for t in column):
                return torch.cat(column)
            if any(t.shape != first.shape for t in column):
                return column
        if self.combine is not None:
            return self.combine(place, column, which)
        weights = [self.weights[index] for index in which]
        total = sum(weights)
        return weighted_mean(column, [weight / total if total else 1 / len(weights) for weight in weights])


def _shape_of(container: Any) -> tuple[Any, ...]:
    keys = tuple(container) if isinstance(container, Mapping) else ()
    return type(container), len(children_of(container) or ()), keys


def _are_samples(results: Sequence[Any], sizes: Sequence[int]) -> bool:
    pairs = list(zip(results, sizes, strict=True))
    if any(type(result) not in (list, tuple) or len(result) != size for result, size in pairs):
        return False
    # Exclude a list of tensors that each hold all samples, whose number happens to equal the size.
    return not all(
        isinstance(item, torch.Tensor) and item.shape[:1] == (size,) for result, size in pairs for item in result
    )


def weighted_mean(column: Sequence[Any], weights: Sequence[float]) -> Any:
    """Return the weighted mean of numbers or of tensors of one shape; rounded for ints, a list for integer tensors.

    Args:
        column: The numbers or tensors.
        weights: One weight each, with sum 1.
    """
    first = column[0]
    if isinstance(first, torch.Tensor) and not first.is_floating_point():
        return list(column)
    # Skip zero-weight parts: a mean over no tokens is NaN.
    counted = [item * weight for item, weight in zip(column, weights, strict=True) if weight]
    mean = sum(counted[1:], counted[0]) if counted else first
    return mean if isinstance(first, (torch.Tensor, float)) else type(first)(round(mean))
