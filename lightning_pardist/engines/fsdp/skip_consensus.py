"""Consensus on steps without a loss: skipped only if no rank has one."""

from __future__ import annotations

import time
from collections import Counter
from datetime import timedelta

import torch.distributed as dist

from lightning_pardist.compat.process_groups import PrefixStore, Store, default_store

_POLL_S = 0.002
_LONGEST_POLL_S = 0.1
#: How many boards a group has had: ranks make them in the same order.
_made: Counter[str] = Counter()


class SkipStepConsensus:
    """Publishes in the store whether this rank has a loss, and reads the others' answers if it has none.

    A rank with a loss goes straight into backward and its collectives, where one without it could not answer. So the
    notes go through the job's store: writing one costs a message of a few bytes that nobody waits for, and reading is
    for those alone that have no loss. Each rank's note takes the place of its last one.

    Args:
        group: Ranks that train together.
        timeout: How long to wait for another rank's note.
    """

    def __init__(self, group: dist.ProcessGroup, *, timeout: timedelta) -> None:
        self._rank, self._size = group.rank(), group.size()
        self._timeout = timeout
        self._step = 0
        self._store: Store | None = None
        # Nobody reads where there is nobody else, in torch's "fake" backend for one.
        if self._size > 1 and dist.get_backend(group) != "fake":
            name = group.group_name
            self._store = PrefixStore(f"pardist/losses/{name}/{_made[name]}", default_store())
            _made[name] += 1

    def note_loss(self) -> None:
        """This rank has a loss in this step. Not collective."""
        self._note("loss")

    def is_skipped_by_all(self) -> bool:
        """This rank has no loss in this step; whether the same holds for all. Every rank notes one or the other.

        Raises:
            RuntimeError: If a rank has noted nothing for too long.
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
                # One that is ahead has gone on without a loss, or it would wait for this rank's part of backward.
                if int(step) < self._step:
                    waiting.append(rank)
            others = waiting
            if others and time.monotonic() > deadline:
                raise RuntimeError(
                    f"This rank has no loss in this step, and ranks {others} have not said within"
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
