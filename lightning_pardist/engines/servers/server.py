"""One server: its shares of the parameters, and when which worker may go on."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Sequence

from torch import Tensor

from lightning_pardist.engines.servers.clocks import WorkerClocks
from lightning_pardist.engines.servers.share import Share
from lightning_pardist.engines.servers.update_log import Did, Entry, UpdateLog

Changes = list[Tensor | None]


class ParameterServer:
    """Updates its shares by workers' gradients, one at a time (Li et al., OSDI 2014). Every method is thread-safe.

    A worker sends its gradients, waits for its turn (:class:`WorkerClocks`) and takes what has changed since it last
    did. Updates are whole: none begins while another one, or a worker's look at the values, goes on (Hogwild, Recht
    et al., NIPS 2011, has no such locks).

    Args:
        shares: One for each optimizer, empty ones included.
        workers: Ranks of the workers.
        max_staleness: Updates that a worker may be ahead of the slowest, 1 or more; any number if None.
        timeout_s: Bound on every wait for other workers.
        log: Where the order of updates is written.

    Attributes:
        staleness: How many updates were how stale: made by others since the values that the gradients are of.
    """

    def __init__(
        self,
        shares: Sequence[Share],
        *,
        workers: Sequence[int],
        max_staleness: int | None,
        timeout_s: float,
        log: UpdateLog | None = None,
    ) -> None:
        self.shares = list(shares)
        self.workers = list(workers)
        self.staleness: Counter[int] = Counter()
        self._max_ahead = max_staleness
        # One for all optimizers: of two workers, each could wait in another optimizer's clock for the other one.
        self._clocks = WorkerClocks(workers, max_staleness)
        self._held = [dict.fromkeys(workers, 0) for _ in shares]
        #: Each worker's turn in which it got the values that it holds.
        self._held_since = [dict.fromkeys(workers, 0) for _ in shares]
        self._turns = dict.fromkeys(workers, 0)
        self._timeout_s = timeout_s
        self._log = log
        self._changed = threading.Condition()
        self._waiting: set[int] = set()
        self._left: set[int] = set()
        self._meetings = 0
        #: Who still reads what there was at the last meeting.
        self._reading: set[int] = set()
        self._failure: BaseException | None = None

    # --- a worker's turn ------------------------------------------------------------------------------------------

    def update(self, worker: int, optimizer: int, grads: Sequence[Tensor | None], numbers: Sequence[float]) -> int:
        """Update by a worker's gradients.

        Args:
            worker: Its rank.
            optimizer: Index of the share.
            grads: Of the share's parameters, None where there is none.
            numbers: Settings of the optimizer's groups on the worker.

        Returns:
            Updates that others have made since the worker got the values that the gradients are of.

        Raises:
            RuntimeError: If the worker is further ahead than allowed, or the server has failed.
        """
        with self._changed:
            self._wait(lambda: not self._reading, "all workers to go on behind a meeting")
            share, held = self.shares[optimizer], self._held[optimizer]
            ahead = self._clocks.tick(worker)
            self._turns[worker] += 1
            staleness = share.version - held[worker]
            bound = self._most_stale(worker, optimizer)
            if bound is not None and staleness > bound:
                raise RuntimeError(f"An update of worker {worker} is {staleness} updates stale, of {bound} allowed.")
            share.update(grads, numbers)
            self.staleness[staleness] += 1
            self._note("update", worker, optimizer, ahead=ahead, staleness=staleness, numbers=tuple(numbers))
            self._changed.notify_all()
            return staleness

    def _most_stale(self, worker: int, optimizer: int) -> int | None:
        """By how many updates of others a worker's can be stale, if all keep to the clocks; None for any number.

        They were at most ``max_staleness`` turns behind it when it got its values, and are as many ahead of it now.
        Turns of its own that lie between, of other optimizers, are theirs as well.
        """
        if self._max_ahead is None:
            return None
        between = self._turns[worker] - self._held_since[optimizer][worker] - 1
        return (2 * self._max_ahead + between) * (len(self.workers) - 1)

    def tick(self, worker: int, optimizer: int) -> None:
        """A worker's turn without gradients."""
        with self._changed:
            ahead = self._clocks.tick(worker)
            self._turns[worker] += 1
            self._note("tick", worker, optimizer, ahead=ahead)
            self._changed.notify_all()

    def take_turn(self, worker: int, optimizer: int, read: Callable[[Changes], Tensor | None]) -> Tensor | None:
        """Wait until a worker may go on, and let it have what it lacks.

        Args:
            worker: Its rank.
            optimizer: Index of the share.
            read: Given what has changed; must copy it.

        Returns:
            What ``read`` returned.

        Raises:
            TimeoutError: If the slowest worker does not come on.
        """
        with self._changed:
            self._wait(lambda: self._clocks.may_go_on(worker), "the slowest worker")
            return self._pull(worker, optimizer, read)

    def _pull(self, worker: int, optimizer: int, read: Callable[[Changes], Tensor | None]) -> Tensor | None:
        share, held = self.shares[optimizer], self._held[optimizer]
        changes = share.changes_since(held[worker])
        held[worker] = share.version
        self._held_since[optimizer][worker] = self._turns[worker]
        self._note("pull", worker, optimizer)
        return read(changes)

    # --- meetings -------------------------------------------------------------------------------------------------

    def meet(self, worker: int) -> None:
        """Wait until all workers are here: every update has been made.

        Nobody makes another one until each of them has called :meth:`release`, so that it may read values and state.

        Raises:
            TimeoutError: If some do not come.
        """
        with self._changed:
            meeting = self._meetings
            self._waiting.add(worker)
            self._settle()
            self._wait(lambda: self._meetings > meeting, "all workers at a meeting")

    def take_all(self, worker: int, optimizer: int, read: Callable[[Changes], Tensor | None]) -> Tensor | None:
        """As :meth:`take_turn`, behind :meth:`meet`."""
        with self._changed:
            return self._pull(worker, optimizer, read)

    def leave(self, worker: int) -> None:
        """A worker makes no further updates, and nobody waits for it."""
        with self._changed:
            self._left.add(worker)
            self._reading.discard(worker)
            self._settle()

    def _settle(self) -> None:
        for worker in self._waiting | self._left:
            self._clocks.rest(worker)
        if self._waiting and len(self._waiting | self._left) == len(self.workers):
            self._meetings += 1
            self._reading = set(self._waiting)
            self._waiting.clear()
            self._clocks.meet()
            for worker in self._left:
                self._clocks.rest(worker)
            if self._log is not None:
                self._log.flush()
        self._changed.notify_all()

    def release(self, worker: int) -> None:
        """A worker has what it wants of a meeting, and goes on training."""
        with self._changed:
            self._reading.discard(worker)
            self._changed.notify_all()

    # --- the end --------------------------------------------------------------------------------------------------

    def fail(self, failure: BaseException) -> None:
        """End every wait by this failure."""
        with self._changed:
            self._failure = self._failure or failure
            self._changed.notify_all()

    def check(self) -> None:
        """Raise if the server has failed.

        Raises:
            RuntimeError: With the reason.
        """
        with self._changed:
            if self._failure is not None:
                raise RuntimeError(f"The parameter server has failed: {self._failure}") from self._failure

    def close(self) -> None:
        """The run has ended."""
        with self._changed:
            self._reading.clear()
            self._changed.notify_all()
            if self._log is not None:
                self._log.close()

    def _wait(self, until: Callable[[], bool], whom: str) -> None:
        came = self._changed.wait_for(lambda: self._failure is not None or until(), self._timeout_s)
        self.check()
        if not came:
            raise TimeoutError(f"Waited {self._timeout_s:.0f} s for {whom} in vain (timeout_s).")

    def _note(
        self,
        did: Did,
        worker: int,
        optimizer: int,
        *,
        ahead: int = 0,
        staleness: int = 0,
        numbers: tuple[float, ...] = (),
    ) -> None:
        if self._log is not None:
            turn = self._turns[worker]
            self._log.add(Entry(did, worker, turn, optimizer, ahead, staleness, numbers))
