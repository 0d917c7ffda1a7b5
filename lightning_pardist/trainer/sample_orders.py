"""Detects samples that a step combines with others of its batch: Mixup by ``x.flip(0)``, CutMix by a random index.

If each rank or micro-batch has a part of the samples, a sample is combined with another one than on one process. Mixed
tensors usually have no gradient, so no autograd graph shows it. So the functions that a step calls are traced from the
batch, with the order of the samples in each result. A batch that is reordered as a whole, including its labels, is the
same batch: only functions of tensors in different orders count.

[Note: selections of another length]
``i, j = torch.triu_indices(n, n, 1)`` selects both sides of all pairs. An index that the batch contains or that is
computed from it (edges of graphs, the tokens of an expert) belongs to the samples of a rank and says nothing about
those of other ranks. So orders of another length than the batch's are followed only if the step makes the index itself,
from sizes alone or by searching a table of all pairs.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakTensorKeyDictionary

from lightning_pardist.engines.pipeline.nested import tensors_in
from lightning_pardist.trainer.batch_figures import DIM_AT, given_tensors, reduced_dims

#: Index of the sample at each position of a dim.
_Order = tuple[int, ...]
_PICKING = {"index_select", "__getitem__"}
_REORDERING = {"flip", "flipud", "roll", *_PICKING}
_TURNING = {"t", "t_", "transpose", "permute", "swapaxes", "swapdims", "movedim", "moveaxis", "adjoint", "__get__"}
#: Functions that concatenate or stack tensors without combining their samples.
SIDE_BY_SIDE = {"cat", "concat", "concatenate", "stack", "vstack", "hstack"}
#: Functions that write the results of selected samples to the places of these samples.
_PLACING = {"__setitem__", "index_add", "index_add_", "index_copy", "index_copy_", "index_put", "index_put_"}
_PLACING |= {"scatter", "scatter_", "scatter_add", "scatter_add_", "index_reduce", "index_reduce_"}
_SEARCHING = {"nonzero", "where", "argwhere"}


class SampleOrders(TorchFunctionMode):
    """Torch function mode that traces the functions of a step from its batch.

    Args:
        batch: Batch of the step.
        samples: Number of samples in it.

    Attributes:
        found: Description of the first function of samples in two orders; None if there is none.
    """

    def __init__(self, batch: Any, samples: int) -> None:
        super().__init__()
        self.found: str | None = None
        self._samples = samples
        self._as_given: _Order = tuple(range(samples))
        #: Name of the function that created each order.
        self._names: dict[_Order, str] = {}
        #: By tensor, the dim that holds samples, and their order.
        self._known: Any = WeakTensorKeyDictionary()
        #: Tensors that the step computed from sizes alone, and the results of searching :attr:`_pairs`.
        self._made: Any = WeakTensorKeyDictionary()
        #: Tensors with samples along two dims, computed from tensors with samples along one.
        self._pairs: Any = WeakTensorKeyDictionary()
        for each in tensors_in(batch):
            if each.shape[:1] == (samples,):
                self._known[each] = 0, self._as_given

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        output = func(*args, **kwargs)
        if self.found is None and self._samples > 1:
            self._follow(getattr(func, "__name__", ""), args, kwargs, output)
        return output

    def _follow_indices(self, name: str, given: list[Tensor], results: list[Tensor]) -> None:
        """Update the tensors that are made by the step, and those that hold pairs of samples."""
        if all(each in self._made for each in given) or (
            name in _SEARCHING and len(given) == 1 and given[0] in self._pairs
        ):
            self._made.update((each, True) for each in results)
        sources = [each for each in given if each not in self._made]
        if sources and all(
            each in self._pairs or (each in self._known and self._dims_of(each) == 1) for each in sources
        ):
            self._pairs.update((each, True) for each in results if self._dims_of(each) > 1)

    def _dims_of(self, tensor: Tensor) -> int:
        """Return the number of dims whose size is the number of samples."""
        return sum(size == self._samples for size in tensor.shape)

    def _follow(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        results = [each for each in given_tensors(output) if type(each) is Tensor]
        self._follow_indices(name, given_tensors([args, kwargs]), results)
        source = args[0] if args and isinstance(args[0], Tensor) else None
        if source is not None and name in _REORDERING and results:
            self._reordered(name, source, args[1:], kwargs, results[0])
            return
        # An index selects samples, and is not itself combined with them.
        given = [args[0], *args[2:]] if name == "__setitem__" else [args, kwargs]
        known = [self._known[each] for each in given_tensors(given) if each in self._known]
        if not known or name in SIDE_BY_SIDE:
            return
        orders = list(dict.fromkeys(order for _, order in known))
        if name in _PLACING and any(len(order) != self._samples for order in orders):
            return
        # Boolean results are logged, or select from tensors that have an order themselves.
        if len(orders) > 1 and (name == "__setitem__" or any(each.dtype != torch.bool for each in results)):
            how = next((self._names[order] for order in orders if order in self._names), "")
            self.found = f"{name.strip('_')} of tensors whose samples are in different orders, one by {how}"
            return
        dim, order = known[0]
        for each in results if len(orders) == 1 else []:
            if (place := self._dim_after(name, args, kwargs, dim, order, each)) is not None:
                self._known[each] = place, order

    def _dim_after(
        self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], dim: int, order: _Order, result: Tensor
    ) -> int | None:
        """Return the dim of a result that holds samples; None if there is none or it is ambiguous."""
        reduces = name in DIM_AT and not (len(args) > 1 and isinstance(args[1], Tensor))
        if reduces and (dim or dim in reduced_dims(name, args, kwargs, given_tensors([args, kwargs])[0].dim())):
            return None
        if name in _TURNING:
            places = [place for place, size in enumerate(result.shape) if size == len(order)]
            return places[0] if len(places) == 1 else None
        return dim if result.dim() > dim and result.shape[dim] == len(order) else None

    def _reordered(
        self, name: str, source: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any], result: Tensor
    ) -> None:
        known = self._known.get(source)
        if known is None and source.grad_fn is not None and source.shape[:1] == (self._samples,):
            # Custom autograd functions, which function modes do not see, came between.
            known = self._known[source] = 0, self._as_given
        if known is None:
            picked = [self._known[each] for each in given_tensors([args, kwargs]) if each in self._known]
            if picked and result.shape[:1] == (len(picked[0][1]),):
                self._known[result] = 0, picked[0][1]
            return
        dim, order = known
        # In trial runs without real data, indices have no values.
        with suppress(Exception):
            moved = _moved(name, args, kwargs, source, dim)
            is_followed = len(moved) == len(order) or len(order) != self._samples or self._is_made(args, kwargs)
            if moved and is_followed and result.shape[dim : dim + 1] == (len(moved),):
                self._put(result, dim, tuple(order[place] for place in moved), name)

    def _is_made(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Return whether the step made the tensors of an index itself."""
        given = given_tensors([args, kwargs])
        return bool(given) and all(each in self._made for each in given)

    def _put(self, result: Tensor, dim: int, order: _Order, name: str) -> None:
        if order != self._as_given:
            self._names.setdefault(order, "an index" if name in _PICKING else name)
        self._known[result] = dim, order


def _moved(name: str, args: tuple[Any, ...], kwargs: dict[str, Any], source: Tensor, dim: int) -> list[int]:
    """Return, for each position of the result, its position in ``dim`` of ``source``; empty if unknown."""
    ndim, places = source.dim(), torch.arange(source.shape[dim])

    def given(at: int, key: str, otherwise: Any = ()) -> Any:
        return kwargs.get(key, args[at] if len(args) > at else otherwise)

    if name == "flipud":
        return places.flip(0).tolist() if dim == 0 else places.tolist()
    if name == "flip":
        dims = _numbers(kwargs.get("dims", args))
        return places.flip(0).tolist() if dim in [each % ndim for each in dims] else places.tolist()
    if name == "roll":
        dims = _numbers(given(1, "dims")) or ([0] if ndim == 1 else [])
        shifts = zip(_numbers(given(0, "shifts")), dims, strict=True)
        return places.roll(sum(shift for shift, each in shifts if each % ndim == dim)).tolist()
    if name == "index_select":
        return places[given(1, "index").cpu()].tolist() if given(0, "dim", 0) % ndim == dim else places.tolist()
    indices = args[0] if isinstance(args[0], tuple) else (args[0],)
    kept = [place for place, each in enumerate(indices) if each is Ellipsis]
    if kept:
        rest = ndim - len(indices) + 1
        indices = (*indices[: kept[0]], *[slice(None)] * rest, *indices[kept[0] + 1 :])
    if any(each is None or isinstance(each, int) for each in indices[: dim + 1]):
        return []
    index = indices[dim] if dim < len(indices) else slice(None)
    moved = places[index if isinstance(index, slice) else torch.as_tensor(index).cpu()]
    return moved.tolist() if moved.dim() == 1 else []


def _numbers(found: Any) -> list[int]:
    found = found[0] if isinstance(found, tuple) and len(found) == 1 and not isinstance(found[0], int) else found
    return [found] if isinstance(found, int) else list(found)
