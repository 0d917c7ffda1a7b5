"""Assignment of an epoch's batches to workers, if some are gone and the others take over their batches."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

#: Indices of a dataset.
Batch = list[int]
#: Function ``(index, count)`` that returns the batches of one of ``count`` equal shares.
ShareOf = Callable[[int, int], Sequence[Batch]]


class BatchAssignment:
    """The batches of one epoch by worker: those of its own share, and those that it takes over from others.

    The assignment depends on the arguments only, so workers compute it without communication. All remaining workers
    have the same number of turns: if batches cannot be divided evenly, the last turn of some has none.

    Args:
        workers: Workers over which the data is divided in this epoch.
        share_of: Returns the batches of a share.
        own: Number of batches of its share that each worker trains on; 0 if others began the shares.
        begun: Number of batches of this epoch that each worker counts as done at the start.

    Attributes:
        here: Workers that remain.
    """

    def __init__(self, workers: Sequence[int], share_of: ShareOf, *, own: int, begun: int = 0) -> None:
        self.workers = self.here = tuple(workers)
        self._share_of, self._own, self._begun = share_of, own, begun
        self._taken_over: dict[int, list[Batch | None]] = {worker: [] for worker in self.workers}
        self._reassignments: list[dict[int, int]] = []
        self._begun_by: Mapping[str, Any] | None = None

    @classmethod
    def from_remaining(
        cls, workers: Sequence[int], share_of: ShareOf, *, state: Mapping[str, Any], begun: int
    ) -> BatchAssignment:
        """Return the rest of an epoch that other workers have begun, dealt to these.

        Args:
            workers: Workers that continue.
            share_of: Returns the batches of a share, as for the other workers.
            state: See :meth:`state`.
            begun: As for the constructor.
        """
        found = cls(workers, share_of, own=0, begun=begun)
        found._begun_by = state
        found._assign(_remaining_batches(state, share_of))
        return found

    @property
    def is_plain(self) -> bool:
        """Whether each worker has the batches of its share, and no others."""
        return not self._reassignments and self._begun_by is None

    def taken_over_by(self, worker: int) -> Sequence[Batch | None]:
        """Return what a worker has taken over so far: one batch per turn, None in a turn without a batch."""
        return self._taken_over[worker]

    def reassign(self, gone: Mapping[int, int]) -> int:
        """Deal the remaining batches of workers that are gone to those that remain.

        Args:
            gone: Worker that is gone -> number of batches of this epoch that it has done. May contain those of earlier
                calls.

        Returns:
            Number of additional turns for each remaining worker.
        """
        new = {worker: gone[worker] for worker in self.here if worker in gone}
        self.here = tuple(worker for worker in self.here if worker not in gone)
        if not new:
            return 0
        self._reassignments.append(new)
        return self._assign([batch for worker, done in new.items() for batch in self.remaining_of(worker, done)])

    def remaining_of(self, worker: int, done: int) -> list[Batch]:
        """Return the batches of a worker that it has not done.

        Args:
            worker: The worker.
            done: Number of batches of this epoch that it has done.
        """
        own: Sequence[Batch] = ()
        if done - self._begun < self._own:
            own = self._share_of(self.workers.index(worker), len(self.workers))[: self._own]
        given = [*own, *self._taken_over[worker]][max(done - self._begun - (self._own - len(own)), 0) :]
        return [batch for batch in given if batch is not None]

    def count_left(self, gone: Mapping[int, int], done: int) -> int:
        """Return the number of batches of the epoch that no worker has done.

        Args:
            gone: As for :meth:`reassign`.
            done: Number of batches that each remaining worker has done.
        """
        found = 0
        for worker in self.here:
            behind = gone.get(worker, done) - self._begun
            given = self._taken_over[worker][max(behind - self._own, 0) :]
            found += max(self._own - behind, 0) + sum(batch is not None for batch in given)
        return found

    def state(self, gone: Mapping[int, int], done: int) -> dict[str, Any]:
        """Return the state for :meth:`from_remaining`, as plain values; arguments as for :meth:`count_left`."""
        return {
            "workers": list(self.workers),
            "own": self._own,
            "begun": self._begun,
            "deals": self._reassignments,
            "begun_by": self._begun_by,
            "gone": {worker: gone[worker] for worker in self.here if worker in gone},
            "done": done,
        }

    def _assign(self, batches: Sequence[Batch]) -> int:
        turns = -(-len(batches) // len(self.here))
        for place, worker in enumerate(self.here):
            mine = batches[place :: len(self.here)]
            self._taken_over[worker] += [*mine, *[None] * (turns - len(mine))]
        return turns


def _remaining_batches(state: Mapping[str, Any], share_of: ShareOf) -> list[Batch]:
    """Return the batches that no worker had done when a state was made."""
    workers, begun = state["workers"], state["begun"]
    if state["begun_by"] is None:
        dealt = BatchAssignment(workers, share_of, own=state["own"], begun=begun)
    else:
        dealt = BatchAssignment.from_remaining(workers, share_of, state=state["begun_by"], begun=begun)
    for gone in state["deals"]:
        dealt.reassign(gone)
    behind = {worker: state["gone"].get(worker, state["done"]) for worker in dealt.here}
    return [batch for worker, done in behind.items() for batch in dealt.remaining_of(worker, done)]
