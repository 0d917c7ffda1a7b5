"""Interception of collectives and point-to-point messages of this process, and of ``Work.wait``, by process group."""

from __future__ import annotations

import contextlib
import functools
import importlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch.distributed as dist

from lightning_pardist.compat.contract import Private

_STARTS = (
    "allgather",
    "allgather_coalesced",
    "allgather_into_tensor_coalesced",
    "allreduce",
    "allreduce_coalesced",
    "alltoall",
    "alltoall_base",
    "barrier",
    "broadcast",
    "gather",
    "recv",
    "recv_anysource",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_tensor_coalesced",
    "scatter",
    "send",
)
_PRIVATE_STARTS = ("_allgather_base", "_reduce_scatter_base", "_end_coalescing")

NAMES = tuple(
    Private(f"torch.distributed.ProcessGroup.{name}", "telling over which axis a rank waits",
            "leave it out: its waits are shown as those of the world")
    for name in _PRIVATE_STARTS
) + tuple(
    Private(f"torch.distributed._functional_collectives.{name}", "optimizers that talk to other ranks in a step",
            "leave it out: functional collectives of an optimizer are not noticed", since=since)
    for name, since in (("_resolve_group", "2.13"), ("_resolve_group_name", ""))
)  # fmt: skip


class CalledCollectiveError(RuntimeError):
    """Raised instead of running a collective or sending a message."""


@contextlib.contextmanager
def no_collectives() -> Iterator[Callable[[], str | None]]:
    """Return a context in which this thread's collectives and messages raise :class:`CalledCollectiveError`.

    Nothing is sent.

    Yields:
        A function that returns the name of the first one that was called, or None.
    """
    thread = threading.get_ident()
    called: list[str] = []

    def refused(name: str, before: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(before)
        def call(*args: Any, **kwargs: Any) -> Any:
            if threading.get_ident() != thread:
                return before(*args, **kwargs)
            called.append(name)
            raise CalledCollectiveError(name)

        return call

    with contextlib.ExitStack() as stack:
        for name in (*_STARTS, *_PRIVATE_STARTS):
            if name in vars(dist.ProcessGroup):
                replacement = refused(name.strip("_"), getattr(dist.ProcessGroup, name))
                stack.enter_context(_replaced(dist.ProcessGroup, name, replacement))
        # Functional collectives are torch operators; the first thing they do is to resolve their group.
        functional = importlib.import_module("torch.distributed._functional_collectives")
        for name in ("_resolve_group", "_resolve_group_name"):
            if name in vars(functional):
                stack.enter_context(_replaced(functional, name, refused("functional", getattr(functional, name))))
        yield lambda: called[0] if called else None


@contextlib.contextmanager
def _replaced(owner: Any, name: str, function: Callable[..., Any]) -> Iterator[None]:
    # Read from the class dict: `getattr` would bind methods implemented in C differently.
    before = vars(owner)[name]
    setattr(owner, name, function)
    try:
        yield
    finally:
        setattr(owner, name, before)


@contextlib.contextmanager
def timed_waits(start: Callable[[dist.ProcessGroup | None], None], stop: Callable[[], None]) -> Iterator[None]:
    """Return a context that calls ``start`` before and ``stop`` after every ``Work.wait`` of this thread.

    Collectives called without ``async_op`` wait as well. On devices with streams a wait only orders streams.

    Args:
        start: Called with the process group; None if it is unknown.
        stop: Called when the wait is over, also after an error.
    """
    thread = threading.get_ident()
    # Keyed by id: a reference would keep a collective's tensors alive. Work that nobody waits for leaves an entry,
    # which the next object at the same address overwrites.
    groups: dict[int, dist.ProcessGroup] = {}

    def starting(before: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(before)
        def call(group: dist.ProcessGroup, *args: Any, **kwargs: Any) -> Any:
            work = before(group, *args, **kwargs)
            if work is not None:
                groups[id(work)] = group
            return work

        return call

    wait = dist.Work.wait

    @functools.wraps(wait)
    def timed(work: dist.Work, *args: Any, **kwargs: Any) -> Any:
        if threading.get_ident() != thread:
            return wait(work, *args, **kwargs)
        start(groups.pop(id(work), None))
        try:
            return wait(work, *args, **kwargs)
        finally:
            stop()

    with contextlib.ExitStack() as stack:
        for name in (*_STARTS, *_PRIVATE_STARTS):
            if name in vars(dist.ProcessGroup):
                replacement = starting(getattr(dist.ProcessGroup, name))
                stack.enter_context(_replaced(dist.ProcessGroup, name, replacement))
        stack.enter_context(_replaced(dist.Work, "wait", timed))
        yield
