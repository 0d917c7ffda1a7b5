"""Detection of the batch dim of a batch's tensors, and splitting of the batch into micro-batches.

A batch may have any structure, and does not specify its batch dim. Tensors with a common length along the batch dim are
cut along it. If lengths differ, samples cannot be distinguished from graph nodes, class weights or positions, and the
batch is refused until the user sets the batch dim or a split function.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from lightning_pardist.engines.pipeline.microbatch import MicroBatch
from lightning_pardist.engines.pipeline.nested import (
    ATOMS,
    children_of,
    hidden_tensor,
    named_children,
    tensors_in,
    with_children,
)

#: Batch dim: one for all tensors, or by name; None for a tensor that is passed uncut to every micro-batch.
BatchDim = int | Mapping[str, int | None]
#: Keys, fields and positions that lead to a value, outermost first.
_Path = tuple[str, ...]


class UnevenBatchError(ValueError):
    """Raised if tensors of a batch have different lengths along the batch dim; the message names them.

    Attributes:
        lengths: Length along the batch dim, by name of the tensor.
    """

    def __init__(self, lengths: Mapping[str, int]) -> None:
        self.lengths = dict(lengths)
        by_length: dict[int, list[str]] = {}
        for name, length in lengths.items():
            by_length.setdefault(length, []).append(name)
        found = ", ".join(f"{_listed(names)} {length}" for length, names in by_length.items())
        super().__init__(
            f"The tensors of a batch have several lengths along the batch dim: {found}. Set batch_dim, by name where"
            " tensors differ (None for one that goes whole to every micro-batch), or split_batch, a function that cuts"
            " a batch."
        )

    def __reduce__(self) -> Any:
        return UnevenBatchError, (self.lengths,)


@dataclass(frozen=True)
class CutTensor:
    """One tensor or list of a batch and the dim along which it is cut.

    Attributes:
        name: Keys, fields and positions that lead to it, joined by dots; empty for a batch that is one tensor.
        shape: Shape of the tensor, or ``(length,)`` of the list.
        dim: Dim along which it is cut; None if it is passed uncut to every micro-batch.
    """

    name: str
    shape: tuple[int, ...]
    dim: int | None


@dataclass(frozen=True)
class BatchCut:
    """Specification of how batches are cut into micro-batches.

    Attributes:
        batch_dim: Batch dim of tensors that have such a dim; dim 0 for tensors with fewer dims. A mapping sets it by
            name (``"0"``, ``"labels"``, ``"graph.x"``, or the name of a container) if tensors differ.
        whole: Names of tensors that are passed uncut to every micro-batch.
    """

    batch_dim: BatchDim = 0
    whole: frozenset[str] = frozenset()

    def size_of(self, batch: Any) -> int | None:
        """Return the number of samples in a batch; None if no tensor in it has a batch dim.

        For a list with a dict or similar container per sample, for instance a detector's boxes, it is the list's
        length.

        Args:
            batch: Tensor, tuple, list, dict, dataclass or any class that holds tensors in attributes.

        Raises:
            UnevenBatchError: If tensors have different lengths along the batch dim.
        """
        found = self._measured(batch)
        return None if found is None else found.size

    def samples_of(self, batch: Any) -> int | None:
        """Return the number of samples in a batch; None if its tensors have different lengths or no batch dim.

        Args:
            batch: As for :meth:`size_of`.
        """
        try:
            return self.size_of(batch)
        except UnevenBatchError:
            return None

    def split(self, batch: Any, num_microbatches: int) -> list[MicroBatch]:
        """Cut a batch into parts whose sizes differ by at most one; fewer parts if it has fewer samples.

        Tensors, arrays and lists with one item per sample are cut; everything else (flags, tensors without a batch dim,
        names in ``whole``) is passed unchanged to every part.

        Args:
            batch: As for :meth:`size_of`.
            num_microbatches: Maximum number of parts, at least 1.

        Raises:
            UnevenBatchError: If tensors have different lengths along the batch dim.
            ValueError: If an object holds tensors that cannot be reached.
        """
        if num_microbatches == 1:
            return [MicroBatch(batch, self.samples_of(batch) or 1)]
        found = self._measured(batch)
        if found is None or found.size < 2:
            return [MicroBatch(batch, 1)]
        if (hidden := hidden_tensor(batch)) is not None:
            raise ValueError(
                f"The batch holds tensors in a {hidden}, which cannot be split into micro-batches. Set split_batch, a"
                " function that cuts a batch."
            )
        count = min(num_microbatches, found.size)
        small, larger = divmod(found.size, count)
        sizes = [small + 1] * larger + [small] * (count - larger)
        parts, begin = [], 0
        for size in sizes:
            parts.append(MicroBatch(found.take(batch, begin, begin + size), size))
            begin += size
        return parts

    def describe(self, batch: Any) -> list[CutTensor]:
        """Return how each tensor and list of a batch is cut.

        Raises:
            UnevenBatchError: If tensors have different lengths along the batch dim.
        """
        found = self._measured(batch)
        return [] if found is None else [*found.report(batch)]

    def dim_of(self, path: _Path, ndim: int) -> int | None:
        """Return the batch dim of a tensor with ``ndim`` dims; None if it is specified to have none."""
        if not ndim or ".".join(path) in self.whole:
            return None
        dim: int | None = 0
        if isinstance(self.batch_dim, Mapping):
            for length in range(len(path), 0, -1):
                if (name := ".".join(path[:length])) in self.batch_dim:
                    dim = self.batch_dim[name]
                    break
        else:
            dim = self.batch_dim
        return None if dim is None else dim if -ndim <= dim < ndim else 0

    def _measured(self, batch: Any) -> _Measured | None:
        votes = _Votes(self)
        votes.take(batch, ())
        found = votes.decided()
        if found is not None:
            left = {each.name: each for each in found.report(batch) if found.is_odd(each)}
            if left:
                agreeing = {e.name: found.size for e in found.report(batch) if e.dim is not None}
                odd = {name: each.shape[self.dim_of(_path(name), len(each.shape)) or 0] for name, each in left.items()}
                raise UnevenBatchError(agreeing | odd)
        return found


@dataclass
class _Votes:
    """Candidates for the size of a batch, collected from its tensors and lists.

    Attributes:
        cut: Specification of the batch dims.
        sizes: Lengths along the batch dim of tensors outside lists.
        inside: The same for tensors in lists of tensors, each of which may be one sample or hold all samples.
        lists: Lengths of the lists of tensors.
        records: Per list of containers, each of which may belong to one sample or hold a batch: the list's length, and
            the sizes in the containers.
        samples: Per list of containers: its length, and whether a container holds tensors of different sizes, which
            shows that it belongs to one sample.
        alone: Whether the batch is a single list of tensors that differ along dim 0 only, for instance sequences.
    """

    cut: BatchCut
    sizes: list[int] = field(default_factory=list)
    inside: list[int] = field(default_factory=list)
    lists: list[int] = field(default_factory=list)
    records: list[tuple[int, list[int]]] = field(default_factory=list)
    samples: list[tuple[int, bool]] = field(default_factory=list)
    alone: bool = False

    def take(self, value: Any, path: _Path, above: tuple[int, ...] = ()) -> None:
        """Collect the candidates in a part of the batch, which the objects with the ids ``above`` contain."""
        if id(value) in above:
            return
        if isinstance(value, torch.Tensor):
            self.sizes += self._sizes([(path, value)])
        elif isinstance(value, (list, tuple)) and value and all(isinstance(item, torch.Tensor) for item in value):
            self.inside += self._sizes([((*path, name), item) for name, item in named_children(value) or ()])
            self.lists.append(len(value))
            self.alone = not path and len({(item.dtype, item.shape[1:]) for item in value}) == 1
        elif _are_records(value):
            each = [self._sizes(_named_tensors(item, (*path, str(i)))) for i, item in enumerate(value)]
            self.records.append((len(value), [size for sizes in each for size in sizes]))
            self.samples.append((len(value), any(len(set(sizes)) > 1 for sizes in each)))
        else:
            for name, child in named_children(value) or ():
                self.take(child, (*path, name), (*above, id(value)))

    def decided(self) -> _Measured | None:
        """Return the batch's size and which lists hold samples; None if there is no candidate."""
        for length, inner in self.records:
            if length in self.sizes:
                return _Measured(self.cut, length, by_records=True)
            if length in self.lists and set(inner) != set(self.inside):
                return _Measured(self.cut, length, by_records=True, by_lists=True)
        for length, certain in self.samples:
            if certain and not self.sizes:
                return _Measured(self.cut, length, by_records=True, by_lists=True)
        sizes = [*self.sizes, *self.inside, *(size for _, inner in self.records for size in inner)]
        # A length of 1 may be a broadcast dim: it counts only if there is no other.
        sizes = [size for size in sizes if size != 1] or sizes
        if not sizes:
            return None
        size, count = Counter(sizes).most_common(1)[0]
        lists = [length for length in self.lists if length > 1]
        # A list of tensors of different sizes, one per sample (images of a detector): the list is the batch.
        if len(sizes) > 2 and lists and (count == 1 or (self.alone and 2 * count <= len(self.inside))):
            return _Measured(self.cut, Counter(lists).most_common(1)[0][0], by_lists=True)
        return _Measured(self.cut, size)

    def _sizes(self, tensors: Sequence[tuple[_Path, torch.Tensor]]) -> list[int]:
        dims = [(tensor, self.cut.dim_of(path, tensor.ndim)) for path, tensor in tensors]
        return [tensor.shape[dim] for tensor, dim in dims if dim is not None]


@dataclass(frozen=True)
class _Measured:
    """Size of a batch, and how its lists are interpreted.

    Attributes:
        cut: Specification of the batch dims.
        size: Number of samples.
        by_lists: Whether each item of a list of tensors is a sample, whatever its size.
        by_records: Whether each item of a list of containers is a sample.
    """

    cut: BatchCut
    size: int
    by_lists: bool = False
    by_records: bool = False

    def is_odd(self, each: CutTensor) -> bool:
        """Return whether a tensor is left uncut without being specified so, and its length could be a batch size."""
        if each.dim is not None or not each.shape:
            return False
        dim = self.cut.dim_of(_path(each.name), len(each.shape))
        return dim is not None and each.shape[dim] not in (1, self.size)

    def take(self, value: Any, begin: int, end: int, path: _Path = ()) -> Any:
        """Return samples ``begin`` to ``end`` of a part of the batch."""
        if isinstance(value, torch.Tensor):
            dim = self._dim(path, value)
            return value if dim is None else _narrow(value, dim, begin, end)
        if self._is_list_of_samples(value, path):
            return value[begin:end]
        dim = self._dim(path, value) if _is_array(value) else None
        samples = () if dim is None else tuple([slice(None)] * dim + [slice(begin, end)])
        children = named_children(value)
        if children is None:
            return value[samples] if samples else value
        if samples and (part := _indexed(value, samples)) is not None:
            return part
        return with_children(value, [self.take(child, begin, end, (*path, name)) for name, child in children])

    def report(self, value: Any, path: _Path = ()) -> list[CutTensor]:
        """Return how the tensors and lists in a part of the batch are cut."""
        name = ".".join(path)
        if isinstance(value, torch.Tensor) or _is_array(value):
            return [CutTensor(name, tuple(value.shape), self._dim(path, value))]
        if self._is_list_of_samples(value, path):
            return [CutTensor(name, (len(value),), 0)]
        found = (self.report(child, (*path, key)) for key, child in named_children(value) or ())
        return [each for part in found for each in part]

    def _dim(self, path: _Path, tensor: Any) -> int | None:
        """Return the dim along which a tensor is cut; None if its length is not the batch's size."""
        dim = self.cut.dim_of(path, len(tensor.shape))
        return dim if dim is not None and tensor.shape[dim] == self.size else None

    def _is_list_of_samples(self, value: Any, path: _Path) -> bool:
        if type(value) not in (list, tuple) or len(value) != self.size or self.cut.dim_of(path, 1) is None:
            return False
        tensors = _named_tensors(value, path)
        by_tensor = all(self._dim(where, tensor) is not None for where, tensor in tensors)
        if all(isinstance(item, torch.Tensor) for item in value):
            return self.by_lists or not by_tensor
        return not tensors or (_are_records(value) and (self.by_records or not by_tensor))


def _are_records(value: Any) -> bool:
    """Return whether a value is a list of containers of one type: dicts and similar, or e.g. (image, dict) pairs."""
    if type(value) not in (list, tuple) or not tensors_in(value):
        return False
    children = [children_of(item) for item in value]
    if len({type(item) for item in value}) > 1 or any(each is None for each in children):
        return False
    if not isinstance(value[0], (list, tuple)):
        return True
    kinds = {tuple(isinstance(child, torch.Tensor) for child in each or ()) for each in children}
    return len(kinds) == 1 and len(set(next(iter(kinds)))) > 1


def _named_tensors(value: Any, path: _Path) -> list[tuple[_Path, torch.Tensor]]:
    if isinstance(value, torch.Tensor):
        return [(path, value)]
    children = named_children(value) or ()
    return [each for name, child in children for each in _named_tensors(child, (*path, name))]


def _indexed(value: Any, samples: tuple[slice, ...]) -> Any:
    """Return a slice of a container that supports indexing as a whole (TensorDict); None for any other."""
    if isinstance(value, tuple | list) or not hasattr(value, "__getitem__"):
        return None
    try:
        part = value[samples]
    except (TypeError, KeyError, IndexError, ValueError):
        return None
    return part if type(part) is type(value) else None


def _is_array(value: Any) -> bool:
    return not isinstance(value, ATOMS) and isinstance(getattr(value, "shape", None), tuple)


def _narrow(tensor: torch.Tensor, dim: int, begin: int, end: int) -> torch.Tensor:
    if tensor.layout is torch.strided and not tensor.is_nested:
        part = tensor.narrow(dim, begin, end - begin)
        plain = type(part) is torch.Tensor and not (part.requires_grad or part.is_inference())
        # Views share a version counter: an in-place write to one micro-batch would invalidate tensors autograd has
        # saved of the others. `.data` has its own counter.
        return part.data if plain else part
    if tensor.layout is torch.sparse_coo:
        return tensor.index_select(dim, torch.arange(begin, end, device=tensor.device))
    raise ValueError(
        f"The batch holds a tensor of layout {tensor.layout}, which cannot be cut into micro-batches. Set split_batch,"
        " a function that cuts a batch."
    )


def _path(name: str) -> _Path:
    return tuple(name.split(".")) if name else ()


def _listed(names: Sequence[str]) -> str:
    shown = [repr(name) if name else "the batch itself" for name in names[:4]]
    more = f" and {len(names) - 4} more have" if len(names) > 4 else " have" if len(names) > 1 else " has"
    return ", ".join(shown) + more


#: Takes a batch and the maximum number of parts; returns parts, as batches or :class:`MicroBatch` objects.
SplitFunction = Callable[[Any, int], Sequence[Any]]


def parts_of(split: SplitFunction, batch: Any, num_microbatches: int, cut: BatchCut) -> list[MicroBatch]:
    """Split a batch by a user's function, and determine the size of each micro-batch.

    Args:
        split: The user's function.
        batch: The batch.
        num_microbatches: Maximum number of parts.
        cut: Counts the samples of parts that are returned without a size.

    Raises:
        ValueError: If ``split`` returns no parts, more than the maximum, or parts whose samples cannot be counted.
    """
    parts = list(split(batch, num_microbatches))
    if not 1 <= len(parts) <= num_microbatches:
        raise ValueError(
            f"split_batch returned {len(parts)} micro-batches where 1 to {num_microbatches} were asked for."
        )
    try:
        return [part if isinstance(part, MicroBatch) else MicroBatch(part, cut.size_of(part) or 1) for part in parts]
    except UnevenBatchError as error:
        raise ValueError(
            f"split_batch returned micro-batches whose samples cannot be counted ({error.lengths}). Return"
            " MicroBatch(value, size) objects, with the number of samples in each."
        ) from error


def split_batch(batch: Any, num_microbatches: int, *, batch_dim: BatchDim = 0) -> list[MicroBatch]:
    """Cut one batch into micro-batches with :meth:`BatchCut.split`.

    Raises:
        UnevenBatchError: If tensors have different lengths along the batch dim.
    """
    return BatchCut(batch_dim).split(batch, num_microbatches)
