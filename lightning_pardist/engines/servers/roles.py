"""Roles of ranks: workers and servers."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Roles:
    """Ranks of a group by role.

    Attributes:
        workers: Ranks that train on samples of their own.
        servers: Ranks that serve shares of the parameters: workers that also serve, or other ranks.
        may_be_lost: Whether training continues without a worker that is gone, unless it is the first.
    """

    workers: tuple[int, ...]
    servers: tuple[int, ...]
    may_be_lost: bool = False

    @classmethod
    def colocated(cls, ranks: int, servers: int) -> Roles:
        """Create roles in which all ranks work, and the first ``servers`` of them also serve."""
        return cls(tuple(range(ranks)), tuple(range(servers)))

    @classmethod
    def dedicated(cls, workers: int, servers: int, *, may_be_lost: bool = False) -> Roles:
        """Create roles in which the last ``servers`` ranks only serve."""
        return cls(tuple(range(workers)), tuple(range(workers, workers + servers)), may_be_lost)

    def is_dedicated(self, server: int) -> bool:
        """Return whether a server is not also a worker."""
        return server not in self.workers

    def primary_worker(self, server: int) -> int:
        """Return the worker that sends a server its initial values, and has its state at meetings, for checkpoints."""
        if not self.is_dedicated(server):
            return server
        if self.may_be_lost:
            return self.workers[0]
        return self.workers[self.servers.index(server) % len(self.workers)]

    def in_use(self, owners: Iterable[Iterable[int]]) -> tuple[int, ...]:
        """Return the servers that workers contact: those that own a parameter, and all dedicated ones."""
        having = {owner for each in owners for owner in each}
        return tuple(server for server in self.servers if server in having or self.is_dedicated(server))
