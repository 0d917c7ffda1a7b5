"""Messages between ranks that are traced together, in threads of which one runs at a time."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from lightning_pardist.compat.fake_group import SuspendedGroups


class Stuck(RuntimeError):
    """All traced ranks wait for messages that are never sent."""


class Turns:
    """Scheduler that runs one of several threads at a time, each with its own process groups; see :class:`Stuck`."""

    def __init__(self, count: int) -> None:
        self._condition = threading.Condition()
        self._asides = [SuspendedGroups() for _ in range(count)]
        self._ready: list[Callable[[], bool] | None] = [lambda: True] * count
        self._running: int | None = None
        self.failed = False

    def enter(self, index: int) -> None:
        """Wait for a thread's first turn."""
        self._take(index)

    def wait_for(self, index: int, ready: Callable[[], bool]) -> None:
        """Let other threads run until ``ready`` returns True.

        Raises:
            Stuck: If another thread has failed, or all threads wait.
        """
        if ready():
            return
        self._give(index, ready)
        self._take(index)
        if not ready():
            raise Stuck("All traced ranks wait for each other (deadlock).")

    def leave(self, index: int, *, failed: bool = False) -> None:
        """Mark a thread as ended; after a failure the other threads end as well."""
        self.failed = self.failed or failed
        self._give(index, None)

    def _give(self, index: int, ready: Callable[[], bool] | None) -> None:
        with self._condition:
            self._asides[index].suspend()
            self._ready[index] = ready
            self._running = None
            self._condition.notify_all()

    def _take(self, index: int) -> None:
        with self._condition:
            self._condition.wait_for(lambda: self._running is None and self._next() == index)
            self._running = index
            self._ready[index] = None
            self._asides[index].resume()

    def _next(self) -> int | None:
        """Return the next thread: a ready one; if there is none, a waiting one, which then raises :class:`Stuck`."""
        waiting = [index for index, ready in enumerate(self._ready) if ready is not None]
        for index in waiting:
            ready = self._ready[index]
            if self.failed or (ready is not None and ready()):
                return index
        return waiting[0] if waiting else None


class Exchange:
    """Message interface of one traced rank.

    Args:
        rank: Global rank.
        ranks: Global ranks that are traced together, in the order of their threads.
        turns: Scheduler of their threads.
        box: Messages in flight, shared by the ranks.
    """

    def __init__(self, rank: int, ranks: Sequence[int], turns: Turns, box: dict[Any, deque[Any]]) -> None:
        self._rank, self._ranks = rank, list(ranks)
        self._turns, self._box = turns, box
        self._told: dict[Any, int] = {}

    def is_traced(self, rank: int) -> bool:
        """Return whether a rank is traced as well."""
        return rank in self._ranks

    def put(self, rank: int, tag: int, content: Tensor | None) -> None:
        """Send a tensor; None stands for unknown values."""
        self._box.setdefault((self._rank, rank, tag), deque()).append(content)

    def take(self, rank: int, tag: int) -> Tensor | None:
        """Receive a tensor from a rank.

        Raises:
            Stuck: If it is never sent.
        """
        queue = self._box.setdefault((rank, self._rank, tag), deque())
        self._turns.wait_for(self._ranks.index(self._rank), lambda: bool(queue))
        found: Tensor | None = queue.popleft()
        return found

    def broadcast(self, objects: list[Any], source: int, group: tuple[int, ...]) -> None:
        """Broadcast objects as :func:`torch.distributed.broadcast_object_list` does, in the same order on all ranks.

        Raises:
            Stuck: If the source never makes the call.
        """
        if not self.is_traced(source):
            return
        count = self._told[source, group] = self._told.get((source, group), 0) + 1
        said = self._box.setdefault((source, group), deque())
        if source == self._rank:
            said.append(list(objects))
            return
        self._turns.wait_for(self._ranks.index(self._rank), lambda: len(said) >= count)
        objects[:] = said[count - 1]
