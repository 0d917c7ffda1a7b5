"""Runs in which compiled parts are as they were written, also where activations are computed again."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar

import torch

_eager: ContextVar[bool] = ContextVar("eager", default=False)


@contextmanager
def eagerly(active: bool = True) -> Iterator[None]:
    """Inside, ``torch.compile`` compiles nothing, and what it has compiled runs as it was written.

    Args:
        active: False leaves everything as it is.
    """
    if not active:
        yield
        return
    token = _eager.set(True)
    # Where nobody has imported the compiler, nothing is compiled, and importing it takes seconds.
    stance = torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules else nullcontext()
    try:
        with stance:
            yield
    finally:
        _eager.reset(token)


def is_eager() -> bool:
    """Whether this runs inside of :func:`eagerly`."""
    return _eager.get()
