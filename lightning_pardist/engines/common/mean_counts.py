"""Record what the means of a step divide by: targets that are not ignored, elements that a mask selects.

A mean over part of a batch weighs as much as it has items in the mean over the whole batch. In training these counts
are found in the graph of the loss (:mod:`~lightning_pardist.engines.common.loss_terms`); here, where there is no
graph, they are noted as the means are computed.
"""

from __future__ import annotations

import inspect
import math
import weakref
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_pardist.compat import patches
from lightning_pardist.compat.tensors import in_transform, is_changed

_LABELLED = {name: inspect.signature(getattr(F, name)) for name in patches.LABEL_LOSSES}
_ELEMENTWISE = {name: inspect.signature(getattr(F, name)) for name in patches.ELEMENT_LOSSES}
#: Largest number that is ignored next to a sum over items.
_EPSILON = 1e-5

#: A count may also be a sum of weights.
Count = Tensor | float


class MeanPart(NamedTuple):
    """A summand of a value that a step computes.

    Attributes:
        value: The summand, on this rank.
        items: Items that the mean in it counts; None if the summand is no mean, or its count is unknown.
        is_size: Whether the count is the size of a tensor that may hold no items of the batch, such as one mean for
            each class.
        added: Number that is added to the items in the divisor, once for the whole batch.
        divisor: What the mean divides by; None if it is the number of items.
        what: Name of the function that has computed the mean, and the size of the first dim of what it averages, 0 if
            that is unknown.
        is_sum: Whether the summand is a sum, possibly over items.
    """

    value: Tensor | float
    items: Count | None
    is_size: bool = False
    added: float = 0.0
    divisor: Count | None = None
    what: tuple[str, int] = ("", 0)
    is_sum: bool = False

    @classmethod
    def of_sum(cls, value: Tensor | float) -> MeanPart:
        """Return a sum over items as a mean, so that those of several parts are added up: over none, divided by 1."""
        return cls(value, 0.0, divisor=1.0)


@dataclass(frozen=True, slots=True)
class _Sum:
    """A sum over items.

    Attributes:
        result: The sum; keeping the tensor keeps its id.
        count: Value of the sum where a mean divides by it; None where only numbers are summed that are averaged.
        added: Number that was added to the sum, and is not in ``count``.
        rows: Size of the first dim of what was summed; 0 if unknown.
    """

    result: Tensor
    count: Tensor | None
    added: float = 0.0
    rows: int = 0
    value: Tensor = field(init=False)

    def __post_init__(self) -> None:
        """Keep the value, which a collective may change in place."""
        object.__setattr__(self, "value", self.result.detach().clone())

    @property
    def is_changed(self) -> bool:
        """Whether the sum is known to have been written to. Not collective."""
        return is_changed(self.result, self.value)


def _is_short(value: Any) -> bool:
    return not isinstance(value, Tensor) and value == round(value, 6)


def _is_zero(value: Any) -> bool:
    """Return whether a value is a zero on the host, such as one to which a loop adds."""
    return isinstance(value, Tensor) and value.dim() == 0 and value.device.type == "cpu" and not value.any()


class MeanCounts:
    """Counts of the means that a step computes, in eager code.

    Known are the losses of ``torch.nn.functional`` that average over labels or elements, sums divided by sums
    (``(losses * mask).sum() / mask.sum().clamp(min=1)``), means of what was boolean (an accuracy over selected
    tokens), and on request sums of these with factors (``loss + 0.1 * other``), whose summands have counts of their
    own. A function of torch that was imported by name is not seen.

    Args:
        sums: Whether sums with factors are followed, which takes about 0.1 ms more per step.
    """

    def __init__(self, *, sums: bool) -> None:
        self._follows_sums = sums
        #: Parts of values by address, with a detached alias, which keeps the memory and not the graph of a training
        #: step, and a copy.
        self._known: dict[int, tuple[Tensor, Tensor, tuple[MeanPart, ...]]] = {}
        #: By ids of the results, during the step only.
        self._sums: dict[int, _Sum] = {}
        self._stacks: dict[int, tuple[Tensor, list[tuple[MeanPart, ...]]]] = {}
        self._masks: dict[int, weakref.ref[Tensor]] = {}

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Context of a step: forget the previous one's means, and record. Not collective."""
        self.forget()
        reductions = patches.report_reductions(self._note, arithmetic=self._follows_sums)
        try:
            with patches.report_scalar_casts(self._follow, self._follow, mask=self._note_mask), reductions:
                yield
        finally:
            self._sums, self._stacks, self._masks = {}, {}, {}

    def forget(self) -> None:
        """Forget the means that were recorded last."""
        self._known, self._sums, self._stacks, self._masks = {}, {}, {}, {}

    def parts_of(self, value: Any) -> tuple[MeanPart, ...] | None:
        """Return the summands of a value, given it, a detached alias or its Python number.

        Returns:
            The summands, at least one of them with a count; None if no count is known.
        """
        if not isinstance(value, float):
            return self._parts_at(value)
        current = [(known, parts) for known, value, parts in self._known.values() if not is_changed(known, value)]
        numbers = ((float(known), parts) for known, parts in reversed(current))
        same = (parts for known, parts in numbers if known == value or (math.isnan(known) and math.isnan(value)))
        return next(same, None)

    def count_of(self, value: Any) -> Count | None:
        """Return the count of a value that is a single mean of items, see :meth:`parts_of`; None otherwise.

        A constant may have been added to the mean (``1 - accuracy``): a Python number of at most 6 decimals, since one
        with more is probably computed.
        """
        parts = tuple(
            part for part in self.parts_of(value) or () if part.items is not None or not _is_short(part.value)
        )
        usable = len(parts) == 1 and not parts[0].is_size and abs(parts[0].added) <= _EPSILON
        return parts[0].items if usable else None

    def _parts_at(self, value: Any, before: Tensor | None = None) -> tuple[MeanPart, ...] | None:
        if not isinstance(value, Tensor) or not self._known or value.numel() != 1:
            return None
        known = self._known.get(value.data_ptr())
        # It may have been written to since, and an operation in place has just done so.
        now = value if before is None else before
        return None if known is None or is_changed(now, known[1]) else known[2]

    # --- what is recorded ---------------------------------------------------------------------------------------

    def _note(
        self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], result: Tensor, *, before: Tensor | None
    ) -> None:
        if in_transform():
            return
        parts = self._parts(name, args, kwargs, result, before)
        if parts is not None and (place := result.data_ptr()):
            alias = result.detach()
            self._known[place] = alias, alias.clone(), parts
        elif before is not None:
            self._known.pop(result.data_ptr(), None)

    def _parts(
        self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], result: Tensor, before: Tensor | None
    ) -> tuple[MeanPart, ...] | None:
        if name in _LABELLED or name in _ELEMENTWISE:
            call = _bound((_LABELLED | _ELEMENTWISE)[name], args, kwargs)
            what = name, _rows(call["input"])
            if call["reduction"] == "sum":
                self._sums[id(result)] = _Sum(result, None, rows=what[1])
            return _one(result, _label_count(call) if name in _LABELLED else _element_count(call), what=what)
        if name == "stack":
            self._note_stack(args[0] if args else (), result)
        elif name == "write":
            self._note_write(*args)
        elif name in ("sum", "mean", "count_nonzero") and args:
            return self._reduced(name, args[0], result)
        elif not kwargs and len(args) == (1 if name == "neg" else 2):
            return self._arithmetic(name, before, *args, result=result)
        return None

    def _reduced(self, name: str, operand: Any, result: Tensor) -> tuple[MeanPart, ...] | None:
        if (stack := self._stacks.get(id(operand))) is not None and name != "count_nonzero":
            factor = 1 / len(stack[1]) if name == "mean" else 1
            found = _scaled([part for parts in stack[1] for part in parts], factor)
            # Something else may have changed the tensor meanwhile.
            return found if _add_up_to(found, result) else None
        mask = self._masks.get(id(operand))
        if name == "mean" and isinstance(operand, Tensor) and mask is not None and mask() is operand:
            return _one(result, operand.numel(), what=(name, _rows(operand)))
        if (same := self._parts_at(operand)) is not None and name != "count_nonzero":
            return same
        if name != "mean":
            if isinstance(result, Tensor) and result.numel() == 1:
                self._sums[id(result)] = _Sum(result, result, rows=_rows(operand))
            return None
        if not isinstance(operand, Tensor) or not operand.dim():
            return None
        return _one(result, operand.numel(), is_size=True, what=(name, _rows(operand)))

    def _note_stack(self, tensors: Any, result: Tensor) -> None:
        if not isinstance(tensors, (list, tuple)):
            return
        parts = [self._parts_at(each) for each in tensors]
        if any(each is not None for each in parts):
            both = zip(parts, tensors, strict=True)
            self._stacks[id(result)] = result, [known or (MeanPart(each.detach(), None),) for known, each in both]

    def _note_write(self, vector: Tensor, index: int, value: Any) -> None:
        """Note a write of an element, such as ``terms[0] = loss``; ``terms[0] += loss`` is an addition before it."""
        parts, place = self._parts_at(value), id(vector)
        if parts is None and place not in self._stacks:
            return
        if place not in self._stacks:
            before = vector.detach().clone()
            self._stacks[place] = vector, [(MeanPart(each, None),) for each in before]
        element = vector.detach()[index]
        self._stacks[place][1][index] = parts or (MeanPart(element.clone(), None),)
        if parts is not None:
            self._known[element.data_ptr()] = element, element.clone(), parts
        else:
            self._known.pop(element.data_ptr(), None)

    def _arithmetic(
        self, name: str, before: Tensor | None, first: Any, second: Any = 0.0, *, result: Tensor
    ) -> tuple[MeanPart, ...] | None:
        one, other = self._parts_at(first, before), self._parts_at(second)
        if one is None and other is None:
            sums = self._sums.get(id(first)), self._sums.get(id(second))
            if before is not None:
                self._sums.pop(id(result), None)
            if name != "div" or isinstance(second, (int, float)):
                self._sum(name, *sums, first, second, result, before)
            elif (above := sums[0]) is not None and (below := sums[1]) is not None and abs(above.added) <= _EPSILON:
                if below.is_changed or above.is_changed:
                    return None
                divisor = None if below.count is below.result else below.result.detach()
                count = None if below.count is None else below.count.detach()
                return _one(result, count, added=below.added, divisor=divisor, what=(name, above.rows))
            return None
        first = first if before is None else before
        if name == "neg":
            return _scaled(one, -1)
        if name in ("add", "sub", "rsub"):
            signs = {"add": (1, 1), "sub": (1, -1), "rsub": (-1, 1)}[name]
            both = [one or self._rest(first), other or self._rest(second)]
            if None in both:
                return None
            return tuple(part for each, sign in zip(both, signs, strict=True) for part in _scaled(each, sign))
        if one is not None and other is None and self._rest(second):
            return _scaled(one, second if name == "mul" else 1 / second)
        if name == "mul" and one is None and self._rest(first):
            return _scaled(other, first)
        return None

    def _sum(
        self,
        name: str,
        one: _Sum | None,
        other: _Sum | None,
        first: Any,
        second: Any,
        result: Tensor,
        before: Tensor | None,
    ) -> None:
        """Note a sum of sums, of a sum and a number (which may keep it from being zero), and a multiple of a sum."""
        if name == "add" and one is not None and other is not None:
            added = one.added + other.added
            count = None if None in (one.count, other.count) else result.detach() - added if added else result
            self._sums[id(result)] = _Sum(result, count, added)
        elif name in ("add", "sub") and (known := one or other) is not None:
            number = second if other is None else first
            number = 0 if _is_zero(number) else number
            if type(number) in (int, float) and (name == "add" or other is None):
                added = known.added + (number if name == "add" else -number)
                count = before if known.count is result else known.count
                self._sums[id(result)] = _Sum(result, count, added)
        elif name == "neg" and one is not None:
            self._sums[id(result)] = _Sum(result, None, rows=one.rows)
        elif (
            name in ("mul", "div")
            and (known := one or other)
            and isinstance(second if other is None else first, (int, float))
        ):
            # A multiple of a count serves as one: items of several elements each.
            is_count = before is None and known.count is known.result and not known.added
            self._sums[id(result)] = _Sum(result, result if is_count else None, rows=known.rows)

    def _rest(self, value: Any) -> tuple[MeanPart, ...] | None:
        """Return a number that is no known mean as a summand, zero as none; None for anything else."""
        if isinstance(value, Tensor) and value.dim() == 0:
            return (MeanPart(value.detach().clone(), None, is_sum=id(value) in self._sums),)
        if not isinstance(value, (int, float)):
            return None
        return (MeanPart(float(value), None),) if value else ()

    def _follow(self, before: Tensor, after: Any) -> None:
        """Note a value that was clamped or cast: its count is that of before."""
        if not isinstance(after, Tensor):
            return
        if (known := self._sums.get(id(before)) or self._sums.get(id(after))) is not None:
            count = before if known.count is after else known.count
            self._sums[id(after)] = replace(known, result=after, count=count)

    def _note_mask(self, before: Tensor, after: Any) -> None:
        if isinstance(after, Tensor):
            self._masks[id(after)] = weakref.ref(after)


def _one(mean: Tensor, count: Count | None, **fields: Any) -> tuple[MeanPart, ...] | None:
    return None if count is None else (MeanPart(mean.detach().clone(), count, **fields),)


def _rows(operand: Any) -> int:
    return operand.shape[0] if isinstance(operand, Tensor) and operand.dim() else 0


def _add_up_to(parts: Iterable[MeanPart], value: Tensor) -> bool:
    total = torch.zeros_like(value.detach())
    for part in parts:
        total = total + part.value
    return bool(torch.isclose(total, value.detach(), rtol=1e-3, equal_nan=True))


def _scaled(parts: Iterable[MeanPart] | None, factor: Any) -> tuple[MeanPart, ...]:
    if type(factor) is int and factor == 1:
        return tuple(parts or ())
    factor = factor.detach() if isinstance(factor, Tensor) else factor
    return tuple(part._replace(value=part.value * factor) for part in parts or ())


def _bound(signature: inspect.Signature, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    bound = signature.bind(*args, **kwargs)
    bound.apply_defaults()
    return bound.arguments


def _averages(call: Mapping[str, Any]) -> bool:
    return bool(call["reduction"] == "mean" and call.get("size_average") is None and call.get("reduce") is None)


def _label_count(call: Mapping[str, Any]) -> Count | None:
    """Return what ``cross_entropy`` and ``nll_loss`` divide by: labels that are not ignored, times their weights."""
    target, weight = call["target"], call["weight"]
    if not _averages(call):
        return None
    if target.is_floating_point():
        # Probabilities, with the classes along dim 1 of a batch.
        return int(target.numel() // target.shape[1 if target.dim() > 1 else 0])
    counts: Tensor = target != call["ignore_index"]
    if weight is not None:
        counts = torch.where(counts, weight[torch.where(counts, target, 0)], 0)
    return counts.sum()


def _element_count(call: Mapping[str, Any]) -> Count | None:
    if not _averages(call):
        return None
    return int(torch.broadcast_shapes(call["input"].shape, call["target"].shape).numel())
