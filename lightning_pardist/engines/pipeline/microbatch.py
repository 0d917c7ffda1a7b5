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

    Where a list holds a dict (or the like) for each sample, as detectors have their boxes, the list's length counts.

    Args:
        batch: Tensor, tuple, list, dict, dataclass or any class that holds tensors in attributes.
        batch_dim: Dim of the samples; tensors with fewer dims are taken to have them first.
    """
    whole = _measured(batch, batch_dim)
    return None if whole is None else whole.size


def _measured(batch: Any, batch_dim: int) -> _Whole | None:
    """The batch's size, and what says so; None if nothing does."""
    votes = _Votes(batch_dim)
    votes.take(batch)
    for length, inner in votes.records:
        if length in votes.sizes:
            return _Whole(length, batch_dim, by_records=True)
        if length in votes.lists and set(inner) != set(votes.inside):
            return _Whole(length, batch_dim, by_records=True, by_lists=True)
    for length, certain in votes.samples:
        if certain and not votes.sizes:
            return _Whole(length, batch_dim, by_records=True, by_lists=True)
    sizes = [*votes.sizes, *votes.inside, *(size for _, inner in votes.records for size in inner)]
    if not sizes:
        return None
    size, count = Counter(sizes).most_common(1)[0]
    lists = [length for length in votes.lists if length > 1]
    # Tensors of different sizes in a list, one a sample (images of a detector): then the list is the batch.
    if count == 1 and len(sizes) > 2 and lists:
        return _Whole(Counter(lists).most_common(1)[0][0], batch_dim, by_lists=True)
    return _Whole(size, batch_dim)


class _Votes:
    """What speaks for the size of a batch.

    Attributes:
        sizes: Of tensors outside of lists.
        inside: Of tensors in lists of tensors, each of which may be a sample or hold all samples.
        lists: Lengths of such lists.
        records: Lengths of lists of containers, each of which may be a sample's or a whole batch, and sizes in them.
        samples: The same lengths, and whether tensors of several sizes in one container tell that it is a sample's.
    """

    def __init__(self, batch_dim: int) -> None:
        self.batch_dim = batch_dim
        self.sizes: list[int] = []
        self.inside: list[int] = []
        self.lists: list[int] = []
        self.records: list[tuple[int, list[int]]] = []
        self.samples: list[tuple[int, bool]] = []

    def take(self, value: Any) -> None:
        """Look into a part of the batch."""
        if isinstance(value, torch.Tensor):
            self.sizes += self._sizes([value])
        elif isinstance(value, (list, tuple)) and value and all(isinstance(item, torch.Tensor) for item in value):
            self.inside += self._sizes(value)
            self.lists.append(len(value))
        elif _are_records(value):
            each = [self._sizes(tensors_in(item)) for item in value]
            self.records.append((len(value), [size for sizes in each for size in sizes]))
            self.samples.append((len(value), any(len(set(sizes)) > 1 for sizes in each)))
        else:
            for child in children_of(value) or ():
                self.take(child)

    def _sizes(self, tensors: Sequence[torch.Tensor]) -> list[int]:
        return [tensor.shape[_dim_of(tensor, self.batch_dim)] for tensor in tensors if tensor.ndim]


def _are_records(value: Any) -> bool:
    """Whether a list holds containers of one kind: dicts and the like, or an image and a dict in each."""
    if type(value) not in (list, tuple) or not tensors_in(value):
        return False
    children = [children_of(item) for item in value]
    if len({type(item) for item in value}) > 1 or any(each is None for each in children):
        return False
    if not isinstance(value[0], (list, tuple)):
        return True
    kinds = {tuple(isinstance(child, torch.Tensor) for child in each or ()) for each in children}
    return len(kinds) == 1 and len(set(next(iter(kinds)))) > 1


def split_batch(batch: Any, num_microbatches: int, *, batch_dim: int = 0) -> list[MicroBatch]:
    """Cut a batch into parts whose sizes differ by at most one; fewer parts if it has fewer samples.

    Tensors (and arrays) with the batch's size along the batch dim are cut, lists of as many items as well; everything
    else (class weights, position ids, flags) goes to every part as it is.

    Args:
        batch: As for :func:`batch_size_of`.
        num_microbatches: The most parts to make, at least 1.
        batch_dim: Dim of the samples.
    """
    whole = _measured(batch, batch_dim)
    if whole is None or whole.size < 2 or num_microbatches == 1:
        return [MicroBatch(batch, 1 if whole is None else whole.size)]
    count = min(num_microbatches, whole.size)
    small, larger = divmod(whole.size, count)
    sizes = [small + 1] * larger + [small] * (count - larger)
    parts, begin = [], 0
    for size in sizes:
        parts.append(MicroBatch(_take(batch, begin, begin + size, whole), size))
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


@dataclass(frozen=True)
class _Whole:
    """A batch to be cut.

    Attributes:
        size: Its samples.
        batch_dim: The dim of tensors that holds them.
        by_lists: Whether an item of a list of tensors is a sample, whatever its size.
        by_records: Whether an item of a list of dicts is.
    """

    size: int
    batch_dim: int
    by_lists: bool = False
    by_records: bool = False

    def has_all(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor holds all samples."""
        return tensor.ndim > 0 and tensor.shape[_dim_of(tensor, self.batch_dim)] == self.size


def _holds_samples(value: Sequence[Any], whole: _Whole) -> bool:
    """Whether a list with as many items as the batch has samples holds one in each."""
    tensors = tensors_in(value)
    by_tensor = all(map(whole.has_all, tensors))
    if all(isinstance(item, torch.Tensor) for item in value):
        return whole.by_lists or not by_tensor
    return not tensors or (_are_records(value) and (whole.by_records or not by_tensor))


def _take(value: Any, begin: int, end: int, whole: _Whole) -> Any:
    if isinstance(value, torch.Tensor):
        return value.narrow(_dim_of(value, whole.batch_dim), begin, end - begin) if whole.has_all(value) else value
    is_list = type(value) is list or type(value) is tuple
    if is_list and len(value) == whole.size and _holds_samples(value, whole):
        return value[begin:end]
    children = children_of(value)
    if children is None:
        shape = getattr(value, "shape", None)
        cut = isinstance(shape, tuple) and len(shape) > 0 and shape[0] == whole.size
        return value[begin:end] if cut else value
    return with_children(value, [_take(child, begin, end, whole) for child in children])


def _dim_of(tensor: torch.Tensor, batch_dim: int) -> int:
    return batch_dim if batch_dim < tensor.ndim else 0
