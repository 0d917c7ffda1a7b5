"""Combine numbers that ranks computed as means or sums over their own samples, in one all-reduce.

Each number has a slot in the message, found by its name, so that ranks may have different numbers: a step may log the
accuracy of masked tokens only if its batch has some. Names that all ranks have told each other have slots of their own.
Others share a few slots, where ranks with different names may meet; a hash of the name in the message shows it.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_pardist.engines.common.mean_counts import MeanPart
from lightning_pardist.engines.common.numbers import Number, number_of, where

#: Number of slots for names that are not known, and maximum number of such names in a message.
_SHARED, _MOST = 10, 8
#: Maximum number of known names: a step may make new ones without end.
_MOST_KNOWN = 256
#: Fields of a slot: the ranks that have a number in it and, modulo _BASE, the sum of the hashes of its names; the items
#: of its mean; and its sum.
_FIELDS = 3
#: Hashes of 20 bits and their sum over up to 4,096 ranks.
_BASE = 2.0**32


class ValueNames:
    """Names that all ranks of a group know.

    Attributes:
        slots: Slot of each name.
        is_due: Whether a rank is known to have new names, so that all ranks :meth:`learn` them before the next message.
    """

    def __init__(self) -> None:
        self.slots: dict[str, int] = {}
        self.is_due = False
        self._new: dict[str, None] = {}

    @property
    def length(self) -> int:
        """Length of a message."""
        return (_SHARED + len(self.slots)) * _FIELDS

    @property
    def has_new(self) -> bool:
        """Whether this rank has used names that the others may not know."""
        return bool(self._new)

    def note(self, names: Iterable[str]) -> None:
        """Take note of names that this rank uses. Not collective."""
        if len(self.slots) < _MOST_KNOWN:
            self._new |= dict.fromkeys(name for name in names if name not in self.slots)

    def learn(self, group: dist.ProcessGroup) -> None:
        """Give slots to the new names of all ranks. Collective over the group."""
        told: list[list[str]] = [[] for _ in range(group.size())]
        dist.all_gather_object(told, list(self._new), group=group)
        self._new.clear()
        self.is_due = False
        for name in sorted({name for names in told for name in names} - set(self.slots)):
            self.slots[name] = _SHARED + len(self.slots)


@dataclass(frozen=True)
class Value:
    """A number that each rank computed as a mean or sum over its own samples, to be combined across ranks.

    Attributes:
        name: Name, equal on all ranks.
        whole: This rank's number.
        parts: Its summands, if they have counts of their own.
    """

    name: str
    whole: MeanPart
    parts: tuple[MeanPart, ...] = ()


@dataclass(frozen=True)
class Combined:
    """A number of all ranks that have it.

    Attributes:
        value: The number; this rank's own if a number of another name is in its slot.
        ranks: Number of ranks that have it; 0 if the value is this rank's own.
    """

    value: Number
    ranks: Number


@dataclass(frozen=True)
class _Slot:
    place: int
    mark: float
    mean: MeanPart


class ValueSlots:
    """Numbers of one rank, and their slots.

    Args:
        values: Values to combine; of those whose names are not known, at most 8 are.
        names: Known names; takes note of others.
        present: Whether this rank's batch counts at all.
        device: Device of the message.
    """

    def __init__(self, values: Sequence[Value], names: ValueNames, *, present: bool, device: torch.device) -> None:
        self._values, self._here, self._device = values, float(present), device
        self.length = names.length
        means = {value.name: value.whole for value in values}
        for value in values:
            if _first_with(values, value.parts) is value:
                means |= {_part_name(value, place): part for place, part in enumerate(value.parts)}
        names.note(means)
        self._slots = {name: _Slot(*place, means[name]) for name, place in _places(means, names.slots).items()}

    def message(self) -> list[Number]:
        """Return the numbers that this rank sends."""
        found: list[Number] = [0.0] * self.length
        for slot in self._slots.values():
            mean, first = slot.mean, slot.place * _FIELDS
            divisor = self._divisor(mean)
            found[first] = (_BASE + slot.mark) * self._here
            found[first + 1] = self._items(mean)
            # A mean over no items is NaN.
            found[first + 2] = where(divisor == 0, 0.0, divisor * number_of(mean.value, self._device))
        return found

    def combined(self, total: Sequence[Number] | Tensor) -> list[Combined]:
        """Return each value over the samples of all ranks.

        Args:
            total: Sum of the messages of all ranks.
        """
        return [self._combined(value, total) for value in self._values]

    def _combined(self, value: Value, total: Sequence[Number] | Tensor) -> Combined:
        # If no rank's batch counts, or counts for a value, each rank keeps its own values.
        own = number_of(value.whole.value, self._device)
        slot = self._slots.get(value.name)
        if slot is None:
            return Combined(own, 0.0)
        ranks = self._ranks(slot, total)
        mean = where(ranks > 0, self._mean(slot, total, own), own)
        first = _first_with(self._values, value.parts)
        parts = [self._slots.get(_part_name(first, place)) for place in range(len(value.parts))]
        known = [part for part in parts if part is not None]
        if not known or len(known) < len(parts):
            return Combined(mean, ranks)
        whole: Number = ranks > 0
        summed: Number = 0.0
        for part in known:
            # Ranks whose value has other summands have none in this slot.
            whole = whole & (self._ranks(part, total) == ranks)
            summed = summed + self._mean(part, total, 0.0)
        return Combined(where(whole, summed, mean), ranks)

    def _ranks(self, slot: _Slot, total: Sequence[Number] | Tensor) -> Number:
        """Return the number of ranks that have the number of a slot; 0 if another one is in it as well."""
        marks, ranks = total[slot.place * _FIELDS] % _BASE, total[slot.place * _FIELDS] // _BASE
        return where(marks == ranks * slot.mark, ranks, 0.0)

    def _mean(self, slot: _Slot, total: Sequence[Number] | Tensor, kept: Number) -> Number:
        mean, first = slot.mean, slot.place * _FIELDS
        divisor, clamped = total[first + 1] + mean.added, self._divisor(mean)
        # What clamps the divisor of a rank clamps that of all; a difference by rounding is none by a clamp.
        surplus = clamped - self._items(mean) - mean.added
        divisor = where((surplus > 1e-6 * abs(clamped)) & (clamped > divisor), clamped, divisor)
        return where(divisor != 0, total[first + 2] / where(divisor == 0, 1.0, divisor), kept)

    def _items(self, mean: MeanPart) -> Number:
        return number_of(0.0 if mean.items is None else mean.items, self._device) * self._here

    def _divisor(self, mean: MeanPart) -> Number:
        if mean.divisor is None:
            return self._items(mean)
        return number_of(mean.divisor, self._device) * self._here


def _first_with(values: Sequence[Value], parts: tuple[MeanPart, ...]) -> Value:
    return next(value for value in values if value.parts is parts)


def _part_name(value: Value, place: int) -> str:
    return f"{value.name} {place} of {len(value.parts)}"


def _places(names: Iterable[str], known: Mapping[str, int]) -> dict[str, tuple[int, float]]:
    """Return the slot of each name and its hash; ranks with the same names have them in the same slots."""
    found = {name: (known[name], float(zlib.crc32(name.encode()) >> 12)) for name in names if name in known}
    taken: set[int] = set()
    for name in sorted(name for name in names if name not in known)[:_MOST]:
        number = zlib.crc32(name.encode())
        place = next(free for shift in range(_SHARED) if (free := (number + shift) % _SHARED) not in taken)
        taken.add(place)
        found[name] = place, float(number >> 12)
    return found
