"""Counts that a step keeps from being zero, ``positives.sum().clamp(min=1)``, and what they were before.

Where ranks or micro-batches have none of what is counted, each divides its sum by one, and one process divides the sum
of all by what all have.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from lightning_pardist.compat import patches

_MARK = "_pardist_unfloored"


def noted_floors() -> AbstractContextManager[None]:
    """Inside, what is clamped keeps what it was, for :func:`unfloored`."""
    return patches.noted_numbers(_mark, _pass_on)


def unfloored(count: Tensor | float) -> Tensor | float:
    """A count as it was before it was clamped from below; itself, if it was not. Not collective."""
    before = getattr(count, _MARK, None)
    return count if before is None else torch.minimum(before.to(count), count)  # type: ignore[arg-type]


def _mark(before: Tensor, after: Any) -> None:
    if isinstance(after, Tensor) and not after.dim():
        setattr(after, _MARK, getattr(before, _MARK, before).detach())


def _pass_on(before: Tensor, after: Any) -> None:
    if hasattr(before, _MARK):
        _mark(before, after)
