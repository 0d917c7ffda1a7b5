"""Store-based stop protocol for ranks that are not in lockstep: all ranks stop before the same step."""

from __future__ import annotations

import time
from collections.abc import Collection
from contextlib import suppress

from lightning_pardist.compat.process_groups import Store

_POLL_S = 0.1


class StopAgreement:
    """Determines the step before which all ranks stop, however far apart their step counts are.

    Before each step, every rank increments its step count in the store, then checks whether a stop was requested. The
    first rank publishes the request, reads all counts, and sets the stop at one step after the largest. A rank that has
    not seen the request yet was counted, so it still reaches the stop.

    Args:
        store: Store shared by all ranks, with keys of this run.
        rank: This rank.
        world_size: Number of ranks.
    """

    def __init__(self, store: Store, *, rank: int, world_size: int) -> None:
        self._store, self._rank, self._world_size = store, rank, world_size
        self._announced = False

    def before_step(self, asked: int, *, lost: Collection[int] = ()) -> int:
        """Count this rank's step and return the action before it. Called before each step.

        After a request was published, waits for the first rank to set the stop, up to the store's timeout.

        Args:
            asked: On the first rank, the action that was requested of any rank; 0 for none.
            lost: Ranks that will not run another step.

        Returns:
            The action that all ranks take now; 0 to continue.
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

    def wait_for_first_rank(self, timeout_s: float) -> None:
        """Wait until the first rank, which writes the run's outputs, has reached this call or is gone with the store.

        Args:
            timeout_s: Maximum wait in seconds, after which this rank continues.
        """
        with suppress(RuntimeError):
            if self._rank == 0:
                self._store.set("passed", "")
            deadline = time.monotonic() + timeout_s
            while not self._store.check(["passed"]) and time.monotonic() < deadline:
                time.sleep(_POLL_S)
