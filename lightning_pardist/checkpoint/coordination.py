"""Coordination of the ranks of a save, over a process group or, from a background thread, the job's store."""

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
        """All ranks' values by rank, on the first; an empty list elsewhere."""
        ...

    def broadcast(self, value: Any) -> Any:
        """The first rank's value, everywhere."""
        ...


class SingleCoordinator:
    """One process."""

    rank = 0
    world_size = 1

    def gather(self, value: Any) -> list[Any]:
        """The value itself."""
        return [value]

    def broadcast(self, value: T) -> T:
        """The value itself."""
        return value


class GroupCoordinator:
    """Collectives over a process group.

    Args:
        group: Who takes part; the world if None.
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self.group = group
        self.rank = dist.get_rank(group)
        self.world_size = dist.get_world_size(group)

    def gather(self, value: Any) -> list[Any]:
        """Collective over the group."""
        values: list[Any] | None = [None] * self.world_size if self.rank == 0 else None
        dist.gather_object(value, values, group=self.group, group_dst=0)
        return values or []

    def broadcast(self, value: T) -> T:
        """Collective over the group."""
        box = [value]
        dist.broadcast_object_list(box, group=self.group, group_src=0)
        return box[0]


def world_coordinator() -> Coordinator:
    """Coordinate all ranks by collectives."""
    alone = not dist.is_initialized() or dist.get_world_size() == 1
    return SingleCoordinator() if alone else GroupCoordinator()


class StoreCoordinator:
    """Exchanges over the job's store by its own connection, independent of the main thread's collectives.

    Args:
        store: The job's store.
        name: Equal on all ranks and new for every save.
        rank: This rank in the world.
        world_size: Number of ranks.
        timeout_s: Bound on the wait for another rank.
    """

    def __init__(self, store: Store, *, name: str, rank: int, world_size: int, timeout_s: float) -> None:
        self.rank = rank
        self.world_size = world_size
        self._timeout = timedelta(seconds=timeout_s)
        self._store = PrefixStore(f"pardist/checkpoint/{name}", store.clone())  # type: ignore[attr-defined]
        self._rounds = itertools.count()

    def gather(self, value: Any) -> list[Any]:
        """Every rank puts its value, the first one takes them all away.

        Raises:
            RuntimeError: From torch, if a rank does not answer in time.
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
        """The first rank puts its value, the others read it; the last reader takes it away.

        Raises:
            RuntimeError: From torch, if the first rank does not answer in time.
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
        exchange: Who takes part.
        what: Said in the error, as in ``"Saving x.ckpt"``.
        run: Not collective.

    Raises:
        BaseException: On ranks where the function failed, its error.
        RuntimeError: On the others, with the first failing rank's reason; a missing or damaged checkpoint and one that
            takes code to load raise what that rank did.
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
