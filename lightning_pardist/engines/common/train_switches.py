"""``train()`` and ``eval()`` of schedule-free optimizers on the parts of parameters that a rank holds."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from torch.optim import Optimizer

#: Methods by which the user of a schedule-free optimizer switches the parameters between their values in training and
#: those for evaluation, which the optimizer computes from its state.
SWITCHES = ("train", "eval")


def has_switches(optimizer: Optimizer) -> bool:
    """Return whether an optimizer has both methods."""
    return all(callable(getattr(optimizer, name, None)) for name in SWITCHES)


def wrap_switches(
    optimizer: Optimizer,
    on_parts: Callable[[], AbstractContextManager[None]],
    *,
    after: Callable[[], None] | None = None,
) -> None:
    """Let ``train()`` and ``eval()`` of an elementwise schedule-free optimizer see what its steps see.

    Nothing is done for an optimizer without both methods.

    Args:
        optimizer: Optimizer whose state has the shape of this rank's parts of parameters.
        on_parts: Context manager in which the groups and the state hold these parts.
        after: Called after the parts have changed.
    """

    def wrapped(name: str) -> Callable[..., Any]:
        inner = getattr(optimizer, name)

        @functools.wraps(inner)
        def switch(*args: Any, **kwargs: Any) -> Any:
            with on_parts():
                result = inner(*args, **kwargs)
            if after is not None:
                after()
            return result

        return switch

    for name in SWITCHES if has_switches(optimizer) else ():
        setattr(optimizer, name, wrapped(name))
