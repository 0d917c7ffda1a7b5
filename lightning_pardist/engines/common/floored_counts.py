"""Record counts before a step clamps them from below, or adds a number to them, to avoid a division by zero.

After ``positives.sum().clamp(min=1)`` a rank or micro-batch with no counted item divides its sum by one, whereas a
single process divides the total sum by the total count. After ``positives.sum() + 1.0`` each part's divisor contains
the number that a single process adds once.
"""

from __future__ import annotations

from contextlib import AbstractContextManager

import torch
from torch import Tensor

from lightning_pardist.compat import patches
from lightning_pardist.compat.tensors import in_transform

_UNFLOORED, _ADDED = "_pardist_unfloored", "_pardist_added"
#: An added number that is smaller than this part of the count is left in it: a sum in fp32 is no more accurate.
_NEGLIGIBLE = 1e-6
#: Likewise on a device, whatever the count: such a number only keeps the divisor from being zero.
_EPSILON = 1e-5


def noted_floors() -> AbstractContextManager[None]:
    """Record scalars before they are clamped or added to inside, for :func:`unfloored` and :func:`added_to`."""
    return patches.report_scalar_casts(_note_floor, _pass_on, added=_note_sum)


def unfloored(count: Tensor | float) -> Tensor | float:
    """Return a count before it was clamped from below; the count itself if it was not clamped. Not collective."""
    before = getattr(count, _UNFLOORED, None)
    return count if before is None else torch.minimum(before.to(count), count)  # type: ignore[arg-type]


def added_to(count: Tensor | float) -> float:
    """Return the number that was added to a count and is contained in it; 0 if there is none. Not collective."""
    return float(getattr(count, _ADDED, 0.0))


def _note_floor(before: Tensor, after: Tensor) -> None:
    if isinstance(after, Tensor) and not after.dim():
        setattr(after, _UNFLOORED, getattr(before, _UNFLOORED, before).detach())
        setattr(after, _ADDED, added_to(before))


def _note_sum(before: Tensor, after: Tensor, number: float) -> None:
    if in_transform() or before.is_complex():
        return
    # On a device a comparison with the count would have to wait for it.
    least = _NEGLIGIBLE * abs(float(before)) if before.device.type == "cpu" else _EPSILON
    if abs(number) <= least:
        _pass_on(before, after)
        return
    if hasattr(before, _UNFLOORED):
        setattr(after, _UNFLOORED, getattr(before, _UNFLOORED) + number)
    setattr(after, _ADDED, added_to(before) + number)


def _pass_on(before: Tensor, after: Tensor) -> None:
    for name in (_UNFLOORED, _ADDED):
        if hasattr(before, name):
            setattr(after, name, getattr(before, name))
