"""Check whether the ranks of a failed run can still save a checkpoint together.

[Note: saving after a failure] A checkpoint is put together by collectives. The collectives of a rank that raised alone
would match those of ranks in the middle of a step: shards of the same size would be confused, and the file would be
silently wrong. So the exception of each rank, and where it was raised, are compared over the job's store, and ranks
save only if they are equal.
"""

from __future__ import annotations

import hashlib
import json
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta

from lightning_pardist.compat.process_groups import PrefixStore, Store
from lightning_pardist.runtime.watchdog import GRACE_S, is_echo

_POLL_S = 0.05
_STORE_TIMEOUT_S = 5.0
#: A rank that has not failed by itself within this time is about to be ended by its watchdog.
_WAIT_S = GRACE_S + 2.0


@dataclass(frozen=True)
class SaveRefusal:
    """Reason why no checkpoint can be saved any more.

    Attributes:
        why: The reason, for a message.
        is_first: Whether this rank reports it; the first rank may have ended already.
    """

    why: str
    is_first: bool = True


@dataclass(frozen=True)
class Failure:
    """How a run has failed on this rank.

    Attributes:
        what: Hash of the exception's type and message and of the lines of code that it passed; equal on ranks with the
            same failure.
        why_alone: Why no other rank can have failed at the same place; empty if others may have.
        elsewhere: Whether training ran in other processes, started by this one.
    """

    what: str
    why_alone: str = ""
    elsewhere: bool = False

    @classmethod
    def in_started_ranks(cls, start_method: str) -> Failure:
        """Return the failure of ranks started by spawn or fork, for the calling process."""
        why = (
            f"the ranks were separate processes (start_method={start_method!r}), and what they trained was lost when"
            " they ended; start_method='popen' keeps the first rank in this process"
        )
        return cls("", why, elsewhere=True)

    @classmethod
    def of(cls, exception: BaseException) -> Failure:
        """Return the failure for an exception that a run has raised on this rank."""
        lines = [f"{frame.filename}:{frame.lineno}" for frame in traceback.extract_tb(exception.__traceback__)]
        said = "".join(traceback.format_exception_only(exception))
        what = hashlib.sha256("\n".join([said, *lines]).encode()).hexdigest()
        if isinstance(exception, KeyboardInterrupt):
            return cls(what, "each rank was interrupted at a different place")
        if is_echo(exception):
            return cls(what, "another rank, or the connection to it, has failed")
        return cls(what)

    def refusal(
        self,
        store: Store,
        *,
        run: int,
        rank: int,
        ranks: int,
        progress: str,
        is_blocked: Callable[[int], bool],
    ) -> SaveRefusal | None:
        """Check whether every rank has failed in the same way. Not collective: each rank waits for some seconds.

        Args:
            store: The job's store.
            run: Number of the run in the job.
            rank: This rank.
            ranks: Number of ranks.
            progress: This rank's progress in training; must be equal on all ranks as well.
            is_blocked: Returns whether a rank waits in a collective, as far as is known since this rank has failed.

        Returns:
            None if all ranks have; otherwise the reason, with the rank that differs.
        """
        try:
            own = PrefixStore(f"pardist/failed/{run}", store.clone())  # type: ignore[attr-defined]
            own.set_timeout(timedelta(seconds=_STORE_TIMEOUT_S))
            own.set(str(rank), json.dumps([self.what, self.why_alone, progress]))
            why = self.why_alone or self._who_differs(own, rank, ranks, progress, is_blocked)
            return SaveRefusal(why, is_first=own.add("told", 1) == 1) if why else None
        except RuntimeError as error:
            return SaveRefusal(f"the job's store does not answer ({str(error).splitlines()[0]})")

    def _who_differs(
        self, store: Store, rank: int, ranks: int, progress: str, is_blocked: Callable[[int], bool]
    ) -> str:
        missing, deadline = set(range(ranks)) - {rank}, time.monotonic() + _WAIT_S
        while missing:
            for other in [each for each in sorted(missing) if store.check([str(each)])]:
                what, why_alone, reached = json.loads(store.get(str(other)))
                if why_alone or what != self.what:
                    return f"rank {other} did not raise the same exception at the same place"
                if reached != progress:
                    return f"rank {other} raised the same exception, but at {reached}, and rank {rank} at {progress}"
                missing.discard(other)
            for other in missing:
                if is_blocked(other):
                    return f"rank {other} waits in a collective for the ranks that have failed"
            if missing and time.monotonic() > deadline:
                return f"rank {min(missing)} has not raised the same exception within {_WAIT_S:g} s"
            time.sleep(_POLL_S)
        return ""
