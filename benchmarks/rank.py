"""One rank of one candidate: a process that trains a round whenever the harness says so, and waits in between.

[Note: turns] Every candidate's ranks live through the whole run, each in one uninterrupted training. Before a step that
begins a round they stop at the :class:`Gate` until the harness lets them on, and all other candidates' ranks stand at
theirs. So a round costs no start, a drift of the machine's load meets all candidates alike, peak memory is a
candidate's own, and a ``Trainer.fit`` is measured as its user would see it.
"""

from __future__ import annotations

import lightning_pardist  # noqa: F401  (before lightning)

# isort: split
import os
import sys
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks import machine, network
from benchmarks.devices import Clock
from benchmarks.settings import Settings

#: The harness' ends of all pipes so far, which a forked rank inherits and must not hold open.
harness_ends: list[Connection] = []


class Channel:
    """Reports to the harness, and a single word from it.

    Args:
        connection: To the harness.
    """

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def send(self, event: str, **values: Any) -> None:
        """Tell the harness that something has come about."""
        self._connection.send({"event": event, **values})

    def wait(self) -> None:
        """Stand still until the harness says "go"; leave if it is gone."""
        try:
            self._connection.recv()
        except (EOFError, OSError):
            # A rank alone is of no use to anybody, and no collective would end.
            os._exit(3)


class Gate:
    """Where a candidate's training passes before every step; it takes the times and counts the bytes.

    Args:
        settings: Of the run.
        channel: To the harness.
        more: Called at the end of every round for what else is to be reported of it.
    """

    def __init__(
        self, settings: Settings, channel: Channel, *, more: Callable[[], dict[str, Any]] | None = None
    ) -> None:
        self._settings = settings
        self._channel = channel
        self._more = more or dict
        self._index = 0
        self._clock = Clock(settings.accelerator)
        self._loss: Tensor | None = None
        self._sent_before: int | None = None
        self._worked_before = 0.0
        self._faults_before = 0
        self._start = time.perf_counter()

    def before_step(self, held: Callable[[], dict[str, int]]) -> None:
        """Call before every one of :attr:`Settings.total_steps` steps. Collective over the candidate's ranks.

        Args:
            held: Tells the bytes of model states on this rank, with ``num_parameters`` and ``total`` among the keys.
        """
        index, position = self._index, self._index % self._settings.steps_a_round
        self._index += 1
        if index > 0 and position == 0:
            self._close_round(held)
        if position == 0:
            if index == 0:
                self._clock.make_room()
                setup_s = time.perf_counter() - self._start
                self._channel.send("ready", setup_s=setup_s, device=self._clock.device_name)
            self._channel.wait()
        if position == self._settings.warmup:
            _barrier()
            self._sent_before, self._worked_before = network.loopback_bytes(), time.process_time()
            self._faults_before = machine.page_faults()
            self._clock.start()
        elif position > self._settings.warmup:
            self._clock.stamp()

    def took(self, loss: Tensor) -> None:
        """Call after a step with its loss; nothing waits for its value before the round ends."""
        self._loss = loss.detach()

    def _close_round(self, held: Callable[[], dict[str, int]]) -> None:
        step_s = self._clock.stop()
        worked, faults = time.process_time() - self._worked_before, machine.page_faults() - self._faults_before
        # Only when all are here has everything been sent that belongs to the round.
        _barrier()
        sent_after = network.loopback_bytes()
        memory = self._clock.memory()
        self._clock.make_room()
        self._channel.send(
            "round",
            step_s=step_s,
            cpu_s=worked,
            faults=faults,
            held=held(),
            peak=machine.peak_resident_bytes(),
            sent=None if sent_after is None or self._sent_before is None else sent_after - self._sent_before,
            loss=None if self._loss is None else float(self._loss),
            **memory,
            **self._more(),
        )


def _barrier() -> None:
    if dist.is_initialized():
        dist.barrier()


def serve(name: str, settings: Settings, connection: Connection, environment: dict[str, str], log: Path) -> None:
    """A rank's life.

    Args:
        name: Of the candidate.
        settings: Of the run.
        connection: To the harness.
        environment: Who this rank is, in the variables that torchrun sets.
        log: Where to print.
    """
    # A comparison of commits uses the gate alone, beside another version of what candidates import.
    from benchmarks.candidates import find

    for inherited in harness_ends:
        # Else no rank would notice that the harness has ended.
        inherited.close()
    os.environ.update(environment)
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT, 0o600)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
        os.dup2(descriptor, stream.fileno())
    if settings.accelerator == "cpu":
        torch.set_num_threads(1)
    channel = Channel(connection)
    candidate = find(name)
    channel.send("imported", resident=machine.peak_resident_bytes())
    channel.wait()
    try:
        candidate.run(settings, Gate(settings, channel))
    except BaseException:
        channel.send("failed", trace=traceback.format_exc())
    # Another rank may wait for this one in a collective: the harness ends both.
    os._exit(1)
