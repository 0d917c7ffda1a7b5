"""Ranks that are traced together: threads of which one runs at a time, until it waits for a message of another."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from lightning_pardist.compat.fake_group import KeptAside


class Stuck(RuntimeError):
    """Every rank that is traced waits for a message that nobody sends."""


class Turns:
    """Lets one of several threads run at a time, each with process groups of its own. Bounded: see :class:`Stuck`."""

    def __init__(self, count: int) -> None:
        self._condition = threading.Condition()
        self._asides = [KeptAside() for _ in range(count)]
        self._ready: list[Callable[[], bool] | None] = [lambda: True] * count
        self._running: int | None = None
        self.failed = False

    def enter(self, index: int) -> None:
        """Wait for the first turn of a thread."""
        self._take(index)

    def wait_for(self, index: int, ready: Callable[[], bool]) -> None:
        """Let others run until something is there.

        Raises:
            Stuck: If another thread has failed, or all wait.
        """
        if ready():
            return
        self._give(index, ready)
        self._take(index)
        if not ready():
            raise Stuck("The ranks of a plan wait for each other.")

    def leave(self, index: int, *, failed: bool = False) -> None:
        """A thread has ended; after a failure the others end as well."""
        self.failed = self.failed or failed
        self._give(index, None)

    def _give(self, index: int, ready: Callable[[], bool] | None) -> None:
        with self._condition:
            self._asides[index].put_aside()
            self._ready[index] = ready
            self._running = None
            self._condition.notify_all()

    def _take(self, index: int) -> None:
        with self._condition:
            self._condition.wait_for(lambda: self._running is None and self._next() == index)
            self._running = index
            self._ready[index] = None
            self._asides[index].put_back()

    def _next(self) -> int | None:
        """Whose turn it is: a rank whose message has come; if there is none, any, which finds that it is stuck."""
        waiting = [index for index, ready in enumerate(self._ready) if ready is not None]
        for index in waiting:
            ready = self._ready[index]
            if self.failed or (ready is not None and ready()):
                return index
        return waiting[0] if waiting else None


class Exchange:
    """Messages between traced ranks, as one of them sees it.

    Args:
        rank: Its global rank.
        ranks: Global ranks that are traced together, in the order of their threads.
        turns: Theirs.
        box: Messages under way, shared by them.
    """

    def __init__(self, rank: int, ranks: Sequence[int], turns: Turns, box: dict[Any, deque[Any]]) -> None:
        self._rank, self._ranks = rank, list(ranks)
        self._turns, self._box = turns, box
        self._told: dict[Any, int] = {}

    def knows(self, rank: int) -> bool:
        """Whether a rank is traced, too."""
        return rank in self._ranks

    def put(self, rank: int, tag: int, content: Tensor | None) -> None:
        """Send a tensor; None stands for values that nobody knows."""
        self._box.setdefault((self._rank, rank, tag), deque()).append(content)

    def take(self, rank: int, tag: int) -> Tensor | None:
        """Wait for what a rank sends.

        Raises:
            Stuck: If it never does.
        """
        queue = self._box.setdefault((rank, self._rank, tag), deque())
        self._turns.wait_for(self._ranks.index(self._rank), lambda: bool(queue))
        found: Tensor | None = queue.popleft()
        return found

    def broadcast(self, objects: list[Any], source: int, group: tuple[int, ...]) -> None:
        """What :func:`torch.distributed.broadcast_object_list` does: all ranks make these calls in one order.

        Raises:
            Stuck: If the source never comes to it.
        """
        if not self.knows(source):
            return
        count = self._told[source, group] = self._told.get((source, group), 0) + 1
        said = self._box.setdefault((source, group), deque())
        if source == self._rank:
            said.append(list(objects))
            return
        self._turns.wait_for(self._ranks.index(self._rank), lambda: len(said) >= count)
        objects[:] = said[count - 1]
