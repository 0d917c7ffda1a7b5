"""Ranks that are not in lockstep stop before the same step, by way of the job's store."""

from __future__ import annotations

from lightning_pardist.compat.process_groups import Store


class StopAgreement:
    """Agrees on the step before which all ranks stop, however far apart they are.

    Every rank counts its steps in the store before each, then looks whether somebody was asked to stop. The first rank
    says so there, reads the counts, and sets the place behind the furthest: whoever has not seen that somebody was
    asked has been counted, and so comes to that place.

    Args:
        store: Of all ranks, with keys of this run.
        rank: This rank.
        world_size: Number of ranks.
    """

    def __init__(self, store: Store, *, rank: int, world_size: int) -> None:
        self._store, self._rank, self._world_size = store, rank, world_size
        self._announced = False

    def before_step(self, asked: int) -> int:
        """Called before each step; waits for the first rank, for as long as the store does, once somebody was asked.

        Args:
            asked: On the first rank, what any rank was asked for; 0 for nothing.

        Returns:
            What all ranks are to do now; 0 to go on.
        """
        here = self._store.add(f"steps/{self._rank}", 1)
        if self._rank == 0 and asked and not self._announced:
            self._announced = True
            self._store.set("asked", str(asked))
            furthest = max(self._store.add(f"steps/{rank}", 0) for rank in range(self._world_size))
            self._store.set("stop", str(furthest + 1))
        if not self._store.check(["asked"]):
            return 0
        return int(self._store.get("asked")) if here == int(self._store.get("stop")) else 0
