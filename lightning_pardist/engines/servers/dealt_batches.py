"""Which batches of an epoch are whose, where some workers are gone and the others get what they have left."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

#: Indices of a dataset.
Batch = list[int]
#: Gives the batches of the share with a number, of so many equal ones.
ShareOf = Callable[[int, int], Sequence[Batch]]


class DealtBatches:
    """The batches of one epoch by worker: those of its own share, and what it gets of others.

    Whoever is given the same tells the same, so workers need not talk about it. All that are left have equally many
    turns: where batches cannot be divided evenly, the last turn of some has none.

    Args:
        workers: Over whom the data is divided in this epoch.
        share_of: The shares.
        own: How many batches of its share each worker trains on; 0 where shares were begun by others.
        begun: Batches of this epoch that each worker counts as behind it where this begins.

    Attributes:
        here: Workers that are left.
    """

    def __init__(self, workers: Sequence[int], share_of: ShareOf, *, own: int, begun: int = 0) -> None:
        self.workers = self.here = tuple(workers)
        self._share_of, self._own, self._begun = share_of, own, begun
        self._given: dict[int, list[Batch | None]] = {worker: [] for worker in self.workers}
        self._deals: list[dict[int, int]] = []
        self._begun_by: Mapping[str, Any] | None = None

    @classmethod
    def of_rest(
        cls, workers: Sequence[int], share_of: ShareOf, *, state: Mapping[str, Any], begun: int
    ) -> DealtBatches:
        """What is left of an epoch that other workers have begun, dealt to these.

        Args:
            workers: Who goes on.
            share_of: The shares, as those have had them.
            state: See :meth:`state`.
            begun: As the constructor has it.
        """
        found = cls(workers, share_of, own=0, begun=begun)
        found._begun_by = state
        found._give(_rest(state, share_of))
        return found

    @property
    def is_plain(self) -> bool:
        """Whether each worker has the batches of its share, and no others."""
        return not self._deals and self._begun_by is None

    def given_to(self, worker: int) -> Sequence[Batch | None]:
        """What a worker has got so far of others: a batch a turn, None in a turn for which there was none."""
        return self._given[worker]

    def deal(self, gone: Mapping[int, int]) -> int:
        """Give what workers have left that are gone to those who are here.

        Args:
            gone: Who is, and how many batches of this epoch it has behind it. Those of earlier calls may be among them.

        Returns:
            How many turns more everybody has who is here.
        """
        new = {worker: gone[worker] for worker in self.here if worker in gone}
        self.here = tuple(worker for worker in self.here if worker not in gone)
        if not new:
            return 0
        self._deals.append(new)
        return self._give([batch for worker, done in new.items() for batch in self.left_to(worker, done)])

    def left_to(self, worker: int, done: int) -> list[Batch]:
        """The batches of a worker that are not behind it.

        Args:
            worker: Which.
            done: How many batches of this epoch are.
        """
        own: Sequence[Batch] = ()
        if done - self._begun < self._own:
            own = self._share_of(self.workers.index(worker), len(self.workers))[: self._own]
        given = [*own, *self._given[worker]][max(done - self._begun - (self._own - len(own)), 0) :]
        return [batch for batch in given if batch is not None]

    def count_left(self, gone: Mapping[int, int], done: int) -> int:
        """How many batches of the epoch nobody has behind it.

        Args:
            gone: As :meth:`deal` has it.
            done: How many are behind everybody who is here.
        """
        found = 0
        for worker in self.here:
            behind = gone.get(worker, done) - self._begun
            given = self._given[worker][max(behind - self._own, 0) :]
            found += max(self._own - behind, 0) + sum(batch is not None for batch in given)
        return found

    def state(self, gone: Mapping[int, int], done: int) -> dict[str, Any]:
        """What :meth:`of_rest` goes on from, as plain values. The arguments are those of :meth:`count_left`."""
        return {
            "workers": list(self.workers),
            "own": self._own,
            "begun": self._begun,
            "deals": self._deals,
            "begun_by": self._begun_by,
            "gone": {worker: gone[worker] for worker in self.here if worker in gone},
            "done": done,
        }

    def _give(self, batches: Sequence[Batch]) -> int:
        turns = -(-len(batches) // len(self.here))
        for place, worker in enumerate(self.here):
            mine = batches[place :: len(self.here)]
            self._given[worker] += [*mine, *[None] * (turns - len(mine))]
        return turns


def _rest(state: Mapping[str, Any], share_of: ShareOf) -> list[Batch]:
    """What nobody had behind it when a state was made."""
    workers, begun = state["workers"], state["begun"]
    if state["begun_by"] is None:
        dealt = DealtBatches(workers, share_of, own=state["own"], begun=begun)
    else:
        dealt = DealtBatches.of_rest(workers, share_of, state=state["begun_by"], begun=begun)
    for gone in state["deals"]:
        dealt.deal(gone)
    behind = {worker: state["gone"].get(worker, state["done"]) for worker in dealt.here}
    return [batch for worker, done in behind.items() for batch in dealt.left_to(worker, done)]
