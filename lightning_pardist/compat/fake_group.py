"""A process group without other ranks: collectives return at once, and send nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch.distributed as dist

from lightning_pardist.compat.contract import Private

NAMES = (
    Private("torch.testing._internal.distributed.fake_pg.FakeStore", "planning one rank of many",
            "look for the store of the backend 'fake'"),
    Private("torch.distributed.distributed_c10d._resolve_process_group", "telling whom a collective of DTensor is over",
            "count it as one over the world"),
)  # fmt: skip

#: What groups of the backend "fake" are to be taken for.
_stands_for = "fake"


def backend_of(group: dist.ProcessGroup) -> str:
    """Name of a group's backend; of one without other ranks that of the backend it stands for."""
    name: str = dist.get_backend(group)
    return _stands_for if name == "fake" else name


def group_by_name(name: str) -> dist.ProcessGroup:
    """The group that torch's functional collectives name.

    Raises:
        RuntimeError: If there is none.
    """
    try:
        c10d: Any = dist.distributed_c10d
        found: dist.ProcessGroup = c10d._resolve_process_group(name)
    except (ValueError, LookupError) as error:
        raise RuntimeError(f"There is no process group {name!r}.") from error
    return found


@contextmanager
def alone_among(world_size: int, *, rank: int, stands_for: str) -> Iterator[None]:
    """Inside, this process is one rank of many, and the others say whatever it says itself.

    Args:
        world_size: Ranks that there are said to be.
        rank: Which of them this process is.
        stands_for: Backend that decides how engines communicate: ``"gloo"`` or ``"nccl"``.

    Raises:
        RuntimeError: If there is a process group.
    """
    global _stands_for
    if dist.is_initialized():
        raise RuntimeError("A plan is made before ranks are connected: this process has a process group.")
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    before, new_group = _stands_for, dist.new_group

    def same_backend(*args: Any, **kwargs: Any) -> Any:
        return new_group(*args, **kwargs | {"backend": None})

    try:
        _stands_for = stands_for
        with ExitStack() as stack:
            stack.enter_context(_replaced("all_gather_object", _all_gather_object))
            stack.enter_context(_replaced("broadcast_object_list", _broadcast_object_list))
            stack.enter_context(_replaced("new_group", same_backend))
            yield
    finally:
        _stands_for = before
        dist.destroy_process_group()


@contextmanager
def _replaced(name: str, function: Callable[..., Any]) -> Iterator[None]:
    before = getattr(dist, name)
    setattr(dist, name, function)
    try:
        yield
    finally:
        setattr(dist, name, before)


def _all_gather_object(object_list: list[Any], obj: Any, group: Any = None) -> None:
    object_list[:] = [obj] * len(object_list)


def _broadcast_object_list(object_list: list[Any], *args: Any, **kwargs: Any) -> None:
    """What this rank has stands."""
