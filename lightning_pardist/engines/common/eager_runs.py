"""Eager execution of compiled functions inside a context, including recomputation by activation checkpointing."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar

import torch

_eager: ContextVar[bool] = ContextVar("eager", default=False)


@contextmanager
def eagerly(active: bool = True) -> Iterator[None]:
    """Disable ``torch.compile`` inside: compiled functions run eagerly.

    Args:
        active: False makes this a no-op.
    """
    if not active:
        yield
        return
    token = _eager.set(True)
    # If dynamo was not imported, nothing is compiled; importing it takes seconds.
    stance = torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules else nullcontext()
    try:
        with stance:
            yield
    finally:
        _eager.reset(token)


def is_eager() -> bool:
    """Return whether the caller runs inside :func:`eagerly`."""
    return _eager.get()
