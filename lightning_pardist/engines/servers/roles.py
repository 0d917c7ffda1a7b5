"""Who works and who serves."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Roles:
    """Ranks of a group by what they do.

    Attributes:
        workers: Ranks with samples of their own.
        servers: Ranks that serve shares of the parameters: workers beside their work, or others.
        may_go: Whether training goes on without a worker that is gone, unless it is the first.
    """

    workers: tuple[int, ...]
    servers: tuple[int, ...]
    may_go: bool = False

    @classmethod
    def beside_work(cls, ranks: int, servers: int) -> Roles:
        """All ranks work, and the first so many serve."""
        return cls(tuple(range(ranks)), tuple(range(servers)))

    @classmethod
    def dedicated(cls, workers: int, servers: int, *, may_go: bool = False) -> Roles:
        """The last so many ranks only serve."""
        return cls(tuple(range(workers)), tuple(range(workers, workers + servers)), may_go)

    def is_dedicated(self, server: int) -> bool:
        """Whether a server does nothing else."""
        return server not in self.workers

    def keeper(self, server: int) -> int:
        """The worker that gives a server what it begins with, and has its state at meetings, for checkpoints."""
        if not self.is_dedicated(server):
            return server
        if self.may_go:
            return self.workers[0]
        return self.workers[self.servers.index(server) % len(self.workers)]

    def in_use(self, owners: Iterable[Iterable[int]]) -> tuple[int, ...]:
        """Servers that workers talk to: those that have a parameter, and all that wait for nothing else."""
        having = {owner for each in owners for owner in each}
        return tuple(server for server in self.servers if server in having or self.is_dedicated(server))
