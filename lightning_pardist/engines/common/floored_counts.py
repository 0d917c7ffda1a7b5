"""Record counts before a step clamps them from below, or adds a number to them, to avoid a division by zero.

After ``positives.sum().clamp(min=1)`` a rank or micro-batch with no counted item divides its sum by one, whereas a
single process divides the total sum by the total count. After ``positives.sum() + 1.0`` each part's divisor contains
the number that a single process adds once.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_pardist.compat import patches
from lightning_pardist.compat.tensors import in_transform, is_changed

_NOTES = "_pardist_count"
#: An added number that is smaller than this part of the count is left in it: a sum in fp32 is no more accurate.
_NEGLIGIBLE = 1e-6
#: Likewise on a device, whatever the count: such a number only keeps the divisor from being zero.
_EPSILON = 1e-5


class _Notes(NamedTuple):
    """How a scalar differs from the count that it was computed from.

    Attributes:
        value: The scalar when it was noted: it may have been written to since, by an all-reduce for example.
        before: The count before it was clamped; None if it was not.
        added: Number that was added to it.
    """

    value: Tensor
    before: Tensor | None
    added: float

    @classmethod
    def of(cls, count: Tensor | float) -> _Notes | None:
        """Return the notes of a scalar, None if there are none or it is known to have been written to."""
        kept = getattr(count, _NOTES, None)
        if kept is None or not isinstance(count, Tensor):
            return None
        notes = _Notes(*kept)
        return None if is_changed(count, notes.value) else notes

    @staticmethod
    def note(count: Tensor, before: Tensor | None, added: float) -> None:
        """Attach notes to a scalar."""
        # A plain tuple, which torch.load takes in a checkpoint of the user's.
        setattr(count, _NOTES, (count.detach().clone(), before, added))


def noted_floors() -> AbstractContextManager[None]:
    """Record scalars before they are clamped or added to inside, for :func:`unfloored` and :func:`added_to`."""
    return patches.report_scalar_casts(_note_floor, _pass_on, added=_note_sum)


def unfloored(count: Tensor | float) -> Tensor | float:
    """Return a count before it was clamped from below; the count itself if it was not clamped. Not collective."""
    notes = _Notes.of(count)
    if notes is None or notes.before is None or not isinstance(count, Tensor):
        return count
    return torch.where(notes.value == count, torch.minimum(notes.before.to(count), count), count)


def added_to(count: Tensor | float) -> float:
    """Return the number that was added to a count and is contained in it; 0 if there is none. Not collective."""
    notes = _Notes.of(count)
    return 0.0 if notes is None else notes.added


def _note_floor(before: Tensor, after: Tensor) -> None:
    if isinstance(after, Tensor) and not after.dim():
        notes = _Notes.of(before)
        if notes is None:
            _Notes.note(after, before.detach().clone(), 0.0)
        else:
            _Notes.note(after, before.detach().clone() if notes.before is None else notes.before, notes.added)


def _note_sum(before: Tensor, after: Tensor, number: float) -> None:
    if in_transform() or before.is_complex():
        return
    # On a device a comparison with the count would have to wait for it.
    least = _NEGLIGIBLE * abs(float(before)) if before.device.type == "cpu" else _EPSILON
    if abs(number) <= least:
        _pass_on(before, after)
        return
    notes = _Notes.of(before)
    smaller = None if notes is None or notes.before is None else notes.before + number
    _Notes.note(after, smaller, number + (0.0 if notes is None else notes.added))


def _pass_on(before: Tensor, after: Tensor) -> None:
    if (notes := _Notes.of(before)) is not None and isinstance(after, Tensor):
        _Notes.note(after, notes.before, notes.added)
