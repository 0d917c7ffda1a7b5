"""Harness that starts every candidate's ranks, lets them train in turns, and collects their reports."""

from __future__ import annotations

import contextlib
import gc
import math
import multiprocessing
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from benchmarks import machine, network
from benchmarks.rank import harness_ends, serve
from benchmarks.settings import Settings

#: Forked ranks share this process's imports, which can take longer than a measurement. No device survives a fork.
START_METHOD = "fork" if sys.platform.startswith("linux") else "spawn"
_START_TIMEOUT_S = 180.0
_IDLE_WATCH_S = 1.0


class RankSet:
    """Processes of one candidate.

    Args:
        name: Name of the candidate.
        single: Whether it runs on one process.
        settings: Settings of the run.
        folder: Folder for the ranks' output.
        own_network: Whether the ranks have a loopback interface of their own.
    """

    def __init__(self, name: str, *, single: bool, settings: Settings, folder: Path, own_network: bool) -> None:
        self.name = name
        self.world_size = 1 if single else settings.devices
        self._logs = [folder / f"{name.replace('/', '_')}.{rank}.log" for rank in range(self.world_size)]
        self._processes: list[Any] = []
        self._connections: list[Connection] = []
        self._settings = settings
        shared = {"GLOO_SOCKET_IFNAME": "lo"} if own_network else {}
        if not single:
            shared |= {"WORLD_SIZE": str(self.world_size), "NODE_RANK": "0", "GROUP_RANK": "0"}
            shared |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        for rank, log in enumerate(self._logs):
            here, there = multiprocessing.Pipe()
            harness_ends.append(here)
            environment = shared if single else shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            self._processes.append(self._start(there, environment, log))
            there.close()
            self._connections.append(here)

    def _start(self, there: Connection, environment: dict[str, str], log: Path) -> Any:
        """Start a rank that reports to ``there``, and return its process with ``pid``, ``kill()`` and ``join()``."""
        context = multiprocessing.get_context(START_METHOD if self._settings.accelerator == "cpu" else "spawn")
        process = context.Process(target=serve, args=(self.name, self._settings, there, environment, log), daemon=True)
        process.start()
        return process

    def go(self) -> None:
        """Release every rank from its wait."""
        for connection in self._connections:
            # A dead rank is reported by expect().
            with contextlib.suppress(BrokenPipeError):
                connection.send("go")

    def expect(self, event: str, timeout_s: float) -> list[dict[str, Any]]:
        """Return every rank's next report, which must be ``event``.

        Raises:
            RuntimeError: If a rank fails, exits or sends nothing within ``timeout_s``, with its output.
        """
        deadline = time.monotonic() + timeout_s
        answers: dict[int, dict[str, Any]] = {}
        while len(answers) < self.world_size:
            waiting = [self._connections[rank] for rank in range(self.world_size) if rank not in answers]
            ready = wait(waiting, timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                raise self._failure(self._connections.index(waiting[0]), f"not {event} within {timeout_s:.0f} s")
            for connection in ready:
                rank = self._connections.index(connection)
                try:
                    report = connection.recv()
                except EOFError:
                    raise self._failure(rank, f"ended before it was {event}") from None
                if report["event"] != event:
                    raise self._failure(rank, report.get("trace") or f"{report['event']} before {event}")
                answers[rank] = report
        return [answers[rank] for rank in range(self.world_size)]

    def cpu_s(self) -> float:
        """Return the CPU seconds that the ranks have used so far."""
        return sum(machine.process_cpu_s(process.pid) for process in self._processes)

    def close(self) -> None:
        """Kill the remaining processes and close their pipes."""
        for process in self._processes:
            process.kill()
            process.join()
        for connection in self._connections:
            harness_ends.remove(connection)
            connection.close()

    def _failure(self, rank: int, text: str) -> RuntimeError:
        log = self._logs[rank]
        printed = log.read_text(errors="replace")[-3000:] if log.exists() else ""
        return RuntimeError(f"Candidate {self.name}, rank {rank}: {text}\nIts output:\n{printed}")


def measure(
    settings: Settings,
    candidates: dict[str, bool],
    *,
    own_network: bool = False,
    patience_s: float = 0.0,
    limit_s: float = math.inf,
    round_timeout_s: float = 1800.0,
    keep_going: bool = False,
    say: Callable[[str], None] = print,
) -> dict[str, Any]:
    """Run all candidates in turns.

    Args:
        settings: Settings of the run.
        candidates: Names in the order of their turns, and whether each runs on one process.
        own_network: Whether the loopback interface is the ranks' own, see :func:`benchmarks.network.isolate`.
        patience_s: Maximum time to wait before a turn until other programs are idle.
        limit_s: No further round starts after this many seconds of rounds, whatever their planned number.
        round_timeout_s: Timeout of a round.
        keep_going: Whether to continue without a candidate that fails, which ``"failed"`` of ``"run"`` lists.
        say: Called with progress messages.

    Returns:
        Measurements by candidate, and under ``"run"`` the values common to all.

    Raises:
        RuntimeError: If a candidate fails, or with ``keep_going`` if all do.
    """
    run: dict[str, Any] = {"load_before": machine.load_average(), "own_network": own_network, "failed": {}}
    sets: list[RankSet] = []
    gc.freeze()  # keeps garbage collection in a rank from copying the pages it shares with this process
    results: dict[str, Any] = {}

    @contextlib.contextmanager
    def failing(ranks: RankSet) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            sets.remove(ranks)
            ranks.close()
            results.pop(ranks.name, None)
            if not keep_going or not sets:
                raise
            run["failed"][ranks.name] = str(error)
            say(f"{error}\nThe others go on.")

    with tempfile.TemporaryDirectory(prefix="pardist-bench-") as folder:
        try:
            # Start all at once: their imports then overlap where each rank imports for itself.
            for name, single in candidates.items():
                sets.append(
                    RankSet(name, single=single, settings=settings, folder=Path(folder), own_network=own_network)
                )
            for ranks in list(sets):
                with failing(ranks):
                    results[ranks.name] = _set_up(ranks)
                    say(f"{ranks.name}: set up in {results[ranks.name]['setup_s']:.1f} s")
            run["idle_bytes_per_s"] = _idle_traffic()
            end = time.monotonic() + limit_s
            for number in range(settings.rounds):
                if number and time.monotonic() > end:
                    break
                for ranks in list(sets):
                    quiet = machine.wait_until_quiet(patience_s) if patience_s else None
                    with failing(ranks):
                        turn = _turn(ranks, run["idle_bytes_per_s"], round_timeout_s) | {"waited_for_quiet": quiet}
                        result = results[ranks.name]
                        result["held"], result["peak_bytes"] = turn.pop("held"), turn.pop("peak")
                        result["rounds"].append(turn)
                        median = statistics.median(turn["step_s"])
                        others = turn["foreign_cores"]
                        say(
                            f"round {number + 1}/{settings.rounds} {ranks.name}: {median * 1e3:.1f} ms a step"
                            + (f", others used {others:.2f} cores" if others is not None else "")
                        )
        finally:
            for ranks in sets:
                ranks.close()
    run["load_after"] = machine.load_average()
    return {"run": run, "candidates": results}


def _set_up(ranks: RankSet) -> dict[str, Any]:
    imported = ranks.expect("imported", _START_TIMEOUT_S)
    ranks.go()
    ready = ranks.expect("ready", _START_TIMEOUT_S)
    return {
        "world_size": ranks.world_size,
        "setup_s": max(report["setup_s"] for report in ready),
        "imported_bytes": max(report["resident"] for report in imported),
        "device": ready[0]["device"],
        "rounds": [],
    }


def _turn(ranks: RankSet, idle_bytes_per_s: float | None, timeout_s: float) -> dict[str, Any]:
    own, busy, start = ranks.cpu_s(), machine.busy_cpu_s(), time.perf_counter()
    ranks.go()
    reports = ranks.expect("round", timeout_s)
    took, busy_after = time.perf_counter() - start, machine.busy_cpu_s()
    foreign = None
    if busy is not None and busy_after is not None:
        foreign = max(0.0, (busy_after - busy - (ranks.cpu_s() - own)) / took)
    # A step belongs to all ranks: they pass it together, up to small offsets at its borders.
    step_s = [statistics.fmean(times) for times in zip(*(report["step_s"] for report in reports), strict=True)]
    sent = reports[0]["sent"]
    if sent is not None:
        sent = max(0.0, sent - (idle_bytes_per_s or 0.0) * sum(step_s)) / ranks.world_size / len(step_s)
    return {
        "step_s": step_s,
        "cpu_s_per_rank_and_step": statistics.fmean(report["cpu_s"] for report in reports) / len(step_s),
        "faults_per_rank_and_step": statistics.fmean(report["faults"] for report in reports) / len(step_s),
        "sent_bytes_per_rank_and_step": sent,
        "foreign_cores": foreign,
        "held": max((report["held"] for report in reports), key=lambda held: held["total"]),
        "peak": max(report["peak"] for report in reports),
        "loss": reports[0]["loss"],
        "device_peak": _most(report["device_peak"] for report in reports),
        "device_reserved": _most(report["device_reserved"] for report in reports),
    }


def _most(values: Iterable[int | None]) -> int | None:
    known = [value for value in values if value is not None]
    return max(known) if known else None


def _idle_traffic() -> float | None:
    before = network.loopback_bytes()
    time.sleep(_IDLE_WATCH_S)
    after = network.loopback_bytes()
    return None if before is None or after is None else (after - before) / _IDLE_WATCH_S


def free_port() -> int:
    """Return a free port."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
