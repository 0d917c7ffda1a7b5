"""Consensus on steps without a loss: skipped only if no rank has one."""

from __future__ import annotations

import time
from collections import Counter
from datetime import timedelta

import torch.distributed as dist

from lightning_pardist.compat.process_groups import PrefixStore, Store, default_store

_POLL_S = 0.002
_LONGEST_POLL_S = 0.1
#: Number of consensus objects created per group; ranks create them in the same order.
_made: Counter[str] = Counter()


class SkipStepConsensus:
    """Publishes in the store whether this rank has a loss, and reads the other ranks' entries if it has none.

    A rank with a loss goes straight into backward and its collectives, which a rank without one does not join. So the
    entries go through the job's store: writing one costs a message of a few bytes that no rank waits for, and only
    ranks without a loss read them. Each entry of a rank replaces its previous one.

    Args:
        group: Ranks that train together.
        timeout: How long to wait for another rank's entry.
    """

    def __init__(self, group: dist.ProcessGroup, *, timeout: timedelta) -> None:
        self._rank, self._size = group.rank(), group.size()
        self._timeout = timeout
        self._step = 0
        self._store: Store | None = None
        # Without other ranks no entry is read; torch's "fake" backend has none.
        if self._size > 1 and dist.get_backend(group) != "fake":
            name = group.group_name
            self._store = PrefixStore(f"pardist/losses/{name}/{_made[name]}", default_store())
            _made[name] += 1

    def note_loss(self) -> None:
        """Publish that this rank has a loss in this step. Not collective."""
        self._note("loss")

    def is_skipped_by_all(self) -> bool:
        """Publish that this rank has no loss in this step, and return whether no rank has one.

        Every rank must call this or :meth:`note_loss` in every step.

        Raises:
            RuntimeError: If a rank has published nothing within the timeout.
        """
        self._note("none")
        if self._store is None:
            return True
        deadline, pause = time.monotonic() + self._timeout.total_seconds(), _POLL_S
        others = [rank for rank in range(self._size) if rank != self._rank]
        self._store.wait([str(rank) for rank in others], self._timeout)
        while others:
            waiting = []
            for rank, value in zip(others, self._store.multi_get([str(rank) for rank in others]), strict=True):
                step, _, kind = value.decode().partition(" ")
                if int(step) == self._step and kind == "loss":
                    return False
                # A rank that is ahead had no loss, or it would wait in backward for this rank's shards.
                if int(step) < self._step:
                    waiting.append(rank)
            others = waiting
            if others and time.monotonic() > deadline:
                raise RuntimeError(
                    f"This rank has no loss in this step, and ranks {others} have not reported within"
                    f" {self._timeout.total_seconds():.0f} s whether they have one."
                )
            if others:
                time.sleep(pause)
                pause = min(2 * pause, _LONGEST_POLL_S)
        return True

    def _note(self, kind: str) -> None:
        self._step += 1
        if self._store is not None:
            self._store.set(str(self._rank), f"{self._step} {kind}")
