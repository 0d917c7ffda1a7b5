"""A process group without other ranks: collectives return at once, and send nothing."""

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

#: What groups of the backend "fake" are to be taken for.
_stands_for = "fake"
_depth = 0


def backend_of(group: dist.ProcessGroup) -> str:
    """Name of a group's backend; of one without other ranks that of the backend it stands for."""
    name: str = dist.get_backend(group)
    return _stands_for if name == "fake" else name


def backend_on(group: dist.ProcessGroup, device: torch.device) -> str:
    """Name of the backend by which a group exchanges what is on a device; empty if it has none for it."""
    name = backend_of(group)
    if ":" not in name:
        return name
    return dict(pair.split(":") for pair in name.split(",")).get(device.type, "")


def group_by_name(name: str) -> dist.ProcessGroup:
    """The group that torch's functional collectives name.

    Raises:
        RuntimeError: If there is none.
    """
    try:
        found: dist.ProcessGroup = c10d._resolve_process_group(name)
    except (ValueError, LookupError) as error:
        raise RuntimeError(f"There is no process group {name!r}.") from error
    return found


#: What torch records of the process groups of a process, with what it is before there are any.
_RECORDS: dict[str, Callable[[], Any]] = {
    **dict.fromkeys(
        ("_pg_map", "_pg_names", "_pg_group_ranks", "_pg_backend_config", "_tags_to_pg", "_pg_to_tag"), dict
    ),
    "_group_count": int,
    "_backend": lambda: None,
}


class KeptAside:
    """Process groups of a thread that does not run: torch has one record of them a process."""

    def __init__(self) -> None:
        self._mine: tuple[Any, ...] = (c10d._World(), [], {name: make() for name, make in _RECORDS.items()})
        self._before: tuple[Any, ...] | None = None

    def put_back(self) -> None:
        """The thread goes on."""
        self._before = _exchanged(self._mine)

    def put_aside(self) -> None:
        """Another one goes on."""
        if self._before is not None:
            self._mine, self._before = _exchanged(self._before), None


def _exchanged(new: tuple[Any, ...]) -> tuple[Any, ...]:
    """Put one record in the place of another, which is returned."""
    world, attached, records = new
    old = c10d._world, exchange_attached(attached), {name: getattr(c10d, name) for name in _RECORDS}
    c10d._world = world
    for name, value in records.items():
        setattr(c10d, name, value)
    return old


Broadcast = Callable[[list[Any], int, tuple[int, ...]], None]


@contextmanager
def alone_among(world_size: int, *, rank: int, stands_for: str, broadcast: Broadcast | None = None) -> Iterator[None]:
    """Inside, this process is one rank of many, and the others say whatever it says itself.

    Args:
        world_size: Ranks that there are said to be.
        rank: Which of them this process is.
        stands_for: Backend that decides how engines communicate: ``"gloo"`` or ``"nccl"``.
        broadcast: Gets lists of objects, the rank that has them and the ranks that get them.

    Raises:
        RuntimeError: If there is a process group.
    """
    if dist.is_initialized():
        raise RuntimeError("A plan is made before ranks are connected: this process has a process group.")
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
def several_alone(stands_for: str) -> Iterator[None]:
    """Around :func:`alone_among` in several threads."""
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
    """Let the futures of all-reduces have results, which those of the backend "fake" have not."""

    def run(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        work = all_reduce(tensor, *args, **kwargs)
        return None if work is None else _Work(work, tensor)

    return run


class _Work:
    """An all-reduce that has begun."""

    def __init__(self, work: Any, tensor: Tensor) -> None:
        self._work, self._tensor = work, tensor

    def __getattr__(self, name: str) -> Any:
        return getattr(self._work, name)

    def get_future(self) -> _Future:
        """Of a list with the tensor, as torch has it."""
        return _Future(lambda: [self._tensor])


class _Future:
    """What follows a message is done when somebody waits for it: until then a device has other work."""

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
    """What this rank has stands, unless the source is at hand."""
    broadcast = _broadcasts.get(threading.get_ident())
    if broadcast is not None:
        ranks = dist.get_process_group_ranks(group)
        broadcast(object_list, ranks[group_src] if group_src is not None else src or 0, tuple(ranks))
