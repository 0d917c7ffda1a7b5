"""A parameter server: its shares of the parameters, and the order in which workers continue."""

from __future__ import annotations

import enum
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_pardist.engines.servers.clocks import WorkerClocks
from lightning_pardist.engines.servers.share import Share
from lightning_pardist.engines.servers.update_log import Did, Entry, UpdateLog

Changes = list[Tensor | None]
#: Number of checks on a worker that others wait for, within the timeout of its silence.
_LOOKS = 4


class DroppedWorkerError(RuntimeError):
    """Raised for a request of a worker that was given up."""


@dataclass
class LostWorker:
    """A worker that is gone.

    Attributes:
        worker: Rank of the worker.
        updates: Number of updates that it has made.
        position: At its latest turn, its epoch, the number of batches of its share that it had done, and the number of
            all batches of the share; None before the first.
        why: Reason that was observed.
    """

    worker: int
    updates: int
    position: tuple[int, int, int] | None
    why: str

    def describe(self, why: str | None = None, *, is_shared: bool = False) -> str:
        """Describe the consequences in a sentence.

        Args:
            why: Reason that was observed elsewhere, if any.
            is_shared: Whether the remaining workers take over its share of the data.
        """
        text = f"Worker {self.worker} has gone after {self.updates} updates ({(why or self.why).rstrip('.')});"
        text += " the others go on without it, and "
        if is_shared:
            # The number of batches is known at the next meeting: batches of other lost workers may be among them.
            return f"{text}take over the rest of its share of the data."
        text += "its share of the data is not trained on"
        if self.position is None:
            return f"{text}."
        epoch, done, batches = self.position
        return f"{text}: {batches - done} of {batches} batches in epoch {epoch}, and all of later epochs."


class Purpose(enum.IntEnum):
    """Purpose of a meeting of workers."""

    ANY = 0
    EVALUATION = 1
    CHECKPOINT = 2
    END = 3
    SHARE = 4


@dataclass(frozen=True)
class MeetingKey:
    """Identity of a meeting, which each worker computes independently.

    Attributes:
        purpose: Purpose of the meeting.
        epoch: Epoch of the worker.
        count: Number of meetings of that purpose that the worker has attended in this epoch.
    """

    purpose: int = Purpose.ANY
    epoch: int = 0
    count: int = 0

    def __str__(self) -> str:
        name = Purpose(self.purpose).name.lower()
        return name if self.purpose in (Purpose.ANY, Purpose.END) else f"{name} {self.count} of epoch {self.epoch}"


ANY_MEETING = MeetingKey()


class ParameterServer:
    """Updates its shares with workers' gradients, one at a time (Li et al., OSDI 2014). Every method is thread-safe.

    A worker sends its gradients, waits for its turn (:class:`WorkerClocks`) and receives what has changed since its
    last turn. Updates are atomic: none starts while another update, or a worker's read of the values, is in progress
    (Hogwild, Recht et al., NIPS 2011, has no such locks).

    Args:
        shares: One per optimizer, empty ones included.
        workers: Ranks of the workers.
        max_staleness: Updates by which a worker may be ahead of the slowest, 1 or more; unbounded if None.
        timeout_s: Timeout of every wait for other workers.
        log: Log of the order of updates.
        may_be_lost: Workers without which the others continue, if they are gone, or if others wait for one that sends
            no request for ``timeout_s``. Others wait without a timeout for one that keeps sending requests.

    Attributes:
        lost_workers: Workers that are gone, in order of their loss.
        on_wait: Called periodically for a worker that waits, in the thread that waits for it.
        staleness: Number of updates per staleness: updates by others since the gradients' parameter values.
    """

    def __init__(
        self,
        shares: Sequence[Share],
        *,
        workers: Sequence[int],
        max_staleness: int | None,
        timeout_s: float,
        log: UpdateLog | None = None,
        may_be_lost: Iterable[int] = (),
    ) -> None:
        self.shares = list(shares)
        self.workers = list(workers)
        self.staleness: Counter[int] = Counter()
        self._max_ahead = max_staleness
        # One clock for all optimizers: with several, two workers could wait for each other.
        self._clocks = WorkerClocks(workers, max_staleness)
        self._held = [dict.fromkeys(workers, 0) for _ in shares]
        #: Per optimizer, the turn in which each worker received the values that it holds.
        self._held_since = [dict.fromkeys(workers, 0) for _ in shares]
        self._turns = dict.fromkeys(workers, 0)
        self._updates = dict.fromkeys(workers, 0)
        self._positions: dict[int, tuple[int, int, int]] = {}
        self.may_be_lost = frozenset(may_be_lost)
        self.lost_workers: list[LostWorker] = []
        self.on_wait: Callable[[int], None] = lambda worker: None
        #: Time of each worker's latest request.
        self._last_request = dict.fromkeys(workers, time.monotonic())
        self._timeout_s = timeout_s
        self._log = log
        self._changed = threading.Condition()
        self._waiting: dict[int, MeetingKey] = {}
        self._left: set[int] = set()
        self._meetings = 0
        #: Workers that still read the values of the last meeting.
        self._reading: set[int] = set()
        #: Workers that were gone at the last meeting.
        self._gone: list[LostWorker] = []
        #: Time at which the first worker, which writes for all, left; None before.
        self._ended: float | None = None
        #: Workers' tensors that no optimizer updates, and their mean at the last meeting.
        self._rests: dict[int, Tensor] = {}
        self._rest: Tensor | None = None
        self._failure: BaseException | None = None

    # --- a worker's turn ------------------------------------------------------------------------------------------

    def update(
        self,
        worker: int,
        optimizer: int,
        grads: Sequence[Tensor | None],
        numbers: Sequence[float],
        position: tuple[int, int, int] | None = None,
    ) -> int:
        """Update a share with a worker's gradients.

        Args:
            worker: Rank of the worker.
            optimizer: Index of the share.
            grads: Gradients of the share's parameters, None where there is none.
            numbers: Settings of the optimizer's groups on the worker.
            position: See :class:`LostWorker`.

        Returns:
            Number of updates by others since the worker received the values that its gradients were computed from.

        Raises:
            RuntimeError: If the worker is further ahead than allowed, or the server has failed.
        """
        with self._changed:
            self._note_request(worker)
            self._wait(
                worker, lambda: not self._reading, "all workers to continue after a meeting", lambda: self._reading
            )
            self._require_not_lost(worker)
            share, held = self.shares[optimizer], self._held[optimizer]
            ahead = self._clocks.tick(worker)
            self._turns[worker] += 1
            staleness = share.version - held[worker]
            bound = self._staleness_bound(worker, optimizer)
            if bound is not None and staleness > bound:
                raise RuntimeError(f"An update of worker {worker} is {staleness} updates stale; {bound} are allowed.")
            share.update(grads, numbers)
            self.staleness[staleness] += 1
            self._updates[worker] += 1
            if position is not None:
                self._positions[worker] = position
            self._note("update", worker, optimizer, ahead=ahead, staleness=staleness, numbers=tuple(numbers))
            self._changed.notify_all()
            return staleness

    def _staleness_bound(self, worker: int, optimizer: int) -> int | None:
        """Return the largest staleness of a worker's update if all keep to the clocks; None if unbounded.

        The others were at most ``max_staleness`` turns behind the worker when it received its values, and are at most
        as many ahead of it now. Its own turns of other optimizers in between count for the others as well.
        """
        if self._max_ahead is None:
            return None
        between = self._turns[worker] - self._held_since[optimizer][worker] - 1
        return (2 * self._max_ahead + between) * (len(self.workers) - 1)

    def tick(self, worker: int, optimizer: int, position: tuple[int, int, int] | None = None) -> None:
        """Count a worker's turn without gradients."""
        with self._changed:
            self._note_request(worker)
            self._require_not_lost(worker)
            if position is not None:
                self._positions[worker] = position
            ahead = self._clocks.tick(worker)
            self._turns[worker] += 1
            self._note("tick", worker, optimizer, ahead=ahead)
            self._changed.notify_all()

    def take_turn(self, worker: int, optimizer: int, read: Callable[[Changes], Tensor | None]) -> Tensor | None:
        """Wait until a worker may continue, and pass it the changes that it lacks.

        Args:
            worker: Rank of the worker.
            optimizer: Index of the share.
            read: Called with the changes; must copy them.

        Returns:
            The result of ``read``.

        Raises:
            TimeoutError: If the slowest worker does not progress.
        """
        with self._changed:
            self._wait(worker, lambda: self._clocks.may_proceed(worker), "the slowest worker", self._clocks.slowest)
            self._require_not_lost(worker)
            return self._pull(worker, optimizer, read)

    def _pull(self, worker: int, optimizer: int, read: Callable[[Changes], Tensor | None]) -> Tensor | None:
        share, held = self.shares[optimizer], self._held[optimizer]
        changes = share.changes_since(held[worker])
        held[worker] = share.version
        self._held_since[optimizer][worker] = self._turns[worker]
        self._note("pull", worker, optimizer)
        return read(changes)

    # --- meetings -------------------------------------------------------------------------------------------------

    def meet(self, worker: int, rest: Tensor | None = None, place: MeetingKey = ANY_MEETING) -> None:
        """Wait until all workers have arrived, when every update has been made.

        No other update runs until each worker has called :meth:`release`, so that it may read values and state.

        Args:
            worker: Rank of the worker.
            rest: The worker's tensors that no optimizer updates; :attr:`rest` is the workers' mean afterwards.
            place: Identity of the meeting.

        Raises:
            RuntimeError: If another worker is at another meeting.
            TimeoutError: If some workers do not arrive.
        """
        with self._changed:
            self._note_request(worker)
            self._require_not_lost(worker)
            meeting = self._meetings
            for other, where in self._waiting.items():
                if where != place:
                    raise RuntimeError(
                        f"Worker {worker} is at {place}, but worker {other} is at {where}. Each worker decides by"
                        " itself when to meet the others, and the decision depends on something that differs between"
                        " them, such as a value logged in training, the time, or a number of batches. Decide by values"
                        " logged in validation and by counts that are equal on all workers, or set lost_workers='end'."
                    )
            self._waiting[worker] = place
            if rest is not None:
                self._rests[worker] = rest
            self._settle()
            self._wait(
                worker,
                lambda: self._meetings > meeting,
                "all workers at a meeting",
                lambda: set(self.workers) - set(self._waiting) - self._left,
            )
            self._require_not_lost(worker)

    @property
    def rest(self) -> Tensor | None:
        """Mean of the tensors that workers passed to :meth:`meet`, at the last meeting."""
        with self._changed:
            return self._rest

    @property
    def gone(self) -> list[LostWorker]:
        """Workers that were gone at the last meeting: the same for all that attended it."""
        with self._changed:
            return list(self._gone)

    def take_all(self, worker: int, optimizer: int, read: Callable[[Changes], Tensor | None]) -> Tensor | None:
        """Pass a worker the changes that it lacks, after :meth:`meet`; :meth:`take_turn` without waiting."""
        with self._changed:
            self._note_request(worker)
            return self._pull(worker, optimizer, read)

    def leave(self, worker: int) -> None:
        """Remove a worker, which makes no further updates and is not waited for."""
        with self._changed:
            self._left.add(worker)
            if worker == self.workers[0]:
                self._ended = time.monotonic()
            self._reading.discard(worker)
            self._settle()

    def mark_lost(self, worker: int, why: str) -> None:
        """Record that a worker is gone: others do not wait for it, and its later requests are rejected.

        Args:
            worker: Rank of the worker, one of :attr:`may_be_lost`; one that has left cannot be lost.
            why: Reason that was observed.
        """
        with self._changed:
            self._mark_lost(worker, why)

    def _mark_lost(self, worker: int, why: str) -> None:
        if worker in self._left:
            return
        self.lost_workers.append(LostWorker(worker, self._updates[worker], self._positions.get(worker), why))
        self._note("lost", worker, 0)
        self._waiting.pop(worker, None)
        self._rests.pop(worker, None)
        self.leave(worker)

    def mark_silent_lost(self) -> None:
        """Lose workers that send no more requests after the first worker has left, as no other waits for them."""
        with self._changed:
            if self._ended is not None:
                silent = self._silent(set(self.workers) - set(self._waiting) - self._left, self._ended)
                for worker in silent & self.may_be_lost:
                    self._mark_lost(worker, f"it did not end within {self._timeout_s:g} s after the first, timeout_s")

    def _note_request(self, worker: int) -> None:
        self._last_request[worker] = time.monotonic()

    def _silent(self, workers: Iterable[int], since: float) -> set[int]:
        """Return which workers have sent no request within the timeout, counted from a moment at the earliest."""
        latest = time.monotonic() - self._timeout_s
        return {each for each in workers if max(self._last_request[each], since) <= latest}

    @property
    def lost(self) -> set[int]:
        """Workers that are gone."""
        with self._changed:
            return {loss.worker for loss in self.lost_workers}

    def _require_not_lost(self, worker: int) -> None:
        if worker in self.lost:
            raise DroppedWorkerError(f"The others have gone on without worker {worker}.")

    def _settle(self) -> None:
        here = set(self._waiting) | self._left
        for worker in here:
            self._clocks.exclude(worker)
        if self._waiting and len(here) == len(self.workers):
            self._meetings += 1
            self._reading = set(self._waiting)
            self._gone = list(self.lost_workers)
            for worker in self._reading:
                self._note_request(worker)
            self._waiting.clear()
            self._rest = None
            if self._rests:
                # In rank order, so that the result does not depend on the order of arrival.
                parts = [self._rests[worker] for worker in sorted(self._rests)]
                self._rest = torch.stack(parts).mean(0)
                self._rests.clear()
            self._clocks.synchronize()
            for worker in self._left:
                self._clocks.exclude(worker)
            if self._log is not None:
                self._log.flush()
        self._changed.notify_all()

    def release(self, worker: int) -> None:
        """End a worker's reading at a meeting; it continues training."""
        with self._changed:
            self._reading.discard(worker)
            self._changed.notify_all()

    # --- the end --------------------------------------------------------------------------------------------------

    def fail(self, failure: BaseException) -> None:
        """End every wait with this failure."""
        with self._changed:
            self._failure = self._failure or failure
            self._changed.notify_all()

    def check(self) -> None:
        """Raise an error if the server has failed.

        Raises:
            RuntimeError: If it has, with the reason.
        """
        with self._changed:
            if self._failure is not None:
                raise RuntimeError(f"The parameter server has failed: {self._failure}") from self._failure

    def close(self) -> None:
        """End the run: release all readers and close the log."""
        with self._changed:
            self._reading.clear()
            self._changed.notify_all()
            if self._log is not None:
                self._log.close()

    def _wait(self, worker: int, until: Callable[[], bool], whom: str, late: Callable[[], Iterable[int]]) -> None:
        """Make a worker wait for ``until``; ``whom`` describes, and ``late`` returns, the workers that it waits for."""
        began, patience_s = time.monotonic(), self._timeout_s / (_LOOKS if self.may_be_lost else 1)

        def is_over() -> bool:
            return self._failure is not None or worker in self.lost or until()

        came = self._changed.wait_for(is_over, patience_s)
        while not came and self.may_be_lost:
            self._note_request(worker)
            silent = self._silent(late(), began)
            if not silent <= self.may_be_lost:
                break
            for each in silent:
                self._mark_lost(each, f"the others waited {self._timeout_s:g} s for it in vain, timeout_s")
            # Others may continue while this is sent.
            self._changed.release()
            try:
                self.on_wait(worker)
            finally:
                self._changed.acquire()
            came = self._changed.wait_for(is_over, patience_s)
        self._note_request(worker)
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
