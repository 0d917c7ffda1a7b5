"""Watchdog: ends a job on every rank after one rank fails, and reports the first failure.

[Note: causes and echoes]
When a rank fails, its peers fail too: their collectives report closed connections or time out. Such an error is an
*echo*. A rank with an echo waits a moment for the *cause* to appear in the job's store: the rank that raised has
written its traceback there before it closed its connections, a launcher has recorded that its child was killed, or a
watchdog thread has recorded that a peer's heartbeat stopped. If no cause appears, the echo itself becomes the report,
together with the main thread's stack of every rank, which its watchdog thread publishes: the rank that does not wait in
a collective is the one that hangs.

Nothing here is a collective: each rank accesses the store alone, over a connection of the watchdog's own.

[Note: a store that does not answer] If a host is cut off, or the process that holds the store is stopped, a request to
the store blocks for hours, whatever timeout was set. Therefore only the watchdog's thread and a main thread that has
already failed access it, and a second thread, which does not, ends this process if no reply comes.
"""

from __future__ import annotations

import json
import os
import re
import socket
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from datetime import timedelta

import torch.distributed as dist

from lightning_pardist.compat.process_groups import PrefixStore, Store
from lightning_pardist.engines.common.collective_record import first_difference, recorded
from lightning_pardist.runtime.failure_text import format_failure
from lightning_pardist.runtime.hang_diagnosis import (
    SUSPENDED_S,
    StallDetector,
    advice,
    is_in_engines,
    main_stack,
    places,
    waits_in_collective,
)
from lightning_pardist.runtime.process_exit import exit_now, write_stderr

_POLL_S = 0.5
_STORE_TIMEOUT_S = 5.0
#: Seconds for which a rank with an echo waits for the cause.
_CAUSE_WAIT_S = 4.0
#: Seconds that a rank has to end by itself once the failure of the job can be known ...
GRACE_S = 8.0
#: ... and the same for a rank that waits in a collective, which only the end of the process can interrupt.
_BLOCKED_GRACE_S = 2.0
#: The largest number that is passed to Watchdog.ask (trainer/preemption.py).
_MOST_ASKED = 2
_ECHO = re.compile(
    r"gloo|NCCL|Connection (closed|reset)|Socket Timeout|Broken pipe|recvValue failed|sendBytes failed|wait timeout"
    r"|timed out|Timed out|Application timeout|connection to .* lost",
)

_TIMEOUT = re.compile("timeout|timed out", re.IGNORECASE)


@dataclass(frozen=True)
class FailureReport:
    """The first failure of a job.

    Attributes:
        rank: Global rank that failed, or -1 if it is unknown.
        where: Host and process id.
        text: Readable description: a traceback, or a sentence.
    """

    rank: int
    where: str
    text: str

    def message(self) -> str:
        """Return the report as shown on every rank, the failure itself last."""
        who = f"rank {self.rank} ({self.where})" if self.rank >= 0 else "a rank"
        return f"The job ended because {who} failed:\n\n{self.text.rstrip()}"

    def is_same_failure(self, exception: BaseException) -> bool:
        """Return whether that rank raised this exception too, as all ranks do if a check fails on all of them."""
        said = "".join(traceback.format_exception_only(exception)).rstrip()
        # The report of an error of this package begins with its message, a traceback ends with it.
        return self.text.startswith(said) or self.text.rstrip().endswith(said)


class PeerFailedError(RuntimeError):
    """Another rank failed first; the message ends with that rank's report.

    Attributes:
        report: The first failure of the job.
    """

    def __init__(self, report: FailureReport) -> None:
        super().__init__(report)
        self.report = report

    def __str__(self) -> str:
        return self.report.message()


class Watchdog:
    """Detects failures of other ranks, and ends this process if its main thread cannot.

    Life cycle: :meth:`start` once the default process group exists; :meth:`failed` from the handler of an exception;
    :meth:`stop` when this rank's work is done. Started and stopped once per run; the number of runs must be equal on
    all ranks.

    Args:
        store: The job's store; the watchdog accesses it over a connection of its own.
        rank: Global rank of this process.
        world_size: Number of ranks.
        run: Number of this run in the job, equal on all ranks: keeps the keys of runs apart.
        heartbeat_timeout_s: A rank whose heartbeat has stopped for this many seconds is considered failed, and so is
            the job if its store has not replied for as long. Some seconds later the last rank has ended.
        on_exit: Called before this process is ended from outside its main thread, to end child processes.

    Attributes:
        lost: Ranks that are gone while the job continues, with the reason, as far as this rank has read them.
    """

    def __init__(
        self,
        store: Store,
        *,
        rank: int,
        world_size: int,
        run: int,
        heartbeat_timeout_s: float = 50.0,
        on_exit: Callable[[], None] | None = None,
    ) -> None:
        if heartbeat_timeout_s < 5:
            raise ValueError(f"heartbeat_timeout_s={heartbeat_timeout_s} is too short. Use 5 seconds or more.")
        self.rank = rank
        self.world_size = world_size
        self.heartbeat_timeout_s = heartbeat_timeout_s
        own_connection = store.clone()  # type: ignore[attr-defined]
        self._store = PrefixStore(f"pardist/watchdog/{run}", own_connection)
        # Shared by all runs: a rank lost in one of them is lost in the next.
        self._losses = PrefixStore("pardist/lost", own_connection)
        self._store.set_timeout(timedelta(seconds=_STORE_TIMEOUT_S))
        self._on_exit = on_exit
        self._main_thread = threading.main_thread().ident
        self._stop = threading.Event()
        self._failing = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="pardist-watchdog", daemon=True)
        self._guard = threading.Thread(target=self._guard_store, name="pardist-watchdog-guard", daemon=True)
        self._answers = 0
        self._own: FailureReport | None = None
        self._beats: dict[int, tuple[int, float]] = {}
        #: Seconds for which this process did not run.
        self._suspended_s = 0.0
        self._started: set[int] = set()
        self._request, self._sent_request = 0, 0
        self._reading = threading.Lock()
        self._stall_detector = StallDetector(self._main_thread)
        self._is_stalled = False
        self._failing_patience_s = 4 * GRACE_S
        #: On the first rank: the largest number that was passed to :meth:`send_request` on any rank.
        self.highest_request = 0
        self._may_be_lost: frozenset[int] = frozenset()
        #: Ranks that are gone while the job continues, with the reason.
        self.lost: dict[int, str] = {}
        #: Called with each of them.
        self.on_lost: Callable[[int], None] | None = None

    def send_request(self, what: int) -> None:
        """Pass a request for this rank on to the first rank, within a second or so. Safe in signal handlers.

        Args:
            what: Number of the request; larger ones take precedence.
        """
        self._request = max(self._request, what)

    def start(self) -> None:
        """Start the threads."""
        self._store.add(f"beat/{self.rank}", 1)
        self._thread.start()
        self._guard.start()

    def stop(self) -> None:
        """Stop the threads; from now on a missing heartbeat of this rank means success."""
        if self._stop.is_set():
            return
        self._stop.set()
        for thread in (self._guard, self._thread):
            if thread.is_alive() and thread is not threading.current_thread():
                thread.join(timeout=2 * _STORE_TIMEOUT_S)

    def failed(self, exception: BaseException) -> FailureReport:
        """Report this rank's failure and return the first one of the job.

        Args:
            exception: The exception of this rank's main thread.

        Returns:
            The first failure: this rank's own, or that of the rank that caused it.
        """
        self._failing.set()
        own = self._own = FailureReport(self.rank, where(), format_failure(exception))
        try:
            if self._is_lost(self.rank):
                return own
            if not is_echo(exception):
                return self._publish(own)
            self._store.compare_set("echo", "", str(self.rank))
            before = self._read_beats()
            deadline = time.monotonic() + _CAUSE_WAIT_S
            while time.monotonic() < deadline:
                cause = self._cause()
                if cause is not None:
                    return cause
                time.sleep(_POLL_S / 2)
            return self._publish(self._diagnose(own, before))
        except Exception:
            # Without its store the job is over, and the first rank holds it (or started together with its holder).
            if self.rank == 0 or not is_echo(exception):
                return own
            return FailureReport(0, "?", f"Rank 0 is gone, and the job's store with it.\n{_seen(own)}")

    def report_failure_of(self, rank: int, text: str, *, killed: bool = False) -> bool:
        """Report the failure of a rank that cannot report it itself.

        Args:
            rank: The rank that has failed.
            text: What was observed.
            killed: Whether a signal has ended it, and not an error of its own.

        Returns:
            Whether the job continues without it.
        """
        try:
            if self._is_lost(rank):
                return True
            if killed and self._cause() is None and self.mark_lost(rank, text):
                return True
            self._publish(FailureReport(rank, where(), text))
        except Exception:
            write_stderr(f"[rank {self.rank}] {text}")
        return False

    def allow_loss(self, ranks: Iterable[int]) -> None:
        """Allow the job to continue without any of these ranks, until :meth:`stop`. Not collective."""
        self._may_be_lost = frozenset(ranks)

    def mark_lost(self, rank: int, text: str) -> bool:
        """Record on the store that a rank is gone and that the job continues, if it may.

        Args:
            rank: The lost rank; if it is still running, it ends.
            text: The reason.

        Returns:
            Whether the job continues without it.
        """
        if rank in self.lost:
            return True
        if rank not in self._may_be_lost or self._stop.is_set():
            return False
        known = self._listed()
        while rank not in dict(json.loads(known or "[]")):
            before, wanted = known, json.dumps([*json.loads(known or "[]"), [rank, text]])
            known = self._losses.compare_set("list", before, wanted).decode()
        self.read_losses()
        return True

    def read_losses(self) -> None:
        """Read from the store which ranks are gone."""
        with self._reading:
            for rank, text in json.loads(self._listed() or "[]")[len(self.lost) :]:
                self.lost[rank] = text
                if self.on_lost is not None:
                    self.on_lost(rank)

    def _listed(self) -> str:
        return self._losses.get("list").decode() if self._losses.check(["list"]) else ""

    def _is_lost(self, rank: int) -> bool:
        """Return whether the job continues without a rank; does not access the store if it needs all ranks."""
        if self._may_be_lost:
            self.read_losses()
        return rank in self.lost

    def is_blocked(self, rank: int) -> bool:
        """Return whether a rank was waiting in a collective when its watchdog saw that the job has failed."""
        key = f"stack/{rank}"
        return self._store.check([key]) and waits_in_collective(self._store.get(key).decode())

    def extend_end(self, seconds: float) -> None:
        """Extend the time to end after a failure of all ranks at the same place, in which they save together.

        Args:
            seconds: How long this may take, counted from when the failure was known.
        """
        self._failing_patience_s = max(self._failing_patience_s, seconds)

    def publish_reason(self, text: str) -> None:
        """Publish why this rank ends, if the store is available.

        Args:
            text: The reason.
        """
        with suppress(Exception):
            self._publish(FailureReport(self.rank, where(), text))

    # --- the threads --------------------------------------------------------------------------------------------

    def _guard_store(self) -> None:
        answers, silent_s, before = -1, 0.0, time.monotonic()
        while not self._stop.wait(_POLL_S):
            now = time.monotonic()
            # Time during which this process was suspended as a whole does not count as silence of the store.
            silent_s += min(now - before, 2 * _POLL_S)
            before = now
            if self._answers != answers:
                answers, silent_s = self._answers, 0.0
            elif silent_s > self.heartbeat_timeout_s:
                text = (
                    f"The job's store has not answered rank {self.rank} for {silent_s:.0f} s (heartbeat_timeout_s="
                    f"{self.heartbeat_timeout_s:g}): the process that holds it, on the first rank's host, is gone or"
                    " stopped, or one of the two hosts is cut off."
                )
                self._end(FailureReport(-1, "?", text if self._own is None else f"{text}\n{_seen(self._own)}"))

    def _watch(self) -> None:
        noticed: float | None = None
        silent_since: float | None = None
        last_stack = False
        looked_at = time.monotonic()
        while not self._stop.wait(_POLL_S):
            elapsed, looked_at = time.monotonic() - looked_at, time.monotonic()
            if elapsed > max(SUSPENDED_S, self.heartbeat_timeout_s / 4):
                # The job was suspended as a whole: other ranks could not be heard either.
                self._suspended_s += elapsed
            now = looked_at - self._suspended_s
            try:
                self._store.add(f"beat/{self.rank}", 1)
                cause = self._cause()
                if self._may_be_lost:
                    self.read_losses()
                if not last_stack and (cause is not None or self._store.check(["echo"])):
                    last_stack = True
                    self._store.set(f"stack/{self.rank}", self._main_stack())
                self._check_peers(now)
                self._forward_requests()
                self._compare_places()
                self._answers += 1
                silent_since = None
            except Exception as error:
                silent_since = silent_since or now
                cause = None
                if now - silent_since > _CAUSE_WAIT_S:
                    cause = FailureReport(0, "?", f"Lost the job's store, which lives on the first rank: {error}")
            if self.rank in self.lost and not self._stop.is_set():
                self._exit_as_lost()
            if cause is None:
                continue
            noticed = noticed or now
            if now - noticed > self._patience_s():
                self._end(cause)
        # The rank that holds the store may have ended already.
        with suppress(Exception):
            self._store.set(f"done/{self.rank}", "1")

    def _forward_requests(self) -> None:
        if self._request > self._sent_request:
            self._sent_request = self._request
            self._store.set(f"asked/{self._request}", "1")
        if self.rank == 0:
            known = (
                what for what in range(_MOST_ASKED, self.highest_request, -1) if self._store.check([f"asked/{what}"])
            )
            self.highest_request = next(known, self.highest_request)

    def _compare_places(self) -> None:
        """Report the places of all ranks if all have been stalled in collectives for a while."""
        if self._may_be_lost:
            # Workers that may be lost do not take part in collectives with each other.
            return
        stack = self._main_stack() if self._stall_detector.seconds() > self.heartbeat_timeout_s else ""
        standing = waits_in_collective(stack)
        if standing != self._is_stalled:
            self._store.set(f"record/{self.rank}", recorded() if standing else "")
            self._store.set(f"standing/{self.rank}", stack if standing else "")
            self._is_stalled = standing
        if self.rank != 0 or not standing:
            return
        keys = [f"standing/{rank}" for rank in range(self.world_size)]
        if not self._store.check(keys):
            return
        stacks = {rank: stack.decode() for rank, stack in enumerate(self._store.multi_get(keys))}
        if not all(stacks.values()):
            return
        text = "Ranks wait in different collectives, each for the others."
        if len(set(stacks.values())) == 1:
            if not is_in_engines(stack):
                # They may all wait for something outside the job, such as a process that each rank has started.
                return
            text = (
                f"All ranks have waited in the same collective for {self.heartbeat_timeout_s:g} s"
                " (heartbeat_timeout_s), and nothing is sent: they differ in what they send or expect there, such as"
                " the number or the shapes of tensors."
            )
        difference = self._first_difference()
        self._publish(FailureReport(-1, "?", f"{text}{advice(stacks.values())}\n{difference}{places(stacks)}"))

    def _first_difference(self) -> str:
        """Return a text on the first collective that differs between ranks; empty if none is known to."""
        records = self._store.multi_get([f"record/{rank}" for rank in range(self.world_size)])
        text = first_difference({rank: record.decode() for rank, record in enumerate(records) if record})
        return text and f"{text}\n"

    def _patience_s(self) -> float:
        if self._failing.is_set():
            return self._failing_patience_s
        return _BLOCKED_GRACE_S if waits_in_collective(self._main_stack()) else GRACE_S

    def _end(self, cause: FailureReport) -> None:
        """End this process, whose main thread is blocked where no exception reaches it."""
        if self._stop.is_set():
            return
        if self._on_exit is not None:
            self._on_exit()
        stack = self._main_stack()
        if not waits_in_collective(stack):
            write_stderr(f"[rank {self.rank}] did not stop by itself; it was at:\n{stack}")
        # The first rank shows the report for all, unless the failure is its own, which the rank that noticed it has
        # shown, or the store is unavailable.
        speaks = self.rank == 0 or threading.current_thread() is self._guard
        message = cause.message() if speaks else cause.message().partition("\n")[0]
        write_stderr(f"[rank {self.rank}] {message}")
        exit_now()

    def _exit_as_lost(self) -> None:
        """End this process, which the other ranks have given up; it was suspended, for example, and resumed."""
        if self._on_exit is not None:
            self._on_exit()
        write_stderr(f"[rank {self.rank}] ends: the others go on without it. {self.lost[self.rank]}")
        exit_now()

    def _check_peers(self, now: float) -> None:
        # The first rank watches all, the others only the first: 2N reads for N ranks in total.
        watched = [rank for rank in range(1, self.world_size) if rank not in self.lost] if self.rank == 0 else [0]
        for rank, beat in self._read_beats(watched).items():
            last, since = self._beats.get(rank, (-1, now))
            if beat != last:
                self._beats[rank] = (beat, now)
            elif now - since > self.heartbeat_timeout_s:
                if self._store.check([f"done/{rank}"]):
                    self._beats[rank] = (beat, float("inf"))
                    continue
                text = (
                    f"Nothing was heard of rank {rank} for {now - since:.0f} s (heartbeat_timeout_s="
                    f"{self.heartbeat_timeout_s:g}): its process or host is gone, stopped or cut off."
                )
                if not self.mark_lost(rank, text):
                    self._publish(FailureReport(rank, "?", text))

    # --- the store ----------------------------------------------------------------------------------------------

    def _publish(self, report: FailureReport) -> FailureReport:
        """Write the report unless there is one already; return the report in effect."""
        stands = self._store.compare_set("cause", "", json.dumps(asdict(report)))
        return FailureReport(**json.loads(stands))

    def _cause(self) -> FailureReport | None:
        if not self._store.check(["cause"]):
            return None
        return FailureReport(**json.loads(self._store.get("cause")))

    def _read_beats(self, ranks: Sequence[int] | None = None) -> dict[int, int]:
        chosen = [rank for rank in range(self.world_size) if rank not in self.lost] if ranks is None else list(ranks)
        # Reading a missing key would block.
        self._started.update(r for r in chosen if r not in self._started and self._store.check([f"beat/{r}"]))
        started = [rank for rank in chosen if rank in self._started]
        if not started:
            return {}
        values = self._store.multi_get([f"beat/{rank}" for rank in started])
        return {rank: int(value) for rank, value in zip(started, values, strict=True)}

    def _diagnose(self, own: FailureReport, before: dict[int, int]) -> FailureReport:
        """Find the rank without a heartbeat, or outside the collective of the others, if no cause was written."""
        after = self._read_beats()
        silent = [rank for rank in after if after[rank] == before.get(rank) and rank != self.rank]
        silent = [rank for rank in silent if not self._store.check([f"done/{rank}"])]
        if silent:
            names = ", ".join(map(str, silent))
            return FailureReport(silent[0], "?", f"Rank {names} stopped answering: killed, or cut off.\n{_seen(own)}")
        stacks = {
            rank: self._store.get(f"stack/{rank}").decode()
            for rank in after
            if rank != self.rank and self._store.check([f"stack/{rank}"])
        }
        stuck = {rank: stack for rank, stack in stacks.items() if not waits_in_collective(stack)}
        for rank, stack in stuck.items():
            text = f"Rank {rank} did not join a collective that the others wait in.\n{_seen(own)}\nIt was at:\n{stack}"
            return FailureReport(rank, "hanging", text)
        if stacks and _TIMEOUT.search(own.text):
            return replace(own, text=f"{own.text.rstrip()}\n\nMeanwhile:\n{places(stacks)}")
        return own

    def _main_stack(self) -> str:
        return main_stack(self._main_thread)


def is_echo(exception: BaseException) -> bool:
    """Return whether an exception looks like the consequence of another rank's failure."""
    if isinstance(exception, PeerFailedError | dist.DistError):
        return True
    return isinstance(exception, RuntimeError) and bool(_ECHO.search(str(exception)))


def _seen(echo: FailureReport) -> str:
    return f"(Rank {echo.rank} saw: {echo.text.strip().splitlines()[-1]})"


def where(pid: int | None = None) -> str:
    """Return host and process id as reports name them, by default of this process."""
    return f"{socket.gethostname()}, pid {os.getpid() if pid is None else pid}"
