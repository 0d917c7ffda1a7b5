"""Cut a batch into micro-batches and put results together again."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from lightning_pardist.engines.pipeline.structure import (
    children_of,
    flatten,
    replace_leaves,
    tensors_in,
    with_children,
)


@dataclass(frozen=True)
class MicroBatch:
    """A part of a batch.

    Attributes:
        value: Same structure as the batch.
        size: Samples in it.
    """

    value: Any
    size: int


def batch_size_of(batch: Any, *, batch_dim: int = 0) -> int | None:
    """Samples in a batch: the commonest size of its tensors along the batch dim; None if no tensor has one.

    Args:
        batch: Tensor, tuple, list, dict, dataclass or any class that holds tensors in attributes.
        batch_dim: Dim of the samples; tensors with fewer dims are taken to have them first.
    """
    sizes = [tensor.shape[_dim_of(tensor, batch_dim)] for tensor in tensors_in(batch) if tensor.ndim]
    lists = [length for length in _tensor_list_lengths(batch) if length > 1]
    if not sizes:
        return None
    counts = Counter(sizes)
    size, count = counts.most_common(1)[0]
    # Tensors of different sizes in a list, one a sample (images of a detector): then the list is the batch.
    if count == 1 and len(sizes) > 2 and lists:
        return Counter(lists).most_common(1)[0][0]
    return size


def split_batch(batch: Any, num_microbatches: int, *, batch_dim: int = 0) -> list[MicroBatch]:
    """Cut a batch into parts whose sizes differ by at most one; fewer parts if it has fewer samples.

    Tensors (and arrays) with the batch's size along the batch dim are cut, lists of as many items as well; everything
    else (class weights, position ids, flags) goes to every part as it is.

    Args:
        batch: As for :func:`batch_size_of`.
        num_microbatches: The most parts to make, at least 1.
        batch_dim: Dim of the samples.
    """
    total = batch_size_of(batch, batch_dim=batch_dim)
    if total is None or total < 2 or num_microbatches == 1:
        return [MicroBatch(batch, total if total is not None else 1)]
    count = min(num_microbatches, total)
    small, larger = divmod(total, count)
    sizes = [small + 1] * larger + [small] * (count - larger)
    parts, begin = [], 0
    for size in sizes:
        parts.append(MicroBatch(_take(batch, begin, begin + size, total, batch_dim), size))
        begin += size
    return parts


def fresh_copy(value: Any, *, clone: bool = True) -> Any:
    """New containers around the same values, so that a step that pops keys or writes in place can run again.

    Args:
        value: Any nested value.
        clone: Whether tensors are copied as well.
    """

    def copied(leaf: Any) -> Any:
        return leaf.clone() if clone and isinstance(leaf, torch.Tensor) else leaf

    return replace_leaves(value, [copied(leaf) for leaf in flatten(value)[0]])


#: Puts the numbers at one place of a result together: takes the place, as indices from the outside in, and the numbers.
CombineNumbers = Callable[[tuple[int, ...], list[Any]], Any]


def merge_results(
    results: Sequence[Any],
    weights: Sequence[float],
    sizes: Sequence[int],
    *,
    combine: CombineNumbers | None = None,
    place: tuple[int, ...] = (),
) -> Any:
    """One result out of the micro-batches' results: samples are concatenated, numbers averaged by weight.

    Samples are tensors with a micro-batch's size in front, and lists with an item a sample.

    Args:
        results: What the step returned for each micro-batch.
        weights: Share of each in the batch's loss; they add up to 1.
        sizes: Samples of each.
        combine: What becomes of numbers, instead of their average.
        place: Where the results stand in a larger value.

    Returns:
        The same structure; the first result's leaf where leaves are neither tensors nor numbers, and the list of what
        the micro-batches gave where their structures differ.
    """
    first = results[0]
    if len(results) == 1:
        return first
    if _are_samples(results, sizes):
        return type(first)(item for result in results for item in result)
    children = [inside for result in results if (inside := children_of(result)) is not None]
    if not children:
        return _merge(list(results), weights, sizes, combine, place)
    if len(children) < len(results) or len({_shape_of(result) for result in results}) > 1:
        return list(results)
    columns = enumerate(zip(*children, strict=True))
    merged = [merge_results(each, weights, sizes, combine=combine, place=(*place, index)) for index, each in columns]
    return with_children(first, merged)


def _shape_of(container: Any) -> tuple[Any, ...]:
    keys = tuple(container) if isinstance(container, Mapping) else ()
    return type(container), len(children_of(container) or ()), keys


def _are_samples(results: Sequence[Any], sizes: Sequence[int]) -> bool:
    pairs = list(zip(results, sizes, strict=True))
    if any(type(result) not in (list, tuple) or len(result) != size for result, size in pairs):
        return False
    # Not a few tensors that each hold all samples.
    return not all(
        isinstance(item, torch.Tensor) and item.shape[:1] == (size,) for result, size in pairs for item in result
    )


def _merge(
    column: list[Any],
    weights: Sequence[float],
    sizes: Sequence[int],
    combine: CombineNumbers | None,
    place: tuple[int, ...],
) -> Any:
    first = column[0]
    if isinstance(first, bool) or not isinstance(first, (torch.Tensor, int, float)):
        return first
    if isinstance(first, torch.Tensor):
        batched = all(t.ndim and t.shape[0] == size for t, size in zip(column, sizes, strict=True))
        if batched and all(t.shape[1:] == first.shape[1:] for t in column):
            return torch.cat(column)
        if any(t.shape != first.shape for t in column):
            return column
    if combine is not None:
        return combine(place, column)
    return weighted_mean(column, weights)


def weighted_mean(column: Sequence[Any], weights: Sequence[float]) -> Any:
    """The mean of numbers, or of tensors of one shape; of integers rounded, of integer tensors a list of them all.

    Args:
        column: The numbers.
        weights: As many, adding up to 1.
    """
    first = column[0]
    if isinstance(first, torch.Tensor) and not first.is_floating_point():
        return list(column)
    # What weighs nothing may be no number: the mean loss of no tokens.
    counted = [item * weight for item, weight in zip(column, weights, strict=True) if weight]
    mean = sum(counted[1:], counted[0]) if counted else first
    return mean if isinstance(first, (torch.Tensor, float)) else type(first)(round(mean))


def _take(value: Any, begin: int, end: int, total: int, batch_dim: int) -> Any:
    if isinstance(value, torch.Tensor):
        dim = _dim_of(value, batch_dim)
        return value.narrow(dim, begin, end - begin) if value.ndim and value.shape[dim] == total else value
    if type(value) is list or type(value) is tuple:
        tensors = [item for item in value if isinstance(item, torch.Tensor)]
        by_tensor = tensors and all(t.ndim and t.shape[_dim_of(t, batch_dim)] == total for t in tensors)
        if len(value) == total and not by_tensor and (len(tensors) == total or not tensors_in(value)):
            return value[begin:end]
    children = children_of(value)
    if children is None:
        shape = getattr(value, "shape", None)
        return value[begin:end] if isinstance(shape, tuple) and len(shape) > 0 and shape[0] == total else value
    return with_children(value, [_take(child, begin, end, total, batch_dim) for child in children])


def _tensor_list_lengths(value: Any) -> list[int]:
    if isinstance(value, (list, tuple)):
        own = [len(value)] if value and all(isinstance(item, torch.Tensor) for item in value) else []
        return own + [length for item in value for length in _tensor_list_lengths(item)]
    if isinstance(value, dict):
        return [length for item in value.values() for length in _tensor_list_lengths(item)]
    return []


def _dim_of(tensor: torch.Tensor, batch_dim: int) -> int:
    return batch_dim if batch_dim < tensor.ndim else 0
