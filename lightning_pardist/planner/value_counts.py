"""Estimated result sizes of operators whose output shape depends on values, for tensors without values.

Needed for routers: an expert's number of tokens is the number of times its index was chosen. For results of a choice
(``topk``, ``argmax``) the number of alternatives is tracked, and for masks derived from them the fraction of elements
that is set, assuming uniform choices. For any other mask all elements are assumed to be set, an upper bound.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lightning_pardist.compat.fake_tensors import storage_key, to_copy, unique_values

_aten = torch.ops.aten
_CHOOSING = (_aten.topk.default, _aten.sort.default, _aten.sort.stable)
_CHOOSING_ONE = (_aten.argmax.default, _aten.argmin.default, _aten.argsort.default, _aten.argsort.stable)
_MAXIMUM = (_aten.max.dim, _aten.min.dim)
#: Operators that keep zeros zero and non-zeros non-zero.
_KEEPING = (
    *(to_copy, _aten.clone.default, _aten.gt.Scalar, _aten.ne.Scalar, _aten.index.Tensor, _aten.mul.Scalar),
    *(_aten.index_select.default, _aten.abs.default, _aten.repeat.default, _aten.cat.default),
)
_SCATTERING = (_aten.scatter.value, _aten.scatter_.value, _aten.scatter.src, _aten.scatter_.src)
_UNIQUE = (unique_values, _aten.unique_consecutive.default)


class ValueCounts:
    """Tracked properties of tensors without values.

    Args:
        make: Function that creates a tensor of a shape and dtype without values.
    """

    def __init__(self, make: Callable[[tuple[int, ...], torch.dtype], Tensor]) -> None:
        self._make = make
        #: By storage: number of alternatives of a choice, and fraction of non-zero elements.
        self._choices: dict[int, int] = {}
        self._shares: dict[int, float] = {}

    def forget(self, key: int) -> None:
        """Drop a freed storage."""
        self._choices.pop(key, None)
        self._shares.pop(key, None)

    def note(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        """Track the properties of an operator's results, without running it."""
        first = args[0] if args else None
        if isinstance(first, (list, tuple)) and func is _aten.cat.default:
            first = first[0]
        if not isinstance(first, Tensor):
            return
        if func in _CHOOSING or func in _CHOOSING_ONE or func in _MAXIMUM:
            place = 2 if func is _aten.topk.default else 1
            dim = kwargs.get("dim", args[place] if len(args) > place else None if func in _CHOOSING_ONE[:2] else -1)
            chosen = result if isinstance(result, Tensor) else result[1]
            self._choices[storage_key(chosen)] = first.numel() if dim is None or not first.dim() else first.shape[dim]
        elif func in _SCATTERING:
            dim, index = args[1], args[2]
            self._shares[storage_key(result)] = min(1.0, index.shape[dim] / max(1, first.shape[dim]))
        elif func in (_aten.eq.Scalar, _aten.eq.Tensor) and (choices := self._choices_of(*args[:2])):
            self._shares[storage_key(result)] = 1 / choices
        elif func is _aten.logical_not.default or func is _aten.bitwise_not.default:
            self._shares[storage_key(result)] = 1 - self._share(first)
        elif func in (_aten.logical_and.default, _aten.bitwise_and.Tensor, _aten.mul.Tensor):
            shares = [self._share(each) for each in args[:2] if isinstance(each, Tensor)]
            self._shares[storage_key(result)] = math.prod(shares)
        elif func in _KEEPING:
            key, new = storage_key(first), storage_key(result)
            if key in self._choices:
                self._choices[new] = self._choices[key]
            if key in self._shares:
                self._shares[new] = self._shares[key]

    def counted(self, func: Any, args: Any) -> Any:
        """Return a result of the estimated shape for operators with value-dependent shapes; None for any other."""
        if func is _aten.nonzero.default:
            return self._make((self._count(args[0]), args[0].dim()), torch.int64)
        if func is _aten.masked_select.default:
            shape = torch.broadcast_shapes(args[0].shape, args[1].shape)
            return self._make((round(self._share(args[1]) * shape.numel()),), args[0].dtype)
        if func in _UNIQUE:
            size = min(args[0].numel(), self._choices_of(args[0]) or args[0].numel())
            found = self._make((size,), args[0].dtype)
            if choices := self._choices_of(args[0]):
                self._choices[storage_key(found)] = choices
            return found, self._make(tuple(args[0].shape), torch.int64), self._make((size,), torch.int64)
        if func is _aten.bincount.default:
            least = args[2] if len(args) > 2 else 0
            weighted = len(args) > 1 and args[1] is not None
            size = max(least, self._choices_of(args[0]) or 1)
            return self._make((size,), torch.float64 if weighted else torch.int64)
        return None

    def positions(self, args: Any, is_unknown: Callable[[Tensor], bool]) -> Any:
        """Return an indexing operator's arguments with masks replaced by index tensors of the estimated length.

        Args:
            args: Arguments of the operator.
            is_unknown: Function that returns whether a mask has no values.
        """
        found: list[Any] = []
        for each in args[1]:
            if isinstance(each, Tensor) and each.dtype in (torch.bool, torch.uint8):
                count = self._count(each) if is_unknown(each) else int(each.count_nonzero())
                if len(args) > 2 and each.dim() == args[0].dim() and args[2].numel() > 1:
                    count = args[2].numel()
                elif len(args) > 2 and args[2].dim() > args[0].dim() - each.dim():
                    count = args[2].shape[0]
                found += [self._make((count,), torch.int64) for _ in range(each.dim())]
            else:
                found.append(each)
        return (args[0], found, *args[2:])

    def _count(self, tensor: Tensor) -> int:
        return round(self._share(tensor) * tensor.numel())

    def _share(self, tensor: Tensor) -> float:
        return self._shares.get(storage_key(tensor), 1.0)

    def _choices_of(self, *args: Any) -> int | None:
        found = (self._choices.get(storage_key(each)) for each in args if isinstance(each, Tensor))
        return next((each for each in found if each), None)
