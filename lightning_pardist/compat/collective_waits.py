"""Where a rank waits for messages: torch's ``Work.wait``, told apart by process group."""

from __future__ import annotations

import contextlib
import functools
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
)  # fmt: skip


@contextlib.contextmanager
def timed_waits(start: Callable[[dist.ProcessGroup | None], None], stop: Callable[[], None]) -> Iterator[None]:
    """Inside, every wait of this thread for a collective or message is between ``start`` and ``stop``.

    Collectives that are called without ``async_op`` wait as well. On devices with streams a wait only orders streams.

    Args:
        start: Given the group; None if it is not known.
        stop: The wait is over, well or not.
    """
    thread = threading.get_ident()
    # By identity: a reference would keep a collective's tensors. One that nobody waits for leaves an entry, which the
    # next object in its place overwrites.
    groups: dict[int, dist.ProcessGroup] = {}
    replaced: list[tuple[Any, str, Any]] = []

    def replace(owner: Any, name: str, function: Callable[..., Any]) -> None:
        # Methods in C bind as what the class holds, not as what `getattr` makes of it.
        replaced.append((owner, name, vars(owner)[name]))
        setattr(owner, name, function)

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

    for name in (*_STARTS, *_PRIVATE_STARTS):
        if name in vars(dist.ProcessGroup):
            replace(dist.ProcessGroup, name, starting(getattr(dist.ProcessGroup, name)))
    replace(dist.Work, "wait", timed)
    try:
        yield
    finally:
        for owner, name, function in reversed(replaced):
            setattr(owner, name, function)
