"""Fake process groups without other ranks: collectives return at once and send nothing."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_pardist.compat.contract import Private
from lightning_pardist.compat.default_group import exchange_attached

NAMES = (
    Private("torch.testing._internal.distributed.fake_pg.FakeStore", "planning one rank of many",
            "look for the store of the backend 'fake'"),
    Private("torch.distributed.distributed_c10d._resolve_process_group", "telling whom a collective of DTensor is over",
            "count it as one over the world"),
    Private("torch._C._distributed_c10d._set_thread_isolation_mode", "planning the ranks of a pipeline together",
            "plan none"),
    *(Private(f"torch.distributed.distributed_c10d.{name}", "planning the ranks of a pipeline together", "plan none")
      for name in ("_pg_map", "_pg_names", "_pg_group_ranks", "_pg_backend_config", "_tags_to_pg",
                   "_pg_to_tag", "_group_count", "_backend")),
)  # fmt: skip

c10d: Any = dist.distributed_c10d

#: Name of the backend that groups of the backend "fake" stand for.
_stands_for = "fake"
_depth = 0


def backend_of(group: dist.ProcessGroup) -> str:
    """Return the name of a group's backend; for a fake group, that of the backend it stands for."""
    name: str = dist.get_backend(group)
    return _stands_for if name == "fake" else name


def backend_on(group: dist.ProcessGroup, device: torch.device) -> str:
    """Return the name of the backend that a group uses for tensors of a device; empty if it has none for it."""
    name = backend_of(group)
    if ":" not in name:
        return name
    return dict(pair.split(":") for pair in name.split(",")).get(device.type, "")


def group_by_name(name: str) -> dist.ProcessGroup:
    """Return the process group that torch's functional collectives refer to by name.

    Raises:
        RuntimeError: If there is no group of that name.
    """
    try:
        found: dist.ProcessGroup = c10d._resolve_process_group(name)
    except (ValueError, LookupError) as error:
        raise RuntimeError(f"There is no process group {name!r}.") from error
    return found


#: Module globals in which torch records a process's groups, each with a function that makes its initial value.
_RECORDS: dict[str, Callable[[], Any]] = {
    **dict.fromkeys(
        ("_pg_map", "_pg_names", "_pg_group_ranks", "_pg_backend_config", "_tags_to_pg", "_pg_to_tag"), dict
    ),
    "_group_count": int,
    "_backend": lambda: None,
}


class SuspendedGroups:
    """Process-group records of a suspended thread: torch has one set of records per process."""

    def __init__(self) -> None:
        self._mine: tuple[Any, ...] = (c10d._World(), [], {name: make() for name, make in _RECORDS.items()})
        self._before: tuple[Any, ...] | None = None

    def resume(self) -> None:
        """Install the records of this thread, which resumes."""
        self._before = _exchanged(self._mine)

    def suspend(self) -> None:
        """Save the records of this thread, which is suspended, and restore the previous ones."""
        if self._before is not None:
            self._mine, self._before = _exchanged(self._before), None


def _exchanged(new: tuple[Any, ...]) -> tuple[Any, ...]:
    """Install a set of process-group records and return the previous one."""
    world, attached, records = new
    old = c10d._world, exchange_attached(attached), {name: getattr(c10d, name) for name in _RECORDS}
    c10d._world = world
    for name, value in records.items():
        setattr(c10d, name, value)
    return old


Broadcast = Callable[[list[Any], int, tuple[int, ...]], None]


@contextmanager
def in_fake_world(world_size: int, *, rank: int, stands_for: str, broadcast: Broadcast | None = None) -> Iterator[None]:
    """Return a context in which this process is one rank of a fake world, whose other ranks hold the same values as it.

    Args:
        world_size: Number of ranks in the fake world.
        rank: Rank of this process in it.
        stands_for: Backend that decides how engines communicate: ``"gloo"`` or ``"nccl"``.
        broadcast: Replaces object broadcasts: called with the object list, the source rank and the group's ranks.

    Raises:
        RuntimeError: If the process already has a process group.
    """
    if dist.is_initialized():
        raise RuntimeError(
            "A plan has to be made before ranks are connected, but this process already has a process group."
        )
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    try:
        _broadcasts[threading.get_ident()] = broadcast
        with _standing_for(stands_for):
            yield
    finally:
        _broadcasts.pop(threading.get_ident(), None)
        dist.destroy_process_group()


@contextmanager
def fake_worlds_in_threads(stands_for: str) -> Iterator[None]:
    """Return a context for :func:`in_fake_world` in several threads."""
    with _standing_for(stands_for):
        bindings: Any = torch._C._distributed_c10d
        isolate = bindings._set_thread_isolation_mode
        isolate(True)
        try:
            yield
        finally:
            isolate(False)


_broadcasts: dict[int, Broadcast | None] = {}


@contextmanager
def _standing_for(backend: str) -> Iterator[None]:
    global _stands_for, _depth
    if _depth:
        yield
        return
    before, new_group = _stands_for, dist.new_group

    def same_backend(*args: Any, **kwargs: Any) -> Any:
        return new_group(*args, **kwargs | {"backend": None})

    _stands_for, _depth = backend, 1
    try:
        with ExitStack() as stack:
            stack.enter_context(_replaced("all_gather_object", _all_gather_object))
            stack.enter_context(_replaced("broadcast_object_list", _broadcast_object_list))
            stack.enter_context(_replaced("new_group", same_backend))
            stack.enter_context(_replaced("all_reduce", _with_results(dist.all_reduce)))
            yield
    finally:
        _stands_for, _depth = before, 0


@contextmanager
def _replaced(name: str, function: Callable[..., Any]) -> Iterator[None]:
    before = getattr(dist, name)
    setattr(dist, name, function)
    try:
        yield
    finally:
        setattr(dist, name, before)


def _with_results(all_reduce: Callable[..., Any]) -> Callable[..., Any]:
    """Give the futures of all-reduces results, which futures of the backend "fake" lack."""

    def run(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        work = all_reduce(tensor, *args, **kwargs)
        return None if work is None else _Work(work, tensor)

    return run


class _Work:
    """Handle of an all-reduce with a future that has a result."""

    def __init__(self, work: Any, tensor: Tensor) -> None:
        self._work, self._tensor = work, tensor

    def __getattr__(self, name: str) -> Any:
        return getattr(self._work, name)

    def get_future(self) -> _Future:
        """Return a future of a list that holds the tensor, as torch does."""
        return _Future(lambda: [self._tensor])


class _Future:
    """Future whose callbacks run when somebody waits for it: until then a device has other work."""

    def __init__(self, make: Callable[[], Any]) -> None:
        self._make: Callable[[], Any] | None = make
        self._value: Any = None

    def then(self, callback: Callable[[_Future], Any]) -> _Future:
        return _Future(lambda: callback(self))

    def wait(self) -> Any:
        if self._make is not None:
            self._value, self._make = self._make(), None
        return self._value

    value = wait


def _all_gather_object(object_list: list[Any], obj: Any, group: Any = None) -> None:
    object_list[:] = [obj] * len(object_list)


def _broadcast_object_list(
    object_list: list[Any],
    src: int | None = None,
    group: dist.ProcessGroup | None = None,
    device: Any = None,
    group_src: int | None = None,
) -> None:
    """Keep this rank's own objects unless the thread has a ``broadcast`` function."""
    broadcast = _broadcasts.get(threading.get_ident())
    if broadcast is not None:
        ranks = dist.get_process_group_ranks(group)
        broadcast(object_list, ranks[group_src] if group_src is not None else src or 0, tuple(ranks))
