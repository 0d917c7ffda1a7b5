"""Coordination of ranks during a save, over a process group or, from a background thread, over the job's store."""

from __future__ import annotations

import itertools
import pickle
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Protocol, TypeVar

import torch.distributed as dist

from lightning_pardist.checkpoint.errors import DamagedCheckpointError
from lightning_pardist.compat.process_groups import PrefixStore, Store

T = TypeVar("T")

_SAID_ALIKE: dict[str, type[Exception]] = {
    kind.__name__: kind for kind in (DamagedCheckpointError, FileNotFoundError, pickle.UnpicklingError)
}


class Coordinator(Protocol):
    """Exchanges small picklable objects between the ranks of a save. All ranks call every method in the same order."""

    rank: int
    world_size: int

    def gather(self, value: Any) -> list[Any]:
        """Return all ranks' values by rank on the first rank; an empty list on the others."""
        ...

    def broadcast(self, value: Any) -> Any:
        """Return the first rank's value on every rank."""
        ...


class SingleCoordinator:
    """Coordinator of a single process."""

    rank = 0
    world_size = 1

    def gather(self, value: Any) -> list[Any]:
        """Return a list of the value."""
        return [value]

    def broadcast(self, value: T) -> T:
        """Return the value."""
        return value


class GroupCoordinator:
    """Coordinator that uses collectives over a process group.

    Args:
        group: Participating ranks; the world if None.
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self.group = group
        self.rank = dist.get_rank(group)
        self.world_size = dist.get_world_size(group)

    def gather(self, value: Any) -> list[Any]:
        """Gather picklable objects on the first rank. Collective over the group."""
        values: list[Any] | None = [None] * self.world_size if self.rank == 0 else None
        dist.gather_object(value, values, group=self.group, group_dst=0)
        return values or []

    def broadcast(self, value: T) -> T:
        """Broadcast the first rank's object. Collective over the group."""
        box = [value]
        dist.broadcast_object_list(box, group=self.group, group_src=0)
        return box[0]


def world_coordinator() -> Coordinator:
    """Return a coordinator of all ranks that uses collectives."""
    alone = not dist.is_initialized() or dist.get_world_size() == 1
    return SingleCoordinator() if alone else GroupCoordinator()


class StoreCoordinator:
    """Coordinator over a separate connection to the job's store, independent of the main thread's collectives.

    Args:
        store: The job's store.
        name: Name of the save, equal on all ranks and unique.
        rank: This rank in the world.
        world_size: Number of ranks.
        timeout_s: Timeout of the wait for another rank, in seconds.
    """

    def __init__(self, store: Store, *, name: str, rank: int, world_size: int, timeout_s: float) -> None:
        self.rank = rank
        self.world_size = world_size
        self._timeout = timedelta(seconds=timeout_s)
        self._store = PrefixStore(f"pardist/checkpoint/{name}", store.clone())  # type: ignore[attr-defined]
        self._rounds = itertools.count()

    def gather(self, value: Any) -> list[Any]:
        """Store every rank's value; the first rank reads and deletes them.

        Raises:
            RuntimeError: From torch, if a rank does not store its value in time.
        """
        number = next(self._rounds)
        if self.rank:
            self._store.set(f"{number}/{self.rank}", pickle.dumps(value))  # type: ignore[arg-type]
            return []
        values = [value]
        for rank in range(1, self.world_size):
            key = f"{number}/{rank}"
            self._store.wait([key], self._timeout)
            values.append(pickle.loads(self._store.get(key)))
            self._store.delete_key(key)
        return values

    def broadcast(self, value: T) -> T:
        """Store the first rank's value; the others read it, and the last reader deletes it.

        Raises:
            RuntimeError: From torch, if the first rank does not store its value in time.
        """
        number = next(self._rounds)
        if self.rank == 0:
            self._store.set(f"{number}/all", pickle.dumps(value))  # type: ignore[arg-type]
            return value
        self._store.wait([f"{number}/all"], self._timeout)
        answer: T = pickle.loads(self._store.get(f"{number}/all"))
        if self._store.add(f"{number}/read", 1) == self.world_size - 1:
            self._store.delete_key(f"{number}/all")
            self._store.delete_key(f"{number}/read")
        return answer


def together(exchange: Coordinator, what: str, run: Callable[[], T]) -> T:
    """Run a function on every rank; if it fails on any, raise on all of them. Collective over the exchange.

    Args:
        exchange: Coordinator of the participating ranks.
        what: Description for the error message, for example ``"Saving x.ckpt"``.
        run: Function to run. Not collective.

    Raises:
        BaseException: On ranks where the function failed, its error.
        RuntimeError: On the others, with the first failing rank's reason. For a missing or damaged checkpoint and one
            that needs code to load, all ranks raise the failing rank's type of error.
    """
    failure: Exception | None = None
    result: T | None = None
    try:
        result = run()
    except Exception as error:
        failure = error
    reasons = exchange.gather(None if failure is None else (type(failure).__name__, str(failure)))
    wrong = exchange.broadcast(next(((rank, reason) for rank, reason in enumerate(reasons) if reason), None))
    if failure is not None:
        raise failure
    if wrong is not None:
        rank, (name, reason) = wrong
        if name in _SAID_ALIKE:
            raise _SAID_ALIKE[name](reason)
        raise RuntimeError(f"{what} failed on rank {rank}: {name}: {reason}")
    return result  # type: ignore[return-value]
