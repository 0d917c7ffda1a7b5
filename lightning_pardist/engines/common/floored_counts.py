"""Record counts before a step clamps them from below, as in ``positives.sum().clamp(min=1)``.

A rank or micro-batch with no counted item divides its sum by one, whereas a single process divides the total sum by
the total count.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from lightning_pardist.compat import patches

_MARK = "_pardist_unfloored"


def noted_floors() -> AbstractContextManager[None]:
    """Record the unclamped value of scalars that are clamped inside, for :func:`unfloored`."""
    return patches.report_scalar_casts(_mark, _pass_on)


def unfloored(count: Tensor | float) -> Tensor | float:
    """Return a count before it was clamped from below; the count itself if it was not clamped. Not collective."""
    before = getattr(count, _MARK, None)
    return count if before is None else torch.minimum(before.to(count), count)  # type: ignore[arg-type]


def _mark(before: Tensor, after: Any) -> None:
    if isinstance(after, Tensor) and not after.dim():
        setattr(after, _MARK, getattr(before, _MARK, before).detach())


def _pass_on(before: Tensor, after: Any) -> None:
    if hasattr(before, _MARK):
        _mark(before, after)
