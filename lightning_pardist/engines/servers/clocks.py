"""Workers' clocks and the bound on their distance (stale synchronous parallel, Ho et al., NIPS 2013)."""

from __future__ import annotations

from collections.abc import Iterable


class WorkerClocks:
    """Counts each worker's contributions, and determines which wait for the slowest. Not thread-safe by itself.

    Args:
        workers: Ranks of the workers.
        max_ahead: Updates by which a worker may be ahead of the slowest, 1 or more; unbounded if None.
    """

    def __init__(self, workers: Iterable[int], max_ahead: int | None) -> None:
        self.max_ahead = max_ahead
        self._ticks = dict.fromkeys(workers, 0)
        self._excluded: set[int] = set()

    def tick(self, worker: int) -> int:
        """Count a worker's contribution; return how many updates the worker is ahead of the slowest.

        Raises:
            RuntimeError: If that is more than allowed: the worker did not wait for its turn.
        """
        self._ticks[worker] += 1
        ahead = self._ahead(worker)
        if self.max_ahead is not None and ahead > self.max_ahead:
            raise RuntimeError(
                f"Worker {worker} is {ahead} updates ahead of the slowest; {self.max_ahead} are allowed."
            )
        return ahead

    def may_proceed(self, worker: int) -> bool:
        """Return whether the worker's next contribution keeps the bound, whatever the others contribute meanwhile."""
        return self.max_ahead is None or self._ahead(worker) + 1 <= self.max_ahead

    def exclude(self, worker: int) -> None:
        """Exclude a worker from the slowest: it waits for the others at a meeting, or is done."""
        self._excluded.add(worker)

    def slowest(self) -> set[int]:
        """Return the workers that others wait for, if any waits."""
        ticks = {worker: ticks for worker, ticks in self._ticks.items() if worker not in self._excluded}
        return {worker for worker, count in ticks.items() if count == min(ticks.values())}

    def synchronize(self) -> None:
        """Set all clocks to the same value, after all workers have met."""
        level = max(self._ticks.values(), default=0)
        self._ticks = dict.fromkeys(self._ticks, level)
        self._excluded.clear()

    def _ahead(self, worker: int) -> int:
        others = (ticks for other, ticks in self._ticks.items() if other not in self._excluded or other == worker)
        return self._ticks[worker] - min(others)
