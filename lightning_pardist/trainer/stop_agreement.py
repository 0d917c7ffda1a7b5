"""Ranks that are not in lockstep stop before the same step, by way of the job's store."""

from __future__ import annotations

import time
from collections.abc import Collection
from contextlib import suppress

from lightning_pardist.compat.process_groups import Store

_POLL_S = 0.1


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

    def before_step(self, asked: int, *, lost: Collection[int] = ()) -> int:
        """Called before each step; waits for the first rank, for as long as the store does, once somebody was asked.

        Args:
            asked: On the first rank, what any rank was asked for; 0 for nothing.
            lost: Ranks that come to no further step.

        Returns:
            What all ranks are to do now; 0 to go on.
        """
        here = self._store.add(f"steps/{self._rank}", 1)
        if self._rank == 0 and asked and not self._announced:
            self._announced = True
            self._store.set("asked", str(asked))
            furthest = max(self._store.add(f"steps/{rank}", 0) for rank in range(self._world_size) if rank not in lost)
            self._store.set("stop", str(furthest + 1))
        if not self._store.check(["asked"]):
            return 0
        return int(self._store.get("asked")) if here == int(self._store.get("stop")) else 0

    def let_pass(self, timeout_s: float) -> None:
        """Wait until the first rank has come here, which writes what all leave behind, or is gone with the store.

        Args:
            timeout_s: Bound on that, behind which this rank goes on all the same.
        """
        with suppress(RuntimeError):
            if self._rank == 0:
                self._store.set("passed", "")
            deadline = time.monotonic() + timeout_s
            while not self._store.check(["passed"]) and time.monotonic() < deadline:
                time.sleep(_POLL_S)
